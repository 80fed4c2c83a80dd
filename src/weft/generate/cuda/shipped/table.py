"""A table of measurements by bucket and kind of schedule; see the package."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, final

from weft.errors import ArtifactError
from weft.generate.cuda.shipped.buckets import Bucket, base_of, kind_of
from weft.ir.declined import Declined
from weft.kernels.source import Schedule
from weft.kernels.stored_names import kind_as_called

FORMAT = 1
FILES = {"NVIDIA H200": "nvidia-h200.json"}
"""Table of each GPU, by the name that its driver states."""
REMEDY = "make it again with `python -m benchmarks.shipped_table --write`"
MOST_LOOKED_AT = 8
"""Of a problem's schedules, those that may be put in front: the models are right about the rest."""
WIDTH = 1.7
"""Distance, in factors of two, at which a bucket counts 0.6 of one at the same sizes."""
LEAST_WEIGHT = 0.01
PRIOR = 2.0
"""So many measurements at a bucket itself are worth as much as the mean of all kinds."""
MARGIN = 0.025
"""What another schedule must be expected to win."""
MODEL_SHARE = 0.5
"""Weight of what a model says beside what was measured."""
SCALE = 1000
"""Logarithms in the file are integers of 1/SCALE."""


class Tried(NamedTuple):
    """A kind of schedule at a bucket."""

    kind: str
    seen: int
    """Problems in which it was measured."""
    slower: float
    """Mean logarithm of its time over the fastest of each problem."""


@final
@dataclass(frozen=True)
class Shipped:
    """The table of one GPU."""

    gpu: str
    buckets: Mapping[str, Mapping[tuple[int, ...], tuple[Tried, ...]]]
    """By key and point."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    _scores: dict[Bucket, Mapping[str, float]] = field(default_factory=dict, init=False, repr=False)

    def expected(self, bucket: Bucket) -> Mapping[str, float]:
        """By kind, the logarithm of its time over that of a kind of which nothing is known; empty: nothing is near."""
        if bucket not in self._scores:
            self._scores[bucket] = self._expected(bucket)
        return self._scores[bucket]

    def _expected(self, bucket: Bucket) -> Mapping[str, float]:
        counts: dict[str, float] = {}
        sums: dict[str, float] = {}
        for point, tried in self.buckets.get(bucket.key, {}).items():
            apart = sum((x - y) ** 2 for x, y in zip(point, bucket.point, strict=True))
            weight = math.exp(-apart / (2 * WIDTH**2))
            if weight < LEAST_WEIGHT:
                continue
            for t in tried:
                counts[t.kind] = counts.get(t.kind, 0.0) + weight * t.seen
                sums[t.kind] = sums.get(t.kind, 0.0) + weight * t.seen * t.slower
        middle = sum(sums.values()) / sum(counts.values()) if counts else 0.0
        return {k: (sums[k] + PRIOR * middle) / (counts[k] + PRIOR) - middle for k in counts}

    @staticmethod
    def from_json(text: str) -> Shipped:
        """A table from its file.

        Raises:
            ArtifactError: not such a table, or one of another version [W401].
        """
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, not {FORMAT}")
            kinds = [kind_as_called(str(k)) for k in data["kinds"]]
            buckets = {
                str(key): {
                    tuple(int(x) for x in point): tuple(
                        Tried(kinds[kind], int(count), int(slower) / SCALE) for kind, count, slower in tried
                    )
                    for point, tried in rows
                }
                for key, rows in data["places"].items()
            }
            bad = any(t.seen < 1 or t.slower < 0 for rows in buckets.values() for ts in rows.values() for t in ts)
            if bad or any(len({len(point) for point in rows}) > 1 for rows in buckets.values()):
                raise ValueError("a bucket or a measurement that cannot be")
            return Shipped(str(data["gpu"]), buckets, dict(data["provenance"]))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            problem = f"malformed table of measured schedules: {type(error).__name__}: {error}"
            raise ArtifactError(problem=problem, remedy=REMEDY) from None

    def to_json(self) -> str:
        """Inverse of `from_json`, a line for each bucket."""
        kinds = sorted({t.kind for rows in self.buckets.values() for ts in rows.values() for t in ts})
        number = {k: i for i, k in enumerate(kinds)}
        keys = []
        for key in sorted(self.buckets):
            rows = [
                [point, [[number[t.kind], t.seen, round(t.slower * SCALE)] for t in sorted(ts)]]
                for point, ts in sorted(self.buckets[key].items())
            ]
            keys.append(f"{json.dumps(key)}:[\n" + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "]")
        head = {"format": FORMAT, "gpu": self.gpu, "provenance": self.provenance, "kinds": kinds}
        return json.dumps(head, indent=0)[:-2] + ',\n"places":{\n' + ",\n".join(keys) + "}}\n"


def measured_best(bucket: Bucket | None, gpu: str, most: int) -> list[str]:
    """The kinds of schedules that the GPU's table expects to be the fastest, best first; none it knows nothing of."""
    found = table_for(gpu)
    known = {} if bucket is None or isinstance(found, Declined) else found.expected(bucket)
    return sorted((k for k, slower in known.items() if slower < 0), key=lambda k: (known[k], k))[:most]


@cache
def table_for(gpu: str) -> Shipped | Declined:
    """The table of a GPU, or why there is none; one that cannot be read costs its advice, not the search."""
    name = FILES.get(gpu)
    if name is None:
        return Declined(f"no table of measured schedules for {gpu}")
    try:
        found = Shipped.from_json(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))
    except OSError as error:
        return Declined(f"the table {name} cannot be read: {error.strerror}")
    except (ArtifactError, UnicodeDecodeError) as error:
        return Declined(f"the table {name}: {error}")
    return found if found.gpu == gpu else Declined(f"the table {name} is that of {found.gpu}")


def promoted(
    bucket: Bucket | None,
    schedules: Sequence[Schedule],
    gpu: str,
    modelled: Mapping[Schedule, float] | None = None,
    table: Shipped | None = None,
) -> list[Schedule]:
    """The schedules in their order, but the one first that is expected to be the fastest by the GPU's table.

    A kind that the table has never seen near the bucket keeps the first rank if the models give it that.

    Args:
        bucket: of the problem; None: the table has nothing to say.
        schedules: most promising first, by the models.
        gpu: its name.
        modelled: what a model says about them, in any unit.
        table: instead of the GPU's.
    """
    found = table_for(gpu) if table is None else table
    known = {} if bucket is None or isinstance(found, Declined) else found.expected(bucket)
    few = schedules[:MOST_LOOKED_AT]
    slower = {s: known.get(kind_of(s), known.get(base_of(kind_of(s)))) for s in few}
    if len(few) < 2 or slower[few[0]] is None:
        return list(schedules)  # it was never measured, so nothing is known to be faster
    times = modelled or {}
    least = min((times[s] for s in few if s in times), default=1.0)
    scores = {s: (slower[s] or 0.0) + MODEL_SHARE * _late(times.get(s, least) / least) for s in few}
    best = min(few, key=lambda s: scores[s])
    if scores[best] > scores[few[0]] - MARGIN:
        return list(schedules)
    return [best, *(s for s in schedules if s != best)]


def _late(ratio: float) -> float:
    """Logarithm of a time over the least, as far as it says something."""
    return min(1.0, math.log(ratio)) if ratio > 0 else 0.0
