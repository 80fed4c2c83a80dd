"""Timing the kernels of one problem against each other: interleaved rounds in seeded random order.

Protocol (its version is part of every timing's key):

* A *sample* is the mean over n back-to-back calls, n such that a sample lasts at least 200 us; one untimed call
  goes before it, which wakes the thread team that the kernel uses (not before calls over 5 ms, where it cannot matter).
* A *round* takes one sample of each kernel in a fresh random order, so that drift of clocks and neighbours hits
  all alike and differences within a round are paired.
* Screening: 3 rounds of all; what takes over 3 times as long as the fastest in the first takes no part in the others.
  Final: the best 8, the baseline and the incumbent, 5 to 15 rounds, as many as fit
  into the trial's time, and 2 where a single round is longer than it. All samples are kept.
* `cache=rotated`, the default: calls rotate over 2 to 8 sets of buffers (weights included) that together exceed
  twice the L2 caches of the cores in use. In a network, a kernel's activations were written just before by other
  cores' share of the previous kernel and its weights a whole inference ago: L3 is warm and L2 is not, which
  is what rotation gives. `cache=warm` keeps one set.
* A sample during which the system took a core away (involuntary context switches of the process) is taken again, at
  most twice and only while the retakes of the trial are short in all: threads that wait for a thread that does not run
  make a kernel look a thousand times slower than it is.
* Garbage collection is off during samples. The time of a library call includes the framework's dispatch, as in a
  plan; that of a generated kernel includes one foreign call (about 0.4 us).
"""

from __future__ import annotations

import gc
import math
import random
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

PROTOCOL_VERSION = 2
"""Raised when anything in the module's docstring changes."""


@dataclass(frozen=True, slots=True)
class TimingPolicy:
    """The numbers of the protocol."""

    sample_us: float = 200.0
    screening_rounds: int = 3
    hopeless: float = 3.0
    """Times the fastest, after one round."""
    min_rounds: int = 5
    max_rounds: int = 15
    keep: int = 8
    trial_s: float = 0.3
    """Wall time that the final rounds aim at."""
    max_sets: int = 8
    cache: str = "rotated"


def sets_needed(policy: TimingPolicy, set_bytes: int, l2_bytes: int) -> int:
    """Sets of buffers to rotate over: together above 2 x `l2_bytes` (of all cores in use), 2 to `max_sets`."""
    if policy.cache == "warm" or set_bytes >= 2 * l2_bytes:
        return 1
    return max(2, min(policy.max_sets, -(-2 * l2_bytes // max(set_bytes, 1)) + 1))


def preemptions() -> int:
    """Involuntary context switches of this process so far, over all its threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


Clock = Callable[[], int]
"""Nanoseconds, monotonic."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Samples of each kernel, microseconds per call, in the order of the rounds it took part in."""

    samples_us: Mapping[int, tuple[float, ...]]
    calls: Mapping[int, int]
    """Calls in all, the untimed ones too: sets of buffers beyond this number were never used."""


def time_kernels(
    calls: Mapping[int, Sequence[Callable[[], object]]],
    *,
    policy: TimingPolicy,
    always: Sequence[int],
    seed: int,
    before: Callable[[int], None],
    clock: Clock,
    preempted: Callable[[], int],
) -> Timed:
    """Time kernels that were verified.

    Args:
        calls: per kernel one bound call per set of buffers.
        policy: the numbers.
        always: kernels that take part in the final rounds whatever screening says (baseline, incumbent).
        seed: of the order within rounds.
        before: called with the kernel before each of its samples (the worker reports what it is about to run).
        clock: nanoseconds.
        preempted: counts how often the system took a core away.
    """
    order = sorted(calls)
    rng = random.Random(seed)
    repeats: dict[int, int] = {}
    samples: dict[int, list[float]] = {k: [] for k in order}
    rotations = {k: _Rotation(calls[k]) for k in order}
    for k in order:
        before(k)
        guess = _repeats(policy, rotations[k].sample(1, clock), 2000)
        if guess > 1:  # the first call was cold; the second guess is the one that counts
            warm = min(rotations[k].sample(min(guess, 64), clock) for _ in range(2))
            guess = _repeats(policy, warm, 5000)
        repeats[k] = guess

    spare_us = policy.trial_s * 1e6

    def quiet_sample(k: int) -> float:
        nonlocal spare_us
        best = math.inf
        for attempt in range(3):
            switches = preempted()
            found = rotations[k].sample(repeats[k], clock)
            best = min(best, found)
            if preempted() == switches or spare_us <= 0:
                return found if attempt == 0 else best
            spare_us -= found * repeats[k]
        return best

    def rounds(members: Sequence[int], count: int) -> None:
        for _ in range(count):
            for k in rng.sample(list(members), len(members)):
                before(k)
                samples[k].append(quiet_sample(k))

    enabled = gc.isenabled()
    gc.disable()
    try:
        rounds(order, min(1, policy.screening_rounds))
        limit = policy.hopeless * min((min(x) for x in samples.values() if x), default=0.0)
        hopeful = [k for k in order if k in always or min(samples[k], default=0.0) <= limit]
        rounds(hopeful, policy.screening_rounds - 1)
        ranked = sorted(hopeful, key=lambda k: (min(samples[k], default=0.0), k))
        finalists = sorted({*ranked[: policy.keep], *(k for k in always if k in calls)})
        per_round = sum(min(samples[k]) * repeats[k] for k in finalists) * 1e-6
        fit = int(policy.trial_s / per_round) if per_round > 0 else policy.max_rounds
        # a round of long calls fills the time alone: two more are enough, their noise is a small part of them
        least = policy.min_rounds if fit > 0 else 2
        rounds(finalists, max(least, min(policy.max_rounds, fit)))
    finally:
        if enabled:
            gc.enable()
    return Timed({k: tuple(v) for k, v in samples.items()}, {k: rotations[k].calls for k in order})


def _repeats(policy: TimingPolicy, call_us: float, most: int) -> int:
    """Calls per sample; 1 where the clock says nonsense."""
    return max(1, min(most, round(policy.sample_us / max(call_us, 1e-3)))) if call_us > 0 else 1


@final
class _Rotation:
    """The bound calls of one kernel, taken in turn."""

    def __init__(self, bound: Sequence[Callable[[], object]]) -> None:
        self._bound = bound
        self._last_us = 0.0
        self.calls = 0

    def sample(self, repeats: int, clock: Clock) -> float:
        """Microseconds per call."""
        size = len(self._bound)
        if self._last_us < 5000:
            self._bound[self.calls % size]()
            self.calls += 1
        sequence = [self._bound[i % size] for i in range(self.calls, self.calls + repeats)]
        start = clock()
        for call in sequence:
            call()
        self._last_us = (clock() - start) / repeats / 1e3
        self.calls += repeats
        return self._last_us
