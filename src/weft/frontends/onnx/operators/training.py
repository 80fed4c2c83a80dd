"""Optimisers of ONNX's preview of training: one step of each tensor, written out.

Operands are R (rate), T (steps so far), then all tensors, all gradients, and the states in the order of the results.
"""

from __future__ import annotations

from weft.frontends.onnx.call import Call, Handler, Result
from weft.ir.graph import NodeId
from weft.ir.prims import Prim


def _groups(c: Call, kinds: int) -> list[tuple[NodeId, ...]]:
    """(X, G, states...) of each tensor."""
    given = c.xs()[2:]
    if not given or len(given) % kinds:
        c.fail(f"{len(given)} tensors do not come in groups of {kinds}")
    n = len(given) // kinds
    return [given[i::n] for i in range(n)]


def _by_kind(steps: list[tuple[NodeId, ...]]) -> tuple[NodeId, ...]:
    return tuple(step[kind] for kind in range(len(steps[0])) for step in steps)


def _regularised(c: Call, x: NodeId, g: NodeId) -> NodeId:
    """G + λ·X."""
    factor = float(c.get("norm_coefficient", 0.0))
    return c.b.apply(Prim.ADD, c.b.apply(Prim.MUL, x, factor), g) if factor else g


def _steps(c: Call) -> NodeId:
    """T in the type of R."""
    return c.b.cast(c.x(1), c.type(0).dtype)


def _adagrad(c: Call) -> Result:
    """H' = H + G², X' = X − R / (1 + T·decay) · G / (√H' + ε)."""
    b, decay, epsilon = c.b, float(c.get("decay_factor", 0.0)), float(c.get("epsilon", 1e-6))
    slowed = b.apply(Prim.ADD, b.apply(Prim.MUL, _steps(c), decay), 1.0)
    rate = b.apply(Prim.DIV, c.x(0), slowed)
    steps: list[tuple[NodeId, ...]] = []
    for x, g, h in _groups(c, 3):
        g = _regularised(c, x, g)
        h = b.apply(Prim.ADD, h, b.apply(Prim.MUL, g, g))
        scale = b.apply(Prim.ADD, b.apply(Prim.SQRT, h), epsilon)
        steps.append((b.apply(Prim.SUB, x, b.apply(Prim.DIV, b.apply(Prim.MUL, rate, g), scale)), h))
    return _by_kind(steps)


def _adam(c: Call) -> Result:
    """V' = α·V + (1 − α)·G, H' = β·H + (1 − β)·G², X' = X − r·V' / (√H' + ε), r = R·√(1 − βᵀ) / (1 − αᵀ) for T > 0."""
    b = c.b
    alpha, beta, epsilon = (float(c.get(k, v)) for k, v in (("alpha", 0.9), ("beta", 0.999), ("epsilon", 1e-6)))
    after = 1.0 - float(c.get("norm_coefficient_post", 0.0))
    t, dtype = _steps(c), c.type(0).dtype

    def left(base: float) -> NodeId:
        power = b.apply(Prim.POW, b.broadcast(b.scalar(base, dtype), b.type_of(t).shape), t)
        return b.apply(Prim.SUB, 1.0, power)

    corrected = b.apply(Prim.DIV, b.apply(Prim.MUL, c.x(0), b.apply(Prim.SQRT, left(beta))), left(alpha))
    rate = b.apply(Prim.SELECT, b.apply(Prim.GT, t, 0.0), corrected, c.x(0))
    steps: list[tuple[NodeId, ...]] = []
    for x, g, v, h in _groups(c, 4):
        g = _regularised(c, x, g)
        v = _mixed(c, v, alpha, g, 1.0 - alpha)
        h = _mixed(c, h, beta, b.apply(Prim.MUL, g, g), 1.0 - beta)
        scale = b.apply(Prim.ADD, b.apply(Prim.SQRT, h), epsilon)
        x = b.apply(Prim.SUB, x, b.apply(Prim.DIV, b.apply(Prim.MUL, rate, v), scale))
        steps.append((b.apply(Prim.MUL, x, after) if after != 1.0 else x, v, h))
    return _by_kind(steps)


def _momentum(c: Call) -> Result:
    """V' = α·V + (T > 0 ? β : 1)·G, X' = X − R·V'; with `mode` nesterov X' = X − R·(G + α·V')."""
    b, alpha, beta, mode = c.b, float(c.get("alpha")), float(c.get("beta")), str(c.get("mode"))
    if mode not in ("standard", "nesterov"):
        c.fail(f"mode {mode!r}")
    t, dtype = _steps(c), c.type(0).dtype
    share = b.apply(Prim.SELECT, b.apply(Prim.GT, t, 0.0), b.scalar(beta, dtype), b.scalar(1.0, dtype))
    steps: list[tuple[NodeId, ...]] = []
    for x, g, v in _groups(c, 3):
        g = _regularised(c, x, g)
        v = b.apply(Prim.ADD, b.apply(Prim.MUL, v, alpha), b.apply(Prim.MUL, share, g))
        push = v if mode == "standard" else b.apply(Prim.ADD, g, b.apply(Prim.MUL, v, alpha))
        steps.append((b.apply(Prim.SUB, x, b.apply(Prim.MUL, c.x(0), push)), v))
    return _by_kind(steps)


def _mixed(c: Call, old: NodeId, keep: float, new: NodeId, add: float) -> NodeId:
    b = c.b
    return b.apply(Prim.ADD, b.apply(Prim.MUL, old, keep), b.apply(Prim.MUL, new, add))


_DOMAIN = "ai.onnx.preview.training"
HANDLERS: dict[tuple[str, str], Handler] = {
    (_DOMAIN, "Adagrad"): _adagrad,
    (_DOMAIN, "Adam"): _adam,
    (_DOMAIN, "Momentum"): _momentum,
}
