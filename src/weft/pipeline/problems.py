"""From candidates to distinct problems, and from a problem to its kernels."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from weft.device.any import DeviceFacts
from weft.generate.library.algorithm import names_algorithm
from weft.generate.library.operators import TABLED
from weft.generate.offer import Offer, kernels_of
from weft.generate.protocol import Generator
from weft.ir.graph import Graph
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.types import Array
from weft.ir.work import node_flops
from weft.kernels.candidate import Candidate, Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.source import Kernel, KernelBinary, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.estimate import estimate_us, lower_bound_us
from weft.orchestrate.extract import Extracted, FormatChoice, extract, format_choices
from weft.platform.cpu import Cpu
from weft.platform.policy import SearchPolicy
from weft.platform.table import policy_for

FIRST = 1
"""Kernels of each generator that are made first at least, and in a hurry at most."""
FIRST_CALLS = 3
"""Library calls that are made first where they are spared and nothing is generated."""
LIBRARY_FROM_US = 7.0
"""Where calls are spared, products whose estimate is below this are first tried without the library: it seldom won."""
LIBRARY_NEAR = 1.15
"""Further algorithms of a library are measured where its best call took at most so many times the best kernel: of
twelve products measured on an NVIDIA H200 the best algorithm took 0.87 of the heuristic's first at least."""
_CATEGORIES = {str(p.value): "" if p in FREE else CATEGORY[p].value for p in Prim}
"""By the primitive's name (enumerations hash slowly); empty for free ones."""


@dataclass
class Entry:
    """One distinct problem and every place where it stands."""

    problem: Problem
    uses: list[tuple[Candidate, Extracted]]
    estimate_us: float
    bound_us: float
    calls: list[tuple[Candidate, Extracted]] = field(default_factory=list)
    """Places where the library plan alone may use it (`Kind.CALL`)."""
    kernels: list[tuple[Schedule, Kernel]] | None = None
    """None until a generator was asked."""
    first: int = 0
    """So many of `kernels` are measured first: the best-looking few of each generator; they stand in front."""
    widened: bool = False
    """Whether the others are to be measured too."""
    library_near: bool = True
    """Whether a library's further algorithms are worth a trial."""
    more: bool = False
    """Whether a generator may make more than `kernels` for the asking."""
    policy: SearchPolicy = Cpu.policy
    """Of the kind of device that it is for."""
    hurried: bool = False
    """Whether one kernel is enough for now, because time is short."""
    made: int = 0
    """Kernels that each generator was asked for."""

    @property
    def is_made(self) -> bool:
        """Whether all kernels are there that are to be measured as things stand."""
        if self.kernels is None or (self.widened and self.more):
            return False
        return self.widened or self.made >= self.first_few or not (self.more or self.first < len(self.kernels))

    @property
    def first_few(self) -> int:
        """Kernels of each generator that are measured first, at most."""
        return FIRST if self.hurried else self.policy.first

    def most(self, options: Options) -> int:
        """Kernels to ask each generator for."""
        return options.keep_per_problem if self.widened else min(self.first_few, options.keep_per_problem)

    @property
    def asked(self) -> list[tuple[Schedule, Kernel]]:
        """The kernels that are to be measured as things stand."""
        made = self.kernels or []
        if not self.widened:
            return made[: self.first]
        return made if self.library_near else [x for x in made if not names_algorithm(x[1])]

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


@dataclass
class Problems:
    """All distinct problems of a graph, by key."""

    entries: dict[str, Entry]
    declined: Counter[str] = field(default_factory=Counter)
    dropped_schedules: int = 0
    uncut: int = 0
    """Places of groups that there was no time to cut out."""
    graph: Graph | None = None
    """What they were cut out of; None: nothing is."""
    rest: Callable[[Callable[[], bool]], Problems] | None = None
    """Collects what was left out so far, to be adopted; gives up where its argument says so. It may be called in a
    thread of its own."""

    @property
    def run_us(self) -> float:
        """About what the model takes, by the estimates of its primitives one by one."""
        alone: dict[int, float] = {}
        for entry in self.entries.values():
            for candidate, _ in entry.uses:
                if candidate.kind is Kind.SINGLE:
                    known = alone.get(candidate.members, math.inf)
                    alone[candidate.members] = min(known, entry.estimate_us)
        return sum(alone.values())

    def tables(self, entry: Entry, kernel: Kernel) -> dict[int, Array]:
        """By the position of a problem's input, the table that stands there, of those that a call makes itself.

        An operator that resizes has them from its parameters, and computes the problem for no others.
        """
        if self.graph is None or not isinstance(kernel, LibraryCall) or entry.problem.origin_rule not in TABLED:
            return {}
        if ("form", "operator") not in kernel.schedule.params:
            return {}
        nodes = (entry.uses or entry.calls)[0][1].inputs
        unread = (k for k in range(len(nodes)) if k not in kernel.reads)
        return {k: self.graph.constant(nodes[k]) for k in unread if self.graph.nodes[nodes[k]].prim is Prim.CONSTANT}

    def by_tables(self, entry: Entry, kernels: Sequence[Timed]) -> list[tuple[dict[int, Array], list[Timed]]]:
        """Kernels for all tables, and the calls that make them, with theirs (see `tables`)."""
        mine = [(self.tables(entry, kernel), (schedule, kernel, binary)) for schedule, kernel, binary in kernels]
        plain, tabled = [x for given, x in mine if not given], [x for given, x in mine if given]
        found: list[tuple[dict[int, Array], list[Timed]]] = [({}, plain)] if plain else []
        return [*found, (next(given for given, _ in mine if given), tabled)] if tabled else found

    def adopt(self, others: Problems) -> None:
        """Take in what `rest` found. No `Entry.formats` of before may be in use."""
        for key, entry in others.entries.items():
            mine = self.entries.setdefault(key, entry)
            if mine is not entry:
                mine.uses += entry.uses
                mine.calls += entry.calls
                mine.__dict__.pop("formats", None)
        self.rest = None


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
    """Cut every candidate out in each of its format choices; equal ones become one entry.

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
    found = Problems({}, graph=graph)
    with without_collection():
        wanted = (use for use in now if use[0].kind is not Kind.GROUP or not stop())
        _collect(found, itertools.takewhile(lambda _: not give_up(), wanted), graph, alternatives, facts, {})
        found.uncut = len(now) - sum(len(e.uses) + len(e.calls) for e in found.entries.values())
    if later:
        before = dict(found.entries)

        def rest(stop: Callable[[], bool]) -> Problems:
            def go_on(_: Use) -> bool:
                time.sleep(0)  # those who write kernels need the interpreter for a moment, and often
                return not stop()

            more = Problems({})
            with without_collection():
                _collect(more, itertools.takewhile(go_on, later), graph, alternatives, facts, before)
            return more

        found.rest = rest
    return found


def _collect(
    found: Problems,
    uses: Iterable[Use],
    graph: Graph,
    alternatives: Alternatives,
    facts: DeviceFacts,
    before: Mapping[str, Entry],
) -> None:
    known = {key: entry.problem for key, entry in before.items()}
    for candidate, choice in uses:
        cut = extract(graph, candidate, choice.inputs, choice.outputs, alternatives, known)
        known[cut.problem.key] = cut.problem
        entry = found.entries.get(cut.problem.key)
        if entry is None:
            entry = _entry(cut.problem, before.get(cut.problem.key), facts)
            found.entries[cut.problem.key] = entry
        (entry.calls if candidate.kind is Kind.CALL else entry.uses).append((candidate, cut))


def _entry(problem: Problem, same: Entry | None, facts: DeviceFacts) -> Entry:
    if same is not None:
        return Entry(problem, [], same.estimate_us, same.bound_us, policy=same.policy)
    bound, estimate = lower_bound_us(problem, facts), estimate_us(problem, facts)
    return Entry(problem, [], estimate, bound, policy=policy_for(facts))


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


def make_kernels(
    entry: Entry, problems: Problems, generators: Sequence[Generator], facts: DeviceFacts, options: Options
) -> list[tuple[Schedule, Kernel]]:
    """The first few kernels of each generator; all that are kept where the entry is widened. Each is made once."""
    if entry.is_made:
        return entry.kernels or []
    most = entry.most(options)
    take_kernels(entry, problems, [kernels_of(g, entry.problem, facts, most) for g in generators])
    return entry.kernels or []


def take_kernels(entry: Entry, problems: Problems, found: Sequence[Offer]) -> None:
    """Note what each generator made for an entry, in the order of the generators."""
    again = entry.kernels is not None
    entry.made = entry.first_few
    counts = _first_of(entry, found)
    first = [pair for offer, n in zip(found, counts, strict=True) for pair in offer.kernels[:n]]
    entry.kernels = first + [pair for offer, n in zip(found, counts, strict=True) for pair in offer.kernels[n:]]
    entry.first = len(first)
    entry.more = any(offer.more for offer in found) and not entry.widened
    for offer in found:
        if not again:
            problems.declined.update(offer.declined)
        problems.dropped_schedules += offer.more and entry.widened


def _first_of(entry: Entry, found: Sequence[Offer]) -> list[int]:
    """How many kernels of each offer are measured first."""
    if not entry.policy.spares_calls:
        return [entry.first_few] * len(found)
    library = [any(isinstance(kernel, LibraryCall) for _, kernel in offer.kernels) for offer in found]
    generated = any(offer.kernels for offer, its in zip(found, library, strict=True) if not its)
    if entry.hurried:
        return [0 if its and generated else FIRST for its in library]
    worth = entry.sort.startswith("product") and entry.estimate_us >= LIBRARY_FROM_US
    calls = 1 if worth else 0 if generated else FIRST_CALLS
    return [calls if its else entry.policy.first for its in library]
