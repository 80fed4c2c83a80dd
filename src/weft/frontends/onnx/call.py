"""One ONNX operator during the import: what its handler sees, and what that may ask of the import around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import onnx

from weft import fission
from weft.frontends.onnx.check import Checked
from weft.frontends.onnx.errors import MismatchError, NoRuleError, UnsupportedTypeError
from weft.frontends.onnx.limits import Limits
from weft.frontends.onnx.pieces import Absent, Runtime
from weft.frontends.onnx.tensors import TensorReader, type_name
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.types import Array, TensorType

ABSENT: NodeId = -1
REEXPORT = "types and shapes of the model contradict each other: export it again"
"""What to do about a model that does not type-check."""


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
    """A value of an element type that Weft lacks: it is made anew inside of every piece that reads it."""

    source: Call | onnx.TensorProto
    output: int
    """Which one of the operator's."""
    type: onnx.TypeProto
    """Of a tensor; the shape may be unknown."""

    @property
    def name(self) -> str:
        """Of the element type."""
        return type_name(self.type.tensor_type.elem_type)


ListValue = tuple[NodeId, ...]
"""A sequence value, known element by element while importing."""
Value = NodeId | ListValue | Foreign
Result = NodeId | tuple[Value, ...] | Declined


class Scope:
    """Values by name; a subgraph sees the graphs around it, a function body does not."""

    def __init__(
        self,
        outer: Scope | None,
        opsets: Mapping[str, int],
        attributes: Mapping[str, onnx.AttributeProto] | None = None,
    ) -> None:
        self.outer = outer
        self.opsets = opsets
        self.attributes: Mapping[str, onnx.AttributeProto] = (
            attributes if attributes is not None else (outer.attributes if outer else {})
        )
        self.names: dict[str, Value] = {}

    def get(self, name: str) -> Value:
        """The value of a name; KeyError if there is none."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        raise KeyError(name)


@dataclass(slots=True)
class Call:
    """One operator that is being imported: what a handler sees."""

    im: Walk
    node: onnx.NodeProto
    scope: Scope
    opset: int
    operands: tuple[Value, ...]
    attrs: dict[str, Any]
    where: str
    guarded: list[str] = field(default_factory=list)

    @property
    def b(self) -> GraphBuilder:
        """The builder."""
        return self.im.b

    @property
    def op(self) -> str:
        """Operator type."""
        return self.node.op_type

    @property
    def num_outputs(self) -> int:
        """Outputs up to the last one that is used."""
        used = [i for i, name in enumerate(self.node.output) if name]
        return used[-1] + 1 if used else 0

    def has(self, i: int) -> bool:
        """True if operand `i` is given."""
        return i < len(self.operands) and self.operands[i] != ABSENT

    def x(self, i: int) -> NodeId:
        """Operand `i`; -1 if absent."""
        value = self.operands[i] if i < len(self.operands) else ABSENT
        if isinstance(value, tuple):
            raise NoRuleError(where=self.where, op=self.op, reason="a sequence where a tensor is wanted")
        if isinstance(value, Foreign):
            raise foreign_type(value, f"operand {i}", self.where, self.op)
        return value

    def xs(self) -> tuple[NodeId, ...]:
        """All operands, as tensors."""
        return tuple(self.x(i) for i in range(len(self.operands)))

    def type(self, i: int) -> TensorType:
        """Type of operand `i`."""
        return self.b.type_of(self.x(i))

    def shape(self, i: int) -> tuple[int, ...]:
        """Shape of operand `i`."""
        return self.type(i).shape

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, decoded."""
        return self.attrs.get(name, default)

    def value(self, i: int) -> npt.NDArray[Any]:
        """Value of operand `i` at import time; specialises on example inputs where it must.

        Raises:
            NeedsValueError: it depends on run-time data that are not at hand [W202].
        """
        return self.im.need(self.x(i), self)

    def ints(self, i: int) -> tuple[int, ...]:
        """An integer operand as a tuple."""
        return tuple(int(v) for v in np.asarray(self.value(i)).reshape(-1).tolist())

    def integer(self, i: int) -> int:
        """An integer operand with one element."""
        found = self.ints(i)
        if len(found) != 1:
            raise MismatchError(
                where=self.where, problem=f"operand {i} has {len(found)} elements, not 1", remedy=REEXPORT
            )
        return found[0]

    def rule(self, name: str, *operands: NodeId, **params: Any) -> tuple[NodeId, ...] | Declined:
        """Apply a fission rule under an origin that names this operator."""
        return fission.apply(
            self.b, name, tuple(operands), params, source=self.im.source_of(self), location=self.im.location_of(self)
        )

    def axis(self, name: str, default: int, rank: int | None = None) -> int:
        """An axis attribute, normalised to [0, rank)."""
        return self.norm(int(self.get(name, default)), self.type(0).rank if rank is None else rank)

    def norm(self, axis: int, rank: int) -> int:
        """An axis in [0, rank)."""
        if not -max(rank, 1) <= axis < max(rank, 1):
            raise MismatchError(where=self.where, problem=f"axis {axis} of rank {rank}", remedy=REEXPORT)
        return axis % max(rank, 1)

    def fail(self, problem: str) -> NoReturn:
        """The model is wrong here.

        Raises:
            MismatchError [W108].
        """
        raise MismatchError(where=self.where, problem=problem, remedy=REEXPORT)


Handler = Callable[[Call], Result]


def foreign_type(value: Foreign, what: str, where: str, op: str = "") -> UnsupportedTypeError:
    """A value of another type where only those of Weft can be."""
    reason = "Weft has no such element type, and only operators run by ONNX Runtime can hold one"
    return UnsupportedTypeError(where=where, op=op, what=what, type=value.name, reason=reason)


class Walk(Protocol):
    """What handlers, and the fallback for operators without one, ask of the import (`importer.Importer`)."""

    b: GraphBuilder
    checked: Checked
    limits: Limits
    reader: TensorReader
    runtime: Runtime | Absent
    opaque: Counter[tuple[str, str]]
    work: int

    @property
    def examples(self) -> Sequence[object] | None:
        """Example inputs, if there are any."""

    def attributes(self, node: onnx.NodeProto, scope: Scope, where: str) -> list[onnx.AttributeProto]:
        """The node's attributes with references to the function's own ones resolved."""

    def inline(
        self,
        body: onnx.FunctionProto,
        operands: Sequence[Value],
        attrs: Mapping[str, onnx.AttributeProto],
        where: str,
        opsets: Mapping[str, int] | None = None,
    ) -> tuple[Value, ...]:
        """The outputs of a function body."""

    def subgraph(self, graph: onnx.GraphProto, outer: Scope, operands: Sequence[Value] = ()) -> tuple[Value, ...]:
        """The outputs of a subgraph for some operands."""

    def tensor(self, t: onnx.TensorProto, where: str) -> NodeId:
        """A tensor of the model as a constant."""

    def sparse(self, s: onnx.SparseTensorProto, where: str) -> NodeId:
        """A sparse tensor, made dense."""

    def depends(self, node: NodeId) -> int:
        """0 for a constant; else a mask: bit 0 for opaque results, bit 1+i for input i."""

    def need(self, node: NodeId, call: Call) -> Array:
        """Value of a node for an operator that cannot be compiled without it."""

    def lent(self, node: NodeId) -> bool:
        """Whether a value follows from constants and inputs that have an example with values."""

    def hold_types(self, call: Call) -> None:
        """What an operator has added are tensors that something can compute."""

    def origin(self, call: Call) -> AbstractContextManager[int]:
        """Nodes added inside name the operator."""

    def source_of(self, call: Call) -> str:
        """Name of the operator in the model."""

    def location_of(self, call: Call) -> str:
        """File and node."""
