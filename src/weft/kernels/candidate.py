"""What the enumeration hands on: a set of primitives of one graph, and the stand-alone problem it poses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from weft.ir.graph import Graph, Mask, NodeId, OriginParam
from weft.kernels.formats import Format


class Kind(Enum):
    """Where a candidate comes from; generators may refuse by kind before looking further."""

    GROUP = "group"
    """A convex set found by the enumeration."""
    ORIGIN = "origin"
    """All primitives of one source operator: what a library call of it covers."""
    SINGLE = "single"
    """One primitive; together they make every graph feasible."""
    CONVERT = "convert"
    """A change of format of one value; has no members."""
    CALL = "call"
    """What one library call covers beyond those: the library plan alone is made of them (`orchestrate.calls`)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of primitives that may become one kernel.

    `members` holds no FREE primitive (see `ir.prims.FREE`): broadcasts, views and constants on the way are
    part of whoever reads them. `inputs` and `outputs` are non-free nodes, graph inputs, or weights
    (constants too large to be written into the text of a kernel).
    """

    members: Mask
    inputs: tuple[NodeId, ...]
    """Values read from memory, ascending."""
    outputs: tuple[NodeId, ...]
    """Members whose value is written, ascending."""
    kind: Kind = Kind.GROUP


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A candidate cut out of its graph: what a generator sees, and all that it may depend on.

    The graph's inputs are the candidate's inputs in order; `is_weight` marks those that are constant at run
    time. Small constants stand in the graph by value. Its outputs are the candidate's outputs in order.
    """

    graph: Graph
    key: str
    """Canonical text of the graph and formats: equal text, equal problem; measured once."""
    input_formats: tuple[Format, ...]
    output_formats: tuple[Format, ...]
    origin_rule: str = ""
    """Name of the fission rule whose operator the members are exactly; empty otherwise."""
    origin_params: tuple[tuple[str, OriginParam], ...] = ()
    """The rule's keyword arguments, sorted by name."""
    origin_operands: tuple[int, ...] = ()
    """Per operand of the rule: position among the graph's inputs; -1 if absent or no input as it stands."""
    origin_operand_nodes: tuple[NodeId, ...] = ()
    """Per operand of the rule: its node in the graph (an input, a view of one, a small constant); -1 if absent."""
    alignment: int = 0
    """Inputs and outputs begin at multiples of so many bytes wherever the caller has them, and kernels are judged at
    such places, too; 0: they lie as the contract of kernels has it."""
    finite: bool = False
    """Nobody asks what becomes of NaN and infinities: kernels are judged on finite values alone."""
