"""A network that a host computes in stages, in the order of the streams of a fake device, on the files of a folder."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.colocate.fake_device import FakeDevice

from weft.colocate.inference_feed import InferenceFeed
from weft.colocate.inference_files import Array, TensorSpec
from weft.colocate.network_job import NetworkGpuJob, first_inference
from weft.device.cuda.facts import GpuFacts
from weft.ir.declined import Declined
from weft.kernels.scheduling import JobProgress, JobSpec

STAGE_US = (40.0, 25.0, 60.0)
INPUTS = (TensorSpec("x", (5,), "float32"),)
OUTPUTS = (TensorSpec("y", (5,), "float32"),)


def alone(x: Array) -> Array:
    """What the network gives."""
    found: Array = (x * 2 + 1) ** 2
    return found


@dataclass
class HostNetwork:
    """Three stages, each of which needs what the one before left."""

    device: FakeDevice
    base: int = 2
    value: Array = field(default_factory=lambda: np.zeros(5, np.float32))
    stage_us: Sequence[float] = STAGE_US

    def add(self, stream: int) -> bool:
        if stream == self.base:
            return False
        self.value[:] = np.nan  # as a recording does
        return True

    def launch(self, stage: int, stream: int) -> None:
        self.device.work(stream, round(self.stage_us[stage] * 1e3), f"stage {stage}")
        self.device.do(stream, lambda: self._stage(stage))

    def _stage(self, stage: int) -> None:
        if stage == 0:
            self.value *= 2
        elif stage == 1:
            self.value += 1
        else:
            self.value **= 2

    def fill(self, places: Sequence[int], stream: int) -> None:
        self.device.do(stream, lambda: ctypes.memmove(self.value.ctypes.data, places[0], self.value.nbytes))

    def fetch(self, places: Sequence[int], stream: int) -> None:
        self.device.do(stream, lambda: ctypes.memmove(places[0], self.value.ctypes.data, self.value.nbytes))

    def wait(self) -> None:
        while any(self.device.queues.values()):
            self.device.sleep(10_000)

    def fits(self, facts: GpuFacts, sms: int) -> Declined | None:
        return None


@dataclass
class Patient:
    """A feed whose inputs are waited for by the host's clock: that of a fake device goes much faster."""

    feed: InferenceFeed
    put_: int = 0

    def is_ready(self, number: int) -> bool:
        if number - self.put_ >= self.feed.slots:
            return False
        self.feed.wait_ready(number)
        return True

    def inputs(self, number: int) -> Sequence[int]:
        return self.feed.inputs(number)

    def results(self, number: int) -> Sequence[int]:
        return self.feed.results(number)

    def release(self, number: int) -> None:
        self.feed.release(number)

    def put(self, number: int) -> None:
        self.put_ = number + 1
        self.feed.put(number)

    def wait_ready(self, number: int) -> None:
        self.feed.wait_ready(number)

    @property
    def written(self) -> int:
        return self.feed.written

    def finish(self) -> None:
        self.feed.finish()


def write_inputs(folder: Path, count: int) -> list[Array]:
    """A folder of inputs; what is in them."""
    folder.mkdir(exist_ok=True)
    found = [np.random.default_rng(k).standard_normal(5).astype(np.float32) for k in range(count)]
    for k, x in enumerate(found):
        np.savez(folder / f"{k:03}.npz", x=x)
    return found


def host_job(
    spec: JobSpec, folder: Path, device: FakeDevice, held: ExitStack, progress: JobProgress | None = None
) -> NetworkGpuJob:
    """A job of these files, which are read and written by a process."""
    feed = InferenceFeed(
        spec, folder, INPUTS, OUTPUTS, held=held,
        span=lambda files: (first_inference(spec, files, progress), spec.passes * files),
    )  # fmt: skip
    return NetworkGpuJob(
        spec, HostNetwork(device), Patient(feed), device, files=len(feed.files), progress=progress
    )  # fmt: skip
