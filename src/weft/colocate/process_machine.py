"""A machine whose job runs in another process: queries as that machine has them, the job by grants.

Kernels of two processes take the GPU in turn, unless the driver shares it (MPS); so nothing here is in the order of a
stream. Where a policy puts the job in front of queries (`kernels`), these are held back until its segments have ended,
or have taken far longer than they do alone: what is wrong with the job is not to keep a query.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import final

from weft.colocate.live import Ended, JobWork, Machine
from weft.colocate.process_job import ProcessJob
from weft.colocate.process_words import Confinement
from weft.kernels.scheduling import NEVER, OFF, Query

PATIENCE = 8
"""Times as long as segments take alone that queries wait for them."""
PATIENCE_NS = 10_000_000
"""And so much more."""
WHOLE_GPU = Confinement()
_NAP_NS = 200_000


@final
class ProcessMachine:
    """A `Machine` for one run of a policy."""

    def __init__(
        self, machine: Machine, job: ProcessJob, beside: Mapping[str, Sequence[Confinement | None]]
    ) -> None:  # fmt: skip
        """Queries of `machine`, which has no job, beside `job`, whose times were measured.

        `beside`: by model and variant, where the job runs beside its queries; None: it is paused while they run.
        """
        self._machine, self._job, self._beside = machine, job, beside
        self._running: Confinement | None = None
        """Where the job works now."""
        self._owned = False
        """It works for the queries in flight, not because it was told to."""
        self._flying = 0
        self._held: deque[tuple[Query, int]] = deque()
        """Queries that wait for segments."""
        self._patience_ns = 0
        """Until when they do; 0: nothing was granted."""

    def now_ns(self) -> int:
        """See `Machine`."""
        return self._machine.now_ns()

    def send(self, times_ns: Sequence[int], begin_ns: int) -> None:
        """See `Machine`."""
        self._machine.send(times_ns, begin_ns)

    def sent(self) -> int:
        """See `Machine`."""
        return self._machine.sent()

    def sent_ns(self, number: int) -> int:
        """See `Machine`."""
        return self._machine.sent_ns(number)

    def launch(self, query: Query, variant: int) -> None:
        """See `Machine`."""
        self._held.append((query, variant))
        self._launch_held()

    def ended(self) -> Sequence[Ended]:
        """See `Machine`."""
        self._launch_held()
        found = self._machine.ended()
        self._flying -= len(found)
        if self._owned and not self._flying and not self._held:
            self._pause()
        return found

    def set_form(self, form: int) -> None:
        """See `Machine`.

        Raises:
            ValueError: a variant beside which the job does not run.
        """
        self._pause()
        if form == OFF:
            return
        where = WHOLE_GPU if form == 0 else next(iter(self._beside.values()))[form]
        if where is None:
            raise ValueError(f"variant {form} has no form of the job")
        self._go(where)

    def kernels(self, us: float) -> None:
        """See `Machine`: whole segments, at least one."""
        self._pause()
        job = self._job
        if job.is_done() or not job.is_ready:
            return
        count = max(1, round(us / job.segment_us))
        job.grant(count)
        self._patience_ns = self.now_ns() + PATIENCE_NS + PATIENCE * round(max(count * job.segment_us, us) * 1e3)

    def kernels_run(self) -> bool:
        """See `Machine`: not for longer than queries wait for them."""
        if self._patience_ns and (not self._job.works or self.now_ns() > self._patience_ns):
            self._job.pause()
            self._patience_ns = 0
        return self._patience_ns > 0

    def job_is_done(self) -> bool:
        """See `Machine`."""
        return self._job.is_done()

    def pause(self, until_ns: int) -> None:
        """See `Machine`."""
        if not self._held and not self._patience_ns:
            self._machine.pause(until_ns)

    def rest_ns(self) -> int:
        """See `Machine`: a process feeds itself."""
        return NEVER

    def close_job(self) -> JobWork:
        """See `Machine`: what does not end is killed, and the run stands."""
        self._pause()
        self._machine.close_job()
        job = self._job
        until = self.now_ns() + PATIENCE_NS * 10 + PATIENCE * round(job.kernel_us * 1e3)
        while job.works:
            if self.now_ns() > until:
                job.kill()
                break
            self._machine.pause(self.now_ns() + _NAP_NS)
        return JobWork(job.blocks(), job.work_us())

    def give_back(self) -> None:
        """See `Machine`."""
        self._machine.give_back()

    def _launch_held(self) -> None:
        while self._held and not self.kernels_run():
            query, variant = self._held.popleft()
            where = self._beside[query.model][variant]
            if self._owned and where != self._running:
                self._pause()
            if where is not None and self._running is None:
                self._go(where)
                self._owned = True
            self._machine.launch(query, variant)
            self._flying += 1

    def _go(self, where: Confinement) -> None:
        self._job.go(where)
        self._running = where

    def _pause(self) -> None:
        self._job.pause()
        self._running, self._owned, self._patience_ns = None, False, 0
