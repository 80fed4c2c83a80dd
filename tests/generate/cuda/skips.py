"""Chains of layers with several inputs, values beside each other and additions of earlier ones, for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from tests.generate.cuda.mlps import ACTIVATIONS, BF16, F16, F32

from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format


@dataclass(frozen=True)
class Skips:
    """Layers of `widths[1:]` columns over the first of `given`; what is joined and added is said by layer."""

    rows: int
    widths: tuple[int, ...]
    """widths[0] is that of the first input."""
    others: tuple[int, ...] = ()
    """Columns of the other inputs."""
    beside: tuple[tuple[int, int], ...] = ()
    """(layer, value): a value stands behind the layer's own input; values are 0 for x, l for the result of layer l,
    -i for other input i."""
    front: tuple[tuple[int, int], ...] = ()
    """The same in front of it."""
    added: tuple[tuple[int, int, str], ...] = ()
    """(layer, value, operation): the layer's result and an earlier value, or a number of each row."""
    act: str = "relu"
    dtype: DType = F16
    given: DType | None = None
    """Of all inputs."""
    one: bool = False
    """All inputs are columns of one tensor."""
    last: bool = False
    """Whether the last layer has an activation."""
    bias: bool = True
    out: DType | None = None


def skips(n: Skips) -> Problem:
    """The problem."""
    b = GraphBuilder()
    given = n.given or n.dtype
    columns = (n.widths[0], *n.others)
    inputs: list[NodeId] = []
    if n.one:
        whole = b.input(TensorType(given, (n.rows, sum(columns))))
        start = 0
        for width in columns:
            at = a.SliceAttrs((0, start), (n.rows, width), (1, 1))
            inputs.append(b.add(Prim.SLICE, whole, attrs=at))
            start += width
    else:
        inputs = [b.input(TensorType(given, (n.rows, width))) for width in columns]
    values: dict[int, NodeId] = {-i: b.cast(v, n.dtype) for i, v in enumerate(inputs)}
    scale: NodeId | None = None
    h = values[0]
    for layer, cols in enumerate(n.widths[1:], start=1):
        last = layer == len(n.widths) - 1
        parts = [values[v] for at, v in n.front if at == layer] + [h]
        parts += [values[v] for at, v in n.beside if at == layer]
        h = b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(1)) if len(parts) > 1 else h
        k = b.type_of(h).shape[1]
        y = b.add(Prim.MATMUL, h, b.input(TensorType(n.dtype, (k, cols)), is_weight=True))
        if n.bias:
            y = b.apply(Prim.ADD, y, b.input(TensorType(n.dtype, (cols,)), is_weight=True))
        if n.last or not last:
            y = ACTIVATIONS[n.act](b, y)
        for _, value, kind in (x for x in n.added if x[0] == layer):
            if kind == "scale":
                if scale is None:
                    scale = b.input(TensorType(n.dtype, (n.rows, 1)))
                y = b.apply(Prim.MUL, y, b.broadcast(scale, (n.rows, cols)))
            else:
                y = b.apply(Prim.MUL if kind == "mul" else Prim.ADD, y, values[value])
        h = values[layer] = y
    graph = b.build([b.cast(h, n.out or n.dtype)])
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,))


NERF = Skips(
    300, (63, *(64,) * 8, 32, 4), (27,), beside=((5, 0), (9, -1)), act="relu", dtype=BF16,
)  # fmt: skip
"""A radiance field: the position again at the fifth layer, the direction at the ninth."""


def nerf(rows: int, width: int, dtype: DType, *, one: bool = False, given: DType | None = None) -> Skips:
    """A radiance field: the position again at layer 6, the direction beside the features at the last hidden layer."""
    return Skips(
        rows, (63, *(width,) * 9, width // 2, 3), (27,), front=((6, 0),), beside=((10, -1),), dtype=dtype, one=one,
        given=given,
    )  # fmt: skip


def random_skips(seed: int, *, most_rows: int = 3000, widest: int = 256, most_work: float = 4e8) -> Skips:
    """Any architecture with two to four inputs."""
    rng = random.Random(seed)
    depth = rng.choice([2, 3, 3, 4, 5, 7, 9])
    top = rng.choice([24, 64, 128, widest])

    def pick() -> int:
        return rng.choice([rng.randint(1, top), 16 * rng.randint(1, max(1, top // 16))])

    widths = [pick() for _ in range(depth + 1)]
    if rng.random() < 0.5:
        widths[1:] = [widths[1]] * depth
    others = [
        rng.choice([rng.randint(1, 70), 16, 32, widths[rng.randrange(1, depth + 1)]]) for _ in range(rng.randint(1, 3))
    ]
    beside: list[tuple[int, int]] = []
    front: list[tuple[int, int]] = []
    added: list[tuple[int, int, str]] = []
    for i in range(1, len(others) + 1):
        at = rng.randint(1, depth)
        (beside if rng.random() < 0.7 else front).append((at, -i))
        fitting = [layer for layer in range(1, depth + 1) if widths[layer] == others[i - 1]]
        if fitting and rng.random() < 0.7:
            added.append((rng.choice(fitting), -i, rng.choice(["add", "mul"])))
    if rng.random() < 0.6 and depth > 2:
        (front if rng.random() < 0.5 else beside).append((rng.randint(2, depth), 0))
    for layer in range(2, depth + 1):
        earlier = [v for v in range(1, layer) if widths[v] == widths[layer]]
        if earlier and rng.random() < 0.3:
            added.append((layer, rng.choice(earlier), "add"))
    if len(others) < 3 and rng.random() < 0.25:
        added.append((rng.randint(1, depth), 0, "scale"))
    work = sum((k + 128) * n for k, n in pairwise(widths))
    rows = rng.choice([1, 15, 17, 63, 64, 65, 127, 1000, rng.randint(1, most_rows)])
    rows = max(1, min(rows, most_rows, int(most_work / work)))
    names = ["relu", "silu", "tanh", "gelu", "sigmoid", "sin"]
    return Skips(
        rows, tuple(widths), tuple(others), tuple(beside), tuple(front), tuple(added), rng.choice(names),
        rng.choice([F16, BF16]), rng.choice([None, None, F32]), rng.random() < 0.25, rng.random() < 0.4,
        rng.random() < 0.8, rng.choice([None, F32]),
    )  # fmt: skip
