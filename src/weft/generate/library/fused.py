"""Products with what follows them as one oneDNN call: convolution or linear with bias, activation and residual.

Weights are repacked once, at link time. What follows the product is recognised by construction: the same
fission rule is run on an input of the same type, and the two graphs must have the same text.
"""

from __future__ import annotations

import math
from collections.abc import Container
from functools import lru_cache
from typing import cast

from weft import fission
from weft.generate.library.translate import Program
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.text import print_graph
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CallValue, LibraryCall, Ref, Schedule

_ACTIVATIONS: tuple[tuple[str, tuple[tuple[str, float | str], ...], str, tuple[float, ...], str | None], ...] = (
    ("relu", (), "relu", (), None),
    ("sigmoid", (), "sigmoid", (), None),
    ("tanh", (), "tanh", (), None),
    ("silu", (), "swish", (), None),
    ("hard_swish", (), "hardswish", (), None),
    ("hard_sigmoid", (("alpha", 1 / 6), ("beta", 0.5)), "hardsigmoid", (), None),
    ("gelu", (("approximate", "none"),), "gelu", (), "none"),
    ("gelu", (("approximate", "tanh"),), "gelu", (), "tanh"),
    ("leaky_relu", (("alpha", 0.1),), "leaky_relu", (0.1,), None),
    ("leaky_relu", (("alpha", 0.01),), "leaky_relu", (0.01,), None),
)
"""Fission rule, its parameters; oneDNN's name, scalars and algorithm."""
_RELU = Declined("oneDNN's ReLU makes 0 of NaN, which ours keeps: no such call is right")
"""Every one was rejected when it was verified: 58 of the 276 kernels that a search for DenseNet-121 asked for."""


@lru_cache(maxsize=256)
def _activation_texts(type: TensorType) -> dict[str, tuple[str, tuple[float, ...], str | None]]:
    found: dict[str, tuple[str, tuple[float, ...], str | None]] = {}
    for rule, params, name, scalars, algorithm in _ACTIVATIONS:
        builder = GraphBuilder()
        result = fission.apply(builder, rule, (builder.input(type),), dict(params))
        if not isinstance(result, Declined):
            found[_tail_text(builder.build(result), 0, result[0])] = (name, scalars, algorithm)
    return found


def activation_of(graph: Graph, start: NodeId, end: NodeId) -> tuple[str, tuple[float, ...], str | None] | None:
    """oneDNN's name, scalars and algorithm of the activation that a value goes through from one node to another."""
    return _activation_texts(graph.type_of(start)).get(_tail_text(graph, start, end))


def _tail_text(graph: Graph, start: NodeId, end: NodeId) -> str:
    """Text of the part of a graph between two nodes, with `start` as its only input; empty if there is more."""
    builder = GraphBuilder()
    new: dict[NodeId, NodeId] = {start: builder.input(graph.type_of(start))}
    return print_graph(builder.build([new[end]])) if _copy(graph, end, builder, new) else ""


def _copy(graph: Graph, node: NodeId, builder: GraphBuilder, new: dict[NodeId, NodeId]) -> bool:
    """Copy a node and what it is made of, as far as it is not there yet; False: an input is in the way."""
    if node in new:
        return True
    n = graph.nodes[node]
    if n.prim is Prim.INPUT or not all(_copy(graph, i, builder, new) for i in n.inputs):
        return False
    if n.prim is Prim.CONSTANT:
        new[node] = builder.constant(graph.constant(node), n.type.dtype)
    else:
        new[node] = builder.add(n.prim, *(new[i] for i in n.inputs), attrs=n.attrs)
    return True


def channel_bias(graph: Graph, node: NodeId, channels: int, axis: int) -> NodeId | None:
    """The weight or constant of `channels` values that a node repeats along every dimension but `axis`."""
    n = graph.nodes[node]
    rank = n.type.rank
    if n.prim is not Prim.BROADCAST:
        return None
    source = n.inputs[0]
    shape = graph.type_of(source).shape
    wide = (1,) * (rank - len(shape)) + shape
    if wide != tuple(channels if k == axis else 1 for k in range(rank)):
        return None
    return source


def trailing_weight(graph: Graph, node: NodeId, shape: tuple[int, ...]) -> NodeId | None:
    """The value of this shape that a node repeats along every dimension in front; itself if there is none."""
    n = graph.nodes[node]
    while n.prim in (Prim.BROADCAST, Prim.RESHAPE) and n.type.shape != shape:
        node = n.inputs[0]
        n = graph.nodes[node]
    sizes = n.type.shape
    return node if sizes[max(len(sizes) - len(shape), 0) :] == shape and math.prod(sizes) == math.prod(shape) else None


def is_weight(graph: Graph, node: NodeId) -> bool:
    """Whether a value is known at link time."""
    n = graph.nodes[node]
    if n.prim is Prim.CONSTANT:
        return True
    if isinstance(n.attrs, a.InputAttrs):
        return n.attrs.is_weight
    return n.prim in (Prim.RESHAPE, Prim.TRANSPOSE, Prim.BROADCAST) and is_weight(graph, n.inputs[0])


class Tail:
    """What follows the product: bias, then residual, then activation, each optional.

    `rows`: the rows of a product may be counted in several dimensions from some place on.
    """

    def __init__(self, graph: Graph, product: NodeId, axis: int, *, rows: bool = False) -> None:
        self.bias: NodeId | None = None
        self.residual: NodeId | None = None
        self.activation: tuple[str, tuple[float, ...], str | None] = ("none", (), None)
        self.residual_after_activation = False
        self.matched = False
        users = graph.users()
        out = graph.outputs[0]
        at = product
        channels = graph.type_of(product).shape[axis]
        while at != out:
            following = users[at]
            n = graph.nodes[following[0]] if len(following) == 1 else None
            if rows and n is not None and n.prim is Prim.RESHAPE and n.type.shape[-1:] == (channels,):
                at, axis = following[0], n.type.rank - 1
                continue
            if n is None or n.prim is not Prim.ADD or self.residual is not None:
                break
            other = n.inputs[1] if n.inputs[0] == at else n.inputs[0]
            bias = channel_bias(graph, other, channels, axis)
            if bias is not None and self.bias is None and is_weight(graph, bias):
                self.bias = bias
            elif graph.nodes[other].prim is Prim.INPUT and graph.type_of(other) == graph.type_of(at):
                self.residual = other
            else:
                break
            at = following[0]
        if at != out:
            found = activation_of(graph, at, out)
            if found is None:
                return
            self.activation = found
        self.matched = True


def fused_conv(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """CONV (+ bias)(+ residual)(+ activation) → `mkldnn._convolution_pointwise` with prepacked weights."""
    graph = problem.graph
    made = plain_convolution(graph, (DType.F32,), "f32 convolution")
    if isinstance(made, Declined):
        return made
    n = graph.nodes[made]
    at, (x, w) = cast("a.ConvAttrs", n.attrs), n.inputs
    tail = Tail(graph, made, 1)
    if not tail.matched:
        return Declined("what follows the convolution is no bias + residual + activation")
    if tail.activation[0] == "relu":
        return _RELU
    p = Program(graph)
    weight = p.value(w)
    shape = graph.type_of(x).shape
    weight = p.call(
        "mkldnn._reorder_convolution_weight.default", weight, at.pads_lo, at.strides, at.dilations, at.groups, shape
    )
    data: Ref = p.value(x)
    if bool(schedule.param("channels_last")) and problem.input_formats[graph.inputs.index(x)] is not Format.LAST:
        data = p.call("aten._to_copy.default", data, memory_format="format:channels_last")
    bias = None if tail.bias is None else p.call("aten.reshape.default", p.value(tail.bias), (n.type.shape[1],))
    name, scalars, algorithm = tail.activation
    common: tuple[CallValue, ...] = (at.pads_lo, at.strides, at.dilations, at.groups)
    if tail.residual is None:
        out = p.call("mkldnn._convolution_pointwise.default", data, weight, bias, *common, name, scalars, algorithm)
    else:
        if name != "none":
            return Declined("oneDNN's binary form is tried without an activation")
        out = p.call(
            "mkldnn._convolution_pointwise.binary",
            data, p.value(tail.residual), weight, bias, *common, "add", 1.0, None, (), None,
        )  # fmt: skip
    p.bind(graph.outputs[0], out)
    return p.finish(schedule)


def plain_convolution(graph: Graph, dtypes: Container[DType], kind: str, *, even: bool = True) -> NodeId | Declined:
    """The one convolution of a graph with one result, of an input with a constant weight, as libraries take it.

    `kind`: its types, for people. `even`: padded alike at both ends.
    """
    convs = [i for i, n in enumerate(graph.nodes) if n.prim is Prim.CONV]
    if len(convs) != 1 or len(graph.outputs) != 1:
        return Declined("not one convolution with one result")
    n = graph.nodes[convs[0]]
    at, (x, w) = cast("a.ConvAttrs", n.attrs), n.inputs
    if n.type.dtype not in dtypes or len(at.strides) != 2 or at.transposed or (even and at.pads_lo != at.pads_hi):
        return Declined(f"not a plain 2-d {kind}")
    if graph.nodes[x].prim is not Prim.INPUT or not is_weight(graph, w):
        return Declined("the operand is computed inside, or the weight is not constant")
    if 0 in n.type.shape or 0 in graph.type_of(w).shape:
        return Declined("a convolution without elements, or of none")
    return convs[0]


def only_product(graph: Graph) -> NodeId | Declined:
    """The product of a graph that has one, and one result."""
    products = [i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL]
    return products[0] if len(products) == len(graph.outputs) == 1 else Declined("not one product with one result")


def fused_linear(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """MATMUL with a constant right operand (+ bias)(+ activation) → `mkldnn._linear_pointwise`, prepacked."""
    graph = problem.graph
    made = only_product(graph)
    if isinstance(made, Declined):
        return made
    n = graph.nodes[made]
    x, w = n.inputs
    if n.type.dtype is not DType.F32 or n.type.rank != 2 or not is_weight(graph, w):
        return Declined("not a 2-d f32 product with a constant right operand")
    if 0 in n.type.shape or 0 in graph.type_of(w).shape:
        return Declined("a product without elements, or of none")
    tail = Tail(graph, made, 1)
    if not tail.matched or tail.residual is not None:
        return Declined("what follows the product is no bias + activation")
    if tail.activation[0] == "relu":
        return _RELU
    p = Program(graph)
    rows, k = graph.type_of(x).shape
    transposed = p.call("aten.permute.default", p.value(w), (1, 0))
    dense = p.call("aten.clone.default", transposed, memory_format="format:contiguous")
    packed = p.call("mkldnn._reorder_linear_weight.default", dense, rows)
    bias = None if tail.bias is None else p.call("aten.reshape.default", p.value(tail.bias), (n.type.shape[1],))
    name, scalars, algorithm = tail.activation
    data = p.call("aten.reshape.default", p.value(x), (rows, k))
    out = p.call("mkldnn._linear_pointwise.default", data, packed, bias, name, scalars, algorithm)
    p.bind(graph.outputs[0], out)
    return p.finish(schedule)
