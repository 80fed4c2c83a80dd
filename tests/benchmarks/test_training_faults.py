"""Faults that are injected into training steps, one of each that compiles little; and what tells a wrong one."""

from __future__ import annotations

import random

import pytest
import torch
from benchmarks.harness.faults import WrongError
from tools.record_tables import training_faults

from benchmarks import training_faults as f


@pytest.fixture(scope="module")
def trained() -> f.Trained:
    return f.Trained("cpu", 0.0)


QUICK = ("a gradient is NaN, nobody asked", "out of memory", "Ctrl-C", "other settings", "a batch that does not fit",
         "a checkpoint is loaded", "weights move")  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a callback
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_does_what_it_may(name: str, trained: f.Trained) -> None:
    for seed in range(2):
        f.ROWS[name](trained, random.Random(seed))


def test_steps_that_are_left_out() -> None:
    f.skipped(f.Trained("cpu", 0.0, skips=True), random.Random(0))


def test_a_step_that_is_not_a_loops_is_seen(trained: f.Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    step = trained.step

    def half(*batch: torch.Tensor) -> torch.Tensor:
        held = trained.model[0].weight.detach().clone()
        found: torch.Tensor = step(*batch)
        with torch.no_grad():
            trained.model[0].weight.copy_(held)
        return found

    monkeypatch.setattr(trained, "step", half)
    with pytest.raises(WrongError, match=r"0\.weight is not a loop's"):
        trained.as_twin(trained.batch(random.Random(0)), "a step")


def test_what_is_wrong_is_told(trained: f.Trained) -> None:
    before = trained.written()
    trained.step(*trained.batch(random.Random(1)))
    with pytest.raises(WrongError, match="tensors changed"):
        trained.unchanged(before, "a step")
    assert not f._raises(trained, trained.batch(random.Random(1)))


def test_numbers_that_are_none_stand_in_the_same_places() -> None:
    x = torch.tensor([1.0, torch.inf, torch.nan])
    assert f._alike(x, torch.tensor([1.0, torch.nan, torch.nan]))
    assert not f._alike(x, torch.tensor([1.0, 2.0, torch.nan]))
    assert not f._alike(x, torch.tensor([2.0, torch.nan, torch.nan]))


def test_the_command_knows_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        f.main(["--only", "nothing"])
    assert "no row has 'nothing'" in capsys.readouterr().err


def test_every_row_of_the_table_is_one_that_is_injected() -> None:
    shown = {line.split("|")[1].strip() for line in training_faults().splitlines() if line.startswith("| ")} - {"fault"}
    assert shown <= set(f.ROWS)
