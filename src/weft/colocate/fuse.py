"""`weft fuse`: a latency-critical kernel and a best-effort job in one kernel, compiled without a GPU, with its proof.

fused.cu            the fused kernel, as it is compiled
rest.cu             the best-effort job alone, from the same work counter: what a fused launch leaves
lc.cu, be0.cu, ...  the kernels by themselves, without their host code
*.sm_80.cubin ...   all of them, compiled
fused.json          launch, parameters, buffers, resources, times
test.cpp            a program that runs both forms on a GPU, compares every bit and times them
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.colocate.program import program
from weft.colocate.side import Side, shared_memory, side
from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.resources import Resources
from weft.errors import ArtifactError, KernelDeclinedError, OptionError
from weft.generate.cuda.foreign.read import Compile
from weft.generate.cuda.role.fused import BEST_EFFORT_SPILLS, fuse, judge, shapes
from weft.generate.cuda.role.persistent import persistent
from weft.generate.cuda.role.role import RoleSource
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedSource, FusionShape

MOST_SHAPES = 6
"""Shapes that are compiled until one is taken."""
MOST_RATIO = 16.0
ENTRY, REST = "w_fused", "w_rest"
_FACTS = {"sm_90a": "h200", "sm_80": "a100"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of a pair for one architecture."""

    file: str
    arch: str
    entry: str
    """In the cubin."""
    resources: Resources
    cubin: bytes
    symbols: tuple[str, ...]
    """Of the constants, in the cubin."""


@dataclass(slots=True)
class Pair:
    """A fused kernel."""

    sides: tuple[Side, ...]
    fused: FusedSource
    rest: FusedSource
    ratio: float
    limit: int
    """Best-effort blocks that one fused launch may draw."""
    cycles: int
    """How often the job runs beside one launch of the latency-critical kernel."""
    compiled: list[Compiled] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)
    """Architectures for which there is none, and why."""
    seconds: dict[str, float] = field(default_factory=dict)
    measured: Mapping[str, object] | None = None
    """What a search on a GPU came to; None: there was none."""


def fuse_pair(
    lc: Path,
    be: Sequence[Path],
    *,
    ratio: float = 1.0,
    small: bool = False,
    changes: Mapping[str, Mapping[str, object]] | None = None,
) -> Pair:
    """Fuse without search: the first shape that compiles without loss for the latency-critical role.

    `ratio`: best-effort blocks that a fused launch may draw, over those of one cycle of its job. `changes`: name of a
    side (`lc`, `be0`, ...) -> dotted key -> value, over what its file says.

    Raises:
        ManifestError: a kernel.toml cannot be taken [W015].
        KernelDeclinedError: a kernel is no role, or no shape holds both [W205].
        DeviceError: tree-sitter or NVRTC is not installed [W301].
    """
    began = time.perf_counter()
    sides = read_sides(lc, be, ratio=ratio, small=small, changes=changes)
    read = time.perf_counter()
    pair = _fitted(sides, ratio)
    pair.seconds = {"read": read - began, "fuse": time.perf_counter() - read}
    return pair


def read_sides(
    lc: Path,
    be: Sequence[Path],
    *,
    ratio: float,
    small: bool,
    changes: Mapping[str, Mapping[str, object]] | None,
) -> tuple[Side, ...]:
    """Both kernels, as `fuse_pair` takes them, and raises."""
    if not be:
        raise OptionError(option="KERNEL", problem="two files: a latency-critical kernel and a best-effort one")
    if not 0.0 < ratio <= MOST_RATIO:
        raise OptionError(option="--ratio", problem=f"{ratio} is outside of 0 to {MOST_RATIO:g}")
    names = ["lc", *(f"be{i}" for i in range(len(be)))]
    given = changes or {}
    for name in given:
        if name not in names:
            raise OptionError(option="--set", problem=f"{name[:40]!r} is none of {', '.join(names)}")
    facts = profile("h200")
    return tuple(
        side(path, name, facts, small=small, changes=given.get(name, {}))
        for path, name in zip([lc, *be], names, strict=True)
    )


def architectures(sides: Sequence[Side]) -> list[str]:
    """Those that all sides can be compiled for, the strictest first."""
    exact = any(s.source.exact_arch or s.source.capability >= 90 for s in sides)
    return ["sm_90a"] if exact else ["sm_80", "sm_90a"]


def _fitted(sides: tuple[Side, ...], ratio: float) -> Pair:
    """The first shape whose kernel is worth running."""
    targets = architectures(sides)
    sources = [s.source for s in sides[1:]]
    reasons: list[str] = []
    known: Known = {}
    for arch in targets:  # of the smallest GPU first: what fits there fits everywhere
        facts = profile(_FACTS[arch])
        wanted = targets[targets.index(arch) :]
        every = shapes(sides[0].source, sources, facts)
        if not every:
            reasons.append(f"{arch}: {_why_no_shape(sides, facts)}")
        few = tried = 0  # registers of a best-effort thread with which its kernels spill; shapes
        for shape in ordered(sides, every, arch, known):
            if shape.fill_grid or (shape.registers is not None and shape.registers.best_effort <= few):
                continue
            if (tried := tried + 1) > MOST_SHAPES:
                break
            fused = fuse(sides[0].source, sources, shape, entry=ENTRY, facts=facts)
            rest = persistent(sources, ctas=facts.sms, entry=REST, facts=facts)
            if isinstance(fused, Declined) or isinstance(rest, Declined):
                reasons.append(f"{arch}: {(fused if isinstance(fused, Declined) else rest).reason}")  # type: ignore[union-attr]
                continue
            total = sum(fused.stages)
            limit = max(1, round(ratio * total))
            pair = Pair(sides, fused, rest, ratio, limit, max(1, math.ceil(ratio)))
            reason = compile_pair(pair, wanted, known)
            if reason is None:
                lost = reasons[-1] if reasons else "a kernel of the pair uses what GPUs from sm_90a on have alone"
                pair.declined = {a: lost for a in _FACTS if a not in wanted}
                return pair
            reasons.append(f"{arch}: {reason}")
            if shape.registers is not None and reason.endswith(BEST_EFFORT_SPILLS):
                few = shape.registers.best_effort
    raise KernelDeclinedError(
        reason=f"{sides[0].title} and {sides[1].title} cannot share a CTA: {'; '.join(dict.fromkeys(reasons[-3:]))}"
    )


def compile_known(jobs: Sequence[ConfinedJob], known: Known) -> list[ConfinedResult | Declined]:
    """What becomes of texts, each compiled once."""
    missing = list(dict.fromkeys(j for j in jobs if j not in known))
    if missing:
        known.update(zip(missing, compile_confined(missing), strict=True))
    return [known[j] for j in jobs]


def by_itself(one: Side, arch: str) -> ConfinedJob:
    """One of the two kernels; the names that are asked of the compiler begin with its entry."""
    return ConfinedJob(one.text, arch, (one.entry, *(f"&{c.name}" for c in one.constants)))


def ordered(sides: Sequence[Side], every: Sequence[FusionShape], arch: str, known: Known) -> list[FusionShape]:
    """Those first that give a best-effort thread the registers which its kernels have by themselves."""
    if len({s.registers.best_effort for s in every if s.registers is not None}) < 2:
        return list(every)
    alone = compile_known([by_itself(s, arch) for s in sides[1:]], known)
    needed = max((r.registers for x in alone if isinstance(x, ConfinedResult) for _, r in x.resources), default=0)
    return sorted(every, key=lambda s: s.registers is not None and s.registers.best_effort < needed + LOOP_REGISTERS)


def _why_no_shape(sides: Sequence[Side], facts: GpuFacts) -> str:
    from weft.generate.cuda.role.fused import lc_role, stages_of

    for found in (lc_role(sides[0].source), stages_of([s.source for s in sides[1:]])):
        if isinstance(found, Declined):
            return found.reason
    lc = sides[0].source.roles[0]
    most = max(s.source.roles[0].threads for s in sides[1:])
    memory = lc.shared_bytes + max(s.source.roles[0].shared_bytes for s in sides[1:])
    return (
        f"no room in a CTA for {lc.threads} and {most} threads with {memory} bytes of shared memory "
        f"(1024 and {facts.shared_per_block} are possible)"
    )


def compile_pair(pair: Pair, architectures: Sequence[str], known: Known) -> str | None:
    """Compile all kernels of the pair; why the fused one is not taken."""
    texts = _texts(pair)
    jobs = [(file, arch) for arch in architectures for file in texts]
    results = compile_known([ConfinedJob(texts[f][0], arch, texts[f][1]) for f, arch in jobs], known)
    found: list[Compiled] = []
    for (file, arch), result in zip(jobs, results, strict=True):
        if isinstance(result, Declined):
            first = next((x for x in result.reason.splitlines() if "error" in x), result.reason[:200])
            return f"{file} does not compile for {arch}: {first[:300]}"
        found.append(_entry_of(file, arch, result))
        if file == "fused":
            reason = judged(pair.sides[0].source, pair.fused, result, arch, profile(_FACTS[arch]))
            if reason is not None:
                return reason
    pair.compiled = found
    return None


def judged(
    lc: RoleSource, fused: FusedSource, result: ConfinedResult, arch: str, facts: GpuFacts,
    compiler: Compile = compile_confined,
) -> str | None:  # fmt: skip
    """Why a compiled fused kernel is not taken; None: it is."""
    resources = dict(result.resources)[fused.entry]
    for line in result.warnings:
        if "(C7510)" in line or "(C7602)" in line:
            return f"wgmma is serialised ({arch})"
    spills = None
    if resources.spill_stores + resources.spill_loads and fused.shape is not None:
        alone = fuse(lc, (), fused.shape, entry=fused.entry, facts=facts)
        if not isinstance(alone, Declined):
            (one,) = compiler([ConfinedJob(alone.text, arch)])
            if isinstance(one, ConfinedResult):
                own = dict(one.resources)[fused.entry]
                spills = own.spill_stores + own.spill_loads
    found = judge(fused, resources, facts, spills)
    return None if found is None else found.reason


def constant_names(sides: Sequence[Side]) -> tuple[str, ...]:
    """Constants of some sides in a kernel of roles, as the compiler is asked for them."""
    return tuple(f"&w_{one.name}::{c.symbol}" for one in sides for c in one.constants)


def _texts(pair: Pair) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of a file -> text and the names that are asked of the compiler, the entry first."""
    found = {
        "fused": (pair.fused.text, (ENTRY, *constant_names(pair.sides))),
        "rest": (pair.rest.text, (REST, *constant_names(pair.sides[1:]))),
    }
    for one in pair.sides:
        job = by_itself(one, "")
        found[one.name] = (job.text, job.names)
    return found


def _entry_of(file: str, arch: str, result: ConfinedResult) -> Compiled:
    entry = result.names[0]
    return Compiled(file, arch, entry, dict(result.resources)[entry], result.code, result.names[1:])


def write(pair: Pair, folder: Path) -> None:
    """Write the folder of a pair.

    Raises:
        ArtifactError: it cannot be written [W401].
    """
    buffers, means = shared_memory(pair.sides)
    texts = _texts(pair)
    copied = {b.name: b.file for b in buffers.values() if b.file is not None}
    copied |= {c.data.name: c.data.file for s in pair.sides for c in s.constants if c.data.file is not None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, (text, _) in texts.items():
            (folder / f"{file}.cu").write_text(text, encoding="utf-8")
        for one in pair.compiled:
            (folder / f"{one.file}.{one.arch}.cubin").write_bytes(one.cubin)
        for name, source in copied.items():
            shutil.copyfile(source, folder / f"{name}.bin")
        (folder / "test.cpp").write_text(program(pair.sides, pair.fused, pair.rest, pair.limit, pair.cycles,
                                                 _names(pair), buffers, means), encoding="utf-8")  # fmt: skip
        (folder / "fused.json").write_text(json.dumps(parameters(pair), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArtifactError(
            where=str(folder), problem=f"it cannot be written: {error.strerror}", remedy="choose another place by -o"
        ) from None


def _names(pair: Pair) -> dict[str, tuple[str, tuple[str, ...]]]:
    """File -> entry and symbols in its cubins; they are the same for each architecture."""
    return {x.file: (x.entry, x.symbols) for x in pair.compiled}


def parameters(pair: Pair) -> dict[str, object]:
    """A pair as JSON."""
    buffers, means = shared_memory(pair.sides)
    names = ["lc", *(s.name for s in pair.sides[1:])]
    listed = []
    for p in pair.fused.parameters:
        whose = "job" if p.role < 0 else names[p.role]
        listed.append({"of": whose, "name": p.name, "type": p.type, "argument": _argument(whose, p.argument, means)})
    f = pair.fused
    return {
        "sides": [
            {"name": s.name, "kernel": s.title, "grid": s.grid, "block": s.block, "notes": list(s.notes)}
            for s in pair.sides
        ],
        "ratio": pair.ratio,
        "limit": pair.limit,
        "stages": list(f.stages),
        "launch": {
            "entry": f.entry, "grid": f.grid, "block": f.block, "cluster": f.cluster, "shared_bytes": f.shared_bytes,
            "dependent": f.dependent, "parameters": listed,
        },
        "roles": {
            "lc": {"first_thread": f.lc.first_thread, "threads": f.lc.threads, "registers": f.lc.registers},
            "be": [
                {
                    "first_thread": r.first_thread, "threads": r.threads, "registers": r.registers,
                    "barriers": list(r.barriers), "shared_offset": r.shared_offset, "shared_bytes": r.shared_bytes,
                }
                for r in f.be
            ],
        },
        "buffers": {
            n: {"bytes": b.nbytes, "init": b.init, "scalar": b.scalar, "written": b.written, "rtol": b.rtol}
            for n, b in buffers.items()
        },
        "compiled": resources(pair),
        "declined": pair.declined,
        "seconds": {k: round(s, 3) for k, s in pair.seconds.items()},
        **({} if pair.measured is None else {"measured": dict(pair.measured)}),
    }  # fmt: skip


def resources(pair: Pair) -> list[dict[str, object]]:
    """A row for each kernel and architecture."""
    shared = {"fused": pair.fused.shared_bytes, "rest": pair.rest.shared_bytes}
    shared |= {s.name: s.shared_bytes for s in pair.sides}
    return [
        {
            "kernel": x.file, "arch": x.arch, "registers": x.resources.registers,
            "spilled_bytes": x.resources.spill_stores + x.resources.spill_loads,
            "shared_bytes": x.resources.shared_bytes + shared[x.file], "barriers": x.resources.barriers,
        }
        for x in pair.compiled
    ]  # fmt: skip


def _argument(whose: str, argument: object, means: Mapping[tuple[str, str, int], str]) -> object:
    from weft.kernels.source import Inside, Number, Pointer, TensorMap

    if isinstance(argument, Number):
        return {"value": argument.value}
    if isinstance(argument, Pointer):
        return {"buffer": means[whose, argument.kind, argument.index]}
    if isinstance(argument, Inside):
        return {"buffer": means[whose, argument.base.kind, argument.base.index], "offset": argument.bytes}
    if isinstance(argument, TensorMap):
        return {"tensor_map": means[whose, argument.base.kind, argument.base.index]}
    return {"work_counter": True}


LOOP_REGISTERS = 16
"""That the loop of a best-effort role has besides its block's own, about."""
Known = dict[ConfinedJob, ConfinedResult | Declined]
"""What was compiled: of one pair several shapes may be, and most of their texts are the same."""
