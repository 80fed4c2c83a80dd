"""What an idiom of several primitives declares: how it is found, and what it is estimated to take; see `idioms`.

A group that grows holds one contraction, with what is elementwise around it. An *idiom* is what a template makes one
kernel of beyond that. Its other half, the template, stands in `generate.cuda`: a pattern of `generate.cuda.table` has
the name of the idiom among its `idioms`, and the idiom has that of the pattern among its `patterns`. Neither package
may import the other; a test holds the two tables against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.device.cuda.record import GpuFacts
from weft.ir.graph import Graph, Mask, NodeId
from weft.kernels.candidate import Candidate, Problem
from weft.orchestrate.legality import EnumerationLimits
from weft.orchestrate.stored import Stored


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known of one version of a graph once its groups are grown."""

    graph: Graph
    stored: Stored
    limits: EnumerationLimits
    known: Mapping[tuple[Mask, tuple[NodeId, ...]], tuple[int, Candidate]]
    """Candidates by members and outputs, those of idioms before this one too."""
    groups: Mapping[NodeId, Sequence[Mask]]
    """By their sink: groups, of this version and those before, of which others read the sink alone; largest first."""
    merged: bool
    """Other versions have products of one operand as one."""


class Multiplied(NamedTuple):
    """An estimate for several products together, where their sum is none."""

    recognises: Callable[[Graph, Sequence[NodeId]], bool]
    us: Callable[[Problem, Sequence[NodeId], GpuFacts], float]
    hides: bool
    """What stands in front of a product is hidden behind those of other rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idiom:
    """One kernel of several primitives that no group grows to."""

    name: str
    patterns: tuple[str, ...]
    """Names of the patterns of `generate.cuda.table` whose templates write its kernels."""
    find: Callable[[Scene], Iterable[tuple[Mask, Sequence[NodeId]]]]
    """(members, those that are written) of each place where it stands; convex."""
    multiplied: Multiplied | None
    """None: the estimate of one product after another fits."""
    wanted: Callable[[EnumerationLimits], bool] = lambda limits: limits.attention
    most_inputs: int | None = None
    """Stored values read, where `EnumerationLimits.max_inputs` is not the bound."""
    of_original: bool = False
    """A version's sets may be made of the original's nodes alone: what ends in front of an alternative's cast."""
