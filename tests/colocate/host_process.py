"""Jobs in another process on the host, and a machine by the host's clock that they run beside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.colocate.fake_device import RealTimeDevice, query

from weft.colocate.gpu_machine import GpuMachine, Lane
from weft.colocate.job import parse_job, read_job, resume
from weft.colocate.process_job import ProcessJob
from weft.colocate.process_machine import ProcessMachine
from weft.colocate.process_words import Confinement
from weft.kernels.scheduling import JobSpec

HIGH, COPIES = 1, 3
SEGMENT_S = 0.001
STATEFUL = f"""
import json, time

done = []

def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

def unit(number):
    assert number == len(done), (number, len(done))
    busy({SEGMENT_S})
    yield
    busy({SEGMENT_S})
    done.append(number)

def save(path):
    with open(path, "w") as file:
        json.dump(done, file)

def load(path):
    with open(path) as file:
        done[:] = json.load(file)
"""
"""Two segments to a unit, and what was done as its state."""
PLAIN = f"""
import time

def unit(number):
    end = time.perf_counter() + {SEGMENT_S}
    while time.perf_counter() < end:
        pass
"""
TOML = 'name = "train"\nkind = "process"\nfile = "train.py"\nprogress = "p.json"\nsave_s = 0.05\nhang_s = 0.3\n'


def written(folder: Path, program: str, more: str = "") -> JobSpec:
    (folder / "train.py").write_text(program)
    (folder / "job.toml").write_text(TOML + more)
    return read_job(folder / "job.toml")


@contextmanager
def started(folder: Path, **more: Any) -> Iterator[ProcessJob]:
    """The job of a folder, where it was left."""
    spec = parse_job((folder / "job.toml").read_text())
    with ExitStack() as held:
        progress = resume(folder / spec.progress, spec) if spec.progress else None
        yield ProcessJob(spec, folder, held=held, progress=progress, device="cpu", **more)


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.0005)


def machine_of(job: ProcessJob, *service_us: float) -> tuple[ProcessMachine, RealTimeDevice]:
    """Queries of so many microseconds by variant; beside those of all but the first the job runs."""
    device = RealTimeDevice()
    lanes = [Lane(HIGH, query(device, HIGH, us)) for us in service_us]
    beside = [None, *(Confinement() for _ in service_us[1:])]
    return ProcessMachine(GpuMachine(device, {"net": lanes}, copies=COPIES), job, {"net": beside}), device
