"""Is a kernel right? Buffers with guards and poison, the reference of a problem, and the comparison.

The reference is computed once per problem and shared by all its kernels. Each kernel then runs, per input set,
twice: outputs, workspace and packed weights are filled with 0xFF (NaN in every float type) and with 0xA5.
An element whose bytes are still the poison in both runs was never written, whatever it should have been.
Guard zones of 256 bytes lie directly before and after every buffer; those of inputs hold 0xFF, so that a read out
of bounds turns into NaN; inputs must be bitwise unmodified. A generated kernel must give the same bits under both
poisons (and after timing), a library call the same values within its limits. One whose threads wait for each other
must also give them where the threads take turns on one core, so that a wait that is missing is seen, and on a CPU each
where the pages beside all inputs and outputs cannot be touched (`at_the_fence`); on a GPU a kernel is judged behind a
predecessor that writes the inputs late (`tune.cuda_subject.LateWriter`), and in a form that is delayed at random
(`tune.cuda_shaken`).

Problems with opaque primitives have no reference: their calls are checked for guards, unmodified inputs and
written outputs only, because the framework's own operator is what defines them. Where a GPU may run a call in place of
ONNX Runtime, that is what both are held to (`tune.opaque`). Operators of this project's that are written out in float64
are held to that, on finite inputs.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Protocol, final

import torch

from weft.device.launch import NativeKernel, Pointers, pointer_array
from weft.errors import WeftError
from weft.generate.library import has_device_form
from weft.generate.library.execute import TORCH_DTYPE, BoundCall
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import Kernel, KernelSource, LibraryCall
from weft.tune import bulk, opaque
from weft.tune.inputs import Domain, InputSet, draw, draw_rows
from weft.tune.oracle import Evaluation, Mode, calls_own, decisions, evaluate, narrowed, rms
from weft.tune.shifts import shifts
from weft.tune.tolerance import (
    COARSE,
    MAX_OVER_RMSE,
    TOLERANCES,
    ULPS,
    UNDECIDED,
    UNDECIDED_FEW,
    UNDECIDED_FEW_RUNS,
    UNDECIDED_RUNS,
    Limits,
    gate_a,
)

VERIFIER_VERSION = 5
"""Part of the key of every verdict; raised when a check changes."""
POISONS = (0xFF, 0xA5)
GUARD_BYTES = 256
CPU = torch.device("cpu")
_INPUT_GUARD = 0xFF
_OUTPUT_GUARD = 0x5C
Call = Callable[[], object]
Check = Callable[[], None]
"""Called between steps: what it raises ends what is going on."""
Clock = Callable[[], int]
"""Nanoseconds, monotonic."""
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Fence(Enum):
    """On which side of a buffer memory lies that cannot be touched."""

    BEFORE = "before"
    BEHIND = "behind"


_LIBC = ctypes.CDLL(None, use_errno=True)


def _fenced(least_bytes: int) -> torch.Tensor:
    """At least so many bytes between two pages that nobody may read or write. OSError: there is no memory."""
    page = mmap.PAGESIZE
    size = -(-least_bytes // page) * page
    held = mmap.mmap(-1, size + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(held))
    for at in (base, base + page + size):
        if _LIBC.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(held, dtype=torch.uint8, count=size, offset=page)


@final
class Buffer:
    """Bytes between two guard zones; the second begins at the very next byte.

    They begin at a multiple of 64 bytes, on a GPU of 256, as the contract of the kernels has it, or `shift` behind one.
    On a CPU there may be a `fence` instead of one zone: memory whose touch ends the process.
    """

    def __init__(
        self, size_bytes: int, guard: int, device: torch.device = CPU, shift: int = 0, fence: Fence | None = None
    ) -> None:
        unit = 64 if device == CPU else 256
        zones = [GUARD_BYTES, GUARD_BYTES]
        if fence is None:
            self._raw = torch.empty((size_bytes + 2 * GUARD_BYTES + unit + shift,), dtype=torch.uint8, device=device)
            start = GUARD_BYTES + (-(self._raw.data_ptr() + GUARD_BYTES)) % unit + shift
        else:
            self._raw = _fenced(size_bytes + GUARD_BYTES + unit + shift)
            start = shift
            if fence is Fence.BEHIND:  # as near to it as the beginning may be
                start += (self._raw.numel() - size_bytes - shift) // unit * unit
            zones = [min(GUARD_BYTES, start), min(GUARD_BYTES, self._raw.numel() - start - size_bytes)]
        self._guard = guard
        self._before = self._raw[start - zones[0] : start]
        self._after = self._raw[start + size_bytes : start + size_bytes + zones[1]]
        # a GPU sets all at once as fast as the zones; here the bytes between are set by those who use them
        for part in (self._before, self._after) if device == CPU else (self._raw,):
            _set(part, guard)
        self.bytes = self._raw[start : start + size_bytes]
        self.address = self._raw.data_ptr() + start

    def fill(self, byte: int) -> None:
        """Set every byte between the guard zones."""
        _set(self.bytes, byte)

    def is_guarded(self) -> bool:
        """Both guard zones are as they were made."""
        return bool((self._before == self._guard).all()) and bool((self._after == self._guard).all())

    @staticmethod
    def all_guarded(buffers: Sequence[Buffer]) -> bool:
        """Every guard zone is as it was made; on a GPU one wait for all of them."""
        if not buffers or buffers[0].bytes.is_cpu:
            return all(b.is_guarded() for b in buffers)
        zones: dict[int, list[torch.Tensor]] = {}
        for b in buffers:
            zones.setdefault(b._guard, []).extend((b._before, b._after))
        whole = [(torch.cat(z) == guard).all() for guard, z in zones.items()]
        return bool(torch.stack(whole).all())

    def tensor(self, t: TensorType, format: Format) -> torch.Tensor:
        """The bytes as a tensor of logical shape `t.shape`, strides by `format`."""
        typed = self.bytes.view(TORCH_DTYPE[t.dtype])
        return typed.as_strided(t.shape, format.strides(t.shape), typed.storage_offset())


def _is_laid_out(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a value's bytes, in their order, are those of a tensor that it was copied to."""
    return value.is_contiguous() and tensor.is_contiguous() and value.dtype == tensor.dtype


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """A row-major tensor's bytes, shape (n,)."""
    return x.reshape(-1).view(torch.uint8)


def _set(x: torch.Tensor, byte: int) -> None:
    if x.is_cpu:
        ctypes.memset(x.data_ptr(), byte, x.numel())
    else:
        x.fill_(byte)


@final
class Arena:
    """The buffers of one call of a problem: inputs filled, outputs poisoned."""

    def __init__(
        self,
        problem: Problem,
        values: Sequence[torch.Tensor],
        *,
        inputs: Arena | None = None,
        device: torch.device = CPU,
        shift: int = 0,
        fence: Fence | None = None,
    ) -> None:
        """Allocate; `inputs` lends its input buffers, for kernels that were seen to leave them alone.

        `shift`: bytes by which all buffers lie behind where they would begin otherwise. `fence`: of all buffers.
        """
        graph = problem.graph
        self._types = tuple(graph.type_of(i) for i in graph.inputs)
        self.output_types = tuple(graph.type_of(i) for i in graph.outputs)
        self._formats = problem.input_formats
        if inputs is None:
            self.inputs = [Buffer(t.nbytes, _INPUT_GUARD, device, shift, fence) for t in self._types]
        else:
            self.inputs = inputs.inputs
        self.outputs = [Buffer(t.nbytes, _OUTPUT_GUARD, device, shift, fence) for t in self.output_types]
        pairs = zip(self.inputs, self._types, self._formats, strict=True)
        self.input_tensors = [b.tensor(t, f) for b, t, f in pairs]
        triples = zip(self.outputs, self.output_types, problem.output_formats, strict=True)
        self.output_tensors = [b.tensor(t, f) for b, t, f in triples]
        self.copies: list[torch.Tensor] = [] if inputs is None else inputs.copies
        if inputs is None:
            self.fill(values)

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Copy logical values into the inputs and remember the bytes."""
        for tensor, value in zip(self.input_tensors, values, strict=True):
            tensor.copy_(value)
        self.copies = [
            _bytes_of(value) if value.is_cpu and _is_laid_out(value, tensor) else buffer.bytes.clone()
            for buffer, tensor, value in zip(self.inputs, self.input_tensors, values, strict=True)
        ]

    def poison(self, byte: int) -> None:
        """Fill the outputs."""
        for buffer in self.outputs:
            buffer.fill(byte)

    def inputs_unmodified(self) -> bool:
        """Bit for bit."""
        return all(bulk.same_bytes(b.bytes, c) for b, c in zip(self.inputs, self.copies, strict=True))

    def is_guarded(self) -> bool:
        """No guard zone of an input or output was touched."""
        return Buffer.all_guarded([*self.inputs, *self.outputs])


@dataclass(frozen=True, slots=True)
class Binding:
    """A kernel bound to the buffers of one arena."""

    call: Call
    scratch: tuple[Buffer, ...]
    """Workspace and packed weights."""
    keep: tuple[object, ...] = ()
    """What must outlive the pointers."""
    waits: bool = False
    """The threads of a call divide several pieces of work, and may have to wait for each other between these."""


class Subject(Protocol):
    """A kernel that can be bound to buffers. `deterministic`: equal inputs must give equal bits."""

    deterministic: bool
    transforms: bool
    """The kernel works on transformed values (Winograd), which are not integers where inputs and results are: on the
    integer set it must come nearest to the right integer; the error itself is judged on the normal set as always."""

    def bind(self, arena: Arena, poison: int) -> Binding:
        """Allocate scratch filled with `poison`, prepare the weights, and give back a call without arguments."""
        ...


PARTED = ("tid + 1) / nt", "#pragma omp barrier", "#pragma omp for")
"""What a text has once for each piece of work that its threads divide among them."""
FENCED_BYTES = 256 << 20
"""Inputs and outputs of a problem together, above which nothing is run at a fence."""
TURNS_S = 0.1
"""No further turn is taken after so long: on one core a call lasts as many times as long as it has threads."""


def on_one_core(call: Call) -> None:
    """Run with all threads of this process on one core: the first goes as far as it can before another one begins.

    Where it should have waited for the others, it meets what they have not written yet. Where the system does not let
    threads be moved, it is a plain call.
    """
    threads = [int(x) for x in os.listdir("/proc/self/task")] if os.path.isdir("/proc/self/task") else []
    before: dict[int, set[int]] = {}
    batch: list[int] = []
    try:
        core = min(os.sched_getaffinity(0))
        for thread in threads:
            with contextlib.suppress(OSError):  # it ended meanwhile
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {core})
                if os.sched_getscheduler(thread) == os.SCHED_OTHER:  # a thread that is woken waits for its turn
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                    batch.append(thread)
        call()
    finally:
        for thread, cores in before.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)
                if thread in batch:
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


@final
class NativeSubject:
    """A compiled kernel source."""

    deterministic = True

    def __init__(self, problem: Problem, source: KernelSource, path: str) -> None:
        """Load. DeviceError: the object cannot be loaded."""
        self._source = source
        self.transforms = ("algorithm", "winograd4") in source.schedule.params
        self._kernel = NativeKernel(path, source.entry)
        self._entry = _ENTRY(self._kernel.address)
        self._weights = weight_positions(problem.graph)
        # texts of half a megabyte are many, and each is bound several times
        self._waits = sum(map(source.text.count, PARTED)) > 1

    def bind(self, arena: Arena, poison: int) -> Binding:
        """See `Subject`. Weights that the entry does not read are null pointers when it runs."""
        s = self._source
        packed = [Buffer(n, _OUTPUT_GUARD) for n in s.packed_bytes]
        workspace = Buffer(s.workspace_bytes, _OUTPUT_GUARD)
        for buffer in (*packed, workspace):
            buffer.fill(poison)
        packed_pointers = pointer_array([b.address for b in packed])
        if packed:
            only_weights = [b.address if k in self._weights else 0 for k, b in enumerate(arena.inputs)]
            self._kernel.pack(pointer_array(only_weights), packed_pointers)
        replaced = set(s.replaces_weights) & self._weights
        inputs = pointer_array([0 if k in replaced else b.address for k, b in enumerate(arena.inputs)])
        outputs = pointer_array([b.address for b in arena.outputs])
        arguments: list[Pointers] = [inputs, outputs, packed_pointers]
        first, second, third = (ctypes.addressof(x) for x in arguments)
        call = partial(self._entry, first, second, workspace.address, third)
        keep = (inputs, outputs, packed_pointers, self)
        return Binding(call, (*packed, workspace), keep, waits=self._waits)


@final
class LibrarySubject:
    """A library call, run as a plan runs it."""

    deterministic = False
    transforms = False

    def __init__(self, problem: Problem, call: LibraryCall) -> None:
        self._call = call
        self._weights = weight_positions(problem.graph)

    def bind(self, arena: Arena, poison: int) -> Binding:  # noqa: ARG002 - nothing here to poison
        """See `Subject`; the framework allocates its own scratch."""
        bound = BoundCall(self._call, {k: arena.input_tensors[k] for k in sorted(self._weights)})
        # the framework may give an `out` tensor other strides, and then fill it in another order than was asked for
        outputs = [t.as_strided(t.shape, t.stride(), t.storage_offset()) for t in arena.output_tensors]
        return Binding(bound.launcher(arena.input_tensors, outputs), (), (bound,))


def weight_positions(graph: Graph) -> frozenset[int]:
    """Positions of the inputs that are constant at run time."""
    found = set()
    for k, i in enumerate(graph.inputs):
        attrs = graph.nodes[i].attrs
        if isinstance(attrs, a.InputAttrs) and attrs.is_weight:
            found.add(k)
    return frozenset(found)


# --- the reference ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """What one output must be on one input set."""

    value: torch.Tensor
    """float64 for floats, else the element type itself; with the strides of the output, like all that follow."""
    rounded: torch.Tensor
    """`value` in the element type of the output."""
    equal: bool
    """Every element must be equal (NaN to NaN)."""
    limits: Limits | None
    """Gate A; None: only classes are compared (nothing for integers)."""
    judged: torch.Tensor | None
    """Elements that count: where the float64 value and the native one agree on the class, and neither lies where the
    order of a sum decides whether it overflows; None: all."""
    skip: bool
    """The output depends on an undefined case."""
    finite: bool
    """Every element of a float output is finite."""
    classes: torch.Tensor | None
    """Of `rounded`, per element, where not all are finite."""

    def laid_out(self, strides: tuple[int, ...]) -> Expected:
        """The same in the memory order of an output, so that comparing needs no copy."""

        def like(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else bulk.laid_out_like(x, strides)

        value, rounded = bulk.laid_out_like(self.value, strides), bulk.laid_out_like(self.rounded, strides)
        return replace(self, value=value, rounded=rounded, judged=like(self.judged), classes=like(self.classes))


NEAREST = 0.25
"""What is nearer than this to an integer is nearest to it, with room for an epilogue's halves."""


@dataclass(frozen=True, slots=True)
class Case:
    """One input set."""

    kind: InputSet
    inputs: tuple[torch.Tensor, ...]
    expected: tuple[Expected, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """Everything that a problem's kernels are compared with. `opaque`: nothing but guards can be checked."""

    cases: tuple[Case, ...]
    opaque: str = ""
    device: torch.device = CPU

    @property
    def timed(self) -> Case:
        """The set that is timed."""
        return self.cases[-1]

    def laid_out(self, problem: Problem) -> Reference:
        """The reference of another problem with the same graph, in its formats."""
        graph = problem.graph
        strides = [
            f.strides(graph.type_of(o).shape) for o, f in zip(graph.outputs, problem.output_formats, strict=True)
        ]
        cases = [
            replace(c, expected=tuple(e.laid_out(s) for e, s in zip(c.expected, strides, strict=False)))
            for c in self.cases
        ]
        return replace(self, cases=tuple(cases))

    def finite(self) -> Reference:
        """Without the input set that has infinities and NaN in it."""
        return replace(self, cases=tuple(c for c in self.cases if c.kind is not InputSet.ADVERSARIAL))

    def of_kernel(self, kernel: Kernel) -> Reference:
        """What a kernel is held to: a call that is the model's own and says `finite`, to finite inputs."""
        told = isinstance(kernel, LibraryCall) and dict(kernel.schedule.params).get("finite") is True
        return self.finite() if told else self

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [x for c in self.cases for x in c.inputs]
        for expected in (e for c in self.cases for e in c.expected):
            tensors += [
                x for x in (expected.value, expected.rounded, expected.judged, expected.classes) if x is not None
            ]
        return sum(x.numel() * x.element_size() for x in tensors)


def build_reference(problem: Problem, *, seed: int, device: torch.device = CPU) -> Reference:
    """Draw the input sets and evaluate the problem on each. Cost: about five runs of the problem, three in f64.

    Seven, four in f64, where rows are moved apart.
    """
    return reference_of(problem.graph, seed=seed, device=device, finite=problem.finite).laid_out(problem)


NO_TABLES: Mapping[int, Array] = MappingProxyType({})


def reference_of(
    graph: Graph,
    *,
    seed: int,
    device: torch.device = CPU,
    finite: bool = False,
    check: Check = lambda: None,
    tables: Mapping[int, Array] = NO_TABLES,
) -> Reference:
    """The reference of every problem with this graph, row-major (see `Reference.laid_out`); `finite`: `Problem`'s.

    `check` is called before each primitive: what it raises ends this. `tables`: by position, inputs that are not drawn.
    """

    def placed(found: list[torch.Tensor]) -> list[torch.Tensor]:
        for k, array in tables.items():
            found[k] = torch.tensor(array).to(found[k])
        return found

    def drawn(kind: InputSet, domain: Domain) -> list[torch.Tensor]:
        return placed(draw(graph, kind, domain, seed=seed, device=device))

    domain, inputs, precise = _choose_domain(graph, drawn, seed, device, check)
    if isinstance(precise, Declined):
        told = device.type != "cpu" and has_device_form(graph)
        cases = []
        for kind in (InputSet.INTEGERS, InputSet.NORMAL):
            given = drawn(kind, domain)
            cases.append(opaque_case(graph, kind, given, seed) if told else Case(kind, tuple(given), ()))
        return Reference(tuple(cases), "" if all(c.expected for c in cases) else precise.reason, device)
    finite_alone = finite or calls_own(graph)
    before = (InputSet.INTEGERS,) if finite_alone else (InputSet.INTEGERS, InputSet.ADVERSARIAL)
    values = {kind: drawn(kind, domain) for kind in before}
    if (rows := draw_rows(graph, domain, seed=seed, device=device)) is not None:
        values[InputSet.ROWS] = placed(rows)
    cases = [_case(graph, kind, x, seed, device, check, finite=finite) for kind, x in values.items()]
    cases.append(_expect(graph, InputSet.NORMAL, inputs, precise, seed, device, check, finite=finite))
    return Reference(tuple(cases), device=device)


def opaque_case(graph: Graph, kind: InputSet, inputs: list[torch.Tensor], seed: int) -> Case:
    """What ONNX Runtime gives of a graph with one opaque operator; nothing where it does not run."""
    weights = weight_positions(graph)
    inputs = opaque.scaled(graph, inputs, weights)
    found = opaque.told(graph, inputs, seed=seed, weights=weights)
    expected = []
    for value, limits in () if isinstance(found, Declined) else found:
        floating = value.is_floating_point()
        rounded = value.contiguous()
        finite = floating and all_finite(rounded)
        classes = bulk.classes(rounded) if floating and not finite else None
        exact = rounded.double() if floating else rounded
        expected.append(Expected(exact, rounded, limits is None, limits, None, False, finite, classes))
    return Case(kind, tuple(inputs), tuple(expected))


def _choose_domain(
    graph: Graph,
    drawn: Callable[[InputSet, Domain], list[torch.Tensor]],
    seed: int,
    device: torch.device,
    check: Check,
) -> tuple[Domain, list[torch.Tensor], Evaluation | Declined]:
    """The first domain on which nine tenths of the float results are finite, else the one with most."""
    best: tuple[float, Domain, list[torch.Tensor], Evaluation | Declined] | None = None
    for domain in Domain:
        inputs = drawn(InputSet.NORMAL, domain)
        precise = evaluate(
            graph, inputs, Mode.PRECISE, seed=seed, exactness=False, device=device, calls=True, check=check
        )
        if isinstance(precise, Declined):
            return domain, inputs, precise
        floats = [x for x in precise.outputs if x.is_floating_point() and x.numel()]
        share = min((_finite_share(x) for x in floats), default=1.0)
        if best is None or share > best[0]:
            best = (share, domain, inputs, precise)
        if share >= 0.9:
            break
    if best is None:
        raise AssertionError("Domain has members")
    return best[1:]


def _finite_share(x: torch.Tensor) -> float:
    """Of the elements of a tensor that has some."""
    return 1.0 if all_finite(x) else int(torch.count_nonzero(torch.isfinite(x))) / x.numel()


def _case(
    graph: Graph,
    kind: InputSet,
    inputs: list[torch.Tensor],
    seed: int,
    device: torch.device,
    check: Check,
    *,
    finite: bool = False,
) -> Case:
    exactness = kind is InputSet.INTEGERS
    precise = evaluate(
        graph, inputs, Mode.PRECISE, seed=seed, exactness=exactness, device=device, calls=True, check=check
    )
    if isinstance(precise, Declined):
        raise TypeError(precise.reason)
    return _expect(graph, kind, inputs, precise, seed, device, check, finite=finite)


def _expect(
    graph: Graph,
    kind: InputSet,
    inputs: list[torch.Tensor],
    precise: Evaluation,
    seed: int,
    device: torch.device,
    check: Check,
    *,
    finite: bool = False,
) -> Case:
    choices = decisions(graph)
    # what is exact was decided exactly
    choices = tuple((x, 0.0 if finite and e else s) for (x, s), e in zip(choices, precise.exact, strict=True))
    few = sum(graph.type_of(i).size for i in graph.inputs) < _FEW
    shaken = finite and any(share > 0 for _, share in choices)
    all_equal = all((free and share == 0) or exact for (free, share), exact in zip(choices, precise.exact, strict=True))
    plains: list[Evaluation] = []
    mode = Mode.NATIVE if kind is InputSet.ADVERSARIAL else Mode.PLAIN
    scaled = frozenset(x.difference for x in shifts(graph)) if kind is InputSet.ROWS else frozenset[int]()
    # a right kernel may multiply infinite weights with padding, or not: `agreeing` leaves such elements out
    padded = kind is not InputSet.ADVERSARIAL
    rounding = partial(
        evaluate, graph, inputs, mode, device=device, scaled=scaled, padded=padded, calls=True, check=check
    )
    if not all_equal:
        runs = _runs(graph, mode)
        off = 0.0
        if shaken:
            off, runs = (UNDECIDED_FEW, UNDECIDED_FEW_RUNS) if few else (UNDECIDED, UNDECIDED_RUNS)
        for k in range(runs):
            plain = rounding(seed=seed + k, undecided=off)
            plains += [plain] if isinstance(plain, Evaluation) else []
    ulps = max((ULPS.get(n.prim, 0.0) for n in graph.nodes), default=0.0)
    types = [graph.type_of(node) for node in graph.outputs]
    values = [x.contiguous() for x in precise.outputs]
    every = [_comparable(narrowed(x, t.dtype)) for x, t in zip(values, types, strict=True)]

    def agreeing(other: Evaluation) -> list[torch.Tensor | None]:
        pairs = zip(every, other.outputs, types, strict=True)
        return [_of_one_class(x, y) if t.dtype.is_float else None for x, y, t in pairs]

    agreed = agreeing(plains[0]) if plains else [None] * len(types)
    if any(x is not None for x in agreed):  # intermediate values of 16 bits overflowed, or may have
        for most in OVERFLOW_EDGES:
            moved = rounding(seed=seed, overflow=most)
            if isinstance(moved, Evaluation):
                agreed = [_both(x, y) for x, y in zip(agreed, agreeing(moved), strict=True)]
    expected = []
    for k, (t, value, rounded) in enumerate(zip(types, values, every, strict=True)):
        free, share = choices[k]
        equal = (free and share == 0) or (precise.exact[k] and share == 0)
        limits, judged = None, None
        if not equal and plains:
            if t.dtype.is_float:
                judged = _clear_of_overflow(value, rounded, t.dtype, agreed[k])
            else:
                judged = plains[0].outputs[k] == value
            numeric = kind is InputSet.NORMAL or (kind is not InputSet.ADVERSARIAL and share == 0)
            if numeric:
                outputs = [p.outputs[k] for p in plains]
                limits = _largest(t, value, outputs, ulps, share) if shaken else _limits(t, value, outputs, ulps, share)
                if kind is not InputSet.NORMAL:
                    limits = Limits(COARSE * limits.rmse, COARSE * limits.max, limits.flips)
        finite = t.dtype.is_float and all_finite(value) and all_finite(rounded)
        classes = bulk.classes(rounded) if t.dtype.is_float and not finite else None
        expected.append(Expected(value, rounded, equal, limits, judged, precise.undefined[k], finite, classes))
    return Case(kind, tuple(inputs), tuple(expected))


OVERFLOW_EDGES = (0.5, 2.0)
"""Times the largest 16-bit float: between them the errors of all steps before decide what a value overflows to. Wide,
as the sine of a large number loses digits; what a network that grows so fast leaves in between is little."""


def _of_one_class(rounded: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Which elements of two evaluations are both finite, NaN or the same infinity; None: all.

    One value inside that overflows makes whole rows and sums infinite, so those next to overflowing may not be held
    against a kernel.
    """
    classes, native = bulk.classes(rounded), other.to(rounded.dtype).contiguous()
    return None if bulk.same_classes(native, classes, None) else classes == bulk.classes(native)


def _both(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Elements that are in both; None: all are."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


OVERFLOW_UNITS = 4.0
"""So many units of rounding around the least number that becomes infinite, the order of a sum may decide."""


def _clear_of_overflow(
    value: torch.Tensor, rounded: torch.Tensor, dtype: DType, judged: torch.Tensor | None
) -> torch.Tensor | None:
    """`judged` without elements that are infinite or the largest number as rounding has it; None: all are judged.

    Args:
        value: what the elements are, in float64.
        rounded: the same in the output's type.
        dtype: that type.
        judged: which elements are (bool); None: all of them.
    """
    if all_finite(rounded) or dtype.itemsize == 1:  # 8-bit floats saturate
        return judged
    least = float(torch.finfo(rounded.dtype).max) * (1.0 + TOLERANCES[dtype].unit / 2)
    near = ((value.abs() / least) - 1.0).abs() <= OVERFLOW_UNITS * TOLERANCES[dtype].unit
    if not bool(near.any()):
        return judged
    return ~near if judged is None else judged & ~near


SMALL_OUTPUT = 256
"""Elements below which one evaluation says little about the size of errors."""


def _runs(graph: Graph, mode: Mode) -> int:
    """Evaluations that the reference error is taken from: 8 for small outputs of small problems, else 1."""
    smallest = min((graph.type_of(i).size for i in graph.outputs), default=0)
    if mode is not Mode.PLAIN or smallest >= SMALL_OUTPUT:
        return 1
    return 8 if sum(graph.type_of(i).size for i in graph.inputs) < _FEW else 3


_FEW = 1 << 20
"""Elements of all inputs of a small problem."""


def _largest(t: TensorType, value: torch.Tensor, plains: Sequence[torch.Tensor], ulps: float, share: float) -> Limits:
    """The widest limits that any of the evaluations gives."""
    found = [_limits(t, value, [plain], ulps, share) for plain in plains]
    return Limits(max(x.rmse for x in found), max(x.max for x in found), found[0].flips)


def _limits(t: TensorType, value: torch.Tensor, plains: Sequence[torch.Tensor], ulps: float, share: float) -> Limits:
    flips = math.floor(share * t.size)
    if not t.dtype.is_float:
        return Limits(0.0, 0.0, flips)
    square, largest, count = 0.0, 0.0, 0
    for plain in plains:
        if (norms := bulk.error_norms(plain.contiguous(), value)) is not None:
            square += norms[0] ** 2 * plain.numel()
            largest = max(largest, norms[1])
            count += plain.numel()
            continue
        error = value.double() - plain.double()
        error = error[torch.isfinite(error)]
        if error.numel():
            square += float(error.square().sum())
            largest = max(largest, float(error.abs().max()))
            count += error.numel()
    if count == 0:
        return Limits(0.0, 0.0, flips)
    rmse = math.sqrt(square / count)
    return gate_a(
        t.dtype,
        size=t.size,
        rmse_ref=rmse,
        max_ref=max(largest, MAX_OVER_RMSE * rmse),
        rms=rms(value),
        ulps=ulps,
        flips=flips,
    )


# --- the comparison -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """How a check ended; `ratio` is the largest error over its limit that was seen."""

    verdict: Verdict
    error: str = ""
    ratio: float = 0.0


def compare(got: torch.Tensor, want: Expected, where: str) -> Finding:
    """Compare one output tensor (logical shape, any strides) with what it must be."""
    if want.skip or got.numel() == 0:
        return Finding(Verdict.OK)
    got = _comparable(got)
    if bulk.aligned(got, want.value) and (found := _accept(got, want)) is not None:
        return found
    want = want.laid_out(got.contiguous().stride())
    got = got.contiguous()
    if want.equal or not got.is_floating_point():
        return _compare_equal(got, want, where)
    if (finding := _compare_classes(got, want, where)) is not None:
        return finding
    if want.limits is None:
        return Finding(Verdict.OK)
    return _compare_close(got, want, want.limits, where)


def _comparable(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as f32: torch compares none of them."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def _compare_classes(got: torch.Tensor, want: Expected, where: str) -> Finding | None:
    """NAN_CLASS where an element is finite, an infinity or NaN and should be another of these."""
    differ = bulk.classes(got) != bulk.classes(want.rounded)
    if want.judged is not None:
        differ = differ & want.judged
    if not bool(differ.any()):
        return None
    at = int(differ.reshape(-1).nonzero()[0])
    text = f"{where}: {int(differ.sum())} elements of another NaN or infinity class, first at {at}"
    return Finding(Verdict.NAN_CLASS, text, math.inf)


def _accept(got: torch.Tensor, want: Expected) -> Finding | None:
    """OK where that is seen quickly; None where `compare` must look closer. Never accepts what it would not."""
    if want.equal or not got.is_floating_point():
        return Finding(Verdict.OK) if bulk.equal_values(got, want.rounded) else None
    if want.limits is None:
        classes = torch.zeros(got.numel(), dtype=torch.int8, device=got.device).as_strided(got.shape, got.stride())
        wanted = classes if want.classes is None else want.classes
        return Finding(Verdict.OK) if bulk.same_classes(got, wanted, want.judged) else None
    if not want.finite:
        return None
    norms = bulk.error_norms(got, want.value)
    if norms is None:
        return None
    ratio = max(_over(norms[0], want.limits.rmse), _over(norms[1], want.limits.max))
    return Finding(Verdict.OK, "", ratio) if ratio <= 1 else None


def _compare_equal(got: torch.Tensor, want: Expected, where: str) -> Finding:
    wrong = got != want.rounded
    if got.is_floating_point():
        if (finding := _compare_classes(got, want, where)) is not None:
            return finding
        wrong = wrong & ~torch.isnan(got)
    elif want.judged is not None:
        wrong = wrong & want.judged
    if not want.equal and want.limits is None:
        return Finding(Verdict.OK)  # a decision on rounded values, on inputs made to sit on its threshold
    count = int(wrong.sum())
    allowed = want.limits.flips if want.limits is not None else 0
    if count <= allowed:
        return Finding(Verdict.OK)
    at = int(wrong.reshape(-1).nonzero()[0])
    pair = f"{got.reshape(-1)[at].item()} instead of {want.rounded.reshape(-1)[at].item()}"
    return Finding(Verdict.WRONG, f"{where}: {count} of {wrong.numel()} elements differ, [{at}] is {pair}", math.inf)


def _compare_integers(got: torch.Tensor, want: Expected, where: str) -> Finding:
    """Is every element nearest to the right value among those that whole inputs can lead to?

    A lost or doubled term is off by at least 1; results that are no integers are left to the normal set.
    """
    whole = want.rounded == want.rounded.round()
    wrong = whole & ~((got.double() - want.value.double()).abs() < NEAREST)
    if want.skip or not bool(wrong.any()):
        return Finding(Verdict.OK)
    at = int(wrong.reshape(-1).nonzero()[0])
    pair = f"{got.reshape(-1)[at].item()} instead of {want.rounded.reshape(-1)[at].item()}"
    return Finding(Verdict.WRONG, f"{where}: {int(wrong.sum())} elements differ, [{at}] is {pair}", math.inf)


def _compare_close(got: torch.Tensor, want: Expected, limits: Limits, where: str) -> Finding:
    error = got.double() - want.value.double()
    finite = torch.isfinite(error)
    error = torch.where(finite, error, torch.zeros_like(error)).abs().reshape(-1)
    if limits.flips:
        worst = torch.topk(error, min(limits.flips, error.numel())).indices
        error[worst] = 0.0
    count = int(finite.sum())
    if count == 0:
        return Finding(Verdict.OK)
    rmse, largest = float((error.square().sum() / count).sqrt()), float(error.max())
    ratio = max(_over(rmse, limits.rmse), _over(largest, limits.max))
    if ratio <= 1:
        return Finding(Verdict.OK, "", ratio)
    at = int(error.argmax())
    text = (
        f"{where}: RMSE {rmse:.3g} (limit {limits.rmse:.3g}), largest error {largest:.3g} (limit {limits.max:.3g}) "
        f"at [{at}]: {got.reshape(-1)[at].item():.9g} instead of {want.value.reshape(-1)[at].item():.9g}"
    )
    return Finding(Verdict.WRONG, text, ratio)


def all_finite(x: torch.Tensor) -> bool:
    """Is there neither NaN nor infinity?"""
    return not x.is_floating_point() or all(bulk.is_finite(p) for p in bulk.split(x))


def _over(error: float, limit: float) -> float:
    return error / limit if limit > 0 else (0.0 if error == 0 else math.inf)


@dataclass(frozen=True, slots=True)
class Verified:
    """The end of a verification."""

    finding: Finding
    outputs: tuple[torch.Tensor, ...] = ()
    """Bytes of the outputs on the timed set, for the comparison after timing."""
    first_call_s: float = 0.0
    """Of the shorter of the two calls on the first set."""


def verify(
    problem: Problem,
    subject: Subject,
    reference: Reference,
    arenas: dict[InputSet, Arena],
    *,
    slow_s: float,
    clock: Clock,
    check: Check = lambda: None,
) -> Verified:
    """Run a kernel on every input set under both poisons.

    `arenas` holds input buffers that are shared by the kernels of the problem and made here on first use. Where a
    problem says how callers align their memory, buffers lie no better on all sets but the one that is timed.
    Calls that all take over `slow_s` seconds on the first set end the verification as SLOW: two, and where those fail
    two more, because the first finds its memory untouched and a neighbour may have held the cores. `check` is called
    before each run: what it raises ends this.
    """
    ratio, first_call = 0.0, math.inf
    last: tuple[torch.Tensor, ...] = ()
    binding: Binding
    for number, case in enumerate(reference.cases):
        shift = problem.alignment if case is not reference.timed else 0
        if case.kind not in arenas:
            arenas[case.kind] = Arena(problem, case.inputs, device=reference.device, shift=shift)
        runs: list[list[torch.Tensor]] = []
        arena = Arena(problem, case.inputs, inputs=arenas[case.kind], device=reference.device, shift=shift)
        bound: Binding | None = None
        for poison in POISONS:
            check()
            # what has no scratch has nothing of the other poison in it, and its weights are prepared as they were
            binding = bound = bound if bound is not None and not bound.scratch else subject.bind(arena, poison)
            arena.poison(poison)
            start = clock()
            binding.call()
            if number == 0:
                first_call = min(first_call, (clock() - start) * 1e-9)
            finding = _after_call(arena, binding, case.kind)
            if finding.verdict is not Verdict.OK:
                if finding.verdict in (Verdict.INPUT_MODIFIED, Verdict.GUARD):
                    del arenas[case.kind]  # the next kernel gets clean buffers
                return Verified(finding)
            runs.append([b.bytes if poison == POISONS[-1] else b.bytes.clone() for b in arena.outputs])
        finding = _compare_runs(arena, runs, case, subject)
        ratio = max(ratio, finding.ratio)
        if finding.verdict is Verdict.OK and number == len(reference.cases) - 1 and binding.waits:
            finding = _in_turn(arena, subject, runs[0], case)
        if finding.verdict is not Verdict.OK:
            return Verified(finding)
        if number == 0 and first_call > slow_s:
            for _ in range(2):
                start = clock()
                binding.call()
                first_call = min(first_call, (clock() - start) * 1e-9)
            if first_call > slow_s:
                text = f"a call takes {first_call * 1e6:.0f} us; from {slow_s * 1e6:.0f} us on it cannot win"
                return Verified(Finding(Verdict.SLOW, text, ratio))
        last = tuple(runs[-1]) if number == len(reference.cases) - 1 else ()
    return Verified(
        Finding(Verdict.OK, reference.opaque and f"unverified: {reference.opaque}", ratio), last, first_call
    )


def at_the_fence(
    problem: Problem,
    subject: Subject,
    reference: Reference,
    before: Sequence[torch.Tensor],
    check: Check = lambda: None,
) -> Finding:
    """A kernel that was verified once more where it must not touch anything beside its buffers, not even to no effect.

    If it does, this process ends. `before`: the bytes of the outputs on the timed set. What `check` raises ends it. Not
    asked of what takes much memory, nor of a library.
    """
    graph = problem.graph
    size = sum(graph.type_of(i).nbytes for i in (*graph.inputs, *graph.outputs))
    if not subject.deterministic or size > FENCED_BYTES or reference.device != CPU:
        return Finding(Verdict.OK)
    case = reference.timed
    for fence in Fence:
        check()
        arena = Arena(problem, case.inputs, shift=problem.alignment, fence=fence)
        binding = subject.bind(arena, POISONS[0])
        arena.poison(POISONS[0])
        binding.call()
        finding = _after_call(arena, binding, case.kind)
        if finding.verdict is not Verdict.OK:
            return finding
        for k, (buffer, x) in enumerate(zip(arena.outputs, before, strict=True)):
            if not bulk.same_bytes(buffer.bytes, x) and not (case.expected and case.expected[k].skip):
                return Finding(Verdict.UNSTABLE, f"output {k}: other bits where memory lies otherwise")
    return Finding(Verdict.OK)


def _in_turn(arena: Arena, subject: Subject, before: Sequence[torch.Tensor], case: Case) -> Finding:
    """The same bits when the threads of a call take turns? Asked of kernels whose threads may wait for each other."""
    start = time.monotonic()
    for poison in POISONS:
        if time.monotonic() - start > TURNS_S:
            break  # what is so long is no matter of who comes first
        binding = subject.bind(arena, poison)
        arena.poison(POISONS[-1])
        on_one_core(binding.call)
        finding = _after_call(arena, binding, case.kind)
        if finding.verdict is not Verdict.OK:
            return finding
        for k, (buffer, x) in enumerate(zip(arena.outputs, before, strict=True)):
            if not bulk.same_bytes(buffer.bytes, x) and not (case.expected and case.expected[k].skip):
                text = f"{case.kind.value}, output {k}: other bits where its threads take turns on one core"
                return Finding(Verdict.UNSTABLE, text)
    return Finding(Verdict.OK)


def _after_call(arena: Arena, binding: Binding, kind: InputSet) -> Finding:
    if not Buffer.all_guarded([*arena.inputs, *arena.outputs, *binding.scratch]):
        ours = "the workspace or a packed weight" if arena.is_guarded() else "an input or output"
        return Finding(Verdict.GUARD, f"{kind.value}: wrote outside {ours}")
    if not arena.inputs_unmodified():
        return Finding(Verdict.INPUT_MODIFIED, f"{kind.value}: an input has other bytes than before")
    return Finding(Verdict.OK)


def _compare_runs(arena: Arena, runs: list[list[torch.Tensor]], case: Case, subject: Subject) -> Finding:
    ratio = 0.0
    for k, t in enumerate(arena.output_types):
        where = f"{case.kind.value}, output {k}"
        first, second = (r[k] for r in runs)
        repeated = bulk.same_bytes(first, second)
        if not repeated and (stale := _never_written(first, second, t.dtype.itemsize)):
            return Finding(Verdict.UNWRITTEN, f"{where}: {stale}")
        if not case.expected:
            continue  # opaque: nothing to compare with
        want = case.expected[k]
        integers = subject.transforms and case.kind is InputSet.INTEGERS and t.dtype.is_float
        judge = _compare_integers if integers else compare
        finding = judge(arena.output_tensors[k], want, f"{where}, poison {POISONS[1]:#x}")
        if finding.verdict is Verdict.OK and not repeated:
            arena.outputs[k].bytes.copy_(first)
            ratio = max(ratio, finding.ratio)
            finding = judge(arena.output_tensors[k], want, f"{where}, poison {POISONS[0]:#x}")
        ratio = max(ratio, finding.ratio)
        if finding.verdict is not Verdict.OK:
            return Finding(finding.verdict, finding.error, ratio)
        if subject.deterministic and not want.skip and not repeated:
            return Finding(Verdict.UNSTABLE, f"{where}: two runs on the same inputs differ in bits", ratio)
    return Finding(Verdict.OK, "", ratio)


def _never_written(first: torch.Tensor, second: torch.Tensor, itemsize: int) -> str:
    """Which elements hold the poison of both runs; an empty text: none."""
    ours = ((first == POISONS[0]) & (second == POISONS[1])).view(-1, itemsize)
    stale = ours[:, 0]
    for byte in range(1, itemsize):
        stale = stale & ours[:, byte]
    count = int(stale.sum())
    return f"{count} elements never written, first at byte-order {int(stale.nonzero()[0])}" if count else ""


def verify_after(
    arena: Arena, binding: Binding, reference: Reference, before: Sequence[torch.Tensor], *, deterministic: bool
) -> Finding:
    """The last timed output of one arena against the reference and against what was verified before."""
    finding = _after_call(arena, binding, reference.timed.kind)
    if finding.verdict is not Verdict.OK:
        return finding
    ratio = 0.0
    for k, want in enumerate(reference.timed.expected):
        if bulk.same_bytes(arena.outputs[k].bytes, before[k]):
            continue  # those bits were compared
        if deterministic and not want.skip:
            return Finding(Verdict.UNSTABLE, f"output {k} has other bits after timing than before")
        found = compare(arena.output_tensors[k], want, f"after timing, output {k}")
        ratio = max(ratio, found.ratio)
        if found.verdict is not Verdict.OK:
            return Finding(Verdict.UNSTABLE, found.error, ratio)
    return Finding(Verdict.OK, "", ratio)


def classify(error: BaseException) -> Finding:
    """The class of an exception that binding or calling a kernel raised."""
    text = f"{type(error).__name__}: {error}"[:2000]
    lowered = text.lower()
    if isinstance(error, MemoryError) or "can't allocate memory" in lowered or "out of memory" in lowered:
        return Finding(Verdict.OOM, text)
    return Finding(Verdict.COMPILE if isinstance(error, WeftError) else Verdict.CRASH, text)
