"""When a stage of a network is launched beside other work: a bounded number of kernels ahead, a throttle, exact counts.

Knows no device: what launches stages is a `Lane`, the time is a function. `weft.colocate.network` has the GPU's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

Value = TypeVar("Value")
Given = Callable[[], Value | None]
"""Gives the inputs of the next inference; None, or StopIteration: there are no more."""


class Mark(Protocol):
    """A place behind what was launched."""

    def ended(self) -> bool:
        """All before it has ended; whatever the device reports as failed is raised."""
        ...

    def wait(self) -> None:
        """Until all before it has ended."""
        ...


class Lane(Protocol[Value]):
    """What launches the stages of one network in order, without waiting for them."""

    @property
    def kernels(self) -> Sequence[int]:
        """Of each stage; at least one stage."""
        ...

    def begin(self, given: Value) -> None:
        """The inputs of an inference that begins now."""
        ...

    def launch(self, stage: int) -> None:
        """Launch a stage behind all others."""
        ...

    def results(self) -> Value | None:
        """Copies of the results of the inference whose last stage was launched; None: nobody asks for them."""
        ...

    def mark(self) -> Mark:
        """Behind all that was launched."""
        ...


@dataclass(frozen=True, slots=True)
class Throttle:
    """How much of the time a network may work. What is queued when a share of the time ends still runs.

    Raises:
        ValueError: a number that is no share or no rate.
    """

    duty: float = 1.0
    """Share of each period in which stages are launched, 0 to 1; 0: none are."""
    period_s: float = 0.002
    """Seconds."""
    inferences_per_s: float = math.inf
    """At most so many begin in a second, evenly apart; 0: none do."""
    stages_per_s: float = math.inf
    """At most so many stages are launched in a second, evenly apart; 0: none are."""

    def __post_init__(self) -> None:
        if not 0 <= self.duty <= 1:
            raise ValueError(f"duty is {self.duty}: a share of the time is from 0 to 1")
        if not (math.isfinite(self.period_s) and self.period_s > 0):
            raise ValueError(f"period_s is {self.period_s}: a number of seconds above 0 is needed")
        for name, rate in (("inferences_per_s", self.inferences_per_s), ("stages_per_s", self.stages_per_s)):
            if not rate >= 0:
                raise ValueError(f"{name} is {rate}: a rate is 0 or more")

    def wait_s(self, now: float, since_stage: float, since_inference: float, *, begins: bool) -> float:
        """Seconds until the next stage may be launched; 0: now.

        Args:
            now: seconds since the network was started.
            since_stage: seconds since a stage was launched, infinite if none was.
            since_inference: seconds since an inference began, infinite if none did.
            begins: the stage is the first of an inference.
        """
        waits = [1 / self.stages_per_s - since_stage if self.stages_per_s else math.inf]
        if begins:
            waits.append(1 / self.inferences_per_s - since_inference if self.inferences_per_s else math.inf)
        if self.duty == 0:
            waits.append(math.inf)
        elif self.duty < 1:
            phase = math.fmod(now, self.period_s)
            waits.append(0.0 if phase < self.duty * self.period_s else self.period_s - phase)
        return max(0.0, *waits)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a network has done since it was made."""

    inferences: int
    """Whose last stage has ended, and whose results were handed on."""
    stages: int
    """That have ended."""
    launched: int
    """Stages that were launched."""
    queued_kernels: int
    """Of stages that were launched and have not been seen to end."""
    most_queued_kernels: int
    """The most that ever were."""


@dataclass(slots=True)
class _Queued(Generic[Value]):
    mark: Mark
    kernels: int
    last: bool
    """The last stage of its inference."""
    found: Value | None


@final
class Feeder(Generic[Value]):
    """Launches stages in order, never more than so many kernels ahead. One thread calls it.

    An inference that was begun when the launches ceased goes on where it was: no stage is lost, none runs twice.
    """

    def __init__(
        self,
        lane: Lane[Value],
        given: Given[Value],
        *,
        most_queued: int,
        clock: Callable[[], float],
        throttle: Throttle | None = None,
        deliver: Callable[[int, Value], object] | None = None,
    ) -> None:
        """`most_queued`: kernels that are launched and have not ended, unless a stage by itself has more.

        Raises:
            ValueError: no kernel may be queued, or there is no stage.
        """
        if most_queued < 1:
            raise ValueError(f"most_queued is {most_queued}: at least one kernel is launched")
        if not lane.kernels:
            raise ValueError("a network without a kernel")
        self.throttle = throttle or Throttle()
        """May be replaced at any time."""
        self.ended = False
        """There are no more inputs."""
        self._lane, self._given, self._deliver, self._clock = lane, given, deliver, clock
        self._most = max(most_queued, *lane.kernels)
        self._queue: deque[_Queued[Value]] = deque()
        self._next = 0
        self._origin = clock()
        self._last_stage = self._last_inference = -math.inf
        self._inferences = self._stages = self._launched = self._kernels = self._peak = 0

    @property
    def most_queued(self) -> int:
        """Kernels that a stop waits for at most."""
        return self._most

    @property
    def counts(self) -> Counts:
        """So far; from any thread."""
        return Counts(self._inferences, self._stages, self._launched, self._kernels, self._peak)

    def step(self) -> float:
        """Take note of what has ended, and launch what may be: seconds until there may be more to do, 0 for at once.

        Infinite: only another throttle, more room in the queue (`wait`) or nothing at all changes that. What the
        inputs, the results' receiver or the device raise is raised here; nothing is counted or launched twice then.
        """
        self._reap()
        if self.ended:
            return math.inf
        stage = self._next
        kernels = self._lane.kernels[stage]
        if self._queue and self._kernels + kernels > self._most:
            return math.inf
        now = self._clock()
        wait_s = self.throttle.wait_s(
            now - self._origin, now - self._last_stage, now - self._last_inference, begins=stage == 0
        )
        if wait_s > 0:
            return wait_s
        if stage == 0:
            try:
                given = self._given()
            except StopIteration:
                given = None
            if given is None:
                self.ended = True
                return math.inf
            self._lane.begin(given)
            self._last_inference = now
        self._lane.launch(stage)
        last = stage == len(self._lane.kernels) - 1
        self._next = 0 if last else stage + 1
        self._launched += 1
        self._kernels += kernels
        self._peak = max(self._peak, self._kernels)
        self._last_stage = now
        found = self._lane.results() if last else None
        self._queue.append(_Queued(self._lane.mark(), kernels, last, found))
        return 0.0

    @property
    def waits_for_room(self) -> bool:
        """Something is queued, whose end may be waited for."""
        return bool(self._queue)

    def wait(self) -> None:
        """Until the oldest of what is queued has ended; at once, if nothing is."""
        if self._queue:
            self._queue[0].mark.wait()
            self._reap()

    def drain(self) -> None:
        """Until all that is queued has ended; nothing more is launched.

        What the results' receiver raises is raised when all has ended, what the device reports at once.
        """
        error: Exception | None = None
        while left := len(self._queue):
            try:
                self.wait()
            except Exception as raised:
                if len(self._queue) == left:
                    self._queue.clear()
                    raise
                error = error or raised
        if error is not None:
            raise error

    def _reap(self) -> None:
        while self._queue and self._queue[0].mark.ended():
            first = self._queue.popleft()
            self._stages += 1
            self._kernels -= first.kernels
            if first.last:
                number = self._inferences
                self._inferences += 1
                if self._deliver is not None and first.found is not None:
                    self._deliver(number, first.found)
