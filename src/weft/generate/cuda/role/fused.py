"""Several roles in one CTA: a latency-critical kernel (LC), and best-effort roles (BE) that draw blocks beside it.

LC's text is as it is in a kernel of its own. Its frame differs: its barriers are named ones of its own threads, and
registers move by other numbers. BE roles are loops: a thread draws the number of a virtual block from the work counter,
all threads of the role run it, until the counter is used up, LC's role of this CTA has ended, or the job is told to
stop. BE depends on no kernel before, so it also runs while LC waits for these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.resources import MAX_SPILL_BYTES, Resources
from weft.generate.cuda.role.assemble import frame_of, shared
from weft.generate.cuda.role.role import DeviceRole, Parameter, RoleSource
from weft.ir.declined import Declined
from weft.kernels.colocation import (
    JOB,
    FusedParameter,
    FusedRole,
    FusedSource,
    FusionShape,
    Place,
    RoleRegisters,
)
from weft.kernels.source import MOST_PARAMETER_BYTES, TensorMap

WARP, WARPGROUP = 32, 128
PARTITIONS = 4
"""Of a multiprocessor, each with schedulers and registers of its own."""
BARRIERS = 16
"""Named barriers of a CTA."""
MOST_THREADS = 1024
_LEAST_MOVED, _MOST_MOVED = 24, 256
"""Registers that setmaxnreg takes, in multiples of 8."""
_MOST_BLOCKS = 1 << 31
CONTROL_BYTES = 16
"""At the end of the CTA's shared memory: warps of LC that have ended, clocks of its begin; then what each BE role has
drawn."""
DRAWN_BYTES = 16
"""Two blocks: the one that runs, and the one after it."""
CLUSTER_BYTES = 16
"""Behind these, of LC roles in clusters: two barriers at which their threads meet."""
_STATIC = re.compile(r"\b(W_SHARED|__shared__)\b")
_WGMMA = re.compile(r"\bwgmma\.mma_async\.[\w.]*\.m64n(\d+)k")
_PAST_CACHES = re.compile(r"ld\.global(\.\w+)*\.nc\b|\btex[123]D|\btex\.")
_CLUSTER_MEETS = re.compile(r"(?<!void )\bw_cluster_(sync|leave|arrive|wait)\(")
"""Where the threads of a cluster meet; in a header such a place is not LC's own, unless the function has the role."""
_ARRIVES = "w_cluster_arrive("
_HAS_ROLE = re.compile(r"\bRole role\b")
_MEETS = re.compile(r"\b(sync|any|count|w_any|w_count|named_barrier\w*)\b")
"""What a text names whose threads meet; a name too many only keeps its blocks whole."""
BEST_EFFORT_SPILLS = " by best-effort roles"
"""How the reason ends where these alone spill: with more registers they may not."""
_BEST_EFFORT_REGISTERS = (40, 56, 80, 104, 128, 152)


@cache
def fused_header() -> str:
    """Text of weft_cuda_fused.h, which stands behind the role's."""
    return _text("fused")


def _text(name: str) -> str:
    return Path(__file__).with_name(f"weft_cuda_{name}.h").read_text(encoding="utf-8")


@cache
def trace_header() -> str:
    """What stands behind that one in kernels that record when their roles ran."""
    return _text("timer") + _text("trace")


@lru_cache(maxsize=2)
def persistent_header(*, chunks: bool = False) -> str:
    """What stands behind that one in a co-runner; `chunks`: in one that draws several blocks at once, too."""
    return _text("timer") + _text("persistent") + (_text("chunks") if chunks else "")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the kernels of a BE job."""

    source: int
    """Position among the BE sources."""
    role: DeviceRole

    @property
    def blocks(self) -> int:
        """Of its virtual grid."""
        return math.prod(self.role.grid)

    @property
    def threads(self) -> int:
        """In whole warps."""
        return -(-self.role.threads // WARP) * WARP

    @property
    def meets(self) -> bool:
        """Whether threads of a block meet, or share memory: then all of them run at once."""
        return self.role.shared_bytes > 0 or _MEETS.search(self.role.body + self.role.globals) is not None

    @property
    def leaves(self) -> bool:
        """Whether threads may leave before a barrier: those that fill the last warp are not there at all."""
        return self.meets and (self.role.early_return or self.role.threads % WARP > 0)


def stages_of(be: Sequence[RoleSource]) -> tuple[Stage, ...] | Declined:
    """The stages of a job, one for each launch of its kernels, or why they cannot be BE roles."""
    found = [Stage(number, role) for number, source in enumerate(be) for role in source.launched]
    for s in found:
        role = s.role
        for wrong, reason in (
            (math.prod(role.cluster) > 1, "a best-effort role of clusters: its blocks are drawn one by one"),
            (role.co_resident > 1, "a best-effort role whose CTAs spin on each other: its blocks are drawn one by one"),
            (role.registers is not None, "a best-effort role that moves registers itself"),
            (s.blocks >= _MOST_BLOCKS, f"a best-effort grid of {s.blocks} blocks; less than 2^31 are counted"),
            (s.threads > MOST_THREADS or role.threads < 1, f"a best-effort block of {role.threads} threads"),
            (
                _STATIC.search(role.body + role.globals) is not None,
                "a best-effort role with static shared memory: it is to lie in its part of the dynamic one",
            ),
            (
                len(found) > 1 and _PAST_CACHES.search(role.body + role.globals) is not None,
                "a stage that reads past the coherent caches (ld.global.nc) what another stage may write",
            ),
            (s.leaves and role.named_barriers > 0, "a best-effort role whose threads leave named barriers"),
        ):
            if wrong:
                return Declined(reason)
    return tuple(found)


def by_role(header: str) -> str | Declined:
    """A header whose functions ask their role to meet the threads of its cluster, where they did so themselves.

    In a kernel of its own such a function is as it stands; declined where one has no role to ask, or leaves.
    """

    def asked(found: re.Match[str]) -> str:
        at = header.rfind("W_FN ", 0, found.start())
        if found[1] not in ("sync", "wait") or at < 0 or not _HAS_ROLE.search(header[at : header.find("{", at)]):
            raise ValueError(found[0])
        return f"role.cluster_{found[1]}("

    try:
        return _CLUSTER_MEETS.sub(asked, header)
    except ValueError:
        reason = "a latency-critical role whose clusters meet in functions of a header, which wait for all threads"
        return Declined(reason)


def of_launch(source: RoleSource, number: int) -> RoleSource:
    """One launch of a source of several, to be LC of a fused kernel: the longest, since it has most room for BE.

    The others run as they are, before and behind it (`bind_fused.among`), on the same buffers.

    Raises:
        ValueError: the source has no such launch.
    """
    if not 0 <= number < len(source.launched):
        raise ValueError(f"launch {number} of {len(source.launched)}")
    return replace(source, roles=(source.launched[number],), order=())


def lc_role(lc: RoleSource) -> DeviceRole | Declined:
    """The role of an LC source, or why it can have none beside it."""
    if len(lc.roles) != 1:
        return Declined(f"a latency-critical source of {len(lc.roles)} launches: fuse one of them (`of_launch`)")
    (role,) = lc.roles
    if math.prod(role.cluster) > 1:
        for header in lc.headers:
            if isinstance(found := by_role(header), Declined):
                return found
    if role.early_return:
        return Declined("a latency-critical role whose threads leave before barriers")
    if role.threads % WARP:
        return Declined(f"a latency-critical role of {role.threads} threads, which are no whole warps")
    return role


def launch_registers(threads: int, min_ctas_per_sm: int, facts: GpuFacts) -> int:
    """Registers of a thread at launch, at most: what launch bounds leave of the register file, in steps of 8.

    Each of the four partitions of a multiprocessor has a quarter of the file for its warps: 17 warps leave each as much
    as 20 do.
    """
    warps = -(-threads // WARP) * max(1, min_ctas_per_sm)
    of_partition = -(-warps // PARTITIONS) * WARP
    return min(255, facts.registers_per_sm // PARTITIONS // of_partition // 8 * 8)


def wgmma_registers(lc: RoleSource) -> int:
    """Registers of a thread at launch without which the assembler refuses a source (C7602); 0: any number will do.

    Half the columns of its widest product by warpgroups, and 26: what NVRTC 13.0 asks for with 96 to 256 columns.
    """
    columns = [int(n) for text in (*lc.headers, *(r.globals for r in lc.roles)) for n in _WGMMA.findall(text)]
    return max(columns) // 2 + 26 if columns else 0


def control_bytes(replicas: int, cluster: int = 1) -> int:
    """Shared memory of a CTA for the draws of so many BE roles, and for LC in clusters of so many CTAs."""
    return CONTROL_BYTES + DRAWN_BYTES * replicas + (CLUSTER_BYTES if cluster > 1 else 0)


def shared_of(stages: Sequence[Stage]) -> tuple[int, int]:
    """(bytes, alignment) of a BE role's shared memory, that of the largest stage."""
    alignment = max((s.role.shared_alignment for s in stages if s.role.shared_bytes), default=16)
    size = max((s.role.shared_bytes for s in stages), default=0)
    return -(-size // alignment) * alignment, alignment


def barriers_of(stages: Sequence[Stage]) -> int:
    """Of a BE role: that of all its threads, a block's own, and its named ones."""
    return 2 + max((s.role.named_barriers for s in stages), default=0)


def first_barrier(lc: DeviceRole) -> int:
    """The first number behind LC's: 0 is the CTA's, 1 LC's `sync()`, its named ones follow."""
    return 2 + lc.named_barriers


def _shared_offset(lc: DeviceRole, stages: Sequence[Stage]) -> int:
    alignment = shared_of(stages)[1]
    return -(-lc.shared_bytes // alignment) * alignment


def _asked(lc: DeviceRole, shape: FusionShape) -> int:
    """Registers of a CTA that its warpgroups ask for."""
    if shape.registers is None:
        return 0
    r = shape.registers
    own = WARPGROUP * r.producer + (lc.threads - WARPGROUP) * r.consumer
    extra = shape.threads * shape.replicas if shape.place == "extra" else 0
    return own + extra * r.best_effort


def ended_warps(lc: DeviceRole) -> int:
    """Warps of LC that have ended once the first has nothing more to do: a producer, when its last loads are under way.

    The idle ones end at once. BE blocks that are drawn before are run while LC's other warps end.
    """
    return lc.idle_threads // WARP + 1


def _end(lc: DeviceRole, shape: FusionShape, facts: GpuFacts) -> str:
    """The type by which BE roles know that LC has ended, or will; empty: when it has in their own CTA."""
    whole = f"w_whole_grid<{lc.grid[0]}u, {grid_of(lc, shape, facts)[0] * shape.replicas}u>"
    end = whole if shape.fill_grid else "w_own_cta"
    return f"w_in_time<{end}>" if shape.in_time else end if shape.fill_grid else ""


def grid_of(lc: DeviceRole, shape: FusionShape, facts: GpuFacts) -> tuple[int, int, int]:
    """CTAs of the fused kernel."""
    return (max(lc.grid[0], facts.sms), 1, 1) if shape.fill_grid else lc.grid


def _surplus(lc: DeviceRole, shape: FusionShape, facts: GpuFacts) -> int:
    """CTAs behind LC's, which have BE roles alone."""
    return grid_of(lc, shape, facts)[0] - lc.grid[0]


def threads_of(lc: DeviceRole, shape: FusionShape) -> int:
    """Threads of the fused CTA."""
    return lc.threads + (shape.threads * shape.replicas if shape.place == "extra" else 0)


def declined(
    lc: DeviceRole, stages: Sequence[Stage], shape: FusionShape, facts: GpuFacts, wanted: int = 0
) -> Declined | None:
    """Why roles cannot share a CTA in this shape: the proof that threads, barriers, registers and memory suffice.

    `wanted`: registers of a thread at launch that LC cannot do without (`wgmma_registers`).
    """
    extra = shape.place == "extra"
    threads = threads_of(lc, shape)
    block = max((s.threads for s in stages if s.meets), default=0)
    if shape.threads < WARP or shape.threads % WARP or shape.replicas < 1:
        return Declined(f"{shape.replicas} best-effort roles of {shape.threads} threads: whole warps are needed")
    if block > shape.threads:
        return Declined(f"best-effort blocks of {block} threads that meet, in a role of {shape.threads}")
    if threads > MOST_THREADS:
        return Declined(f"{threads} threads in a CTA; {MOST_THREADS} are possible")
    at_launch = launch_registers(threads, shape.min_ctas_per_sm, facts)
    if wanted > at_launch:
        return Declined(
            f"a wgmma that wants {wanted} registers of a thread at launch, where {threads} have {at_launch}"
        )
    if not extra and shape.threads * shape.replicas > lc.idle_threads:
        return Declined(f"{shape.threads * shape.replicas} threads of {lc.idle_threads} idle ones")
    last = shape.barrier + shape.replicas * barriers_of(stages)
    if shape.barrier < first_barrier(lc):
        return Declined(f"best-effort barriers from {shape.barrier} on: those below {first_barrier(lc)} are taken")
    if last > BARRIERS:
        return Declined(f"{last} named barriers in a CTA; there are {BARRIERS}")
    if shape.fill_grid and math.prod(lc.cluster) > 1:
        return Declined("a latency-critical role of clusters: its grid is not filled with CTAs that have none")
    if shape.fill_grid and (lc.grid[0] > facts.sms or lc.grid[1:] != (1, 1)):
        return Declined(
            f"a latency-critical grid of {lc.grid}: to fill one of {facts.sms} CTAs it is one wave of one row"
        )
    size, alignment = shared_of(stages)
    if shape.shared_offset < lc.shared_bytes or shape.shared_offset % alignment:
        return Declined(
            f"best-effort shared memory at {shape.shared_offset}: it lies behind {lc.shared_bytes} bytes,"
            f" aligned to {alignment}"
        )
    whole = shape.shared_offset + size * shape.replicas + control_bytes(shape.replicas, math.prod(lc.cluster))
    if whole > facts.shared_per_block:
        return Declined(f"{whole} bytes of shared memory in a CTA; {facts.shared_per_block} are possible")
    return _registers_declined(lc, shape, threads, facts)


def _registers_declined(lc: DeviceRole, shape: FusionShape, threads: int, facts: GpuFacts) -> Declined | None:
    """Whether the registers that warpgroups ask for are there: asking for more waits forever."""
    r = shape.registers
    if (r is None) != (lc.registers is None):
        return Declined(
            "registers are moved by all warpgroups or by none: the latency-critical role "
            + ("moves them" if r is None else "moves none")
        )
    if r is None:
        return None
    if threads % WARPGROUP or (shape.place == "extra" and shape.threads % WARPGROUP):
        return Declined("registers are moved by whole warpgroups of 128 threads")
    for n in (r.producer, r.consumer, r.best_effort):
        if not _LEAST_MOVED <= n <= _MOST_MOVED or n % 8:
            return Declined(f"{n} registers: setmaxnreg takes multiples of 8 from {_LEAST_MOVED} to {_MOST_MOVED}")
    pool = launch_registers(threads, shape.min_ctas_per_sm, facts) * threads
    if (asked := _asked(lc, shape)) > pool:
        return Declined(
            f"warpgroups ask for {asked} registers of the {pool} that the launch has: they would wait forever"
        )
    return None


def judge(source: FusedSource, found: Resources, facts: GpuFacts, lc_spills: int | None = None) -> Declined | None:
    """Why a compiled fused kernel cannot run, or is not worth running.

    `lc_spills`: bytes that the LC role spills under the same bounds without BE (`fuse(lc, (), shape)`); None: unknown,
    so no spill is taken for BE's.
    """
    if source.registers_asked > (pool := found.registers * source.threads):
        return Declined(f"warpgroups ask for {source.registers_asked} registers, the launch has {pool}")
    if (total := found.shared_bytes + source.shared_bytes) > facts.shared_per_block:
        return Declined(f"{total} bytes of shared memory in a CTA; {facts.shared_per_block} are possible")
    if found.barriers > BARRIERS:
        return Declined(f"{found.barriers} barriers in a CTA")
    spilled = found.spill_stores + found.spill_loads
    if spilled and lc_spills is None:
        return Declined(f"{spilled} bytes of registers spilled per thread")
    if lc_spills:
        return Declined(f"the latency-critical role spills {lc_spills} bytes per thread")
    if spilled > MAX_SPILL_BYTES:
        return Declined(f"{spilled} bytes of registers spilled per thread{BEST_EFFORT_SPILLS}")
    return None


def shapes(lc: RoleSource, be: Sequence[RoleSource], facts: GpuFacts) -> list[FusionShape]:
    """All shapes that can be, those first that leave LC most registers; empty where `fuse` declines them all."""
    role, stages = lc_role(lc), stages_of(be)
    if isinstance(role, Declined) or isinstance(stages, Declined) or not stages:
        return []
    least = max((s.threads for s in stages if s.meets), default=WARP)
    most = max(s.threads for s in stages)
    wanted = wgmma_registers(lc)
    group = WARPGROUP if role.registers is not None else WARP
    found = []
    for replicas in (1, 2, 3, 4):
        # idle warps as many as there are; further ones in steps of two
        idle = min(most, max(least, role.idle_threads // replicas // WARP * WARP))
        sizes: list[tuple[Place, int]] = [("idle", idle)]
        sizes += [("extra", n) for n in _halves(-(-most // group) * group, -(-least // group) * group, group)]
        for place, threads in sizes:
            shape = FusionShape(place, threads, first_barrier(role), _shared_offset(role, stages), replicas)
            every = _with_registers(role, shape, facts)
            every += [replace(one, fill_grid=True) for one in every]
            found += [one for one in every if declined(role, stages, one, facts, wanted) is None]
    return sorted(
        found, key=lambda s: (-(s.registers.consumer if s.registers else 0), -s.threads, s.replicas, s.fill_grid)
    )


def _halves(most: int, least: int, group: int) -> list[int]:
    """`most`, and halves of it in whole groups, down to `least`."""
    found = [most]
    while (half := found[-1] // 2 // group * group) >= least and half > 0:
        found.append(half)
    return found


def _with_registers(lc: DeviceRole, shape: FusionShape, facts: GpuFacts) -> list[FusionShape]:
    """The shape with each split of registers that leaves LC's consumers at least half of theirs."""
    threads = threads_of(lc, shape)
    resident = lc.min_ctas_per_sm
    if resident > 1:  # as many as leave a thread of LC the registers that it had
        resident = max(1, resident * lc.threads // threads)
    if lc.registers is None:
        # without a bound the assembler is free, and sometimes spills for the sake of more CTAs than anybody asked for
        return [_with(shape, None, resident), *([] if resident else [_with(shape, None, 1)])]
    pool = launch_registers(threads, resident, facts) * threads
    found = []
    consumers = lc.threads - WARPGROUP
    for registers in _BEST_EFFORT_REGISTERS:
        producer = registers if shape.place == "idle" else _LEAST_MOVED
        extra = registers * shape.threads * shape.replicas if shape.place == "extra" else 0
        consumer = (pool - WARPGROUP * producer - extra) // consumers // 8 * 8
        if 2 * consumer >= lc.registers.consumer:
            found.append(_with(shape, RoleRegisters(producer, min(consumer, 240), registers), resident))
    return found


def _with(shape: FusionShape, registers: RoleRegisters | None, resident: int) -> FusionShape:
    return FusionShape(
        shape.place, shape.threads, shape.barrier, shape.shared_offset, shape.replicas, registers, resident
    )


def fuse(
    lc: RoleSource,
    be: Sequence[RoleSource],
    shape: FusionShape,
    *,
    entry: str = "fused",
    facts: GpuFacts | None = None,
    spans: int = 0,
) -> FusedSource | Declined:
    """The kernel `entry`: the role of `lc`, and in its CTAs BE roles that run the job of the stages `be`.

    Without stages the kernel is LC's alone in the frame and with the bounds of the fused one. Parameters: LC's, those
    of each stage, the work counter (`WorkCounter`). Declines what cannot be, with its reason.

    `spans`: that the kernel records of its roles, behind the work counter (`weft.kernels.sm_timeline`); 0: none, and
    nothing of its text is there for it.
    """
    facts = facts or GpuFacts()
    role, stages = lc_role(lc), stages_of(be)
    if isinstance(role, Declined):
        return role
    if isinstance(stages, Declined):
        return stages
    wrong = declined(role, stages, shape, facts, wgmma_registers(lc))
    if wrong is not None:
        return wrong
    threads = threads_of(role, shape)
    named = [("lc", 0, p) for p in role.parameters] + named_parameters(stages)
    if (size := parameter_bytes([p for *_, p in named])) > MOST_PARAMETER_BYTES:
        return Declined(f"{size} bytes of arguments; a kernel takes {MOST_PARAMETER_BYTES}")
    size, _ = shared_of(stages)
    end = shape.shared_offset + size * shape.replicas
    first = role.threads if shape.place == "extra" else role.threads - role.idle_threads
    at_launch = launch_registers(threads, shape.min_ctas_per_sm, facts)
    held = shape.registers.best_effort if shape.registers else at_launch
    roles = [
        Loop(
            first=first + r * shape.threads,
            threads=shape.threads,
            barrier=shape.barrier + r * barriers_of(stages),
            shared_offset=shape.shared_offset + r * size,
            drawn=end + CONTROL_BYTES + DRAWN_BYTES * r,
            ended=end,
            warps=ended_warps(role),
            end=_end(role, shape, facts),
        )
        for r in range(shape.replicas)
    ]
    texts = [_lc_text(role, shape, at_launch, end + control_bytes(shape.replicas), facts)]
    if stages:
        texts += [job_text(stages), *(stage_text(k, s, len(stages) > 1) for k, s in enumerate(stages))]
        texts += [loop_text(k, x, stages, spans=spans) for k, x in enumerate(roles)]
    surplus = _surplus(role, shape, facts)
    texts.append(_kernel_text(entry, role, stages, shape, at_launch, end, roles, surplus, spans))
    headers = merged([lc, *be], by_role if math.prod(role.cluster) > 1 else None)
    if isinstance(headers, Declined):
        return headers
    lc_registers = shape.registers.consumer if shape.registers else at_launch
    return FusedSource(
        text="".join([*headers, fused_header(), *([trace_header()] if spans else []), *texts]),
        entry=entry,
        grid=grid_of(role, shape, facts),
        threads=threads,
        shared_bytes=end + control_bytes(shape.replicas, math.prod(role.cluster)),
        dependent=role.pdl,
        parameters=(*(FusedParameter(k, p.name, p.type, p.argument) for _, k, p in named), JOB_PARAMETER),
        lc=FusedRole(0, role.threads, tuple(range(1, first_barrier(role))), 0, role.shared_bytes, lc_registers),
        be=tuple(
            FusedRole(
                x.first,
                x.threads,
                tuple(range(x.barrier, x.barrier + barriers_of(stages))),
                x.shared_offset,
                size,
                held,
            )
            for x in roles
            if stages
        ),
        stages=tuple(s.blocks for s in stages),
        shape=shape,
        registers_asked=_asked(role, shape),
        co_resident=role.co_resident,
        capability=max(s.capability for s in (lc, *be)),
        exact_arch=any(s.exact_arch for s in (lc, *be)),
        flags=tuple(dict.fromkeys(f for s in (lc, *be) for f in s.flags)),
        cluster=role.cluster,
    )


_WIDE = "#define W_WIDE"


def merged(
    sources: Sequence[RoleSource], change: Callable[[str], str | Declined] | None = None
) -> list[str] | Declined:
    """The header texts of all, each once and as `change` has it: what another one holds comes with that one."""
    if len({any(h.strip() == _WIDE for h in x.headers) for x in sources}) > 1:
        return Declined("indices of 64 bits in one role and of 32 in another")
    every = [h for x in sources for h in x.headers if h and h != fused_header()]
    found = {max((w for w in every if h.strip() in w), key=len): None for h in every}
    texts = [h if change is None else change(h) for h in found]
    told = [h for h in texts if not isinstance(h, Declined)]
    if len(told) < len(texts):
        return next(h for h in texts if isinstance(h, Declined))
    return [h if h.endswith("\n") else f"{h}\n" for h in told]


JOB_PARAMETER = FusedParameter(JOB, "w_job", "w_work*", None)


def named_parameters(stages: Sequence[Stage]) -> list[tuple[str, int, Parameter]]:
    """(prefix of its name in the kernel, role, parameter) of all stages.

    Where there are several, what one reads another may have written in the same launch: no pointer says `__restrict__`,
    which would let the compiler read it past the caches that are coherent. Nor does the text of such a stage
    (`stage_text`), whatever it says in its source.
    """
    found = []
    for k, stage in enumerate(stages):
        for p in stage.role.parameters:
            plain = p if len(stages) == 1 else Parameter(p.name, p.argument, p.type.replace("__restrict__", "").strip())
            found.append((f"be{k}", stage.source + 1, plain))
    return found


def parameter_bytes(parameters: Sequence[Parameter]) -> int:
    """Of the parameters and the work counter's address."""
    at = 8  # the work counter
    for p in parameters:
        size, aligned = (128, 64) if isinstance(p.argument, TensorMap) else (8, 8)
        at = -(-at // aligned) * aligned + size
    return at


def kernel_parameters(named: Sequence[tuple[str, Parameter]]) -> str:
    """The list of a kernel's parameters, the work counter last."""
    texts = [Parameter(f"{prefix}_{p.name}", p.argument, p.type).declared(kernel=True) + ", " for prefix, p in named]
    return "".join(texts) + "w_work* w_job"


def _cluster_of(role: DeviceRole) -> str:
    """Of LC: warps of a CTA and CTAs of a cluster, which meet at barriers of their own."""
    return f"<{role.threads // WARP}u, {math.prod(role.cluster)}u>"


def _lc_text(role: DeviceRole, shape: FusionShape, at_launch: int, barriers: int, facts: GpuFacts) -> str:
    """LC's role in a namespace where `w_solo` is its frame, and registers move by the shape's numbers.

    Its threads of a cluster meet at barriers of their own, which lie at `barriers` in shared memory.
    """
    idle = role.idle_threads if shape.place == "idle" else 0
    moved = ""
    if shape.registers is not None:
        moved = "".join(
            f"template <int> W_FN void w_{name}_registers() {{ {move_registers(to, at_launch)} }}\n"
            for name, to in (("fewer", shape.registers.producer), ("more", shape.registers.consumer))
        )
    wider = _surplus(role, shape, facts)
    columns = f" static W_FN unsigned blocks_x() {{ return w_told({role.grid[0]}u); }} " if wider else ""
    frame, declared = frame_of(role, "w_solo", "lc")
    parameters = "".join(f", {p.declared(kernel=False)}" for p in role.parameters)
    if math.prod(role.cluster) > 1:
        meet = f"W_DYNAMIC(w_memory); ::w_cluster_meet{_cluster_of(role)}(w_memory + {barriers});"
        moved += "".join(f"W_FN void w_cluster_{name}() {{ {meet} }}\n" for name in ("sync", "leave"))
        if _ARRIVES in role.body:
            # all have begun already; a wait is a whole meeting, behind which words of the one before were read, too
            moved += f"W_FN void {_ARRIVES}) {{}}\n"
            columns += "".join(f" static W_FN void cluster_{name}() {{ {meet} }} " for name in ("sync", "wait"))
    return (
        "namespace w_lc {\n"
        f"struct w_solo : w_in_cta<0u, {role.threads}u, 1, {role.named_barriers}, {idle}u> {{{columns}}};\n"
        f"W_BESIDE_IN(w_solo)\n{moved}"
        f"{role.globals}{declared}typedef {frame} frame;\n"
        f"W_FN void run(const frame role{parameters}) {{\n{shared(role)}{role.body}\n}}\n}}\n"
    )


def move_registers(to: int, at_launch: int) -> str:
    """The statement by which a warpgroup comes from the launch's registers to its own."""
    if to == at_launch:
        return ""
    return f"::w_{'more' if to > at_launch else 'fewer'}_registers<{to}>();"


def job_text(stages: Sequence[Stage]) -> str:
    """The type that knows how many blocks each stage has."""
    chain = "".join(f"stage == {k}u ? {s.blocks}u : " for k, s in enumerate(stages))
    total = " || ".join(f"{s.blocks}u != 0u" for s in stages)
    return (
        f"struct w_stages {{\n  static constexpr unsigned stages = {len(stages)};\n"
        f"  static W_FN constexpr bool total() {{ return {total}; }}\n"
        f"  static W_FN constexpr unsigned blocks(unsigned stage) {{ return {chain}0u; }}\n}};\n"
    )


_COHERENT = "#define __restrict__\n#define __restrict\n#define __ldg(p) (*(p))\n"
_AS_BEFORE = "#undef __restrict__\n#undef __restrict\n#undef __ldg\n"
"""Around text whose loads may not go past the coherent caches."""


def stage_text(number: int, stage: Stage, several: bool) -> str:
    """A stage in a namespace: what its role brings, and the function `block`; `several`: there are further stages."""
    role = stage.role
    x, y, z = (max(1, n) for n in role.grid)
    leaves = str(stage.leaves).lower()
    told = f"FIRST, {stage.threads}u, BARRIER, {role.named_barriers}, {leaves}, {x}u, {y}u, {z}u"
    frames = [
        f"template <unsigned FIRST, int BARRIER>\nusing {name} = w_{kind}<{told}>;\n"
        for name, kind in (("frame", "virtual"), ("folded", "folded"))
        if name == "frame" or not stage.meets
    ]
    parameters = "".join(f", {p.declared(kernel=False)}" for _, _, p in named_parameters([stage]))
    return (
        f"{_COHERENT if several else ''}"
        f"namespace w_be{number} {{\n{role.globals}"
        f"{''.join(frames)}"
        f"template <class F> W_FN void block(const F role, unsigned char* const sm{parameters}) {{\n"
        f"(void)sm;\n{role.body}\n}}\n}}\n"
        f"{_AS_BEFORE if several else ''}"
    )


@dataclass(frozen=True, slots=True)
class Loop:
    """Where a BE role stands in a CTA."""

    first: int
    threads: int
    barrier: int
    shared_offset: int
    drawn: int
    """Offset of what its thread has drawn."""
    ended: int
    """Offset of the number of LC's warps that have ended."""
    warps: int
    """Of LC that have ended when drawing does; 0: there is no LC role."""
    end: str = ""
    """The type that says whether LC has ended; empty: when it has in this CTA."""


def block_calls(at: Loop, stages: Sequence[Stage]) -> list[str]:
    """Statements of a BE role that run block `block` of stage `stage`; one for each stage."""
    lines = []
    for k, s in enumerate(stages):
        given = "".join(f", be{k}_{p.name}" for p in s.role.parameters)
        kind = "folded" if s.threads > at.threads else "frame"
        frame = f"w_be{k}::{kind}<{at.first}u, {at.barrier + 1}>"
        place = "block, at" if s.threads > at.threads else "block"
        call = f"w_be{k}::block({frame}({place}), w_memory + {at.shared_offset}{given});"
        if s.threads > at.threads:
            step = f"unsigned at = thread; at < {s.role.threads}u; at += {at.threads}u"
            call = f"\n#pragma unroll 1\nfor ({step}) {call}\n"
        elif s.role.threads < s.threads:
            call = f"if (thread < {s.role.threads}u) {call}"
        if s.leaves:
            call = f"{call} {frame}::leave();"
        if s.threads < at.threads:
            call = f"if (thread < {s.threads}u) {{ {call} }}"
        lines.append(f"if (stage == {k}u) {{ {call} }}" if len(stages) > 1 else call)
    return lines


def loop_text(
    number: int, at: Loop, stages: Sequence[Stage], *, draw: str = "", hand: str = "w_hand", spans: int = 0
) -> str:
    """The function of a BE role: blocks one after another, each drawn while the one before it runs.

    `draw`, `hand`: another way to draw, of one that waits for the end of the block before, and what it knows. `spans`:
    as of `fuse`.
    """
    named = named_parameters(stages)
    parameters = "".join(
        f", {Parameter(f'{x}_{p.name}', p.argument, p.type).declared(kernel=False)}" for x, _, p in named
    )
    ahead = not draw
    end = at.end or "w_own_cta"
    ended = f"(const unsigned*)(w_memory + {at.ended})"
    draw = draw or f"w_draw<w_stages, {at.warps}u, false, {end}>(w_job, hand, {ended})"
    barrier = f"w_barrier<{at.barrier}, {at.threads}>();"
    lines = [
        f"W_FN void w_best_effort_{number}(w_work* const w_job{parameters}) {{",
        "W_DYNAMIC(w_memory);",
        f"w_drawn* const drawn = (w_drawn*)(w_memory + {at.drawn});",
        f"const unsigned thread = threadIdx.x - {at.first}u;",
        f"{hand} hand;",
        *([f"if (thread == 0) {at.end}::begin(w_job, hand);"] if at.end else []),
        *(["unsigned turn = 0, again = W_AGAIN;"] if ahead else []),
        "#pragma unroll 1\nfor (;;) {",
    ]
    if ahead:
        lines += [
            # in the other place: threads of this role may still look at this one
            f"if (again == W_AGAIN) {{ turn ^= 1u; if (thread == 0) drawn[turn] = {draw}; {barrier} }}",
            "const unsigned stage = drawn[turn].stage, block = drawn[turn].block;",
            f"if (stage == W_NONE) {{ if (thread == 0) {end}::end(w_job, hand); break; }}",
            f"const w_ahead<w_stages, {at.warps}u, {end}> ahead(w_job, hand, {ended}, thread == 0);",
            "turn ^= 1u;",
        ]
    else:
        lines += [
            f"if (thread == 0) *drawn = {draw};",
            barrier,
            "const unsigned stage = drawn->stage, block = drawn->block;",
            "if (stage == W_NONE) break;",
        ]
    if spans:
        lines.append("const unsigned long long span_began = w_now();")
    lines += block_calls(at, stages)
    if ahead:
        lines.append("if (thread == 0) drawn[turn] = ahead.found(w_job, hand);")
    lines += [
        # all that the block wrote is there, and its shared memory free
        barrier,
        *(
            [f"if (thread == 0) w_span_ended<{spans}u>(w_job, {number + 1}u, stage, block, span_began);"]
            if spans
            else []
        ),
        "if (thread == 0) w_finish<w_stages>(w_job, hand);",
        *([f"if (thread == 0) {end}::ran(hand);"] if ahead else []),
        *(["again = drawn[turn].stage;"] if ahead else []),
        "}",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _kernel_text(
    entry: str,
    role: DeviceRole,
    stages: Sequence[Stage],
    shape: FusionShape,
    at_launch: int,
    ended: int,
    roles: Sequence[Loop],
    surplus: int,
    spans: int = 0,
) -> str:
    """The entry: LC's warps count themselves out, so that the BE roles of the CTA see when all have ended."""
    named = [("lc", p) for p in role.parameters] + [(x, p) for x, _, p in named_parameters(stages)]
    own = "".join(f", lc_{p.name}" for p in role.parameters)
    given = "".join(f", {x}_{p.name}" for x, _, p in named_parameters(stages))
    most = f", {shape.min_ctas_per_sm}" if shape.min_ctas_per_sm else ""
    told = [f"if (now == {ended_warps(role)}u) w_tell(&w_job->lc_ended);"] if shape.fill_grid else []
    if shape.in_time:
        took = "w_poke(&w_job->lc_clocks, (unsigned)w_now() - w_seen(ended + 1))"
        told.append(f"if (now == {role.threads // WARP}u) {took};")
    if spans:
        ran = f"w_span_ended<{spans}u>(w_job, 0u, 0u, 0u, *(const volatile unsigned long long*)(ended + 2))"
        told.append(f"if (now == {role.threads // WARP}u) {ran};")
    count = "w_warp_ended(ended);" if not told else f"const unsigned now = w_warp_ended(ended); {' '.join(told)}"
    latency = f"w_lc::run(w_lc::frame(){own}); {count}"
    begin = "if (threadIdx.x == 0) *ended = 0u;"
    if surplus:
        begin = f"if (threadIdx.x == 0) *ended = blockIdx.x < {role.grid[0]}u ? 0u : {ended_warps(role)}u;"
        extra = shape.place == "extra" and shape.registers is not None
        absent = "w_release();" + (move_registers(_LEAST_MOVED, at_launch) if extra else "")
        latency = f"if (blockIdx.x < {role.grid[0]}u) {{ {latency} }} else {{ {absent} }}"
    calls = [
        f"if (threadIdx.x >= {x.first}u && threadIdx.x < {x.first + x.threads}u) w_best_effort_{k}(w_job{given});"
        for k, x in enumerate(roles)
        if stages
    ]
    if shape.place == "idle":
        body = [latency, *calls]
    else:
        moved = move_registers(shape.registers.best_effort, at_launch) if shape.registers is not None else ""
        body = [f"if (threadIdx.x < {role.threads}u) {{ {latency} }} else {{", moved, *calls, "}"]
    bounds = f"__launch_bounds__({threads_of(role, shape)}{most})"
    lines = [
        f'extern "C" __global__ void {bounds} {entry}({kernel_parameters(named)}) {{',
        "W_DYNAMIC(w_whole);",
        f"unsigned* const ended = (unsigned*)(w_whole + {ended});",
        begin,
        *(["if (threadIdx.x == 0) ended[1] = (unsigned)w_now();"] if shape.in_time else []),
        *(["if (threadIdx.x == 0) *(unsigned long long*)(ended + 2) = w_now();"] if spans else []),
        f"w_cluster_begin{_cluster_of(role)}(w_whole + {ended + control_bytes(shape.replicas)});"
        if math.prod(role.cluster) > 1
        else "w_all_threads();",
        *body,
        "}",
    ]
    return "\n".join(x for x in lines if x) + "\n"
