"""A best-effort job in another process: units of a user's Python function, granted by words that both share.

    job = ProcessJob(spec, folder, held=held, progress=resume(path, spec))
    job.measure()                       # real units, alone: they count
    job.go(Confinement(part=96)); job.pause(); job.grant(3)
    job.finish()                        # the unit under way is done, and saved
    save_progress(path, job.progress())

Whatever the process does, nothing here waits for it but `measure` and `finish`: it may raise, hang or die, and is
started again by a process of its own (`process_supervisor`). Units are counted exactly: what was not saved of a job
with a state is done again, and counts once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import final

from weft.colocate.job import JobError, digest
from weft.colocate.process_supervisor import STOP_S
from weft.colocate.process_words import BYTES, FREE, Confinement, ProcessTask, Words
from weft.colocate.told_process import ended, started
from weft.device.nameless import nameless
from weft.errors import ArtifactError, DeviceError
from weft.kernels.scheduling import JobProgress, JobSpec

COMMAND = (sys.executable, "-m", "weft.colocate.process_supervisor")
START_S = 300.0
"""Within which a process has imported what it needs and loaded its state."""
MEASURED = 7
"""Units that times are measured by."""
_LOOK_S = 0.0005


@final
class ProcessJob:
    """A job's process, as the thread that launches queries knows it."""

    def __init__(
        self, spec: JobSpec, folder: Path, *, held: ExitStack, progress: JobProgress | None = None,
        device: str = "cuda", command: Sequence[str] = COMMAND, start_s: float = START_S,
    ) -> None:  # fmt: skip
        """Start the process, where the job was left, and wait until it can work; it does nothing before it may.

        Args:
            spec: of kind `process`.
            folder: where its job.toml lies.
            held: ends the process.
            progress: as `weft.colocate.job.resume` gives it; None: at the begin.
            device: `cuda` or `cpu`.
            command: of what starts it.
            start_s: seconds that it may take to be ready.

        Raises:
            JobError: progress of another job, or behind the last unit; or its file or state cannot be taken [W018].
            DeviceError: the process cannot be started, or is not ready in time [W301].
        """
        if spec.kind != "process":
            raise JobError(where=spec.name, key="kind", problem="it is of no process", remedy="give such a job")
        self.name, self._spec, self._digest = spec.name, spec, digest(spec)
        if progress is not None and progress.job != self._digest:
            remedy = "resume it with `weft.colocate.job.resume`"
            raise JobError(where=spec.name, key="progress", problem="it is of another job", remedy=remedy)
        first = 0 if progress is None else progress.passes
        if spec.passes and first > spec.passes:
            problem = f"it is behind the last of {spec.passes} units"
            raise JobError(where=spec.name, key="progress", problem=problem, remedy="remove the file to begin anew")
        fd = nameless(BYTES, "weft-job")
        with contextlib.ExitStack() as own:
            own.callback(os.close, fd)
            self._words = Words(fd)
            task = ProcessTask(
                fd, str((folder / spec.file).resolve()), spec.function, device, first, spec.passes, self._digest,
                str((folder / spec.progress).resolve()) if spec.progress else "", self._states(folder, held),
                spec.save_s or 60.0, spec.hang_s or 30.0, spec.memory_bytes, start_s,
            )  # fmt: skip
            for name in ("units", "saved"):
                self._words.say(name, first)
            self._process = started(command, task, fd, "a job's process")
        self._looked, self._gone = 0.0, False
        held.callback(self._close)
        self._await(lambda: self.is_ready or self.is_done(), start_s, "is not ready")
        self._units, self._work_ns = self._now()

    # -- what it may do

    def go(self, where: Confinement) -> None:
        """From now on it works, there."""
        self._words.say("part", where.part)
        self._words.say("duty", where.duty)
        self._words.say("granted", FREE)

    def pause(self) -> None:
        """It begins no further segment; one that is under way goes on to its end."""
        self._words.say("granted", 0)

    def grant(self, segments: int) -> None:
        """So many segments on the whole GPU and no more. It was paused before."""
        words = self._words
        words.say("part", 0)
        words.say("duty", Confinement().duty)
        words.say("granted", words.word("begun") + segments)

    @property
    def is_ready(self) -> bool:
        """Whether its process is there and can work."""
        words = self._words
        return bool(words.word("alive")) and words.word("ready") == words.word("lives") > 0

    @property
    def works(self) -> bool:
        """Whether a segment is under way, or may begin."""
        words = self._words
        begun, ended = words.word("begun"), words.word("ended")
        return self.is_ready and not words.word("over") and (begun > ended or ended < words.word("granted"))

    def kill(self) -> None:
        """Its process is ended as it stands, and another one started: it does not answer."""
        self._words.say("kill", self._words.word("lives"))

    # -- what is known

    @property
    def kernel_us(self) -> float:
        """The longest segment, alone."""
        return max(1, self._words.word("longest")) / 1e3

    @property
    def block_us(self) -> float:
        """A unit, alone."""
        return max(1, self._words.word("unit")) / 1e3

    @property
    def segment_us(self) -> float:
        """A segment in the mean, alone."""
        return self.block_us / max(1, self._words.word("segments"))

    @property
    def units(self) -> int:
        """That are done, over all runs."""
        return self._words.word("units")

    @property
    def lives(self) -> int:
        """Processes that were started."""
        return self._words.word("lives")

    @property
    def lost(self) -> int:
        """Units that were done, were not saved when a process died, and are done again."""
        return self._words.word("lost")

    @property
    def pid(self) -> int:
        """Of its process; 0: there is none."""
        return self._words.word("pid") if self._words.word("alive") else 0

    def is_done(self) -> bool:
        """Whether there is nothing more to do: all units are done, or it was given up. Never waits."""
        words = self._words
        if words.word("over") or words.word("failed") or 0 < self._spec.passes <= words.word("units"):
            return True
        if (now := time.monotonic()) - self._looked > 0.1:  # a call of the system
            self._looked, self._gone = now, self._process.poll() is not None
        return self._gone

    @property
    def failure(self) -> str:
        """Why it was given up; empty: it was not."""
        words = self._words
        if words.word("failed"):
            return words.told()
        status = self._process.poll()
        if status is None or words.word("over") or words.word("stop"):
            return ""
        return f"what starts its process ended with {status}"

    def anew(self) -> ProcessJob:
        """The same job for another run: what is counted begins here."""
        self._units, self._work_ns = self._now()
        return self

    def blocks(self) -> int:
        """Units that were done since `anew`; those that will be done again do not count."""
        return max(0, self._now()[0] - self._units)

    def work_us(self) -> float:
        """Work since `anew`, in its time alone: that of the unit under way counts by its segments."""
        return max(0, self._now()[1] - self._work_ns) / 1e3

    def progress(self) -> JobProgress:
        """How far the job has come: units that are done or, of a job with a state, were saved."""
        return JobProgress(self._digest, self._words.kept(), 0, 0)

    # -- what waits

    def measure(self) -> None:
        """Let it do some units alone, which count, to know how long a unit and its segments take.

        Raises:
            JobError: it raised, or a segment takes longer than its job.toml allows [W018].
            DeviceError: its process is gone, or does not get on [W301].
        """
        words, before = self._words, self.units
        if self.is_done() and not self.failure:
            return  # as it was left: nothing of it runs any more
        words.say("measure", 1)
        self.go(Confinement())
        try:
            self._await(lambda: self.units >= before + MEASURED or self.is_done(), START_S, "has done no units")
        finally:
            self.pause()
            words.say("measure", 0)
        self._await(lambda: not self.works, START_S, "does not pause")
        if failure := self.failure:
            raise self._failed(failure)
        if not words.word("unit"):
            raise DeviceError(problem=f"{self.name}: no unit was left to measure it by")
        if self._spec.segment_us and self.kernel_us > self._spec.segment_us:
            problem = f"a segment takes {self.kernel_us:.0f} us alone, at most {self._spec.segment_us:g} are allowed"
            remedy = "let the function yield more often, or raise it"
            raise JobError(where=self.name, key="segment_us", problem=problem, remedy=remedy)
        self.anew()

    def finish(self) -> None:
        """The unit under way is done, and all is saved.

        Raises:
            JobError: it raised, again and again; progress is what was saved [W018].
            ArtifactError: state or progress cannot be written [W401].
            DeviceError: its process was given up, or does not end [W301].
        """
        failure = self.failure
        self._words.say("stop", 1)
        if not ended(self._process, STOP_S + 5.0):
            raise DeviceError(problem=f"{self.name}: its process does not end")
        if failure or (failure := self._words.told() if self._words.word("failed") else ""):
            raise self._failed(failure)
        if self._words.word("unsaved"):
            text = self._words.told(unsaved=True)
            raise ArtifactError(where=self.name, problem=text[:400], remedy="make room, or choose another place")

    def _failed(self, text: str) -> JobError | DeviceError:
        if self._words.word("raised"):
            return JobError(where=self.name, key="file", problem=text[:400], remedy="mend the function")
        return DeviceError(problem=f"{self.name}: {text[:400]}")

    def _await(self, over: Callable[[], bool], limit_s: float, what: str) -> None:
        until = time.monotonic() + limit_s
        while not over():
            if (failure := self.failure) and not over():
                raise self._failed(failure)
            if time.monotonic() > until:
                raise DeviceError(problem=f"{self.name}: its process {what} in {limit_s:g} s")
            time.sleep(_LOOK_S)
        if (failure := self.failure) and not self._words.word("over"):
            raise self._failed(failure)

    def _now(self) -> tuple[int, int]:
        """Units, and work in nanoseconds, over all runs."""
        words = self._words
        units, unit = words.word("units"), words.word("unit")
        return units, units * unit + (words.word("partial") if unit else 0)

    def _states(self, folder: Path, held: ExitStack) -> str:
        """Where its own state is kept: beside its progress, or where that is not kept for this session alone."""
        if not self._spec.progress:
            return held.enter_context(tempfile.TemporaryDirectory(prefix="weft-job-"))
        path = (folder / f"{self._spec.progress}.states").resolve()
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            problem = f"no folder can be made for its state: {error.strerror}"
            raise ArtifactError(where=path.name, problem=problem, remedy="choose another place") from None
        return str(path)

    def _close(self) -> None:
        self._words.say("stop", 1)
        ended(self._process, STOP_S + 5.0)
