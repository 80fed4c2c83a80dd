"""torch.fx keeps the text of what it traces; nothing of ours is left there."""

from __future__ import annotations

import linecache
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import graph_module

import weft
from weft import api
from weft.frontends import torch as torch_frontend
from weft.frontends.torch.traced_text import traced_text_dropped
from weft.options import Options


def test_new_shapes_leave_no_text_behind() -> None:
    """A service that meets thousands of shapes keeps its memory."""
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    compiled = weft.compile(module, (torch.ones(1, 4),), options=Options(budget_s=0))
    kept = graph_module._loader.eval_cache
    before = dict(kept)
    for rows in range(2, 6):
        assert compiled(torch.ones(rows, 4)).shape == (rows, 4)
    assert kept == before
    assert not [name for name in linecache.cache if name.startswith("<eval_with_key>") and name not in before]


def test_what_others_traced_keeps_its_text() -> None:
    traced = torch.fx.symbolic_trace(nn.ReLU())
    name = traced.forward.__code__.co_filename
    with traced_text_dropped():
        inside = torch.fx.symbolic_trace(nn.GELU())
    assert "relu" in "".join(linecache.getlines(name))
    assert inside.forward.__code__.co_filename not in linecache.cache
    assert inside(torch.ones(2)).shape == (2,)


def test_nobody_traces_while_operators_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads at once found the framework's stack of modes as the other had left it: `slot already occupied`."""
    held = []
    taken_in = torch_frontend.import_exported

    def watched(*given: Any, **named: Any) -> Any:
        other = threading.Thread(target=lambda: held.append(not api._TRACING.acquire(blocking=False)))
        other.start()
        other.join()
        return taken_in(*given, **named)

    monkeypatch.setattr(torch_frontend, "import_exported", watched)
    weft.compile(nn.Linear(3, 3).eval(), (torch.ones(1, 3),), options=Options(budget_s=0))
    assert held == [True]
