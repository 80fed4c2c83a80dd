"""Timing the kernels of one problem against each other: interleaved rounds in seeded random order.

Protocol (its version is part of every timing's key):

* A *sample* is the mean over n back-to-back calls, n such that a sample lasts at least 200 us; one untimed call
  goes before it, which wakes the thread team that the kernel uses.
* A *round* takes one sample of each kernel in a fresh random order, so that drift of clocks and neighbours hits
  all alike and differences within a round are paired.
* Screening: 3 rounds of all. Final: the best 8, the baseline and the incumbent, 5 to 15 rounds, as many as fit
  into the trial's time (long kernels need fewer: their relative noise is smaller). All samples are kept.
* `cache=rotated`, the default: calls rotate over 2 to 8 sets of buffers (weights included) that together exceed
  twice the L2 caches of the cores in use. In a network, a kernel's activations were written just before by other
  cores' share of the previous kernel and its weights a whole inference ago: L3 is warm and L2 is not, which
  is what rotation gives. `cache=warm` keeps one set.
* Garbage collection is off during samples. The time of a library call includes the framework's dispatch, as in a
  plan; that of a generated kernel includes one foreign call (about 0.4 us).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

PROTOCOL_VERSION = 1
"""Raised when anything in the module's docstring changes."""


@dataclass(frozen=True, slots=True)
class TimingPolicy:
    """The numbers of the protocol."""

    sample_us: float = 200.0
    screening_rounds: int = 3
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


Clock = Callable[[], int]
"""Nanoseconds, monotonic."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Samples of each kernel, microseconds per call, in the order of the rounds it took part in."""

    samples_us: Mapping[int, tuple[float, ...]]
    calls: Mapping[int, int]
    """Calls per sample."""


def time_kernels(
    calls: Mapping[int, Sequence[Callable[[], object]]],
    *,
    policy: TimingPolicy,
    always: Sequence[int],
    seed: int,
    before: Callable[[int], None],
    clock: Clock = perf_counter_ns,
) -> Timed:
    """Time kernels that were verified.

    Args:
        calls: per kernel one bound call per set of buffers.
        policy: the numbers.
        always: kernels that take part in the final rounds whatever screening says (baseline, incumbent).
        seed: of the order within rounds.
        before: called with the kernel before each of its samples (the worker reports what it is about to run).
        clock: nanoseconds.
    """
    order = sorted(calls)
    rng = random.Random(seed)
    repeats: dict[int, int] = {}
    samples: dict[int, list[float]] = {k: [] for k in order}
    for k in order:
        before(k)
        first = _sample(calls[k], 1, clock)
        guess = max(1, min(2000, round(policy.sample_us / max(first, 0.01))))
        if guess > 1:  # the first call was cold; the second guess is the one that counts
            warm = _sample(calls[k], min(guess, 64), clock)
            guess = max(1, min(5000, round(policy.sample_us / max(warm, 0.01))))
        repeats[k] = guess

    def rounds(members: Sequence[int], count: int) -> None:
        for _ in range(count):
            for k in rng.sample(list(members), len(members)):
                before(k)
                samples[k].append(_sample(calls[k], repeats[k], clock))

    enabled = gc.isenabled()
    gc.disable()
    try:
        rounds(order, policy.screening_rounds)
        ranked = sorted(order, key=lambda k: (min(samples[k], default=0.0), k))
        finalists = sorted({*ranked[: policy.keep], *(k for k in always if k in calls)})
        per_round = sum(min(samples[k]) * repeats[k] for k in finalists) * 1e-6
        fit = int(policy.trial_s / per_round) if per_round > 0 else policy.max_rounds
        rounds(finalists, max(policy.min_rounds, min(policy.max_rounds, fit)))
    finally:
        if enabled:
            gc.enable()
    return Timed({k: tuple(v) for k, v in samples.items()}, repeats)


def _sample(calls: Sequence[Callable[[], object]], repeats: int, clock: Clock) -> float:
    """Microseconds per call."""
    size = len(calls)
    sequence = [calls[i % size] for i in range(repeats)]
    calls[-1]()
    start = clock()
    for call in sequence:
        call()
    return (clock() - start) / repeats / 1e3
