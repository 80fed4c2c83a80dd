"""What a generator gives back: a schedule, and either source text or a library call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

ScheduleParam = int | float | bool | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run a problem: the generator's name and its parameters, sorted by name."""

    generator: str
    params: tuple[tuple[str, ScheduleParam], ...] = ()

    def param(self, name: str) -> ScheduleParam:
        """Value of a parameter; KeyError if the schedule lacks it."""
        return dict(self.params)[name]

    def __str__(self) -> str:
        inner = ",".join(f"{k}={v}" for k, v in self.params)
        return f"{self.generator}({inner})"


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A generated C++ kernel.

    The text defines, with C linkage,

        void ENTRY(const void* const* inputs, void* const* outputs, void* workspace, const void* const* packed);

    and, if `packed_bytes` is not empty,

        void ENTRY_pack(const void* const* inputs, void* const* packed);

    which is called once at link time, with pointers valid only for the inputs that are weights.
    Pointers are 64-byte aligned, shapes and formats are baked in, threads come from OpenMP.
    The entry reads no other state, writes only outputs and workspace, and keeps the floating-point environment.
    """

    schedule: Schedule
    text: str
    entry: str
    """A synthetic identifier: never a name from a model."""
    workspace_bytes: int = 0
    packed_bytes: tuple[int, ...] = ()
    """Sizes of the buffers of repacked weights that `packed` points to."""
    replaces_weights: tuple[int, ...] = ()
    """Positions of weight inputs that the entry never reads because they are in `packed`."""
    flags: tuple[str, ...] = ()
    """Further compiler flags, from a closed list that the toolchain knows."""

    @property
    def sha256(self) -> str:
        """Identity of text and flags."""
        return hashlib.sha256("\0".join([self.text, *self.flags]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Ref:
    """A value inside a library call: an input, a prepared tensor or an earlier step's result."""

    kind: str
    """`in` (problem input), `prep` (made once at link time) or `tmp` (result of an earlier run step)."""
    index: int


CallValue = int | float | bool | str | None | Ref | tuple["CallValue", ...]
"""An argument: JSON-able. A string that starts with `dtype:` or `format:` is a torch constant."""


@dataclass(frozen=True, slots=True)
class CallStep:
    """One operator call, e.g. `aten.addmm.default`; namespaces are limited to a list in `generate.library`."""

    target: str
    args: tuple[CallValue, ...]
    kwargs: tuple[tuple[str, CallValue], ...] = ()
    result: int = 0
    """For operators with several results: which one this step keeps. -1: keep the tuple."""


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A short straight-line program of framework operators, run without the compiler."""

    schedule: Schedule
    prepare: tuple[CallStep, ...]
    """Run once at link time on the weights; step i makes `Ref('prep', i)`."""
    run: tuple[CallStep, ...]
    """Run per call; step i makes `Ref('tmp', i)`."""
    outputs: tuple[Ref, ...]
    """One per problem output."""
    out_variant: bool = False
    """True when the last step writes straight into the planned output buffer (passed as `out=`)."""


Kernel = KernelSource | LibraryCall


@dataclass(frozen=True, slots=True)
class KernelBinary:
    """A compiled source: a shared object in the content-addressed cache."""

    source_sha256: str
    object_sha256: str
    path: str
    entry: str
    compile_s: float
    log: str = ""
