"""A model in two partitions, where no graph of primitives holds the whole: what Weft compiles, and what is left.

What an operator without static types gives (NonZero, NonMaxSuppression, a loop whose condition is computed), and all
that reads it, is left to ONNX Runtime, as one model of its own whose inputs are values of the first partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.frontends.imported import Imported


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
