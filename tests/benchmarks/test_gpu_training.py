"""Training steps beside peers: small forms on the processor, what a row says, and what is left to be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cases.training import CASES
from benchmarks.harness import training_steps
from benchmarks.harness.record import lines_of

from benchmarks import gpu_training as suite


def _main(path: Path, *more: str) -> list[dict[str, Any]]:
    suite.main(["--device", "cpu", "--small", "--rounds", "1", "--only", "dlrm", "--out", str(path), *more])
    return [json.loads(json.dumps(x)) for x in lines_of(path)]


def test_small_forms_run_on_the_processor(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    head, row, last = _main(path, "--who", "eager")
    assert head["record"] == "environment"
    assert row["case"] == "dlrm/b2048" and set(row["runs"]) == {"eager"} and "weft_ms" not in row
    _, row, last = _main(path, "--again", "eager", "--steps", "8")  # it goes on where it was
    eager, mine = row["runs"]["eager"], row["runs"]["weft"]
    assert row["right"] is True and row["settings"]["small"] is True
    assert row["peers_ms"] == {"eager": eager["ms"]} and row["weft_ms"] == mine["ms"] > 0
    assert row["speedup_best"] == pytest.approx(eager["ms"] / mine["ms"], abs=1e-3)
    assert len(mine["losses"]) == len(eager["losses_f32"]) == training_steps.CHECKED
    assert mine["plan"] in ("library", "eager") and mine["opaque"] is not None
    assert (last["cases"], last["compared"], last["right"], last["wrong"]) == (1, 1, 1, 0)
    assert len(set(mine["trained"])) == len(eager["trained"]) == training_steps.SEEDS and last["trained"] == 1
    assert mine["trained"] == pytest.approx(eager["trained"], rel=1e-3) and row["settings"]["steps"] == 8


def test_a_contender_without_an_answer_is_a_result(tmp_path: Path) -> None:
    _, row, last = _main(tmp_path / "training.jsonl", "--who", "eager", "--limit", "0.001")
    assert row["runs"]["eager"]["failed"] == "no answer in 0.001 s" and row["peers_ms"] == {}
    assert last["compared"] == 0


@pytest.mark.parametrize("name", CASES)
def test_every_network_has_a_loss_and_gradients(name: str) -> None:
    placed = training_steps.Placed(CASES[name], "cpu", small=True, fused=False)
    batch = placed.batch(0)
    assert all(torch.equal(x, y) for x, y in zip(batch, placed.batch(0), strict=True))
    assert not torch.equal(batch[0], placed.batch(1)[0])
    loss = placed.loss(*batch)
    assert loss.dim() == 0 and loss.isfinite()
    loss.backward()
    assert all(p.grad is not None for p in placed.model.parameters())
    step = placed.loop(placed.loss, autocast=False)
    first = placed.losses(step)
    assert first == placed.losses(step)  # they begin with the same weights


def test_what_a_row_says() -> None:
    weft: dict[str, object] = {"ms": 2.0, "losses": [1.0, 2.0], "memory_bytes": 30}
    eager: dict[str, object] = {"ms": 3.0, "losses": [1.01, 2.0], "losses_f32": [1.005, 2.0], "memory_bytes": 10}
    runs: dict[str, dict[str, object]] = {
        "weft": weft,
        "eager": eager,
        "inductor": {"ms": 2.5, "memory_bytes": 40},
        "autotune": {"failed": "x"},
    }
    row = training_steps.case_row("a", runs, {})
    assert (row["weft_ms"], row["best_peer"], row["speedup_best"], row["memory_share"]) == (2.0, "inductor", 1.25, 0.75)
    assert row["right"] is True and row["peers_ms"] == {"eager": 3.0, "inductor": 2.5}
    for losses in ([1.0, 2.1], [float("nan"), 2.0]):
        assert training_steps.is_right({**runs, "weft": {**weft, "losses": losses}}) is False
    assert training_steps.is_right({"weft": weft}) is None
    exact = {**eager, "losses": [1.0, 2.1], "losses_f64": [1.0, 2.0]}
    assert training_steps.is_right({"weft": {**weft, "losses": [1.0, 2.19]}, "eager": exact}) is True
    for losses in ([1.001, 2.0], [1.0, 2.3]):
        assert training_steps.is_right({"weft": {**weft, "losses": losses}, "eager": exact}) is False
    assert "weft_ms" not in training_steps.case_row("a", {"weft": {"failed": "x"}, "eager": eager}, {})
    said = training_steps.summary([row, {**row, "speedup_best": 0.8, "right": False}, {"case": "b"}])
    assert (said["cases"], said["compared"], said["speedup_mean"], said["slower"], said["wrong"]) == (3, 2, 1.0, 1, 1)
    assert training_steps.summary([])["speedup_mean"] == 0.0


def test_the_loss_after_many_steps() -> None:
    long = training_steps.long_run([1.0, 1.2, 1.4], [1.1, 1.3])
    assert long == {"weft": pytest.approx(1.2), "eager": [1.1, 1.3], "inside": True, "seeds_inside": 1}
    for mean in (1.0, 1.31, float("nan")):
        assert training_steps.long_run([mean], [1.1, 1.3])["inside"] is False
    runs: dict[str, Any] = {"weft": {"ms": 1.0, "trained": [2.0]}, "eager": {"ms": 2.0, "trained": [1.0, 1.5]}}
    row = training_steps.case_row("a", runs, {})
    assert row["trained"] == training_steps.long_run([2.0], [1.0, 1.5])
    said = training_steps.summary([row, training_steps.case_row("b", {"weft": {"ms": 1.0}, "eager": {"ms": 2.0}}, {})])
    assert (said["trained"], said["trained_outside"]) == (1, ["a"])


def test_what_is_left() -> None:
    known: dict[str, dict[str, object]] = {"a": {"runs": {"weft": {}, "eager": {}}}, "b": {"failed": "x"}}
    assert suite.wanted(["a", "b"], ["weft", "inductor"], [], known) == [
        ("a", "inductor"), ("b", "weft"), ("b", "inductor"),
    ]  # fmt: skip
    assert ("a", "weft") in suite.wanted(["a"], ["weft"], ["weft"], known)
    assert suite.wanted(["a"], ["weft"], ["inductor"], known) == []
    assert suite.wanted(["a"], ["eager"], ["all"], known) == [("a", "eager")]


@pytest.mark.parametrize("bad", [["--only", "nothing"], ["--who", "other"]])
def test_what_is_refused(bad: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        suite.main(["--device", "cpu", "--small", *bad])


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "folder_of", lambda device, context: "")
    with pytest.raises(SystemExit, match="no NVIDIA GPU"):
        suite.main(["--only", "dlrm"])
