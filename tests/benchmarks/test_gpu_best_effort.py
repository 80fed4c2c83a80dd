"""The benchmark of best-effort kernels without a GPU: its rows from launches on the host, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from benchmarks.best_effort import table
from benchmarks.best_effort.jobs import Array, Job, load
from benchmarks.best_effort.references import OPERATIONS
from benchmarks.gpu_best_effort import chosen, main, measured, verdict
from tests.benchmarks.on_host import Memory, launch

from benchmarks import gpu_best_effort
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc


class Host:
    """A job on the host; `broken`: from that run on it leaves other bits."""

    def __init__(self, job: Job, broken: int = 1 << 30) -> None:
        self._job, self._broken, self._runs = job, broken, 0
        self._contents: dict[str, Array] = {}
        self.timed: list[tuple[int, ...]] = []

    def put(self, name: str, contents: Array) -> None:
        self._contents[name] = contents.copy()

    def get(self, name: str) -> Array:
        return self._contents[name]

    def run(self) -> None:
        memory = Memory(self._contents)
        for stage in self._job.stages:
            launch(stage, memory, range(int(np.prod(stage.manifest.grid))))
        self._contents = {name: memory.read(name) for name in self._contents}
        self._runs += 1
        if self._runs > self._broken:
            for name in self._job.written:
                self._contents[name].view(np.uint8).reshape(-1)[-1] ^= 0x40

    def time_us(self, stages: Sequence[int], rounds: int) -> list[float]:
        self.timed.append(tuple(stages))
        return [10.0 * len(stages) + k for k in range(rounds)]

    def resources(self, stage: int) -> Mapping[str, int]:
        return {"registers": 32, "shared_bytes": 0, "blocks_per_sm": 8}


def test_a_job_of_stages_has_a_row_for_each_and_one_for_all() -> None:
    job = load("histo", small=True)
    host = Host(job)
    rows = measured(job, OPERATIONS["histo"], host, job.buffers(), 3)
    assert [r["case"] for r in rows] == ["histo/clear", "histo/count", "histo"] and host.timed == [(0,), (1,), (0, 1)]
    assert [(r["us"], r["least_us"], r["most_us"], r["rounds"]) for r in rows][2] == (21.0, 20.0, 22.0, 3)
    assert (
        rows[2]["estimate_us"] == 232 and rows[2]["limited_by"] == "shared atomics, HBM" and rows[2]["compared"] == 320
    )
    launches = rows[2]["launches"]
    assert isinstance(launches, list) and [x["entry"] for x in launches] == ["clear", "count"]
    assert rows[0]["launches"] == [
        {"entry": "clear", "grid": [2, 1, 1], "block": [256, 1, 1], **host.resources(0)},
    ]


def test_a_job_of_one_stage_has_one_row() -> None:
    job = load("mandelbrot", small=True)
    rows = measured(job, OPERATIONS["mandelbrot"], Host(job), job.buffers(), 2)
    assert [r["case"] for r in rows] == ["mandelbrot"] and rows[0]["compared"] == 32 * 60, "a sample of its 40 rows"


def test_wrong_results_and_other_bits_are_errors() -> None:
    job = load("mandelbrot", small=True)
    with pytest.raises(ValueError, match="wrong result: counts: 1 of 1920 differ"):
        measured(job, OPERATIONS["mandelbrot"], Host(job, broken=0), job.buffers(), 2)
    with pytest.raises(ValueError, match="counts: another run leaves other bits"):
        measured(job, OPERATIONS["mandelbrot"], Host(job, broken=1), job.buffers(), 2)


def test_what_nobody_wrote_is_wrong() -> None:
    for name in ("mriq", "nn"):
        job = load(name, small=True)
        before = job.buffers()
        found = verdict(job, OPERATIONS[name], before, before.__getitem__)
        assert found.wrong and found.compared > 0


def test_jobs_are_chosen_by_parts_of_names() -> None:
    assert chosen("mri,fft") == ["fft", "mri_fhd", "mriq"]
    assert len(chosen("")) == 20
    with pytest.raises(ValueError, match="no job's name holds 'mrx'"):
        chosen("fft,mrx")


def test_bad_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for options, told in ((["--only", "nope"], "no job's name holds 'nope'"), (["--rounds", "0"], "at least one")):
        with pytest.raises(SystemExit) as caught:
            main(options)
        assert caught.value.code == 2 and told in capsys.readouterr().err


def test_it_prints_help_and_compiles_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0 and "--small" in capsys.readouterr().out
    main(["--dry", "--only", "histo"])
    lines = capsys.readouterr().out.splitlines()
    assert [x.split("{")[0] for x in lines] == ["histo clear ", "histo count "] and "'shared_bytes': 4096" in lines[1]


@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    if gpu_available():
        pytest.skip("there is one")
    command = [sys.executable, "-m", "benchmarks.gpu_best_effort", "--only", "histo", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0 and "[W30" in done.stderr


def gpu_available() -> bool:
    import torch

    return torch.cuda.is_available()


def test_the_table_of_the_readme_is_what_manifests_compiler_and_record_say(tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    text = table.README.read_text()
    assert table.replaced(text, table.table(nvrtc, cache_dir=tmp_path)) == text, table.__doc__
    record = tmp_path / "x.jsonl"
    record.write_text(
        '{"record": "case", "case": "lbm/back", "us": 281.5}\n{"record": "case", "case": "cp", "failed": "no"}\n'
    )
    rows = {x.split(" | ")[0]: x for x in table.table(nvrtc, record, tmp_path).splitlines()}
    assert rows["| lbm/back"].endswith("| 281.5 |") and rows["| cp"].endswith("| failed |")
    assert rows["| lbm/forth"].endswith("| not yet |")
    with pytest.raises(ValueError, match="not both there"):
        table.replaced("nothing", "")


def test_constants_of_another_size_than_the_source_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        def variable(self, name: str) -> tuple[int, int]:
            return 0x1000, 64

    written: list[int] = []
    monkeypatch.setattr(gpu_best_effort, "write", lambda address, data: written.append(len(data)))
    (stage,) = load("mriq", small=True).stages
    with pytest.raises(ValueError, match="constant samples has 768 bytes; 64 in the source"):
        gpu_best_effort.Gpu._constants(cast("Any", Module()), stage)
    (samples,) = stage.manifest.constants
    four = replace(stage, manifest=replace(stage.manifest, constants=(replace(samples, shape=(4,)),)))
    gpu_best_effort.Gpu._constants(cast("Any", Module()), four)
    assert written == [64]
