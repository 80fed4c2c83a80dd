"""Activations of fused networks: as a graph for the forward pass, as C text with its derivative for the backward pass.

The derivative is written over what is kept of a layer: its result, where that says all, or else its sums before the
activation, both rounded to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from weft.fission import arithmetic, elu, gelu, relu, sigmoid, softplus
from weft.generate.cuda.training.formula import Formula
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

_SHARE = "const float s = w_mlp_share(1.0f, 1.0f + w_rough_exp(-({0})));"
_GELU = "const float t = w_mlp_tanh_{kind}(z * fmaf(z * z, 0.0356774081f, 0.797884561f));"


@dataclass(frozen=True, slots=True)
class Activation:
    """One of `KINDS` with its numbers: slope, alpha, (beta, threshold) or omega; or "formula"."""

    kind: str = "identity"
    numbers: tuple[float, ...] = ()
    formula: Formula | None = None
    """What it is where its kind is "formula"."""

    def apply(self, b: GraphBuilder, x: NodeId) -> NodeId:
        """Of a value of floats, as nodes."""
        if self.formula is not None:
            return self.formula.apply(b, x)
        return cast("NodeId", _GRAPHS[self.kind](b, x, *self.numbers))

    def slope(self, b: GraphBuilder, g: NodeId, kept: NodeId) -> NodeId:
        """g times the derivative, of one type, as nodes; `kept` is what `keeps` says.

        Numbers of the derivative are rounded to that type: float32, or any type where `whole`.
        """
        if self.formula is not None:
            derivative = self.formula.derivative()
            if isinstance(derivative, Declined):
                raise ValueError(derivative.reason)
            return b.apply(Prim.MUL, g, derivative.apply(b, kept))
        return _SLOPES[self.kind](_Nodes(b, kept, self.keeps), g, *self.numbers)

    def no_gradient(self) -> Declined | None:
        """Why its gradients are not computed by kernels."""
        return None if self.formula is None else self.formula.smooth()

    @property
    def whole(self) -> bool:
        """Whether the numbers of the derivative are whole."""
        return self.kind in ("identity", "relu", "tanh", "sigmoid", "silu")

    @property
    def keeps(self) -> int:
        """What the derivative reads: 0 nothing, 1 the result, 2 the sums."""
        if self.formula is not None or (self.kind in ("leaky_relu", "elu") and self.numbers[0] <= 0):
            return 2
        return KINDS[self.kind]

    def text(self, name: str, dtype: DType) -> str:
        """A struct: `of(z)`, `both(z, z)` narrowed, `back(g, v)`: gradient g times the derivative where v was kept."""
        kind = dtype.value
        of, back = _texts(self, kind)
        both = f"w_relu2_{kind}(z, y)" if self.kind == "relu" else f"w_narrow2_{kind}(of(z), of(y))"
        return (
            f"struct {name} {{ enum {{ KEEP = {self.keeps} }};\n"
            f"static W_FN float of(float z) {{ {of} }}\n"
            f"static W_FN u32 both(float z, float y) {{ return {both}; }}\n"
            f"static W_FN float back(float g, float z) {{ {back} }} }};\n"
        )


KINDS: dict[str, int] = {
    "identity": 0, "relu": 1, "leaky_relu": 1, "elu": 1, "tanh": 1, "sigmoid": 1,
    "silu": 2, "gelu": 2, "gelu_tanh": 2, "softplus": 2, "sin": 2,
}  # fmt: skip
"""Kind -> what is kept for its derivative."""


def _sine(b: GraphBuilder, x: NodeId, omega: float) -> NodeId:
    wide = b.cast(x, DType.F32)
    transposed = wide if omega == 1.0 else b.apply(Prim.MUL, wide, omega)
    return b.cast(b.apply(Prim.SIN, transposed), b.type_of(x).dtype)


_GRAPHS: dict[str, Callable[..., object]] = {
    "identity": lambda b, x: x,
    "relu": relu.relu,
    "leaky_relu": lambda b, x, slope: relu.leaky_relu(b, x, alpha=slope),
    "elu": lambda b, x, alpha: elu.elu(b, x, alpha=alpha),
    "tanh": arithmetic.tanh,
    "sigmoid": sigmoid.sigmoid,
    "silu": sigmoid.silu,
    "gelu": gelu.gelu,
    "gelu_tanh": lambda b, x: gelu.gelu(b, x, approximate="tanh"),
    "softplus": lambda b, x, beta, threshold: softplus.softplus(b, x, beta=beta, threshold=threshold),
    "sin": _sine,
}


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Elementwise operations on nodes of one type; `x` is what was kept of a layer."""

    b: GraphBuilder
    x: NodeId
    keeps: int

    def op(self, prim: Prim, *operands: NodeId | float) -> NodeId:
        """A primitive."""
        return self.b.apply(prim, *operands)

    def mul(self, *factors: NodeId | float) -> NodeId:
        """A product, from the left; the first factor is a node."""
        found = factors[0]
        for f in factors[1:]:
            found = self.op(Prim.MUL, found, f)
        return cast("NodeId", found)

    def share(self, v: NodeId) -> NodeId:
        """1 / (1 + exp(-v))."""
        return self.op(Prim.RECIPROCAL, self.op(Prim.ADD, self.op(Prim.EXP, self.op(Prim.NEG, v)), 1.0))

    def less(self, v: NodeId) -> NodeId:
        """1 - v."""
        return self.op(Prim.ADD, self.op(Prim.NEG, v), 1.0)

    def zero(self, shape_of: NodeId) -> NodeId:
        """Zeros."""
        t = self.b.type_of(shape_of)
        return self.b.broadcast(self.b.scalar(0.0, t.dtype), t.shape)


def _relu_slope(n: _Nodes, g: NodeId) -> NodeId:
    return n.op(Prim.SELECT, n.op(Prim.LE, n.x, 0.0), n.zero(g), g)


def _elu_slope(n: _Nodes, g: NodeId, alpha: float) -> NodeId:
    below = n.op(Prim.ADD, n.x, alpha) if n.keeps == 1 else n.mul(n.op(Prim.EXP, n.x), alpha)
    return n.op(Prim.SELECT, n.op(Prim.GT, n.x, 0.0), g, n.mul(g, below))


def _silu_slope(n: _Nodes, g: NodeId) -> NodeId:
    s = n.share(n.x)
    return n.mul(g, n.mul(s, n.op(Prim.ADD, n.mul(n.x, n.less(s)), 1.0)))


def _gelu_slope(n: _Nodes, g: NodeId) -> NodeId:
    whole = n.mul(n.op(Prim.ADD, n.op(Prim.ERF, n.mul(n.x, 0.5**0.5)), 1.0), 0.5)
    density = n.mul(n.op(Prim.EXP, n.mul(n.x, n.x, -0.5)), (2 * math.pi) ** -0.5)
    return n.mul(g, n.op(Prim.ADD, n.mul(n.x, density), whole))


def _gelu_tanh_slope(n: _Nodes, g: NodeId) -> NodeId:
    root, square = (2 / math.pi) ** 0.5, n.mul(n.x, n.x)
    t = n.op(Prim.TANH, n.mul(n.x, n.op(Prim.ADD, n.mul(square, 0.044715 * root), root)))
    inner = n.op(Prim.ADD, n.mul(square, 3 * 0.044715 * root), root)
    curve = n.mul(n.x, n.less(n.mul(t, t)), inner)
    return n.mul(g, n.mul(n.op(Prim.ADD, n.op(Prim.ADD, curve, t), 1.0), 0.5))


def _softplus_slope(n: _Nodes, g: NodeId, beta: float, threshold: float) -> NodeId:
    transposed = n.mul(n.x, beta)
    return n.op(Prim.SELECT, n.op(Prim.GT, transposed, threshold), g, n.mul(g, n.share(transposed)))


_SLOPES: dict[str, Callable[..., NodeId]] = {
    "identity": lambda n, g: g,
    "relu": _relu_slope,
    "leaky_relu": lambda n, g, slope: n.op(Prim.SELECT, n.op(Prim.GT, n.x, 0.0), g, n.mul(g, slope)),
    "elu": _elu_slope,
    "tanh": lambda n, g: n.mul(g, n.less(n.mul(n.x, n.x))),
    "sigmoid": lambda n, g: n.mul(g, n.mul(n.x, n.less(n.x))),
    "silu": _silu_slope,
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "softplus": _softplus_slope,
    "sin": lambda n, g, omega: n.mul(g, n.mul(n.op(Prim.COS, n.mul(n.x, omega)), omega)),
}
"""Kind -> gradient times derivative."""


def _number(x: float) -> str:
    if not math.isfinite(x):
        raise ValueError(f"{x} is no number of an activation")
    return f"{float.hex(float(x))}f" if x else "0.0f"


def _texts(act: Activation, kind: str) -> tuple[str, str]:
    """(function, gradient times derivative)."""
    if act.formula is not None:
        derivative = act.formula.derivative()
        if isinstance(derivative, Declined):
            raise ValueError(derivative.reason)
        (of, y), (back, d) = (f.text("z", kind) for f in (act.formula, derivative))
        return f"{' '.join(of)} return {y};", f"{' '.join(back)} return g * {d};"
    n = [_number(x) for x in act.numbers]
    match act.kind:
        case "identity":
            return "return z;", "return g;"
        case "relu":
            return "return w_max_f32(z, 0.0f);", "return z <= 0.0f ? 0.0f : g;"
        case "leaky_relu":
            return f"return z > 0.0f ? z : {n[0]} * z;", f"return z > 0.0f ? g : {n[0]} * g;"
        case "elu":
            slope = f"(z + {n[0]})" if act.keeps == 1 else f"({n[0]} * w_rough_exp(z))"
            return f"return z > 0.0f ? z : {n[0]} * expm1f(w_min_f32(z, 0.0f));", f"return z > 0.0f ? g : g * {slope};"
        case "tanh":
            return f"return w_mlp_tanh_{kind}(z);", "return g * fmaf(-z, z, 1.0f);"
        case "sigmoid":
            return f"{_SHARE.format('z')} return s;", "return g * (z * (1.0f - z));"
        case "silu":
            share = _SHARE.format("z")
            return f"{share} return z * s;", f"{share} return g * (s * fmaf(z, 1.0f - s, 1.0f));"
        case "gelu":
            whole = "0.5f * w_rough_one_plus_erf(z * 0.707106781f)"
            slope = f"fmaf(z * 0.398942280f, w_rough_exp(-0.5f * z * z), {whole})"
            return f"return z * ({whole});", f"return g * {slope};"
        case "gelu_tanh":
            inner = "fmaf(z * z, 0.107032224f, 0.797884561f)"
            slope = f"0.5f * fmaf(z * fmaf(-t, t, 1.0f), {inner}, 1.0f + t)"
            term = _GELU.format(kind=kind)
            return f"{term} return 0.5f * z * (1.0f + t);", f"{term} return g * ({slope});"
        case "softplus":
            over = f"z * {n[0]} > {n[1]}"
            short = "fmaf(t, fmaf(t, 0.333333333f, -0.5f), 1.0f) * t"
            term = f"const float t = w_rough_exp(w_min_f32(z * {n[0]}, {n[1]}));"
            return (
                f"{term} return {over} ? z : (t < 0.01f ? {short} : w_log(1.0f + t)) * {_number(1 / act.numbers[0])};",
                f"{_SHARE.format(f'z * {n[0]}')} return {over} ? g : g * s;",
            )
        case "sin":
            return f"return w_mlp_sin(z * {n[0]});", f"return g * ({n[0]} * w_mlp_cos(z * {n[0]}));"
    raise ValueError(f"no activation {act.kind!r}")
