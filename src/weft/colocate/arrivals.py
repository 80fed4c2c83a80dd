"""When queries arrive: seeded processes and traces, fixed before a run. Knows nothing of who answers them.

An arrival is a *scheduled* instant, in nanoseconds from the begin of the run: latency counts from it, whenever the
query was sent in fact, so that a stall counts against all queries behind it.

**Trace file**, one instant a line, which may come from anybody:

    weft-arrivals 1 ns
    # a comment: ignored, as are empty lines
    0
    1250000

UTF-8, whole numbers of nanoseconds in decimal digits, none smaller than the one before, at most `MOST` of them and
below `MOST_NS`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.errors import UserError

Times = npt.NDArray[np.int64]
MOST = 20_000_000
"""Arrivals of a run."""
MOST_NS = 10**16
"""Of an instant: some 115 days."""
MOST_BYTES = 512 << 20
"""Of a trace file."""
_HEADER = "weft-arrivals 1 ns"
_MOST_LINE = 80
_NS = 1e9


class ArrivalsError(UserError):
    """Arrivals that cannot be made, or a trace file that cannot be taken."""

    code = "W016"
    template = "arrivals: {problem}"
    todo = "{remedy}"


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """The instants of a run, and where they come from."""

    times_ns: Times
    """Sorted; read-only."""
    process: str
    """For people: `poisson`, `gamma cv=3`, `trace burst.txt`, ..."""
    seed: int | None = None
    """None: nothing was drawn."""

    def __post_init__(self) -> None:
        self.times_ns.setflags(write=False)

    def __len__(self) -> int:
        return len(self.times_ns)

    @property
    def rate_hz(self) -> float:
        """Mean rate from the first arrival to the last; NaN of fewer than two, or all at one instant."""
        n = len(self.times_ns)
        span = int(self.times_ns[-1] - self.times_ns[0]) if n else 0
        return (n - 1) * _NS / span if span else math.nan

    @property
    def digest(self) -> str:
        """Names the instants: two runs with one digest had the same."""
        return hashlib.sha256(self.times_ns.astype("<i8").tobytes()).hexdigest()[:16]

    def scaled(self, rate_hz: float) -> Arrivals:
        """The same pattern at another mean rate.

        Raises:
            ArrivalsError: no rate, or a pattern without one [W016].
        """
        _check_rate(rate_hz)
        if not math.isfinite(self.rate_hz):
            raise ArrivalsError(
                problem="fewer than two instants have no rate that could be changed", remedy="give a longer trace"
            )
        factor = self.rate_hz / rate_hz
        return Arrivals(_whole(self.times_ns.astype(np.float64) * factor), self.process, self.seed)


@dataclass(frozen=True, slots=True)
class Spike:
    """A time in which queries arrive several times as often."""

    begin_s: float
    length_s: float
    factor: float
    """Rate within it over that outside."""


def poisson(rate_hz: float, count: int, *, seed: int) -> Arrivals:
    """A Poisson process: independent, exponentially distributed gaps.

    Raises:
        ArrivalsError: a rate or a count that cannot be [W016].
    """
    _check(rate_hz, count)
    gaps = np.random.default_rng(seed).exponential(_NS / rate_hz, count)
    return Arrivals(_whole(np.cumsum(gaps)), "poisson", seed)


def gamma(rate_hz: float, count: int, *, cv: float, seed: int) -> Arrivals:
    """Independent gaps with a gamma distribution of coefficient of variation `cv`: 1 is Poisson, above is bursty.

    Raises:
        ArrivalsError: a rate, a count or a coefficient that cannot be [W016].
    """
    _check(rate_hz, count)
    if not 0.01 <= cv <= 100:
        raise ArrivalsError(problem=f"a coefficient of variation of {cv}", remedy="give one from 0.01 to 100")
    shape = 1.0 / cv**2
    gaps = np.random.default_rng(seed).gamma(shape, _NS / rate_hz / shape, count)
    return Arrivals(_whole(np.cumsum(gaps)), f"gamma cv={cv:g}", seed)


def spikes(rate_hz: float, count: int, given: Sequence[Spike], *, seed: int) -> Arrivals:
    """A Poisson process whose rate is `rate_hz`, and a multiple of that within spikes (exact, by rescaling of time).

    Raises:
        ArrivalsError: a rate, a count or a spike that cannot be, or spikes that overlap [W016].
    """
    _check(rate_hz, count)
    at, expected, last = [0.0], [0.0], 0.0
    for spike in sorted(given, key=lambda s: s.begin_s):
        finite = all(map(math.isfinite, (spike.begin_s, spike.length_s, spike.factor)))
        if not (finite and spike.begin_s >= last and spike.length_s > 0 and spike.factor > 0):
            raise ArrivalsError(
                problem=f"a spike at {spike.begin_s} s of {spike.length_s} s and {spike.factor} times the rate",
                remedy="spikes lie behind each other, have a length and a positive factor",
            )
        for until, factor in ((spike.begin_s, 1.0), (spike.begin_s + spike.length_s, spike.factor)):
            expected.append(expected[-1] + (until - at[-1]) * rate_hz * factor)
            at.append(until)
        last = at[-1]
    units = np.cumsum(np.random.default_rng(seed).exponential(1.0, count))
    within = np.interp(units, expected, at)
    times = np.where(units > expected[-1], at[-1] + (units - expected[-1]) / rate_hz, within)
    return Arrivals(_whole(times * _NS), f"poisson with {len(given)} spikes", seed)


def read_trace(path: Path) -> Arrivals:
    """Instants of a trace file.

    Raises:
        ArrivalsError: it cannot be read, or is no trace; the message has the line [W016].
    """
    where = path.name
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ArrivalsError(where=where, problem=f"more than {MOST_BYTES >> 20} MiB", remedy="give a shorter trace")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"it cannot be read: {getattr(error, 'strerror', None) or 'no text in UTF-8'}"
        raise ArrivalsError(where=where, problem=problem, remedy="give a trace file (docs/colocation.md)") from None
    return parse_trace(text, where)


def parse_trace(text: str, where: str = "trace") -> Arrivals:
    """As `read_trace`, of the text itself.

    Raises:
        ArrivalsError: no trace [W016].
    """
    lines = text.splitlines()
    if not lines or lines[0].strip() != _HEADER:
        raise ArrivalsError(
            where=where, problem=f"the first line is not {_HEADER!r}", remedy="docs/colocation.md has the format"
        )
    found: list[int] = []
    before = 0
    for number, raw in enumerate(lines[1:], start=2):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if len(line) > _MOST_LINE or not (line.isascii() and line.isdigit()):
            raise _bad(where, number, "is no whole number of nanoseconds")
        value = int(line)
        if value >= MOST_NS:
            raise _bad(where, number, f"is not below {MOST_NS}")
        if value < before:
            raise _bad(where, number, "lies before the instant above it")
        if len(found) == MOST:
            raise _bad(where, number, f"is one more than the {MOST} that are read")
        found.append(value)
        before = value
    if not found:
        raise ArrivalsError(where=where, problem="no instants", remedy="give one instant a line, in nanoseconds")
    return Arrivals(np.array(found, dtype=np.int64), f"trace {where}")


def write_trace(arrivals: Arrivals) -> str:
    """The text that `parse_trace` reads."""
    return "\n".join([_HEADER, *map(str, arrivals.times_ns.tolist())]) + "\n"


def rate_of_load(load: float, of_hz: float) -> float:
    """Arrivals in a second at a load: a fraction of the service rate 1/T, or of the peak load.

    Raises:
        ArrivalsError: a load that is none, or no rate to take it of [W016].
    """
    if not 0 < load <= 10:
        raise ArrivalsError(problem=f"a load of {load}", remedy="give a fraction of the rate, above 0 and up to 10")
    _check_rate(of_hz)
    return load * of_hz


def _whole(times: npt.NDArray[np.float64]) -> Times:
    if len(times) and not times[-1] < MOST_NS:
        raise ArrivalsError(problem=f"the last instant is not below {MOST_NS} ns", remedy="give a higher rate")
    return np.rint(times).astype(np.int64)


def _check_rate(rate_hz: float) -> None:
    if not (math.isfinite(rate_hz) and 0 < rate_hz <= _NS):
        raise ArrivalsError(problem=f"a rate of {rate_hz} in a second", remedy="give one above 0 and up to 10^9")


def _check(rate_hz: float, count: int) -> None:
    _check_rate(rate_hz)
    if not 1 <= count <= MOST:
        raise ArrivalsError(problem=f"{count} arrivals", remedy=f"give a number from 1 to {MOST}")


def _bad(where: str, line: int, problem: str) -> ArrivalsError:
    return ArrivalsError(
        where=where, problem=f"line {line} {problem}", remedy="one instant a line, in nanoseconds, in order of time"
    )
