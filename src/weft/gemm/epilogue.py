"""What follows a product, as an expression over `acc`: read from text, turned into primitives or into torch.

    relu(acc + bias)            silu(acc * 0.5 + row) * full            bias_gelu

`acc` is the product. Further names are operands: `bias…` and `col…` have one value per column, `row…` one per row,
`residual…` and `full…` are as large as the result. A name alone may be one of `NAMED`. Source: none; the grammar is
that of Python's arithmetic.
"""

from __future__ import annotations

import ast
import hashlib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar, final

from weft.device.cuda.cublaslt import Activation
from weft.errors import OptionError
from weft.fission.gelu import gelu
from weft.fission.sigmoid import sigmoid, silu
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim

V = TypeVar("V")
Extent = Literal["column", "row", "full"]
MOST_TEXT, MOST_OPERANDS = 400, 6
NAMED: Mapping[str, str] = {
    "none": "acc",
    "bias": "acc + bias",
    "relu": "relu(acc)",
    "gelu": "gelu(acc)",
    "gelu_tanh": "gelu_tanh(acc)",
    "silu": "silu(acc)",
    "residual": "acc + residual",
    "bias_relu": "relu(acc + bias)",
    "bias_gelu": "gelu(acc + bias)",
    "bias_gelu_tanh": "gelu_tanh(acc + bias)",
    "bias_silu": "silu(acc + bias)",
    "bias_residual": "acc + bias + residual",
    "bias_residual_relu": "relu(acc + bias + residual)",
    "bias_gate": "(acc + bias) * full",
}


@dataclass(frozen=True, slots=True)
class Fused:
    """What cuBLASLt does in the product's kernel; operands by name, empty without."""

    bias: str = ""
    residual: str = ""
    activation: Activation = ""


FUSED: Mapping[str, Fused] = {
    "acc": Fused(),
    "acc + bias": Fused("bias"),
    "relu(acc)": Fused(activation="relu"),
    "gelu_tanh(acc)": Fused(activation="gelu_tanh"),
    "acc + residual": Fused("", "residual"),
    "relu(acc + bias)": Fused("bias", "", "relu"),
    "gelu_tanh(acc + bias)": Fused("bias", "", "gelu_tanh"),
    "acc + bias + residual": Fused("bias", "residual"),
    "relu(acc + bias + residual)": Fused("bias", "residual", "relu"),
}
"""Expressions that it does throughout."""
_OPERAND = re.compile(r"(bias|col|row|residual|full)(\d?)")
_EXTENTS: Mapping[str, Extent] = {
    "bias": "column", "col": "column", "row": "row", "residual": "full", "full": "full",
}  # fmt: skip
_BINARY: Mapping[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_PLAIN = ("exp", "tanh", "sqrt", "abs", "erf", "log")
_TWO = ("max", "min")
_PRIMS: Mapping[str, Prim] = {name: Prim(name) for name in (*_PLAIN, *_TWO, *_BINARY.values())}


@dataclass(frozen=True)
class Epilogue:
    """An expression that was checked."""

    text: str
    """Of the expression, normalised."""
    name: str
    """Of `NAMED`, or `e` and a hash: fit for a file name."""

    @cached_property
    def tree(self) -> ast.expr:
        """The syntax."""
        return self.tree_again()

    @cached_property
    def operands(self) -> tuple[tuple[str, Extent], ...]:
        """Names in the order of their first use."""
        names = sorted((x for x in ast.walk(self.tree) if isinstance(x, ast.Name)), key=lambda x: x.col_offset)
        return tuple((name, _extent(name)) for name in dict.fromkeys(x.id for x in names) if _OPERAND.fullmatch(name))

    def fold(self, leaves: Mapping[str, V], call: Callable[[str, list[V | float]], V]) -> V:
        """The expression's value.

        Args:
            leaves: `acc` and the operands.
            call: does one function by its name, or `add`, `sub`, `mul` or `div`; not all arguments are numbers.
        """
        found = _value(self.tree, leaves, call)
        assert not isinstance(found, float)  # `acc` is part of it
        return found

    def build(self, b: GraphBuilder, acc: NodeId, given: Mapping[str, NodeId]) -> NodeId:
        """As primitives on top of `acc`; `given` are the operands, fit to be broadcast."""

        def call(name: str, arguments: list[NodeId | float]) -> NodeId:
            if name in _PRIMS:
                return b.apply(_PRIMS[name], *arguments)
            (x,) = arguments
            assert not isinstance(x, float)
            found = _COMPOSED[name](b, x)
            assert not isinstance(found, Declined), found  # only for types that no product has
            return found

        return self.fold({"acc": acc, **given}, call)

    @cached_property
    def divided(self) -> tuple[Fused, Epilogue | None]:
        """What cuBLASLt does of it in one kernel, and what is left, with that result as `acc`; None: nothing is."""
        if self.text in FUSED:
            return FUSED[self.text], None
        for x in ast.walk(self.tree):
            if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Add):
                names = [y.id for y in (x.left, x.right) if isinstance(y, ast.Name)]
                columns = [name for name in names if name != "acc" and _extent(name) == "column"]
                if len(columns) == 1 and "acc" in names and all(self._uses(name) == 1 for name in names):
                    rest = ast.unparse(_Without(x.col_offset, x.end_col_offset or 0).visit(self.tree_again()))
                    return Fused(bias=columns[0]), epilogue(rest)
        return Fused(), self

    def tree_again(self) -> ast.expr:
        """The syntax, for one who changes it."""
        return ast.parse(self.text, mode="eval").body

    def _uses(self, name: str) -> int:
        return sum(isinstance(x, ast.Name) and x.id == name for x in ast.walk(self.tree))


@final
class _Without(ast.NodeTransformer):
    """Puts `acc` in the place of one sum."""

    def __init__(self, start: int, end: int) -> None:
        self._place = start, end

    def visit_BinOp(self, x: ast.BinOp) -> ast.expr:
        """The sum is found by where it stands."""
        if (x.col_offset, x.end_col_offset) == self._place:
            return ast.Name("acc", ast.Load())
        self.generic_visit(x)
        return x


def epilogue(text: str) -> Epilogue:
    """Read an expression, or a name of `NAMED`.

    Raises:
        OptionError: it does not parse, or uses what is not there [W001].
    """
    given = text.strip()
    source = NAMED.get(given, given)
    if len(source) > MOST_TEXT:
        raise _refused(f"{len(source)} characters; {MOST_TEXT} are allowed")
    found = _normal(source)
    name = next((k for k, v in NAMED.items() if v == found), "")
    made = Epilogue(found, name or "e" + hashlib.sha256(found.encode()).hexdigest()[:8])
    made.fold(dict.fromkeys(("acc", *(x for x, _ in made.operands)), ()), lambda *_: ())  # constants are numbers
    if len(made.operands) > MOST_OPERANDS:
        raise _refused(f"{len(made.operands)} operands; {MOST_OPERANDS} are allowed")
    return made


def _normal(text: str) -> str:
    """The expression in one form."""
    try:
        tree = ast.parse(text, mode="eval").body
        _check(tree)
        found = ast.unparse(tree)
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        raise _refused("it is no expression such as relu(acc + bias)") from None
    if not any(isinstance(x, ast.Name) and x.id == "acc" for x in ast.walk(tree)):
        raise _refused("it does not use acc, the product")
    return found


def _check(x: ast.expr) -> None:
    """Raise OptionError for what is not in the grammar."""
    if isinstance(x, ast.Constant):
        if isinstance(x.value, bool) or not isinstance(x.value, int | float) or not math.isfinite(x.value):
            raise _refused("constants are finite numbers")
    elif isinstance(x, ast.Name):
        if x.id != "acc" and not _OPERAND.fullmatch(x.id):
            raise _refused(f"no operand {x.id!r}: there are acc, bias, col, row, residual, full, each with a digit")
    elif isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub):
        _check(x.operand)
    elif isinstance(x, ast.BinOp) and type(x.op) in _BINARY:
        _check(x.left)
        _check(x.right)
    elif isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and not x.keywords:
        known = {**dict.fromkeys((*_PLAIN, *_COMPOSED), 1), **dict.fromkeys(_TWO, 2)}
        if known.get(x.func.id) != len(x.args):
            raise _refused(f"no function {x.func.id}() of {len(x.args)}: there are {', '.join(sorted(known))}")
        for argument in x.args:
            _check(argument)
    else:
        raise _refused("it holds what is neither a number, an operand, a function nor one of + - * /")


def _extent(name: str) -> Extent:
    found = _OPERAND.fullmatch(name)
    assert found is not None
    return _EXTENTS[found[1]]


def _value(x: ast.expr, leaves: Mapping[str, V], call: Callable[[str, list[V | float]], V]) -> V | float:
    """See `Epilogue.fold`; a number where the expression holds no name."""
    if isinstance(x, ast.Constant):
        return float(x.value)  # type: ignore[arg-type]
    if isinstance(x, ast.Name):
        return leaves[x.id]
    if isinstance(x, ast.UnaryOp):
        name, arguments = "mul", [_value(x.operand, leaves, call), -1.0]
    elif isinstance(x, ast.BinOp):
        name, arguments = _BINARY[type(x.op)], [_value(y, leaves, call) for y in (x.left, x.right)]
    else:
        assert isinstance(x, ast.Call)
        assert isinstance(x.func, ast.Name)
        name, arguments = x.func.id, [_value(y, leaves, call) for y in x.args]
    numbers = [y for y in arguments if isinstance(y, float)]
    return _folded(name, numbers) if len(numbers) == len(arguments) else call(name, arguments)


def _folded(name: str, numbers: Sequence[float]) -> float:
    """A function of numbers alone."""
    if name not in _OF_NUMBERS:
        raise _refused(f"{name}() of a constant: write its value")
    try:
        found = _OF_NUMBERS[name](*numbers)
    except ZeroDivisionError:
        raise _refused("it divides by zero") from None
    if not math.isfinite(found):
        raise _refused("a constant of it is not finite")
    return found


_OF_NUMBERS: Mapping[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
    "min": min,
}
_COMPOSED: Mapping[str, Callable[[GraphBuilder, NodeId], NodeId | Declined]] = {
    "relu": lambda b, x: b.apply(Prim.MAX, x, 0.0),
    "gelu": gelu,
    "gelu_tanh": lambda b, x: gelu(b, x, approximate="tanh"),
    "sigmoid": sigmoid,
    "silu": silu,
}
"""The same primitives as the importers make of these operators."""


def _refused(problem: str) -> OptionError:
    return OptionError(option="--epilogue", problem=problem)
