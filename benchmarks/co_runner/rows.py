"""What a row says of a model beside best-effort work, and which row is chosen: pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.kernels.colocation import WorkCounter

MODELS = ("resnet50", "bert_base", "vit_b16", "inception_v3", "vgg16")
BATCHES = (1, 16)
WHOLE = 256
"""Of `duty`: all of its time."""
MOST_THREADS = 256
"""Of a co-runner's CTA: one beside which a plan still has most of an SM."""
LIMITS: Mapping[int, tuple[str, float]] = {1: ("lc_p99", 1.08), 16: ("lc_p50", 1.10)}
"""Batch -> what of the model may become how much longer beside the chosen co-runner."""
Kind = Literal["co-runner", "short", "serial", "slices", "green"]
PEER_KINDS: tuple[Kind, ...] = ("short", "serial", "slices", "green")
_WAY = re.compile(r"(?P<threads>[0-9]+)(?:-duty(?P<duty>[0-9]+)(?P<sync>-sync)?)?(?:-sms(?P<sms>[0-9]+))?")
_PEER = re.compile(r"(?P<kind>short|serial|slices|green)(?P<number>[0-9]*)(?P<plain>-plain)?")


@dataclass(frozen=True, slots=True)
class Way:
    """How best-effort work runs beside the model; its text is what stands in a case."""

    kind: Kind
    number: int
    """Threads of a co-runner's CTA; of `serial` hundredths of the query's time that a launch takes; of `slices`
    milliseconds; of `green` multiprocessors of best-effort work."""
    duty: int = WHOLE
    """256ths of its time in which a CTA of the co-runner works."""
    sms: int = 0
    """Multiprocessors with numbers below it on which a co-runner works; 0: all."""
    plain: bool = False
    """The model runs by the plan without a budget; never beside a co-runner."""
    sync: bool = False
    """The CTAs of a co-runner work and rest all at the same time."""

    def __str__(self) -> str:
        if self.kind == "co-runner":
            duty = f"-duty{self.duty}{'-sync' if self.sync else ''}" if self.duty != WHOLE else ""
            return f"{self.number}{duty}{f'-sms{self.sms}' if self.sms else ''}"
        return f"{self.kind}{self.number or ''}{'-plain' if self.plain else ''}"

    @staticmethod
    def of(text: str) -> Way:
        """The way that is written so.

        Raises:
            ValueError: none is.
        """
        if found := _WAY.fullmatch(text):
            threads, duty, sms = (int(found[k] or d) for k, d in (("threads", 0), ("duty", WHOLE), ("sms", 0)))
            if (
                threads % 32
                or not 32 <= threads <= MOST_THREADS
                or not 0 < duty <= WHOLE
                or (found["sync"] and duty == WHOLE)
            ):
                raise ValueError(f"{text}: whole warps up to {MOST_THREADS} threads, and a duty of 1 to {WHOLE}")
            return Way("co-runner", threads, duty, sms, sync=bool(found["sync"]))
        if (found := _PEER.fullmatch(text)) and (found["kind"] == "short") == (not found["number"]):
            if found["number"] and not int(found["number"]):
                raise ValueError(f"{text}: a number above 0 is needed")
            kind = next(k for k in PEER_KINDS if k == found["kind"])
            return Way(kind, int(found["number"] or 0), plain=bool(found["plain"]))
        known = "128, 128-duty96, 128-duty96-sync, 128-sms66"
        raise ValueError(f"{text!r}: neither like {known} nor short, serial50, slices2, green36")


CO_RUNNERS = tuple(map(Way.of, ("64", "128", "192", "256", "128-duty96", "128-sms66")))
"""Those at their limit are found while measuring (`fitted`)."""
PEERS = tuple(map(Way.of, ("short", "serial50", "slices2", "green12", "green20", "green36", "green68")))
WAYS = (*CO_RUNNERS, *PEERS)


@dataclass(slots=True)
class Sample:
    """Rounds of queries back to back, in one way."""

    us: list[float] = field(default_factory=list)
    """Of each query: from the end of the one before to its own."""
    span_us: float = 0.0
    """Of all rounds."""
    work: float = 0.0
    """Turns of threads of best-effort work that ended within."""
    mhz: list[int] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)

    def add(self, other: Sample) -> None:
        """Another round."""
        self.us += other.us
        self.span_us += other.span_us
        self.work += other.work
        self.mhz += other.mhz
        self.watts += other.watts


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of all do not exceed; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def spread(sample: Sample) -> dict[str, float]:
    """p50, p95 and p99 of the queries in microseconds."""
    return {f"p{p}": round(quantile(sample.us, p / 100), 2) for p in (50, 95, 99)}


def clocks(sample: Sample) -> dict[str, float]:
    """Median clock of the SMs in MHz and power in watts; 0 where the driver does not say."""
    return {
        "sm_clock_mhz": quantile(sample.mhz, 0.5) if sample.mhz else 0,
        "watts": round(quantile(sample.watts, 0.5), 1) if sample.watts else 0.0,
    }


def over(sample: Sample, alone: Sample) -> dict[str, float]:
    """How many times longer queries take than alone, by p50, p95 and p99."""
    mine, theirs = spread(sample), spread(alone)
    return {f"lc_{k}": round(mine[k] / theirs[k], 4) for k in mine}


def mean_us(sample: Sample) -> float:
    """Microseconds of a query in the mean."""
    return sample.span_us / len(sample.us)


def beside(way: Way, sample: Sample, alone: Sample, plain: Sample, full: float) -> dict[str, Any]:
    """The numbers of a row: a model in one way, over the same plan alone.

    `full`: turns of threads in a microsecond of the same work alone on the whole GPU. `plain`: the plan without a
    budget, alone; `added_plain` is over that one.
    """
    be = sample.work / sample.span_us / full
    base = plain if way.plain else alone
    return {
        "way": way.kind,
        "lc_us": spread(sample),
        "alone_us": spread(base),
        "plain_us": spread(plain),
        **over(sample, base),
        "be": round(be, 4),
        "added": round(mean_us(base) / mean_us(sample) + be, 4),
        "added_plain": round(mean_us(plain) / mean_us(sample) + be, 4),
        "price": round(quantile(alone.us, 0.5) / quantile(plain.us, 0.5), 4),
        "queries": len(sample.us),
        **clocks(sample),
    }


def chosen(rows: Iterable[Mapping[str, Any]], batch: int) -> str:
    """The case of the co-runner that is taken for a model and a kind of work; empty: none, they take turns.

    Of those that keep the limit of the batch and add work at all, the one that adds most; of equals the smaller one.
    """
    name, limit = LIMITS[batch]
    kept = [x for x in rows if _is_co_runner(x) and x[name] <= limit and x["added"] > 1.0]
    best = max(kept, key=lambda x: (x["added"], -x["be"], str(x["case"])), default=None)
    return "" if best is None else str(best["case"])


def _is_co_runner(row: Mapping[str, Any]) -> bool:
    """Whether it is of a co-runner that was measured: neither failed nor declined."""
    return row.get("way") == "co-runner" and "failed" not in row and "declined" not in row


PRESENCE = 0.02
"""By which share queries are longer beside a co-runner that only naps (`--steps`)."""


def fitted(found: Mapping[Way, float], batch: int) -> list[Way]:
    """Ways to try beside those that were measured: of each size over the batch's limit the common duty that keeps it.

    `found`: what the limit is on, over alone. What a co-runner costs beside its presence is taken to be in proportion
    to the time in which it works; a duty of four fifths of that is tried as well, since blocks end behind their time.
    """
    _, limit = LIMITS[batch]
    ways: list[Way] = []
    for way, ratio in found.items():
        if way.kind != "co-runner" or (way.duty, way.sms) != (WHOLE, 0) or not ratio > limit:
            continue
        share = (limit - 1 - PRESENCE) / (ratio - 1 - PRESENCE)
        duties = (round(WHOLE * share * x) for x in (1.0, 0.8))
        ways += [Way("co-runner", way.number, d, sync=True) for d in duties if 0 < d < WHOLE]
    return list(dict.fromkeys(ways))


def marked(rows: Sequence[Mapping[str, Any]], batch: int) -> list[dict[str, Any]]:
    """Rows of one model and kind of work whose mark is another than before, anew."""
    best = chosen(rows, batch)
    anew = ({**x, "chosen": x["case"] == best} for x in rows if _is_co_runner(x))
    before = {str(x["case"]): x.get("chosen") for x in rows}
    return [x for x in anew if x["chosen"] != before[str(x["case"])]]


def groups(only: Sequence[str], ways: Sequence[Way], kinds: Sequence[str]) -> dict[tuple[str, int, str], list[Way]]:
    """(model, batch, kind of work) -> ways to measure: all cases whose name holds one of the texts; none: all."""
    found: dict[tuple[str, int, str], list[Way]] = {}
    for model in MODELS:
        for batch in BATCHES:
            for kind in kinds:
                own = [w for w in ways if wanted(f"{model}/b{batch}/{kind}/{w}", only)]
                if own:
                    found[model, batch, kind] = own
    return found


def wanted(case: str, only: Sequence[str]) -> bool:
    """Whether a case is one of those that were asked for: a text that is a whole name of a part is no other's begin."""
    return not only or any(f"/{text}/" in f"/{case}/" for text in only)


def lost_or_doubled(cells: Sequence[int], finished: int) -> str:
    """What is wrong with the blocks that counted themselves, of numbers from 0 on; empty: each ran once."""
    size = len(cells)
    short = [k for k, n in enumerate(cells) if n != (finished - k + size - 1) // size]
    if not short:
        return ""
    at = short[0]
    want = (finished - at + size - 1) // size
    return f"{len(short)} of {size} cells differ: cell {at} has {cells[at]} blocks, {want} of {finished} are its own"


def exact(before: WorkCounter, after: WorkCounter) -> str:
    """What is wrong with the counter after a stop; empty: all that was drawn has ended, and it went on where it was."""
    drawn = min(after.ticket, after.end)
    if after.finished != drawn:
        return f"{drawn} blocks were drawn, {after.finished} have ended"
    if after.finished < before.finished:
        return f"{after.finished} blocks have ended, {before.finished} had before"
    return ""
