"""ATen calls on complex tensors: each is a real and an imaginary tensor here, so that only reals are in a graph.

What is linear is done to both parts by the call's own handler; what has no handler here is run by the framework, which
is given the parts and gives parts back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from weft.frontends.torch import indexing, network, pointwise, reductions, shaping
from weft.frontends.torch.call import Call, Handler, Pair, Ref
from weft.frontends.torch.dtypes import PARTS, static_int
from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType

Found = Pair | Ref
Made = Callable[[Call], "Found | tuple[Found, ...]"]


def part_type(value: torch.Tensor) -> TensorType:
    """The type of both parts of a complex tensor."""
    return TensorType(PARTS[value.dtype], tuple(static_int(n) for n in value.shape))


def _pair(c: Call, name: str, dtype: DType) -> Pair:
    """An operand as a complex tensor, or a number as one."""
    value = c.arguments[name]
    if isinstance(value, Pair):
        return Pair(c.b.cast(value.re, dtype), c.b.cast(value.im, dtype))
    if isinstance(value, complex):
        return Pair(c.b.scalar(value.real, dtype), c.b.scalar(value.imag, dtype))
    return Pair(c.as_node(value, dtype), c.b.scalar(0.0, dtype))


def _is_real(c: Call, name: str) -> bool:
    return not isinstance(c.arguments[name], Pair | complex)


def _view_as_complex(c: Call) -> Pair:
    x = c.ref("self")
    shape = c.shape(x)
    ones, inner = (1,) * len(shape), shape[:-1]
    re, im = (c.b.slice(x, (*(0,) * len(inner), k), (*inner, 1), ones) for k in (0, 1))
    return Pair(c.b.reshape(re, inner), c.b.reshape(im, inner))


def _view_as_real(c: Call) -> Ref:
    x, shape = _pair(c, "self", c.out.dtype), c.out.shape
    parts = [c.b.reshape(part, (*shape[:-1], 1)) for part in (x.re, x.im)]
    return Ref(c.b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(len(shape) - 1)))


def _complex(c: Call) -> Pair:
    re, im = (c.b.broadcast(c.b.cast(c.ref(name), c.out.dtype), c.out.shape) for name in ("real", "imag"))
    return Pair(re, im)


def _polar(c: Call) -> Pair:
    b, size, angle = c.b, c.ref("abs"), c.ref("angle")
    return Pair(*(b.apply(Prim.MUL, size, b.apply(turn, angle)) for turn in (Prim.COS, Prim.SIN)))


def _same(c: Call) -> Found:
    value = c.arguments["self"]
    return value if isinstance(value, Pair | Ref) else c.decline("no tensor")


def _conj(c: Call) -> Pair:
    x = _pair(c, "self", c.out.dtype)
    return Pair(x.re, c.b.apply(Prim.NEG, x.im))


def _neg(c: Call) -> Pair:
    x = _pair(c, "self", c.out.dtype)
    return Pair(c.b.apply(Prim.NEG, x.re), c.b.apply(Prim.NEG, x.im))


def _sum(prim: Prim) -> Made:
    def handler(c: Call) -> Pair:
        x, y = (_pair(c, name, c.out.dtype) for name in ("self", "other"))
        alpha = c.arguments.get("alpha", 1)
        if not isinstance(alpha, int | float):
            c.decline("a complex factor")
        if alpha != 1:
            y = Pair(*(c.b.apply(Prim.MUL, part, float(alpha)) for part in (y.re, y.im)))
        return Pair(c.b.apply(prim, x.re, y.re), c.b.apply(prim, x.im, y.im))

    return handler


def _mul(c: Call) -> Pair:
    b, (x, y) = c.b, (_pair(c, name, c.out.dtype) for name in ("self", "other"))
    for mine, other, name in ((x, y, "other"), (y, x, "self")):
        if _is_real(c, name):
            return Pair(b.apply(Prim.MUL, mine.re, other.re), b.apply(Prim.MUL, mine.im, other.re))
    re = b.apply(Prim.SUB, b.apply(Prim.MUL, x.re, y.re), b.apply(Prim.MUL, x.im, y.im))
    return Pair(re, b.apply(Prim.ADD, b.apply(Prim.MUL, x.re, y.im), b.apply(Prim.MUL, x.im, y.re)))


def _div(c: Call) -> Pair:
    """By a real number alone: the framework scales a complex one so that nothing overflows."""
    if not _is_real(c, "other"):
        c.decline("a quotient of complex numbers")
    x, y = (_pair(c, name, c.out.dtype) for name in ("self", "other"))
    return Pair(c.b.apply(Prim.DIV, x.re, y.re), c.b.apply(Prim.DIV, x.im, y.re))


def _abs(c: Call) -> Ref:
    """|x| = h·√(1 + (l/h)²), h and l the larger and the smaller part: no square of a large one overflows."""
    b, x = c.b, _pair(c, "self", c.out.dtype)
    re, im = b.apply(Prim.ABS, x.re), b.apply(Prim.ABS, x.im)
    high, low = b.apply(Prim.MAX, re, im), b.apply(Prim.MIN, re, im)
    # equal ones may both be zero, or infinite
    share = b.apply(Prim.SELECT, b.apply(Prim.EQ, high, low), b.scalar(1.0, c.out.dtype), b.apply(Prim.DIV, low, high))
    root = b.apply(Prim.SQRT, b.apply(Prim.ADD, b.apply(Prim.MUL, share, share), 1.0))
    return Ref(b.apply(Prim.MUL, high, root))


def _angle(c: Call) -> Ref:
    x = _pair(c, "self", c.out.dtype)
    return Ref(c.b.apply(Prim.ATAN2, x.im, x.re))


def _exp(c: Call) -> Pair:
    b, x = c.b, _pair(c, "self", c.out.dtype)
    size = b.apply(Prim.EXP, x.re)
    return Pair(*(b.apply(Prim.MUL, size, b.apply(turn, x.im)) for turn in (Prim.COS, Prim.SIN)))


def _converted(c: Call) -> Found:
    """Between complex types, from reals, or to them: the imaginary part is left out there, as torch does."""
    to, value = c.out.dtype, c.arguments["self"]
    if c.arguments["dtype"] in (None, *PARTS):
        return _pair(c, "self", to)
    return Ref(c.b.cast(value.re, to)) if isinstance(value, Pair) else c.decline("nothing is complex")


def _part_of(value: object, part: str) -> object:
    if isinstance(value, Pair):
        return Ref(getattr(value, part))
    return [_part_of(x, part) for x in value] if isinstance(value, list | tuple) else value


def _by_parts(handler: Handler) -> Made:
    """Of a call that does to each part what it does to the whole."""

    def both(c: Call) -> Found | tuple[Found, ...]:
        whole = [c.arguments[name] for name in _WHOLE if name in c.arguments]
        if not all(isinstance(x, Pair) for value in whole for x in (value if isinstance(value, list) else [value])):
            c.decline("complex and real operands together")
        made = [handler(c.of({k: _part_of(v, part) for k, v in c.arguments.items()})) for part in ("re", "im")]
        re, im = (x if isinstance(x, tuple) else (x,) for x in made)
        pairs = tuple(Pair(x, y) for x, y in zip(re, im, strict=True))
        return pairs if isinstance(made[0], tuple) else pairs[0]

    return both


def _product(handler: Handler, left: str, right: str) -> Callable[[Call], Pair]:
    """(a + bi)(c + di): four products of reals, or two where one side is real."""

    def product(c: Call) -> Pair:
        def of(x: NodeId, y: NodeId) -> NodeId:
            made = handler(c.of({**c.arguments, left: Ref(x), right: Ref(y)}))
            return made[0] if isinstance(made, tuple) else made

        (x, y), b = (_pair(c, name, c.out.dtype) for name in (left, right)), c.b
        if _is_real(c, right):
            return Pair(of(x.re, y.re), of(x.im, y.re))
        if _is_real(c, left):
            return Pair(of(x.re, y.re), of(x.re, y.im))
        re = b.apply(Prim.SUB, of(x.re, y.re), of(x.im, y.im))
        return Pair(re, b.apply(Prim.ADD, of(x.re, y.im), of(x.im, y.re)))

    return product


def _einsum(c: Call) -> Pair:
    """Of two operands."""
    operands, handler = c.arguments["tensors"], _REAL["aten.einsum.default"]
    if not isinstance(operands, list) or len(operands) != 2:
        c.decline("a complex product of other than two tensors")

    def real(d: Call) -> NodeId | tuple[NodeId, ...]:
        return handler(d.of({**c.arguments, "tensors": [d.arguments["left"], d.arguments["right"]]}))

    return _product(real, "left", "right")(c.of(dict(zip(("left", "right"), operands, strict=True))))


def _padded(c: Call) -> Found | tuple[Found, ...]:
    """With zeros, or what is there."""
    if c.arguments["value"] not in (None, 0):
        c.decline("a complex tensor padded with a number")
    return _by_parts(_REAL[c.op])(c)


_LINEAR = (
    "view.default", "reshape.default", "_unsafe_view.default", "permute.default", "transpose.int", "t.default",
    "expand.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default", "slice.Tensor",
    "select.int", "flip.default", "roll.default", "repeat.default", "split.Tensor", "split_with_sizes.default",
    "unbind.int", "cat.default", "stack.default", "where.self", "sum.dim_IntList", "mean.dim", "index.Tensor",
    "index_select.default",
)  # fmt: skip
_WHOLE = ("self", "other", "tensors")
"""Operands of these of which no part is left over: all of them are complex."""
_REAL = {**shaping.TABLE, **pointwise.TABLE, **reductions.TABLE, **indexing.TABLE, **network.TABLE}
_PRODUCTS = {"mm.default": ("self", "mat2"), "bmm.default": ("self", "mat2"), "matmul.default": ("self", "other")}


def _named(names: Sequence[str], made: Made) -> dict[str, Made]:
    return {f"aten.{name}": made for name in names}


COMPLEX: Mapping[str, Made] = {
    "aten.view_as_complex.default": _view_as_complex,
    "aten.view_as_real.default": _view_as_real,
    "aten.complex.default": _complex,
    "aten.polar.default": _polar,
    "aten.abs.default": _abs,
    "aten.angle.default": _angle,
    "aten.exp.default": _exp,
    "aten.neg.default": _neg,
    "aten._to_copy.default": _converted,
    "aten.einsum.default": _einsum,
    **_named(("constant_pad_nd.default", "pad.default"), _padded),
    **_named(("_conj.default", "conj_physical.default", "_conj_physical.default", "conj.default"), _conj),
    **_named(("clone.default", "alias.default", "detach.default", "contiguous.default", "resolve_conj.default",
              "resolve_neg.default", "lift_fresh_copy.default"), _same),
    **_named(("add.Tensor", "add.Scalar"), _sum(Prim.ADD)),
    **_named(("sub.Tensor", "sub.Scalar"), _sum(Prim.SUB)),
    **_named(("mul.Tensor", "mul.Scalar"), _mul),
    **_named(("div.Tensor", "div.Scalar"), _div),
    **{f"aten.{name}": _by_parts(_REAL[f"aten.{name}"]) for name in _LINEAR},
    **{f"aten.{name}": _product(_REAL[f"aten.{name}"], *sides) for name, sides in _PRODUCTS.items()},
}  # fmt: skip
"""Handlers by overload, of calls that have a complex operand or result."""
