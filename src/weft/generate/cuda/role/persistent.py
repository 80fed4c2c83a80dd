"""A best-effort job as a kernel of its own that stays on the GPU: a persistent co-runner.

A few small CTAs, as many as fit beside what else runs, draw the job's blocks from the same work counter as the roles in
fused kernels do (`fused`), so both may work on one job at once. They end when the limit is reached, unless they are to
stay, and when they are told to stop: at the latest when the block under way has ended. A throttle in the counter says
how much of its time a CTA works, and on which multiprocessors, while they run.
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
    barriers_of,
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
from weft.generate.cuda.role.role import RoleSource
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedParameter, FusedRole, FusedSource
from weft.kernels.source import MOST_PARAMETER_BYTES
from weft.sm_budget import SmBudget

_SHARED_UNIT = 128
"""Bytes in which shared memory is given to CTAs."""


def persistent(
    be: Sequence[RoleSource],
    *,
    ctas: int,
    entry: str = "co_runner",
    threads: int = 0,
    min_ctas_per_sm: int = 0,
    stays: bool = False,
    facts: GpuFacts | None = None,
) -> FusedSource | Declined:
    """The kernel `entry` of `ctas` CTAs that run the job of the stages `be`. Declines what cannot be.

    `threads`: of a CTA, whole warps; 0: as the largest block. Blocks whose threads do not meet run in CTAs of fewer
    threads, too. `min_ctas_per_sm`: second launch bound, by which the compiler uses fewer registers. `stays`: at the
    limit it waits for a higher one, until it is told to stop.
    """
    facts = facts or GpuFacts()
    stages = stages_of(be)
    if isinstance(stages, Declined):
        return stages
    if not stages:
        return Declined("a job without stages")
    threads = threads or max(s.threads for s in stages)
    least = max((s.threads for s in stages if s.meets), default=WARP)
    if threads % WARP or not WARP <= threads <= MOST_THREADS or ctas < 1:
        return Declined(f"{ctas} CTAs of {threads} threads: whole warps up to {MOST_THREADS} threads are needed")
    if least > threads:
        return Declined(f"best-effort blocks of {least} threads that meet, in CTAs of {threads}")
    if (barriers := barriers_of(stages)) > BARRIERS:
        return Declined(f"{barriers} named barriers in a CTA; there are {BARRIERS}")
    size, _ = shared_of(stages)
    if (whole := size + control_bytes(1)) > facts.shared_per_block:
        return Declined(f"{whole} bytes of shared memory in a CTA; {facts.shared_per_block} are possible")
    named = named_parameters(stages)
    if (taken := parameter_bytes([p for *_, p in named])) > MOST_PARAMETER_BYTES:
        return Declined(f"{taken} bytes of arguments; a kernel takes {MOST_PARAMETER_BYTES}")
    headers = merged(be)
    if isinstance(headers, Declined):
        return headers
    place = Loop(0, threads, 0, 0, size + CONTROL_BYTES, size, 0)
    draw = f"w_draw_paced<w_stages, {str(stays).lower()}>(w_job, hand)"
    given = "".join(f", {x}_{p.name}" for x, _, p in named)
    most = f", {min_ctas_per_sm}" if min_ctas_per_sm else ""
    kernel = (
        f'extern "C" __global__ void __launch_bounds__({threads}{most})'
        f" {entry}({kernel_parameters([(x, p) for x, _, p in named])}) {{\nw_best_effort_0(w_job{given});\n}}\n"
    )
    texts = [job_text(stages), *(stage_text(k, s, len(stages) > 1) for k, s in enumerate(stages))]
    texts += [loop_text(0, place, stages, draw=draw, hand="w_paced_hand"), kernel]
    registers = launch_registers(threads, min_ctas_per_sm, facts)
    return FusedSource(
        text="".join([*headers, fused_header(), persistent_header(), *texts]),
        entry=entry,
        grid=(ctas, 1, 1),
        threads=threads,
        shared_bytes=whole,
        dependent=False,
        parameters=(*(FusedParameter(k, p.name, p.type, p.argument) for _, k, p in named), JOB_PARAMETER),
        lc=FusedRole(0, 0, (), 0, 0, 0),
        be=(FusedRole(0, threads, tuple(range(barriers)), 0, size, registers),),
        stages=tuple(s.blocks for s in stages),
        shape=None,
        registers_asked=0,
        capability=max(s.capability for s in be),
        exact_arch=any(s.exact_arch for s in be),
        flags=tuple(dict.fromkeys(f for s in be for f in s.flags)),
    )


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
