"""Random small graphs and inputs for property tests; reproducible from a seed, for any area's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId, Origin
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType, round_bf16

# Functions that stay finite and smooth on all floats, so that two correct evaluations agree closely.
SAFE_UNARY = (Prim.NEG, Prim.ABS, Prim.TANH, Prim.ERF, Prim.SIN, Prim.COS, Prim.ATAN, Prim.ASINH)
SAFE_BINARY = (Prim.ADD, Prim.SUB, Prim.MUL, Prim.MAX, Prim.MIN)
REDUCTIONS = (Prim.REDUCE_SUM, Prim.REDUCE_MAX, Prim.REDUCE_MIN)


class _Maker:
    """Grows one graph; every step adds at most a few primitives on nodes that exist."""

    def __init__(self, seed: int, dtype: DType, constants: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.builder = GraphBuilder()
        self.dtype = dtype
        self.constants = constants
        self.pool: list[NodeId] = []

    def pick(self) -> NodeId:
        """Late nodes more often than early ones, so that graphs grow deep."""
        return self.pool[-1 - min(int(self.rng.exponential(1.5)), len(self.pool) - 1)]

    def shape(self, node: NodeId) -> tuple[int, ...]:
        return self.builder.type_of(node).shape

    def data(self, shape: Sequence[int]) -> Array:
        return random_array(self.rng, TensorType(self.dtype, tuple(shape)))

    def partner(self, node: NodeId) -> NodeId:
        """Another operand of the shape of `node`: an old node, a constant or a broadcast one."""
        shape = self.shape(node)
        same = [n for n in self.pool if self.shape(n) == shape]
        if same and self.rng.random() < 0.5:
            return int(self.rng.choice(same))
        if self.constants and self.rng.random() < 0.7:
            small = tuple(n if self.rng.random() < 0.5 else 1 for n in shape)
            special = self.rng.random()
            data = self.data(small)
            if special < 0.3:
                data = np.full(small, [0.0, 1.0, -0.0][int(special * 10)], data.dtype)
            return self.builder.broadcast(self.builder.constant(data, self.dtype), shape)
        return node

    def unary(self, x: NodeId) -> NodeId:
        return self.builder.add(SAFE_UNARY[self.rng.integers(len(SAFE_UNARY))], x)

    def binary(self, x: NodeId) -> NodeId:
        operands = [x, self.partner(x)]
        self.rng.shuffle(operands)
        return self.builder.add(SAFE_BINARY[self.rng.integers(len(SAFE_BINARY))], *operands)

    def select(self, x: NodeId) -> NodeId:
        b, y = self.builder, self.partner(x)
        return b.add(Prim.SELECT, b.add(Prim.LT, x, y), x, self.unary(y))

    def reduce(self, x: NodeId) -> NodeId:
        shape = self.shape(x)
        axes = [k for k in range(len(shape)) if self.rng.random() < 0.5]
        node = self.builder.reduce(REDUCTIONS[self.rng.integers(len(REDUCTIONS))], x, axes)
        return self.builder.broadcast(node, shape) if self.rng.random() < 0.5 else node

    def broadcast(self, x: NodeId) -> NodeId:
        shape = tuple(int(self.rng.integers(1, 4)) if n == 1 else n for n in self.shape(x))
        lead = (2,) if len(shape) < 4 and self.rng.random() < 0.4 else ()
        return self.builder.broadcast(x, (*lead, *shape))

    def reshape(self, x: NodeId) -> NodeId:
        shape = list(self.shape(x))
        choice = self.rng.random()
        if choice < 0.35 and len(shape) < 5:
            shape.insert(int(self.rng.integers(len(shape) + 1)), 1)
        elif choice < 0.6 and 1 in shape:
            shape.remove(1)
        elif len(shape) >= 2:
            k = int(self.rng.integers(len(shape) - 1))
            shape[k : k + 2] = [shape[k] * shape[k + 1]]
        return self.builder.reshape(x, shape)

    def transpose(self, x: NodeId) -> NodeId:
        return self.builder.transpose(x, [int(p) for p in self.rng.permutation(len(self.shape(x)))])

    def slice(self, x: NodeId) -> NodeId:
        starts, sizes, steps = [], [], []
        for n in self.shape(x):
            step = int(self.rng.choice([1, 1, 1, 2, -1]))
            size = int(self.rng.integers(1, (n - 1) // abs(step) + 2)) if n else 0
            span = (size - 1) * abs(step)
            low = int(self.rng.integers(n - span)) if n else 0
            starts.append(low if step > 0 else low + span)
            sizes.append(size)
            steps.append(step)
        return self.builder.slice(x, starts, sizes, steps)

    def concat(self, x: NodeId) -> NodeId:
        shape = self.shape(x)
        if not shape:
            return x
        pieces = [x, self.partner(x), self.unary(x)][: int(self.rng.integers(1, 4))]
        node = self.builder.add(Prim.CONCAT, *pieces, attrs=a.ConcatAttrs(int(self.rng.integers(len(shape)))))
        return self.slice(node) if self.rng.random() < 0.5 else node

    def pad(self, x: NodeId) -> NodeId:
        lo, hi = (tuple(int(k) for k in self.rng.integers(0, 2, len(self.shape(x)))) for _ in range(2))
        return self.builder.add(Prim.PAD, x, attrs=a.PadAttrs(lo, hi, "constant", float(self.rng.integers(-1, 2))))

    def matmul(self, x: NodeId) -> NodeId:
        shape = self.shape(x)
        if len(shape) < 2:
            return x
        n = int(self.rng.integers(1, 5))
        weight = self.data((shape[-1], n))
        w = self.builder.constant(weight, self.dtype) if self.constants else self.transpose_last(x)
        y = self.builder.add(Prim.MATMUL, x, w)
        if self.rng.random() < 0.6 and self.constants:
            columns = self.builder.type_of(y).shape[-1]
            scale = self.builder.constant(self.data((columns,)), self.dtype)
            y = self.builder.apply(Prim.MUL, y, scale)
        return y

    def transpose_last(self, x: NodeId) -> NodeId:
        rank = len(self.shape(x))
        return self.builder.transpose(x, (*range(rank - 2), rank - 1, rank - 2))

    def cast(self, x: NodeId) -> NodeId:
        """There and back through a type that holds every value."""
        wide = DType.F64 if self.dtype is not DType.F64 else DType.F32
        if wide is DType.F32:
            return x
        return self.builder.cast(self.builder.cast(x, wide), self.dtype)


STEPS = (
    "unary", "unary", "binary", "binary", "binary", "select", "reduce", "broadcast", "reshape", "transpose", "slice",
    "concat", "pad", "matmul", "cast",
)  # fmt: skip


def random_graph(
    seed: int,
    *,
    num_steps: int = 12,
    dtype: DType = DType.F32,
    constants: bool = True,
    steps: Sequence[str] = STEPS,
) -> Graph:
    """A graph of 1 to `num_steps` steps (a step adds one to four primitives), with one to three inputs and outputs.

    `steps` restricts the kinds of step: method names of `_Maker`.
    """
    make = _Maker(seed, dtype, constants)
    for k in range(int(make.rng.integers(1, 4))):
        shape = tuple(int(n) for n in make.rng.integers(1, 6, int(make.rng.integers(1, 4))))
        make.pool.append(make.builder.input(TensorType(dtype, shape), f"x{k}"))
    for _ in range(int(make.rng.integers(1, num_steps + 1))):
        x = make.pick()
        step = steps[int(make.rng.integers(len(steps)))]
        operands = (x,)
        with make.builder.origin(Origin(step, (("seed", seed),), operands, source=f"node {step}")) as origin:
            node = getattr(make, step)(x)
            make.builder.set_origin_results(origin, [node])
        if make.builder.type_of(node).size <= 4096:
            make.pool.append(node)
    num_outputs = int(make.rng.integers(1, 3))
    outputs = [make.pool[-1], *(make.pick() for _ in range(num_outputs - 1))]
    return make.builder.build(outputs, [f"y{k}" for k in range(len(outputs))])


def random_array(rng: np.random.Generator, type: TensorType) -> Array:
    """Values of order 1 in any element type."""
    if type.dtype is DType.BOOL:
        return rng.random(type.shape) < 0.5
    if type.dtype.is_integer:
        low = 0 if type.dtype is DType.U8 else -8
        return rng.integers(low, 9, type.shape).astype(type.dtype.numpy)
    values = np.asarray(rng.standard_normal(type.shape)).astype(type.dtype.numpy)
    return round_bf16(values) if type.dtype is DType.BF16 else values


def random_inputs(graph: Graph, seed: int = 0) -> list[Array]:
    """Inputs that fit a graph."""
    rng = np.random.default_rng(seed)
    return [random_array(rng, graph.type_of(i)) for i in graph.inputs]
