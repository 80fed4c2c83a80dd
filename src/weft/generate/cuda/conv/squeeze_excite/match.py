"""Squeeze-excite as a problem: an image, the means of its channels, two 1x1 convolutions of them, and the image scaled.

    gate[n, c] = f3(W2 f2(W1 f1(sum of f0(x[n, c, ...])))),    out[n, c, y, x] = f4(x, gate)

f0 ... f4 are elementwise, with numbers and vectors of channels. What f1 and f2 give is not rounded on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from weft.generate.contraction.values import NotStridedError, Reader
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

VECTOR = 8
"""Channels of 16 bytes."""
_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Leaf:
    """A number, or an element of an input or constant at offset + image * steps[0] + channel * steps[1]."""

    dtype: DType
    number: float = 0.0
    index: int = -1
    """Position among the problem's inputs; -1: none of them."""
    constant: NodeId = -1
    """A constant of several values, which stands in the text; -1: none."""
    steps: tuple[int, int] = (0, 0)
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Elementwise nodes in order, from the value `start` to the value `end`."""

    start: NodeId
    end: NodeId
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class SqueezeExcite:
    """Sizes are counts."""

    graph: Graph
    images: int
    channels: int
    hidden: int
    pixels: int
    dtype: DType
    x: int
    """Position of the image among the inputs; its pixels' channels lie side by side, as those of the result."""
    weights: tuple[int, int]
    """Positions of (hidden, channels) and (channels, hidden), row-major."""
    before: Stage
    """f0."""
    mean: Stage
    inner: Stage
    gate: Stage
    scaled: Stage
    """f4; `start` is the image, the gate stands in `gate.end`."""
    leaves: dict[NodeId, Leaf]

    @property
    def weight_bytes(self) -> int:
        """Of both products."""
        return 2 * self.hidden * self.channels * self.dtype.itemsize


def is_squeeze(graph: Graph) -> bool:
    """Whether a problem has two 1x1 convolutions of images of one pixel, and a sum in front."""
    convs = [i for i, n in enumerate(graph.nodes) if CATEGORY[n.prim] is Category.LINEAR]
    sums = [n for n in graph.nodes if CATEGORY[n.prim] is Category.REDUCE]
    return len(convs) == 2 and len(sums) == 1 and all(_is_vector(graph, i) for i in convs)


def _is_vector(graph: Graph, node: NodeId) -> bool:
    n = graph.nodes[node]
    return n.prim is Prim.CONV and n.type.rank == 4 and n.type.shape[2:] == (1, 1)


def squeeze_excite(problem: Problem) -> SqueezeExcite | Declined:
    """The normal form of a problem that `is_squeeze`, or why the template does not take it."""
    g = problem.graph
    one, two = (i for i, n in enumerate(g.nodes) if n.prim is Prim.CONV)
    (total,) = (i for i, n in enumerate(g.nodes) if CATEGORY[n.prim] is Category.REDUCE)
    images = [i for i in g.inputs if not cast("a.InputAttrs", g.nodes[i].attrs).is_weight]
    if len(images) != 1 or len(g.outputs) != 1 or g.type_of(images[0]).rank != 4:
        return Declined("squeeze-excite of several images")
    (x,), (out,) = images, g.outputs
    n, channels, high, wide = g.type_of(x).shape
    dtype = g.type_of(x).dtype
    position = g.inputs.index(x)
    if dtype not in (DType.F16, DType.BF16) or channels % VECTOR:
        return Declined("squeeze-excite of channels that 16-byte vectors do not fit")
    if problem.input_formats[position] is not Format.LAST or problem.output_formats[0] is not Format.LAST:
        return Declined("squeeze-excite of images whose channels do not lie side by side")
    reduce = g.nodes[total]
    if reduce.prim is not Prim.REDUCE_SUM or cast("a.ReduceAttrs", reduce.attrs).axes != (2, 3):
        return Declined("squeeze-excite of other means than those of channels")
    if not 0 < g.type_of(x).size < _LIMIT:
        return Declined("squeeze-excite of an empty image, or of 2^31 elements or more")
    weights = _weights(problem, (one, two), dtype)
    hidden = g.type_of(one).shape[1]
    if isinstance(weights, Declined):
        return weights
    if g.type_of(two).shape != (n, channels, 1, 1) or g.type_of(out).shape != g.type_of(x).shape:
        return Declined("squeeze-excite that changes channels")
    if g.type_of(out).dtype is not dtype or g.type_of(total).shape != (n, channels, 1, 1):
        return Declined("squeeze-excite of another type or shape")
    depends = _depending(g, x)
    gates = {n.inputs[0] for i, n in enumerate(g.nodes) if i in depends and n.prim is Prim.BROADCAST}
    if len(gates) != 1:
        return Declined("squeeze-excite of no gate, or of several")
    (gate,) = gates
    ends = (
        (x, reduce.inputs[0]),
        (total, g.nodes[one].inputs[0]),
        (one, g.nodes[two].inputs[0]),
        (two, gate),
    )
    stages = [Stage(start, end, tuple(sorted(_between(g, (start,), end, depends) - {start}))) for start, end in ends]
    last = Stage(x, out, tuple(sorted(_between(g, (x, gate), out, depends) - {x, gate})))
    stages.append(last)
    every = {x, total, one, two, *(i for s in stages for i in s.nodes)}
    if depends - every:
        return Declined("squeeze-excite with more than is elementwise in between")
    for s in stages:
        for i in s.nodes:
            prim = g.nodes[i].prim
            plain = CATEGORY[prim] is Category.ELEMENTWISE and g.type_of(i).shape == g.type_of(s.start).shape
            if not plain and not (s is last and prim is Prim.BROADCAST):
                return Declined(f"{prim.value} in squeeze-excite")
    leaves = _leaves(problem, stages, depends, position)
    if isinstance(leaves, Declined):
        return leaves
    before, mean, inner, gated, scaled = stages
    return SqueezeExcite(
        g, n, channels, hidden, high * wide, dtype, position, weights, before, mean, inner, gated, scaled, leaves
    )


def _weights(problem: Problem, convs: Sequence[NodeId], dtype: DType) -> tuple[int, int] | Declined:
    """Positions of the weights of two 1x1 convolutions without groups, as they lie in memory."""
    g = problem.graph
    found = []
    for at in convs:
        attrs, weight = cast("a.ConvAttrs", g.nodes[at].attrs), g.nodes[at].inputs[1]
        plain = attrs.groups == 1 and not attrs.transposed and not any((*attrs.pads_lo, *attrs.pads_hi))
        if not plain or g.type_of(weight).shape[2:] != (1, 1) or weight not in g.inputs:
            return Declined("squeeze-excite by other products than two 1x1 convolutions of weights in memory")
        found.append(g.inputs.index(weight))
        if not g.type_of(weight).size or g.type_of(weight).dtype is not dtype:
            return Declined("squeeze-excite by empty products, or weights of another type than the image")
    return found[0], found[1]


def _depending(g: Graph, start: NodeId) -> set[NodeId]:
    """A value and all that is computed of it."""
    found = {start}
    for i, n in enumerate(g.nodes):
        if any(j in found for j in n.inputs):
            found.add(i)
    return found


def _between(g: Graph, stops: Sequence[NodeId], end: NodeId, depends: set[NodeId]) -> set[NodeId]:
    """What lies between some values and `end`, both included, of what depends on the image."""
    found: set[NodeId] = set()
    waiting = [end]
    while waiting:
        at = waiting.pop()
        if at in found or at not in depends:
            continue
        found.add(at)
        waiting += [] if at in stops else g.nodes[at].inputs
    return found


def _leaves(
    problem: Problem, stages: Sequence[Stage], depends: set[NodeId], image: int
) -> dict[NodeId, Leaf] | Declined:
    """What stages read beside computed values."""
    g = problem.graph
    reader = Reader(problem, {})
    found: dict[NodeId, Leaf] = {}
    for at in {j for s in stages for i in s.nodes for j in g.nodes[i].inputs if j not in depends}:
        try:
            expr = reader.read(at)
        except NotStridedError as error:
            return Declined(error.reason)
        if expr.kind == "number":
            found[at] = Leaf(expr.dtype, expr.number)
            continue
        view = expr.view
        if expr.kind not in ("input", "constant") or view is None or (expr.kind == "input" and expr.index == image):
            return Declined("squeeze-excite with operands that are computed")
        rank = len(view.shape)
        steps = dict(zip(range(4 - rank, 4), zip(view.shape, view.strides, strict=True), strict=True))
        if rank > 4 or any(n > 1 and step for d, (n, step) in steps.items() if d > 1):
            return Declined("squeeze-excite with operands that differ by pixel")
        along = [steps[d][1] if d in steps and steps[d][0] > 1 else 0 for d in (0, 1)]
        where = {"index": expr.index} if expr.kind == "input" else {"constant": expr.index}
        found[at] = Leaf(expr.dtype, steps=(along[0], along[1]), offset=view.offset, **where)
    return found
