"""A step that was compiled before, in whatever process, is recalled by its graph: nothing is looked for or drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from weft.options import Options
from weft.training import Step, compile_step

CHOSEN_BEFORE = "a plan that was chosen before: nothing is measured"
SEARCH = {"enumerate", "extract", "measure", "select", "qualify", "reference", "time"}


class Posed(NamedTuple):
    """What is compiled, by what decides its graph."""

    width: int = 8
    dtype: torch.dtype = torch.float32
    decay: float = 0.0
    rate: float = 0.1


def compiled(posed: Posed, cache: Path) -> Step:
    """In a cache of its own; weights and inputs are drawn anew by each process."""
    model = nn.Sequential(nn.Linear(6, posed.width), nn.Tanh(), nn.Linear(posed.width, 3)).to(posed.dtype)
    optimizer = torch.optim.SGD(model.parameters(), posed.rate, 0.9, weight_decay=posed.decay)
    x, t = torch.randn(5, 6, dtype=posed.dtype), torch.randint(0, 3, (5,))
    options = Options(budget_s=0, cache_dir=cache)
    return compile_step(model, nn.CrossEntropyLoss(), optimizer, x, t, options=options)


def stages(step: Step) -> dict[str, str]:
    """With their details."""
    return {s.name: s.detail for s in step.record.stages}


def is_recalled(found: dict[str, str]) -> bool:
    """And nothing was looked for; else everything was."""
    recalled = CHOSEN_BEFORE in found.values()
    assert SEARCH.isdisjoint(found) if recalled else found.keys() >= {"enumerate", "time"}
    return recalled


CASES = {
    "the same": (Posed(), True),
    "another rate, which a step reads": (Posed(rate=0.3), True),
    "another network": (Posed(width=9), False),
    "another type": (Posed(dtype=torch.float64), False),
    "weight decay": (Posed(decay=0.1), False),
}

SCRIPT = """
import json, sys
from pathlib import Path
from tests.training.test_recall import CASES, compiled, stages
print(json.dumps({name: stages(compiled(posed, Path(sys.argv[1]))) for name, (posed, _) in CASES.items()}))
"""


def test_another_process_recalls_the_same_step_and_no_other(tmp_path: Path) -> None:
    assert not is_recalled(stages(compiled(Posed(), tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: is_recalled(found[name]) for name in CASES} == {name: same for name, (_, same) in CASES.items()}


def test_a_recalled_step_draws_no_examples_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(Posed(), tmp_path)

    def drawn(*_: object) -> torch.Tensor:
        raise AssertionError("nothing is judged")

    monkeypatch.setattr(Step, "_example", drawn)
    step = compiled(Posed(), tmp_path)
    assert is_recalled(stages(step))
    assert step(torch.randn(5, 6), torch.randint(0, 3, (5,))).isfinite()
