"""From candidates to distinct problems, and from a problem to its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from weft.device.any import DeviceFacts
from weft.generate.protocol import Generator
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.prims import CATEGORY, FREE, Category
from weft.kernels.candidate import Candidate, Kind, Problem
from weft.kernels.source import Kernel, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.estimate import estimate_us, lower_bound_us
from weft.orchestrate.extract import Extracted, extract, format_choices

FIRST = 3
"""Kernels of each generator that are measured before it is known whether the problem matters."""


@dataclass
class Entry:
    """One distinct problem and every place where it stands."""

    problem: Problem
    uses: list[tuple[Candidate, Extracted]]
    estimate_us: float
    bound_us: float
    kernels: list[tuple[Schedule, Kernel]] | None = None
    """None until a generator was asked."""
    first: int = 0
    """So many of `kernels` are measured first: the best-looking few of each generator; they stand in front."""
    widened: bool = False
    """Whether the others are to be measured too."""

    @property
    def asked(self) -> list[tuple[Schedule, Kernel]]:
        """The kernels that are to be measured as things stand."""
        made = self.kernels or []
        return made if self.widened else made[: self.first]

    @property
    def essential(self) -> bool:
        """True for what makes the program feasible: single primitives, operators and changes of format."""
        return any(c.kind is not Kind.GROUP for c, _ in self.uses)

    @cached_property
    def family(self) -> str:
        """Problems that miss their estimates alike: same product, shapes and formats, or same mix of categories."""
        graph = self.problem.graph
        for node in graph.nodes:
            if CATEGORY[node.prim] is Category.LINEAR:
                operands = " ".join(str(graph.type_of(i)) for i in node.inputs)
                formats = {f.value for f in self.problem.input_formats + self.problem.output_formats}
                return f"{node.prim.value} {operands} {node.attrs} {sorted(formats)}"
        categories = sorted({CATEGORY[n.prim].value for n in graph.nodes if n.prim not in FREE})
        size = sum(graph.type_of(o).nbytes for o in graph.outputs).bit_length()
        mixed = len(set(self.problem.input_formats + self.problem.output_formats))
        return f"{categories} {mixed} 2^{size // 3 * 3}"


@dataclass
class Problems:
    """All distinct problems of a graph, by key."""

    entries: dict[str, Entry]
    declined: Counter[str] = field(default_factory=Counter)
    dropped_schedules: int = 0


def collect(graph: Graph, candidates: Iterable[Candidate], alternatives: Alternatives, facts: DeviceFacts) -> Problems:
    """Cut every candidate out in each of its format choices; equal ones become one entry."""
    found = Problems({})
    for candidate in candidates:
        for choice in format_choices(graph, candidate):
            cut = extract(graph, candidate, choice.inputs, choice.outputs, alternatives)
            entry = found.entries.get(cut.problem.key)
            if entry is None:
                bound, estimate = lower_bound_us(cut.problem, facts), estimate_us(cut.problem, facts)
                entry = found.entries[cut.problem.key] = Entry(cut.problem, [], estimate, bound)
            entry.uses.append((candidate, cut))
    return found


def make_kernels(
    entry: Entry, problems: Problems, generators: Sequence[Generator], facts: DeviceFacts, options: Options
) -> list[tuple[Schedule, Kernel]]:
    """Ask every generator for its schedules of a problem and emit the first few of each; done once per entry."""
    if entry.kernels is not None:
        return entry.kernels
    entry.kernels = []
    for generator in generators:
        schedules = generator.schedules(entry.problem, facts)
        if isinstance(schedules, Declined):
            problems.declined[f"{generator.name}: {schedules.reason}"] += 1
            continue
        made = 0
        early: list[tuple[Schedule, Kernel]] = []
        for schedule in schedules:
            if made >= options.keep_per_problem:
                problems.dropped_schedules += 1
                continue
            kernel = generator.emit(entry.problem, schedule)
            if isinstance(kernel, Declined):
                problems.declined[f"{generator.name}: {kernel.reason}"] += 1
                continue
            (early if made < FIRST else entry.kernels).append((schedule, kernel))
            made += 1
        entry.kernels[entry.first : entry.first] = early
        entry.first += len(early)
    return entry.kernels
