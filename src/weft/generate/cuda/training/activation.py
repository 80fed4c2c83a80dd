"""An activation of a network that is trained: one of the tuned ones, or a formula; as nodes, and as C text.

The text has the activation for the forward pass and its derivative for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from weft.generate.cuda.activations import KINDS, Kept, Kind, Nodes
from weft.generate.cuda.training.formula import Formula
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


@dataclass(frozen=True, slots=True)
class Activation:
    """One of `KINDS` with its numbers; or "formula"."""

    kind: str = "identity"
    numbers: tuple[float, ...] = ()
    formula: Formula | None = None
    """What it is where its kind is "formula"."""

    def __post_init__(self) -> None:
        if self.formula is None and len(self.numbers) != len(self._kind.numbers):
            raise ValueError(f"{self.kind} takes {list(self._kind.numbers)}, not {self.numbers}")

    @property
    def _kind(self) -> Kind:
        if self.kind not in KINDS:
            raise ValueError(f"no activation {self.kind!r}")
        return KINDS[self.kind]

    def apply(self, b: GraphBuilder, x: NodeId) -> NodeId:
        """Of a value of floats, as nodes."""
        if self.formula is not None:
            return self.formula.apply(b, x)
        return cast("NodeId", self._kind.graph(b, x, *self.numbers))  # no kind of these declines

    def slope(self, b: GraphBuilder, g: NodeId, kept: NodeId) -> NodeId:
        """g times the derivative, of one type, as nodes; `kept` is what `keeps` says.

        Numbers of the derivative are rounded to that type: float32, or any type where `whole`.
        """
        if self.formula is not None:
            return b.apply(Prim.MUL, g, _derivative(self.formula).apply(b, kept))
        return self._kind.slope(Nodes(b, kept, self.keeps), g, *self.numbers)

    def no_gradient(self) -> Declined | None:
        """Why its gradients are not computed by kernels."""
        return None if self.formula is None else self.formula.smooth()

    @property
    def whole(self) -> bool:
        """Whether the numbers of the derivative are whole."""
        return self.formula is None and self._kind.whole

    @property
    def widened(self) -> bool:
        """Whether the result may have another type than the argument, under autocast."""
        return self.formula is not None or self._kind.widened

    @property
    def keeps(self) -> Kept:
        """What the derivative reads."""
        return Kept.PREACTIVATION if self.formula is not None else self._kind.keeps(*self.numbers)

    def text(self, name: str, dtype: DType) -> str:
        """A struct: `of(z)`, `both(z, z)` narrowed, `back(g, v)`: gradient g times the derivative where v was kept."""
        kind, functions = dtype.value, ""
        if self.formula is not None:
            of, back, both = _formula_texts(self.formula, kind)
        else:
            of, back, both = self._kind.text(kind, self.numbers)
            functions = self._kind.functions_of(kind)
        return (
            f"struct {name} {{ enum {{ KEEP = {int(self.keeps)} }};\n{functions}"
            f"static W_FN float of(float z) {{ {of} }}\n"
            f"static W_FN u32 both(float z, float y) {{ return {both}; }}\n"
            f"static W_FN float back(float g, float z) {{ {back} }} }};\n"
        )


def called(name: str, arguments: Sequence[object], named: Mapping[str, object]) -> Activation | None:
    """The tuned activation that a call of a function of torch is; None: none that is known by its name.

    `arguments` and `named` are what follows the tensor. A trailing underscore and `inplace` say where the result goes.
    """
    left = [x for x in arguments if not isinstance(x, bool)]
    given = {key: value for key, value in named.items() if key != "inplace"}
    for kind in KINDS.values():
        if kind.call != name.rstrip("_") or not kind.call:
            continue
        if {key: given.get(key, default) for key, default in _OPTIONS.get(kind.call, {}).items()} != kind.options:
            continue
        takes = tuple(kind.numbers) if kind.call_takes is None else kind.call_takes
        own = {key: value for key, value in given.items() if key not in kind.options}
        values = {**kind.numbers, **dict(zip(takes, left, strict=False)), **own}
        numbers = [float(x) for x in values.values() if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(left) > len(takes) or not set(own) <= set(takes) or len(numbers) != len(values):
            continue
        return Activation(kind.name, tuple(numbers))
    return None


_OPTIONS: dict[str, Mapping[str, str]] = {kind.call: kind.options for kind in reversed(KINDS.values())}
"""Function -> its options with their defaults: those of the kind that stands first."""


def _derivative(formula: Formula) -> Formula:
    derivative = formula.derivative()
    if isinstance(derivative, Declined):
        raise ValueError(derivative.reason)  # noqa: TRY004 - it is the expression that is wrong
    return derivative


def _formula_texts(formula: Formula, dtype: str) -> tuple[str, str, str]:
    """See `Kind.text`."""
    (of, y), (back, d) = (f.text("z", dtype) for f in (formula, _derivative(formula)))
    both = KINDS["identity"].both.format(dtype=dtype)
    return f"{' '.join(of)} return {y};", f"{' '.join(back)} return g * {d};", both
