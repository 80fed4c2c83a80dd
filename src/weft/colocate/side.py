"""One of the two kernels of a pair: a role, the same kernel by itself, and the memory of both.

A kernel is a `.cu` file with its kernel.toml, or a product by Weft's templates:

    product = "MN=4096 K=1024"    # tokens as of `weft gemm`
    layout = "nn"
    dtype = "f16"
    epilogue = "none"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from weft.device.cuda.facts import GpuFacts
from weft.errors import KernelDeclinedError, OptionError
from weft.gemm.epilogue import epilogue
from weft.gemm.search import feasible
from weft.gemm.spec import Gemm, layout_of, read_tokens, typed
from weft.generate.cuda.foreign.manifest import Data, Manifest, ManifestError
from weft.generate.cuda.foreign.manifest import read as read_manifest
from weft.generate.cuda.foreign.read import ForeignRole
from weft.generate.cuda.foreign.read import read as read_foreign
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as product_of
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import lc_role
from weft.generate.cuda.role.role import RoleSource
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaArgument, Pointer

_SCALARS = {
    DType.F64: "f8", DType.F32: "f4", DType.F16: "f2", DType.BF16: "bf", DType.I64: "i8", DType.I32: "i4",
    DType.I16: "i2", DType.I8: "i1", DType.U8: "u1", DType.BOOL: "u1", DType.F8E4M3: "u1", DType.F8E5M2: "u1",
}  # fmt: skip
_MOST_MANIFEST = 1 << 20
_ROLES = {"mma": mma.roles, "tma": tma.roles}
"""Templates of products whose kernels are one role."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of a pair."""

    name: str
    nbytes: int
    init: str
    """`poison`, `zeros`, `normal`, `uniform`, `arange` or `file`."""
    scalar: str
    """Kind and bytes of a component (`f4`, `u1`, ...; `f2` and `bf`: halves)."""
    seed: int = 0
    low: float = 0.0
    high: float = 1.0
    file: Path | None = None
    written: bool = False
    scratch: bool = False
    """Not compared: what kernels leave in it is nobody's."""
    rtol: float = 0.0


@dataclass(frozen=True, slots=True)
class Constant:
    """A variable of the source that the host fills."""

    symbol: str
    """In the role's text."""
    name: str
    """In the kernel's own text."""
    data: Buffer


@dataclass(frozen=True, slots=True)
class Value:
    """An argument that is passed by value."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two kernels."""

    name: str
    """`lc`, `be0`, `be1`, ..."""
    title: str
    """What it is, for people."""
    source: RoleSource
    text: str
    """The kernel by itself."""
    entry: str
    """Its name in C++ (`reduce<256>`)."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[CudaArgument | Value, ...]
    """Of the kernel by itself."""
    memory: Mapping[tuple[str, int], Buffer]
    """By kind and position of the arguments."""
    constants: tuple[Constant, ...]
    notes: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    """Variables whose content lasts from launch to launch, which nobody fills anew."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    """CTAs of a cluster of the kernel by itself."""


def side(path: Path, name: str, facts: GpuFacts, *, small: bool, changes: Mapping[str, object]) -> Side:
    """Read one kernel of a pair.

    Raises:
        ManifestError: the file cannot be taken [W015].
        KernelDeclinedError: its kernel cannot be a role [W205].
        DeviceError: tree-sitter or NVRTC is not installed [W301].
    """
    if (product := _product(path)) is not None:
        return _of_product(path, name, product, facts, changes)
    manifest = read_manifest(path, small=small, changes=changes)
    role = read_foreign(manifest)
    if isinstance(role, Declined):
        raise KernelDeclinedError(reason=role.reason)
    return _of_foreign(name, manifest, role)


def _product(path: Path) -> dict[str, object] | None:
    """The manifest of a product, if it is one."""
    try:
        if path.is_file() and path.stat().st_size <= _MOST_MANIFEST:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
            return raw if "product" in raw else None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        pass  # who reads it next says what is wrong
    return None


def _of_product(path: Path, name: str, raw: dict[str, object], facts: GpuFacts, changes: Mapping[str, object]) -> Side:
    raw = {**raw, **changes}
    for key, value in raw.items():
        if key not in ("product", "layout", "dtype", "epilogue") or not isinstance(value, str):
            raise ManifestError(
                where=path.name,
                key=key[:80],
                problem="no such key, or no text",
                remedy="a product has product, layout, dtype and epilogue, each a text",
            )
    base = Gemm(layout=layout_of(str(raw.get("layout", "nn"))), epilogue=epilogue(str(raw.get("epilogue", "none"))))
    g = read_tokens(str(raw["product"]).split(), typed(base, str(raw.get("dtype", "f16"))))
    problem = g.problem()
    form = product_of(problem)
    if not isinstance(form, Product):
        raise KernelDeclinedError(reason=f"{path.name}: {form.reason}")
    reason = "no template of products by TMA and wgmma, or by mma.sync, takes it"
    for _, schedule in feasible(g, problem, facts):
        roles = _ROLES.get(str(schedule.param("template")))
        source = roles(form, schedule) if roles is not None else Declined(reason)
        if isinstance(source, Declined) or source.pack or source.workspace_bytes or source.state_bytes:
            continue
        if isinstance(found := lc_role(source), Declined):
            reason = found.reason
            continue
        alone = solo(source, "w_alone")
        (launch,) = alone.launches
        return Side(
            name, f"product {g.name} by {schedule.param('template')}", source, alone.text, "w_alone", launch.grid,
            launch.block, launch.shared_bytes, launch.arguments, _memory_of_product(name, g), (),
            cluster=launch.cluster,
        )  # fmt: skip
    raise KernelDeclinedError(reason=f"{path.name}: {reason}")


def _memory_of_product(name: str, g: Gemm) -> dict[tuple[str, int], Buffer]:
    graph = g.problem().graph
    found: dict[tuple[str, int], Buffer] = {}
    for kind, nodes in (("in", graph.inputs), ("out", graph.outputs)):
        for i, node in enumerate(nodes):
            t = graph.type_of(node)
            init = (
                "poison" if kind == "out" else "normal" if t.dtype.is_float and _SCALARS[t.dtype] != "u1" else "uniform"
            )
            high = 100.0  # of bytes: small numbers, of 8-bit floats too
            found[kind, i] = Buffer(
                f"{name}_{kind}{i}", t.nbytes, init, _SCALARS[t.dtype], i + 1, 0.0, high, written=kind == "out"
            )
    return found


def _of_foreign(name: str, m: Manifest, role: ForeignRole) -> Side:
    memory: dict[tuple[str, int], Buffer] = {}
    arguments: list[CudaArgument | Value] = []
    counts = {"in": 0, "out": 0}
    for p in m.parameters:
        if p.data is None:
            arguments.append(Value(p.raw))
            continue
        kind = "in" if p.kind == "input" else "out"
        memory[kind, counts[kind]] = _buffer(f"{name}_{p.buffer}", p.data, kind == "out", 0.0 if m.exact else m.rtol)
        arguments.append(Pointer(kind, counts[kind]))
        counts[kind] += 1
    filled = {c.name: c for c in m.constants}
    constants = tuple(
        Constant(symbol, symbol.rpartition("::")[2], _buffer(f"{name}_{symbol.rpartition('::')[2]}", data, False, 0.0))
        for symbol in role.symbols
        if (data := filled.get(symbol.rpartition("::")[2])) is not None
    )
    return Side(
        name, f"{m.entry} of {m.source.name}", role.source, role.original, m.entry, m.grid, m.block,
        m.dynamic_shared_bytes, tuple(arguments), memory, constants, role.notes, m.state,
    )  # fmt: skip


def _buffer(name: str, d: Data, written: bool, rtol: float) -> Buffer:
    scalar = d.element.scalar.replace("b1", "u1")
    return Buffer(name, d.nbytes, d.init or "poison", scalar, d.seed, d.low, d.high, d.file, written, rtol=rtol)


def shared_memory(sides: tuple[Side, ...]) -> tuple[dict[str, Buffer], dict[tuple[str, str, int], str]]:
    """Buffers of a pair by name, and which each argument (side, kind, position) means.

    Stages of a job that name the same buffer share it: what the first of them says is in it; it is as large as the
    largest wants it.
    """
    buffers: dict[str, Buffer] = {}
    means: dict[tuple[str, str, int], str] = {}
    for one in sides:
        for (kind, i), b in one.memory.items():
            group = "lc" if one.name == "lc" else "be"
            name = f"{group}_{b.name.partition('_')[2]}"
            there = buffers.get(name)
            if there is None:
                buffers[name] = replace(b, name=name)
            else:
                largest = max(there, b, key=lambda x: x.nbytes).nbytes
                rtol, written = max(there.rtol, b.rtol), there.written or b.written
                buffers[name] = replace(there, nbytes=largest, rtol=rtol, written=written)
            means[one.name, kind, i] = name
    for name, b in buffers.items():
        if b.init == "file" and b.file is not None and b.file.stat().st_size != b.nbytes:
            raise OptionError(option="KERNEL", problem=f"{name}: stages share it, and its file is too small for one")
    return buffers, means
