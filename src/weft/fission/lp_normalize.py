"""Division by a norm along axes."""

from __future__ import annotations

from collections.abc import Sequence

from weft.fission.rule import axes_of, axis_of, extent, mean, narrow, not_float, widen
from weft.ir.attrs import WindowAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def l2_normalize(b: GraphBuilder, x: NodeId, *, axes: Sequence[int], eps: float) -> NodeId | Declined:
    """l2_normalize(x) → x / max(√sum(x²), ε).

    Shapes: x any; the sum is over `axes`.
    Conditions: floats.
    Source: `torch.nn.functional.normalize` with p = 2.
    """
    if problem := not_float(b, "l2_normalize", x):
        return problem
    found = axes_of(axes, b.type_of(x).rank)
    if isinstance(found, Declined):
        return found
    wide = widen(b, x)
    norm = b.apply(Prim.SQRT, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, wide, wide), found))
    return narrow(b, b.apply(Prim.DIV, wide, b.apply(Prim.MAX, norm, float(eps))), x)


def lp_normalize(b: GraphBuilder, x: NodeId, *, axis: int, p: int = 2) -> NodeId | Declined:
    """lp_normalize(x) → x / norm, where norm = sum(|x|) or √sum(x²), 1 in place of 0.

    Shapes: x any; the norm is along `axis`.
    Conditions: floats; p is 1 or 2. A slice of zeros stays zero.
    Source: ONNX LpNormalization.
    """
    if problem := not_float(b, "lp_normalize", x):
        return problem
    k = axis_of(axis, b.type_of(x).rank)
    if isinstance(k, Declined):
        return k
    if p not in (1, 2) or not b.type_of(x).rank:
        return Declined(f"lp_normalize with p = {p} of rank {b.type_of(x).rank}")
    wide = widen(b, x)
    each = b.apply(Prim.ABS, wide) if p == 1 else b.apply(Prim.MUL, wide, wide)
    total = b.reduce(Prim.REDUCE_SUM, each, (k,))
    norm = total if p == 1 else b.apply(Prim.SQRT, total)
    norm = b.apply(Prim.SELECT, b.apply(Prim.EQ, norm, 0.0), 1.0, norm)
    return narrow(b, b.apply(Prim.DIV, wide, norm), x)


def mean_variance_normalization(
    b: GraphBuilder, x: NodeId, *, axes: Sequence[int], eps: float = 1e-9
) -> NodeId | Declined:
    """mean_variance_normalization(x) → d / (√mean(d²) + ε), where d = x − mean(x).

    Shapes: x any; the means are over `axes`.
    Conditions: floats, a non-empty slice.
    Source: ONNX MeanVarianceNormalization, whose function body adds 1e-9 to the deviation.
    """
    if problem := not_float(b, "mean_variance_normalization", x):
        return problem
    found = axes_of(axes, b.type_of(x).rank)
    if isinstance(found, Declined):
        return found
    if extent(b, x, found) == 0:
        return Declined("mean_variance_normalization of an empty slice")
    wide = widen(b, x)
    d = b.apply(Prim.SUB, wide, mean(b, wide, found))
    deviation = b.apply(Prim.SQRT, mean(b, b.apply(Prim.MUL, d, d), found))
    return narrow(b, b.apply(Prim.DIV, d, b.apply(Prim.ADD, deviation, float(eps))), x)


def local_response_norm(
    b: GraphBuilder, x: NodeId, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> NodeId | Declined:
    """local_response_norm(x) → x / (bias + α/size·window_sum(x²))^β, the window running over channels.

    Shapes: x (N, C, *S); channel c sums c − ⌊(size − 1)/2⌋ … c + ⌈(size − 1)/2⌉.
    Conditions: floats, rank ≥ 2.
    Source: ONNX LRN.
    """
    if problem := not_float(b, "local_response_norm", x):
        return problem
    rank = b.type_of(x).rank
    if rank < 2 or size < 1:
        return Declined(f"local_response_norm of size {size}, rank {rank}")
    wide = widen(b, x)
    lo = (size - 1) // 2
    ones, zeros = (1,) * (rank - 2), (0,) * (rank - 2)
    window = WindowAttrs((size, *ones), (1, *ones), (lo, *zeros), (size - 1 - lo, *zeros), (1, *ones))
    total = b.add(Prim.WINDOW_SUM, b.apply(Prim.MUL, wide, wide), attrs=window)
    base = b.apply(Prim.ADD, b.apply(Prim.MUL, total, alpha / size), float(bias))
    return narrow(b, b.apply(Prim.DIV, wide, b.apply(Prim.POW, base, float(beta))), x)
