"""When the roles of a fused kernel ran on one multiprocessor: what a kernel that records wrote, and its stored form.

Such a kernel (`weft.generate.cuda.role.fused.fuse` with `spans`) writes a head of 16 bytes behind its work counter,
then spans of 48 bytes. Clocks are of one multiprocessor; the GPU's time, in coarse steps, tells how long one lasts.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from weft.errors import ArtifactError
from weft.kernels.codec import Json
from weft.kernels.dataclass_json import from_json, to_json

HEAD_BYTES = 16
_SPAN = struct.Struct("<6I3Q")
SPAN_BYTES = _SPAN.size
MOST_SPANS = 1 << 16
"""Of a stored timeline."""
_LEAST_NS = 2_000
"""Between two readings of the GPU's time, for a rate of clocks that is worth something."""


@dataclass(frozen=True, slots=True)
class RawSpan:
    """One run of a role, as the kernel wrote it."""

    sm: int
    cta: int
    role: int
    """0: LC in its CTA; k: a block of the BE role k - 1 of the CTA."""
    stage: int
    block: int
    begin: int
    """Clocks of the multiprocessor."""
    end: int
    ns: int
    """The GPU's time at the end."""


@dataclass(frozen=True, slots=True)
class RoleSpan:
    """One run of a role: LC in a CTA, or a BE block."""

    cta: int
    role: int
    """0: LC; k: the BE role k - 1 of the CTA."""
    stage: int
    block: int
    begin_us: float
    """From the begin of the first one on this multiprocessor."""
    end_us: float


@dataclass(frozen=True, slots=True)
class SmTimeline:
    """What ran when on one multiprocessor, in one launch of a fused kernel or a few."""

    lc: str
    """Name for people."""
    be: str
    gpu: str
    kernel: str
    """SHA-256 of the fused kernel without recording, as in `weft.kernels.pairs.PairKey`; empty: not told."""
    sm: int
    spans: tuple[RoleSpan, ...]
    """By their begin."""
    left_out: int = 0
    """Spans of all multiprocessors for which there was no room."""

    @property
    def us(self) -> float:
        """From the first begin to the last end."""
        return max((s.end_us for s in self.spans), default=0.0)

    def busy_us(self, *, best_effort: bool) -> float:
        """Time in which at least one LC role, or one BE block, ran."""
        total, until = 0.0, 0.0
        for s in self.spans:
            if (s.role > 0) == best_effort:
                total += max(0.0, s.end_us - max(until, s.begin_us))
                until = max(until, s.end_us)
        return total


def trace_bytes(spans: int) -> int:
    """Memory behind the work counter for so many spans."""
    return HEAD_BYTES + SPAN_BYTES * spans


def raw_spans(data: bytes) -> tuple[list[RawSpan], int]:
    """Spans that were recorded, and the number of those for which there was no room.

    Raises:
        ValueError: not the memory behind a work counter.
    """
    if len(data) < HEAD_BYTES or (len(data) - HEAD_BYTES) % SPAN_BYTES:
        raise ValueError(f"{len(data)} bytes are no head and spans of {SPAN_BYTES} bytes")
    count = int.from_bytes(data[:4], "little")
    room = (len(data) - HEAD_BYTES) // SPAN_BYTES
    found = []
    for k in range(min(count, room)):
        sm, cta, role, stage, block, _, begin, end, ns = _SPAN.unpack_from(data, HEAD_BYTES + SPAN_BYTES * k)
        found.append(RawSpan(sm, cta, role, stage, block, begin, end, ns))
    return found, max(0, count - room)


def timeline(
    raw: Sequence[RawSpan],
    left_out: int = 0,
    *,
    lc: str = "",
    be: str = "",
    gpu: str = "",
    kernel: str = "",
    sm: int | None = None,
    mhz: float = 0.0,
) -> SmTimeline:
    """Spans of one multiprocessor in microseconds.

    Args:
        raw: of all multiprocessors.
        left_out: for which there was no room.
        lc: name for people.
        be: likewise.
        gpu: likewise.
        kernel: digest of the kernel.
        sm: number of the multiprocessor; None: the one that ran most, of those with both roles.
        mhz: its clock; 0: from the GPU's time at the first and the last end.

    Raises:
        ValueError: no span is of this multiprocessor, one ends before it begins, or the clock cannot be told.
    """
    if sm is None:
        both = {s.sm for s in raw if s.role == 0} & {s.sm for s in raw if s.role > 0} or {s.sm for s in raw}
        counts = Counter(s.sm for s in raw if s.sm in both)
        sm = min(counts, key=lambda n: (-counts[n], n), default=0)
    mine = sorted((s for s in raw if s.sm == sm), key=lambda s: (s.begin, s.role, s.end))
    if not mine:
        raise ValueError(f"nothing was recorded on multiprocessor {sm}")
    if any(s.end < s.begin for s in mine):
        raise ValueError("a span ends before it begins")
    us_per_clock = 1.0 / mhz if mhz > 0 else _us_per_clock(mine)
    start = mine[0].begin
    spans = [
        RoleSpan(s.cta, s.role, s.stage, s.block, *(round((x - start) * us_per_clock, 4) for x in (s.begin, s.end)))
        for s in mine[:MOST_SPANS]
    ]
    return SmTimeline(lc, be, gpu, kernel, sm, tuple(spans), left_out)


def _us_per_clock(mine: Sequence[RawSpan]) -> float:
    first, last = min(mine, key=lambda s: s.end), max(mine, key=lambda s: s.end)
    if last.ns - first.ns < _LEAST_NS or last.end <= first.end:
        raise ValueError(f"the clock cannot be told from {last.ns - first.ns} ns: record more launches, or give `mhz`")
    return (last.ns - first.ns) / 1e3 / (last.end - first.end)


def timeline_to_json(value: SmTimeline) -> Json:
    """All fields."""
    return to_json(value)


def timeline_from_json(data: Json) -> SmTimeline:
    """Inverse of `timeline_to_json`.

    Raises:
        ArtifactError: not such a value, or times that cannot be [W401].
    """
    found = from_json(SmTimeline, cast("Mapping[str, Json]", data))
    times = [(s.begin_us, s.end_us) for s in found.spans]
    good = all(0 <= a <= b < math.inf for a, b in times) and all(s.role >= 0 for s in found.spans)
    if not good or len(found.spans) > MOST_SPANS or times != sorted(times, key=lambda x: x[0]):
        raise ArtifactError(problem="malformed timeline of a multiprocessor", remedy="record it again")
    return found
