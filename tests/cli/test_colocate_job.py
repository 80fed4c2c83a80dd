"""The job of `weft colocate run`: what it is made of, its results and its progress, whatever ends the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.colocate.fake_device import FakeDevice, query
from tests.colocate.host_network import alone, host_job, write_inputs

from weft.cli import app as cli
from weft.cli import colocate_gpu
from weft.cli.colocate_job import job_of, telling
from weft.cli.show import Screen
from weft.colocate import staged_plan
from weft.colocate.gpu_machine import GpuMachine, Lane
from weft.colocate.job import JobError, read_job, resume
from weft.colocate.job_on_gpu import examples, job_on
from weft.colocate.network_job import NetworkGpuJob
from weft.colocate.recording import Mode, What, recorded
from weft.device.cuda.facts import profile
from weft.errors import ArtifactError, DeviceError
from weft.kernels.samples import SampleRecord, read
from weft.kernels.scheduling import JobProgress, JobSpec

HIGH, LOW, COPIES = 1, 2, 3
TEXT = 'name = "net2"\nkind = "network"\nmodel = "n.onnx"\ninputs = "in"\noutputs = "out"\nprogress = "p.json"\n'
H200 = profile("h200")
SCREEN = Screen("text")


class Session:
    """Stands in for `weft.colocate.gpu.GpuSession`."""

    def __init__(self) -> None:
        self.device, self.low, self.models = FakeDevice(), None, ("net",)
        self.job: NetworkGpuJob | None = None
        self.modes = ("priority", "streams")

    def add_job(self, job: NetworkGpuJob) -> None:
        self.job = job

    def machine(self, ways: int = 0) -> GpuMachine:
        job = self.job
        assert job is not None
        lanes = [Lane(HIGH, query(self.device, HIGH, 100.0))]
        lanes += [Lane(HIGH, query(self.device, HIGH, 110.0), job.form(LOW)) for _ in range(ways)]
        idle = job.form(LOW, apart=True)
        return GpuMachine(self.device, {"net": lanes}, copies=COPIES, job=job.anew(), idle=idle)

    def go_on(self, inferences: int) -> None:
        """Until so many are done."""
        assert self.job is not None
        machine = self.machine()
        machine.set_form(0)
        while self.job.inferences < inferences and not self.job.is_done():
            machine.pause(self.device.now + 1_000_000)
        machine.close_job()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_inputs(tmp_path / "in", 5)
    (tmp_path / "n.onnx").write_bytes(b"")
    (tmp_path / "job.toml").write_text(TEXT)

    def made(
        spec: JobSpec, folder: Path, plan: object, *, device: FakeDevice, stream: object, held: ExitStack,
        progress: JobProgress | None,
    ) -> NetworkGpuJob:  # fmt: skip
        assert plan == "plan" and stream is None
        return host_job(spec, folder, device, held, progress)

    monkeypatch.setattr(staged_plan, "network_job", made)
    return tmp_path


def compiled(path: Path, given: Any) -> Any:
    assert path.name == "n.onnx" and [tuple(x.shape) for x in given] == [(5,)]
    return "plan"


def on(folder: Path, session: Session) -> Any:
    spec = job_of(folder / "job.toml")
    assert spec is not None
    return job_on(cast("Any", session), spec, folder, facts=H200, compiled=compiled, tell=telling(SCREEN))


def saved(folder: Path) -> tuple[int, int, int]:
    found = resume(folder / "p.json", read_job(folder / "job.toml"))
    return found.passes, found.stage, found.blocks


def test_results_are_written_and_progress_is_saved_and_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session()
    with on(folder, session):
        session.go_on(3)
    first = saved(folder)
    assert first >= (0, 3, 0) and "net2: 0 passes, then 3 inputs" in capsys.readouterr().err
    again = Session()
    with on(folder, again):
        assert again.job is not None and again.job.progress().stage == first[1]
        again.go_on(4)
    assert saved(folder) >= (1, 2, 0)
    for k in range(5):
        with np.load(folder / "out" / f"{k:03}.npz") as found, np.load(folder / "in" / f"{k:03}.npz") as given:
            assert np.array_equal(found["y"], alone(given["x"]))


@pytest.mark.parametrize("what", [KeyboardInterrupt(), DeviceError(problem="the machine stands still")])
def test_whatever_ends_the_run_progress_is_saved(what: BaseException, folder: Path) -> None:
    session = Session()

    def run() -> None:
        with on(folder, session):
            machine = session.machine()
            machine.set_form(0)
            session.device.sleep(30_000)
            machine.pause(session.device.now + 1)
            raise what

    with pytest.raises(type(what)):
        run()
    assert saved(folder) > (0, 0, 0), "what was launched has ended, though nobody closed the machine"


def test_an_input_that_fails_is_told_and_what_was_done_is_kept(folder: Path) -> None:
    (folder / "in" / "002.npz").write_bytes(b"broken")
    session = Session()

    def run() -> None:
        with on(folder, session):
            session.go_on(5)

    with pytest.raises(JobError, match=r"002\.npz"):
        run()
    assert saved(folder) == (0, 2, 0) and len(list((folder / "out").iterdir())) == 2


def test_results_that_fail_are_told_and_do_not_count(folder: Path) -> None:
    session = Session()

    def run() -> None:
        with on(folder, session):
            (folder / "out").rmdir()
            session.job.plain(LOW, 1e3)  # type: ignore[union-attr]

    with pytest.raises(ArtifactError, match="results cannot be written"):
        run()
    assert saved(folder) == (0, 0, 0)


def test_a_job_that_is_done_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.toml").write_text(TEXT + "passes = 1\n")
    for _ in range(2):
        session = Session()
        with on(folder, session):
            session.go_on(100)
        assert saved(folder) == (1, 0, 0) and "net2: all 1 passes are done" in capsys.readouterr().err


def test_jobs_that_cannot_be(folder: Path) -> None:
    assert job_of(None) is None
    (folder / "train.toml").write_text('name = "t"\nkind = "process"\nfile = "train.py"\n')
    with pytest.raises(JobError, match=r"no such file: 'train\.py'"):
        job_of(folder / "train.toml")
    for k in range(5):
        (folder / "in" / f"{k:03}.npz").unlink()
    with pytest.raises(JobError, match=r"no \.npz file is in this folder"), on(folder, Session()):
        pass
    (folder / "in" / "a.npz").write_bytes(b"broken")
    with pytest.raises(JobError, match=r"a\.npz: inputs"), on(folder, Session()):
        pass
    (folder / "p.json").write_text("{}")
    with pytest.raises(JobError, match="what was saved cannot be read"), on(folder, Session()):
        pass


def test_example_inputs_are_by_name_or_in_order() -> None:
    x, y = torch.zeros(1), torch.ones(2)
    assert examples({"whatever": x}) == [x] and examples({"arr_10": y, "arr_2": x}) == [x, y]
    assert examples({"x": x, "y": y}) == {"x": x, "y": y}


# -- what was measured is kept


@pytest.fixture
def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[int], int]:
    """Call `prepare` whose nth way of sharing is interrupted; its exit status."""
    monkeypatch.chdir(folder)
    session = Session()

    def call(interrupted: int) -> int:
        def record(*_: object, **__: object) -> tuple[SampleRecord, dict[str, str]]:
            assert session.job is not None
            with session.job.rehearsal():
                machine = session.machine(3)
                what = What("NVIDIA H200", "580", "test", "net", 5, "net2", session.job.kernel_us, session.job.block_us)
                modes = [Mode(f"priority {k}", "priority") for k in range(3)]
                close, times = machine.close_job, iter(range(100))

                def closed() -> Any:
                    if next(times) == interrupted:
                        raise KeyboardInterrupt
                    return close()

                machine.close_job = closed  # type: ignore[method-assign]
                return recorded(machine, what, modes, queries=30, small=5), {}

        @contextmanager
        def opened(*_: object, **__: object) -> Iterator[Session]:
            with on(folder, session):
                yield session

        monkeypatch.setattr(session, "record", record, raising=False)
        monkeypatch.setattr(colocate_gpu, "_session", opened)
        monkeypatch.setattr(colocate_gpu, "_driver", lambda: "580")
        command = ["weft", "colocate", "prepare", "-m", "net.onnx", "--be", "job.toml", "-o", "samples.json"]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            cli.run()
        return int(ended.value.code or 0)

    return call


def test_an_interrupt_leaves_the_ways_that_were_measured(
    prepare: Callable[[int], int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(9) == 130 and "what was measured is kept" in capsys.readouterr().err
    found = read(json.loads((folder / "samples.json").read_text()))
    assert [m.name for m in found.modes] == ["priority 0"] and found.jobs[0].name == "net2"
    assert saved(folder) == (0, 0, 0), "measuring counts for nothing"
    assert prepare(-1) == 0
    assert len(read(json.loads((folder / "samples.json").read_text())).modes) == 3
