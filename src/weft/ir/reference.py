"""What every primitive means, as NumPy code, and an evaluator of whole graphs: the judge of all generated code.

`MEANING` maps operands to a result in the type they are computed in; `evaluate` widens the operands before and
rounds the result after, as the semantics in `weft.ir.prims` say. It aims at being right; it is fast enough to check
whole networks on one core.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from weft.errors import InvalidGraphError, UnsupportedError
from weft.ir import attrs as a
from weft.ir.graph import Graph, Node
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import Array, DType, TensorType, round_emulated

Numbers = npt.NDArray[Any]
"""NumPy's own functions give arrays of this type: which element type it is depends on the values."""
Operands = Sequence[Numbers]
Meaning = Callable[[Operands, a.Attrs, TensorType], Numbers]
"""(operands, attributes, result type) -> result, in the type of the operands or in the result type."""
OpaqueCall = Callable[[a.OpaqueAttrs, Sequence[Array]], Sequence[Array]]
"""Runs one framework operator: (attributes of any of its nodes, operands) -> all its results."""

_F64 = npt.NDArray[np.float64]


# The error function (Sun's fdlibm, s_erf.c: rational approximations on five intervals, error below 1 ulp).

_ERF_SMALL = (
    (1.28379167095512558561e-01, -3.25042107247001499370e-01, -2.84817495755985104766e-02,
     -5.77027029648944159157e-03, -2.37630166566501626084e-05),
    (1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02, 5.08130628187576562776e-03,
     1.32494738004321644526e-04, -3.96022827877536812320e-06),
)  # fmt: skip
_ERF_MIDDLE = (
    (-2.36211856075265944077e-03, 4.14856118683748331666e-01, -3.72207876035701323847e-01,
     3.18346619901161753674e-01, -1.10894694282396677476e-01, 3.54783043256182359371e-02,
     -2.16637559486879084300e-03),
    (1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01, 7.18286544141962662868e-02,
     1.26171219808761642112e-01, 1.36370839120290507362e-02, 1.19844998467991074170e-02),
)  # fmt: skip
_ERFC_NEAR = (
    (-9.86494403484714822705e-03, -6.93858572707181764372e-01, -1.05586262253232909814e+01,
     -6.23753324503260060396e+01, -1.62396669462573470355e+02, -1.84605092906711035994e+02,
     -8.12874355063065934246e+01, -9.81432934416914548592e+00),
    (1.0, 1.96512716674392571292e+01, 1.37657754143519042600e+02, 4.34565877475229228821e+02,
     6.45387271733267880336e+02, 4.29008140027567833386e+02, 1.08635005541779435134e+02,
     6.57024977031928170135e+00, -6.04244152148580987438e-02),
)  # fmt: skip
_ERFC_FAR = (
    (-9.86494292470009928597e-03, -7.99283237680523006574e-01, -1.77579549177547519889e+01,
     -1.60636384855821916062e+02, -6.37566443368389627722e+02, -1.02509513161107724954e+03,
     -4.83519191608651397019e+02),
    (1.0, 3.03380607434824582924e+01, 3.25792512996573918826e+02, 1.53672958608443695994e+03,
     3.19985821950859553908e+03, 2.55305040643316442583e+03, 4.74528541206955367215e+02,
     -2.24409524465858183362e+01),
)  # fmt: skip
_ERF_ONE = 8.45062911510467529297e-01
_ERF_SPLIT = 1 / 0.35


def _ratio(x: _F64, tables: tuple[tuple[float, ...], tuple[float, ...]]) -> _F64:
    over, under = (np.polynomial.polynomial.polyval(x, np.array(table)) for table in tables)
    return cast("_F64", over / under)


def _erf_tail(x: _F64) -> _F64:
    """1 - erfc(x) for x in [1.25, 6)."""
    s = 1 / (x * x)
    ratio = np.where(x < _ERF_SPLIT, _ratio(s, _ERFC_NEAR), _ratio(s, _ERFC_FAR))
    # exp(-x²) keeps its last bits only when x² is split into an exact and a small part
    z = x.astype(np.float32).astype(np.float64)
    erfc = np.exp(-z * z - 0.5625) * np.exp((z - x) * (z + x) + ratio) / x
    return 1 - erfc


def erf(x: _F64) -> _F64:
    """The error function to within 1 ulp of float64.

    Source: fdlibm, s_erf.c (Sun Microsystems, 1993).
    """
    size = np.abs(x)
    out = np.where(np.isnan(x), x, np.copysign(1.0, x))
    for low, high, piece in (
        (0.0, 0.84375, lambda v: v + v * _ratio(v * v, _ERF_SMALL)),
        (0.84375, 1.25, lambda v: _ERF_ONE + _ratio(v - 1, _ERF_MIDDLE)),
        (1.25, 6.0, _erf_tail),
    ):
        here = (low <= size) & (size < high)
        out[here] = np.copysign(piece(size[here]), x[here])
    return out


# Elementwise primitives.


def _function(f: Callable[..., Any]) -> Meaning:
    return lambda xs, _attrs, _type: cast("Numbers", f(*xs))


def _with_attrs(f: Callable[..., Any]) -> Meaning:
    return lambda xs, attrs, _type: cast("Numbers", f(*xs, attrs))


def _div(x: Numbers, y: Numbers) -> Numbers:
    if x.dtype.kind == "f":
        return x / y
    y = np.where(y == 0, y.dtype.type(1), y)  # undefined, but never a trap
    floor = x // y
    inexact = (floor * y != x) & ((x < 0) != (y < 0))
    return cast("Numbers", floor + inexact.astype(x.dtype))


def _pow(x: Numbers, y: Numbers) -> Numbers:
    if x.dtype.kind != "i":
        return np.power(x, y)
    # NumPy refuses negative exponents of integers; 1 / x**n truncates to 0 unless x is 1 or -1
    odd = np.where(y & 1, x, np.ones_like(x))
    inverse = np.where(np.abs(x) == 1, odd, np.zeros_like(x))
    return np.where(y < 0, inverse, np.power(x, np.maximum(y, 0)))


def _cast(xs: Operands, _: a.Attrs, type: TensorType) -> Numbers:
    x = xs[0]
    if x.dtype.kind == "f" and type.dtype.is_float:
        return x  # what comes after rounds it, or in float64 throughout leaves it alone
    if type.dtype is DType.BOOL:
        return cast("Numbers", x != 0)
    if x.dtype.kind == "f" and type.dtype.is_integer:
        return np.trunc(x).astype(type.dtype.numpy)
    # float64 holds every value but the largest i64, and the rounding after this step does the rest
    return x.astype(np.float64 if type.dtype.is_float else type.dtype.numpy)


# Index space.


def _slice(x: Numbers, s: a.SliceAttrs) -> Numbers:
    for axis, (start, size, step) in enumerate(zip(s.starts, s.sizes, s.steps, strict=True)):
        if (start, size, step) != (0, x.shape[axis], 1):
            x = np.take(x, start + step * np.arange(size), axis) if step < 0 else _strided(x, axis, start, size, step)
    return x


def _strided(x: Numbers, axis: int, start: int, size: int, step: int) -> Numbers:
    stop = start + (size - 1) * step + 1 if size else start
    return x[(slice(None),) * axis + (slice(start, stop, step),)]


def _pad(x: Numbers, p: a.PadAttrs) -> Numbers:
    widths = list(zip(p.lo, p.hi, strict=True))
    if not widths:
        return x  # a scalar; NumPy refuses to pad it by nothing
    if p.mode != "constant":
        return np.pad(x, widths, mode=p.mode)
    return np.pad(x, widths, constant_values=np.asarray(p.value).astype(x.dtype))


def _gather(xs: Operands, attrs: a.Attrs, type: TensorType) -> Numbers:
    if type.size == 0:
        return np.empty(type.shape, xs[0].dtype)
    return np.take(xs[0], xs[1], cast("a.GatherAttrs", attrs).axis, mode="clip")


def _take_along(xs: Operands, attrs: a.Attrs, type: TensorType) -> Numbers:
    axis = cast("a.GatherAttrs", attrs).axis
    if type.size == 0:
        return np.empty(type.shape, xs[0].dtype)
    return np.take_along_axis(xs[0], np.clip(xs[1], 0, xs[0].shape[axis] - 1), axis)


def _iota(_: Operands, attrs: a.Attrs, type: TensorType) -> Numbers:
    axis = cast("a.IotaAttrs", attrs).axis
    column = np.arange(type.shape[axis]).reshape([-1] + [1] * (type.rank - axis - 1))
    return np.broadcast_to(column.astype(np.float64 if type.dtype.is_float else type.dtype.numpy), type.shape)


# Aggregation.


def lowest(dtype: np.dtype[Any]) -> Numbers:
    """The identity of MAX: -inf, the least integer or False."""
    return _extreme(dtype, -np.inf)


def _highest(dtype: np.dtype[Any]) -> Numbers:
    return _extreme(dtype, np.inf)


def _extreme(dtype: np.dtype[Any], infinity: float) -> Numbers:
    if dtype.kind == "f":
        return np.array(infinity, dtype)
    if dtype.kind == "b":
        return np.array(infinity > 0)
    return np.array(np.iinfo(dtype).max if infinity > 0 else np.iinfo(dtype).min, dtype)


def _reduce(f: Callable[..., Any], initial: Callable[[np.dtype[Any]], object]) -> Meaning:
    def meaning(x: Numbers, attrs: a.ReduceAttrs) -> object:
        return f(x, axis=attrs.axes, keepdims=True, initial=initial(x.dtype))

    return _with_attrs(meaning)


def _total(f: Callable[..., Any]) -> Meaning:
    # `dtype` because NumPy would widen small integers, which have to wrap
    return _with_attrs(lambda x, attrs: f(x, axis=attrs.axes, keepdims=True, dtype=x.dtype))


def _arg(f: Callable[..., Any]) -> Meaning:
    return _with_attrs(lambda x, attrs: f(x, axis=attrs.axis, keepdims=True))


def _window(x: Numbers, attrs: a.Attrs, type: TensorType, merge: np.ufunc, padding: Numbers) -> Numbers:
    """Windows are boxes, and merging is associative: one dimension after the other."""
    w = cast("a.WindowAttrs", attrs)
    first = type.rank - len(w.kernel)
    for k, size in enumerate(w.kernel):
        axis, step, num = first + k, w.strides[k], type.shape[first + k]
        widths = [(0, 0)] * type.rank
        widths[axis] = (w.pads_lo[k], w.pads_hi[k])
        padded = np.pad(x, widths, constant_values=padding)
        x = _strided(padded, axis, 0, num, step).copy()
        for offset in range(1, size):
            merge(x, _strided(padded, axis, offset * w.dilations[k], num, step), out=x)
    return x


def _window_sum(xs: Operands, attrs: a.Attrs, type: TensorType) -> Numbers:
    return _window(xs[0], attrs, type, np.add, np.zeros((), xs[0].dtype))


def _window_max(xs: Operands, attrs: a.Attrs, type: TensorType) -> Numbers:
    return _window(xs[0], attrs, type, np.maximum, lowest(xs[0].dtype))


def _scan(xs: Operands, attrs: a.Attrs, type: TensorType) -> Numbers:
    s = cast("a.ScanAttrs", attrs)
    moved = [np.moveaxis(x, s.axis, 0) for x in xs]
    if s.reverse:
        moved = [x[::-1] for x in moved]
    terms = moved[-1]
    out = np.empty(terms.shape, terms.dtype)
    state = np.full(terms.shape[1:], s.kind == "prod", terms.dtype)
    for t in range(len(terms)):
        if s.exclusive:
            out[t] = state
        if s.kind == "sum":
            state = state + terms[t]
        elif s.kind == "prod":
            state = state * terms[t]
        else:
            state = moved[0][t] * state + terms[t] if t else terms[t]
        if not s.exclusive:
            out[t] = state
    return np.moveaxis(out[::-1] if s.reverse else out, 0, s.axis).reshape(type.shape)


# Contraction.


def _box(x: Numbers, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> Numbers:
    """A strided view of the trailing dimensions."""
    for k, (start, size, step) in enumerate(zip(starts, sizes, steps, strict=True)):
        x = _strided(x, x.ndim - len(starts) + k, start, size, step)
    return x


def _at(offset: tuple[int, ...]) -> tuple[Any, ...]:
    """Index of one element of the trailing dimensions."""
    return (..., *offset)


def _conv(xs: Operands, attrs: a.Attrs, type: TensorType) -> Numbers:
    c = cast("a.ConvAttrs", attrs)
    return _conv_transposed(xs[0], xs[1], c, type) if c.transposed else _conv_direct(xs[0], xs[1], c, type)


def _conv_direct(x: Numbers, w: Numbers, c: a.ConvAttrs, type: TensorType) -> Numbers:
    """One product (o, c) @ (c, positions) per group and kernel element: needs no copy of every window at once."""
    n, g, spatial = x.shape[0], c.groups, type.shape[2:]
    x = np.pad(x, [(0, 0), (0, 0), *zip(c.pads_lo, c.pads_hi, strict=True)])
    w = w.reshape(g, w.shape[0] // g, *w.shape[1:])
    out = np.zeros((n, g, w.shape[1], int(np.prod(spatial))), x.dtype)
    for offset in itertools.product(*map(range, w.shape[3:])):
        starts = [o * d for o, d in zip(offset, c.dilations, strict=True)]
        part = _box(x, starts, spatial, c.strides).reshape(n, g, w.shape[2], -1)
        weight = np.ascontiguousarray(w[_at(offset)])
        # depthwise: a product with an inner dimension of 1 is a plain multiplication, which NumPy does far faster
        out += weight * part if w.shape[2] == 1 else weight @ part
    return out.reshape(type.shape)


def _conv_transposed(x: Numbers, w: Numbers, c: a.ConvAttrs, type: TensorType) -> Numbers:
    n, g, spatial = x.shape[0], c.groups, x.shape[2:]
    whole = [s + lo + hi for s, lo, hi in zip(type.shape[2:], c.pads_lo, c.pads_hi, strict=True)]
    out = np.zeros((n, type.shape[1], *whole), x.dtype)
    w = w.reshape(g, x.shape[1] // g, *w.shape[1:])
    part = x.reshape(n, g, x.shape[1] // g, -1)
    for offset in itertools.product(*map(range, w.shape[3:])):
        starts = [o * d for o, d in zip(offset, c.dilations, strict=True)]
        weight = np.ascontiguousarray(w[_at(offset)].swapaxes(1, 2))
        view = _box(out, starts, spatial, c.strides)
        view += (weight @ part).reshape(n, type.shape[1], *spatial)
    return _box(out, c.pads_lo, type.shape[2:], [1] * len(spatial))


def _elsewhere(*_: object) -> Numbers:
    raise InvalidGraphError(problem="inputs, constants and opaque calls have no meaning of their own")


MEANING: Mapping[Prim, Meaning] = {
    Prim.INPUT: _elsewhere,
    Prim.CONSTANT: _elsewhere,
    Prim.OPAQUE: _elsewhere,
    Prim.NEG: _function(np.negative),
    Prim.ABS: _function(np.abs),
    Prim.SIGN: _function(np.sign),
    Prim.EXP: _function(np.exp),
    Prim.EXPM1: _function(np.expm1),
    Prim.LOG: _function(np.log),
    Prim.LOG1P: _function(np.log1p),
    Prim.SQRT: _function(np.sqrt),
    Prim.RSQRT: _function(lambda x: 1 / np.sqrt(x)),
    Prim.RECIPROCAL: _function(lambda x: 1 / x),
    Prim.ERF: _function(erf),
    Prim.TANH: _function(np.tanh),
    Prim.SIN: _function(np.sin),
    Prim.COS: _function(np.cos),
    Prim.TAN: _function(np.tan),
    Prim.ASIN: _function(np.arcsin),
    Prim.ACOS: _function(np.arccos),
    Prim.ATAN: _function(np.arctan),
    Prim.SINH: _function(np.sinh),
    Prim.COSH: _function(np.cosh),
    Prim.ASINH: _function(np.arcsinh),
    Prim.ACOSH: _function(np.arccosh),
    Prim.ATANH: _function(np.arctanh),
    Prim.FLOOR: _function(np.floor),
    Prim.CEIL: _function(np.ceil),
    Prim.TRUNC: _function(np.trunc),
    Prim.ROUND: _function(np.rint),
    Prim.ISNAN: _function(np.isnan),
    Prim.ISINF: _function(np.isinf),
    Prim.NOT: _function(np.invert),
    Prim.CAST: _cast,
    Prim.ADD: _function(np.add),
    Prim.SUB: _function(np.subtract),
    Prim.MUL: _function(np.multiply),
    Prim.DIV: _function(_div),
    Prim.POW: _function(_pow),
    Prim.MOD: _function(np.mod),
    Prim.FMOD: _function(np.fmod),
    Prim.ATAN2: _function(np.arctan2),
    Prim.MAX: _function(np.maximum),
    Prim.MIN: _function(np.minimum),
    Prim.AND: _function(np.bitwise_and),
    Prim.OR: _function(np.bitwise_or),
    Prim.XOR: _function(np.bitwise_xor),
    Prim.SHL: _function(np.left_shift),
    Prim.SHR: _function(np.right_shift),
    Prim.EQ: _function(np.equal),
    Prim.NE: _function(np.not_equal),
    Prim.LT: _function(np.less),
    Prim.LE: _function(np.less_equal),
    Prim.GT: _function(np.greater),
    Prim.GE: _function(np.greater_equal),
    Prim.SELECT: _function(np.where),
    Prim.BROADCAST: lambda xs, _, result: np.broadcast_to(xs[0], result.shape),
    Prim.RESHAPE: lambda xs, _, result: xs[0].reshape(result.shape),
    Prim.TRANSPOSE: _with_attrs(lambda x, attrs: x.transpose(attrs.perm)),
    Prim.SLICE: _with_attrs(_slice),
    Prim.CONCAT: _with_attrs(lambda *xs: np.concatenate(xs[:-1], xs[-1].axis)),
    Prim.PAD: _with_attrs(_pad),
    Prim.GATHER: _gather,
    Prim.TAKE_ALONG: _take_along,
    Prim.IOTA: _iota,
    Prim.REDUCE_SUM: _total(np.sum),
    Prim.REDUCE_PROD: _total(np.prod),
    Prim.REDUCE_MAX: _reduce(np.max, lowest),
    Prim.REDUCE_MIN: _reduce(np.min, _highest),
    Prim.ARGMAX: _arg(np.argmax),
    Prim.ARGMIN: _arg(np.argmin),
    Prim.WINDOW_SUM: _window_sum,
    Prim.WINDOW_MAX: _window_max,
    Prim.SCAN: _scan,
    Prim.MATMUL: _function(np.matmul),
    Prim.CONV: _conv,
}
"""Total. The three sources of values that `evaluate` supplies itself have a row that says so."""


# Widening and rounding.

_EXACT = frozenset(
    {
        Prim.NEG, Prim.ABS, Prim.SIGN, Prim.ADD, Prim.SUB, Prim.MUL, Prim.DIV, Prim.SQRT, Prim.MAX, Prim.MIN,
        Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND, Prim.MATMUL, Prim.CONV, Prim.MOD, Prim.FMOD,
    }
)  # fmt: skip
"""Computed in f32 (f64 for f64): exact to rounding there, or sums of products by definition."""
_WIDE = frozenset(
    {
        Prim.EXP, Prim.EXPM1, Prim.LOG, Prim.LOG1P, Prim.RSQRT, Prim.RECIPROCAL, Prim.ERF, Prim.TANH, Prim.SIN,
        Prim.COS, Prim.TAN, Prim.ASIN, Prim.ACOS, Prim.ATAN, Prim.SINH, Prim.COSH, Prim.ASINH, Prim.ACOSH,
        Prim.ATANH, Prim.POW, Prim.ATAN2, Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.WINDOW_SUM,
        Prim.SCAN,
    }
)  # fmt: skip
"""Computed in f64: f32 results are then right but for their last rounding, whatever NumPy's f32 code does."""


def _widen(prim: Prim, xs: Operands, dtype: DType) -> Operands:
    if not dtype.is_float or prim not in _EXACT | _WIDE:
        return xs
    # sums may be taken in any order, so take the best: f64 rounds once where f32 would round at every step
    wide = np.float64 if prim in _WIDE or dtype is DType.F64 else np.float32
    return [x.astype(wide, copy=False) for x in xs]


def round_to(x: Array, dtype: DType) -> Array:
    """Round to an element type: floats to nearest even (emulated ones in float32); others are only checked."""
    return round_emulated(x, dtype) if dtype.is_emulated else x.astype(dtype.numpy, copy=False)


def apply(node: Node, xs: Sequence[Array], operand_types: Sequence[TensorType], *, precise: bool = False) -> Array:
    """One primitive (no source, no opaque call) on operands held as `evaluate` holds them."""
    numbers = cast("Operands", xs)
    if not precise:
        numbers = _widen(node.prim, numbers, operand_types[0].dtype if operand_types else node.type.dtype)
    out = np.asarray(MEANING[node.prim](numbers, node.attrs, node.type))
    return (
        out.astype(np.float64, copy=False) if precise and node.type.dtype.is_float else round_to(out, node.type.dtype)
    )


def _check_input(array: Array, type: TensorType, position: int, precise: bool) -> None:
    dtypes = [type.dtype.numpy] + [np.dtype(np.float64)] * (precise and type.dtype.is_float)
    if array.shape != type.shape or array.dtype not in dtypes:
        raise InvalidGraphError(problem=f"input {position} is {array.dtype} {array.shape}, the graph takes {type}")


class _OpaqueCalls:
    """Runs each framework call once, though every result of it is a node."""

    def __init__(self, run: OpaqueCall | None) -> None:
        self.run = run
        self.results: dict[tuple[object, ...], Sequence[Array]] = {}

    def result(self, node: Node, xs: Sequence[Array], types: Sequence[TensorType]) -> Array:
        attrs = cast("a.OpaqueAttrs", node.attrs)
        if self.run is None:
            raise UnsupportedError(op=attrs.op, reason=attrs.reason or "opaque")
        call = (attrs.framework, attrs.op, attrs.payload, node.inputs)
        if call not in self.results:
            operands = [round_to(x, t.dtype) for x, t in zip(xs, types, strict=True)]
            self.results[call] = self.run(attrs, operands)
        found = np.asarray(self.results[call][attrs.result])
        if found.shape != node.type.shape:
            raise InvalidGraphError(problem=f"{attrs.op} gave {found.shape}, not {node.type}")
        return found


def evaluate(
    graph: Graph, inputs: Sequence[Array], *, precise: bool = False, opaque: OpaqueCall | None = None
) -> list[Array]:
    """Outputs of a graph; arrays of bf16 are float32 and exact.

    Natively every primitive rounds its result to its own element type. With `precise` floats are float64
    throughout and nothing is rounded on the way (float inputs may then be float64, float outputs are); opaque calls
    still see operands in their own types. Intermediate values are freed after their last use; outputs may share
    memory with inputs, constants and each other.

    Raises:
        InvalidGraphError: inputs that do not fit the graph [W901].
        UnsupportedError: an opaque node, but nothing to run it with [W201].
    """
    if len(inputs) != len(graph.inputs):
        raise InvalidGraphError(problem=f"{len(inputs)} inputs for a graph that takes {len(graph.inputs)}")
    arrays = list(map(np.asarray, inputs))
    for k, (array, i) in enumerate(zip(arrays, graph.inputs, strict=True)):
        _check_input(array, graph.type_of(i), k, precise)
    needed = Counter(graph.outputs)
    needed.update(j for i in _live(graph) for j in graph.nodes[i].inputs)
    values: dict[int, Array] = {}
    calls = _OpaqueCalls(opaque)
    with np.errstate(all="ignore"):  # infinities and NaN are results like any other
        for i, node in enumerate(graph.nodes):
            if not needed[i]:
                continue  # nothing reads it
            operands = [values[j] for j in node.inputs]
            types = [graph.type_of(j) for j in node.inputs]
            if CATEGORY[node.prim] is Category.SOURCE:
                is_input = node.prim is Prim.INPUT
                value = arrays[graph.inputs.index(i)] if is_input else graph.constant(i)
            elif node.prim is Prim.OPAQUE:
                value = calls.result(node, operands, types)
            else:
                value = apply(node, operands, types, precise=precise)
            values[i] = value.astype(np.float64, copy=False) if precise and node.type.dtype.is_float else value
            del operands, value
            for j in node.inputs:
                needed[j] -= 1
                if not needed[j]:
                    del values[j]
    return [values[i] for i in graph.outputs]


def _live(graph: Graph) -> list[int]:
    """Nodes that an output depends on."""
    marked = [False] * len(graph.nodes)
    for i in graph.outputs:
        marked[i] = True
    for i in reversed(range(len(graph.nodes))):
        if marked[i]:
            for j in graph.nodes[i].inputs:
                marked[j] = True
    return [i for i, mark in enumerate(marked) if mark]
