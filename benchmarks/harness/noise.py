"""How much two times of one and the same thing differ: the rule of every 'no slower'.

    python -m benchmarks.harness.noise BEFORE.jsonl AGAIN.jsonl AFTER.jsonl

A/A: everybody takes part in the interleaved rounds twice (`twice`). Whatever the ratio of the two medians of one plan
is then, is noise, and so is what it would be had the two been exchanged in any of the rounds: the *bound* of a row is
the larger of both sides' 95 % quantiles of the absolute logarithms of these ratios, never less than a ratio that was
seen, and never less than `LEAST`. A is *no slower* than B where the logarithm of A's median over B's is at most the
bound; where it is below the negative bound, A is faster. Of nine rounds and more of two plans that are equally fast,
one row in twenty is further apart (with one side's noise alone it would be one in eight). Within a bound
above `MOST` nothing is said: the row is too noisy, is measured once more, and does not count as kept.

Rounds exchange only what varies from one to the next. What stays for a whole process (addresses, clocks) shows only
between runs, so two commits are compared by three records, in this order: BEFORE and AGAIN of the one commit, AFTER of
the other. The bound of a row is then the largest of both rows' own, of the row's ratio between BEFORE and AGAIN, and of
the 95 % quantile of these over all rows.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
QUANTILE = 0.95
LEAST = math.log(1.005)
"""What a median of some tens of rounds can tell at best."""
MOST = math.log(1.05)
DRAWS = 2000
AGAIN = "_again"
"""What the name of the second of a pair ends in."""


class Said(Enum):
    """What a row says of A beside B."""

    FASTER = "faster"
    NO_SLOWER = "no slower"
    SLOWER = "slower"
    NOISY = "too noisy"


@dataclass(frozen=True, slots=True)
class Judged:
    """A's time over B's, with the noise of it."""

    ratio: float
    bound: float
    """Of the ratio's absolute logarithm."""

    @property
    def said(self) -> Said:
        """The rule."""
        away = math.log(self.ratio)
        if abs(away) > self.bound:
            return Said.FASTER if away < 0 else Said.SLOWER
        return Said.NOISY if self.bound > MOST else Said.NO_SLOWER

    @property
    def no_slower(self) -> bool:
        """Whether A is not slower, as far as the noise lets one say."""
        return self.said in (Said.FASTER, Said.NO_SLOWER)

    def __str__(self) -> str:
        return f"{self.said.value}: {self.ratio:.4f}, noise {math.expm1(self.bound):.2%}"

    def record(self) -> dict[str, object]:
        """For a line of a record."""
        return {"ratio": round(self.ratio, 5), "noise": round(math.expm1(self.bound), 5), "said": self.said.value}


def bound(pairs: Iterable[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0, draws: int = DRAWS) -> float:
    """Of the logarithm of a ratio of medians, by pairs of samples of one thing each, a round at each place.

    Raises:
        ValueError: no pair, one with fewer than two rounds or with unequal numbers, or a time that is none.
    """
    chance = random.Random(seed)
    found = LEAST
    every = list(pairs)
    for first, second in every:
        if len(first) != len(second) or len(first) < 2:
            raise ValueError(f"{len(first)} and {len(second)} rounds are no pair")
        if not all(x > 0 and math.isfinite(x) for x in (*first, *second)):
            raise ValueError("a time that is not positive and finite")
        ratios = sorted(_apart(*_exchanged(first, second, chance)) for _ in range(draws))
        found = max(found, _apart(first, second), quantile(ratios))
    if not every:
        raise ValueError("no pair of samples: the noise is not known")
    return found


def quantile(sorted_values: Sequence[float]) -> float:
    """The least value that `QUANTILE` of all do not exceed."""
    return sorted_values[max(0, math.ceil(QUANTILE * len(sorted_values)) - 1)]


def judged(a: Sequence[float], b: Sequence[float], noise: float) -> Judged:
    """A beside B, both timed in the same rounds."""
    return Judged(statistics.median(a) / statistics.median(b), noise)


def twice(runs: Mapping[str, T]) -> dict[str, T]:
    """What takes part in rounds whose noise is asked for: everybody, and everybody again."""
    return {**runs, **{name + AGAIN: run for name, run in runs.items()}}


def of_rounds(samples: Mapping[str, Sequence[float]], a: str, b: str) -> Judged:
    """A beside B, in rounds in which everybody took part twice.

    Raises:
        ValueError: one of them took part once, or in fewer than two rounds.
    """
    if missing := [name for name in (a, b) if name + AGAIN not in samples]:
        raise ValueError(f"{missing[0]} took part once: its noise is not known")
    rounds = min(len(samples[name]) for x in (a, b) for name in (x, x + AGAIN))
    pairs = [(samples[x][:rounds], samples[x + AGAIN][:rounds]) for x in (a, b)]
    return judged(samples[a], samples[b], bound(pairs))


def _exchanged(
    first: Sequence[float], second: Sequence[float], chance: random.Random
) -> tuple[list[float], list[float]]:
    """Two samples of one thing, exchanged in each round or not."""
    rounds = [(x, y) if chance.random() < 0.5 else (y, x) for x, y in zip(first, second, strict=True)]
    return [x for x, _ in rounds], [y for _, y in rounds]


def _apart(first: Sequence[float], second: Sequence[float]) -> float:
    return abs(math.log(statistics.median(first) / statistics.median(second)))


# Records of two commits.


@dataclass(frozen=True, slots=True)
class Row:
    """A case of a record."""

    ms: float
    own: float
    """The bound within its run."""


def rows(lines: Iterable[str]) -> dict[str, Row]:
    """The newest row of each case that has a time and its noise."""
    found: dict[str, Row] = {}
    for line in lines:
        said = json.loads(line)
        if said.get("record") == "case" and isinstance(said.get("weft_ms"), float) and "noise" in said:
            found[str(said["case"])] = Row(said["weft_ms"], math.log1p(said["noise"]["noise"]))
    return found


def compared(
    before: Mapping[str, Row], again: Mapping[str, Row], after: Mapping[str, Row]
) -> Iterator[tuple[str, Judged | None]]:
    """Each case of `before`; nothing of one that the others lack, which counts as slower."""
    both = [abs(math.log(again[c].ms / before[c].ms)) for c in before if c in again]
    common = quantile(sorted(both)) if both else 0.0
    for case, row in before.items():
        if case not in again or case not in after:
            yield case, None
            continue
        now, then = after[case], again[case]
        noise = max(row.own, now.own, then.own, abs(math.log(then.ms / row.ms)), common)
        yield case, Judged(now.ms / math.sqrt(row.ms * then.ms), noise)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each case; exit 1 where one is slower, too noisy or missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("before", "again", "after"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args(arguments)
    records = [rows(path.read_text().splitlines()) for path in (given.before, given.again, given.after)]
    if not records[0]:
        sys.exit(f"{given.before}: no case with its noise; measure it again")
    bad = 0
    for case, found in compared(*records):
        bad += found is None or not found.no_slower
        print(f"{case}: {found or 'not in all three records'}")
    print(f"{len(records[0]) - bad} of {len(records[0])} cases are no slower")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
