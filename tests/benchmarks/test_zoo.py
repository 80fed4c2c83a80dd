from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.cases.zoo_models import ARCHITECTURES, Architecture
from benchmarks.models import vision_operators

import weft
from benchmarks import zoo
from tools import tables


def test_there_are_150_architectures_and_60_of_them_for_a_gpu() -> None:
    names = [a.name for a in ARCHITECTURES]
    assert len(names) == len(set(names)) == 150
    assert sum(a.on_gpu for a in ARCHITECTURES) == 60
    assert {a.library for a in ARCHITECTURES} == {"timm", "torchvision", "transformers", "diffusers", "torch"}
    families = {a.family for a in ARCHITECTURES}
    assert len(families) == 13
    assert {a.family for a in ARCHITECTURES if a.on_gpu} == families


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.library == "torch"], ids=lambda a: a.name)
def test_those_of_torch_alone_run(architecture: Architecture) -> None:
    module, args, kwargs = architecture.make()
    assert not module.training
    with torch.no_grad():
        assert all(torch.isfinite(x).all() for x in zoo.tensors_of(module(*args, **kwargs)))


def _row(name: str, outcome: str, **more: Any) -> dict[str, Any]:
    return {"record": "case", "case": name, "outcome": outcome, **more}


def test_the_summary_counts_all_rows_and_one_that_failed_is_no_good_one() -> None:
    rows = [
        _row("a", "right", slower=True, faster=False),
        _row("b", "split", slower=False, faster=True),
        _row("c", "refused", code="W201"),
        _row("d", "wrong"),
        {"record": "case", "case": "e", "failed": "the run ended meanwhile"},
    ]
    found = zoo.summary(rows)
    assert found["total"] == 5
    assert found["passed"] == 2
    assert [found[o] for o in zoo.OUTCOMES] == [1, 1, 1, 1, 1]
    assert (found["slower"], found["faster"]) == (1, 1)


def test_what_has_a_row_is_passed_over_unless_its_outcome_is_asked_for_again() -> None:
    known = {
        "torch/wavenet": _row("torch/wavenet", "right", slower=True),
        "torch/conv-lstm": _row("torch/conv-lstm", "refused"),
        "torch/transformer": {"case": "torch/transformer", "failed": "?"},
    }

    def names(*again: str, device: str = "cpu") -> list[str]:
        return [a.name for a in zoo.wanted(device, ["torch/"], again, known)]

    new = ["torch/lstm-tagger", "torch/speech-gru", "torch/lstm-translator"]
    assert names() == [*new, "torch/transformer-encoder"]
    assert "torch/conv-lstm" in names("refused")
    assert "torch/wavenet" in names("slower") and "torch/wavenet" not in names("refused")
    assert "torch/transformer" in names("failed")
    assert len(names("all")) == 7
    assert "torch/speech-gru" not in names("all", device="cuda")
    assert zoo.wanted("cpu", ["no such"], (), {}) == []


def test_a_library_that_is_not_installed_is_named() -> None:
    absent = Architecture("no_such_library/net", "encoder", lambda: (torch.nn.ReLU(), (), {}))
    assert zoo.missing([absent, *(a for a in ARCHITECTURES if a.library == "torch")]) == ["no_such_library"]


def test_tensors_of_what_models_give() -> None:
    @dataclass
    class Output:
        first: torch.Tensor
        none: None
        many: list[torch.Tensor]

    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=b, values=c)])
    found = zoo.tensors_of({"x": Output(a, None, [b]), "cache": cache, "n": 3})
    assert [x.numel() for x in found] == [1, 2, 2, 3]


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(x).relu() + (0 if y is None else y)


class _Drawing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def _architecture(module: type[torch.nn.Module], **kwargs: Any) -> Architecture:
    return Architecture("torch/net", "encoder", lambda: (module().eval(), (torch.randn(4, 8),), kwargs))


def test_an_architecture_that_compiles_is_right() -> None:
    row = zoo.measured(_architecture(_Net, y=torch.ones(8)), "cpu", 0.0)
    assert row["outcome"] == "right"
    assert row["against"] == "float64"
    assert 0 < row["error"] < 1e-5
    assert "weft_ms" not in row
    assert json.loads(json.dumps(row)) == row


def test_one_that_is_refused_is_so_with_its_code() -> None:
    row = zoo.measured(_architecture(_Drawing), "cpu", 0.0)
    assert (row["outcome"], row["code"]) == ("refused", "W201")
    assert "random numbers" in row["why"]


@pytest.mark.parametrize(
    ("change", "why"), [(lambda x: x + 1e-2, "outside"), (lambda x: x[:2], "gives"), (lambda x: x * np.nan, "outside")]
)
def test_what_is_compiled_wrongly_is_wrong(change: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compile = weft.compile

    class Wrong:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._right = compile(*args, **kwargs)
            self.parts, self.record = self._right.parts, self._right.record

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return change(self._right(*args, **kwargs))

    monkeypatch.setattr(weft, "compile", Wrong)
    row = zoo.measured(_architecture(_Net), "cpu", 0.0)
    assert row["outcome"] == "wrong"
    assert why in row["why"]


@pytest.mark.slow
def test_an_architecture_is_compiled_in_a_process_of_its_own(tmp_path: Path) -> None:
    row = zoo.asked("torch/transformer-encoder", "cpu", 0.0, tmp_path / "log")
    assert row["outcome"] == "right"
    dead = zoo.asked("torch/no-such-architecture", "cpu", 0.0, tmp_path / "log")
    assert dead["outcome"] == "crashed"
    assert str(dead["why"]).startswith("StopIteration")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = max(0.0, min(float(a[2]), float(b[2])) - max(float(a[0]), float(b[0])))
    high = max(0.0, min(float(a[3]), float(b[3])) - max(float(a[1]), float(b[1])))
    areas = [float((x[2] - x[0]) * (x[3] - x[1])) for x in (a, b)]
    return wide * high / (sum(areas) - wide * high)


@pytest.mark.parametrize("seed", range(8))
def test_boxes_that_overlap_a_better_one_go(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    corners = torch.rand(30, 2, generator=draw) * 4
    boxes = torch.cat([corners, corners + 0.5 + torch.rand(30, 2, generator=draw) * 2], 1)
    scores = torch.rand(30, generator=draw)
    kept: list[int] = []
    for i in sorted(range(30), key=lambda k: -float(scores[k])):
        if all(_overlap(boxes[i], boxes[k]) <= 0.4 for k in kept):
            kept.append(i)
    assert vision_operators.nms(boxes, scores, 0.4).tolist() == kept
    assert 1 < len(kept) < 30


def test_no_boxes_are_kept_of_none() -> None:
    assert vision_operators.nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []


def test_the_table_counts_families_and_names_what_is_not_good(monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"record": "environment", "device": "a CPU", "threads": 2, "torch": "2", "commit": "c", "command": "zoo"}
    rows: list[Mapping[str, Any]] = [
        _row("x/a", "right", family="encoder", speedup_eager=4.0, faster=True, slower=False, commit="c"),
        _row("x/b", "split", family="encoder", speedup_eager=1.0, faster=False, slower=False, commit="c"),
        _row("x/c", "refused", family="sound", code="W207", why="a|b", commit="c"),
        _row("x/d", "right", family="sound", speedup_eager=0.5, faster=False, slower=True, commit="d"),
    ]
    monkeypatch.setattr(tables, "records", lambda device, suite: [head, *rows] if device == "cpu" else [])
    text = tables.zoo()
    assert "| encoder | cpu | 2 | 1 | 1 | 0 | 0 | 0 | 1 | 0 | 2.00 |" in text
    assert "| sound | cpu | 2 | 1 | 0 | 1 | 0 | 0 | 0 | 1 | 0.50 |" in text
    assert "| all | cpu | 4 | 2 | 1 | 1 | 0 | 0 | 1 | 1 | 1.26 |" in text
    assert "* `x/c` (cpu): refused W207: a/b" in text
    assert "* `x/d` (cpu): slower, 0.5 times as fast as eager" in text
    monkeypatch.setattr(tables, "records", lambda device, suite: [])
    assert "not measured yet" in tables.zoo()
