"""A network as the best-effort job of a machine: stages that are launched one after the other, counted exactly.

    job = NetworkGpuJob(spec, plan, feed, device, files=len(feed.files), progress=resume(path, spec))
    form = job.form(stream)             # how a machine runs it there
    us = job.plain(stream, 0.0)         # the next stage; 0: no inputs are there, or all passes are done
    job.finish()                        # all that was launched has ended, and its results are written
    save_progress(path, job.progress())

A stage is a few steps of the network's plan, recorded as a graph. It is what nothing stops, and the unit in which the
job is counted: work is the time that the launched stages take alone. Inputs are copied in front of the first stage of
an inference, results behind its last. There is no persistent kernel and no counter on the device, so the job runs in
the forms that launch kernels plainly. Knows no framework: what launches and copies is a `StagedNetwork`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from weft.colocate.gpu_machine import AHEAD, Form
from weft.colocate.inference_feed import Feed
from weft.colocate.job import JobError, digest
from weft.device.cuda.dispatch import Queue
from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.ir.declined import Declined
from weft.kernels.scheduling import JobProgress, JobSpec

LIMIT_NS = 5_000_000_000
"""Until ends that have happened are seen."""
APART_AHEAD = 2
"""Stages that are queued where queries wait for them: the second hides the launch of the next."""


class StagedNetwork(Protocol):
    """A network's plan as stages, recorded on streams, all of them in the same memory."""

    @property
    def stage_us(self) -> Sequence[float]:
        """Of each stage, alone on the whole GPU."""
        ...

    @property
    def base(self) -> int:
        """A stream that it is recorded on, with the whole GPU."""
        ...

    def add(self, stream: int) -> bool:
        """Record it on a stream, unless it is; whether it was now: values of an inference under way are lost then.

        Raises:
            DeviceError: the GPU refuses it [W301, W302].
        """
        ...

    def launch(self, stage: int, stream: int) -> None:
        """A stage on a stream: as it was recorded there, or else on `base`."""
        ...

    def fill(self, places: Sequence[int], stream: int) -> None:
        """Copy inputs from these addresses of the host, in the order of a stream."""
        ...

    def fetch(self, places: Sequence[int], stream: int) -> None:
        """Copy results to these addresses of the host, in the order of a stream."""
        ...

    def wait(self) -> None:
        """Until all that was put on streams has ended."""
        ...

    def fits(self, facts: GpuFacts, sms: int) -> Declined | None:
        """Why it cannot run on so many multiprocessors; None: it can."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place between stages."""

    inference: int
    """Since the run began."""
    stage: int


@final
class NetworkGpuJob:
    """A network as a machine knows it (`weft.colocate.gpu_machine.Job`)."""

    def __init__(
        self, spec: JobSpec, network: StagedNetwork, feed: Feed, device: Queue, *, files: int,
        progress: JobProgress | None = None,
    ) -> None:  # fmt: skip
        """Where it was left: the stages before are run again by the first `anew`, and count for nothing.

        Args:
            spec: of kind `network`.
            network: its plan.
            feed: whose inferences begin where `progress` says.
            device: events of the machine that runs it.
            files: inputs of a pass.
            progress: as `weft.colocate.job.resume` gives it; None: at the begin.

        Raises:
            JobError: the progress of another job, or behind the last input [W018].
        """
        self.name, self._digest, self._files = spec.name, digest(spec), files
        self.network, self._feed, self._device = network, feed, device
        self._stages = len(network.stage_us)
        self.kernel_us = max(network.stage_us)
        self.block_us = sum(network.stage_us) / self._stages
        first = first_inference(spec, files, progress)
        self._first, self._left = first, spec.passes * files - first
        """Number of the first inference, over all passes; inferences that are left, where there is an end."""
        self._ends = spec.passes > 0
        # of another plan there may be fewer stages: then the inference begins anew
        stage = progress.blocks if progress is not None and progress.blocks < self._stages else 0
        self._next = self._ended = Position(0, stage)
        self._dirty = stage > 0
        """Values of the inference under way are to be computed anew."""
        self._rehearsing = False
        self._failed: JobError | ArtifactError | None = None
        """Why it begins no further inference."""
        self._stream = 0
        """Of the stage that was launched last."""
        self._behind = device.event()
        self._open: deque[tuple[int, int]] = deque()
        """Inferences that were launched to their ends, and the events behind them."""
        self._pool: list[int] = []

    # -- of the machine

    def arm(self, stream: int, *, duty: int, period_ns: int) -> None:  # noqa: ARG002 - nothing can be armed
        """A network has no persistent kernel. Raises ValueError."""
        raise ValueError(f"{self.name} is a network: nothing of it draws")

    def stop(self, stream: int) -> None:  # noqa: ARG002 - nothing runs that is told
        """A network is stopped by launching no further stage. Raises ValueError."""
        raise ValueError(f"{self.name} is a network: no further stage is launched, and that is all")

    def plain(self, stream: int, us: float) -> float:
        """See `Job`: the next stage, and further ones as long as they fit.

        Behind an input that cannot be read, or results that cannot be written, there is none: `finish` tells.

        Raises:
            DeviceError: the GPU reports a fault [W302].
        """
        self._poll()
        put = 0.0
        while True:
            stage_us = self.network.stage_us[self._next.stage]
            if put and put + stage_us > us:
                break
            if not self._launch(stream):
                break
            put += stage_us
        if put:
            self._device.record(self._behind, stream)
        return put

    def blocks(self) -> int:
        """See `Job`: there is no persistent kernel. Nothing of it runs: what was launched has ended."""
        self._poll()
        if not self._rehearsing and not self._open:
            self._ended = self._next
        return 0

    def is_done(self) -> bool:
        """See `Job`: the last stage of the last pass was launched, or nothing more can be."""
        over = self._failed is not None or (self._ends and self._next.inference >= self._left)
        return over and not self._rehearsing

    def anew(self) -> NetworkGpuJob:
        """The same job for another run. Nothing of it may run: it is made to stand where it was left.

        Its next inputs are waited for, so that no run passes while the first of them are read. What fails ends the job:
        see `plain`.

        Raises:
            DeviceError: nothing comes [W301].
        """
        if not self._rehearsing and not self.is_done():
            try:
                self._feed.wait_ready(self._next.inference)
            except (JobError, ArtifactError) as error:
                self._failed = error
                return self
            if self._dirty:
                self._dirty = False
                self._again()
        return self

    # -- of the session

    def form(self, stream: int, *, apart: bool = False) -> Form:
        """How a machine runs it on a stream: see `Form.apart`. Nothing of it may run.

        Raises:
            DeviceError: the GPU refuses it [W301, W302].
        """
        if self.network.add(stream):
            self._dirty = True
        return Form(stream, None, ahead=APART_AHEAD if apart else AHEAD, apart=apart)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Stages run meanwhile, always on the same inputs, and count for nothing: to measure by."""
        kept, self._next, self._rehearsing = self._next, Position(0, 0), True
        try:
            yield
        finally:
            self.network.wait()
            self._next, self._rehearsing, self._dirty = kept, False, True

    @property
    def inferences(self) -> int:
        """That were launched to their ends since the run began."""
        return self._next.inference

    def progress(self) -> JobProgress:
        """How far the job has come: exact where nothing of it runs. `stage` is the input, `blocks` its stages.

        What has ended counts once its results are written.
        """
        ended, written = self._ended, self._feed.written
        if written < ended.inference:
            ended = Position(written, 0)
        passes, file = divmod(self._first + ended.inference, self._files)
        return JobProgress(self._digest, passes, file, ended.stage)

    def finish(self) -> None:
        """Wait until all that was launched has ended and its results are written.

        Raises:
            JobError: an input cannot be read; all before it counts [W018].
            ArtifactError: results cannot be written; progress is what was [W401].
            DeviceError: the GPU reports a fault, or the results' process says nothing [W301, W302].
        """
        self.network.wait()
        until = self._device.now_ns() + LIMIT_NS
        while self._open and self._device.now_ns() < until:  # what has happened is seen a moment later
            self._poll()
            self._device.sleep(20_000)
        self.blocks()
        try:
            self._feed.finish()
        except BaseException:
            self._ended = min(self._ended, Position(self._feed.written, 0))
            raise
        if self._failed is not None:
            raise self._failed

    # -- stages

    def _launch(self, stream: int) -> bool:
        """The next stage; False: there is nothing to launch now."""
        network, feed, stage = self.network, self._feed, self._next.stage
        number = -1 if self._rehearsing else self._next.inference
        if stage == 0 and number >= 0 and not self._may_begin(number):
            return False
        if self._stream not in (0, stream):
            self._device.wait(stream, self._behind)
        self._stream = stream
        if stage == 0:
            network.fill(feed.inputs(number), stream)
        network.launch(stage, stream)
        if stage + 1 < self._stages:
            self._next = Position(self._next.inference, stage + 1)
            return True
        if places := feed.results(number):
            network.fetch(places, stream)
        if number >= 0:
            event = self._pool.pop() if self._pool else self._device.event()
            self._device.mark(event, stream)
            self._open.append((number, event))
        # last: an interrupt before leaves an inference that is done again, none that counts without its results
        self._next = Position(self._next.inference + 1, 0)
        return True

    def _may_begin(self, number: int) -> bool:
        """Whether the inference is the job's and ready; what fails ends the job, and no query."""
        try:
            return not self.is_done() and self._feed.is_ready(number)
        except (JobError, ArtifactError) as error:
            self._failed = error
            return False

    def _poll(self) -> None:
        """Hand on what has ended."""
        while self._open and self._device.happened(self._open[0][1]):
            number, event = self._open[0]
            self._feed.release(number)
            self._feed.put(number)
            self._ended = max(self._ended, Position(number + 1, 0))
            self._open.popleft()  # last: an interrupt before has it handed on again
            self._pool.append(event)

    def _again(self) -> None:
        """Compute the values of the inference under way anew, up to the next stage; its inputs are in their place."""
        network, (number, stage) = self.network, (self._next.inference, self._next.stage)
        if stage == 0:
            return
        network.wait()
        network.fill(self._feed.inputs(number), network.base)
        for k in range(stage):
            network.launch(k, network.base)
        network.wait()


def first_inference(spec: JobSpec, files: int, progress: JobProgress | None) -> int:
    """The number of the inference with which a job goes on, over all passes.

    Raises:
        JobError: the progress of another job, or behind the last input [W018].
    """
    if progress is None:
        return 0
    if progress.job != digest(spec):
        raise _bad(spec, "it is of another job", "resume it with `weft.colocate.job.resume`")
    if progress.stage >= files:
        raise _bad(spec, f"input {progress.stage}; the folder has {files}", "remove the file to begin anew")
    first = progress.passes * files + progress.stage
    if spec.passes and (first, progress.blocks) > (spec.passes * files, 0):
        raise _bad(spec, f"it is behind the last of {spec.passes} passes", "remove the file to begin anew")
    return first


def _bad(spec: JobSpec, problem: str, remedy: str) -> JobError:
    return JobError(where=spec.name, key="progress", problem=problem, remedy=remedy)
