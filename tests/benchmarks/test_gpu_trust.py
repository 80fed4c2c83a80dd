"""The parts of `benchmarks.gpu_trust` that need no GPU: its models, its faults and what it counts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from benchmarks.gpu_faults import MULTIPLY, problem
from benchmarks.harness.record import Record
from tests.slow import few

from benchmarks import gpu_trust
from weft.kernels.measurement import Verdict
from weft.kernels.source import CallStep, LibraryCall, Ref, Schedule
from weft.tune.verify import LibrarySubject, classify, reference_of, verify


def test_eleven_models_at_several_batches() -> None:
    assert len(gpu_trust.MODELS) == 11 == len(gpu_trust.BATCHES)
    assert gpu_trust.BATCHES["gpt2"] == (1, 2, 4, 8, 16, 32)
    assert all(len(b) > 1 for b in gpu_trust.BATCHES.values())


@pytest.mark.parametrize("name", [n for n, (build, _) in gpu_trust.MODELS.items() if build is gpu_trust._block])
def test_a_model_is_the_same_every_time(name: str) -> None:
    (model, inputs), (again, _) = gpu_trust.made(name, 2, tokens=12), gpu_trust.made(name, 2, tokens=12)
    with torch.no_grad():
        got, exact = model(*inputs), again.double()(*gpu_trust.as_type(inputs, torch.float64))
    assert gpu_trust.error(got, exact) < gpu_trust.ROUNDING[torch.float32]


def test_errors_are_judged_by_eagers_and_by_rounding() -> None:
    x = torch.ones(4)
    assert gpu_trust.error(x, x) == 0
    assert gpu_trust.error(x * torch.nan, x) == gpu_trust.error(x[:2], x) == float("inf")
    assert gpu_trust.is_right(1.9e-2, 1e-2, torch.float16) and not gpu_trust.is_right(2.1e-2, 1e-2, torch.float16)
    assert gpu_trust.is_right(9e-4, 0.0, torch.float16) and not gpu_trust.is_right(float("inf"), 1.0, torch.float16)


@pytest.mark.parametrize("kind", gpu_trust.KINDS)
@pytest.mark.parametrize("number", few([0, 1, 2], 1))
def test_every_fault_is_one(kind: str, number: int) -> None:
    here = problem(f"{kind} {number}")
    written = LibraryCall(
        Schedule("library"), (), (CallStep("aten.mul.out", (Ref("in", 0), Ref("in", 1))),), (Ref("tmp", 0),), True
    )
    reference = reference_of(here.graph, seed=0)
    for call in (MULTIPLY, written):
        subject = LibrarySubject(here, call)
        sound = verify(here, subject, reference.laid_out(here), {}, slow_s=1e9, clock=perf_counter_ns)
        assert sound.finding.verdict is Verdict.OK
        bad = gpu_trust.broken(kind, number, call)
        assert bad.schedule != call.schedule and not bad.out_variant
        try:
            subject = LibrarySubject(here, bad)
            found = verify(here, subject, reference.laid_out(here), {}, slow_s=1e9, clock=perf_counter_ns).finding
        except (RuntimeError, TypeError, IndexError) as error:
            found = classify(error)
        assert found.verdict is not Verdict.OK


@pytest.mark.parametrize(
    ("writing", "giving"),
    [
        ("aten.mul.out", "aten.mul.Tensor"), ("aten.where.self_out", "aten.where.self"),
        ("aten.sum.IntList_out", "aten.sum.dim_IntList"), ("aten.amax.out", "aten.amax.default"),
    ],
)  # fmt: skip
def test_a_call_that_writes_is_broken_in_the_form_that_gives(writing: str, giving: str) -> None:
    assert gpu_trust.functional(writing) == giving


def test_a_call_that_only_writes_is_not_broken() -> None:
    with pytest.raises(ValueError, match=r"what aten\.empty\.out does"):
        gpu_trust.functional("aten.empty.out")


@pytest.mark.slow
def test_wrong_numbers_in_plans_are_refused_and_what_changes_no_result_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_trust, "lives", lambda: True)
    tmp_path.chmod(0o700)
    (found,) = gpu_trust.plan_faults(("wrong numbers",), 16, tmp_path, device="cpu")
    assert found["right"] and found["injected"] == 16
    assert found["none_at"] == {"aten.amax.out": 2}, "a softmax is the same whatever is taken from a row"
    assert found["bad_at"] == {} and cast("dict[str, int]", found["chosen"]).get("bad", 0) == 0


def test_the_summary_counts_models_and_faults_apart() -> None:
    lines = [
        {"case": "gpt2 batch 1", "alive": True, "right": True, "faster": True},
        {"case": "gpt2 batch 8", "alive": False, "right": False, "faster": False},
        {"case": "faults in calls: refuses", "injected": 100, "alive": True, "right": True},
        {"case": "faults in plans: refuses", "injected": 50, "alive": True, "right": False},
    ]
    found = gpu_trust.summary(lines)
    assert (found["total"], found["alive"], found["right"], found["faster"]) == (2, 1, 1, 1)
    assert (found["faults"], found["fault_cases"], found["fault_cases_right"]) == (150, 2, 1)
    assert "gpt2 batch 8" in gpu_trust.table(lines)


def test_a_part_that_raises_or_dies_is_a_line_and_the_others_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        '*calls*) echo \'{"case": "one", "right": true}\'; echo progress; exit 3;;\n'
        "*compilation*) kill -9 $$;;\n"
        '*) echo \'{"case": "two", "right": true}\';;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    added: list[dict[str, object]] = []
    record = SimpleNamespace(add=added.append)
    found = gpu_trust.faults(cast("Record", record), 100, 2, 1.0)
    assert found == added
    told = {x["case"]: x.get("problem", "") for x in found}
    assert told == {
        "one": "", "two": "", "faults, calls": "its process ended with status 3",
        "faults, compilation": "its process ended with status -9",
    }  # fmt: skip
    assert sum(x["case"] == "two" for x in found) == 2 and sum(bool(x["right"]) for x in found) == 3

    def raising(*_: object) -> Iterator[dict[str, object]]:
        yield {"case": "first"}
        raise ValueError("no plan")

    monkeypatch.setattr(gpu_trust, "PARTS", {"raises": raising})
    monkeypatch.setattr(gpu_trust, "lives", lambda: True)
    assert gpu_trust.run_part("raises", 1, 1, 1.0) == 0
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"case": "first"}
    assert (last["right"], last["alive"], last["problem"]) == (False, True, "ValueError: no plan")


def test_progress_is_told_in_tenths(capsys: pytest.CaptureFixture[str]) -> None:
    for done in range(1, 26):
        gpu_trust.told("faults in calls: refuses", done, 25)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 13 and lines[-1].endswith("faults in calls: refuses: 25 of 25")
    for name in gpu_trust.KINDS:
        assert (name in gpu_trust.PLAN_KINDS) == (name not in gpu_trust.STICKY)
