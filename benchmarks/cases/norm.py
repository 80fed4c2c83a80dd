"""Problems of a norm between two products: fused into one of them, or by itself."""

from __future__ import annotations

from typing import Literal

from weft.fission.gelu import gelu
from weft.fission.layer_norm import affine, layer_norm
from weft.fission.rms_norm import rms_norm
from weft.generate.cuda.gemm.common.normed import PIECE, joined_sums, partial_sums
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

Kind = Literal["own", "given", "parts", "rms"]
"""Where mean and variance come from: the row itself, inputs, partial sums; or a root mean square of the row itself."""
EPS = 1e-5


def problem_of(b: GraphBuilder, outs: list[NodeId]) -> Problem:
    """All in row-major order."""
    graph = b.build(outs)
    row = Format.ROW
    return Problem(graph, str(graph), (row,) * len(graph.inputs), (row,) * len(outs))


def _right(x: NodeId | Declined | tuple[NodeId, ...]) -> NodeId:
    assert isinstance(x, int), x
    return x


def _normalised(b: GraphBuilder, x: NodeId, kind: Kind, dtype: DType) -> NodeId:
    _, rows, length = b.type_of(x).shape
    gamma = b.input(TensorType(dtype, (length,)), is_weight=True)
    if kind == "rms":
        return _right(rms_norm(b, x, gamma, axes=(2,), eps=EPS))
    beta = b.input(TensorType(dtype, (length,)), is_weight=True)
    if kind == "own":
        return _right(layer_norm(b, x, gamma, beta, axes=(2,), eps=EPS))
    pieces = (rows, length // PIECE, 1) if kind == "parts" else (1, rows, 1)
    mean, spread = (b.input(TensorType(DType.F32, pieces)) for _ in range(2))
    if kind == "parts":
        mean, spread = joined_sums(b, mean, spread, (1, rows, 1))
    away = b.apply(Prim.SUB, b.cast(x, DType.F32), mean)
    scale = b.apply(Prim.RSQRT, b.apply(Prim.ADD, spread, EPS))
    return b.cast(affine(b, b.apply(Prim.MUL, away, scale), gamma, beta), dtype)


def norm(rows: int, length: int, dtype: DType = DType.F16) -> Problem:
    """Layer norm by itself."""
    b = GraphBuilder()
    return problem_of(b, [_normalised(b, b.input(TensorType(dtype, (1, rows, length))), "own", dtype)])


def normed(
    rows: int,
    length: int,
    columns: int,
    kind: Kind = "own",
    dtype: DType = DType.F16,
    *,
    stored: bool = False,
    act: bool = False,
) -> Problem:
    """[gelu](norm(x) @ w + bias); `stored`: the normalised operand is a result, too."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (1, rows, length)))
    y = _normalised(b, x, kind, dtype)
    z = _product(b, b.reshape(y, (rows, length)), rows, length, columns, dtype, act=act)
    return problem_of(b, [z, y] if stored else [z])


def plain(rows: int, length: int, columns: int, dtype: DType = DType.F16, *, act: bool = False) -> Problem:
    """[gelu](x @ w + bias)."""
    b = GraphBuilder()
    x = b.reshape(b.input(TensorType(dtype, (1, rows, length))), (rows, length))
    return problem_of(b, [_product(b, x, rows, length, columns, dtype, act=act)])


def leaving(
    rows: int, length: int, columns: int, dtype: DType = DType.F16, *, parts: bool = True, residual: bool = True
) -> Problem:
    """x @ w + bias (+ residual), and with `parts` mean and spread of the pieces of its rows."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (rows, length)))
    z = _product(b, x, rows, length, columns, dtype, act=False)
    if residual:
        z = b.apply(Prim.ADD, z, b.input(TensorType(dtype, (1, rows, columns))))
    if not parts:
        return problem_of(b, [z])
    mean, spread = partial_sums(b, z)
    return problem_of(b, [z, mean, spread])


def _product(b: GraphBuilder, x: NodeId, rows: int, length: int, columns: int, dtype: DType, *, act: bool) -> NodeId:
    w = b.input(TensorType(dtype, (length, columns)), is_weight=True)
    z = b.reshape(b.add(Prim.MATMUL, x, w), (1, rows, columns))
    z = b.apply(Prim.ADD, z, b.input(TensorType(dtype, (columns,)), is_weight=True))
    return _right(gelu(b, z)) if act else z
