"""The examples of docs/colocation.md that need a GPU, on one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

PAGE = Path(__file__).parents[3] / "docs" / "colocation.md"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    budgets, beside, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    beside = beside.replace("budget_s=10", "budget_s=60")  # other tests run beside this one
    names: dict[str, Any] = {}
    text = budgets.replace('profile("h200")', "gpu_facts(None, calibrate=False)").replace(
        "import profile", "import gpu_facts"
    )
    for block in (text, beside):
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    done, results = names["network"].counts, names["results"]
    assert "inferences" in capsys.readouterr().out and len(results) == done.inferences
    assert done.queued_kernels == 0 and names["seconds"] < 1
    for outputs in results:
        assert torch.equal(outputs[0], results[0][0])
    wanted = names["be"].executable(names["y"])
    assert not results or torch.equal(results[0][0], wanted[0])
    assert torch.equal(names["answer"], names["lc"](names["x"]))
