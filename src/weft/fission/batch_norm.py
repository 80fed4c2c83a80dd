"""Batch normalisation with frozen statistics."""

from __future__ import annotations

from weft.fission.rule import ABSENT, full, narrow, not_float, per_channel, same_dtype, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def batch_norm(
    b: GraphBuilder, x: NodeId, gamma: NodeId, beta: NodeId, mu: NodeId, var: NodeId, *, eps: float
) -> NodeId | Declined:
    """batch_norm(x, γ, β, μ, σ²) → x·s + t, where s = γ/√(σ² + ε), t = β − μ·s.

    Shapes: x (N, C, *S); γ, β, μ, σ² (C,). γ and β may be absent.
    Conditions: inference. s and t depend on weights only, so constant folding leaves one multiply and one add.
    Source: arXiv:1502.03167, algorithm 2; ONNX BatchNormalization with training_mode = 0.
    """
    if problem := not_float(b, "batch_norm", x, gamma, beta, mu, var):
        return problem
    rank = b.type_of(x).rank
    if rank < 2:
        return Declined(f"batch_norm of rank {rank}")
    wide = widen(b, x)
    dtype = b.type_of(wide).dtype
    gamma, beta, mu, var = (same_dtype(b, p, dtype) for p in (gamma, beta, mu, var))
    root = b.apply(Prim.SQRT, b.apply(Prim.ADD, var, float(eps)))
    s = b.apply(Prim.DIV, full(b, 1.0, dtype) if gamma == ABSENT else gamma, root)
    shift = b.apply(Prim.MUL, mu, s)
    t = b.apply(Prim.NEG, shift) if beta == ABSENT else b.apply(Prim.SUB, beta, shift)
    y = b.apply(Prim.MUL, wide, per_channel(b, s, rank))
    return narrow(b, b.apply(Prim.ADD, y, per_channel(b, t, rank)), x)
