"""Layer normalisation, with and without its statistics, and instance normalisation, which is the same by channel."""

from __future__ import annotations

from collections.abc import Sequence

from weft.fission.rule import ABSENT, axes_of, dtype_of, extent, mean, narrow, not_float, per_channel, shape_of, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def layer_norm(
    b: GraphBuilder, x: NodeId, gamma: NodeId = ABSENT, beta: NodeId = ABSENT, *, axes: Sequence[int], eps: float
) -> NodeId | Declined:
    """layer_norm(x, γ, β) → d·r·γ + β, where d = x − mean(x), r = rsqrt(mean(d²) + ε).

    Shapes: x any; γ and β broadcast to x (aligned right); the means are over `axes`.
    Conditions: floats, a non-empty slice. Two passes: mean(x²) − mean(x)² loses all digits at a large mean.
    Source: arXiv:1607.06450, equation 4; ONNX LayerNormalization.
    """
    found = layer_norm_stats(b, x, gamma, beta, axes=axes, eps=eps)
    return found if isinstance(found, Declined) else found[0]


def layer_norm_stats(
    b: GraphBuilder, x: NodeId, gamma: NodeId = ABSENT, beta: NodeId = ABSENT, *, axes: Sequence[int], eps: float
) -> tuple[NodeId, ...] | Declined:
    """layer_norm_stats(x, γ, β) → (layer_norm(x, γ, β), mean(x), rsqrt(mean((x − mean(x))²) + ε)).

    Shapes: as layer_norm; the statistics keep `axes` with size 1 and are f32 for 16-bit x.
    Conditions: as layer_norm.
    Source: `aten.native_layer_norm`; ONNX LayerNormalization with three outputs.
    """
    if problem := not_float(b, "layer_norm", x, gamma, beta):
        return problem
    found = axes_of(axes, b.type_of(x).rank)
    if isinstance(found, Declined):
        return found
    if extent(b, x, found) == 0:
        return Declined("layer_norm of an empty slice")
    wide = widen(b, x)
    mu, d, r = centred(b, wide, found, eps)
    y = affine(b, b.apply(Prim.MUL, d, r), gamma, beta)
    return narrow(b, y, x), mu, r


def instance_norm(
    b: GraphBuilder, x: NodeId, gamma: NodeId = ABSENT, beta: NodeId = ABSENT, *, eps: float
) -> NodeId | Declined:
    """instance_norm(x, γ, β) → layer_norm over the spatial axes, γ and β per channel.

    Shapes: x (N, C, *S), at least one spatial axis; γ, β (C,).
    Conditions: as layer_norm; the variance is the biased one.
    Source: arXiv:1607.08022; ONNX InstanceNormalization.
    """
    rank = b.type_of(x).rank
    if rank < 3:
        return Declined(f"instance_norm of rank {rank}")
    scale, shift = (p if p == ABSENT else per_channel(b, p, rank) for p in (gamma, beta))
    return layer_norm(b, x, scale, shift, axes=tuple(range(2, rank)), eps=eps)


def centred(b: GraphBuilder, x: NodeId, axes: Sequence[int], eps: float) -> tuple[NodeId, NodeId, NodeId]:
    """(μ, d, r) = (mean(x), x − μ, rsqrt(mean(d²) + ε)) of an x that is already wide."""
    mu = mean(b, x, axes)
    d = b.apply(Prim.SUB, x, mu)
    v = mean(b, b.apply(Prim.MUL, d, d), axes)
    return mu, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, float(eps)))


def affine(b: GraphBuilder, y: NodeId, gamma: NodeId, beta: NodeId) -> NodeId:
    """y·γ + β in the type of y; an absent γ is 1, an absent β is 0. ShapeError where they would widen y."""
    shape = shape_of(b, y)
    for prim, p in ((Prim.MUL, gamma), (Prim.ADD, beta)):
        if p != ABSENT:
            y = b.apply(prim, y, b.broadcast(b.cast(p, dtype_of(b, y)), shape))
    return y
