"""Jobs of best-effort kernels: their manifests, their inputs and what their results are compared with.

A job is a folder beside this file, a stage one of its manifests, a launch. Stages of a job share buffers by name. What
is drawn depends on the manifest alone (`numpy.random.default_rng(seed)`), so that any program can make the same inputs.
No device is known here.
"""

from __future__ import annotations

import math
import struct
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent
Array = NDArray[Any]
Dim3 = tuple[int, int, int]
POISON = 0xA5
"""Every byte of a buffer that nobody fills before the first launch."""
TYPES: Mapping[str, tuple[str, int]] = {
    "unsigned char": ("u1", 1),
    "short": ("i2", 1),
    "unsigned short": ("u2", 1),
    "int": ("i4", 1),
    "unsigned": ("u4", 1),
    "unsigned long long": ("u8", 1),
    "float": ("f4", 1),
    "float2": ("f4", 2),
    "float4": ("f4", 4),
    "uint4": ("u4", 4),
}
"""C type of an element → NumPy's type and how many of it; several are one more axis, the last one."""
_KINDS = frozenset({"scalar", "input", "output", "inout"})
_INITS = frozenset({"", "normal", "uniform", "zeros", "arange", "file"})
_OVERRIDES = frozenset({"shape", "value", "low", "high"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an entry, or a `__constant__` array that is filled before the launch."""

    name: str
    type: str
    kind: str
    """`scalar`, `input`, `output` or `inout`."""
    shape: tuple[int, ...] = ()
    """Elements of the C type; none: a scalar."""
    init: str = ""
    """`normal`, `uniform`, `zeros`, `arange` or `file`; none: what was there."""
    seed: int = 0
    low: float | None = None
    high: float | None = None
    value: float = 0
    """Of a scalar."""
    file: str = ""
    """Raw bytes beside the manifest."""
    buffer: str = ""
    """Memory that stages of a job share; by default one of the parameter's own name."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of one number."""
        return np.dtype(TYPES[self.type][0]).newbyteorder("<")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Shape in numbers: that of the elements, and an axis for the lanes of a vector type."""
        lanes = TYPES[self.type][1]
        return self.shape if lanes == 1 else (*self.shape, lanes)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.numbers) * self.dtype.itemsize

    def drawn(self, folder: Path) -> Array:
        """Contents before the first launch, of shape `numbers`.

        Raises:
            ValueError: the file is missing, or has not the array's size.
        """
        chance = np.random.default_rng(self.seed)
        made: Array
        if self.init == "zeros":
            made = np.zeros(self.numbers, self.dtype)
        elif self.init == "arange":
            made = np.arange(math.prod(self.numbers)).astype(self.dtype).reshape(self.numbers)
        elif self.init == "file":
            made = self._read(folder)
        elif self.init == "":
            made = np.full(self.nbytes, POISON, np.uint8).view(self.dtype).reshape(self.numbers)
        elif self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low = limits.min if self.low is None else int(self.low)
            high = int(limits.max) + 1 if self.high is None else int(self.high)
            made = chance.integers(low, high, self.numbers, self.dtype)
        elif self.init == "normal":
            made = chance.standard_normal(self.numbers, np.float32)
        else:
            first, last = np.float32(self.low or 0), np.float32(1 if self.high is None else self.high)
            made = chance.random(self.numbers, np.float32)
            made *= last - first
            made += first
        return made

    def _read(self, folder: Path) -> Array:
        path = folder / self.file
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file; parameter {self.name} is filled from it")
        data = path.read_bytes()
        if len(data) != self.nbytes:
            raise ValueError(f"{path}: {len(data)} bytes where {self.type} {list(self.shape)} has {self.nbytes}")
        return np.frombuffer(data, self.dtype).reshape(self.numbers)

    def word(self) -> int:
        """The bits of a scalar, as a launch passes them."""
        code = {"f4": "f", "i4": "i", "u4": "I", "u8": "Q"}[TYPES[self.type][0]]
        number = float(self.value) if code == "f" else int(self.value)
        return int.from_bytes(struct.pack(f"<{code}", number), "little")


@dataclass(frozen=True, slots=True)
class Stage:
    """One launch."""

    path: Path
    """Of its manifest."""
    source: Path
    entry: str
    grid: Dim3
    block: Dim3
    dynamic_shared_bytes: int
    define: tuple[tuple[str, str], ...]
    number: int
    parameters: tuple[Parameter, ...]
    """In the order of the entry's."""
    constants: tuple[Parameter, ...]
    exact: bool
    """Any two forms of the kernel agree bit by bit."""
    rtol: float
    """How far results may lie from the reference, as in `difference`; 0: not at all."""
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def text(self) -> str:
        """What is compiled."""
        return "".join(f"#define {k} {v}\n" for k, v in self.define) + self.source.read_text()

    @property
    def pointers(self) -> Iterator[Parameter]:
        """Parameters that are no scalars."""
        return (p for p in self.parameters if p.kind != "scalar")


@dataclass(frozen=True, slots=True)
class Job:
    """Launches in their order."""

    name: str
    stages: tuple[Stage, ...]

    def buffers(self) -> dict[str, Array]:
        """Contents of every buffer before the first stage, by its name."""
        made: dict[str, Array] = {}
        for stage in self.stages:
            for p in stage.pointers:
                if p.buffer not in made:
                    made[p.buffer] = p.drawn(stage.path.parent)
        return made

    def constants(self) -> dict[str, Array]:
        """Contents of the `__constant__` arrays that the host fills."""
        return {c.name: c.drawn(stage.path.parent) for stage in self.stages for c in stage.constants}

    def scalars(self) -> dict[str, float]:
        """Values by name; where stages differ, that of the first, and that of stage n as `name.n`."""
        found: dict[str, float] = {}
        for stage in self.stages:
            for p in stage.parameters:
                if p.kind == "scalar":
                    found.setdefault(p.name, p.value)
                    found[f"{p.name}.{stage.number}"] = p.value
        return found

    @property
    def rtol(self) -> float:
        """Of the results of all stages."""
        return max(s.rtol for s in self.stages)

    @property
    def written(self) -> set[str]:
        """Buffers that some stage writes."""
        return {p.buffer for s in self.stages for p in s.pointers if p.kind in ("output", "inout")}


def names() -> tuple[str, ...]:
    """All jobs."""
    return tuple(sorted(p.name for p in ROOT.iterdir() if any(p.glob("*.toml"))))


@cache
def load(name: str, *, small: bool = False) -> Job:
    """A job at its full size, or at the small one that tests use.

    Raises:
        ValueError: there is no such job, or a manifest is wrong: says which, where and why.
    """
    if name not in names():
        raise ValueError(f"there is no job {name!r}; there are {', '.join(names())}")
    stages = sorted((read(p, small=small) for p in (ROOT / name).glob("*.toml")), key=lambda s: s.number)
    if [s.number for s in stages] != list(range(len(stages))):
        raise ValueError(f"{ROOT / name}: stages {[s.number for s in stages]}; they are numbered from 0")
    shapes: dict[str, Parameter] = {}
    for stage in stages:
        for p in stage.pointers:
            first = shapes.setdefault(p.buffer, p)
            if (first.dtype, first.numbers) != (p.dtype, p.numbers):
                raise ValueError(f"{stage.path}: buffer {p.buffer} is {p.type} {list(p.shape)}; an earlier stage has "
                                 f"{first.type} {list(first.shape)}")  # fmt: skip
    return Job(name, tuple(stages))


def read(path: Path, *, small: bool = False) -> Stage:
    """One manifest.

    Raises:
        ValueError: it is wrong: says where and why.
    """
    try:
        told = tomllib.loads(path.read_text())
        small_told = told.get("small", {}) if small else {}
        if unknown := set(small_told) - {"grid", "block", "dynamic_shared_bytes", "define", "parameters", "constants"}:
            raise ValueError(f"[small] has {sorted(unknown)}, which it cannot change")
        source = path.parent / told["source"]
        if source.resolve().parent != path.parent.resolve():
            raise ValueError(f"source {told['source']!r} does not lie beside it")
        check = told.get("check", {})
        return Stage(
            path,
            source,
            told["entry"],
            _dim3(small_told.get("grid", told["grid"])),
            _dim3(small_told.get("block", told["block"])),
            int(small_told.get("dynamic_shared_bytes", told.get("dynamic_shared_bytes", 0))),
            tuple({**told.get("define", {}), **small_told.get("define", {})}.items()),
            int(told.get("stage", 0)),
            tuple(_parameters(told.get("parameters", []), small_told.get("parameters", {}))),
            tuple(_parameters([{"kind": "input", **c} for c in told.get("constants", [])],
                              small_told.get("constants", {}))),
            bool(check.get("exact", True)),
            float(check.get("rtol", 0.0)),
            told.get("about", {}),
        )  # fmt: skip
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]!r} is missing") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _dim3(told: list[int]) -> Dim3:
    if len(told) != 3 or min(told) < 1:
        raise ValueError(f"{told} are not three dimensions of at least 1")
    return (told[0], told[1], told[2])


def _parameters(told: list[dict[str, Any]], changed: Mapping[str, Mapping[str, Any]]) -> Iterator[Parameter]:
    if unknown := set(changed) - {p["name"] for p in told}:
        raise ValueError(f"[small] changes {sorted(unknown)}, which are no parameters")
    for one in told:
        override = changed.get(one["name"], {})
        if unknown := set(override) - _OVERRIDES:
            raise ValueError(f"[small] gives {one['name']} {sorted(unknown)}; it can give {sorted(_OVERRIDES)}")
        p = Parameter(**{"buffer": one["name"], **one, **override})
        if p.type not in TYPES or p.kind not in _KINDS or p.init not in _INITS:
            raise ValueError(f"parameter {p.name}: type {p.type!r}, kind {p.kind!r} or init {p.init!r} is unknown")
        if p.kind in ("input", "inout") and not p.init:
            raise ValueError(f"parameter {p.name} is read, and has no init")
        yield p


@dataclass(frozen=True, slots=True)
class Operation:
    """What is right for a job."""

    reference: Callable[[Mapping[str, Any], Array], Mapping[str, Array]]
    """(buffers before, constants and scalars by name, `grid` of the first stage; rows) → those rows of every result, in
    the results' own precision or a better one."""
    axes: Mapping[str, int]
    """Result → the axis whose entries are rows."""
    sample: int = 256
    """Rows that are compared at the full size; all where there are no more."""
    whole: tuple[str, ...] = ()
    """Results that are not asked for by rows: they come whole."""


def expected(job: Job, operation: Operation, rows: Array, before: Mapping[str, Array]) -> dict[str, Array]:
    """Those rows of every result of a job, given what its buffers held before its first stage."""
    values: dict[str, Any] = {**job.scalars(), **job.constants(), **before, "grid": job.stages[0].grid}
    with np.errstate(all="ignore"):
        return dict(operation.reference(values, rows))


def sampled(operation: Operation, before: Mapping[str, Array], *, seed: int = 0) -> Array:
    """Rows that are compared: the first, the last and some between them, in order."""
    count = min(before[name].shape[axis] for name, axis in operation.axes.items())
    if count <= operation.sample:
        return np.arange(count)
    between = np.random.default_rng(seed).choice(count - 2, operation.sample - 2, replace=False) + 1
    return np.sort(np.concatenate([[0, count - 1], between]))


def difference(got: Array, want: Array, rtol: float) -> str:
    """Where `got` is not within rtol·(|want| + rms(want)) of `want`; with 0, where it is not equal. Empty: nowhere."""
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}"
    if rtol == 0:
        wrong = got != want
    else:
        exact = want.astype(np.float64)
        limit = rtol * (np.abs(exact) + math.sqrt(float(np.mean(exact * exact))))
        wrong = ~(np.abs(got.astype(np.float64) - exact) <= limit)  # NaN is wrong, too
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} differ, first at {at}: {got[at]!r}, expected {want[at]!r}"
