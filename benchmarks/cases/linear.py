"""A product with a bias, a residual and an activation behind it, as a problem."""

from __future__ import annotations

from typing import Any

from weft import fission
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.text import print_graph
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

Sizes = tuple[int, int, int]
"""Rows, columns, sum."""


def problem_of(graph: Graph) -> Problem:
    """Row-major throughout."""
    return Problem(graph, print_graph(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(graph.outputs))


def linear(
    dtype: DType = DType.F32,
    *,
    bias: bool = False,
    residual: bool = False,
    activation: str = "",
    turned: bool = False,
    right: str = "constant",
    flat: bool = False,
    sizes: Sizes,
) -> Problem:
    """x of (1, m, k), as matrices, times w; what follows is added to (1, m, n), as a network has it.

    `turned`: x is the transpose of an input. `right`: w is `constant`, an input (`n`), or the transpose of one (`t`).
    `flat`: without the leading dimension.
    """
    m, n, k = sizes
    b, out = GraphBuilder(), (m, n) if flat else (1, m, n)
    x = b.input(TensorType(dtype, (k, m) if turned else (m, k) if flat else (1, m, k)))
    w = b.input(TensorType(dtype, (n, k) if right == "t" else (k, n)), is_weight=right == "constant")
    rows = b.transpose(x, (1, 0)) if turned else x if flat else b.reshape(x, (m, k))
    y = b.add(Prim.MATMUL, rows, b.transpose(w, (1, 0)) if right == "t" else w)
    y = y if flat else b.reshape(y, out)
    if bias:
        y = b.add(Prim.ADD, y, b.broadcast(b.input(TensorType(dtype, (n,)), is_weight=True), out))
    if residual:
        y = b.add(Prim.ADD, b.input(TensorType(dtype, out)), y)
    if activation:
        params: dict[str, Any] = {"approximate": "tanh"} if activation == "gelu" else {}
        made = fission.apply(b, activation, (y,), params)
        if isinstance(made, Declined):
            raise ValueError(f"{activation}: {made.reason}")
        (y,) = made
    return problem_of(b.build([y]))
