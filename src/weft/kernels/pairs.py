"""What was measured of pairs: a latency-critical kernel (LC) with a best-effort job (BE) in its CTAs.

LC pays a slowdown s, its time in the fused kernel over that alone less 1, and BE gains a fraction f, the time that the
work done meanwhile takes alone, over LC's alone. Both are of one launch of LC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import cast

from weft.errors import ArtifactError
from weft.kernels.codec import Json, schedule_from_json, schedule_to_json
from weft.kernels.colocation import FusionShape
from weft.kernels.dataclass_json import from_json, to_json
from weft.kernels.source import Schedule


@dataclass(frozen=True, slots=True)
class PairKey:
    """What a measurement of a pair holds for: another text, job, GPU, driver or measuring is another key."""

    problem: str
    """SHA-256 of the key of LC's problem."""
    job: str
    """SHA-256 of the sources of BE's stages, in order."""
    kernel: str
    """SHA-256 of the fused text and its compiler options: LC's schedule, BE's text and the shape are in it.
    Empty: of no kernel, but the verdict `do not fuse` on the pair."""
    blocks: int
    """BE blocks that one launch may draw; 0: as many as it comes to."""
    gpu: str
    driver: str
    """Version of the GPU's driver."""
    measuring: str
    """The compiler, and a hash of the sources that verify and time pairs."""


@dataclass(frozen=True, slots=True)
class PairRecord:
    """One fused kernel of a pair, measured in one interleaved run with its peers. Times are medians in microseconds."""

    key: PairKey
    lc: str
    """Name for people, as `vgg16/conv3x3-64-224`."""
    be: str
    """Name for people, as `mriq`."""
    schedule: Schedule | None = None
    """Of LC in the fused kernel; None: no kernel could be made of the pair."""
    shape: FusionShape | None = None
    cubin: str = ""
    """SHA-256 of the fused kernel's machine code; empty: it was not compiled."""
    rounds: int = 0
    """Interleaved rounds that the medians are of."""
    launches: int = 0
    """Of LC beside one run of the job."""
    lc_us: float = math.nan
    """One launch of the fastest LC kernel there is, alone."""
    be_us: float = math.nan
    """The whole job alone."""
    fraction: float = 0.0
    """f: BE time gained in a launch over LC's alone."""
    slowdown: float = 0.0
    """s: time of a fused launch over LC's alone, less 1."""
    idle: float = math.nan
    """The same with nothing to draw; NaN: it was not measured."""
    ratio: float = math.nan
    """Time of the best peer over that of the fused form, the whole job included; above 1: it won."""
    peers: tuple[tuple[str, float], ...] = ()
    """Times of the peers for the same work: `serial`, `streams`, `parts:96`, ..."""
    declined: str = ""
    """Why it must not run, or did not; empty: verified and timed."""
    started: float = 0.0
    """Seconds since the epoch."""

    @property
    def compared(self) -> bool:
        """Whether it was timed beside its peers; otherwise `ratio` is over one after the other, from a short run."""
        return bool(self.peers)

    @property
    def best_peer(self) -> tuple[str, float]:
        """Name and time of the fastest peer; ("", NaN): there is none."""
        return min(self.peers, key=lambda p: p[1], default=("", math.nan))

    @property
    def pays(self) -> bool:
        """Whether it may be chosen: right, no slower than its best peer, and more gained than lost."""
        return not self.declined and self.compared and self.ratio >= 1.0 and self.fraction > self.slowdown


@dataclass(frozen=True, slots=True)
class PairSummary:
    """A pair on one GPU: what of it is kept."""

    lc: str
    be: str
    gpu: str
    driver: str
    front: tuple[PairRecord, ...]
    """What pays, by rising slowdown and rising fraction; `do not fuse` stands in front of all and is not in here."""
    measured: int
    """Fused kernels that were verified and timed."""
    declined: int
    """Those that were not."""
    reason: str = ""
    """Why nothing is kept; empty where something is."""
    best: PairRecord | None = None
    """The best that was timed beside its peers, kept or not; None: nothing was."""

    @property
    def kept(self) -> bool:
        """Whether anything pays."""
        return bool(self.front)

    @property
    def ratio(self) -> float:
        """Of the best that is kept over its best peer; 1.0: the pair is not fused."""
        return max((p.ratio for p in self.front), default=1.0)


def geometric_mean(summaries: tuple[PairSummary, ...]) -> float:
    """Of the ratios, pairs that are not fused at 1.0; NaN of none."""
    if not summaries:
        return math.nan
    return math.exp(math.fsum(math.log(s.ratio) for s in summaries) / len(summaries))


def record_to_json(record: PairRecord) -> Json:
    """All fields; the schedule by its stored names."""
    schedule = None if record.schedule is None else schedule_to_json(record.schedule)
    return dict(cast("Mapping[str, Json]", to_json(record))) | {"schedule": schedule}


def record_from_json(data: Json) -> PairRecord:
    """Inverse of `record_to_json`. Fields of a shape that came later have their defaults.

    Raises:
        ArtifactError: not such a value, or a number that cannot be [W401].
    """
    if not isinstance(data, Mapping) or not {"schedule", "shape"} <= data.keys():
        raise _bad("no record")
    later = {"idle": math.nan}
    plain = from_json(_Plain, {k: v for k, v in {**later, **data}.items() if k not in ("schedule", "shape")})
    found = PairRecord(
        schedule=None if data["schedule"] is None else schedule_from_json(data["schedule"]),
        shape=None if data["shape"] is None else _shape(data["shape"]),
        **{f.name: getattr(plain, f.name) for f in fields(plain)},
    )
    times = (found.ratio, found.lc_us, found.be_us, 1.0 + found.slowdown)
    if not found.declined and not (all(0 < x < math.inf for x in times) and 0 <= found.fraction < math.inf):
        raise _bad("a time that cannot be")
    return found


def _shape(data: Json) -> FusionShape:
    if not isinstance(data, Mapping):
        raise _bad("no shape")
    later = {f.name: f.default for f in fields(FusionShape) if f.name not in data and f.default is not MISSING}
    return from_json(FusionShape, {**data, **cast("Mapping[str, Json]", later)})


@dataclass(frozen=True, slots=True)
class _Plain:
    """`PairRecord` without what is read otherwise."""

    key: PairKey
    lc: str
    be: str
    cubin: str
    rounds: int
    launches: int
    lc_us: float
    be_us: float
    fraction: float
    slowdown: float
    idle: float
    ratio: float
    peers: tuple[tuple[str, float], ...]
    declined: str
    started: float


def _bad(what: str) -> ArtifactError:
    return ArtifactError(problem=f"malformed record of a pair: {what}", remedy="measure the pair again")
