"""What a fission rule is, and the few steps that nearly every rule begins and ends with.

A rule takes a builder, the operands of one operator and its parameters, and adds primitives. It knows no framework:
names and defaults of a source operator are the front end's business.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np

from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.shapes import broadcast_shapes
from weft.ir.types import Array, DType, round_emulated

Result = NodeId | tuple[NodeId, ...] | Declined
Rule = Callable[..., Result]
"""rule(b, *operands, **params): an operand is a node, or `ABSENT` where an optional one is not given."""

R = TypeVar("R", bound=Rule)
ABSENT: NodeId = -1


def keywords_of(other: Rule, *, without: Collection[str] = ()) -> Callable[[R], R]:
    """The decorated rule takes the keywords of `other` in place of its `**how`, which it hands on to it.

    Its signature says so, because `fission.apply` refuses keywords that a rule does not take.
    """

    def decorate(rule: R) -> R:
        own = [p for p in inspect.signature(rule).parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [p for p in inspect.signature(other).parameters.values() if p.kind is p.KEYWORD_ONLY]
        signature = inspect.Signature([*own, *(p for p in more if p.name not in without)])
        rule.__signature__ = signature  # type: ignore[attr-defined]
        return rule

    return decorate


def widen(b: GraphBuilder, x: NodeId) -> NodeId:
    """f16 and bf16 → f32; anything else stays. Rules compute in the wide type and `narrow` back at the end."""
    return b.cast(x, b.type_of(x).dtype.accumulator)


def narrow(b: GraphBuilder, y: NodeId, like: NodeId) -> NodeId:
    """Back to the element type of the operand `like`."""
    return b.cast(y, b.type_of(like).dtype)


def not_float(b: GraphBuilder, operator: str, *operands: NodeId) -> Declined | None:
    """Why an operator of floats does not apply; None if it does. Absent operands pass."""
    for x in operands:
        if x != ABSENT and not b.type_of(x).dtype.is_float:
            return Declined(f"{operator} of {b.type_of(x).dtype.value}")
    return None


def axis_of(axis: int, rank: int) -> int | Declined:
    """A non-negative axis; -1 is the last one. A scalar counts as rank 1."""
    limit = max(rank, 1)
    return axis % limit if -limit <= axis < limit else Declined(f"axis {axis} of rank {rank}")


def axes_of(axes: Sequence[int] | None, rank: int) -> tuple[int, ...] | Declined:
    """Ascending non-negative axes; None means all of them."""
    if axes is None:
        return tuple(range(rank))
    found = [axis_of(x, rank) for x in axes]
    for x in found:
        if isinstance(x, Declined):
            return x
    normal = sorted({x for x in found if isinstance(x, int)})
    if len(normal) != len(found):
        return Declined(f"axes {tuple(axes)} repeat")
    return tuple(normal) if rank else ()


def extent(b: GraphBuilder, x: NodeId, axes: Sequence[int]) -> int:
    """Number of elements that a reduction over `axes` joins."""
    return math.prod(b.type_of(x).shape[k] for k in axes)


def drop_axes(b: GraphBuilder, y: NodeId, axes: Sequence[int], *, keepdims: bool) -> NodeId:
    """The result of a reduction, with its size-1 axes removed unless they are kept."""
    if keepdims:
        return y
    return b.reshape(y, tuple(n for k, n in enumerate(b.type_of(y).shape) if k not in axes))


def mean(b: GraphBuilder, x: NodeId, axes: Sequence[int]) -> NodeId:
    """mean_A x → (sum_A x)·(1/N), axes kept. NaN where N is 0, as 0/0 would be."""
    n = extent(b, x, axes)
    return b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, x, axes), 1.0 / n if n else math.inf)


def per_channel(b: GraphBuilder, p: NodeId, rank: int, axis: int = 1) -> NodeId:
    """A vector (C,) → (C, 1, …, 1), so that it broadcasts along `axis` of a tensor of that rank."""
    return b.reshape(p, (*b.type_of(p).shape, *(1,) * (rank - axis - 1)))


def same_dtype(b: GraphBuilder, x: NodeId, dtype: DType) -> NodeId:
    """Cast, or the absent operand unchanged."""
    return x if x == ABSENT else b.cast(x, dtype)


def full(b: GraphBuilder, value: float, dtype: DType, shape: Sequence[int] = ()) -> NodeId:
    """A constant tensor: a scalar, broadcast. Integers are taken exactly."""
    if isinstance(value, int) and dtype.is_integer:
        return b.broadcast(b.constant(np.asarray(value).astype(dtype.numpy)), shape)
    return b.broadcast(b.scalar(value, dtype), shape)


def table(b: GraphBuilder, data: Array, dtype: DType) -> NodeId:
    """A constant computed in f64 or integers and rounded once to `dtype`."""
    out = np.asarray(data).astype(dtype.numpy)
    return b.constant(round_emulated(out, dtype), dtype)


def common_shape(b: GraphBuilder, *operands: NodeId) -> tuple[int, ...]:
    """NumPy's common shape of the operands; ShapeError if there is none."""
    shape: tuple[int, ...] = ()
    for x in operands:
        shape = broadcast_shapes(shape, b.type_of(x).shape)
    return shape


def shape_of(b: GraphBuilder, x: NodeId) -> tuple[int, ...]:
    """Shape of a node."""
    return b.type_of(x).shape


def dtype_of(b: GraphBuilder, x: NodeId) -> DType:
    """Element type of a node."""
    return b.type_of(x).dtype


def as_index(b: GraphBuilder, idx: NodeId, size: int) -> NodeId:
    """Indices of any integer type → i64 in [0, size), negative ones counted from the end.

    Constant indices become another constant; only values at run time cost a comparison and a select.
    """
    value = b.constant_value(idx)
    if value is not None:
        data = np.asarray(value).astype(np.int64)
        return b.constant(np.where(data < 0, data + size, data))
    idx = b.cast(idx, DType.I64)
    if b.node(idx).prim is Prim.IOTA:
        return idx
    negative = b.apply(Prim.LT, idx, full(b, 0, DType.I64))
    return b.apply(Prim.SELECT, negative, b.apply(Prim.ADD, idx, full(b, size, DType.I64)), idx)
