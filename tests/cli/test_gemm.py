"""`weft gemm` without a GPU: what it lists, compiles and writes, and how it refuses."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from tests import goldens
from tests.gemm.test_search import Tuner as Invented

from weft.cli import app as cli
from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.gemm import search
from weft.gemm.search import Outcome, SearchResult
from weft.gemm.spec import Gemm
from weft.ir.declined import Declined
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule
from weft.tune.tuner import ProblemTrial, Progress

FILES = {"cuda.cu", "kernel.json", "parameters.json", "timings.jsonl", "search.svg", "script.py"}
pytestmark = pytest.mark.skipif(isinstance(find_nvrtc(), Declined), reason="no NVRTC")


class Done:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def data(self) -> Any:
        """Its standard output as JSON, without the numbers that JSON lacks."""
        return json.loads(self.out, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The entry point of the console script, in this process and an empty folder."""
    for name in [n for n in os.environ if n.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["weft", "gemm", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        found = capsys.readouterr()
        assert "Traceback" not in found.err
        assert "Traceback" not in found.out
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, found.out, found.err)

    return call


def test_a_dry_run_writes_a_folder_for_each_architecture(run: Any, tmp_path: Path) -> None:
    done = run("MN=128", "K=256", "t=64", "--layout", "nt", "--epilogue", "relu(acc + bias)", "--dry-run")
    assert done.code == 0, done.err
    assert "not measured" in done.out
    names = {p.name: {f.name for f in p.iterdir()} for p in (tmp_path / "outputs").iterdir()}
    assert names == {f"M=128_N=128_K=256_nt_f16_bias_relu_{a}": FILES for a in ("sm_90a", "sm_80")}
    assert "16 of " in done.out
    assert "problems on NVIDIA H200" in done.out
    assert "no table of measured schedules for NVIDIA A100" in done.out


@pytest.mark.slow
def test_a_dry_run_as_json_is_what_it_was(run: Any, tmp_path: Path) -> None:
    """Everything but what the model decides, which may change any day: which configurations, and their estimates."""
    (tmp_path / "list.txt").write_text(
        "MNK=1024 layout=nt t=6\nM=1 NK=4096 t=6 layout=nt dtype=bf16 epilogue=bias_silu\n"
    )
    done = run("run", "list.txt", "--dry-run", "--format", "json", "-o", "there")
    assert done.code == 0, done.err
    found = []
    for x in done.data:
        lines = [json.loads(y) for y in (Path(x["folder"]) / "timings.jsonl").read_text().splitlines()]
        assert [y["modelled_us"] > 0 for y in lines] == [True] * 6
        states = [y["state"] for y in lines]
        stated = {
            k: v
            for k, v in x.items()
            if k not in ("best", "feasible", "launches", "seconds", "table", "tflops", "folder")
        }
        keys = {"best": sorted(x["best"]), "launches": sorted(x["launches"][0]), "timings": sorted(lines[0])}
        found.append({**stated, "keys": keys, "folder": Path(x["folder"]).name, "compiled": states.count("compiled")})
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    goldens.check("gemm/dry-run.json", text)


def test_a_problem_that_fails_does_not_end_the_list(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.cli import gemm_run
    from weft.errors import DeviceError

    real = search.dry_run

    def dry_run(g: Any, *args: Any, **named: Any) -> Any:
        if g.m == 3:
            raise DeviceError(problem="this one fails")
        return real(g, *args, **named)

    monkeypatch.setattr(gemm_run, "dry_run", dry_run)
    (tmp_path / "list.txt").write_text("M=3 NK=64\nM=64 NK=64\n")
    done = run("run", "list.txt", "--dry-run", "--format", "json")
    assert done.code == 5
    assert "this one fails [W301]" in done.err
    first, *others = done.data
    assert first == {"name": "M=3_N=64_K=64_nn_f16", "error": done.data[0]["error"]}
    assert [x["name"] for x in others] == ["M=64_N=64_K=64_nn_f16"] * 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 whose kernels take invented times, in place of the real thing."""
    from weft.gemm import again
    from weft.platform.cuda import platform as gpu
    from weft.tune import tuner

    class Tuner(Invented):
        def __init__(self, *args: object, **named: object) -> None:
            super().__init__()
            self.seconds = {"build": 0.0, "worker": 1.0, "run": 0.0}

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def measure(self, trials: Iterable[ProblemTrial], *, progress: Any) -> Iterator[Measurement]:  # type: ignore[override]
            yield from super().measure(trials)
            self.seconds["worker"] += 2.0
            self.seconds["run"] += 3.0
            progress(Progress(1, 16, 0, {Verdict.WRONG: 2}, 1, 0.1, 0.0))

    def against(g: Gemm, *args: object, **named: object) -> dict[str, object]:
        peer = "cuBLASLt 13.1, 16 algorithms"
        return {"peer": peer, "library": {"median_us": 12.5}, "weft": {"median_us": 10.0}, "ratio": 1.25}

    def alone(g: Gemm, facts: GpuFacts, *args: object, **named: object) -> SearchResult:
        best = Outcome(Schedule("cublaslt", (("algorithm", 3),)), math.nan, "ok", (7.0,), 7.0)
        return SearchResult(g, facts.name, 1, [best], best, measured=True)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "survey", lambda options: (profile("h200"), find_nvrtc(), {}))
    monkeypatch.setattr(tuner, "Tuner", Tuner)
    monkeypatch.setattr("weft.tune.transport.ProcessTransport.start", lambda self: None)
    monkeypatch.setattr(again, "AGAINST", dict.fromkeys(("cublas", "cutlass"), against))
    monkeypatch.setattr(again, "library_alone", alone)


@pytest.mark.usefixtures("gpu")
def test_a_search_is_told_and_written(run: Any, tmp_path: Path) -> None:
    done = run("MN=128", "K=256", "--against", "cublas")
    assert done.code == 0, done.err
    assert "searched  16 of " in done.out
    assert "rejected  2 wrong" in done.out
    assert "cuBLASLt  12.5 us, 1.25 times" in done.out
    place = tmp_path / "outputs" / "M=128_N=128_K=256_nn_f16"
    assert {f.name for f in place.iterdir()} == FILES
    assert json.loads((place / "parameters.json").read_text())["against"]["ratio"] == 1.25
    assert "stroke-dasharray" in (place / "search.svg").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_what_a_search_took_is_told_by_its_parts(run: Any) -> None:
    first, second = (x["seconds"] for x in run("run", "--format", "json").data[:2])
    assert (first["worker"], first["run"]) == (second["worker"], second["run"]) == (2.0, 3.0)
    assert {"search", "rank", "emit", "measure", "build"} <= second.keys()
    assert first.keys() - second.keys() == {"start", "survey"}  # once for all problems
    assert abs(first["rank"] + first["emit"] + first["measure"] - first["search"]) < 0.01
    assert ", worker 2.0 s, run 3.0 s" in run("MN=128", "K=256").out


@pytest.mark.usefixtures("gpu")
def test_t_o_and_the_limit_decide_what_is_measured(run: Any) -> None:
    counts = {
        args: run(*args.split(), "--format", "json").data[0]["tried"]
        for args in ("t=5", "O=2 --limit 40", "O=2 t=7", "O=65536", "O=1")
    }
    assert list(counts.values()) == [5, 40, 7, 16, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_thirteen_shapes_without_a_list(run: Any, tmp_path: Path) -> None:
    done = run("run", "--format", "json")
    assert done.code == 0, done.err
    assert len(done.data) == len(list((tmp_path / "outputs").iterdir())) == 13


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["MX=4"], "option 'TOKEN': 'MX=4' is not letters of M, N, K, t, O"),
        (["M=0"], "M=0 is outside of 1 to"),
        (["O=7"], "O=7 is none of 0 (templates), 1 (library), 2 (exhaustive)"),
        (["--layout", "xy"], "option '--layout': 'xy' is none of nn, nt, tn, tt"),
        (["--dtype", "f64"], "option '--dtype': 'f64' is none of f16, bf16, f32"),
        (["--epilogue", "acc.T"], "option '--epilogue': it holds what is neither"),
        (["--against", "rocblas"], "option '--against': 'rocblas' is not one of cublas"),
        (["--against", "cublas", "--dry-run"], "a dry run measures nothing"),
        (["O=1", "--dry-run"], "O=1 asks for the library, which a dry run does not call"),
        (["run", "missing.txt"], "option 'LIST': 'missing.txt' cannot be read"),
        (["run", "."], "option 'LIST': '' cannot be read"),
        (["run", "a", "b"], "one file: `weft gemm run LIST`"),
        (["--device", "cpu"], "option '--device': 'cpu' is no GPU"),
    ],
)
def test_what_is_asked_wrongly_is_refused_with_exit_code_2(
    run: Any, args: list[str], told: str, tmp_path: Path
) -> None:
    done = run(*args)
    assert done.code == 2
    assert told in done.err
    assert "[W001]" in done.err
    assert len(done.err.splitlines()) <= 15
    assert not (tmp_path / "outputs").exists()


def test_lists_are_checked_before_anything_runs(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    for content, told in (
        (b"MN=64\nMN=64 epilogue=oops", "option 'LIST': line 2: no operand 'oops'"),
        (b"\xff\xfe", "is no text in UTF-8"),
        (b"#" * (1 << 21), "1048576 are allowed"),
        (b"\x1b[31mM=4", "line 1"),
    ):
        path.write_bytes(content)
        done = run("run", path, "--dry-run")
        assert done.code == 2
        assert told in done.err
        assert "\x1b[31m" not in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(run: Any) -> None:
    done = run("MN=64")
    assert done.code == 5
    assert "this torch sees none; --dry-run needs none [W301]" in done.err


def test_a_place_that_cannot_be_written_is_told(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("MNK=64", "--dry-run", "-o", tmp_path / "file")
    assert done.code == 3
    assert "it cannot be written" in done.err
    assert "choose another place by -o" in done.err
