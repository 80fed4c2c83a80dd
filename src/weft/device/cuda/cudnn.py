"""cuDNN by its C interface: convolutions by an engine and settings that are named, and those of its heuristic.

    y = activation(conv(x, w) + residual + bias)      each of the last three optional; sums in f32

A convolution with what follows it is a graph of operations. What runs it is an engine, by its number, with values for
its knobs; these mean something to one version of the library on one kind of GPU only, and `restore` has the library
check them before they are used. No framework.
Source: cuDNN documentation, "Backend API"; numbers of enumerations from its header `cudnn_graph.h`, version 9.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from weft.errors import DeviceError
from weft.ir.declined import Declined

Activation = Literal["", "relu"]
ALIGNMENT = 16
"""Bytes: of every address."""
MOST_KNOBS = 64
"""Settings of an engine, and notes about it: more than there are."""

_DTYPES = {"f32": 0, "tf32": 0, "f16": 2, "bf16": 9}
"""cudnnDataType_t of the tensors; `tf32` is f32 in memory."""
_F32 = 0
_HANDLE, _DATA_TYPE, _BOOLEAN, _INT64, _FLOAT, _POINTER = 0, 1, 2, 3, 4, 6
_CONV_MODE, _HEUR_MODE, _KNOB, _NOTE, _POINTWISE_MODE, _DESCRIPTOR = 7, 8, 9, 11, 14, 15
"""cudnnBackendAttributeType_t."""
_CTYPES: dict[int, Any] = {
    _HANDLE: ctypes.c_void_p,
    _BOOLEAN: ctypes.c_bool,
    _INT64: ctypes.c_int64,
    _FLOAT: ctypes.c_float,
    _POINTER: ctypes.c_void_p,
    _DESCRIPTOR: ctypes.c_void_p,
}
"""Of the values of an attribute; every enumeration is an int."""
_POINTWISE, _CONVOLUTION, _ENGINE, _CONFIG, _HEURISTIC, _PLAN, _KNOB_CHOICE = 0, 1, 2, 3, 4, 5, 7
_FORWARD, _APPLY, _GRAPH, _PACK, _TENSOR = 10, 13, 15, 16, 17
"""cudnnBackendDescriptorType_t."""
_MODE_ADD, _MODE_RELU = 0, 100
"""cudnnPointwiseMode_t."""
_HEURISTICS = (3, 2)
"""cudnnBackendHeurMode_t: A, then what works everywhere."""
_CROSS_CORRELATION = 1
_TENSOR_CORE, _DOWN_CONVERT, _REDUCED_SUMS, _ANY_ORDER = 0, 1, 2, 4
"""cudnnBackendNumericalNote_t."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A two-dimensional convolution as the library is asked for it; tensors as (batch, channels, height, width)."""

    x: tuple[int, ...]
    x_strides: tuple[int, ...]
    """In elements."""
    w: tuple[int, ...]
    """(out channels, channels of a group, height, width)."""
    w_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    """Of the result, and of the residual."""
    dtype: str
    """`f16`, `bf16`, `f32`, or `tf32`: f32 in memory."""
    pads: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    """Before and behind, each of height and width."""
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    bias: bool = False
    """One value per channel."""
    residual: bool = False
    activation: Activation = ""

    @property
    def y(self) -> tuple[int, ...]:
        """Sizes of the result."""
        sides = (
            (n + lo + hi - d * (k - 1) - 1) // s + 1
            for n, k, lo, hi, s, d in zip(self.x[2:], self.w[2:], *self.pads, self.strides, self.dilations, strict=True)
        )
        return (self.x[0], self.w[0], *sides)

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * math.prod(self.y) * math.prod(self.w[1:])


@dataclass(frozen=True, slots=True)
class ConvAddresses:
    """Device addresses; 0 where the convolution has no such operand."""

    x: int
    w: int
    y: int
    bias: int = 0
    residual: int = 0
    workspace: int = 0


Knobs = tuple[tuple[int, int], ...]
"""Settings of an engine: kind (cudnnBackendKnobType_t) and value, by kind."""


@final
class Cudnn:
    """The library with a handle of its own, in the context that is current. For one thread at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Make a handle.

        Raises:
            DeviceError: the library refuses it [W301].
        """
        self._library = library
        self._handle = ctypes.c_void_p()
        self._call("cudnnCreate", ctypes.byref(self._handle))

    @property
    def version(self) -> str:
        """As `cudnnGetVersion` tells it."""
        ask = self._library.cudnnGetVersion
        ask.restype = ctypes.c_size_t
        return str(ask())

    def algorithms(self, asked: Convolution, most: int, *, workspace: int) -> list[ConvAlgorithm]:
        """The heuristic's first few, best first, none twice; none for what the library does not take.

        Left out: what rounds operands or sums to smaller types, sums in no fixed order, does arithmetic in TF32 unless
        that was asked for, or wants more than `workspace` bytes.
        """
        found: list[ConvAlgorithm] = []
        try:
            operations = _Operations(self, asked)
        except DeviceError:
            return []
        for mode in _HEURISTICS:
            if found:
                break  # what works everywhere may take a second to make, and is seldom fast
            try:
                configs = self._configurations(operations, mode)
            except DeviceError:
                continue  # this heuristic does not know such graphs
            for config in configs:
                if len(found) >= most:
                    return found
                made = self._usable(operations, config, workspace)
                if made is not None and all((made.engine, made.knobs) != (x.engine, x.knobs) for x in found):
                    made.number = len(found)
                    found.append(made)
        return found

    def restore(self, asked: Convolution, engine: int, knobs: Knobs) -> ConvAlgorithm | Declined:
        """An algorithm by its engine's number and settings, if the library takes them for this convolution."""
        try:
            operations = _Operations(self, asked)
            named = self.make(_ENGINE, (1300, _DESCRIPTOR, [operations.graph]), (1301, _INT64, [engine]))
            choices = [self.make(_KNOB_CHOICE, (600, _KNOB, [kind]), (601, _INT64, [value])) for kind, value in knobs]
            config = self.make(
                _CONFIG, (300, _DESCRIPTOR, [named]), *([(302, _DESCRIPTOR, choices)] if choices else [])
            )
            plan = self._plan(config)
            in_order = self.as_asked(named, asked)
        except DeviceError as error:
            return Declined(f"cuDNN does not take this algorithm: {error}")
        return ConvAlgorithm(self, asked, operations, plan, engine, knobs, [named, *choices, config], in_order=in_order)

    def _configurations(self, operations: _Operations, mode: int) -> list[_Held]:
        heuristic = self.make(_HEURISTIC, (201, _DESCRIPTOR, [operations.graph]), (200, _HEUR_MODE, [mode]))
        count = self.get(heuristic, 202, _DESCRIPTOR, 0)
        held = [self._new(_CONFIG) for _ in range(int(count))]
        return held[: self._fill(heuristic, 202, held)]

    def _usable(self, operations: _Operations, config: _Held, workspace: int) -> ConvAlgorithm | None:
        """None where an engine computes in another way than asked for, or does not work."""
        asked = operations.asked
        try:
            engine = self._new(_ENGINE)
            self._fill(config, 300, [engine])
            if not self.as_asked(engine, asked):
                return None
            (number,) = self.get(engine, 1301, _INT64, 1)
            choices = [self._new(_KNOB_CHOICE) for _ in range(MOST_KNOBS)]
            knobs = []
            for choice in choices[: self._fill(config, 302, choices)]:
                (kind,), (value,) = self.get(choice, 600, _KNOB, 1), self.get(choice, 601, _INT64, 1)
                knobs.append((int(kind), int(value)))
            made = ConvAlgorithm(
                self, asked, operations, self._plan(config), int(number), tuple(sorted(knobs)), [config, engine]
            )
            return made if made.workspace <= workspace else None
        except DeviceError:
            return None

    def as_asked(self, engine: _Held, asked: Convolution) -> bool:
        """Whether an engine adds up in one order and rounds nothing on the way to less than what was asked for."""
        notes = set(self.get(engine, 1303, _NOTE, MOST_KNOBS))
        if _ANY_ORDER in notes or (asked.dtype == "f32" and _TENSOR_CORE in notes):
            return False
        return asked.dtype == "tf32" or not notes & {_DOWN_CONVERT, _REDUCED_SUMS}

    def _plan(self, config: _Held) -> _Held:
        return self.make(_PLAN, (400, _HANDLE, [self._handle]), (401, _DESCRIPTOR, [config]))

    # -- descriptors

    def make(self, kind: int, *attributes: tuple[int, int, Sequence[Any]]) -> _Held:
        """A descriptor with these attributes (name, type, values), finished.

        Raises:
            DeviceError: the library does not take it [W301].
        """
        held = self._new(kind)
        for name, type_, values in attributes:
            raw = [x.pointer if isinstance(x, _Held) else x for x in values]
            array = (_CTYPES.get(type_, ctypes.c_int) * len(raw))(*raw)
            self._call("cudnnBackendSetAttribute", held.pointer, name, type_, ctypes.c_int64(len(raw)), array)
        self._call("cudnnBackendFinalize", held.pointer)
        return held

    def get(self, held: _Held, name: int, type_: int, most: int) -> Any:
        """Values of an attribute; with `most` 0 their number."""
        count = ctypes.c_int64(0)
        array = (_CTYPES.get(type_, ctypes.c_int) * max(most, 1))()
        given = array if most else None
        self._call(
            "cudnnBackendGetAttribute", held.pointer, name, type_, ctypes.c_int64(most), ctypes.byref(count), given
        )
        return list(array)[: min(count.value, most)] if most else count.value

    def _fill(self, held: _Held, name: int, into: Sequence[_Held]) -> int:
        """Descriptors that are an attribute are written into ones made before; how many there were."""
        count = ctypes.c_int64(0)
        array = (ctypes.c_void_p * max(len(into), 1))(*(x.pointer for x in into))
        self._call(
            "cudnnBackendGetAttribute", held.pointer, name, _DESCRIPTOR, ctypes.c_int64(len(into)),
            ctypes.byref(count), array,
        )  # fmt: skip
        return min(count.value, len(into))

    def _new(self, kind: int) -> _Held:
        pointer = ctypes.c_void_p()
        self._call("cudnnBackendCreateDescriptor", kind, ctypes.byref(pointer))
        return _Held(self._library, pointer)

    def run(self, plan: _Held, pack: _Held, stream: int) -> None:
        """Put a bound plan on a stream.

        Raises:
            DeviceError: the library refuses it [W301].
        """
        self._call("cudnnSetStream", self._handle, ctypes.c_void_p(stream))
        self._call("cudnnBackendExecute", self._handle, plan.pointer, pack.pointer)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DeviceError(problem=f"{name} failed with status {status}")


@final
class _Held:
    """A descriptor, destroyed with its last user."""

    def __init__(self, library: ctypes.CDLL, pointer: ctypes.c_void_p) -> None:
        self._library, self.pointer = library, pointer

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be going down
            self._library.cudnnBackendDestroyDescriptor(self.pointer)


@final
class _Operations:
    """The graph of a convolution with what follows it; kept as long as a plan of it."""

    def __init__(self, cudnn: Cudnn, asked: Convolution) -> None:
        self.asked, self._cudnn = asked, cudnn
        kind = _DTYPES[asked.dtype]
        x = self._tensor(1, kind, asked.x, asked.x_strides)
        w = self._tensor(2, kind, asked.w, asked.w_strides)
        steps = [asked.residual, asked.bias, asked.activation == "relu"]
        left = sum(steps)
        at = self._result(kind, left, 10)
        before, behind = asked.pads
        how = cudnn.make(
            _CONVOLUTION,
            (106, _INT64, [2]),
            (100, _DATA_TYPE, [_F32]),
            (101, _CONV_MODE, [_CROSS_CORRELATION]),
            (105, _INT64, before),
            (104, _INT64, behind),
            (102, _INT64, asked.dilations),
            (103, _INT64, asked.strides),
        )
        one, zero = (700, _FLOAT, [1.0]), (701, _FLOAT, [0.0])
        operands = [(704, _DESCRIPTOR, [x]), (703, _DESCRIPTOR, [w]), (705, _DESCRIPTOR, [at])]
        operations = [cudnn.make(_FORWARD, (702, _DESCRIPTOR, [how]), *operands, one, zero)]
        self._kept = [x, w, how, at]
        channels = (1, asked.w[0], 1, 1)
        others = {
            0: lambda: self._tensor(4, kind, asked.y, asked.y_strides),
            1: lambda: self._tensor(5, kind, channels, (asked.w[0], 1, asked.w[0], asked.w[0])),
        }
        for number, wanted in enumerate(steps):
            if not wanted:
                continue
            left -= 1
            made = self._result(kind, left, 11 + number)
            mode = cudnn.make(
                _POINTWISE,
                (0, _POINTWISE_MODE, [_MODE_RELU if number == 2 else _MODE_ADD]),
                (1, _DATA_TYPE, [_F32]),
            )
            other = [] if number == 2 else [others[number]()]
            extra = [(752, _DESCRIPTOR, other)] if other else []
            operations.append(
                cudnn.make(
                    _APPLY, (750, _DESCRIPTOR, [mode]), (751, _DESCRIPTOR, [at]), *extra, (753, _DESCRIPTOR, [made])
                )
            )
            self._kept += [mode, made, *other]
            at = made
        self._kept += operations
        self.graph = cudnn.make(_GRAPH, (800, _HANDLE, [cudnn._handle]), (801, _DESCRIPTOR, operations))

    def _result(self, kind: int, left: int, number: int) -> _Held:
        """What an operation makes: the result itself, or a value in f32 that is not stored."""
        if left == 0:
            return self._tensor(3, kind, self.asked.y, self.asked.y_strides)
        return self._tensor(number, _F32, self.asked.y, self.asked.y_strides, virtual=True)

    def _tensor(
        self, number: int, kind: int, sizes: Sequence[int], strides: Sequence[int], *, virtual: bool = False
    ) -> _Held:
        return self._cudnn.make(
            _TENSOR,
            (901, _DATA_TYPE, [kind]),
            (902, _INT64, sizes),
            (903, _INT64, strides),
            (906, _INT64, [number]),
            (900, _INT64, [ALIGNMENT]),
            (907, _BOOLEAN, [virtual]),
        )


@final
@dataclass(slots=True)
class ConvAlgorithm:
    """One engine with its settings for one convolution."""

    cudnn: Cudnn
    asked: Convolution
    operations: _Operations
    """Kept with the plan."""
    plan: _Held
    engine: int
    knobs: Knobs
    kept: list[_Held] = field(default_factory=list)
    number: int = 0
    """Place in the heuristic's order."""
    in_order: bool = True
    """See `Cudnn.as_asked`."""

    @property
    def workspace(self) -> int:
        """Bytes that it needs."""
        return int(self.cudnn.get(self.plan, 402, _INT64, 1)[0])

    def bind(self, at: ConvAddresses) -> Callable[[int], None]:
        """What puts the convolution with these addresses on a stream.

        Raises:
            DeviceError: the library does not take them; when called, where it refuses to run [W301].
        """
        given = {1: at.x, 2: at.w, 3: at.y}
        if self.asked.residual:
            given[4] = at.residual
        if self.asked.bias:
            given[5] = at.bias
        pack = self.cudnn.make(
            _PACK,
            (1000, _INT64, list(given)),
            (1001, _POINTER, list(given.values())),
            (1003, _POINTER, [at.workspace or None]),
        )
        return lambda stream: self.cudnn.run(self.plan, pack, stream)


def find_cudnn() -> Cudnn | Declined:
    """The library that is loaded, else the one that an installed package or the system has."""
    path = _loaded()
    tried = [path] if path else []
    reason = ""
    if not tried:
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib

            tried = [str(load_nvidia_dynamic_lib("cudnn").abs_path)]
        except Exception as error:  # the package's own classes, and ImportError where it is missing
            tried = ["libcudnn.so.9"]
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    for name in tried:
        try:
            return Cudnn(ctypes.CDLL(name))
        except (OSError, DeviceError) as error:
            reason = reason or str(error)
    return Declined(f"no cuDNN: {reason}")


def _loaded() -> str:
    """Path of the library in this process, empty without."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((x.split(maxsplit=5)[-1] for x in lines if "/libcudnn.so" in x), "")
