"""One measuring worker for all modules of a process: a kernel runs there, verified and timed, before it runs here.

What was found is in the tuning database, so that a second process asks nobody. The worker is started when there is
something to measure, serves all modules on its GPU, gives memory back after every question and ends when it was idle
for a while. A kernel that takes the worker down is refused; what has no kernel left is the framework's to run.
"""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, final

import torch

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, Nvrtc
from weft.errors import WeftError
from weft.generate.cuda.training.step import ALIGNED
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource, KernelBinary, Schedule
from weft.options import Options
from weft.tune.store import Database
from weft.tune.thread_pool import DaemonThreadPool
from weft.tune.timing import TimingPolicy
from weft.tune.transport import Transport
from weft.tune.tuner import ProblemTrial, Tuner, winner

IDLE_S = 60.0
"""After which a worker that nobody asks is ended."""
Candidate = tuple[CudaSource, CompiledCubin]


class Won(NamedTuple):
    """The fastest verified kernel of a trial."""

    number: int
    """Among those of the trial."""
    us: float
    """Median of a run."""


def trial_of(problem: Problem, candidates: Sequence[Candidate]) -> ProblemTrial:
    """What is asked about kernels that were compiled; their schedules differ."""
    kernels = [
        (s.schedule, s, KernelBinary(s.sha256, "", str(made.path), s.entry, made.seconds)) for s, made in candidates
    ]
    return ProblemTrial(problem, kernels)


def anywhere(problem: Problem) -> Problem:
    """The same where a module's caller may have its tensors."""
    return replace(problem, key=f"at {ALIGNED} bytes\n{problem.key}", alignment=ALIGNED)


@final
class Judge:
    """Asks the worker of one GPU. Safe on many threads, which take turns."""

    def __init__(
        self,
        facts: GpuFacts,
        nvrtc: Nvrtc | None,
        options: Options,
        *,
        transport: Transport | None = None,
        policy: TimingPolicy | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        """Nothing is started or opened before it is needed; `options` name the GPU and the cache."""
        self._facts, self._nvrtc, self._options, self._transport = facts, nvrtc, options, transport
        self._idle_s, self._policy = idle_s, policy
        self._pool = DaemonThreadPool(1)  # the database belongs to the thread that opened it
        self._tuner: Tuner | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    @property
    def workers_started(self) -> int:
        """So far."""
        return 0 if self._tuner is None else self._tuner.workers_started

    def judged(self, trials: Sequence[ProblemTrial]) -> list[Won | Declined]:
        """The kernel to use of each trial, or why none is; the framework's own operations are always there instead."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            found = self._pool.submit(self._measured, trials).result()
            if isinstance(found, Declined):
                return [found for _ in trials]
            if any(m.verdict is Verdict.OOM for m in found.values()) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()  # what this process keeps for later, the worker may need now
                again = self._pool.submit(self._measured, trials).result()
                found = found if isinstance(again, Declined) else again
            self._timer = threading.Timer(self._idle_s, self._idle)
            self._timer.daemon = True
            self._timer.start()
        return [_won(trial, found) for trial in trials]

    def _measured(self, trials: Sequence[ProblemTrial]) -> dict[tuple[str, Schedule], Measurement] | Declined:
        try:
            if self._tuner is None:
                database = Database.open(self._options.cache)
                self._tuner = Tuner(
                    self._options, self._facts, database, compiler=self._nvrtc, transport=self._transport,
                    policy=self._policy, retry=frozenset({Verdict.OOM}),
                )  # fmt: skip
            found = {(m.problem_key, m.schedule): m for m in self._tuner.measure(trials)}
            self._tuner.rest()
        except WeftError as error:
            return Declined(str(error).splitlines()[0])
        return found

    def _idle(self) -> None:
        with self._lock:
            self._pool.submit(self._end)

    def _end(self) -> None:
        if self._tuner is not None:
            self._tuner.close()

    def close(self) -> None:
        """End the worker."""
        if self._timer is not None:
            self._timer.cancel()
        self._end()


def _won(trial: ProblemTrial, found: Mapping[tuple[str, Schedule], Measurement]) -> Won | Declined:
    own = {s: k for k, (s, _, _) in enumerate(trial.kernels)}
    measured = [m for s in own if (m := found.get((trial.problem.key, s))) is not None]
    best = winner(measured, None)
    if best is not None:
        return Won(own[best.schedule], best.median_us)
    why = sorted({f"{m.verdict.value}: {(m.error.splitlines() or [''])[0][:200]}" for m in measured})
    return Declined("; ".join(why[:3]) or "nothing was measured")


def fallen_back(what: str, why: Declined) -> Declined:
    """Why the framework's own operations stand in for kernels that were to be there; the caller is warned."""
    reason = f"no kernel for {what} was found right: {why.reason}"
    warnings.warn(f"Weft: {reason}; the framework's own operations are used", stacklevel=3)
    return Declined(reason)
