"""Views and copies with one index map: reshape, transpose, slice, split, concat, expand, tile and their kin."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.fission.rule import axes_of, axis_of, common_shape, shape_of
from weft.ir.attrs import ConcatAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.shapes import broadcast_shapes


def identity(b: GraphBuilder, x: NodeId) -> NodeId:
    """identity(x) → x, e.g. dropout at inference.

    Shapes: any.
    Conditions: none.
    Source: ONNX Identity.
    """
    b.type_of(x)
    return x


def reshape(b: GraphBuilder, x: NodeId, *, shape: Sequence[int], zero_copies: bool = False) -> NodeId | Declined:
    """reshape(x) → reshape(x), with −1 filled in.

    Shapes: row-major; one −1 at most. With `zero_copies` a 0 stands for the dimension of x at that place.
    Conditions: equal numbers of elements.
    Source: `torch.reshape`; ONNX Reshape (zero_copies unless allowzero).
    """
    t = b.type_of(x)
    wanted = list(shape)
    if zero_copies:
        if any(n == 0 and k >= t.rank for k, n in enumerate(wanted)):
            return Declined(f"reshape of {t} to {tuple(shape)}")
        wanted = [t.shape[k] if n == 0 else n for k, n in enumerate(wanted)]
    if wanted.count(-1) > 1 or min(wanted, default=0) < -1:
        return Declined(f"reshape of {t} to {tuple(shape)}")
    if -1 in wanted:
        rest = math.prod(n for n in wanted if n != -1)
        if rest == 0 or t.size % rest:
            return Declined(f"reshape of {t} to {tuple(shape)}")
        wanted[wanted.index(-1)] = t.size // rest
    if math.prod(wanted) != t.size:
        return Declined(f"reshape of {t} to {tuple(shape)}")
    return b.reshape(x, wanted)


def squeeze(b: GraphBuilder, x: NodeId, *, axes: Sequence[int] | None = None) -> NodeId | Declined:
    """squeeze(x) → reshape(x) without the named axes of size 1; None names all of them.

    Shapes: a named axis of another size stays, as in PyTorch.
    Conditions: none.
    Source: `torch.squeeze`; ONNX Squeeze.
    """
    shape = shape_of(b, x)
    found = axes_of(axes, len(shape))
    if isinstance(found, Declined):
        return found
    return b.reshape(x, tuple(n for k, n in enumerate(shape) if n != 1 or k not in found))


def unsqueeze(b: GraphBuilder, x: NodeId, *, axes: Sequence[int]) -> NodeId | Declined:
    """unsqueeze(x) → reshape(x) with new axes of size 1.

    Shapes: the axes count in the result.
    Conditions: none.
    Source: `torch.unsqueeze`; ONNX Unsqueeze.
    """
    shape = list(shape_of(b, x))
    found = axes_of(axes, len(shape) + len(axes))
    if isinstance(found, Declined):
        return found
    for k in found:
        shape.insert(k, 1)
    return b.reshape(x, shape)


def flatten(b: GraphBuilder, x: NodeId, *, axis: int = 1) -> NodeId | Declined:
    """flatten(x) → reshape(x) to two dimensions, split before `axis`.

    Shapes: x (*A, *B) gives (∏A, ∏B); axis may equal the rank.
    Conditions: none.
    Source: ONNX Flatten.
    """
    shape = shape_of(b, x)
    if not -len(shape) <= axis <= len(shape):
        return Declined(f"flatten at axis {axis} of rank {len(shape)}")
    k = axis + len(shape) if axis < 0 else axis
    return b.reshape(x, (math.prod(shape[:k]), math.prod(shape[k:])))


def flatten_range(b: GraphBuilder, x: NodeId, *, start: int = 0, end: int = -1) -> NodeId | Declined:
    """flatten_range(x) → reshape(x) with the axes start … end joined.

    Shapes: a scalar becomes (1,).
    Conditions: start ≤ end.
    Source: `torch.flatten`.
    """
    shape = shape_of(b, x) or (1,)
    first, last = axis_of(start, len(shape)), axis_of(end, len(shape))
    if isinstance(first, Declined) or isinstance(last, Declined) or first > last:
        return Declined(f"flatten of axes {start} to {end} of rank {len(shape)}")
    return b.reshape(x, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


def transpose(b: GraphBuilder, x: NodeId, *, perm: Sequence[int] = ()) -> NodeId | Declined:
    """transpose(x) → transpose(x); without `perm` the axes are reversed.

    Shapes: axis i of the result is axis perm[i] of x.
    Conditions: a permutation.
    Source: `torch.permute`; ONNX Transpose.
    """
    rank = b.type_of(x).rank
    order = [p + rank if p < 0 else p for p in perm] or list(reversed(range(rank)))
    if sorted(order) != list(range(rank)):
        return Declined(f"transpose by {tuple(perm)} of rank {rank}")
    return b.transpose(x, order)


def swap_axes(b: GraphBuilder, x: NodeId, *, first: int, second: int) -> NodeId | Declined:
    """swap_axes(x) → transpose(x) of two axes.

    Shapes: the two sizes change places.
    Conditions: none.
    Source: `torch.transpose`.
    """
    rank = b.type_of(x).rank
    i, j = axis_of(first, rank), axis_of(second, rank)
    if isinstance(i, Declined) or isinstance(j, Declined):
        return Declined(f"swap of axes {first} and {second} of rank {rank}")
    order = list(range(rank))
    if rank:
        order[i], order[j] = order[j], order[i]
    return b.transpose(x, order)


def slice_(
    b: GraphBuilder,
    x: NodeId,
    *,
    starts: Sequence[int],
    ends: Sequence[int],
    steps: Sequence[int] = (),
    axes: Sequence[int] | None = None,
) -> NodeId | Declined:
    """slice(x) → slice(x) with Python's bounds: negative ones count from the end, all are clamped.

    Shapes: one start, end and step per named axis; without `axes` the first ones.
    Conditions: steps ≠ 0; the named axes differ.
    Source: `aten.slice`; ONNX Slice.
    """
    shape = shape_of(b, x)
    named = axes_of(axes, len(shape)) if axes is None else tuple(axes)
    if isinstance(named, Declined):
        return named
    named = named[: len(starts)]
    steps = tuple(steps) or (1,) * len(starts)
    unique = axes_of(named, len(shape))
    if isinstance(unique, Declined):
        return unique
    if not len(starts) == len(ends) == len(steps) == len(named) or 0 in steps or (named and not shape):
        return Declined(f"slice [{tuple(starts)}:{tuple(ends)}:{tuple(steps)}] of rank {len(shape)}")
    begin, size, step = [0] * len(shape), list(shape), [1] * len(shape)
    for axis, start, end, by in zip(named, starts, ends, steps, strict=True):
        k = axis % len(shape)
        first, last, _ = slice(start, end, by).indices(shape[k])
        size[k] = len(range(first, last, by))
        begin[k], step[k] = (first, by) if size[k] else (0, 1)
        if size[k] == 1:
            step[k] = 1
    return b.slice(x, begin, size, step)


def select(b: GraphBuilder, x: NodeId, *, axis: int, index: int) -> NodeId | Declined:
    """select(x) → reshape(slice(x)): one position of one axis, which goes.

    Shapes: x (…, n, …) gives (…, …).
    Conditions: −n ≤ index < n.
    Source: `aten.select.int`.
    """
    shape = shape_of(b, x)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined) or not shape or not -shape[k] <= index < shape[k]:
        return Declined(f"select of index {index} of axis {axis} of {b.type_of(x)}")
    return b.reshape(_piece(b, x, k, index % shape[k], 1), shape[:k] + shape[k + 1 :])


def split(b: GraphBuilder, x: NodeId, *, axis: int, sizes: Sequence[int]) -> tuple[NodeId, ...] | Declined:
    """split(x) → one slice per size.

    Shapes: x (…, Σsizes, …) gives (…, size, …) each, along `axis`.
    Conditions: the sizes fill the axis.
    Source: `aten.split_with_sizes`; ONNX Split.
    """
    shape = shape_of(b, x)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined) or not shape or sum(sizes) != shape[k] or min(sizes, default=0) < 0:
        return Declined(f"split of axis {axis} of {b.type_of(x)} into {tuple(sizes)}")
    return tuple(_piece(b, x, k, sum(sizes[:i]), n) for i, n in enumerate(sizes))


def chunk(b: GraphBuilder, x: NodeId, *, axis: int, chunks: int) -> tuple[NodeId, ...] | Declined:
    """chunk(x) → slices of ⌈n / chunks⌉, the last one shorter.

    Shapes: there may be fewer than `chunks` results, as in PyTorch.
    Conditions: chunks ≥ 1.
    Source: `torch.chunk`; ONNX Split with num_outputs.
    """
    shape = shape_of(b, x)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined) or not shape or chunks < 1:
        return Declined(f"chunk of axis {axis} of {b.type_of(x)} into {chunks}")
    n = shape[k]
    if n == 0:
        return split(b, x, axis=k, sizes=(0,) * chunks)
    each = -(-n // chunks)
    return split(b, x, axis=k, sizes=tuple(min(each, n - i) for i in range(0, n, each)))


def unbind(b: GraphBuilder, x: NodeId, *, axis: int = 0) -> tuple[NodeId, ...] | Declined:
    """unbind(x) → one select per position of an axis.

    Shapes: x (…, n, …) gives n of (…, …).
    Conditions: rank ≥ 1.
    Source: `aten.unbind`.
    """
    shape = shape_of(b, x)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined) or not shape:
        return Declined(f"unbind of axis {axis} of {b.type_of(x)}")
    rest = shape[:k] + shape[k + 1 :]
    return tuple(b.reshape(_piece(b, x, k, i, 1), rest) for i in range(shape[k]))


def _piece(b: GraphBuilder, x: NodeId, axis: int, start: int, size: int) -> NodeId:
    shape = shape_of(b, x)
    return b.slice(
        x,
        tuple(start if k == axis and size else 0 for k in range(len(shape))),
        tuple(size if k == axis else n for k, n in enumerate(shape)),
        (1,) * len(shape),
    )


def concat(b: GraphBuilder, *xs: NodeId, axis: int) -> NodeId | Declined:
    """concat(x, …) → concat(x, …).

    Shapes: equal but for `axis`, whose sizes add up. Empty vectors among higher ranks are skipped, as in PyTorch.
    Conditions: at least one operand, one element type.
    Source: `torch.cat`; ONNX Concat.
    """
    kept = [x for x in xs if shape_of(b, x) != (0,)] or list(xs[:1])
    if not kept:
        return Declined("concat of nothing")
    k = axis_of(axis, b.type_of(kept[0]).rank)
    if isinstance(k, Declined) or not b.type_of(kept[0]).rank:
        return Declined(f"concat along axis {axis} of {b.type_of(kept[0])}")
    if len({b.type_of(x).dtype for x in xs}) > 1:
        return Declined("concat of several element types")
    return kept[0] if len(kept) == 1 else b.add(Prim.CONCAT, *kept, attrs=ConcatAttrs(k))


def stack(b: GraphBuilder, *xs: NodeId, axis: int) -> NodeId | Declined:
    """stack(x, …) → concat of every x with a new axis.

    Shapes: k operands (…) give (…, k, …).
    Conditions: equal types.
    Source: `torch.stack`.
    """
    if not xs:
        return Declined("stack of nothing")
    k = axis_of(axis, b.type_of(xs[0]).rank + 1)
    if isinstance(k, Declined) or len({b.type_of(x) for x in xs}) > 1:
        return Declined(f"stack along axis {axis} of {', '.join(str(b.type_of(x)) for x in xs[:4])}")
    shape = shape_of(b, xs[0])
    tall = [b.reshape(x, (*shape[:k], 1, *shape[k:])) for x in xs]
    return tall[0] if len(tall) == 1 else b.add(Prim.CONCAT, *tall, attrs=ConcatAttrs(k))


def expand(b: GraphBuilder, x: NodeId, *, shape: Sequence[int]) -> NodeId | Declined:
    """expand(x) → broadcast(x).

    Shapes: NumPy's common shape of x and `shape` (so a 1 or −1 in `shape` keeps the dimension of x).
    Conditions: the shapes broadcast.
    Source: `torch.Tensor.expand`; ONNX Expand.
    """
    if min(shape, default=0) < -1:
        return Declined(f"expand to {tuple(shape)}")
    return b.broadcast(x, broadcast_shapes(shape_of(b, x), tuple(1 if n == -1 else n for n in shape)))


def tile(b: GraphBuilder, x: NodeId, *, repeats: Sequence[int]) -> NodeId | Declined:
    """tile(x) → reshape(broadcast(reshape(x))): every axis repeated as a whole.

    Shapes: x (n, …) gives (repeats·n, …); more repeats than axes add axes in front.
    Conditions: repeats ≥ 0, at least one per axis.
    Source: `torch.Tensor.repeat`; ONNX Tile.
    """
    shape = shape_of(b, x)
    if len(repeats) < len(shape) or min(repeats, default=0) < 0:
        return Declined(f"tile of {b.type_of(x)} by {tuple(repeats)}")
    shape = (1,) * (len(repeats) - len(shape)) + shape
    apart = b.reshape(x, tuple(n for size in shape for n in (1, size)))
    many = b.broadcast(apart, tuple(n for pair in zip(repeats, shape, strict=True) for n in pair))
    return b.reshape(many, tuple(r * n for r, n in zip(repeats, shape, strict=True)))


def repeat_interleave(b: GraphBuilder, x: NodeId, *, repeats: int, axis: int) -> NodeId | Declined:
    """repeat_interleave(x) → reshape(broadcast(reshape(x))): every element of an axis repeated in place.

    Shapes: x (…, n, …) gives (…, n·repeats, …).
    Conditions: repeats ≥ 0, rank ≥ 1.
    Source: `torch.repeat_interleave` with a number.
    """
    shape = shape_of(b, x)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined) or not shape or repeats < 0:
        return Declined(f"repeat_interleave of {b.type_of(x)} by {repeats} along {axis}")
    many = b.broadcast(b.reshape(x, (*shape[: k + 1], 1, *shape[k + 1 :])), (*shape[: k + 1], repeats, *shape[k + 1 :]))
    return b.reshape(many, (*shape[:k], shape[k] * repeats, *shape[k + 1 :]))


def flip(b: GraphBuilder, x: NodeId, *, axes: Sequence[int]) -> NodeId | Declined:
    """flip(x) → slice(x) with step −1.

    Shapes: unchanged.
    Conditions: none.
    Source: `torch.flip`.
    """
    shape = shape_of(b, x)
    found = axes_of(axes, len(shape))
    if isinstance(found, Declined):
        return found
    turned = [k in found and shape[k] > 1 for k in range(len(shape))]
    starts = tuple(n - 1 if t else 0 for n, t in zip(shape, turned, strict=True))
    return b.slice(x, starts, shape, tuple(-1 if t else 1 for t in turned))


def roll(b: GraphBuilder, x: NodeId, *, shifts: Sequence[int], axes: Sequence[int] = ()) -> NodeId | Declined:
    """roll(x) → concat of the two parts of every rolled axis, in exchanged order.

    Shapes: unchanged. Without `axes` the tensor is rolled as a vector.
    Conditions: one shift per axis.
    Source: `torch.roll`.
    """
    shape = shape_of(b, x)
    if not axes and len(shifts) == 1:
        flat = roll(b, b.reshape(x, (b.type_of(x).size,)), shifts=shifts, axes=(0,))
        return flat if isinstance(flat, Declined) else b.reshape(flat, shape)
    if len(axes) != len(shifts):
        return Declined(f"roll by {tuple(shifts)} along {tuple(axes)}")
    for axis, shift in zip(axes, shifts, strict=True):
        k = axis_of(axis, len(shape))
        if isinstance(k, Declined) or not shape:
            return Declined(f"roll along axis {axis} of {b.type_of(x)}")
        by = shift % shape[k] if shape[k] else 0
        if by:
            parts = (_piece(b, x, k, shape[k] - by, by), _piece(b, x, k, 0, shape[k] - by))
            x = b.add(Prim.CONCAT, *parts, attrs=ConcatAttrs(k))
    return x


def broadcast_tensors(b: GraphBuilder, *xs: NodeId) -> tuple[NodeId, ...]:
    """broadcast_tensors(x, …) → broadcast of every x to the common shape.

    Shapes: NumPy's common shape.
    Conditions: the shapes broadcast.
    Source: `torch.broadcast_tensors`.
    """
    shape = common_shape(b, *xs)
    return tuple(b.broadcast(x, shape) for x in xs)


def diagonal(b: GraphBuilder, x: NodeId, *, offset: int = 0, axis1: int = 0, axis2: int = 1) -> NodeId | Declined:
    """diagonal(x) → slice(reshape(transpose(x))) with step m + 1.

    Shapes: x (…, n, …, m, …) gives (…, …, length), the diagonal last.
    Conditions: two different axes.
    Source: `torch.diagonal`.
    """
    rank = b.type_of(x).rank
    i, j = axis_of(axis1, rank), axis_of(axis2, rank)
    if isinstance(i, Declined) or isinstance(j, Declined) or i == j or rank < 2:
        return Declined(f"diagonal of axes {axis1} and {axis2} of rank {rank}")
    x = b.transpose(x, (*(k for k in range(rank) if k not in (i, j)), i, j))
    *rest, n, m = shape_of(b, x)
    length = max(min(n, m - offset) if offset >= 0 else min(n + offset, m), 0)
    start = (offset if offset >= 0 else -offset * m) if length else 0
    flat = b.reshape(x, (*rest, n * m))
    zero, one = (0,) * len(rest), (1,) * len(rest)
    return b.slice(flat, (*zero, start), (*rest, length), (*one, m + 1))
