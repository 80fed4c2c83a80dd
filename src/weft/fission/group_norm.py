"""Group normalisation."""

from __future__ import annotations

from weft.fission.layer_norm import affine, centred
from weft.fission.rule import ABSENT, narrow, not_float, per_channel, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def group_norm(
    b: GraphBuilder, x: NodeId, gamma: NodeId = ABSENT, beta: NodeId = ABSENT, *, groups: int, eps: float
) -> NodeId | Declined:
    """group_norm(x, γ, β) → (d·r)·γ + β, with d and r over (C/G, *S) of x seen as (N, G, C/G, *S).

    Shapes: x (N, C, *S); γ, β (C,). The spatial axes stay apart, so the split of C is an index map in any layout.
    Conditions: floats; G divides C.
    Source: arXiv:1803.08494; `aten.native_group_norm`; ONNX GroupNormalization.
    """
    found = group_norm_stats(b, x, gamma, beta, groups=groups, eps=eps)
    return found if isinstance(found, Declined) else found[0]


def group_norm_stats(
    b: GraphBuilder, x: NodeId, gamma: NodeId = ABSENT, beta: NodeId = ABSENT, *, groups: int, eps: float
) -> tuple[NodeId, ...] | Declined:
    """group_norm_stats(x, γ, β) → (group_norm(x, γ, β), mean, rsqrt(variance + ε)).

    Shapes: as group_norm; the statistics are (N, G) and f32 for 16-bit x.
    Conditions: as group_norm.
    Source: `aten.native_group_norm`.
    """
    if problem := not_float(b, "group_norm", x, gamma, beta):
        return problem
    shape = b.type_of(x).shape
    if len(shape) < 2 or groups < 1 or shape[1] % groups:
        return Declined(f"group_norm of {b.type_of(x)} in {groups} groups")
    n, c, spatial = shape[0], shape[1], shape[2:]
    if b.type_of(x).size == 0:
        return Declined("group_norm of an empty tensor")
    split = b.reshape(widen(b, x), (n, groups, c // groups, *spatial))
    mu, d, r = centred(b, split, tuple(range(2, len(shape) + 1)), eps)
    y = b.reshape(b.apply(Prim.MUL, d, r), shape)
    scale, shift = (p if p == ABSENT else per_channel(b, p, len(shape)) for p in (gamma, beta))
    y = affine(b, y, scale, shift)
    return narrow(b, y, x), b.reshape(mu, (n, groups)), b.reshape(r, (n, groups))
