"""Jobs of best-effort kernels: their manifests, their inputs and what their results are compared with.

A job is a folder beside this file, a stage one of its manifests (`weft.generate.cuda.foreign.manifest`), a launch.
Stages of a job share buffers by name. What is drawn depends on the manifest alone (`numpy.random.default_rng(seed)`),
so that any program can make the same inputs. No device is known here.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.generate.cuda.foreign import manifest as manifests
from weft.generate.cuda.foreign.manifest import Data, KernelParameter, Manifest

ROOT = Path(__file__).parent
Array = NDArray[Any]
POISON = 0xA5
"""Every byte of a buffer that nobody fills before the first launch."""


def dtype(data: Data) -> np.dtype[Any]:
    """NumPy's type of one number of an array."""
    return np.dtype(data.element.scalar).newbyteorder("<")


def shape(data: Data) -> tuple[int, ...]:
    """Shape in numbers: that of the elements, and an axis behind it where an element is several numbers."""
    several = data.per * data.element.components
    return data.shape if several == 1 else (*data.shape, several)


def drawn(data: Data) -> Array:
    """What an array holds before the first launch.

    Floats are drawn in their own precision: `standard_normal`, or `random` times (high - low) plus low; integers by
    `integers(low, high)`.
    """
    kind, numbers = dtype(data), shape(data)
    chance = np.random.default_rng(data.seed)
    if data.init is None:
        return np.full(data.nbytes, POISON, np.uint8).view(kind).reshape(numbers)
    if data.init == "zeros":
        return np.zeros(numbers, kind)
    if data.init == "arange":
        return np.arange(math.prod(numbers)).astype(kind).reshape(numbers)
    if data.init == "file":
        assert data.file is not None, "the reader has looked"
        return np.frombuffer(data.file.read_bytes(), kind).reshape(numbers)
    made: Array
    if data.init == "normal":
        made = chance.standard_normal(numbers, kind.type)
    elif kind.kind == "f":
        low, high = kind.type(data.low), kind.type(data.high)
        made = chance.random(numbers, kind.type)
        made *= high - low
        made += low
    else:
        made = chance.integers(int(data.low), int(data.high), numbers, kind.type)
    return made


def word(scalar: KernelParameter) -> int:
    """The bits of a scalar of at most eight bytes, as a launch passes them.

    Raises:
        ValueError: it has more.
    """
    if len(scalar.bits) != 1:
        raise ValueError(f"parameter {scalar.name}: {scalar.type} has more than the eight bytes that are passed here")
    return scalar.bits[0]


@dataclass(frozen=True, slots=True)
class Stage:
    """One launch."""

    manifest: Manifest
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What the operation is, where it is from, what limits it, the estimate: for people and tables."""

    @property
    def name(self) -> str:
        """Of its manifest, within the job."""
        return self.manifest.path.stem

    @property
    def text(self) -> str:
        """What is compiled."""
        return "".join(f"#define {k} {v}\n" for k, v in self.manifest.define) + self.manifest.source.read_text()

    @property
    def pointers(self) -> Iterator[tuple[KernelParameter, Data]]:
        """Parameters that are no scalars."""
        return ((p, p.data) for p in self.manifest.parameters if p.data is not None)


@dataclass(frozen=True, slots=True)
class Job:
    """Launches in their order."""

    name: str
    stages: tuple[Stage, ...]

    def buffers(self) -> dict[str, Array]:
        """Contents of every buffer before the first stage, by its name."""
        made: dict[str, Array] = {}
        for stage in self.stages:
            for p, data in stage.pointers:
                if p.buffer not in made:
                    made[p.buffer] = drawn(data)
        return made

    def constants(self) -> dict[str, Array]:
        """Contents of the `__constant__` arrays that the host fills."""
        return {c.name: drawn(c) for stage in self.stages for c in stage.manifest.constants}

    def scalars(self) -> dict[str, float]:
        """Values by name; where stages differ, that of the first."""
        found: dict[str, float] = {}
        for stage in self.stages:
            for p in stage.manifest.parameters:
                if p.kind == "scalar":
                    found.setdefault(p.name, p.values[0])
        return found

    @property
    def rtol(self) -> float:
        """How far its results may lie from the reference, as in `difference`; 0: not at all."""
        return max(s.manifest.rtol for s in self.stages)

    @property
    def written(self) -> set[str]:
        """Buffers that some stage writes."""
        return {p.buffer for s in self.stages for p, _ in s.pointers if p.kind in ("output", "inout")}


def names() -> tuple[str, ...]:
    """All jobs."""
    return tuple(sorted(p.name for p in ROOT.iterdir() if any(p.glob("*.toml"))))


@cache
def load(name: str, *, small: bool = False) -> Job:
    """A job at its full size, or at the small one that tests use.

    Raises:
        ValueError: there is no such job.
        ManifestError: a manifest is wrong [W015].
    """
    if name not in names():
        raise ValueError(f"there is no job {name!r}; there are {', '.join(names())}")
    return read(ROOT / name, small=small)


def read(folder: Path, *, small: bool = False) -> Job:
    """The job of a folder.

    Raises:
        ValueError: its stages are not numbered from 0, or have one buffer in two shapes.
        ManifestError: a manifest is wrong [W015].
    """
    stages = sorted((_stage(p, small=small) for p in folder.glob("*.toml")), key=lambda s: s.manifest.stage)
    if [s.manifest.stage for s in stages] != list(range(len(stages))):
        raise ValueError(f"{folder}: stages {[s.manifest.stage for s in stages]}; they are numbered from 0")
    seen: dict[str, Data] = {}
    for stage in stages:
        for p, data in stage.pointers:
            first = seen.setdefault(p.buffer, data)
            if (dtype(first), shape(first)) != (dtype(data), shape(data)):
                raise ValueError(f"{stage.manifest.path}: buffer {p.buffer} is {data.type} {list(data.shape)}; an "
                                 f"earlier stage has {first.type} {list(first.shape)}")  # fmt: skip
    return Job(folder.name, tuple(stages))


def _stage(path: Path, *, small: bool) -> Stage:
    return Stage(manifests.read(path, small=small), tomllib.loads(path.read_text()).get("about", {}))


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
    values: dict[str, Any] = {**job.scalars(), **job.constants(), **before, "grid": job.stages[0].manifest.grid}
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
