"""A best-effort job as a kernel of its own that stays on the GPU: a persistent co-runner.

A few small CTAs, as many as fit beside what else runs, draw the job's blocks from the same work counter as the roles in
fused kernels do (`fused`), so both may work on one job at once. They end when the limit is reached, unless they are to
stay, and when they are told to stop: at the latest when the block under way has ended. A throttle in the counter says
how much of its time a CTA works, and on which multiprocessors, while they run.

A kernel draws single blocks, or chunks of blocks that follow each other, whose number is an argument: one text does for
all chunks. A chunk that is drawn is run to its end; at a stop one more may be drawn before it is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.occupancy import register_need
from weft.generate.cuda.role.fused import (
    BARRIERS,
    CONTROL_BYTES,
    JOB_PARAMETER,
    MOST_THREADS,
    WARP,
    Loop,
    Stage,
    barriers_of,
    block_calls,
    control_bytes,
    fused_header,
    job_text,
    kernel_parameters,
    launch_registers,
    loop_text,
    merged,
    named_parameters,
    parameter_bytes,
    persistent_header,
    shared_of,
    stage_text,
    stages_of,
)
from weft.generate.cuda.role.role import Parameter, RoleSource
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedParameter, FusedRole, FusedSource
from weft.kernels.source import MOST_PARAMETER_BYTES, Number
from weft.sm_budget import SmBudget

_SHARED_UNIT = 128
"""Bytes in which shared memory is given to CTAs."""
_MOST_AT_ONCE = 1 << 24
"""Blocks that all CTAs draw at once: so far may `ticket` come to stand above `end`."""
_CHUNKS_BYTES, _HAND_BYTES = 32, 96
"""Shared memory behind that of the blocks where chunks are drawn: two of them, and what the thread that draws knows."""
_CHUNK, _AHEAD = "w_most", "w_early"
"""Parameters of a kernel that draws chunks: blocks of one, and whether it is drawn while the one before it runs."""


def persistent(
    be: Sequence[RoleSource],
    *,
    ctas: int,
    entry: str = "co_runner",
    threads: int = 0,
    min_ctas_per_sm: int = 0,
    stays: bool = False,
    chunk: int = 1,
    ahead: bool = False,
    facts: GpuFacts | None = None,
) -> FusedSource | Declined:
    """The kernel `entry` of `ctas` CTAs that run the job of the stages `be`. Declines what cannot be.

    `threads`: of a CTA, whole warps; 0: as the largest block. Blocks whose threads do not meet run in CTAs of fewer
    threads, too. `min_ctas_per_sm`: second launch bound, by which the compiler uses fewer registers. `stays`: at the
    limit it waits for a higher one, until it is told to stop. `chunk`: blocks that a CTA draws at once, at most, and
    runs to their end; `ahead`: the next chunk is drawn while the last block of the one before it runs. Neither changes
    the text, but that a kernel that draws single blocks has one of its own.
    """
    facts = facts or GpuFacts()
    stages = stages_of(be)
    if isinstance(stages, Declined):
        return stages
    if not stages:
        return Declined("a job without stages")
    threads = threads or max(s.threads for s in stages)
    least = max((s.threads for s in stages if s.meets), default=WARP)
    if chunk < 1 or max(1, ctas) * chunk > _MOST_AT_ONCE:
        return Declined(f"chunks of {chunk} blocks of {ctas} CTAs: 1 to {_MOST_AT_ONCE} blocks are drawn at once")
    if ahead and chunk == 1:
        return Declined("ahead of chunks of 1 block: the throttle is read before the last block of a chunk")
    if threads % WARP or not WARP <= threads <= MOST_THREADS or ctas < 1:
        return Declined(f"{ctas} CTAs of {threads} threads: whole warps up to {MOST_THREADS} threads are needed")
    if least > threads:
        return Declined(f"best-effort blocks of {least} threads that meet, in CTAs of {threads}")
    if (barriers := barriers_of(stages)) > BARRIERS:
        return Declined(f"{barriers} named barriers in a CTA; there are {BARRIERS}")
    size, _ = shared_of(stages)
    chunks = chunk > 1
    if (whole := size + (_CHUNKS_BYTES + _HAND_BYTES if chunks else control_bytes(1))) > facts.shared_per_block:
        return Declined(f"{whole} bytes of shared memory in a CTA; {facts.shared_per_block} are possible")
    named = named_parameters(stages)
    own = _chunk_parameters(chunk, ahead) if chunks else []
    if (taken := parameter_bytes([*(p for *_, p in named), *own])) > MOST_PARAMETER_BYTES:
        return Declined(f"{taken} bytes of arguments; a kernel takes {MOST_PARAMETER_BYTES}")
    headers = merged(be)
    if isinstance(headers, Declined):
        return headers
    if chunks:
        loop = _chunks_text(Loop(0, threads, 0, 0, size, size, 0), stages, stays)
    else:
        place = Loop(0, threads, 0, 0, size + CONTROL_BYTES, size, 0)
        draw = f"w_draw_paced<w_stages, {str(stays).lower()}>(w_job, hand)"
        loop = loop_text(0, place, stages, draw=draw, hand="w_paced_hand")
    given = "".join([*(f", {p.name}" for p in own), *(f", {x}_{p.name}" for x, _, p in named)])
    most = f", {min_ctas_per_sm}" if min_ctas_per_sm else ""
    declared = "".join(f"{p.declared(kernel=True)}, " for p in own)
    declared += kernel_parameters([(x, p) for x, _, p in named])
    kernel = (
        f'extern "C" __global__ void __launch_bounds__({threads}{most})'
        f" {entry}({declared}) {{\nw_best_effort_0(w_job{given});\n}}\n"
    )
    texts = [job_text(stages), *(stage_text(k, s, len(stages) > 1) for k, s in enumerate(stages)), loop, kernel]
    registers = launch_registers(threads, min_ctas_per_sm, facts)
    return FusedSource(
        text="".join([*headers, fused_header(), persistent_header(chunks=chunks), *texts]),
        entry=entry,
        grid=(ctas, 1, 1),
        threads=threads,
        shared_bytes=whole,
        dependent=False,
        parameters=(
            *(FusedParameter(0, p.name, p.type, p.argument) for p in own),
            *(FusedParameter(k, p.name, p.type, p.argument) for _, k, p in named),
            JOB_PARAMETER,
        ),
        lc=FusedRole(0, 0, (), 0, 0, 0),
        be=(FusedRole(0, threads, tuple(range(barriers)), 0, size, registers),),
        stages=tuple(s.blocks for s in stages),
        shape=None,
        registers_asked=0,
        capability=max(s.capability for s in be),
        exact_arch=any(s.exact_arch for s in be),
        flags=tuple(dict.fromkeys(f for s in be for f in s.flags)),
    )


def _chunk_parameters(chunk: int, ahead: bool) -> list[Parameter]:
    return [
        Parameter(name, Number(value), "const unsigned long long")
        for name, value in ((_CHUNK, chunk), (_AHEAD, int(ahead)))
    ]


def _chunks_text(at: Loop, stages: Sequence[Stage], stays: bool) -> str:
    """The function of the role: chunks one after another, and in each its blocks.

    Between two blocks of a chunk all threads meet only where they share memory or barriers, unless those that leave
    such a block early have met by then. At `drawn` there is room for two chunks: the one that runs, and the next.
    """
    parameters = "".join(
        f", {Parameter(f'{x}_{p.name}', p.argument, p.type).declared(kernel=False)}"
        for x, _, p in named_parameters(stages)
    )
    barrier = f"w_barrier<{at.barrier}, {at.threads}>();"
    draw = f"w_draw_chunk<w_stages, {str(stays).lower()}>(w_job, hand, flight, (unsigned){_CHUNK})"
    meeting = [k for k, s in enumerate(stages) if s.meets and not s.leaves]
    meets = " || ".join(f"stage == {k}u" for k in meeting)
    between = barrier if len(meeting) == len(stages) else f"if ({meets}) {barrier}"
    last = "w_seen(&drawn[turn ^ 1u].last)"
    told = "".join(f", const unsigned long long {name}" for name in (_CHUNK, _AHEAD))
    lines = [
        f"W_FN void w_best_effort_0(w_work* const w_job{told}{parameters}) {{",
        "W_DYNAMIC(w_memory);",
        f"w_drawn_chunk* const drawn = (w_drawn_chunk*)(w_memory + {at.drawn});",
        f"const unsigned thread = threadIdx.x - {at.first}u;",
        f"w_chunk_hand& hand = *(w_chunk_hand*)(w_memory + {at.drawn + _CHUNKS_BYTES});",
        f'static_assert(sizeof hand <= {_HAND_BYTES}, "no room for it");',
        "if (thread == 0) hand = w_chunk_hand();",
        "w_chunk_flight flight;",
        "unsigned turn = 0, again = W_AGAIN;",
        "#pragma unroll 1\nfor (;;) {",
        # in the other place: threads may still look at this one
        f"if (again == W_AGAIN) {{ turn ^= 1u; if (thread == 0) drawn[turn] = {draw}; {barrier} }}",
        "if (drawn[turn].stage == W_NONE) break;",
        "unsigned block = drawn[turn].block;",
        "turn ^= 1u;",
        "#pragma unroll 1\nfor (;;) {",
        f"if (thread == 0) w_before(w_job, hand, flight, {last} - block - 1u, (unsigned){_CHUNK}, {_AHEAD} != 0);",
        *(["const unsigned stage = w_seen(&drawn[turn ^ 1u].stage);"] if len(stages) > 1 else []),
        *block_calls(at, stages),
        f"if (++block == {last}) break;",
        *([between] if meeting else []),
        "}",
        "if (thread == 0) drawn[turn] = w_next_chunk<w_stages>(w_job, hand, flight);",
        # all that the chunk wrote is there, and its shared memory free
        barrier,
        "if (thread == 0) w_finish_chunk<w_stages>(w_job, hand, drawn[turn ^ 1u].last - drawn[turn ^ 1u].block);",
        "again = drawn[turn].stage;",
        "}",
        "}",
    ]
    return "\n".join(lines) + "\n"


def needs(source: FusedSource, registers: int, shared_bytes: int, ctas_per_sm: int, facts: GpuFacts) -> SmBudget:
    """What so many resident CTAs of a compiled kernel take of a multiprocessor.

    `registers`, `shared_bytes`: of a thread, and static of a CTA, as the assembler reports them.
    """
    shared = -(-(source.shared_bytes + shared_bytes) // _SHARED_UNIT) * _SHARED_UNIT + facts.shared_reserved
    return SmBudget(
        registers=ctas_per_sm * register_need(source.threads, registers),
        shared_bytes=ctas_per_sm * shared,
        threads=ctas_per_sm * source.threads,
        ctas=ctas_per_sm,
    )
