"""Matrix products: matmul of any rank and the operators that dress one."""

from __future__ import annotations

import math

from weft.fission.rule import ABSENT, full
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def matmul(b: GraphBuilder, x: NodeId, y: NodeId) -> NodeId | Declined:
    """matmul(x, y) → x @ y, vectors seen as one row or one column, x (…, m, k) by y (k, n) as one (…·m, k) product.

    Shapes: NumPy's matmul: (…, m, k) by (…, k, n) gives (…, m, n); batch dimensions broadcast.
    Conditions: rank ≥ 1, one number type. Flattening the rows keeps one large product for the library.
    Source: `numpy.matmul`; `torch.matmul`; ONNX MatMul.
    """
    s, t = b.type_of(x), b.type_of(y)
    if s.rank == 0 or t.rank == 0 or s.dtype is not t.dtype or s.dtype is DType.BOOL:
        return Declined(f"matmul of {s} and {t}")
    left = b.reshape(x, (1, *s.shape)) if s.rank == 1 else x
    right = b.reshape(y, (*t.shape, 1)) if t.rank == 1 else y
    rows = b.type_of(left).shape[:-1]
    if b.type_of(right).rank == 2 and len(rows) > 1:
        left = b.reshape(left, (math.prod(rows), b.type_of(left).shape[-1]))
    z = b.add(Prim.MATMUL, left, right)
    if b.type_of(right).rank == 2:
        z = b.reshape(z, (*rows, b.type_of(right).shape[1]))
    shape = b.type_of(z).shape
    if s.rank == 1:
        shape = (*shape[:-2], shape[-1])
    if t.rank == 1:
        shape = shape[:-1]
    return b.reshape(z, shape)


def linear(b: GraphBuilder, x: NodeId, w: NodeId, bias: NodeId = ABSENT) -> NodeId | Declined:
    """linear(x, w, bias) → x @ wᵀ + bias.

    Shapes: x (…, in), w (out, in) or (in,), bias (out,) or scalar; gives (…, out) or (…,).
    Conditions: one number type.
    Source: `torch.nn.functional.linear`.
    """
    t = b.type_of(w)
    if t.rank not in (1, 2):
        return Declined(f"linear with a weight of rank {t.rank}")
    y = matmul(b, x, b.transpose(w, (1, 0)) if t.rank == 2 else w)
    if isinstance(y, Declined) or bias == ABSENT:
        return y
    return b.apply(Prim.ADD, y, b.broadcast(bias, b.type_of(y).shape))


def gemm(
    b: GraphBuilder,
    x: NodeId,
    y: NodeId,
    c: NodeId = ABSENT,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
) -> NodeId | Declined:
    """gemm(x, y, c) → α·(op x @ op y) + β·c.

    Shapes: op x (m, k), op y (k, n), c broadcasts to (m, n).
    Conditions: matrices of one number type; integral α and β for integers. A factor of 1 costs nothing; with β = 0 or
    α = 0 the term is not read, as in BLAS.
    Source: ONNX Gemm; `aten.addmm`.
    """
    s, t = b.type_of(x), b.type_of(y)
    if s.rank != 2 or t.rank != 2 or s.dtype is not t.dtype or s.dtype is DType.BOOL:
        return Declined(f"gemm of {s} and {t}")
    if not s.dtype.is_float and not (float(alpha).is_integer() and float(beta).is_integer()):
        return Declined(f"gemm of {s.dtype.value} with alpha = {alpha}, beta = {beta}")
    left = b.transpose(x, (1, 0)) if trans_a else x
    right = b.transpose(y, (1, 0)) if trans_b else y
    return scaled_sum(b, b.add(Prim.MATMUL, left, right), c, alpha, beta)


def addmm(
    b: GraphBuilder, c: NodeId, x: NodeId, y: NodeId, *, alpha: float = 1.0, beta: float = 1.0
) -> NodeId | Declined:
    """addmm(c, x, y) → β·c + α·(x @ y).

    Shapes: x (m, k), y (k, n), c broadcasts to (m, n).
    Conditions: as gemm.
    Source: `aten.addmm`.
    """
    return gemm(b, x, y, c, alpha=alpha, beta=beta)


def bmm(b: GraphBuilder, x: NodeId, y: NodeId) -> NodeId | Declined:
    """bmm(x, y) → x @ y.

    Shapes: (B, m, k) by (B, k, n) gives (B, m, n).
    Conditions: rank 3, one number type.
    Source: `aten.bmm`.
    """
    s, t = b.type_of(x), b.type_of(y)
    if s.rank != 3 or t.rank != 3 or s.shape[0] != t.shape[0]:
        return Declined(f"bmm of {s} and {t}")
    return matmul(b, x, y)


def baddbmm(
    b: GraphBuilder, c: NodeId, x: NodeId, y: NodeId, *, alpha: float = 1.0, beta: float = 1.0
) -> NodeId | Declined:
    """baddbmm(c, x, y) → β·c + α·(x @ y), batched.

    Shapes: x (B, m, k), y (B, k, n), c broadcasts to (B, m, n).
    Conditions: one number type; integral α and β for integers.
    Source: `aten.baddbmm`.
    """
    z = bmm(b, x, y)
    if isinstance(z, Declined):
        return z
    if not b.type_of(z).dtype.is_float and not (float(alpha).is_integer() and float(beta).is_integer()):
        return Declined(f"baddbmm of {b.type_of(z).dtype.value} with alpha = {alpha}, beta = {beta}")
    return scaled_sum(b, z, c, alpha, beta)


def outer(b: GraphBuilder, x: NodeId, y: NodeId) -> NodeId | Declined:
    """outer(x, y) → x[:, None]·y[None, :].

    Shapes: (m,) and (n,) give (m, n).
    Conditions: vectors of one number type.
    Source: `torch.outer`.
    """
    s, t = b.type_of(x), b.type_of(y)
    if s.rank != 1 or t.rank != 1 or s.dtype is not t.dtype or s.dtype is DType.BOOL:
        return Declined(f"outer of {s} and {t}")
    return b.apply(Prim.MUL, b.reshape(x, (*s.shape, 1)), y)


def scaled_sum(b: GraphBuilder, z: NodeId, c: NodeId, alpha: float, beta: float) -> NodeId:
    """α·z + β·c for a product z; c broadcasts to z and may be absent."""
    t = b.type_of(z)
    wide = t.dtype.accumulator
    # a factor that f16 cannot hold exactly is applied in f32
    inner = t.dtype if alpha == 1 and beta in (0, 1) else wide
    y = b.cast(z, inner)
    if alpha != 1:
        y = b.apply(Prim.MUL, y, full(b, float(alpha), inner)) if alpha else full(b, 0.0, inner, t.shape)
    if c != ABSENT and beta != 0:
        addend = b.cast(c, inner)
        if beta != 1:
            addend = b.apply(Prim.MUL, addend, full(b, float(beta), inner))
        y = b.apply(Prim.ADD, y, b.broadcast(addend, t.shape))
    return b.cast(y, t.dtype)
