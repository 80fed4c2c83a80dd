"""Small fully connected networks as problems, for the tests of the mlp template."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np

from weft.fission.arithmetic import tanh
from weft.fission.gelu import gelu
from weft.fission.relu import relu
from weft.fission.sigmoid import sigmoid, silu
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType, round_bf16
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


def _in_f32(b: GraphBuilder, x: NodeId, prim: Prim) -> NodeId:
    return b.cast(b.apply(prim, b.cast(x, F32)), b.type_of(x).dtype)


ACTIVATIONS: dict[str, Callable[[GraphBuilder, NodeId], NodeId]] = {
    "none": lambda b, x: x,
    "relu": lambda b, x: cast("NodeId", relu(b, x)),
    "silu": lambda b, x: cast("NodeId", silu(b, x)),
    "gelu": lambda b, x: cast("NodeId", gelu(b, x)),
    "gelu tanh": lambda b, x: cast("NodeId", gelu(b, x, approximate="tanh")),
    "tanh": lambda b, x: cast("NodeId", tanh(b, x)),
    "sigmoid": lambda b, x: cast("NodeId", sigmoid(b, x)),
    "sin": lambda b, x: _in_f32(b, x, Prim.SIN),
    "cos": lambda b, x: _in_f32(b, x, Prim.COS),
    "reciprocal": lambda b, x: b.apply(Prim.RECIPROCAL, b.apply(Prim.ADD, b.apply(Prim.MUL, x, x), 0.0)),
    "formula": lambda b, x: b.apply(Prim.MUL, x, _in_f32(b, b.apply(Prim.MUL, x, 5.0), Prim.SIN)),
    "bump": lambda b, x: _in_f32(b, b.apply(Prim.NEG, b.apply(Prim.MUL, x, x)), Prim.EXP),
    "silu and itself": lambda b, x: b.apply(Prim.ADD, cast("NodeId", silu(b, x)), x),
    "user": lambda b, x: b.apply(Prim.MUL, b.apply(Prim.MAX, x, 0.0), b.apply(Prim.ADD, x, 0.5)),
}


@dataclass(frozen=True)
class Net:
    """`rows` of `widths[0]` columns through len(widths) - 1 layers."""

    rows: int
    widths: tuple[int, ...]
    act: str | tuple[str, ...] = "relu"
    """Of all layers, or one of each."""
    dtype: DType = F16
    bias: bool = True
    residual: bool = False
    """Each layer's input is added to its result where the widths agree."""
    given: DType | None = None
    """Element type of the input, and of the output."""
    batch: int = 0
    """Rows are shaped (batch, rows // batch)."""
    last: bool = True
    """Whether the last layer has an activation."""
    skip: tuple[int, ...] = ()
    """Layers that also read the input, beside their own; `widths` counts those without it."""
    turned: bool = False
    """Weights are stored (out, in)."""


def mlp(n: Net) -> Problem:
    """The problem of a network."""
    b = GraphBuilder()
    lead = (n.batch, n.rows // n.batch) if n.batch else (n.rows,)
    x = b.input(TensorType(n.given or n.dtype, (*lead, n.widths[0])))
    h = b.cast(x, n.dtype)
    acts = (n.act,) * (len(n.widths) - 1) if isinstance(n.act, str) else n.act
    for i, (k, cols) in enumerate(zip(n.widths, n.widths[1:], strict=False)):
        if i in n.skip:
            h = b.add(Prim.CONCAT, b.cast(x, n.dtype), h, attrs=a.ConcatAttrs(len(lead)))
            k += n.widths[0]
        shape = (cols, k) if n.turned else (k, cols)
        if k * cols <= 16:  # the graph holds small constants itself
            data = np.linspace(-1, 1, k * cols).reshape(shape).astype(np.float32)
            w = b.constant(round_bf16(data) if n.dtype is BF16 else data.astype(np.float16), n.dtype)
        else:
            w = b.input(TensorType(n.dtype, shape), is_weight=True)
        flat = b.reshape(h, (n.rows, k))
        y = b.reshape(b.add(Prim.MATMUL, flat, b.transpose(w, (1, 0)) if n.turned else w), (*lead, cols))
        if n.bias:
            y = b.apply(Prim.ADD, y, b.input(TensorType(n.dtype, (cols,)), is_weight=True))
        if n.last or i < len(n.widths) - 2:
            y = ACTIVATIONS[acts[i]](b, y)
        h = b.apply(Prim.ADD, y, h) if n.residual and k == cols else y
    graph = b.build([b.cast(h, n.given or n.dtype)])
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,))


def random_net(seed: int, *, most_rows: int = 20_000, most_work: float = 4e8, widest: int = 512) -> Net:
    """Any network that the templates take: each layer its own width and activation, values beside each other."""
    rng = random.Random(seed)
    depth = rng.choice([2, 2, 3, 3, 4, 5, 7, 10])
    top = rng.choice([32, 64, 128, 256, widest])
    widths = [rng.choice([rng.randint(1, top), 16 * rng.randint(1, max(1, top // 16))]) for _ in range(depth + 1)]
    if rng.random() < 0.2:
        widths = [widths[1]] * (depth + 1)
    dtype = rng.choice([F16, BF16])
    skip = () if rng.random() < 0.7 or widths[0] > 128 else (rng.randrange(1, depth),)
    work = sum((k + (widths[0] if i in skip else 0)) * n for i, (k, n) in enumerate(pairwise(widths)))
    rows = rng.choice([1, 15, 16, 17, 63, 64, 65, 127, 1000, 4097, rng.randint(1, most_rows)])
    rows = max(1, min(rows, most_rows, int(most_work / work)))
    if not skip and rng.random() < 0.08:
        widths[0] = rng.randint(513, 1500)
        rows = min(rows, 500)
    names = [x for x in ACTIVATIONS if x not in ("reciprocal", "cos")]
    return Net(
        rows, tuple(widths), tuple(rng.choices(names, k=depth)), dtype, rng.random() < 0.8, rng.random() < 0.4,
        rng.choice([None, F32]), 0, rng.random() < 0.5, skip, rng.random() < 0.5,
    )  # fmt: skip


def normal(problem: Problem, seed: int = 0) -> list[np.ndarray]:
    """Inputs of size one; weights that keep the size of what they multiply."""
    rng = np.random.default_rng(seed)
    found = []
    for i in problem.graph.inputs:
        t = problem.graph.type_of(i)
        x = rng.standard_normal(t.shape).astype(np.float32)
        if getattr(problem.graph.nodes[i].attrs, "is_weight", False):
            x *= 1.4 / t.shape[0] ** 0.5 if t.rank == 2 else 0.3
        found.append(round_bf16(x) if t.dtype is BF16 else x.astype(t.dtype.numpy))
    return found
