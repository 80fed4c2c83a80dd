"""Pairs in the tuning database: what was measured of them is kept, looked up, searched and summed up.

A row is one fused kernel, under `PairKey`: with another LC problem, BE source, fused text, GPU, driver, compiler or
source that measures it is another row, and measured anew. Rows lie beside those of kernels (`Database.keep`). What is
chosen of a pair is a front of at most four of its kernels, besides `do not fuse`, which is always possible.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weft.errors import ArtifactError
from weft.kernels.candidate import Problem
from weft.kernels.codec import Json
from weft.kernels.colocation import FusedSource
from weft.kernels.pairs import PairKey, PairRecord, PairSummary, record_from_json, record_to_json
from weft.kernels.record import CompileRecord
from weft.kernels.sm_timeline import SmTimeline, timeline_from_json, timeline_to_json
from weft.tune.halving import MOST_POINTS, halve, thinned
from weft.tune.keys import PACKAGE, canonical, digest, source_hash
from weft.tune.store import Database

if TYPE_CHECKING:
    from weft.generate.cuda.role.role import RoleSource

KIND = "pair"
"""Of rows in the database."""
TIMELINE_KIND = "pair timeline"
"""Of rows that say when roles ran."""
SEARCH_KIND = "pair search"
"""Of rows that say which searches came to their end: a search that goes by what longer ones measured could go on."""
MEASURING_PARTS = (
    "device/cuda/streams.py",
    "generate/bind.py",
    "generate/bind_fused.py",
    "kernels/colocation.py",
    "tune/cuda_pair.py",
)
"""Their sources decide what a pair's times mean."""
FRACTIONS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
"""BE time beside a launch, over LC's alone, that shapes are tried at."""
ROUNDS, MOST_ROUNDS = 3, 12
"""Interleaved rounds of the first and of the last measurement of a kernel."""


class Times(Protocol):
    """Of LC launches and one run of the job, as `weft.tune.cuda_pair.PairTimes`."""

    @property
    def launches(self) -> int:
        """Of LC."""

    @property
    def lc_us(self) -> float:
        """All of them, alone."""

    @property
    def be_us(self) -> float:
        """The job alone."""

    @property
    def inside_us(self) -> float:
        """The fused launches."""

    @property
    def idle_us(self) -> float:
        """The fused launches with nothing to draw."""

    @property
    def inside_blocks(self) -> int:
        """Of the job, that ran in them."""

    @property
    def ratio(self) -> float:
        """Best peer over fused."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A fused kernel of a pair that may be measured."""

    record: PairRecord
    """Its key, names, schedule and shape; no times yet."""
    source: FusedSource


def measuring(compiler: str, *parts: str) -> str:
    """Of a key: the compiler (its version and target), and what verifies and times, `parts` of the package too."""
    return canonical({"compiler": compiler, "sources": source_hash(PACKAGE, (*MEASURING_PARTS, *parts))})


def job_digest(be: Sequence[RoleSource]) -> str:
    """SHA-256 of the stages of a job, as kernels of their own."""
    from weft.generate.cuda.role.assemble import solo  # all templates come with it

    return digest("\0".join(solo(source, f"be{k}").sha256 for k, source in enumerate(be)))


def fused_digest(fused: FusedSource) -> str:
    """SHA-256 of everything that decides what runs."""
    return digest(repr(fused))


def cubin_digest(path: Path) -> str:
    """SHA-256 of machine code. OSError: it cannot be read."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def key_of(
    problem: Problem,
    be: Sequence[RoleSource],
    fused: FusedSource | None,
    *,
    gpu: str,
    driver: str,
    compiler: str,
    blocks: int = 0,
) -> PairKey:
    """The key of a fused kernel; without one that of `there is none`.

    Args:
        problem: LC's.
        be: the job's stages.
        fused: the kernel.
        gpu: its name.
        driver: `weft.tune.cuda_site.driver_version`.
        compiler: `Nvrtc.identity` and the architecture.
        blocks: that one launch may draw; 0: as many as it comes to.
    """
    kernel = "" if fused is None else fused_digest(fused)
    return PairKey(digest(problem.key), job_digest(be), kernel, blocks, gpu, driver, measuring(compiler))


def timed(record: PairRecord, times: Times, total: int, peers: Mapping[str, float], rounds: int) -> PairRecord:
    """A record with its times. `total`: blocks of the job; `peers`: their times for the same work.

    Raises:
        ValueError: no launches, or times that are none.
    """
    if times.launches < 1 or not (times.lc_us > 0 and times.be_us > 0 and times.inside_us > 0):
        raise ValueError(f"{times.launches} launches of {times.lc_us} us beside a job of {times.be_us} us")
    return replace(
        record,
        rounds=rounds,
        launches=times.launches,
        lc_us=times.lc_us / times.launches,
        be_us=times.be_us,
        fraction=times.be_us * times.inside_blocks / max(1, total) / times.lc_us,
        slowdown=times.inside_us / times.lc_us - 1.0,
        idle=times.idle_us / times.lc_us - 1.0,
        ratio=times.ratio,
        peers=tuple(sorted(peers.items())),
        started=time.time(),
    )


def refused(record: PairRecord, reason: str) -> PairRecord:
    """A record of a kernel that must not run, or of a pair of which none can be made."""
    return replace(record, declined=reason[:4000] or "declined", started=time.time())


def blocks_of(fraction: float, lc_us: float, be_us: float, total: int) -> int:
    """Blocks that take so large a part of LC's time when they run alone; at least one.

    Raises:
        ValueError: a time that is none.
    """
    if not (fraction > 0 and lc_us > 0 and be_us > 0):
        raise ValueError(f"{fraction} of {lc_us} us, of a job of {be_us} us")
    return max(1, min(total, round(total * fraction * lc_us / be_us)))


# The database.


def _text(key: PairKey) -> str:
    return canonical(asdict(key))


def keep(database: Database, records: Sequence[PairRecord]) -> None:
    """Keep records, all or none; of one key the newest counts."""
    database.keep(KIND, [(_text(r.key), record_to_json(r)) for r in records])


def known(database: Database) -> tuple[PairRecord, ...]:
    """The newest record of each key, oldest first. Rows of records that this version cannot read are left out."""
    return tuple(r for text, content in database.of_kind(KIND).items() if (r := _read(text, content)) is not None)


def lookup(database: Database, key: PairKey) -> PairRecord | None:
    """What was measured of exactly this kernel, on this GPU and driver."""
    text = _text(key)
    content = database.of_kind(KIND).get(text)
    return None if content is None else _read(text, content)


def _read(text: str, content: Json) -> PairRecord | None:
    try:
        found = record_from_json(content)
    except (ArtifactError, TypeError, ValueError):
        return None
    return found if _text(found.key) == text else None


def keep_timeline(database: Database, timeline: SmTimeline) -> None:
    """Keep when the roles of a pair's kernel ran; of one pair on one GPU the newest counts."""
    key = canonical([timeline.gpu, timeline.lc, timeline.be])
    database.keep(TIMELINE_KIND, [(key, timeline_to_json(timeline))])


def timelines(database: Database) -> tuple[SmTimeline, ...]:
    """The newest of each pair on each GPU. Rows that this version cannot read are left out."""
    found = []
    for content in database.of_kind(TIMELINE_KIND).values():
        with contextlib.suppress(ArtifactError):
            found.append(timeline_from_json(content))
    return tuple(found)


def newest(summaries: Iterable[PairSummary]) -> list[PairSummary]:
    """The last of each pair on a GPU with a driver: a matrix has room for one."""
    return list({(s.gpu, s.driver, s.lc, s.be): s for s in summaries}.values())


def of_gpu(database: Database, names: Sequence[str]) -> tuple[list[PairSummary], list[SmTimeline]]:
    """Pairs, and timelines of them, that the database has of a GPU named in one of these texts."""
    found = [s for s in summed_up(known(database)) if any(s.gpu and s.gpu in n for n in names)]
    return newest(found), [t for t in timelines(database) if any(t.gpu and t.gpu in n for n in names)]


def of_record(database: Database, record: CompileRecord) -> tuple[list[PairSummary], list[SmTimeline]]:
    """Those of the GPU that a plan was made for; none of a CPU."""
    return of_gpu(database, (record.device, *(value for _, value in record.environment)))


# The choice.


def front(records: Iterable[PairRecord], most: int = MOST_POINTS) -> tuple[PairRecord, ...]:
    """The kernels of a pair among which is chosen by the slack at hand, by rising slowdown; `do not fuse` besides.

    A kernel must be right, lose to no peer, and gain more than it costs.
    """
    return tuple(thinned([r for r in records if r.pays], most))


def _version(r: PairRecord) -> tuple[str, str, str, str]:
    return r.key.problem, r.key.job, r.key.driver, r.key.measuring


def summed_up(records: Iterable[PairRecord], *, all_versions: bool = False) -> tuple[PairSummary, ...]:
    """Each pair on each GPU, by name, from its newest version (LC problem, BE source, driver and what measures).

    With `all_versions` each version by itself, the newest last.
    """
    pairs: dict[tuple[str, str, str], dict[tuple[str, ...], list[PairRecord]]] = {}
    for r in sorted(records, key=lambda r: r.started):
        versions = pairs.setdefault((r.key.gpu, r.lc, r.be), {})
        versions.setdefault(_version(r), []).append(r)
    found = []
    for place in sorted(pairs):
        ordered = sorted(pairs[place].values(), key=lambda rows: rows[-1].started)
        found += [_summary(rows) for rows in (ordered if all_versions else ordered[-1:])]
    return tuple(found)


def _summary(rows: Sequence[PairRecord]) -> PairSummary:
    kernels = [r for r in rows if r.key.kernel] or list(rows)  # the verdict alone: it came without its kernels
    last, chosen = kernels[-1], front(kernels)
    right = [r for r in kernels if not r.declined]
    best = _best(kernels)
    reason = ""
    if not chosen:
        reason = last.declined if not right else _why_not(best or right[-1])
    return PairSummary(
        last.lc, last.be, last.key.gpu, last.key.driver, chosen, len(right), len(kernels) - len(right), reason, best
    )


def _best(rows: Sequence[PairRecord]) -> PairRecord | None:
    """The largest ratio to a best peer, of verdicts too; of what is wrong none."""
    return max(
        (r for r in rows if r.compared and not (r.declined and r.key.kernel)), key=lambda r: r.ratio, default=None
    )


def verdict(summary: PairSummary, of: PairRecord) -> PairRecord:
    """`do not fuse`, as a record of the pair: with the figures of the best kernel that was timed, and its peers.

    Args:
        summary: of the whole search.
        of: a record of it, whose pair, GPU and versions are the verdict's.

    Raises:
        ValueError: something of the pair pays.
    """
    if summary.kept:
        raise ValueError(f"{summary.lc} and {summary.be} pay: {summary.ratio:.3f} of the best peer")
    found = replace(of if summary.best is None else summary.best, key=replace(of.key, kernel="", blocks=0))
    return refused(replace(found, schedule=None, shape=None, cubin=""), f"do not fuse: {summary.reason}")


def _why_not(best: PairRecord) -> str:
    if best.ratio < 1.0:
        return f"{best.ratio:.3f} of the best peer ({best.best_peer[0] or 'a peer'})"
    if not best.compared:
        return f"no kernel was timed beside its peers; {best.ratio:.3f} of one after the other in a short run"
    if best.fraction <= best.slowdown:
        return f"gains {best.fraction:.3f} and costs {best.slowdown:.3f} of LC's time"
    return f"LC takes {1 + best.slowdown:.2f} times as long"


Measure = Callable[[Arm, int], PairRecord]
"""A kernel's record from so many interleaved rounds; one that is wrong or cannot run is `refused`."""


def study(
    database: Database,
    arms: Sequence[Arm],
    measure: Measure,
    *,
    rounds: int = ROUNDS,
    most_rounds: int = MOST_ROUNDS,
    least: int = 2,
    share: int = 2,
    budget: int | None = None,
) -> PairSummary | None:
    """Search the kernels of one pair by successive halving.

    What the database knows from as many rounds is not measured again, and every measurement is kept at once: when a
    search is cut off, the next one goes on from there. Where nothing pays, the verdict is kept, too. None: there are no
    arms.

    Args:
        database: where records are kept and looked up.
        arms: kernels of one pair on one GPU, the preferred ones first.
        measure: what takes the times.
        rounds: of the first measurement of a kernel.
        most_rounds: of the last one.
        least: so few are measured to the end.
        share: a step keeps one of so many.
        budget: the most rounds of all measurements together, with those that are known. The same search is not begun
            again: what was declined stays so.

    Raises:
        ValueError: arms of several pairs, or a record of another kernel than was asked for.
    """
    if len({(a.record.lc, a.record.be, *_version(a.record), a.record.key.gpu) for a in arms}) > 1:
        raise ValueError("arms of several pairs, or for several GPUs")
    told = {r.key: r for r in known(database)}
    mine: dict[PairKey, PairRecord] = {}

    def one(arm: Arm, effort: int) -> PairRecord | None:
        key = arm.record.key
        found = mine.get(key) or told.get(key)
        if found is None or not (found.declined or found.rounds >= effort):
            found = measure(arm, effort)
            if found.key != key:
                raise ValueError(f"a record of another kernel than {arm.record.schedule} was measured")
            keep(database, [found])
        mine[key] = found
        return None if found.declined else found

    every = list({a.record.key: a for a in arms}.values())
    search = digest(
        canonical([*sorted(_text(a.record.key) for a in every), rounds, most_rounds, least, share, budget or 0])
    )
    rows = sorted((told[a.record.key] for a in every if a.record.key in told), key=lambda r: r.started)
    if rows and search in database.of_kind(SEARCH_KIND):
        return _summary(rows)
    halve(every, one, effort=rounds, most_effort=most_rounds, least=least, share=share, budget=budget)
    if not mine:
        return None
    found = _summary(sorted(mine.values(), key=lambda r: r.started))
    if not found.kept and most_rounds > rounds:
        told_now = verdict(found, every[0].record)
        before = told.get(told_now.key)
        if before is None or repr(replace(before, started=told_now.started)) != repr(told_now):  # a NaN is the same
            keep(database, [told_now])
    database.keep(SEARCH_KIND, [(search, len(mine))])
    return found


def read_rows(text: str) -> tuple[PairRecord, ...]:
    """Records from lines of JSON, as `write_rows` makes them: from a machine whose database is another.

    Raises:
        ArtifactError: a line is no record [W401].
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            raise ArtifactError(
                where=f"line {number}", problem="no JSON", remedy="give what `weft pairs --export` wrote"
            ) from None
        found.append(record_from_json(data))
    return tuple(found)


def write_rows(records: Iterable[PairRecord]) -> str:
    """Lines of JSON."""
    return "".join(canonical(record_to_json(r)) + "\n" for r in records)
