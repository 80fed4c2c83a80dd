"""Small networks built through the fission rules, with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.fission import apply
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId, Origin
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType


def normal(b: GraphBuilder, *shape: int) -> Array:
    """Random numbers for a constant, by its place in its graph: they depend on no other graph."""
    return np.random.default_rng((len(b), *shape)).normal(size=shape)


class Net:
    """A builder with a source of weights."""

    def __init__(self, seed: int = 0) -> None:
        self.b = GraphBuilder()
        self.rng = np.random.default_rng(seed)

    def input(self, *shape: int) -> NodeId:
        return self.b.input(TensorType(DType.F32, shape), "x")

    def weight(self, *shape: int) -> NodeId:
        return self.b.constant((self.rng.standard_normal(shape) / max(shape[-1], 1) ** 0.5).astype(np.float32))

    def rule(self, name: str, *operands: NodeId, **params: Any) -> NodeId:
        found = apply(self.b, name, operands, params)
        assert not isinstance(found, Declined), found.reason
        return found[0]

    def linear(self, x: NodeId, out: int) -> NodeId:
        """As after the clean-up: the transpose of the weight is folded."""
        operands = (x, self.weight(self.b.type_of(x).shape[-1], out), self.weight(out))
        with self.b.origin(Origin("linear", (), operands)) as index:
            y = self.b.apply(Prim.ADD, self.b.add(Prim.MATMUL, *operands[:2]), operands[2])
        self.b.set_origin_results(index, (y,))
        return y

    def layer_norm(self, x: NodeId) -> NodeId:
        c = self.b.type_of(x).shape[-1]
        rank = self.b.type_of(x).rank
        return self.rule("layer_norm", x, self.weight(c), self.weight(c), axes=(rank - 1,), eps=1e-5)

    def conv(self, x: NodeId, out: int, k: int = 3, stride: int = 1, bias: bool = True) -> NodeId:
        w = self.weight(out, self.b.type_of(x).shape[1], k, k)
        operands = (x, w, self.weight(out)) if bias else (x, w)
        pad = (k // 2,) * 2
        return self.rule("conv", *operands, strides=(stride,) * 2, pads_lo=pad, pads_hi=pad, dilations=(1, 1), groups=1)

    def batch_norm(self, x: NodeId) -> NodeId:
        """Frozen statistics, folded: x·s + t."""
        c = self.b.type_of(x).shape[1]
        shape = (c, *(1,) * (self.b.type_of(x).rank - 2))
        scaled = self.b.apply(Prim.MUL, x, self.weight(*shape))
        return self.b.apply(Prim.ADD, scaled, self.weight(*shape))

    def relu(self, x: NodeId) -> NodeId:
        return self.b.apply(Prim.MAX, x, 0.0)

    def build(self, *outputs: NodeId) -> Graph:
        return self.b.build(outputs)


def attention_block(net: Net, x: NodeId, heads: int) -> NodeId:
    b = net.b
    n, s, c = b.type_of(x).shape

    def split(t: NodeId) -> NodeId:
        return b.transpose(b.reshape(t, (n, s, heads, c // heads)), (0, 2, 1, 3))

    y = net.layer_norm(x)
    q, k, v = (split(net.linear(y, c)) for _ in range(3))
    scores = b.apply(Prim.MUL, b.add(Prim.MATMUL, q, b.transpose(k, (0, 1, 3, 2))), 0.125)
    p = net.rule("softmax", scores, axis=3)
    o = b.reshape(b.transpose(b.add(Prim.MATMUL, p, v), (0, 2, 1, 3)), (n, s, c))
    x = b.apply(Prim.ADD, x, net.linear(o, c))
    h = net.rule("gelu", net.linear(net.layer_norm(x), 4 * c))
    return b.apply(Prim.ADD, x, net.linear(h, c))


def transformer(blocks: int, n: int = 1, s: int = 8, c: int = 32, heads: int = 2) -> Graph:
    net = Net()
    x = net.input(n, s, c)
    for _ in range(blocks):
        x = attention_block(net, x, heads)
    return net.build(x)


def residual_net(blocks: int, c: int = 8, size: int = 6) -> Graph:
    net = Net()
    x = net.input(1, 3, size, size)
    x = net.relu(net.conv(x, c))
    for _ in range(blocks):
        y = net.relu(net.batch_norm(net.conv(x, c, bias=False)))
        y = net.batch_norm(net.conv(y, c, bias=False))
        x = net.relu(net.b.apply(Prim.ADD, x, y))
    pooled = net.b.reduce(Prim.REDUCE_SUM, x, (2, 3))
    pooled = net.b.apply(Prim.MUL, pooled, 1.0 / size**2)
    return net.build(net.linear(net.b.reshape(pooled, (1, c)), 10))


def instance_norm_relu_pad(c: int = 32, size: int = 224) -> Graph:
    """The subgraph of Candy that the paper studies (S2)."""
    net = Net()
    x = net.input(1, c, size, size)
    b = net.b
    n = 1.0 / size**2
    mean = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, x, (2, 3)), n)
    d = b.apply(Prim.SUB, x, mean)
    var = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), (2, 3)), n)
    y = b.apply(Prim.DIV, d, b.add(Prim.SQRT, b.apply(Prim.ADD, var, 1e-5)))
    y = b.apply(Prim.ADD, b.apply(Prim.MUL, y, net.weight(c, 1, 1)), net.weight(c, 1, 1))
    y = net.relu(y)
    pads = (0, 0, 1, 1)
    return net.build(b.add(Prim.PAD, y, attrs=a.PadAttrs(pads, pads, "reflect")))
