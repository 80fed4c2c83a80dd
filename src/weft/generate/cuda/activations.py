"""Activations of fused networks that are tuned: all that is said of one is its entry of `KINDS`.

An entry has the names that torch has for it (its own function is the reference that tests compare with), the activation
and its derivative as nodes, both as C text, and what the forward kernels may do with that text. Any other elementwise
expression is a `training.formula.Formula`. The derivative is written over what is kept of a layer: its result, where
that says all, or else its pre-activation, both rounded to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from string import Template
from typing import cast

from weft.fission import arithmetic, elu, gelu, relu, sigmoid, softplus
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def _share(v: str) -> str:
    return f"const float s = w_mlp_share(1.0f, 1.0f + w_rough_exp(-({v})));"


class Kept(IntEnum):
    """What a derivative reads of a layer."""

    NOTHING = 0
    RESULT = 1
    PREACTIVATION = 2


@dataclass(frozen=True, slots=True)
class Nodes:
    """Elementwise operations on nodes of one type; `x` is what was kept of a layer."""

    b: GraphBuilder
    x: NodeId
    kept: Kept

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


@dataclass(frozen=True, slots=True)
class Kind:
    """A tuned activation: its graph, its derivative, both as C text, and what it is called in torch."""

    name: str
    module: str
    """Class of `torch.nn`, or of `weft.nn`; it is known by this class alone, never by one derived from it."""
    call: str
    """Function of `torch` or of `torch.nn.functional`, or method of tensors; "": none."""
    kept: Kept
    """What the derivative reads."""
    graph: Callable[..., object]
    """(builder, x, numbers) to the activation of a value of floats, as nodes."""
    slope: Callable[..., NodeId]
    """(nodes, g, numbers) to g times the derivative where `nodes.x` was kept, as nodes."""
    of: str
    """C statements that return the activation of the f32 `z`; {dtype} and {0}, {1}, ... are filled in: the numbers."""
    back: str
    """C statements that return `g` times the derivative where `z` was kept."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Its parameters in order: attribute of the module and argument of its constructor -> default."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the constructor, and attributes, that make the module this kind."""
    call_takes: tuple[str, ...] | None = None
    """The numbers that the function takes; None: all of them. The others have their defaults."""
    whole: bool = False
    """Whether the numbers of the derivative are whole."""
    refused: Callable[..., bool] = lambda *numbers: False
    """Whether no activation has these (finite) numbers."""
    back_of_preactivation: str = ""
    """`back` where the first number is not positive: then the sign of the result does not tell that of `z`."""
    derived: Callable[..., tuple[float, ...]] = lambda *numbers: ()
    """Further numbers of the C text, behind the others."""
    both: str = "w_narrow2_{dtype}(of(z), of(y))"
    """The activations of `z` and `y` as a pair."""
    functions: str = ""
    """C text of functions that `of` and `back` call, each `static W_FN`; $dtype is filled in."""
    fused: bool = False
    """Whether forward kernels compute it by `of` too, where results have 16 bits and its numbers are the defaults.

    Else they compute its nodes one by one.
    """
    slots: tuple[float, float] = (0.0, 0.0)
    """For the cost models, where it is fused: operations of `of`, and those of the special-function unit."""
    widened: bool = False
    """Whether autocast computes it in float32, whatever its argument has."""

    def keeps(self, *numbers: float) -> Kept:
        """What the derivative reads with these numbers."""
        return Kept.PREACTIVATION if self.back_of_preactivation and numbers[0] <= 0 else self.kept

    def text(self, dtype: str, numbers: Sequence[float]) -> tuple[str, str, str]:
        """`of`, `back` and `both` with everything filled in; raises ValueError where a number is not finite."""
        n = [number(x) for x in numbers]
        n += [number(x) for x in self.derived(*numbers)]
        back = self.back if self.keeps(*numbers) == self.kept else self.back_of_preactivation
        of, back, both = (text.format(*n, dtype=dtype) for text in (self.of, back, self.both))
        return of, back, both

    def functions_of(self, dtype: str) -> str:
        """C text of `functions` for a type; their braces stand as they are written."""
        return Template(self.functions).substitute(dtype=dtype)

    def forward(self, name: str, dtype: str) -> str:
        """A struct with `of(z)` alone, with the default numbers, for kernels of the forward pass."""
        functions = self.functions_of(dtype)
        of, _, _ = self.text(dtype, tuple(self.numbers.values()))
        return f"struct {name} {{ {functions}static W_FN float of(float z) {{ {of} }} }};\n"


def _relu_slope(n: Nodes, g: NodeId) -> NodeId:
    return n.op(Prim.SELECT, n.op(Prim.LE, n.x, 0.0), n.zero(g), g)


def _elu_slope(n: Nodes, g: NodeId, alpha: float) -> NodeId:
    below = n.op(Prim.ADD, n.x, alpha) if n.kept == Kept.RESULT else n.mul(n.op(Prim.EXP, n.x), alpha)
    return n.op(Prim.SELECT, n.op(Prim.GT, n.x, 0.0), g, n.mul(g, below))


def _silu_slope(n: Nodes, g: NodeId) -> NodeId:
    s = n.share(n.x)
    return n.mul(g, n.mul(s, n.op(Prim.ADD, n.mul(n.x, n.less(s)), 1.0)))


def _gelu_slope(n: Nodes, g: NodeId) -> NodeId:
    whole = n.mul(n.op(Prim.ADD, n.op(Prim.ERF, n.mul(n.x, 0.5**0.5)), 1.0), 0.5)
    density = n.mul(n.op(Prim.EXP, n.mul(n.x, n.x, -0.5)), (2 * math.pi) ** -0.5)
    return n.mul(g, n.op(Prim.ADD, n.mul(n.x, density), whole))


def _gelu_tanh_slope(n: Nodes, g: NodeId) -> NodeId:
    root, square = (2 / math.pi) ** 0.5, n.mul(n.x, n.x)
    t = n.op(Prim.TANH, n.mul(n.x, n.op(Prim.ADD, n.mul(square, 0.044715 * root), root)))
    inner = n.op(Prim.ADD, n.mul(square, 3 * 0.044715 * root), root)
    curve = n.mul(n.x, n.less(n.mul(t, t)), inner)
    return n.mul(g, n.mul(n.op(Prim.ADD, n.op(Prim.ADD, curve, t), 1.0), 0.5))


def _softplus_slope(n: Nodes, g: NodeId, beta: float, threshold: float) -> NodeId:
    scaled = n.mul(n.x, beta)
    return n.op(Prim.SELECT, n.op(Prim.GT, scaled, threshold), g, n.mul(g, n.share(scaled)))


def _mish_slope(n: Nodes, g: NodeId) -> NodeId:
    e = n.op(Prim.EXP, n.op(Prim.MIN, n.x, 20.0))
    m = n.mul(e, n.op(Prim.ADD, e, 2.0))
    t = n.mul(m, n.op(Prim.RECIPROCAL, n.op(Prim.ADD, m, 2.0)))
    curve = n.mul(n.x, n.share(n.x), n.less(n.mul(t, t)))
    return n.op(Prim.SELECT, n.op(Prim.GT, n.x, 20.0), g, n.mul(g, n.op(Prim.ADD, curve, t)))


def _sine(b: GraphBuilder, x: NodeId, omega: float) -> NodeId:
    wide = b.cast(x, DType.F32)
    scaled = wide if omega == 1.0 else b.apply(Prim.MUL, wide, omega)
    return b.cast(b.apply(Prim.SIN, scaled), b.type_of(x).dtype)


_ERF_HALF = "0.5f * w_rough_one_plus_erf(z * 0.707106781f)"
_GELU_TANH = "const float t = w_mlp_tanh_{dtype}(z * fmaf(z * z, 0.0356774081f, 0.797884561f));"
_SOFT = "const float t = w_rough_exp(w_min_f32(z * {0}, {1}));"
_MISH = "const float e = w_rough_exp(w_min_f32(z, 20.0f)), n = e * (e + 2.0f), r = w_mlp_share(1.0f, n + 2.0f);"
_SOFT_SHORT = "fmaf(t, fmaf(t, 0.333333333f, -0.5f), 1.0f) * t"

_ALL = (
    Kind(
        "identity", "Identity", "", Kept.NOTHING, whole=True,
        graph=lambda b, x: x,
        slope=lambda n, g: g,
        of="return z;",
        back="return g;",
    ),
    Kind(
        "relu", "ReLU", "relu", Kept.RESULT, whole=True,
        graph=relu.relu,
        slope=_relu_slope,
        of="return w_max_f32(z, 0.0f);",
        back="return z <= 0.0f ? 0.0f : g;",
        both="w_relu2_{dtype}(z, y)",  # narrowing does it by the way
    ),
    Kind(
        "leaky_relu", "LeakyReLU", "leaky_relu", Kept.RESULT, numbers={"negative_slope": 0.01},
        graph=lambda b, x, slope: relu.leaky_relu(b, x, alpha=slope),
        slope=lambda n, g, slope: n.op(Prim.SELECT, n.op(Prim.GT, n.x, 0.0), g, n.mul(g, slope)),
        of="return z > 0.0f ? z : {0} * z;",
        back="return z > 0.0f ? g : {0} * g;",
        back_of_preactivation="return z > 0.0f ? g : {0} * g;",
    ),
    Kind(
        "elu", "ELU", "elu", Kept.RESULT, numbers={"alpha": 1.0},
        graph=lambda b, x, alpha: elu.elu(b, x, alpha=alpha),
        slope=_elu_slope,
        of="return z > 0.0f ? z : {0} * expm1f(w_min_f32(z, 0.0f));",
        back="return z > 0.0f ? g : g * (z + {0});",
        back_of_preactivation="return z > 0.0f ? g : g * ({0} * w_rough_exp(z));",
    ),
    Kind(
        "tanh", "Tanh", "tanh", Kept.RESULT, whole=True,
        graph=arithmetic.tanh,
        slope=lambda n, g: n.mul(g, n.less(n.mul(n.x, n.x))),
        of="return w_mlp_tanh_{dtype}(z);",
        back="return g * fmaf(-z, z, 1.0f);",
    ),
    Kind(
        "sigmoid", "Sigmoid", "sigmoid", Kept.RESULT, whole=True,
        graph=sigmoid.sigmoid,
        slope=lambda n, g: n.mul(g, n.mul(n.x, n.less(n.x))),
        of=f"{_share('z')} return s;",
        back="return g * (z * (1.0f - z));",
    ),
    Kind(
        "silu", "SiLU", "silu", Kept.PREACTIVATION, whole=True,
        graph=sigmoid.silu,
        slope=_silu_slope,
        of=f"{_share('z')} return z * s;",
        back=f"{_share('z')} return g * (s * fmaf(z, 1.0f - s, 1.0f));",
    ),
    Kind(
        "gelu", "GELU", "gelu", Kept.PREACTIVATION, options={"approximate": "none"},
        graph=gelu.gelu,
        slope=_gelu_slope,
        of=f"return z * ({_ERF_HALF});",
        back=f"return g * fmaf(z * 0.398942280f, w_rough_exp(-0.5f * z * z), {_ERF_HALF});",
    ),
    Kind(
        "gelu_tanh", "GELU", "gelu", Kept.PREACTIVATION, options={"approximate": "tanh"},
        graph=lambda b, x: gelu.gelu(b, x, approximate="tanh"),
        slope=_gelu_tanh_slope,
        of=f"{_GELU_TANH} return 0.5f * z * (1.0f + t);",
        back=f"{_GELU_TANH} return g * (0.5f * fmaf(z * fmaf(-t, t, 1.0f), "
        "fmaf(z * z, 0.107032224f, 0.797884561f), 1.0f + t));",
    ),
    Kind(
        "softplus", "Softplus", "softplus", Kept.PREACTIVATION, numbers={"beta": 1.0, "threshold": 20.0}, widened=True,
        refused=lambda beta, threshold: beta == 0,
        graph=lambda b, x, beta, threshold: softplus.softplus(b, x, beta=beta, threshold=threshold),
        slope=_softplus_slope,
        derived=lambda beta, threshold: (1 / beta,),
        of=f"{_SOFT} return z * {{0}} > {{1}} ? z : (t < 0.01f ? {_SOFT_SHORT} : w_log(1.0f + t)) * {{2}};",
        back=f"{_share('z * {0}')} return z * {{0}} > {{1}} ? g : g * s;",
    ),
    Kind(
        "mish", "Mish", "mish", Kept.PREACTIVATION, fused=True, slots=(5.0, 2.0),
        graph=softplus.mish,
        slope=_mish_slope,
        of=f"{_MISH} return z * (n * r);",  # from 20 on n * r is 1
        back=f"{_MISH} return z > 20.0f ? g : g * fmaf(z * (4.0f * e * r), (e + 1.0f) * r, n * r);",
    ),
    Kind(
        "sin", "Sine", "sin", Kept.PREACTIVATION, numbers={"omega": 1.0}, call_takes=(),
        graph=_sine,
        slope=lambda n, g, omega: n.mul(g, n.mul(n.op(Prim.COS, n.mul(n.x, omega)), omega)),
        of="return w_mlp_sin(z * {0});",
        back="return g * ({0} * w_mlp_cos(z * {0}));",
    ),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ALL}
"""The tuned activations by name."""


def number(x: float) -> str:
    """A float as C text, exactly; raises ValueError where it is infinite or NaN."""
    if not math.isfinite(x):
        raise ValueError(f"{x} is no number of an activation")
    return f"{float.hex(float(x))}f" if x else "0.0f"
