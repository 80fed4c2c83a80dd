"""Runs library calls on torch tensors: the only part of the generators that a saved plan needs.

A call names operators by text; only the namespaces in `NAMESPACES` and the few `weft.*` steps below are
admitted, so that a plan from elsewhere cannot name anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, final

import torch

from weft.errors import ArtifactError
from weft.ir.types import DType
from weft.kernels.source import CallStep, CallValue, LibraryCall, Ref

NAMESPACES = frozenset({"aten", "mkldnn", "mkl"})

TORCH_DTYPE: Mapping[DType, torch.dtype] = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F8E4M3: torch.float8_e4m3fn,
    DType.F8E5M2: torch.float8_e5m2,
    DType.I64: torch.int64,
    DType.I32: torch.int32,
    DType.I16: torch.int16,
    DType.I8: torch.int8,
    DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
}
_HELD = frozenset(t for d, t in TORCH_DTYPE.items() if d.is_emulated)
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def _tensor(
    values: Sequence[float], dtype: torch.dtype, shape: Sequence[int], device: torch.device | None = None
) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device).reshape(tuple(shape))


def _number(value: float, dtype: torch.dtype) -> torch.Tensor:
    """On the host, whatever the device: kernels take it by value."""
    return torch.tensor(value, dtype=dtype)


def _opaque_aten(payload: str, result: int, *inputs: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
    """One result of a call; -1: all of them."""
    from weft.generate.library.opaque_aten import run_aten

    found = run_aten(payload, list(inputs))
    return found if result < 0 else found[result]


def _opaque_onnx(payload: str, result: int, *inputs: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
    from weft.generate.library.opaque_onnx import run_onnx

    # NumPy has no bf16 nor floats of 8 bits: the operator's model takes and gives f32 there
    arrays = [(x.float() if x.dtype in _HELD else x).contiguous().cpu().numpy() for x in inputs]
    found = run_onnx(payload, arrays)
    made = [torch.from_numpy(x) for x in (found if result < 0 else [found[result]])]
    placed = [x.to(inputs[0].device) if inputs else x for x in made]
    return placed if result < 0 else placed[0]


def _result(every: Sequence[torch.Tensor], result: int) -> torch.Tensor:
    return every[result]


_SPECIAL: dict[str, Callable[..., Any]] = {
    "weft.tensor": _tensor,
    "weft.number": _number,
    "weft.opaque_aten": _opaque_aten,
    "weft.opaque_onnx": _opaque_onnx,
    "weft.result": _result,
}


def register(target: str, run: Callable[..., Any]) -> None:
    """Make a step of our own known, which is no operator of the framework."""
    _SPECIAL[target] = run


_INSTEAD: dict[str, Callable[..., torch.Tensor]] = {}


def instead_of(target: str, run: Callable[..., torch.Tensor]) -> None:
    """Have calls run this, of the same arguments, where they name that operator of the framework."""
    _INSTEAD[target] = run


def resolve(target: str) -> Callable[..., Any]:
    """The operator that a step names.

    Raises:
        ArtifactError: a namespace that is not admitted, an operator that this torch lacks, or one that does more than
            compute its results [W401].
    """
    if target in _SPECIAL:
        return _SPECIAL[target]
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    remedy = "compile the model again with this version of torch"
    if namespace not in NAMESPACES or not name.isidentifier():
        raise ArtifactError(problem=f"library call names {target!r}", remedy=remedy)
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except AttributeError:
        raise ArtifactError(problem=f"this torch has no operator {target!r}", remedy=remedy) from None
    if not isinstance(found, torch._ops.OpOverload) or _reaches_outside(found, name):
        problem = f"library call names {target!r}, which has effects outside its results"
        raise ArtifactError(problem=problem, remedy="do not use this file: Weft did not write it")
    return found


def _reaches_outside(operator: torch._ops.OpOverload, name: str) -> bool:
    """Whether it changes an argument other than `out`, or has a file, a generator or a storage as one."""
    from weft.generate.library.opaque_aten import FORBIDDEN, FORBIDDEN_ARGUMENTS

    arguments = operator._schema.arguments
    changed = [x for x in arguments if x.alias_info is not None and x.alias_info.is_write and not x.is_out]
    return bool(changed) or name in FORBIDDEN or bool({x.name for x in arguments} & FORBIDDEN_ARGUMENTS)


_CREATORS = frozenset({"weft.tensor", "aten.arange.default", "aten.full.default"})
"""Steps that make a tensor out of nothing: they are told where."""


def is_capturable(call: LibraryCall) -> bool:
    """Whether a call may be recorded into a CUDA graph: ONNX Runtime's operators run on the host."""
    return not any(step.target == "weft.opaque_onnx" for step in call.run)


@contextmanager
def plain_math(*, allow_tf32: bool = False) -> Iterator[None]:
    """Products of f32 in f32 and sums of 16-bit products in f32, whatever the process has set; restored on leaving.

    cuDNN takes the algorithm that its heuristic names, not the one that was fastest when this process first met a
    convolution: a saved plan must give the same bits in another process. As `deterministic` is set, what the process
    found by trying before is not taken either: the framework keeps the two apart.
    """
    if not torch.cuda.is_available():  # nothing of this is about the CPU
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    saved = (
        matmul.allow_tf32,
        cudnn.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        cudnn.benchmark,
        cudnn.deterministic,
    )
    try:
        cudnn.benchmark, cudnn.deterministic = False, True
        matmul.allow_tf32 = cudnn.allow_tf32 = allow_tf32
        matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = saved[:2]
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = saved[2:4]
        cudnn.benchmark, cudnn.deterministic = saved[4:]


@final
class Held:
    """A value that one call makes and others read, as a tensor of the framework's: nothing is copied.

    Readers are given what they were verified with: where a result lies otherwise, or is a view, it is copied.
    """

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, alignment: int) -> None:
        """`strides` in elements, `alignment` in bytes."""
        self._shape, self._strides, self._dtype, self._alignment = shape, strides, dtype, alignment
        self._tensor: torch.Tensor | None = None

    def write(self, result: torch.Tensor, operands: Sequence[torch.Tensor]) -> None:
        """Take a result of a call on these operands."""
        found = result.reshape(self._shape)
        dense = all(n == 1 or x == y for n, x, y in zip(self._shape, found.stride(), self._strides, strict=True))
        begins = found.untyped_storage().data_ptr()
        own = all(x.untyped_storage().data_ptr() != begins for x in operands)
        if dense and own and found.dtype is self._dtype and found.data_ptr() % self._alignment == 0:
            self._tensor = found.as_strided(self._shape, self._strides)
            return
        self._tensor = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=found.device)
        self._tensor.copy_(found)

    def read(self) -> torch.Tensor:
        """What was written last."""
        if self._tensor is None:
            raise RuntimeError("a value is read that no step has written, or after its last reader")
        return self._tensor

    def drop(self) -> None:
        """Nobody reads it any more in this run."""
        self._tensor = None


class BoundCall:
    """A library call whose operators are resolved and whose weights are prepared.

    Tensors have the problem's logical shapes; their strides carry the formats.
    """

    def __init__(
        self, call: LibraryCall, weights: Mapping[int, torch.Tensor], *, device: torch.device | None = None
    ) -> None:
        """Run the prepare steps; `weights` holds the inputs that are constant, by position, on `device` (None: CPU)."""
        self._call = call
        self._device = device
        self._prepared: list[Any] = []
        none: Sequence[torch.Tensor] = ()
        for step in call.prepare:
            function, args, kwargs = self._bind(step, none, [], weights)
            self._prepared.append(_keep(function(*args, **kwargs), step.result))
        used = _references(call)
        self._prepared = [x if ("prep", k) in used else None for k, x in enumerate(self._prepared)]
        self._dying = _last_reads(call)
        self._weights = {k: w for k, w in weights.items() if ("in", k) in used}

    @property
    def reads(self) -> frozenset[int]:
        """Weights that a run reads as they were given; the others are not held any longer."""
        return frozenset(self._weights)

    def _bind(
        self, step: CallStep, inputs: Sequence[torch.Tensor], tmp: list[Any], weights: Mapping[int, torch.Tensor]
    ) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        kwargs = {k: self._value(v, inputs, tmp, weights) for k, v in step.kwargs}
        if self._device is not None and step.target in _CREATORS:
            kwargs["device"] = self._device
        function = _INSTEAD.get(step.target) or resolve(step.target)
        return function, [self._value(v, inputs, tmp, weights) for v in step.args], kwargs

    # a function inside `_bind` that calls itself would keep the tensors until garbage is searched for
    def _value(
        self, v: CallValue, inputs: Sequence[torch.Tensor], tmp: list[Any], weights: Mapping[int, torch.Tensor]
    ) -> Any:
        if isinstance(v, Ref):
            if v.kind == "in":
                return weights[v.index] if v.index in weights else inputs[v.index]
            return self._prepared[v.index] if v.kind == "prep" else tmp[v.index]
        if isinstance(v, tuple):
            return [self._value(x, inputs, tmp, weights) for x in v]
        if isinstance(v, str) and v.startswith("dtype:"):
            return TORCH_DTYPE[DType(v[6:])]
        if isinstance(v, str) and v.startswith("format:"):
            return _FORMATS[v[7:]]
        return v

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Call once and give the results back as they come (any strides); `out`: what an `out_variant` call writes.

        `check` is called before each step: what it raises ends the run.
        """
        tmp: list[Any] = []
        last = len(self._call.run) - 1
        for number, step in enumerate(self._call.run):
            check()
            function, args, kwargs = self._bind(step, inputs, tmp, self._weights)
            if number == last and out is not None:
                kwargs["out"] = out
            tmp.append(_keep(function(*args, **kwargs), step.result))
            del args, kwargs
            for done in self._dying.get(number, ()):
                tmp[done] = None
        return [self._result(r, inputs, tmp) for r in self._call.outputs]

    def _result(self, ref: Ref, inputs: Sequence[torch.Tensor], tmp: list[Any]) -> torch.Tensor:
        if ref.kind == "in":
            return self._weights[ref.index] if ref.index in self._weights else inputs[ref.index]
        return cast("torch.Tensor", self._prepared[ref.index] if ref.kind == "prep" else tmp[ref.index])

    def launcher(
        self, inputs: Sequence[torch.Tensor | Held], outputs: Sequence[torch.Tensor | Held]
    ) -> Callable[[], None]:
        """A function of no arguments that runs the call from fixed inputs into fixed outputs.

        Some of either may be held: these are looked up in every run.

        Operators are resolved and arguments bound here, once. A step that only views fixed memory is done
        here too; an `out_variant` call writes its output without a copy.
        """
        places, targets = _fixed(inputs), _fixed(outputs)
        if places is None or targets is None:
            return self._held_launcher(inputs, outputs)
        return self._fixed_launcher(places, targets)

    def _held_launcher(
        self, inputs: Sequence[torch.Tensor | Held], outputs: Sequence[torch.Tensor | Held]
    ) -> Callable[[], None]:
        def run() -> None:
            operands = [x.read() if isinstance(x, Held) else x for x in inputs]
            if self._call.out_variant:
                self.run(operands, cast("torch.Tensor", outputs[0]))
                return
            for result, output in zip(self.run(operands), outputs, strict=True):
                if isinstance(output, Held):
                    output.write(result, operands)
                else:
                    _copy(output, result)

        return run

    def _fixed_launcher(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Callable[[], None]:
        slots: list[Any] = []
        """Result of each step where it is fixed, else None; filled per call at the positions of `dynamic`."""
        dynamic: list[tuple[int, Callable[..., Any], list[Any], dict[str, Any], list[tuple[int, int]], int]] = []
        last = len(self._call.run) - 1
        for number, step in enumerate(self._call.run):
            waiting = [
                (at, v.index)
                for at, v in enumerate(step.args)
                if isinstance(v, Ref) and v.kind == "tmp" and slots[v.index] is None
            ]
            nested = any(_reads_unknown(v, slots) for v in [*step.args, *(v for _, v in step.kwargs)])
            if nested and not all(_direct(v, slots) for v in [*step.args, *(v for _, v in step.kwargs)]):
                return self._slow_launcher(inputs, outputs)
            function, args, kwargs = self._bind(step, inputs, slots, self._weights)
            if number == last and self._call.out_variant:
                kwargs["out"] = outputs[0]
            elif not waiting and step.target in _VIEWS:
                view = function(*args, **kwargs)
                if view.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr():
                    slots.append(view)
                    continue
            slots.append(None)
            dynamic.append((number, function, args, kwargs, waiting, step.result))
        copies = [] if self._call.out_variant else list(zip(self._call.outputs, outputs, strict=True))
        if len(dynamic) == 1 and len(copies) <= 1:
            _, function, args, kwargs, _, result = dynamic[0]
            once = partial(function, *args, **kwargs)
            return once if not copies else partial(_run_and_copy, once, result, copies[0][1])

        def run() -> None:
            values = list(slots)
            for number, function, args, kwargs, waiting, result in dynamic:
                if waiting:
                    args = list(args)
                    for at, index in waiting:
                        args[at] = values[index]
                values[number] = _keep(function(*args, **kwargs), result)
            for ref, output in copies:
                _copy(output, self._result(ref, inputs, values))

        return run

    def _slow_launcher(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Callable[[], None]:
        if self._call.out_variant:

            def write() -> None:
                self.run(inputs, outputs[0])

            return write

        def run() -> None:
            for result, output in zip(self.run(inputs), outputs, strict=True):
                _copy(output, result)

        return run


_VIEWS = frozenset(
    {
        "aten.permute.default",
        "aten.expand.default",
        "aten.reshape.default",
        "aten.slice.Tensor",
        "aten.unsqueeze.default",
    }
)
"""Steps whose result is a view of their first operand where strides allow."""


def _references(call: LibraryCall) -> frozenset[tuple[str, int]]:
    """(kind, index) of everything that a run of the call, not its preparation, reads."""
    found: set[tuple[str, int]] = {(r.kind, r.index) for r in call.outputs}
    left: list[CallValue] = [v for step in call.run for v in (*step.args, *(x for _, x in step.kwargs))]
    while left:
        value = left.pop()
        if isinstance(value, Ref):
            found.add((value.kind, value.index))
        elif isinstance(value, tuple):
            left.extend(value)
    return frozenset(found)


def _last_reads(call: LibraryCall) -> dict[int, list[int]]:
    """Step of a run -> results of earlier ones that no later step and no output reads: their memory is given back."""
    last: dict[int, int] = {}
    for number, step in enumerate(call.run):
        left: list[CallValue] = [*step.args, *(x for _, x in step.kwargs)]
        while left:
            value = left.pop()
            if isinstance(value, Ref) and value.kind == "tmp":
                last[value.index] = number
            elif isinstance(value, tuple):
                left.extend(value)
    found: dict[int, list[int]] = {}
    for index in last.keys() - {r.index for r in call.outputs if r.kind == "tmp"}:
        found.setdefault(last[index], []).append(index)
    return found


def _reads_unknown(value: CallValue, slots: Sequence[Any]) -> bool:
    if isinstance(value, Ref):
        return value.kind == "tmp" and slots[value.index] is None
    return isinstance(value, tuple) and any(_reads_unknown(v, slots) for v in value)


def _direct(value: CallValue, slots: Sequence[Any]) -> bool:
    """True unless the value holds an unknown result inside a list, which cannot be patched in place."""
    return isinstance(value, Ref) or not _reads_unknown(value, slots)


def _fixed(places: Sequence[torch.Tensor | Held]) -> list[torch.Tensor] | None:
    """The tensors; None where some are held."""
    found = [x for x in places if not isinstance(x, Held)]
    return found if len(found) == len(places) else None


def _keep(value: Any, result: int) -> Any:
    kept = value[result] if isinstance(value, tuple | list) and result >= 0 else value
    if kept is None:  # an undefined tensor, as some operators of the framework give of nothing
        raise RuntimeError("an operator of the framework gave no tensor")
    return kept


def _copy(output: torch.Tensor, result: torch.Tensor) -> None:
    """Into the stored value; an operator may give the same elements in another shape (keepdims, merged rows)."""
    output.copy_(result if result.shape == output.shape else result.reshape(output.shape))


def _run_and_copy(function: Callable[[], Any], result: int, output: torch.Tensor) -> None:
    _copy(output, _keep(function(), result))
