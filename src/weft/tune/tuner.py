"""The loop: look up, build, measure in a worker that may die, commit, report.

A *trial* is one problem with the kernels that compete for it, because they are timed in interleaved rounds. The order
is: database first (a warm run starts no worker and no compiler), then kernels without a binary are compiled by a
thread pool of compiler processes, then the database once more for those whose machine code it knows under another text
(no worker runs them), then the worker verifies and times. Compiling and timing do not overlap on the
same cores: trials are taken in groups, each built before it is measured. Where a GPU measures, the next trials are
taken and built meanwhile, as many as a group has.

Faults. A worker that dies, hangs, floods its log or sends garbage is killed with its group and replaced; the new
one first runs a canary with a known answer, and a wrong canary ends tuning with a DeviceError. The kernel that was
running is blamed. After a crash it gets one more chance, alone in a fresh worker: if it kills that too it is
POISONED and never tried again anywhere, and if not (somebody else's stray write hit it) its result counts.
A hang or running out of memory is final. When the worker's own code dies twice on a problem, all its kernels are
rejected with RESOURCE.

Every trial is committed before its measurements are given out, so a kill costs what was in flight. Ctrl-C keeps
what was measured: the generator ends, the worker is killed, the exception goes on to the caller.

The deadline of a measurement is kept whatever hangs. After it no trial is begun; a moment later (`GRACE_S`) the worker
that has not answered is killed and a compiler that has not ended is left or killed, and nobody is blamed: those
kernels have no outcome. A worker that is not ready in the time that it is given is not waited for.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future
from concurrent.futures import wait as futures_wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self, cast, final

from weft.device.any import DeviceFacts
from weft.device.cuda.budget import first_over_budget
from weft.device.cuda.cubin import entries, usage
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.toolchain import HostCompiler
from weft.errors import DeviceError, NoWorkerError
from weft.ir.declined import Declined
from weft.ir.types import Array
from weft.kernels.candidate import Problem
from weft.kernels.codec import Json, code_sha256, kernel_sha256, kernel_to_json
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource, Kernel, KernelBinary, KernelSource, LibraryCall, Schedule
from weft.options import Options
from weft.tune.asked import Asked
from weft.tune.cuda_shaken import Shaken
from weft.tune.kept import KeptTransport, about_worker
from weft.tune.keys import Described, Untimed
from weft.tune.site import Built, Refused, Site
from weft.tune.sites import site_of
from weft.tune.store import Database, Record, Recorded
from weft.tune.thread_pool import DaemonThreadPool, ThreadOf, daemon
from weft.tune.timing import TimingPolicy
from weft.tune.transport import Fault, ProcessTransport, Transport, WorkerFault
from weft.tune.wire import arrays_to_json, problem_to_json

MAX_GROUP = 24
"""Problems that are built before their measuring begins, at most: two per compiler process, so that none idles long
and little was built in vain when the time is up."""
MARGIN = 0.02
GRACE_S = 1.0
"""After the deadline, for the answer to what was begun before it."""
_DAMAGING = frozenset({Verdict.GUARD, Verdict.INPUT_MODIFIED, Verdict.UNSTABLE})
"""What wrote where it should not may have written elsewhere, too: its worker is not kept."""
_FAILED = frozenset({Verdict.CRASH, Verdict.HANG, Verdict.OOM})
SHAKEN_LEFT_S = 10.0
"""Time to the deadline without which no kernel is built in a second form."""
ANSWERED_S = 0.05
"""How long the answer of a worker that has loaded is looked for."""
LOOK_S = 0.005
"""How long kernels are waited for before new trials are looked for."""


@dataclass(frozen=True, slots=True)
class ProblemTrial:
    """One problem and the kernels that compete for it."""

    problem: Problem
    kernels: Sequence[tuple[Schedule, Kernel, KernelBinary | None]]
    """A source without a binary is compiled by the tuner. The first library call is the baseline."""
    bound_us: float = 0.0
    """Lower bound of the roofline; below 0.9 of it a time is impossible. 0: unknown."""
    incumbent: Schedule | None = None
    """Takes part in the final rounds whatever screening says."""
    timed: bool = True
    """False: verified alone. An outcome OK then has no samples, unless the database has some; none is SLOW."""
    finite: bool = False
    """Where nothing is timed: on finite inputs alone."""
    tables: Mapping[int, Array] = field(default_factory=dict)
    """By position, weights that are not drawn but the operator's own tables: the kernels are right for these alone."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far tuning is; one is reported after every trial."""

    trials: int
    kernels: int
    """Measured or rejected so far, lookups not counted."""
    lookups: int
    """Kernels that the database knew."""
    rejected: Mapping[Verdict, int]
    total: int
    """Trials in all, 0 if unknown."""
    elapsed_s: float
    eta_s: float
    """Infinite if unknown."""
    again: int = 0
    """Of those measured, kernels of which the database knew another text alone."""


Callback = Callable[[Progress], None]
Futures = dict[str, "Future[Built | Refused | None]"]


def winner(measurements: Sequence[Measurement], incumbent: Schedule | None) -> Measurement | None:
    """The kernel to take: the incumbent unless another is faster by more than the margin.

    The margin is max(2 %, half of the 95 % bootstrap interval of the difference of medians). Without an incumbent
    the fastest median stands in its place, so that kernels within the noise of each other are told apart by a fixed
    order (the text of the schedule) and two tunings agree. None: no kernel is OK.
    """
    good = sorted((m for m in measurements if m.verdict is Verdict.OK and m.samples_us), key=lambda m: str(m.schedule))
    if not good:
        return None
    fastest = min(good, key=lambda m: m.median_us)
    holder = next((m for m in good if incumbent is not None and m.schedule == incumbent), None)
    if holder is not None:
        return fastest if beats(fastest, holder) else holder
    return next(m for m in good if m is fastest or not beats(fastest, m))


def beats(challenger: Measurement, holder: Measurement) -> bool:
    """Is the challenger faster by more than max(2 %, half the interval)?"""
    gain = holder.median_us - challenger.median_us
    return gain > max(MARGIN * holder.median_us, half_interval(challenger.samples_us, holder.samples_us))


def half_interval(x: Sequence[float], y: Sequence[float]) -> float:
    """Half of the 95 % bootstrap interval of the median difference of two sets of samples, in their unit.

    The last rounds of two kernels that both reached the final are paired; otherwise medians are resampled apart.
    """
    rng = random.Random(0)
    draws = []
    for _ in range(200):
        a = sorted(rng.choices(x, k=len(x)))[len(x) // 2]
        b = sorted(rng.choices(y, k=len(y)))[len(y) // 2]
        draws.append(b - a)
    draws.sort()
    return (draws[194] - draws[5]) / 2


@dataclass(slots=True)
class _Work:
    """A trial on its way: what is known and what is left to measure."""

    trial: ProblemTrial
    done: dict[int, Measurement] = field(default_factory=dict)
    """By position in `trial.kernels`."""
    paths: dict[int, str] = field(default_factory=dict)
    compile_s: dict[int, float] = field(default_factory=dict)
    kills: dict[Schedule, int] = field(default_factory=dict)
    known: frozenset[int] = frozenset()
    """Kernels that the database answered."""
    kernels: list[str] = field(default_factory=list)
    """What each kernel is: SHA-256 of its content."""
    rows: tuple[Recorded, ...] = ()
    """What the database has of the problem: in the environment where it is timed, then where it is not."""
    adopted: dict[int, bool] = field(default_factory=dict)
    """Kernels that it had under another text, with the same machine code; whether in the environment of timings."""
    codes: dict[int, str] = field(default_factory=dict)
    """What a GPU runs of each: SHA-256, where it is known."""
    shaken: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Skeleton and object of the form of a kernel that is verified besides."""
    was_shaken: set[int] = field(default_factory=set)
    """Kernels whose second form was run."""

    def __post_init__(self) -> None:
        self.kernels = [kernel_sha256(kernel) for _, kernel, _ in self.trial.kernels]

    def reject(self, number: int, verdict: Verdict, error: str) -> None:
        """Record a rejection."""
        self.done[number] = self.measurement(number, verdict, error=error)

    def measurement(
        self, number: int, verdict: Verdict, *, error: str = "", samples: Sequence[float] = (), ratio: float = 0.0
    ) -> Measurement:
        """The record of one kernel."""
        return Measurement(
            problem_key=self.trial.problem.key,
            schedule=self.trial.kernels[number][0],
            verdict=verdict,
            samples_us=tuple(samples),
            error=error[:4000],
            rmse=ratio,
            compile_s=self.compile_s.get(number, 0.0),
            bound_us=self.trial.bound_us,
            kernel=self.kernels[number],
            code=self.codes.get(number, ""),
        )

    @property
    def left(self) -> list[int]:
        """Kernels without an outcome."""
        return [k for k in range(len(self.trial.kernels)) if k not in self.done]


@dataclass(slots=True, eq=False)
class _Build:
    """A trial whose kernels are being compiled."""

    work: _Work
    futures: Mapping[int, Future[Built | Refused | None]]
    """By position in its kernels."""
    shaken: Mapping[int, tuple[str, Future[str]]] = field(default_factory=dict)
    """Skeletons and objects of second forms."""

    @property
    def running(self) -> list[Future[Any]]:
        """What is still compiled."""
        every: list[Future[Any]] = [*self.futures.values(), *(f for _, f in self.shaken.values())]
        return [f for f in every if not f.done()]

    @property
    def is_done(self) -> bool:
        """Whether all are."""
        return not self.running

    def take(self, left_s: Callable[[], float] = lambda: math.inf) -> _Work:
        """The trial with its paths and refusals, once all are there; what takes longer than is left is left out."""
        for number, future in self.futures.items():
            try:
                result = future.result(None if math.isinf(left := left_s()) else max(0.0, left))
            except TimeoutError:
                continue
            if isinstance(result, Refused):
                self.work.reject(number, result.verdict, result.error)
            elif result is not None:
                self.work.paths[number], self.work.compile_s[number] = result.path, result.seconds
        for number, (skeleton, form) in self.shaken.items():
            with contextlib.suppress(TimeoutError):
                if path := form.result(None if math.isinf(left := left_s()) else max(0.0, left)):
                    self.work.shaken[number] = (skeleton, path)
        return self.work


def _first_built(builds: Sequence[_Build]) -> _Build | None:
    """The earliest whose kernels are all there; None: for a moment nothing was finished."""
    found = next((b for b in builds if b.is_done), None)
    if found is None:
        left = [f for b in builds for f in b.running]
        futures_wait(left, timeout=LOOK_S, return_when=FIRST_COMPLETED)
    return found


class _OutOfTime(Exception):  # noqa: N818 - an answer, not an error
    """The deadline passed while the worker was waited for."""


@final
class Tuner:
    """Measures trials; see the module. A context manager: leaving it kills the worker."""

    def __init__(
        self,
        options: Options,
        facts: DeviceFacts,
        database: Database,
        *,
        compiler: HostCompiler | Nvrtc | None = None,
        transport: Transport | None = None,
        policy: TimingPolicy | None = None,
        retry_failed: bool = False,
        retry: frozenset[Verdict] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        keep: bool = False,
        thread: ThreadOf = daemon,
    ) -> None:
        """Nothing is started before it is needed.

        Args:
            options: threads, time-outs, seed, cache directory.
            facts: the device that kernels are measured on.
            database: looked up first, committed to after every trial.
            compiler: for sources without a binary (NVRTC on a GPU); None: those are rejected with COMPILE.
            transport: a worker; None: a process of this Python.
            policy: the numbers of the timing protocol; None: the defaults.
            retry_failed: measure again what the database has as CRASH, HANG or OOM (never POISONED).
            retry: measure again what it has with one of these verdicts.
            clock: seconds.
            keep: the worker may be one that was kept, and is kept when the tuner is closed, see `weft.tune.kept`.
            thread: makes the thread in which trials are taken where kernels are built ahead.
        """
        self._options = options
        self._site: Site = site_of(options, facts, compiler, policy)
        self._budgeted = facts if isinstance(facts, GpuFacts) and facts.sm_budget is not None else None
        self._over: dict[str, Refused] = {}
        """By SHA-256 of the source: kernels that compile and are over the budget of an SM. Nothing of that is stored:
        without a budget, or within a larger one, the same kernel is measured and taken."""
        self._database = database
        self._clock, self._thread = clock, thread
        self._retry = retry | (_FAILED if retry_failed else frozenset())
        self._transport: Transport = transport or self._site.transport()
        if keep and isinstance(self._transport, ProcessTransport):
            about = about_worker(self._transport, options.cache)
            self._transport = KeptTransport(self._site.transport, about)
        self._alive = False
        self._loading = False
        """A worker was started ahead of time and has not answered yet."""
        self._lost_before = False
        self._was_ready = False
        self._ready_by: float | None = None
        self._grace_s = GRACE_S
        """Whether a worker ever was."""
        self.gave_up = ""
        """Why nothing is measured any more, though there was time; empty: it is."""
        self.environment: Described = self._site.environment
        self.workers_started = 0
        self.sm_clocks_mhz: list[int] = []
        """On a GPU, at the end of each trial, where it can be asked."""
        self.seconds = {"build": 0.0, "worker": 0.0, "run": 0.0}
        """Waited so far for kernels to be built, for a worker to start, and for its answers."""
        self.suspects: set[tuple[str, Schedule]] = set()
        """Kernels, by problem, with which a worker was lost or had to be ended; some may have their outcome since."""
        self._sound: set[str] = set()
        """Skeletons of kernels that were found right in their second form."""
        self._rejected: Counter[Verdict] = Counter()
        self._kernels = self._lookups = self._again = self._trials = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker, or keep it: one that nothing went wrong with."""
        if isinstance(self._transport, KeptTransport) and not self._rejected.keys() & _DAMAGING:
            self.rest()
            if self._alive or self._loading:
                self._transport.give_back()
                self._alive = self._loading = False
        if self._alive:
            try:
                self._transport.send({"op": "bye"}, 1.0)
            except WorkerFault:
                self._alive = False
        self._transport.kill()
        self._alive = self._loading = False

    def rest(self) -> None:
        """Nothing more for now: the worker gives back what it keeps between trials, and stays."""
        if self._alive:
            try:
                self._transport.send({"op": "rest"}, 1.0)
            except WorkerFault:
                self._transport.kill()
                self._alive = False

    def start_early(self) -> None:
        """Let the worker load while the caller is busy; for a caller that is sure to measure something.

        One that cannot be started, or fails meanwhile, is dealt with when it is needed.
        """
        if self._alive or self._loading:
            return
        try:
            self._greet()
            self._loading = True
        except WorkerFault:
            self._transport.kill()

    def _greet(self) -> None:
        self._transport.start()
        self.workers_started += 1
        self._transport.send(self._site.hello(), 10.0)

    def measure(
        self,
        trials: Iterable[ProblemTrial | None],
        *,
        progress: Callback | None = None,
        deadline: float | None = None,
        ready_by: float | None = None,
        grace_s: float = GRACE_S,
        total: int = 0,
        meanwhile: Iterator[ProblemTrial] = iter(()),  # noqa: B008 - nothing is left in it
    ) -> Iterator[Measurement]:
        """Measure trials one after another and yield an outcome for every kernel.

        Args:
            trials: taken lazily, in groups; on a GPU in a thread of their own (`Asked`). None: there is none for the
                moment.
            progress: called after each trial.
            deadline: on the tuner's clock; no trial is started after it, and kernels not reached yield nothing.
            ready_by: on that clock; if no worker was ready by then, nothing is measured, and `gave_up` says so.
            grace_s: how long after the deadline what was begun may go on; then it is ended, without an outcome.
            total: number of trials if known, for the time that is left.
            meanwhile: trials that are not timed, of library calls, taken while kernels are compiled and the worker has
                nothing else to do. On a GPU it never has.

        Raises:
            DeviceError: the canary computes wrongly or no worker can be started [W301].
        """
        start = self._clock()
        self._ready_by, self._grace_s = ready_by, grace_s
        ahead = self._site.builds_ahead
        for work in self._rolling(trials, deadline) if ahead else self._grouped(trials, deadline, meanwhile):
            # lookups are free, so what comes after the deadline is still answered from the database
            late = self._expired(deadline)
            yield from self._finish(work, deadline)
            if progress is not None and not late:
                progress(self._progress(start, total))

    @property
    def _ahead(self) -> int:
        return min(MAX_GROUP, 2 * max(1, self._site.jobs))

    def _grouped(
        self, trials: Iterable[ProblemTrial | None], deadline: float | None, meanwhile: Iterator[ProblemTrial]
    ) -> Iterator[_Work]:
        """Trials whose kernels are built, a group at a time: nothing is built while one is measured."""
        source = (t for t in trials if t is not None)
        while group := [self._look_up(t) for t in islice(source, self._ahead)]:
            left_s = partial(self._left_s, deadline)
            with DaemonThreadPool(max(1, self._site.jobs), left_s) as pool:
                known: Futures = {}
                builds = [self._start_build(w, pool, known, deadline) for w in group]
                while not all(b.is_done for b in builds) and not self._expired(deadline):
                    if (trial := next(meanwhile, None)) is None:
                        break
                    yield self._start_build(self._look_up(trial), pool, known, deadline).work
                with self._waiting("build"):
                    for build in builds:
                        self._adopt(build.take(left_s))
            yield from group

    def _rolling(self, trials: Iterable[ProblemTrial | None], deadline: float | None) -> Iterator[_Work]:
        """Trials when their kernels are built, the earliest first, while the next ones are taken and built."""
        left_s = partial(self._left_s, deadline)
        with (
            DaemonThreadPool(max(1, self._site.jobs), left_s) as pool,
            Asked(trials, self._ahead, self._thread, left_s) as asked,
        ):
            known: Futures = {}
            waiting: list[_Build] = []
            while True:
                taken = asked.take(wait=not waiting, most=self._ahead - len(waiting), left_s=left_s)
                waiting += [self._start_build(self._look_up(trial), pool, known, deadline) for trial in taken]
                if not waiting:
                    return
                with self._waiting("build"):
                    built = _first_built(waiting)
                if built is None and left_s() <= 0:
                    built = waiting[0]  # without what is not there
                if built is not None:
                    waiting.remove(built)
                    yield self._adopt(built.take(left_s))

    def _left_s(self, deadline: float | None) -> float:
        """Until what was begun is given up."""
        return math.inf if deadline is None else max(0.0, deadline + self._grace_s - self._clock())

    @contextlib.contextmanager
    def _waiting(self, part: str) -> Iterator[None]:
        """Count what is done inside as a part of `seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def _expired(self, deadline: float | None) -> bool:
        return deadline is not None and self._clock() >= deadline

    def _progress(self, start: float, total: int) -> Progress:
        elapsed = self._clock() - start
        eta = elapsed / self._trials * (total - self._trials) if total and self._trials else math.inf
        counts = self._trials, self._kernels, self._lookups, dict(self._rejected), total
        return Progress(*counts, elapsed, max(eta, 0.0), self._again)

    # --- the stages of one trial ---

    def _look_up(self, trial: ProblemTrial) -> _Work:
        places = [self.environment] if trial.timed else [self.environment, self._environment_of(trial)]
        work = _Work(trial, rows=tuple(self._database.of_problem(trial.problem.key, place) for place in places))
        for number, (schedule, _, _) in enumerate(trial.kernels):
            record = _recorded(work, partial(Recorded.of, schedule=schedule, kernel=work.kernels[number]))
            if record is None:
                continue  # never measured here
            if record.measurement.verdict in self._retry:
                work.kills[schedule] = record.kills
                continue  # another chance
            work.done[number] = record.measurement
        work.known = frozenset(work.done)
        self._lookups += len(work.known)
        return work

    def _adopt(self, work: _Work) -> _Work:
        """Take over what was measured of the machine code of kernels that were compiled."""
        for number, path in work.paths.items():
            schedule, kernel, _ = work.trial.kernels[number]
            if number in work.done or not isinstance(kernel, CudaSource) or not (code := machine_code(kernel, path)):
                continue
            work.codes[number] = code
            record = _recorded(work, partial(Recorded.of_code, code=code))
            if record is None or schedule in work.kills or record.measurement.verdict in self._retry:
                continue
            work.adopted[number] = record.environment == self.environment.text
            work.done[number] = replace(
                record.measurement,
                schedule=schedule,
                kernel=work.kernels[number],
                compile_s=work.compile_s.get(number, 0.0),
            )
        self._lookups += len(work.adopted)
        return work

    def _environment_of(self, trial: ProblemTrial) -> Described:
        """What its outcomes belong to."""
        return self.environment if trial.timed else Untimed(self.environment, trial.finite)

    def _start_build(self, work: _Work, pool: Executor, known: Futures, deadline: float | None) -> _Build:
        """Begin to compile what has no binary; equal sources once: `known` has them by their SHA-256."""
        futures: dict[int, Future[Built | Refused | None]] = {}
        forms: dict[int, tuple[str, Future[str]]] = {}
        for number in () if self._expired(deadline) else (*work.left, *self._unweighed(work)):
            _, kernel, binary = work.trial.kernels[number]
            if isinstance(kernel, LibraryCall):
                work.paths[number] = ""
            elif binary is not None:
                work.paths[number], work.compile_s[number] = binary.path, binary.compile_s
            else:
                if kernel.sha256 not in known:
                    known[kernel.sha256] = pool.submit(self._compile, kernel, deadline)
                futures[number] = known[kernel.sha256]
                if number not in work.done and (form := self._to_shake(kernel, deadline)) is not None:
                    forms[number] = (form.skeleton, pool.submit(self._site.build_shaken, form, self._left_s(deadline)))
        if self._site.builds_ahead and any(
            isinstance(work.trial.kernels[k][1], CudaSource) for k in futures.keys() - work.done.keys()
        ):
            self.start_early()  # it loads while they are built
        return _Build(work, futures, forms)

    def _to_shake(self, kernel: KernelSource | CudaSource, deadline: float | None) -> Shaken | None:
        """The second form of a kernel, where none of its skeleton was found right in that form here."""
        form = self._site.shaken(kernel)
        if form is None or form.skeleton in self._sound or self._left_s(deadline) < SHAKEN_LEFT_S:
            return None
        key, schedule = _skeleton(form.skeleton)
        found = self._database.lookup(key, schedule, form.skeleton, Untimed(self.environment, finite=False))
        if found is not None and found.verdict is Verdict.OK:
            self._sound.add(form.skeleton)
            return None
        return form

    def _compile(self, kernel: KernelSource | CudaSource, deadline: float | None) -> Built | Refused | None:
        """The object, or why not; None: no time was left."""
        if self._expired(deadline):
            return None
        found = self._site.build(kernel, self._left_s(deadline))
        if self._budgeted is not None and isinstance(found, Built) and isinstance(kernel, CudaSource):
            found = self._weighed(kernel, found, self._budgeted)
        # a compiler that was ended for want of time says nothing of the kernel
        return None if isinstance(found, Refused) and self._expired(deadline) else found

    def _unweighed(self, work: _Work) -> Sequence[int]:
        """Kernels that the database answered, which says nothing of what they take of an SM."""
        if self._budgeted is None:
            return ()
        kernels = [work.trial.kernels[k][1] for k in range(len(work.trial.kernels))]
        right = {k for k, found in work.done.items() if found.verdict is Verdict.OK}
        return [k for k in sorted(right) if isinstance(kernels[k], CudaSource)]

    def _weighed(self, kernel: CudaSource, built: Built, facts: GpuFacts) -> Built | Refused:
        """Whether a compiled kernel fits into the budget of an SM."""
        try:
            taken = usage(Path(built.path).read_bytes())
        except (OSError, ValueError) as error:
            declined = Declined(f"what it takes of an SM cannot be read: {error}")
        else:
            found = first_over_budget(kernel.launches, taken, facts)
            if found is None:
                return built
            declined = found
        self._over[kernel.sha256] = Refused(Verdict.RESOURCE, declined.reason)
        return self._over[kernel.sha256]

    def _is_over(self, kernel: Kernel) -> bool:
        return isinstance(kernel, CudaSource) and kernel.sha256 in self._over

    def _finish(self, work: _Work, deadline: float | None) -> Iterator[Measurement]:
        """Measure what is left of a trial, commit it, yield all outcomes."""
        if work.left and not self._expired(deadline) and not self.gave_up:
            self._run(work, deadline)
        over = {k for k in work.done if self._is_over(work.trial.kernels[k][1])}
        self._rejected.update(work.done[k].verdict for k in over)
        new = [work.done[k] for k in sorted(set(work.done) - work.known - work.adopted.keys() - over)]
        if new:
            self._database.commit(new, self._environment_of(work.trial), kills=work.kills)
            self._kernels += len(new) if work.trial.timed else 0
            self._again += sum(any(rows.has_other(m.schedule, m.kernel) for rows in work.rows) for m in new)
            self._rejected.update(m.verdict for m in new if m.verdict is not Verdict.OK)
        for timed in set(work.adopted.values()):  # found again under their texts of today
            theirs = [work.done[k] for k, was_timed in work.adopted.items() if was_timed is timed]
            self._database.commit(theirs, self.environment if timed else self._environment_of(work.trial))
        self._remember(work)
        self._trials += 1
        for number in sorted(work.done):
            yield work.done[number]

    def _remember(self, work: _Work) -> None:
        """Keep the skeletons of kernels that were found right in their second form."""
        sound = {work.shaken[k][0] for k in work.was_shaken if work.done[k].verdict is Verdict.OK} - self._sound
        self._sound |= sound
        for skeleton in sorted(sound):
            key, schedule = _skeleton(skeleton)
            found = Measurement(key, schedule, Verdict.OK, kernel=skeleton)
            self._database.commit(found, Untimed(self.environment, finite=False))

    def _run(self, work: _Work, deadline: float | None) -> None:
        """Worker rounds until every kernel that has a binary has an outcome."""
        ready = [k for k in work.left if k in work.paths]
        again: list[int] = []
        own_faults = 0
        while ready:
            asked = ready
            blamed = self._attempt(work, asked, deadline)
            ready = [k for k in ready if k not in work.done]
            if blamed is None:
                break  # the worker answered to the end
            number, fault = blamed
            if fault.fault is Fault.RESTART and number in asked and number in work.done:
                schedule = work.trial.kernels[number][0]
                work.kills[schedule] = work.kills.get(schedule, 0) + 1
                continue  # it has its verdict; the others go on in the next worker
            if number not in ready:
                own_faults += 1
                if own_faults == 2:
                    for k in ready:
                        work.reject(k, Verdict.RESOURCE, f"the worker failed on this problem: {fault}")
                    break
                continue  # its own code died: once may be bad luck
            ready.remove(number)
            if self._kill_counts(work, number, fault):
                again.append(number)
        for number in again:
            blamed = self._attempt(work, [number], deadline)
            if blamed is None:
                continue  # innocent, or rejected in peace, or no time was left for it
            if number in work.done:
                continue  # it had its verdict before the worker was lost
            schedule = work.trial.kernels[number][0]
            work.kills[schedule] = work.kills.get(schedule, 0) + 1
            work.reject(number, Verdict.POISONED, f"killed two workers; the second time: {blamed[1]}")

    def _kill_counts(self, work: _Work, number: int, fault: WorkerFault) -> bool:
        """Record a kernel that cost a worker; True: it deserves one more chance, alone."""
        schedule = work.trial.kernels[number][0]
        kills = work.kills.get(schedule, 0) + 1
        work.kills[schedule] = kills
        if kills >= 2:
            work.reject(number, Verdict.POISONED, f"killed two workers; the second time: {fault}")
            return False
        if fault.fault is Fault.HANG:
            work.reject(number, Verdict.HANG, str(fault))
            return False
        if fault.fault is Fault.OOM:
            work.reject(number, Verdict.OOM, str(fault))
            return False
        return True

    def _attempt(self, work: _Work, numbers: Sequence[int], deadline: float | None) -> tuple[int, WorkerFault] | None:
        """One request to the worker; None when it answered to the end, else whom it was lost to."""
        try:
            with self._waiting("worker"):
                self._ensure_worker(deadline)
            with self._waiting("run"):
                self._ask(work, numbers, deadline)
        except _OutOfTime:
            if not self._loading:
                if self._alive:
                    self._suspect(work, numbers)
                self._transport.kill()
                self._alive, self._lost_before = False, self._was_ready
            return None
        except WorkerFault as fault:
            number = self._transport.running()
            self._suspect(work, [number] if number in numbers else numbers)
            self._transport.kill()
            self._alive, self._lost_before = False, True
            return number, fault
        except BaseException:
            self._transport.kill()
            self._alive = False
            raise
        return None

    def _suspect(self, work: _Work, numbers: Sequence[int]) -> None:
        key = work.trial.problem.key
        self.suspects |= {(key, work.trial.kernels[k][0]) for k in numbers if k not in work.done}

    def _ask(self, work: _Work, numbers: Sequence[int], deadline: float | None) -> None:
        """Send one request and take its answers.

        Raises:
            WorkerFault: the worker was lost, or answers what is none.
            _OutOfTime: it did not answer before the time was up.
        """
        skipped: set[int] = set()
        with self._in_time(deadline):
            self._transport.send(self._request(work, numbers, deadline), self._patience_s(deadline))
        while True:
            with self._in_time(deadline):
                event = self._transport.receive(self._patience_s(deadline))
            match event.get("event"):
                case "verdict":
                    self._take(work, numbers, event)
                case "verifying":
                    continue  # a sign of life
                case "skipped":
                    skipped.add(int(cast("int", event["kernel"])))
                case "done":
                    if any(k not in work.done and k not in skipped for k in numbers):
                        raise WorkerFault(Fault.GARBAGE, "done, with kernels unanswered")
                    if isinstance(clock := event.get("sm_mhz"), int) and clock > 0:
                        self.sm_clocks_mhz.append(clock)
                    return
                case "restart":
                    raise WorkerFault(Fault.RESTART, "its device is lost")
                case other:
                    raise WorkerFault(Fault.GARBAGE, f"event {other!r}"[:200])

    def _take(self, work: _Work, numbers: Sequence[int], event: Mapping[str, Json]) -> None:
        """Check a verdict as something a damaged process may have sent."""
        try:
            number = int(cast("int", event["kernel"]))
            verdict = Verdict(str(event["verdict"]))
            samples = [float(x) for x in cast("Sequence[float]", event["samples"])]
            ratio = float(cast("float", event["ratio"]))
            error = str(event["error"])
        except (KeyError, TypeError, ValueError) as problem:
            raise WorkerFault(Fault.GARBAGE, f"a verdict that is none: {problem}") from None
        sound = all(math.isfinite(x) and x > 0 for x in samples) and not math.isnan(ratio)
        if number not in numbers or number in work.done or not sound:
            raise WorkerFault(Fault.GARBAGE, f"a verdict on kernel {number} with samples {samples[:4]}")
        if verdict is Verdict.OK and ((work.trial.timed and not samples) or ratio > 1):
            raise WorkerFault(Fault.GARBAGE, "an OK without samples or over its limits")
        if event.get("shaken") is True and number in work.shaken:
            work.was_shaken.add(number)
        found = work.measurement(number, verdict, error=error, samples=samples, ratio=ratio)
        if verdict is Verdict.OK and found.median_us < 0.9 * work.trial.bound_us:
            error = f"{found.median_us:.3f} us is below the roofline's {work.trial.bound_us:.3f} us"
            found = replace(found, verdict=Verdict.IMPOSSIBLE, error=error)
        work.done[number] = found

    def _request(self, work: _Work, numbers: Sequence[int], deadline: float | None) -> dict[str, Json]:
        kernels: list[Json] = [[k, kernel_to_json(work.trial.kernels[k][1]), work.paths[k]] for k in numbers]
        library = [k for k in numbers if isinstance(work.trial.kernels[k][1], LibraryCall)][:1]
        incumbent = [k for k in numbers if work.trial.kernels[k][0] == work.trial.incumbent]
        return {
            "op": "trial",
            "problem": problem_to_json(work.trial.problem),
            "tables": arrays_to_json(work.trial.tables),
            "kernels": kernels,
            "always": sorted({*library, *incumbent}) if work.trial.timed else list(numbers),
            "seed": self._options.seed,
            "bound_us": work.trial.bound_us,
            "l2_bytes": self._site.l2_bytes,
            "policy": cast("Json", asdict(self._site.policy)),
            "time": work.trial.timed,
            "finite": work.trial.finite,
            "shaken": {str(k): work.shaken[k][1] for k in numbers if k in work.shaken},
            "left_s": 1e9 if deadline is None else max(0.0, deadline - self._clock()),
        }

    def _patience_s(self, deadline: float | None) -> float:
        """For one answer."""
        return min(self._options.trial_timeout_s, self._left_s(deadline))

    @contextlib.contextmanager
    def _in_time(self, deadline: float | None) -> Iterator[None]:
        """Silence is the worker's fault only where it was waited for as long as every worker is.

        Raises:
            _OutOfTime: the time was up before that.
        """
        try:
            yield
        except WorkerFault as fault:
            if fault.fault is Fault.HANG and self._left_s(deadline) <= 0:
                raise _OutOfTime from None
            raise

    def _ensure_worker(self, deadline: float | None) -> None:
        """Start a worker if there is none; after a fault it proves itself on the canary first.

        Raises:
            DeviceError: none can be started, or the canary computes wrongly [W301].
            _OutOfTime: none was ready in time.
        """
        if self._alive:
            return
        first = not self._was_ready and self._ready_by is not None
        waits = self._site.start_waits_s
        for attempt, wait in enumerate(waits, 1):
            loading, self._loading = self._loading, False
            # one that loaded meanwhile has answered, however late it is asked
            least_s = min(ANSWERED_S, self._left_s(deadline)) if loading else 0.0
            if wait >= max(self._ready_s(deadline), least_s):
                self._loading = loading
                raise self._not_ready(first=first)
            time.sleep(wait)
            try:
                if not loading:
                    self._greet()
                patience_s = min(max(60.0, self._options.trial_timeout_s), max(self._ready_s(deadline), least_s))
                ready = self._transport.receive(patience_s)
                if ready.get("event") != "ready":
                    raise WorkerFault(Fault.GARBAGE, f"greeted with {str(ready)[:200]}")
                if self._lost_before:
                    self._check_canary()
                self._alive = self._was_ready = True
                return
            except WorkerFault as fault:
                late = self._ready_s(deadline) <= 0
                if late and fault.fault is Fault.HANG and isinstance(self._transport, KeptTransport):
                    self._loading = True  # it goes on, for the next who wants it
                    raise self._not_ready(first=first) from None
                self._transport.kill()
                if late:
                    raise self._not_ready(first=first) from None
                if attempt == len(waits):
                    raise NoWorkerError(problem=f"the measuring worker does not start: {fault}") from None

    def _ready_s(self, deadline: float | None) -> float:
        """Seconds that a worker may still take to be ready."""
        left = self._left_s(deadline)
        if self._was_ready or self._ready_by is None:
            return left
        return max(0.0, min(left, self._ready_by - self._clock()))

    def _not_ready(self, *, first: bool) -> _OutOfTime:
        """What is raised when a worker is not waited for any longer; without a first one nothing is measured."""
        if first:
            self.gave_up = "no measuring process was ready in time"
        return _OutOfTime()

    def _check_canary(self) -> None:
        self._transport.send(self._site.canary(), 10.0)
        answer = self._transport.receive(self._options.trial_timeout_s)
        if answer.get("event") != "canary" or answer.get("problem") != "":
            self._transport.kill()
            raise DeviceError(problem=f"after a fault the machine computes wrongly: {str(answer)[:300]}")


def _recorded(work: _Work, find: Callable[[Recorded], Record | None]) -> Record | None:
    """What the database says of a kernel; where nothing is timed, of one that was timed as well."""
    timed, *untimed = map(find, work.rows)
    if not untimed:
        return timed
    # a slow one was given up before it was verified on all inputs
    open_ = {Verdict.SLOW, Verdict.NAN_CLASS} if work.trial.finite else {Verdict.SLOW}
    return timed if timed is not None and timed.measurement.verdict not in open_ else untimed[0]


def machine_code(kernel: CudaSource, path: str) -> str:
    """The identity of what a GPU runs of a kernel; empty where its file is no cubin of it."""
    try:
        return code_sha256(kernel, entries(Path(path).read_bytes()))
    except (OSError, ValueError, KeyError):
        return ""


def _skeleton(skeleton: str) -> tuple[str, Schedule]:
    """What the database has a skeleton under: as a problem, and as its schedule."""
    return f"skeleton {skeleton}", Schedule("cuda", (("shaken", 1),))
