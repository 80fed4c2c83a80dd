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
from benchmarks.cases import class_models
from benchmarks.cases.class_models import GPU, First, Member
from benchmarks.harness import record
from benchmarks.harness.side_by_side import Turn
from benchmarks.models import NETWORKS
from torch._inductor import config
from torch._inductor.runtime import benchmarking

from benchmarks import classes, gpu_autotune
from weft.api import flat
from weft.platform.cpu import host_sample
from weft.platform.cuda import platform


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
    [
        ("resnet51", "no such network: resnet51"),
        ("--classes gpt3", "no such network of a class: gpt3; there are gpt2/b1, opt/b1,"),
        ("--classes gpt2 resnet50", "no such network of a class: resnet50"),
        ("--classes --batch 1", "--batch and --dtype are for the ten networks"),
        ("--classes gpt2 --keep x.tgz", "need --jobs"),
        ("--keep x.tgz", "need --jobs"),
        ("--part 3", "want K/N"),
    ],
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


def tiny() -> Member:
    def make() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        return First(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.GELU())).eval(), (torch.randn(2, 3, 8, 8),)

    return Member("small", "tiny", make, 2, library="")


def asked_for(monkeypatch: pytest.MonkeyPatch, line: str) -> tuple[list[str], argparse.Namespace]:
    """The cases that a command line gives to `side_by_side`, in their order, and the options."""
    given: list[tuple[list[str], argparse.Namespace]] = []
    monkeypatch.setattr(gpu_autotune, "side_by_side", lambda cases, options: given.append((list(cases), options)))
    monkeypatch.setattr(gpu_autotune, "known", lambda: {"vgg16/b16/f16", "opt/b1/f16"})
    monkeypatch.setattr(classes, "missing", lambda _: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["x", *line.split()])
    gpu_autotune.main()
    return given[0]


def test_classes_are_taken_in_their_order_behind_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = asked_for(monkeypatch, "--classes --jobs 8")
    others = [f"{m.case}/f16" for m in GPU if m.name not in NETWORKS and m.name != "opt"]
    assert first == ["segformer_b0/b16/f16", *others]
    halves = [asked_for(monkeypatch, f"--classes --jobs 8 --part {k}/2")[0] for k in "01"]
    assert sorted(halves[0] + halves[1]) == sorted(first) and halves[0][0] == first[0]
    some, _ = asked_for(monkeypatch, "--jobs 8 --classes regnet gpt")
    assert some == ["gpt2/b1/f16", "gpt_neox/b1/f16", "regnety_016/b1/f16", "regnetx_032/b1/f16"]
    order = gpu_autotune.longest_first(
        ["mamba/b1/f16", "vgg16/b1/f16", "gpt2/b1/f16", "yolov4/b1/f16", "yolov4/b16/f16"]
    )
    assert order == ["yolov4/b16/f16", "yolov4/b1/f16", "vgg16/b1/f16", "mamba/b1/f16", "gpt2/b1/f16"]


def test_who_is_in_both_lists_is_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, batch and type are one case, posed from `benchmarks.models` by either list."""
    loaded: list[tuple[str, int]] = []
    network, inputs = torch.nn.Linear(3, 2), (torch.zeros(1, 3),)

    def load(name: str, batch: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        loaded.append((name, batch))
        return network, inputs

    monkeypatch.setattr(class_models, "load", load)
    both = [m for m in GPU if m.name in NETWORKS]
    for member in both:
        module, given = member.make()
        assert isinstance(module, First) and module.module is network
        assert not module.names and all(x is y for x, y in zip(given, inputs, strict=True))
    assert loaded == [(m.name, m.batch) for m in both] == [("segformer_b0", 16), ("vgg16", 16)]
    assert len(gpu_autotune.MEMBERS) == len(GPU)

    seen: list[tuple[str, int, str]] = []

    def posed(*case: Any) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], list[torch.Tensor]]:
        seen.append(case)
        return network, inputs, [torch.ones(2)]

    monkeypatch.setattr(gpu_autotune, "posed", posed)
    module, _, error, _ = gpu_autotune.pose("vgg16/b16/f16")
    assert seen == [("vgg16", 16, "f16")] and module is network and error([torch.ones(2)]) == 0.0


@pytest.mark.parametrize(("layouts", "compiled"), [("last", [True]), ("both", [False, True])])
def test_a_network_of_a_class_is_posed_and_checked_as_there(
    monkeypatch: pytest.MonkeyPatch, layouts: str, compiled: list[bool]
) -> None:
    class Graph:
        def __init__(self, run: Callable[[], list[torch.Tensor]]) -> None:
            self.replay = run

    def peer(name: str, module: torch.nn.Module, inputs: Any, *, channels_last: bool) -> tuple[Graph, float, int, int]:
        factor = 1.0 if (name, channels_last) != ("eager", True) else 1.5
        asked.append((name, channels_last))
        return Graph(lambda: [x * factor for x in flat(module(*inputs))]), 1.23, 0, 0

    asked: list[tuple[str, bool]] = []
    there = classes.posed
    monkeypatch.setattr(classes, "posed", lambda member, _: there(member, "cpu"))
    monkeypatch.setattr(gpu_autotune, "peer", peer)
    monkeypatch.setattr(platform, "sample_us", host_sample)
    monkeypatch.setitem(gpu_autotune.MEMBERS, "tiny/b2/f16", tiny())
    with torch.no_grad():
        line = gpu_autotune.prepared("tiny/b2/f16", 5, layouts)()
    assert asked == [("eager", False), ("eager", True), *(("autotune", last) for last in compiled)]
    labels = {"autotune_last" if last else "autotune" for last in compiled}
    assert (line["case"], line["class"], line["suite"]) == ("tiny/b2/f16", "small", "autotune")
    assert set(line["peers_ms"]) == set(line["samples_ms"]) == {"eager", *labels}
    assert line["errors"]["eager"] < 1e-6
    assert line["failed_peers"] == {"eager_last": "an error of 5.0e-01"}, "what is wrong has no time"
    assert set(line["peer_compile_s"]) == {"eager", "eager_last", *labels}
    json.dumps(line)


def test_a_worker_makes_the_case_that_it_was_started_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, given = asked_for(monkeypatch, "--classes gpt2 --jobs 8 --layouts both --rounds 7")
    task = gpu_autotune.task("gpt2/b1/f16", tmp_path, 16, 2, given)
    assert list(task.command[1:3]) == ["-m", "benchmarks.gpu_autotune"]
    made: list[tuple[str, int, str]] = []
    monkeypatch.setattr(gpu_autotune, "worker", lambda x: made.append((x.worker, x.rounds, x.layouts)))
    monkeypatch.setattr("sys.argv", ["x", *task.command[3:], "--line", "3", "--parent", "1"])
    gpu_autotune.main()
    assert made == [("gpt2/b1/f16", 7, "both")]
    assert gpu_autotune.folder_of("gpt2/b1/f16") == "gpt2-b1-f16"


def test_a_library_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_autotune, "known", set)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setitem(gpu_autotune.MEMBERS, "tiny/b2/f16", Member("small", "tiny", tiny().make, 2, "no_such_package"))
    monkeypatch.setattr("sys.argv", ["x", "--classes", "tiny"])
    with pytest.raises(SystemExit, match=r"not installed: no_such_package \(`pip install no_such_package`\)"):
        gpu_autotune.main()
