"""Root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from weft.fission.layer_norm import affine
from weft.fission.rule import ABSENT, axes_of, extent, mean, narrow, not_float, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def rms_norm(
    b: GraphBuilder,
    x: NodeId,
    gamma: NodeId = ABSENT,
    *,
    axes: Sequence[int],
    eps: float,
    cast_before_scale: bool = False,
) -> NodeId | Declined:
    """rms_norm(x, γ) → x·r·γ, where r = rsqrt(mean(x²) + ε).

    Shapes: x any; γ broadcasts to x (aligned right); the mean is over `axes`.
    Conditions: floats, a non-empty slice. With `cast_before_scale` x·r is rounded to the type of x before γ, as LLaMA
    and ONNX do it.
    Source: arXiv:1910.07467; ONNX RMSNormalization.
    """
    if problem := not_float(b, "rms_norm", x, gamma):
        return problem
    found = axes_of(axes, b.type_of(x).rank)
    if isinstance(found, Declined):
        return found
    if extent(b, x, found) == 0:
        return Declined("rms_norm of an empty slice")
    wide = widen(b, x)
    q = mean(b, b.apply(Prim.MUL, wide, wide), found)
    y = b.apply(Prim.MUL, wide, b.apply(Prim.RSQRT, b.apply(Prim.ADD, q, float(eps))))
    if cast_before_scale:
        y = narrow(b, y, x)
    return narrow(b, affine(b, y, gamma, ABSENT), x)
