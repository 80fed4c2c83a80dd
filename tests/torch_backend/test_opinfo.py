"""The conformance tool itself: what it counts, and that it sees a wrong engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.opinfo import main, records, run, run_sample
from torch.testing._internal.common_methods_invocations import op_db

from weft.torch_backend import reference_engine


def sample_of(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    info = next(i for i in op_db if i.formatted_name == name)
    return info, next(iter(info.sample_inputs("cpu", dtype, requires_grad=False)))


def test_outcomes_of_some_operators() -> None:
    lines, _ = run("reference", 1, "^(softmax|cumsum|topk|fft_rfft|empty|logical_and)$", jobs=0)
    outcome = {(x.op, x.dtype): x.outcome for x in lines}
    assert outcome["softmax", "float32"] == "native"
    assert outcome["logical_and", "bool"] == "native"
    assert outcome["cumsum", "int64"] == "native"
    assert outcome["topk", "int64"] == "fallback"
    assert outcome["fft_rfft", "float32"] == "eager"
    assert outcome["empty", "float32"] == "skipped"
    summary = list(records(lines))[-1]
    assert summary["record"] == "summary"
    assert summary["total"] == len(lines)
    assert summary["wrong"] == summary["crashed"] == 0


@pytest.mark.parametrize(
    "change", [lambda y: y + 1e-3, lambda y: y[..., :1], lambda y: y.double(), lambda y: y * torch.nan]
)
def test_a_wrong_engine_is_seen(change: Callable[..., Any]) -> None:
    def engine(imported: Any, options: Any, eager: Any) -> Any:
        return lambda tensors: [change(y) for y in reference_engine(imported, options, eager)(tensors)]

    assert run_sample(*sample_of("tanh"), engine)[0] == "wrong"


def test_a_result_as_near_as_eager_passes() -> None:
    def engine(imported: Any, options: Any, eager: Any) -> Any:
        return lambda tensors: [y + 1e-5 * y.sign() for y in reference_engine(imported, options, eager)(tensors)]

    assert run_sample(*sample_of("tanh"), engine)[0] == "native"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    assert main(["--only", "^(relu|neg)$", "--jobs", "0", "--samples", "1", "--output", str(output)]) == 0
    found = [json.loads(x) for x in output.read_text().splitlines()]
    assert found[0]["record"] == "environment"
    assert found[0]["engine"] == "reference"
    assert found[-1]["suite"] == "opinfo"
    assert found[-1]["native"] == found[-1]["total"] > 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["wrong"] == 0
