"""How max-autotune is measured: Inductor's timings in turn, and what is kept between runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.harness import record
from benchmarks.harness.side_by_side import Turn
from benchmarks.models import NETWORKS
from torch._inductor import config
from torch._inductor.runtime import benchmarking

from benchmarks import gpu_autotune


def test_inductor_times_kernels_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(tmp_path / "turn")
    seen: list[bool] = []
    loads: list[bool] = []

    def timed(self: object, run: Callable[[], object], **_: Any) -> float:
        seen.append(turn.since > 0)
        run()
        return 1.5

    monkeypatch.setattr(type(benchmarking.benchmarker), "benchmark_gpu", timed)
    bench = benchmarking.benchmarker.benchmark
    with gpu_autotune.inductor_in_turn(turn) as count:
        assert count >= 3
        assert bench(lambda: loads.append(turn.since > 0), (), {}, device="cuda") == 1.5
        assert loads == [False, True]  # the first run, which loads the kernel, is nobody's turn
        assert turn.since == 0
        assert bench(lambda: seen.append(turn.since > 0), (), {}, device="cpu", warmup=0, rep=0) >= 0
    assert bench(lambda: None, (), {}, device="cuda") == 1.5
    assert seen[0] is True
    assert set(seen[1:-1]) == {False}  # a processor's kernels take no turns
    assert seen[-1] is False  # as before


def test_a_version_that_times_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def benchmark(self) -> float:
            return 1.0

    module = ModuleType("benchmarking")
    vars(module).update(Benchmarker=Other, benchmarker=Other())
    with pytest.raises(RuntimeError, match="cannot take turns"):
        gpu_autotune.entry_points(module)
    with pytest.raises(RuntimeError, match="cannot take turns"):
        gpu_autotune.entry_points(ModuleType("empty"))
    monkeypatch.setattr(config, "autotune_in_subproc", True)
    with pytest.raises(RuntimeError, match="autotune_in_subproc"), gpu_autotune.inductor_in_turn(Turn(tmp_path / "t")):
        pass


def test_what_was_timed_is_kept_and_nothing_else(tmp_path: Path) -> None:
    files = {"vgg16-b1-f16/cache/ab12": "{}", "vgg16-b1-f16/xy/k.best_config": "{1}", "vgg16-b1-f16/xy/k.py": "code",
             "candy-b1-f16/cache/.12.tmp": "half", "turn": "", "candy-b1-f16.log": "words"}  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "one" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    gpu_autotune.pack(tmp_path / "one", tmp_path / "out" / "timings.tgz")
    there = gpu_autotune.unpack(tmp_path / "out" / "timings.tgz", tmp_path / "two")
    assert there == {gpu_autotune.folder_of("vgg16/b1/f16")}
    found = {str(x.relative_to(tmp_path / "two")) for x in (tmp_path / "two").rglob("*") if x.is_file()}
    assert found == {"vgg16-b1-f16/cache/ab12", "vgg16-b1-f16/xy/k.best_config"}
    with pytest.raises(FileNotFoundError):
        gpu_autotune.unpack(tmp_path / "none.tgz", tmp_path / "three")


def test_two_runs_add_to_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "folder_of_gpu", lambda: "gpu")
    assert gpu_autotune.known() == set()
    for case in ("vgg16/b1/f16", "candy/b16/f16"):  # neither knows of the other
        gpu_autotune.put({"record": "case", "case": case})
    assert gpu_autotune.known() == {"vgg16/b1/f16", "candy/b16/f16"}
    lines = [json.loads(x) for x in (tmp_path / "gpu" / "autotune.jsonl").read_text().splitlines()]
    assert [x["record"] for x in lines] == ["environment", "case", "case"]
    gpu_autotune.lost("bert_base/b1/f16", "RuntimeError: no room\nmore")
    assert gpu_autotune.known() == {"vgg16/b1/f16", "candy/b16/f16"}, "what failed is tried again"
    lines = [json.loads(x) for x in (tmp_path / "gpu" / "autotune.jsonl").read_text().splitlines()]
    assert lines[-1]["failed"] == "RuntimeError: no room"


@pytest.mark.parametrize("batches", [1, 2])
def test_parts_are_every_missing_case_once(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(gpu_autotune, "known", lambda: {"vgg16/b1/f16", "yolov4/b1/f16"})
    monkeypatch.setattr(gpu_autotune, "side_by_side", lambda cases, _: given.append(list(cases)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for k in "01":
        line = ["x", "--jobs", "4", "--part", f"{k}/2", "--batch", "1,16"[: 1 if batches == 1 else None]]
        monkeypatch.setattr("sys.argv", line)
        gpu_autotune.main()
    first, second = given
    assert len({*first, *second}) == len(first) + len(second) == 10 * batches - 2
    assert first[0] == ("inception_v3/b1/f16" if batches == 1 else "yolov4/b16/f16")
    assert "vgg16/b1/f16" not in first + second
    with pytest.raises(argparse.ArgumentTypeError, match="want K/N"):
        gpu_autotune.part("2/2")


@pytest.mark.parametrize(
    ("line", "why"),
    [("resnet51", "no such network: resnet51"), ("--keep x.tgz", "need --jobs"), ("--part 3", "want K/N")],
)
def test_what_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, why: str
) -> None:
    monkeypatch.setattr("sys.argv", ["x", *line.split()])
    with pytest.raises(SystemExit):
        gpu_autotune.main()
    assert why in capsys.readouterr().err


def test_every_network_has_its_place() -> None:
    assert sorted(gpu_autotune.LONGEST_FIRST) == sorted(NETWORKS)
