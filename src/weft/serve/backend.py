"""What runs batches: the interface that a served model needs of it, and the job that it is given."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, final

import numpy as np

from weft.errors import WeftError
from weft.ir.types import Array
from weft.serve.query import Query
from weft.serve.signature import Signature


@dataclass(frozen=True, slots=True)
class JobState:
    """How a best-effort job beside a model stands, and what became of the model's batches beside it."""

    name: str
    runs: bool
    """False: it is set aside, as the worker that had it died."""
    done: bool = False
    passes: int = 0
    """That are done; of a process its units."""
    queries: int = 0
    """Batches that were answered."""
    late: int = 0
    """Behind the bundle's target."""
    cap: int = -1
    """The highest plan variant that is allowed now."""
    variants: Mapping[str, int] = field(default_factory=dict)
    """Batches by the plan variant that they ran by."""

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """As a worker tells it; KeyError, TypeError, ValueError or AttributeError where it tells something else."""
        passes, queries, late, cap = (int(told[k]) for k in ("passes", "queries", "late", "cap"))
        variants = {str(k): int(n) for k, n in told["variants"].items()}
        return cls(str(told["job"]), True, bool(told["done"]), passes, queries, late, cap, variants)


class Keeper(Protocol):
    """Whom a backend tells; called from its threads, with no lock of the backend held."""

    def finished(self, job: Job, outputs: Sequence[Array], compute_s: float) -> None:
        """Outputs of the whole batch, in memory that is somebody else's afterwards."""
        ...

    def failed(self, job: Job, error: WeftError) -> None:
        """The plan raised."""
        ...

    def lost(self, job: Job, *, began: bool) -> None:
        """The worker died before it had answered; `began`: it may have been at work on this one."""
        ...

    def changed(self) -> None:
        """The backend became ready, or ceased to be."""
        ...


class Backend(Protocol):
    """Runs batches in the order in which it gets them."""

    @property
    def signature(self) -> Signature:
        """Of the model."""
        ...

    @property
    def problem(self) -> str:
        """Why it cannot run anything now; empty: it can."""
        ...

    @property
    def gone(self) -> bool:
        """Whether it could not be brought back for so long that nobody should wait."""
        ...

    @property
    def restarts(self) -> int:
        """How often a worker was started in place of one that died."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether one of it ends before the next begins: what runs beside the model is not there twice."""
        ...

    @property
    def job(self) -> JobState | None:
        """What runs beside the model; None: nothing ever does."""
        ...

    @property
    def stands_by(self) -> bool:
        """Whether a second process would take over at once."""
        ...

    def start(self, keeper: Keeper) -> None:
        """Returns when it is ready.

        Raises:
            WeftError: it cannot be.
        """
        ...

    def acquire(self) -> bool:
        """Wait until there is room for a batch, which is the caller's then; False: closed."""
        ...

    def release(self) -> None:
        """The room of the caller, unused."""
        ...

    def run(self, job: Job) -> None:
        """Take the room that was acquired; the keeper is told once, perhaps before this returns."""
        ...

    def watch(self, now: float) -> None:
        """Called some times a second: ends what hangs."""
        ...

    def close(self) -> None:
        """End. Jobs that are under way may get no answer. Idempotent."""
        ...


@final
class Job:
    """One batch."""

    __slots__ = ("pack_s", "plan", "queries", "rows", "started")

    def __init__(self, queries: Sequence[Query], signature: Signature) -> None:
        self.queries = tuple(queries)
        self.rows = sum(q.rows for q in queries)
        self.plan = signature.plan_for(self.rows)
        self.started = time.monotonic()
        self.pack_s = 0.0

    def waited_s(self) -> float:
        """Of its oldest query, until now."""
        return max(0.0, time.monotonic() - min((q.arrived for q in self.queries), default=self.started))

    def pack(self, places: Sequence[Array]) -> None:
        """Write the inputs, one query behind the other; what is left of the plan's batch repeats the last row."""
        began = time.perf_counter()
        for i, place in enumerate(places):
            at = 0
            for query in self.queries:
                place[at : at + query.rows] = query.arrays[i]
                at += query.rows
            if at < len(place):
                place[at:] = place[at - 1]
        self.pack_s = time.perf_counter() - began

    def split(self, outputs: Sequence[Array]) -> list[tuple[Array, ...]]:
        """The outputs of each query, in memory of their own."""
        found, at = [], 0
        for query in self.queries:
            found.append(tuple(np.array(x[at : at + query.rows]) for x in outputs))
            at += query.rows
        return found
