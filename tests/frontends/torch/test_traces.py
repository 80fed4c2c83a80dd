"""The framework keeps text and results of fake tensors of what it traces; of ours no text stays, and few results."""

from __future__ import annotations

import linecache
import sys
import threading
from collections import deque
from contextvars import copy_context
from typing import Any

import pytest
import torch
from tests.typed import narrow
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

import weft
from weft import api
from weft.frontends import torch as torch_frontend
from weft.frontends.torch import traces
from weft.frontends.torch.traces import traced
from weft.options import Options


def test_new_shapes_leave_no_text_behind() -> None:
    """A service that meets thousands of shapes keeps its memory."""
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    compiled = weft.compile(module, (torch.ones(1, 4),), options=Options(budget_s=0))
    kept = graph_module._loader.eval_cache
    before = dict(kept)
    for rows in range(2, 6):
        assert narrow(torch.Tensor, compiled(torch.ones(rows, 4))).shape == (rows, 4)
    assert kept == before
    assert not [name for name in linecache.cache if name.startswith("<eval_with_key>") and name not in before]


def test_new_shapes_leave_few_results_of_fake_tensors_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape left some 20 entries of two layers for good; those of others stay."""
    torch.export.export(nn.Sequential(nn.Linear(5, 3), nn.ReLU()).eval(), (torch.ones(7, 5),), strict=False)
    before = list(FakeTensorMode.cache)
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
    monkeypatch.setattr(traces, "KEPT", 30)
    monkeypatch.setattr(traces, "_kept", deque())
    compiled = weft.compile(module, (torch.ones(1, 4),), options=Options(budget_s=0))
    for rows in range(2, 8):
        compiled(torch.ones(rows, 4))
    assert before
    assert list(FakeTensorMode.cache)[: len(before)] == before
    assert 0 < len(FakeTensorMode.cache) - len(before) <= 30


def test_new_shapes_leave_no_variables_in_the_thread_s_context() -> None:
    """Each export left two, as large a context as there were shapes."""
    compiled = weft.compile(nn.Linear(4, 4).eval(), (torch.ones(1, 4),), options=Options(budget_s=0))
    compiled(torch.ones(2, 4))
    before = set(copy_context())
    for rows in range(3, 6):
        compiled(torch.ones(rows, 4))
    assert set(copy_context()) == before


def test_what_others_traced_keeps_its_text() -> None:
    mine = torch.fx.symbolic_trace(nn.ReLU())
    name = mine.forward.__code__.co_filename
    inside = traced(torch.fx.symbolic_trace, nn.GELU())
    assert "relu" in "".join(linecache.getlines(name))
    assert inside.forward.__code__.co_filename not in linecache.cache
    assert inside(torch.ones(2)).shape == (2,)


def test_nobody_traces_while_operators_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads at once found the framework's stack of modes as the other had left it: `slot already occupied`."""
    held = []
    taken_in = torch_frontend.functional_program

    def watched(*given: Any, **named: Any) -> Any:
        other = threading.Thread(target=lambda: held.append(not api._TRACING.acquire(blocking=False)))
        other.start()
        other.join()
        return taken_in(*given, **named)

    monkeypatch.setattr(torch_frontend, "functional_program", watched)
    weft.compile(nn.Linear(3, 3).eval(), (torch.ones(1, 3),), options=Options(budget_s=0))
    assert held == [True]


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if (x + 1).sum() > 0 else -x


def test_a_graph_that_is_not_finished_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """torch shows it in hundreds of lines where a branch depends on values; what others print is theirs."""
    given = (Branch(), (torch.ones(3),))
    with pytest.raises(RuntimeError, match="data-dependent"):
        torch.export.export(*given, strict=False)
    assert "def forward(" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="data-dependent"):
        traced(torch.export.export, *given, strict=False)
    assert not capsys.readouterr().err.strip()

    def prints() -> None:
        sys.stderr.write("\n\ndef forward(self):\n")
        sys.stderr.write("\n")
        sys.stderr.write("of ours\n")
        other = threading.Thread(target=lambda: sys.stderr.write("def forward(theirs)\n"))
        other.start()
        other.join()

    traced(prints)
    assert capsys.readouterr().err.split("\n") == ["of ours", "def forward(theirs)", ""]
    sys.stderr.write("def forward(behind)")
    assert "behind" in capsys.readouterr().err
