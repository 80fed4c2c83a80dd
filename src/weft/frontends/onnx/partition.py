"""A model in two partitions, where no graph of primitives holds the whole: what Weft compiles, and what is left.

What an operator without static types gives (NonZero, NonMaxSuppression, a loop whose condition is computed), and all
that reads it, is left to ONNX Runtime, as one model of its own whose inputs are values of the first partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weft.frontends.imported import Imported

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Partition:
    """A model as two; see the module."""

    compiled: Imported
    """The first: its inputs are the model's, its outputs what `fed` and `results` name."""
    rest: bytes
    """The second, an ONNX model with all of its data inside."""
    fed: tuple[int, ...]
    """What the inputs of `rest` are: an output of `compiled`, or, as -1 - k, the model's input k."""
    results: tuple[int, ...]
    """What the model's outputs are: an output of `rest`, or, as -1 - k, output k of `compiled`."""
    operators: Mapping[str, int]
    """How many of each ONNX Runtime runs."""

    def feed(self, inputs: Sequence[Value], ours: Sequence[Value]) -> list[Value]:
        """The inputs of `rest`, of the model's inputs and the outputs of `compiled`."""
        return [ours[k] if k >= 0 else inputs[-1 - k] for k in self.fed]

    def gather(self, ours: Sequence[Value], theirs: Sequence[Value]) -> list[Value]:
        """The model's outputs, of those of `compiled` and of `rest`."""
        return [theirs[k] if k >= 0 else ours[-1 - k] for k in self.results]
