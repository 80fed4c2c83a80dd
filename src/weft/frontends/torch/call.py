"""One ATen call during the import: its arguments by name, and the rules it may be split by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, final

from weft import fission
from weft.errors import UnsupportedError
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId, OriginParam
from weft.ir.types import DType, TensorType, round_bf16

ABSENT: NodeId = -1
"""An optional operand that is not there, as fission rules spell it; a result that nobody reads."""

Number = int | float | bool


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the graph under construction; told apart from the integers among the arguments."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Pair:
    """A complex tensor: its parts, of one type."""

    re: NodeId
    im: NodeId


class NotTakenError(Exception):
    """No rule takes this call: it becomes an opaque node with this reason. Never leaves the front end.

    Handlers compose several rules, so the reason travels as an exception here and is a value outside.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Left = Callable[[frozenset[int], Mapping[str, object], str], tuple[NodeId, ...]]
"""(results that are read, arguments, reason) → nodes of the framework's call."""


@final
class Call:
    """One call of an ATen overload with static arguments."""

    def __init__(
        self,
        b: GraphBuilder,
        op: str,
        arguments: Mapping[str, object],
        results: Sequence[TensorType | None],
        used: frozenset[int],
        source: str = "",
        location: str = "",
        left: Left | None = None,
    ) -> None:
        self.b = b
        self.op = op
        self.arguments = arguments
        """By the names of the schema, defaults filled in; tensors are `Ref`."""
        self.results = tuple(results)
        """Type of each result; None for one that the call leaves out."""
        self.used = used
        """Positions of the results that somebody reads."""
        self._source = source
        self._location = location
        self._left = left

    @property
    def out(self) -> TensorType:
        """Type of the first result."""
        first = self.results[0]
        if first is None:
            self.decline("the first result is left out")
        return first

    def decline(self, reason: str) -> NoReturn:
        """Give the call up; it becomes opaque."""
        raise NotTakenError(reason)

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the whole graph: the call has effects that neither a rule nor ATen inside an executable may have."""
        raise UnsupportedError(op=self.op, reason=reason)

    def of(self, arguments: Mapping[str, object]) -> Call:
        """The same call of other arguments, all results read."""
        every = frozenset(range(len(self.results)))
        return Call(self.b, self.op, arguments, self.results, every, self._source, self._location)

    def leave(self, used: frozenset[int], reason: str, **changed: object) -> tuple[NodeId, ...]:
        """Results of the call by the framework, the others ABSENT, with other values of some arguments.

        For a call of which a rule takes some results, and the framework computes what it is asked for.
        """
        if self._left is None:
            self.decline(reason)
        return self._left(used, {**self.arguments, **changed}, reason)

    # arguments

    def has(self, name: str) -> bool:
        """Whether an argument is given and not None."""
        return self.arguments.get(name) is not None

    def ref(self, name: str) -> NodeId:
        """A tensor argument."""
        value = self.arguments[name]
        if not isinstance(value, Ref):
            self.decline(f"{name} is not a tensor")
        return value.node

    def maybe(self, name: str) -> NodeId:
        """A tensor argument or ABSENT."""
        return self.ref(name) if self.has(name) else ABSENT

    def refs(self, name: str) -> tuple[NodeId, ...]:
        """A list of tensors."""
        return tuple(v.node for v in self._list(name) if isinstance(v, Ref))

    def optional_refs(self, name: str) -> tuple[NodeId, ...]:
        """A list of tensors in which None (ABSENT) may stand."""
        return tuple(v.node if isinstance(v, Ref) else ABSENT for v in self._list(name))

    def _list(self, name: str) -> Sequence[object]:
        value = self.arguments[name]
        if not isinstance(value, list | tuple):
            self.decline(f"{name} is not a list")
        return value

    def number(self, name: str) -> Number:
        """A Python number."""
        value = self.arguments[name]
        if not isinstance(value, bool | int | float):
            self.decline(f"{name} is not a static real number")
        return value

    def integer(self, name: str) -> int:
        """An integer."""
        value = self.number(name)
        if isinstance(value, float) and not value.is_integer():
            self.decline(f"{name} is {value!r}, not an integer")
        return int(value)

    def real(self, name: str) -> float:
        """A float."""
        return float(self.number(name))

    def flag(self, name: str) -> bool:
        """A bool; None counts as false."""
        return bool(self.arguments.get(name))

    def text(self, name: str) -> str:
        """A string; None is the empty one."""
        value = self.arguments.get(name)
        return value if isinstance(value, str) else ""

    def ints(self, name: str, count: int = 0) -> tuple[int, ...]:
        """A list of integers; a single one is repeated `count` times, as ATen does."""
        value = self.arguments[name]
        items = [value] if isinstance(value, int) else self._list(name)
        found = tuple(v for v in items if isinstance(v, int))
        if len(found) != len(items):
            self.decline(f"{name} is not a list of static integers")
        return found * count if len(found) == 1 and count > 1 else found

    def floats(self, name: str) -> tuple[float, ...]:
        """A list of floats."""
        return tuple(float(v) for v in self._list(name) if isinstance(v, int | float))

    # graph

    def type(self, node: NodeId) -> TensorType:
        """Type of a node."""
        return self.b.type_of(node)

    def shape(self, node: NodeId) -> tuple[int, ...]:
        """Shape of a node."""
        return self.b.type_of(node).shape

    def rank(self, node: NodeId) -> int:
        """Rank of a node."""
        return len(self.b.type_of(node).shape)

    def axis(self, value: int, rank: int) -> int:
        """A dimension counted from the front; a scalar has one that may be named."""
        return value % max(rank, 1)

    def axes(self, name: str, rank: int) -> tuple[int, ...]:
        """Dimensions counted from the front, ascending; None and the empty list mean all."""
        if not self.has(name):
            return tuple(range(rank))
        found = tuple(sorted({self.axis(d, rank) for d in self.ints(name)}))
        return tuple(d for d in found if d < rank) or tuple(range(rank))

    def as_node(self, value: object, dtype: DType) -> NodeId:
        """A tensor converted to `dtype`, or a number as a scalar of it."""
        if isinstance(value, Ref):
            return self.b.cast(value.node, dtype)
        if isinstance(value, bool | int | float):
            return self.b.scalar(value, dtype)
        return self.decline("an operand is neither a tensor nor a real number")

    def fits(self, value: object, dtype: DType) -> bool:
        """Whether a number keeps its value in a 16-bit float (ATen computes with scalars in float32)."""
        if dtype not in (DType.F16, DType.BF16) or not isinstance(value, bool | int | float):
            return True
        import numpy as np

        wide = np.float32(value)
        with np.errstate(over="ignore"):
            narrow = (
                np.float32(np.float16(wide)) if dtype is DType.F16 else round_bf16(np.asarray([wide], np.float32))[0]
            )
        return bool(narrow == wide or np.isnan(wide))

    def rule(self, name: str, operands: Sequence[NodeId], **params: OriginParam) -> tuple[NodeId, ...]:
        """Results of a fission rule; gives the call up where the rule declines."""
        found = fission.apply(self.b, name, tuple(operands), params, source=self._source, location=self._location)
        if isinstance(found, Declined):
            self.decline(found.reason)
        return tuple(found)

    def one(self, name: str, *operands: NodeId, **params: OriginParam) -> NodeId:
        """The first result of a fission rule."""
        return self.rule(name, operands, **params)[0]


Handler = Callable[[Call], "NodeId | tuple[NodeId, ...]"]
"""Adds the nodes of a call and names its results; ABSENT for one that is not in `Call.used`."""
