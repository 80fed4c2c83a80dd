"""Timing kernels on a GPU against each other: CUDA graphs of many launches, interleaved rounds, events.

Protocol (its version is part of every timing's key):

* A *sample* is one replay of a CUDA graph of n launches of one kernel, from an event before it to an event after it,
  over n. n is such that a replay lasts at least 200 us, and at most `max_sets` (48: an event is good to about half a
  microsecond). Launches depend on each other
  as in a plan, programmatically where the kernel allows it, so the gap between two kernels is part of the time.
* Before the first event, the caches are brought into a defined state and the device is kept busy while the host
  enqueues the rest: twice the L2 is read, and one launch that is not timed follows.
* `cache=weights`, the default: launch i reads copy i of the weights (and of what was packed of them), and copies
  repeat only after more than twice the L2. Activations are one set: in a plan the kernel before wrote them, so that
  they are in the L2 if they fit, while weights were last used a whole inference ago. `cache=rotated`: inputs and
  outputs rotate too. `cache=warm`: nothing does, for networks whose weights fit into the L2, and nothing is evicted.
* A *round* takes one sample of each kernel in a fresh random order. Screening: 3 rounds of all. Final: the best 8,
  the baseline and the incumbent, 5 to 11 rounds. All samples are kept; the median counts.
* Clocks are not locked; the SM clock after the rounds is reported where NVML can be asked.
* Calls that the framework runs on the host (ONNX Runtime) cannot be recorded: they are timed by the host's clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from weft.tune.timing import TimingPolicy

CUDA_PROTOCOL_VERSION = 2
"""Raised when anything in the module's docstring changes."""
CUDA_POLICY = TimingPolicy(max_sets=48, max_rounds=11, cache="weights")
PROBE_LAUNCHES = 8
"""Of the first graph, which tells how many launches a sample needs."""


class Sampler(Protocol):
    """Something that runs a kernel many times and says how long one launch took."""

    def sample(self) -> float:
        """Microseconds per launch, or an error of the device."""
        ...


def launches_needed(policy: TimingPolicy, launch_us: float) -> int:
    """Launches of one graph: a sample's length, between 1 and `max_sets`."""
    return max(1, min(policy.max_sets, -(-int(policy.sample_us) // max(1, round(launch_us)))))


def copies_needed(policy: TimingPolicy, launches: int, rotating_bytes: int, l2_bytes: int, room_bytes: int) -> int:
    """Copies of what rotates: one per launch, or as many as exceed twice the L2 in all; never more than fit."""
    if policy.cache == "warm" or rotating_bytes == 0:
        return 1
    enough = min(launches, -(-2 * l2_bytes // rotating_bytes) + 1)
    return max(1, min(enough, room_bytes // rotating_bytes))


def time_rounds(
    samplers: Mapping[int, Sampler],
    *,
    policy: TimingPolicy,
    always: Sequence[int],
    seed: int,
    before: Callable[[int], None],
    spent_us: Callable[[int, float], float],
) -> dict[int, tuple[float, ...]]:
    """Samples of each kernel, microseconds per launch, in the order of the rounds it took part in.

    Args:
        samplers: recorded kernels that were verified.
        policy: the numbers.
        always: kernels that take part in the final rounds whatever screening says (baseline, incumbent).
        seed: of the order within rounds.
        before: called with the kernel before each of its samples.
        spent_us: how long a sample of this kernel takes in all, by its time per launch.
    """
    order = sorted(samplers)
    rng = random.Random(seed)
    samples: dict[int, list[float]] = {k: [] for k in order}

    def rounds(members: Sequence[int], count: int) -> None:
        for _ in range(count):
            for k in rng.sample(list(members), len(members)):
                before(k)
                samples[k].append(samplers[k].sample())

    rounds(order, policy.screening_rounds)
    ranked = sorted(order, key=lambda k: (min(samples[k], default=0.0), k))
    finalists = sorted({*ranked[: policy.keep], *(k for k in always if k in samplers)})
    per_round = sum(spent_us(k, min(samples[k])) for k in finalists) * 1e-6
    fit = int(policy.trial_s / per_round) if per_round > 0 else policy.max_rounds
    rounds(finalists, max(policy.min_rounds if fit > 0 else 2, min(policy.max_rounds, fit)))
    return {k: tuple(v) for k, v in samples.items()}
