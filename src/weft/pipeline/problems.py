"""From candidates to distinct problems: what is measured, and where it stands."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

from weft.device.any import DeviceFacts
from weft.generate.library.operators import TABLED
from weft.ir.graph import Graph
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.types import Array
from weft.ir.work import node_flops
from weft.kernels.candidate import Candidate, Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.source import Kernel, KernelBinary, LibraryCall, Schedule
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.estimate import estimate_us, lower_bound_us
from weft.orchestrate.extract import Extracted, FormatChoice, extract, format_choices
from weft.platform.cpu import Cpu
from weft.platform.policy import SearchPolicy
from weft.platform.table import policy_for

_CATEGORIES = {str(p.value): "" if p in FREE else CATEGORY[p].value for p in Prim}
"""By the primitive's name (enumerations hash slowly); empty for free ones."""
Occurrence = tuple[Candidate, Extracted]
"""Where a problem stands in the graph: the candidate, and how its values are those of the problem."""


@final
@dataclass(frozen=True, eq=False)
class Task:
    """One distinct problem and all its occurrences in the graph. What is found out about it is in `Known`."""

    problem: Problem
    uses: tuple[Occurrence, ...]
    estimate_us: float
    bound_us: float
    calls: tuple[Occurrence, ...] = ()
    """Those at which the library plan alone may use it (`Kind.CALL`)."""
    policy: SearchPolicy = Cpu.policy
    """Of the kind of device that it is for."""

    @property
    def essential(self) -> bool:
        """True for what makes the program feasible: single primitives, operators and changes of format."""
        return any(c.kind is not Kind.GROUP for c, _ in self.uses)

    @property
    def called(self) -> bool:
        """True for what the library plan may be made of."""
        return bool(self.calls) or self.essential

    @cached_property
    def formats(self) -> list[tuple[Candidate, tuple[Format, ...], tuple[Format, ...]]]:
        """Every use with the formats of the candidate's inputs and outputs, in the candidate's order."""
        found = []
        for candidate, cut in self.uses:
            ins = dict(zip(cut.inputs, cut.problem.input_formats, strict=True))
            outs = dict(zip(cut.outputs, cut.problem.output_formats, strict=True))
            found.append(
                (candidate, tuple(ins[i] for i in candidate.inputs), tuple(outs[o] for o in candidate.outputs))
            )
        return found

    @cached_property
    def sort(self) -> str:
        """Coarser than `family`: what its kernel is built around, and whether it is one primitive alone.

        Several products with a result each, which may share a launch, are a sort of their own.
        """
        graph = self.problem.graph
        found = [c for n in graph.nodes if (c := _CATEGORIES[n.prim._value_])]
        products = found.count(Category.LINEAR.value)
        if len(graph.outputs) > 1 and products > 1:
            return "group"
        around = "product" if products else "reduction" if Category.REDUCE.value in found else "plain"
        return f"{around} alone" if len(found) <= 1 else around

    @cached_property
    def family(self) -> str:
        """Problems that miss their estimates alike: same product, shapes and formats, or same mix of categories."""
        graph = self.problem.graph
        names = {_CATEGORIES[n.prim._value_] for n in graph.nodes}
        if self.sort == "group":
            linear = [n for n in graph.nodes if CATEGORY[n.prim] is Category.LINEAR]
            return f"group {len(linear)} 2^{sum(node_flops(n, graph) for n in linear).bit_length()}"
        for node in graph.nodes if Category.LINEAR.value in names else ():
            if CATEGORY[node.prim] is Category.LINEAR:
                operands = " ".join(str(graph.type_of(i)) for i in node.inputs)
                formats = {f.value for f in self.problem.input_formats + self.problem.output_formats}
                return f"{node.prim.value} {operands} {node.attrs} {sorted(formats)}"
        categories = sorted(names - {""})
        size = sum(graph.type_of(o).nbytes for o in graph.outputs).bit_length()
        mixed = len(set(self.problem.input_formats + self.problem.output_formats))
        return f"{categories} {mixed} 2^{size // 3 * 3}"


Timed = tuple[Schedule, Kernel, KernelBinary | None]
"""A kernel as a trial has it."""
Use = tuple[Candidate, FormatChoice]
"""A candidate in one choice of formats."""


@final
@dataclass(frozen=True)
class Problems:
    """All distinct problems of a graph, by key."""

    tasks: Mapping[str, Task]
    uncut: int = 0
    """Numbers of groups that there was no time to cut out."""
    graph: Graph | None = None
    """What they were cut out of; None: nothing is."""
    rest: Callable[[Callable[[], bool]], Problems] | None = None
    """Collects what was left out so far, for `joined`; gives up where its argument says so. Any thread may call it."""

    @property
    def run_us(self) -> float:
        """About what the model takes, by the estimates of its primitives one by one."""
        alone: dict[int, float] = {}
        for task in self.tasks.values():
            for candidate, _ in task.uses:
                if candidate.kind is Kind.SINGLE:
                    known = alone.get(candidate.members, math.inf)
                    alone[candidate.members] = min(known, task.estimate_us)
        return sum(alone.values())

    def tables(self, task: Task, kernel: Kernel) -> dict[int, Array]:
        """By the position of a problem's input, the table that stands there, of those that a call makes itself.

        An operator that resizes has them from its parameters, and computes the problem for no others.
        """
        if self.graph is None or not isinstance(kernel, LibraryCall) or task.problem.origin_rule not in TABLED:
            return {}
        if ("form", "operator") not in kernel.schedule.params:
            return {}
        nodes = (task.uses or task.calls)[0][1].inputs
        unread = (k for k in range(len(nodes)) if k not in kernel.reads)
        return {k: self.graph.constant(nodes[k]) for k in unread if self.graph.nodes[nodes[k]].prim is Prim.CONSTANT}

    def by_tables(self, task: Task, kernels: Sequence[Timed]) -> list[tuple[dict[int, Array], list[Timed]]]:
        """Kernels for all tables, and the calls that make them, with theirs (see `tables`)."""
        mine = [(self.tables(task, kernel), (schedule, kernel, binary)) for schedule, kernel, binary in kernels]
        plain, tabled = [x for own, x in mine if not own], [x for own, x in mine if own]
        found: list[tuple[dict[int, Array], list[Timed]]] = [({}, plain)] if plain else []
        return [*found, (next(own for own, _ in mine if own), tabled)] if tabled else found

    def joined(self, others: Problems) -> Problems:
        """With what `rest` found."""
        tasks = dict(self.tasks)
        for key, task in others.tasks.items():
            mine = tasks.get(key)
            tasks[key] = (
                task if mine is None else replace(mine, uses=mine.uses + task.uses, calls=mine.calls + task.calls)
            )
        return replace(self, tasks=tasks, rest=None)


def collect(
    graph: Graph,
    candidates: Iterable[Candidate],
    alternatives: Alternatives,
    facts: DeviceFacts,
    *,
    most_at_once: float = math.inf,
    stop: Callable[[], bool] = lambda: False,
    give_up: Callable[[], bool] = lambda: False,
) -> Problems:
    """Cut every candidate out in each of its format choices; equal ones become one task.

    Once `stop` says so, no further groups are; what no plan can do without is, unless `give_up` says so: nothing can be
    planned with what is found then.

    Above `most_at_once` uses, groups of images that do not lie channels-last throughout are left for later: seldom is
    one in the best plan, and a first plan is there sooner.
    """
    uses = [(c, format_choices(graph, c)) for c in candidates]
    late = sum(len(choices) for _, choices in uses) > most_at_once
    now: list[Use] = []
    later: list[Use] = []
    for candidate, choices in uses:
        first = choices[1:2] if late and candidate.kind is Kind.GROUP and len(choices) > 1 else choices
        now += [(candidate, choice) for choice in first]
        later += [(candidate, choice) for choice in choices if choice not in first]
    found = _Collected(graph, alternatives, facts)
    with without_collection():
        wanted = (use for use in now if use[0].kind is not Kind.GROUP or not stop())
        found.take(itertools.takewhile(lambda _: not give_up(), wanted))
        tasks = found.tasks()
    uncut = len(now) - sum(len(t.uses) + len(t.calls) for t in tasks.values())

    def rest(stop: Callable[[], bool]) -> Problems:
        def go_on(_: Use) -> bool:
            time.sleep(0)  # those who write kernels need the interpreter for a moment, and often
            return not stop()

        more = _Collected(graph, alternatives, facts, tasks)
        with without_collection():
            more.take(itertools.takewhile(go_on, later))
            return Problems(more.tasks())

    return Problems(tasks, uncut, graph, rest if later else None)


@final
class _Collected:
    """Occurrences of each problem, while candidates are cut out."""

    def __init__(
        self, graph: Graph, alternatives: Alternatives, facts: DeviceFacts, before: Mapping[str, Task] | None = None
    ) -> None:
        """`before`: tasks whose problems are not made a second time."""
        self._graph, self._alternatives, self._facts = graph, alternatives, facts
        self._posed = dict(before or {})
        """Tasks by the problem's key, without their occurrences."""
        self._problems = {key: task.problem for key, task in self._posed.items()}
        self._occurrences: dict[str, tuple[list[Occurrence], list[Occurrence]]] = {}
        """Uses, and those of the library plan alone."""

    def take(self, uses: Iterable[Use]) -> None:
        """Cut these out."""
        for candidate, choice in uses:
            cut = extract(self._graph, candidate, choice.inputs, choice.outputs, self._alternatives, self._problems)
            key = cut.problem.key
            if key not in self._posed:
                self._problems[key] = cut.problem
                bound, estimate = lower_bound_us(cut.problem, self._facts), estimate_us(cut.problem, self._facts)
                self._posed[key] = Task(cut.problem, (), estimate, bound, policy=policy_for(self._facts))
            self._occurrences.setdefault(key, ([], []))[candidate.kind is Kind.CALL].append((candidate, cut))

    def tasks(self) -> dict[str, Task]:
        """One of each problem."""
        return {
            key: replace(self._posed[key], uses=tuple(uses), calls=tuple(calls))
            for key, (uses, calls) in self._occurrences.items()
        }


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for garbage in here: thousands of graphs are made, and all of them stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
