"""What a generator gives back: a schedule, and either source text or a library call."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

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
        inner = ",".join(f"{k}={_short(v)}" for k, v in self.params)
        return f"{self.generator}({inner})"


def _short(value: ScheduleParam) -> ScheduleParam:
    """What is longer than a name is told by its beginning."""
    return f"{value[:16]}..." if isinstance(value, str) and len(value) > 64 else value


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

    @property
    def reads(self) -> frozenset[int]:
        """Positions of the problem's inputs that some step reads, or that are results."""
        waiting: list[CallValue] = [*self.outputs]
        for step in (*self.prepare, *self.run):
            waiting += [*step.args, *(value for _, value in step.kwargs)]
        found = set()
        while waiting:
            value = waiting.pop()
            if isinstance(value, tuple):
                waiting += value
            elif isinstance(value, Ref) and value.kind == "in":
                found.add(value.index)
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Pointer:
    """An argument of a CUDA kernel: the device address of a buffer."""

    kind: str
    """`in`, `out` (positions among the problem's inputs and outputs), `packed` (a buffer of `packed_bytes`), `work`
    or `state` (a byte offset into that buffer)."""
    index: int = 0


@dataclass(frozen=True, slots=True)
class TensorMap:
    """An argument of a CUDA kernel: a tiled tensor map (`const __grid_constant__ CUtensorMap`, 128 bytes, by value).

    Dimensions are innermost first, as in cuTensorMapEncodeTiled.
    """

    base: Pointer
    dtype: str
    """Element type by its name in `ir.types.DType` (`bf16`, `f16`, `f32`, `u8`, ...), or `tf32`."""
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    """Of dimensions 1 and up; multiples of 16."""
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle_bytes: int = 0
    """0, 32, 64 or 128."""


@dataclass(frozen=True, slots=True)
class Inside:
    """An argument of a CUDA kernel: an address so many bytes behind the beginning of an input or output."""

    base: Pointer
    bytes: int


@dataclass(frozen=True, slots=True)
class Number:
    """An argument of a CUDA kernel: a whole number, passed as if it were an address (0: no buffer)."""

    value: int


CudaArgument = Pointer | Inside | Number | TensorMap
MOST_PARAMETER_BYTES = 32764
"""Of a kernel for compute capability 7.0 or more, with CUDA 12.1 or later (which is all that Weft is for)."""
_MAP_BYTES, _MAP_ALIGNED = 128, 64


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one entry point. Shapes are baked into the text, so the arguments are addresses only."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[CudaArgument, ...]
    shared_bytes: int = 0
    """Dynamic shared memory."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    dependent: bool = True
    """The kernel waits for its predecessors itself (griddepcontrol.wait, in every thread, before it touches memory
    that another kernel may write or read), so it may be launched while they still run."""
    co_resident: int = 1
    """CTAs, neighbours in the grid, that spin on each other and so must be co-resident."""

    @property
    def parameter_bytes(self) -> int:
        """Of all arguments, which may be `MOST_PARAMETER_BYTES`."""
        at = 0
        for argument in self.arguments:
            size, aligned = (_MAP_BYTES, _MAP_ALIGNED) if isinstance(argument, TensorMap) else (8, 8)
            at = -(-at // aligned) * aligned + size
        return at


@dataclass(frozen=True, slots=True)
class Left:
    """An output that the launches leave in the workspace; whoever wants it elsewhere takes it from there.

    It is the sum over `terms` of what lies `step` elements apart; mostly there is one.
    """

    output: int
    """Position among the problem's outputs."""
    offset: int
    """Bytes into the workspace."""
    strides: tuple[int, ...]
    """Elements, one per dimension of the output."""
    terms: int = 1
    step: int = 0


@dataclass(frozen=True, slots=True)
class CudaSource:
    """A generated CUDA C++ kernel: one translation unit without headers, and how it is launched.

    Every entry is `extern "C" __global__ void ENTRY(...)`, its parameters the launch's arguments in order. Buffers are
    256-byte aligned. The launches run in order on one stream, each seeing what the former ones wrote.
    """

    schedule: Schedule
    text: str
    launches: tuple[Launch, ...]
    pack: tuple[Launch, ...] = ()
    """Run once at link time to fill `packed`; only inputs that are weights are valid then."""
    workspace_bytes: int = 0
    """Scratch with arbitrary content at each call."""
    state_bytes: int = 0
    """Memory of this step alone, zero before the first call; every call must leave it zero (counters and the like)."""
    packed_bytes: tuple[int, ...] = ()
    replaces_weights: tuple[int, ...] = ()
    """Positions of weight inputs that no launch reads because they are in `packed`."""
    capability: int = 80
    """Least compute capability (major * 10 + minor)."""
    exact_arch: bool = False
    """True: uses instructions of one architecture only (`sm_90a`), so it is compiled for exactly that."""
    flags: tuple[str, ...] = ()
    """Further compiler options, from a closed list that the toolchain knows."""
    max_registers: int = 0
    """Cap handed to the compiler; 0: none."""
    transforms: bool = False
    """Works on transformed values (Winograd): on integer inputs it comes nearest to the right integer."""
    left: tuple[Left, ...] = ()
    """Outputs that no launch writes where the problem wants them: gradients side by side in one buffer, for one."""
    input_output_aliases: tuple[tuple[int, int], ...] = ()
    """(input, output) that may lie in the same memory, whatever the others do: on an element of such an input nothing
    depends but what the thread that has read it writes in its place, behind that. What others read there, they drop."""

    @property
    def entry(self) -> str:
        """The first entry point: a synthetic identifier that names the kernel."""
        return self.launches[0].entry

    @property
    def sha256(self) -> str:
        """Identity of everything that decides what runs; saved plans and measurements are found by it."""
        parts = [self.text, _digested(self.launches), _digested(self.pack), *self.flags, str(self.max_registers)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


_FIRST_NAMES: Mapping[str, Mapping[str, str]] = {"Launch": {"co_resident": "at_once"}}
"""What fields of a class were called when digests of them were first stored; a renamed field gets an entry here."""


def _digested(value: object) -> str:
    """The `repr` of a value, by the first names of its fields."""
    if isinstance(value, tuple):
        inner = ", ".join(_digested(x) for x in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not is_dataclass(value):
        return repr(value)
    kind = type(value).__name__
    first = _FIRST_NAMES.get(kind, {})
    inner = ", ".join(f"{first.get(f.name, f.name)}={_digested(getattr(value, f.name))}" for f in fields(value))
    return f"{kind}({inner})"


Kernel = KernelSource | CudaSource | LibraryCall


@dataclass(frozen=True, slots=True)
class KernelBinary:
    """A compiled source: a shared object in the content-addressed cache."""

    source_sha256: str
    object_sha256: str
    path: str
    entry: str
    compile_s: float
    log: str = ""
