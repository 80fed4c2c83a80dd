"""A `.cu` file and its `kernel.toml` as a role: cut, refused or wrapped, and judged by the compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.generate.cuda.foreign import patience
from weft.generate.cuda.foreign.cut import Cut, cut
from weft.generate.cuda.foreign.manifest import Manifest
from weft.generate.cuda.foreign.patience import ImpatientError, limited
from weft.generate.cuda.foreign.probe import probe_text
from weft.generate.cuda.foreign.refuse import judge_ptx, refuse
from weft.generate.cuda.foreign.unit import unit
from weft.generate.cuda.foreign.wrap import (
    UNIT,
    Wrapped,
    argument_names,
    foreign_header,
    place,
    role_text,
    wrap,
)
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.role.fused import fused_header
from weft.generate.cuda.role.role import READ, WRITTEN, DeviceRole, Parameter, RoleSource
from weft.ir.declined import Declined
from weft.kernels.source import CudaArgument, Number, Pointer, Schedule

JUDGED = ("compute_80", "compute_90a")
"""Architectures whose PTX is looked at."""
Compile = Callable[[Sequence[ConfinedJob]], list[ConfinedResult | Declined]]
_WORDS = "unsigned long long"
_MESSAGE = re.compile(
    rf"{UNIT}\((\d+)\): (?:catastrophic )?error: (.*)|{UNIT}\((\d+)\): (?:fatal )?error(?: #\d+-?\w*)?: (.*)"
)
_OTHER = re.compile(r"(?:^|\n)(?:[\w.]+\(\d+\): )?(?:catastrophic |fatal )?error[^:\n]*: ([^\n]*)")


@dataclass(frozen=True, slots=True)
class ForeignRole:
    """A kernel of others as a role."""

    manifest: Manifest
    source: RoleSource
    """One role: one virtual block."""
    original: str
    """The kernel as it lies, with what it needs and nothing else: for a launch by itself."""
    symbols: tuple[str, ...]
    """Variables that the host fills before a launch, and those of `state`, as the role's text has them."""
    form: int
    """Of its barriers: see weft_cuda_foreign.h; from 1 on threads may leave before a barrier."""
    static_shared_bytes: int
    notes: tuple[str, ...]
    """What was assumed."""

    @property
    def role(self) -> DeviceRole:
        """The role."""
        return self.source.roles[0]


def read(
    manifest: Manifest, name: str = "w_foreign", *, compiler: Compile = compile_confined
) -> ForeignRole | Declined:
    """The kernel of a manifest as a role whose text stands in the namespace `name`.

    A decline begins with file and line.

    Raises:
        DeviceError: tree-sitter or NVRTC is not installed [W301].
    """
    made = _wrapped(manifest)
    if isinstance(made, Declined):
        return made
    one, wrapped = made
    text = probe_text(wrapped, manifest)
    results = compiler([ConfinedJob(text, arch, lines=True) for arch in JUDGED])
    sizes: dict[int, int] = {}
    for arch, result in zip(JUDGED, results, strict=True):
        if isinstance(result, Declined):
            return Declined(explained(one, result.reason, arch))
        judged = judge_ptx(one, result.code.rstrip(b"\0").decode("utf-8", "replace"), wrapped.single)
        if isinstance(judged, Declined):
            return judged
        for number, size in judged.bytes.items():
            sizes[number] = max(size, sizes.get(number, 0))
    placed = place(wrapped.shared, sizes)
    shared = placed.static_bytes + manifest.dynamic_shared_bytes
    if shared > 227 << 10:
        return Declined(f"{one.unit.source}: {shared} bytes of shared memory; a block has up to {227 << 10}")
    role = DeviceRole(
        threads=-(-manifest.threads // 32) * 32,
        body=_body(manifest, name, shared),
        parameters=_parameters(manifest),
        grid=manifest.grid,
        globals=role_text(wrapped, manifest, name, placed),
        shared_bytes=shared,
        shared_alignment=16 if placed.alignment <= 16 else 1024,
        pdl=False,
    )
    schedule = Schedule("foreign", (("entry", manifest.entry), ("block", manifest.block)))
    source = RoleSource(schedule, (prelude(), fused_header(), foreign_header()), (role,))
    variables = (*(c.name for c in manifest.constants), *manifest.state)
    notes = [f"{h}: no such header beside the source, taken as empty" for h in one.unit.empty]
    if wrapped.form:
        notes.append("threads may leave before a barrier: barriers of this role are reductions")
    symbols = tuple(f"{name}::{v}" for v in dict.fromkeys(variables))
    return ForeignRole(manifest, source, wrapped.original, symbols, wrapped.form, placed.static_bytes, tuple(notes))


def _wrapped(manifest: Manifest) -> tuple[Cut, Wrapped] | Declined:
    try:
        with limited():
            return _within_time(manifest)
    except ImpatientError:
        return Declined(f"{manifest.source.name}: reading it took over {patience.SECONDS:g} s; kernels are taken from "
                        "simpler files")  # fmt: skip


def _within_time(manifest: Manifest) -> tuple[Cut, Wrapped] | Declined:
    text = unit(manifest)
    if isinstance(text, Declined):
        return text
    one = cut(text, manifest.entry)
    if isinstance(one, Declined):
        return one
    if (found := refuse(one, manifest)) is not None:
        return found
    wrapped = wrap(one, manifest)
    return wrapped if isinstance(wrapped, Declined) else (one, wrapped)


def explained(one: Cut, log: str, arch: str) -> str:
    """The compiler's first error at the source's own line."""
    if found := _MESSAGE.search(log):
        line, what = int(found[1] or found[3]), found[2] or found[4]
        missing = f"; headers taken as empty: {', '.join(one.unit.empty[:6])}" if one.unit.empty else ""
        return f"{one.unit.where(line)}: the compiler refuses it ({arch}): {_plain(what)}{missing}"
    file = one.unit.source
    if found := _OTHER.search(log):
        return f"{file}: the compiler refuses it ({arch}): {_plain(found[1])}"
    return f"{file}: {_plain(log.strip().splitlines()[-1] if log.strip() else 'the compiler refuses it')}"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:300]


def _body(manifest: Manifest, name: str, shared: int) -> str:
    given = ", ".join(n for i, p in enumerate(manifest.parameters) for n in argument_names(p, i))
    memory = "sm" if shared else "(unsigned char*)0"
    return f"{name}::w_kernel<decltype(role)>{{role, {memory}}}.w_run({given});"


def _parameters(manifest: Manifest) -> tuple[Parameter, ...]:
    found: list[Parameter] = []
    inputs = outputs = 0
    for i, p in enumerate(manifest.parameters):
        names = argument_names(p, i)
        if p.kind == "scalar":
            found += [Parameter(n, Number(w), _WORDS) for n, w in zip(names, p.bits, strict=True)]
            continue
        argument: CudaArgument
        if p.kind == "input":
            argument, inputs = Pointer("in", inputs), inputs + 1
        else:
            argument, outputs = Pointer("out", outputs), outputs + 1
        kind = (READ if p.kind == "input" else WRITTEN).replace(" __restrict__", "")  # the source may have both alias
        found.append(Parameter(names[0], argument, kind))
    return tuple(found)
