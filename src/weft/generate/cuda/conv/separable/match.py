"""A depthwise convolution, what is elementwise on it, and a 1x1 convolution of that: a problem as two products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from weft.generate.cuda.conv.depthwise import kernel as depthwise
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.product import Product, image_steps, product
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

MOST_BETWEEN = 128
"""Channels between two convolutions of which the first sums over channels."""


@dataclass(frozen=True, slots=True)
class Separable:
    """Both are problems of their own; the second one's input 0 is the first one's output."""

    first: Product
    """Its rows are the pixels of the second; as `depthwise.normal` gives it where it is by channel."""
    second: Product
    first_inputs: tuple[int, ...]
    """Per input of the first problem its position in the whole."""
    second_inputs: tuple[int, ...]
    """The same for the second; that of the value between is -1."""


def convolutions(problem: Problem) -> list[a.ConvAttrs]:
    """The convolutions of a problem, in order."""
    return [n.attrs for n in problem.graph.nodes if isinstance(n.attrs, a.ConvAttrs)]


def separable(problem: Problem) -> Separable | Declined:
    """The two products that a problem is, the first by channel, or why the template does not take it."""
    found = _pair(problem)
    if isinstance(found, Declined):
        return found
    by_channel = depthwise.normal(found.first)
    if isinstance(by_channel, Declined):
        return by_channel
    found = replace(found, first=by_channel)
    return _refuse(found) or _refuse_second(found) or found


def stacked(problem: Problem) -> Separable | Declined:
    """The same where the first convolution sums over channels: its weights are those of all channels of a tile."""
    found = _pair(problem)
    if isinstance(found, Declined):
        return found
    one = found.first
    if one.dtype is DType.F32 or one.dtype is not found.second.dtype:
        return Declined("two convolutions of f32")
    w = halo.window(one)
    if isinstance(w, Declined):
        return w
    if w.groups > 1:
        return Declined("a convolution in groups in front of another")
    if one.n % 16 or one.n > MOST_BETWEEN:
        return Declined(f"{one.n} channels between convolutions; a tile keeps multiples of 16 up to {MOST_BETWEEN}")
    return _refuse_second(found) or found


def _pair(problem: Problem) -> Separable | Declined:
    """Two convolutions that follow each other, the second of 1x1."""
    g = problem.graph
    convs = [i for i, n in enumerate(g.nodes) if n.prim is Prim.CONV]
    if len(convs) != 2:
        return Declined("not two convolutions")
    second = convs[1]
    between = g.nodes[second].inputs[0]
    weight = g.type_of(g.nodes[second].inputs[1]).shape
    attrs = cast("a.ConvAttrs", g.nodes[second].attrs)
    if len(weight) != 4 or weight[2:] != (1, 1) or attrs.groups != 1 or attrs.strides != (1, 1) or attrs.transposed:
        return Declined("the second convolution is not 1x1")
    if any(attrs.pads_lo) or any(attrs.pads_hi):
        return Declined("padding between the convolutions")
    before = above(g, (between,), stop=None)
    if convs[0] not in before or between == second:
        return Declined("convolutions that do not follow each other")
    if between in g.outputs or any(between in g.nodes[i].inputs for i in range(len(g)) if i not in {*before, second}):
        return Declined("a value between the convolutions that others read")
    one, first_inputs = part(problem, (between,), None)
    two, second_inputs = part(problem, g.outputs, between)
    p1, p2 = product(one), product(two)
    for p in (p1, p2):
        if isinstance(p, Declined):
            return p
    assert isinstance(p1, Product)
    assert isinstance(p2, Product)
    return Separable(p1, p2, first_inputs, second_inputs)


def _refuse(s: Separable) -> Declined | None:
    one, two = s.first, s.second
    if one.dtype is DType.F32 or one.dtype is not two.dtype:
        return Declined("tensor cores for f32")
    if one.c.a_layout.channel != 1 or one.n % 8 or epilogue.plan(one).width != 8 or one.c.a_layout.offset % 8:
        return Declined("channels that 16-byte vectors do not fit")
    if any(step % 8 for step in (one.c.a_layout.dims[0], *image_steps(one))):
        return Declined("pixels that are not aligned to 16 bytes")
    return None


def _refuse_second(s: Separable) -> Declined | None:
    one, two = s.first, s.second
    if two.a_load != "rows" or not two.c.w_const or two.z != 1 or two.m != one.m or two.k != one.n:
        return Declined("a second product of other rows")
    for p in (one, two):
        if p.c.a.kind != "input" or p.c.w.kind != "input":
            return Declined("operands that are constants of the text")
    read = [x.source.index for _, x in epilogue.leaves(two.c) if x.source is not None and x.source.kind == "input"]
    if any(s.second_inputs[i] < 0 for i in read):
        return Declined("a value between the convolutions that others read")
    return None


def above(g: Graph, ends: Iterable[NodeId], stop: NodeId | None) -> set[NodeId]:
    """Nodes that some depend on, themselves included; nothing above `stop`."""
    found: set[NodeId] = set()
    waiting = list(ends)
    while waiting:
        at = waiting.pop()
        if at not in found:
            found.add(at)
            waiting += [] if at == stop else g.nodes[at].inputs
    return found


def part(
    problem: Problem, outputs: tuple[NodeId, ...], cut: NodeId | None, *, as_product: bool = False
) -> tuple[Problem, tuple[int, ...]]:
    """The problem of some outputs, with `cut` as its input 0; per input its position in the whole, -1 for `cut`.

    `as_product`: what depends on `cut`, an image, is written as if that were a 1x1 convolution of input 0 by input 1.
    """
    g = problem.graph
    b = GraphBuilder()
    where: dict[NodeId, NodeId] = {}
    formats: list[Format] = []
    inputs: list[int] = []
    if cut is not None:
        where[cut] = b.input(g.type_of(cut))
        formats.append(Format.LAST)
        inputs.append(-1)
        if as_product:
            image = g.type_of(cut)
            weight = b.input(TensorType(image.dtype, (image.shape[1], image.shape[1], 1, 1)), is_weight=True)
            attrs = a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1)
            where[cut] = b.add(Prim.CONV, where[cut], weight, attrs=attrs)
            formats.append(Format.ROW)
            inputs.append(-1)
    for at in sorted(above(g, outputs, cut)):
        node = g.nodes[at]
        if at in where:
            continue
        if isinstance(node.attrs, a.InputAttrs):
            where[at] = b.input(node.type, is_weight=node.attrs.is_weight)
            formats.append(problem.input_formats[node.attrs.index])
            inputs.append(node.attrs.index)
        elif isinstance(node.attrs, a.ConstantAttrs):
            where[at] = b.adopt_constant(node.attrs.digest, g.constant(at), node.type)
        else:
            where[at] = b.add(node.prim, *(where[i] for i in node.inputs), attrs=node.attrs)
    graph = b.build([where[o] for o in outputs])
    out = (Format.LAST,) if cut is None else problem.output_formats
    return Problem(graph, f"{problem.key} {outputs}", tuple(formats), out), tuple(inputs)
