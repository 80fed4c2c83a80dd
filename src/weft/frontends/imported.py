"""What a front end hands on: the primitive graph, what fell back, and which run-time values it was specialised on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from weft.ir.graph import Graph
from weft.ir.types import Array, DType, TensorType


@dataclass(frozen=True, slots=True)
class OpaqueUse:
    """An operator that no fission rule took; its results are OPAQUE primitives."""

    op: str
    """As in `OpaqueAttrs.op`: `onnx::TopK`, `aten.topk.default`."""
    reason: str
    count: int
    """Calls, not results."""


@dataclass(frozen=True, slots=True)
class ValueGuard:
    """The graph holds only while input number `input_index` has exactly this value (it decided a shape or an axis).

    A caller checks `holds` before each run, and imports again where it does not.
    """

    input_index: int
    type: TensorType
    data: str
    """Row-major little-endian bytes in hex; bf16 as the float32 that stands in for it."""
    reason: str = field(default="", compare=False)
    """Which operator needed the value, for people only."""

    @classmethod
    def of(cls, input_index: int, value: Array, reason: str = "", dtype: DType | None = None) -> Self:
        """The guard that `value` satisfies; `dtype` is needed only for bf16."""
        kind = dtype or DType.from_numpy(value.dtype)
        return cls(input_index, TensorType(kind, value.shape), np.ascontiguousarray(value).tobytes().hex(), reason)

    @property
    def value(self) -> Array:
        """The value as an array."""
        return np.frombuffer(bytes.fromhex(self.data), self.type.dtype.numpy).reshape(self.type.shape)

    def holds(self, value: Array) -> bool:
        """True if `value` has the same element type, shape and bytes."""
        same = value.dtype == self.type.dtype.numpy and value.shape == self.type.shape
        return same and np.ascontiguousarray(value).tobytes().hex() == self.data


@dataclass(frozen=True, slots=True)
class Imported:
    """A model as primitives."""

    graph: Graph
    operators: int
    """Source operators that were imported, function bodies and constants not counted."""
    opaque: tuple[OpaqueUse, ...] = ()
    """What fell back, by falling count."""
    guards: tuple[ValueGuard, ...] = ()
    """Inputs whose values were compiled in; empty for most models."""
    notes: tuple[str, ...] = ()
    """What was assumed, one sentence each: e.g. which symbolic dimension was set to 1."""
    integers: Mapping[int, Array] = field(default_factory=dict, compare=False)
    """Values of the caller's integers, by input: indices that were drawn might lie outside of what they index."""
    held: frozenset[int] = field(default=frozenset(), compare=False)
    """Inputs whose given values no draw stands for, e.g. the state of an optimizer, which is never negative."""
