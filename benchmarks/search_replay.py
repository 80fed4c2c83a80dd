"""The search for a GPU's plan without a GPU: how good is the plan after how many seconds, and what does the host do?

    python -m benchmarks.search_replay [NAME ...] [--batch 1] [--dtype f16] [--budget 120] [--database FILE]

Enumeration, extraction and the search are the real ones, for the shipped profile of an H200; what they take is counted
in processor seconds. Kernels are neither written nor run: each takes a fixed time of a virtual clock, and its time is
that of the tuning database, if the problem is in it, or else the estimate times noise that depends on the problem
alone. Times scatter about estimates as they did on an H200. Plans are compared by these times, with what
was not measured included: at given moments, the best plan over what was measured until then, against the best plan if
all were known.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import math
import random
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.models import NETWORKS, load
from weft.device.cuda.facts import profile
from weft.frontends.torch import import_exported
from weft.generate.library import LibraryGenerator
from weft.generate.offer import Offer, kernels_of
from weft.ir.passes import clean_up
from weft.kernels.codec import schedule_from_json
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource, Kernel, Launch, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.select import Priced, select
from weft.pipeline import choose
from weft.pipeline.finish import reserve_s
from weft.pipeline.problems import Problems, Task, collect
from weft.pipeline.search.kernels import Kernels, Order
from weft.pipeline.search.loop import Search, Window
from weft.pipeline.search.prices import Known
from weft.pipeline.setting import limits_of
from weft.platform.cuda.platform import Cuda

T = TypeVar("T")
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
TRIAL_S, KERNEL_S = 0.02, 0.015
"""To measure a problem, and each of its kernels: 392 problems of two kernels took 49 ms in the median on an H200, 74 of
three 78 ms, 31 of four 97 ms."""
WRITE_S, BUILD_S, SLOTS = 0.3, 0.5, 12
"""To write a problem's kernels, and to build one of them, by so many side by side."""
WORKER_S = 4.0
"""Until the process that measures is there."""
AHEAD = 24
"""Problems that are built ahead of measuring; as many are written ahead of that."""
FAMILY_SD, PROBLEM_SD, SCHEDULE_SD = 0.25, 0.2, 0.3
"""Scatter of the logarithm of times over estimates."""
LIBRARY = {"product": 1.7, "reduction": 3.0, "plain": 3.0}
LIBRARY_BIG_US = 15.0
"""Products with a larger estimate suit the library better."""
STEP_US = 4.0
"""What a library call costs in a plan on top of its own time: it waits for, and is waited for by, whole kernels."""
Times = Mapping[str, Mapping[Schedule, float]]
"""Problem -> schedule -> microseconds; infinite for what was rejected."""


def read_times(path: Path) -> Times:
    """What a tuning database says of each problem, in the order in which it was measured."""
    found: dict[str, dict[Schedule, float]] = {}
    with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as base:
        for (body,) in base.execute("SELECT body FROM trials ORDER BY rowid"):
            m = json.loads(body)["measurement"]
            us = statistics.median(m["samples_us"]) if m["verdict"] == "ok" else math.inf
            found.setdefault(m["problem_key"], {})[schedule_from_json(m["schedule"])] = us
    return found


@dataclass
class Truth:
    """The time of every kernel of every problem."""

    times: Times
    kernels: int = 6
    """Generated kernels of a problem."""

    def scatter(self, sd: float, *what: object) -> float:
        """Normal with this standard deviation, always the same for the same things."""
        seed = hashlib.sha256(repr(what).encode()).digest()
        return random.Random(seed).gauss(0.0, sd)

    def schedules(self, task: Task) -> list[Schedule]:
        """Of the generated kernels; those of the database first."""
        known = [s for s in self.times.get(task.problem.key, ()) if s.generator != "library"]
        return known + [Schedule("cuda", (("number", i),)) for i in range(len(known), self.kernels)]

    def us(self, task: Task, schedule: Schedule) -> float:
        """Microseconds of one kernel."""
        known = self.times.get(task.problem.key, {})
        if schedule in known:
            return known[schedule]
        sort = task.sort.split()[0]
        own = self.scatter(FAMILY_SD, task.family) + self.scatter(PROBLEM_SD, task.problem.key)
        if schedule.generator == "library":
            factor = 1.0 if sort == "product" and task.estimate_us > LIBRARY_BIG_US else LIBRARY[sort]
            return max(task.bound_us, task.estimate_us * factor * math.exp(own))
        base = task.estimate_us * math.exp(own)
        measured = [us for s, us in known.items() if s.generator != "library" and math.isfinite(us)]
        if measured:
            base = min(measured)
        return max(task.bound_us, base * math.exp(abs(self.scatter(SCHEDULE_SD, task.problem.key, schedule))))

    def best_us(self, task: Task) -> float:
        """Of the generated kernels."""
        return min(self.us(task, s) for s in self.schedules(task))


@dataclass
class Machine:
    """Writes, builds and measures in virtual time; see `Tuner.measure` for how groups follow each other."""

    truth: Truth
    options: Options
    began: float = field(default_factory=time.process_time)
    virtual_s: float = 0.0
    """On top of the processor seconds of the host."""
    worker_at: float = WORKER_S
    """When the process that measures is free."""
    kernels: int = 0
    batches: int = 0
    asked_s: float = 0.0
    """When the first problem was asked for."""
    first_s: float = 0.0
    """When it was measured."""
    seen: list[tuple[float, Measurement]] = field(default_factory=list)
    """What was measured, and when."""
    writers: list[float] = field(default_factory=lambda: [0.0] * SLOTS)
    builders: list[float] = field(default_factory=lambda: [0.0] * SLOTS)
    """When each is free."""

    @property
    def now(self) -> float:
        """Seconds since the start, processor and virtual."""
        return time.process_time() - self.began + self.virtual_s

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """The host's work in here is not the search's."""
        start = time.process_time()
        yield
        self.virtual_s -= time.process_time() - start

    def write(self, order: Order) -> Kernels:
        """What the generators would offer."""
        if (had := order.written) is not None:
            return had
        most = order.most(self.options)
        library = kernels_of(LibraryGenerator(), order.task.problem, profile("h200"), most)
        schedules = self.truth.schedules(order.task)
        made: list[tuple[Schedule, Kernel]] = [
            (s, CudaSource(s, "", (Launch("k", (1, 1, 1), (1, 1, 1), ()),))) for s in schedules[:most]
        ]
        return order.taken([library, Offer(tuple(made), (), len(schedules) > most)])

    def measure(self, search: Search) -> Iterator[Measurement]:
        """What is asked for until that is nothing: what is built first is measured first, while others are written."""
        ahead: list[tuple[float, Task, list[Schedule]]] = []
        while True:
            while len(ahead) < 2 * AHEAD and (batch := search.next_batch()):
                self.batches += 1
                self.asked_s = self.asked_s or self.now
                for order in batch:
                    with self.uncounted():
                        written = self.write(order)
                    kernels = [s for s, _ in search.wrote(order, written)]
                    ahead.append((self._built(kernels), order.task, kernels))
            if not ahead:
                return
            next_one = min(ahead[:AHEAD], key=lambda x: x[0])
            ahead.remove(next_one)
            for found in self._run(*next_one):
                self.seen.append((self.worker_at, found))
                yield found

    def _built(self, kernels: Sequence[Schedule]) -> float:
        """When all of them are."""
        written = built = max(self.now, heapq.heappop(self.writers)) + WRITE_S
        heapq.heappush(self.writers, written)
        for _ in range(sum(s.generator != "library" for s in kernels)):
            one = max(written, heapq.heappop(self.builders)) + BUILD_S
            heapq.heappush(self.builders, one)
            built = max(built, one)
        return built

    def _run(self, ready: float, task: Task, kernels: Sequence[Schedule]) -> Iterator[Measurement]:
        start = max(self.worker_at, ready)
        if start > self.deadline:
            self.virtual_s += max(0.0, start - self.now)
            return
        self.first_s = self.first_s or start
        self.worker_at = start + TRIAL_S + KERNEL_S * len(kernels)
        self.virtual_s += max(0.0, self.worker_at - self.now)
        for schedule in kernels:
            self.kernels += 1
            us = self.truth.us(task, schedule)
            verdict = Verdict.OK if math.isfinite(us) else Verdict.WRONG
            yield Measurement(task.problem.key, schedule, verdict, (us,) if math.isfinite(us) else ())

    @property
    def deadline(self) -> float:
        """When measuring ends, to leave time for whole plans."""
        return self.options.budget_s - reserve_s(self.options.budget_s)


class Aside(Executor):
    """Stands in for the thread that makes plans: runs at once, and is done when its time has passed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.free_at = 0.0
        self.seconds: list[float] = []
        """Of each plan."""

    def submit(self, work: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        """Run, without counting it."""
        start = time.process_time()
        with self.machine.uncounted():
            result = work(*args, **kwargs)
        self.seconds.append(time.process_time() - start)
        self.free_at = max(self.free_at, self.machine.now) + self.seconds[-1]
        return Done(self.machine, self.free_at, result)


class Done(Future[T]):
    """A result that is there from a moment on."""

    def __init__(self, machine: Machine, at: float, value: T) -> None:
        super().__init__()
        self._machine, self._at, self._value = machine, at, value

    def done(self) -> bool:
        """Whether its time has come."""
        return self._machine.now >= self._at

    def result(self, timeout: float | None = None) -> T:
        """The result, waiting for it."""
        del timeout
        self._machine.virtual_s += max(0.0, self._at - self._machine.now)
        return self._value


def graph_of(name: str, batch: int, dtype: str) -> Alternatives:
    """A network as the pipeline enumerates it."""
    module, inputs = load(name, batch)
    kind = DTYPES[dtype]
    cast = tuple(x.to(kind) if x.is_floating_point() else x for x in inputs)
    with torch.no_grad():
        program = torch.export.export(module.to(kind), cast, strict=False)
    return find_alternatives(clean_up(import_exported(program).graph).graph, strict=False, on_gpu=True)


@dataclass(frozen=True)
class Outcome:
    """One search."""

    batches: int
    solve_s: float
    """To make a plan, on average and at most; beside measuring."""
    longest_s: float
    first_s: float
    """Before the first problem is asked for."""
    began_s: float
    """Before the first is measured."""
    kernels: int
    plans_us: Mapping[float, float]
    """True time of the best plan known after so many seconds."""
    best_us: float
    """Of the best plan if every kernel's time were known."""
    complete: bool


def replay(alternatives: Alternatives, truth: Truth, options: Options, moments: Sequence[float], log: bool) -> Outcome:
    """Search in virtual time."""
    graph = alternatives.graph
    began = time.process_time()
    facts = profile("h200")
    found = enumerate_candidates(graph, limits_of(options, facts), alternatives)
    enumerated = time.process_time()
    problems = collect(graph, found.candidates, alternatives, facts, most_at_once=Cuda.policy.uses_at_once)
    extracted = time.process_time()
    if log:
        print(f"  enumerate {enumerated - began:.2f} s, extract {extracted - enumerated:.2f} s", end=", ")
        print(f"{len(found.candidates)} candidates, {len(problems.tasks)} problems", flush=True)
    machine = Machine(truth, options, began)
    aside = Aside(machine)

    def say(line: str) -> None:
        if log:
            print(f"  {machine.now:6.1f} s  {machine.kernels:4} kernels  {line}", flush=True)

    window = Window(
        lambda: machine.now > machine.deadline,
        lambda: (machine.now - extracted + began) / (machine.deadline - extracted + began),
    )
    search = Search(graph, problems, alternatives, options, Cuda.policy, window, aside, say)
    known = search.run(lambda: machine.measure(search))
    problems = search.problems
    plans = {
        t: plan_us(alternatives, problems, known, truth, [m for at, m in machine.seen if at <= t], options)
        for t in moments
    }
    best = ideal_us(alternatives, problems, truth)
    return Outcome(
        machine.batches,
        statistics.mean(aside.seconds),
        max(aside.seconds),
        machine.asked_s,
        machine.first_s,
        len(machine.seen),
        plans,
        best,
        known.complete,
    )


def plan_us(
    alternatives: Alternatives,
    problems: Problems,
    known: Known,
    truth: Truth,
    measured: Sequence[Measurement],
    options: Options,
) -> float:
    """True time of the plan that the pipeline would take knowing only these measurements."""
    for key, task in problems.tasks.items():
        if task.essential and key not in known.kernels:
            calls = kernels_of(LibraryGenerator(), task.problem, profile("h200"), 3)
            known.wrote(key, Order(task).taken([calls]))
    then = Known({(m.problem_key, m.schedule): m for m in measured}, kernels=known.kernels)
    ranked = choose.rank(problems, then, library_only=False)
    loose = replace(options, solver_gap=3e-3, solver_s=6.0)
    plan = choose.plain_plan("replay", alternatives.graph, choose.offers(ranked), alternatives, loose)
    tasks = problems.tasks
    called = sum(isinstance(s.kernel, LibraryCall) for s in plan.steps)
    return STEP_US * called + sum(truth.us(tasks[s.problem_key], s.kernel.schedule) for s in plan.steps)


def ideal_us(alternatives: Alternatives, problems: Problems, truth: Truth) -> float:
    """Time of the best plan over all generated kernels."""
    offers = [Priced(c, i, o, truth.best_us(t)) for t in problems.tasks.values() for c, i, o in t.formats]
    found = select(alternatives.graph, offers, alternatives=alternatives, gap=0.01, seconds=20.0, plans=1, core=True)
    return found[0].cost_us


def main() -> None:
    """Replay the networks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batch", default="1")
    parser.add_argument("--dtype", default="f16", choices=sorted(DTYPES))
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--at", default="15,30,60,120", help="seconds at which the plan is judged")
    parser.add_argument("--database", type=Path, help="times of kernels, where it has them")
    parser.add_argument("--verbose", action="store_true", help="a line per batch")
    given = parser.parse_args()
    times = read_times(given.database) if given.database else {}
    moments = [t for t in map(float, given.at.split(",")) if t <= given.budget]
    options = Options(device="cuda", budget_s=given.budget)
    ratios: dict[float, list[float]] = {t: [] for t in moments}
    for batch in map(int, given.batch.split(",")):
        for name in given.names:
            if given.verbose:
                print(f"{name} b{batch}", flush=True)
            found = replay(graph_of(name, batch, given.dtype), Truth(times), options, moments, given.verbose)
            for t in moments:
                ratios[t].append(found.plans_us[t] / found.best_us)
            plans = ", ".join(f"{t:.0f} s: {found.plans_us[t]:.0f}" for t in moments)
            print(
                f"{name} b{batch}: {found.batches} batches, {found.kernels} kernels, first asked after"
                f" {found.first_s:.1f} s, measured after {found.began_s:.1f}, {found.solve_s:.2f} s per plan"
                f" (at most {found.longest_s:.2f});"
                f" us at {plans}; best {found.best_us:.0f}{', complete' if found.complete else ''}",
                flush=True,
            )
    if not moments:
        sys.exit(0)
    means = ", ".join(f"{t:.0f} s: {statistics.geometric_mean(r):.3f}" for t, r in ratios.items())
    print(f"geometric mean over the best plan: {means}")


if __name__ == "__main__":
    main()
