"""What a compilation made and nobody needs any more is gone at once: graphs and traced modules hold weights."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from weft.ir.graph import Graph

SOURCES = Path(weft.__file__).parent


def _module() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4), nn.ReLU()).eval()


def _x(rows: int) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def _calls_itself(function: ast.FunctionDef) -> bool:
    names = (x for statement in function.body for x in ast.walk(statement) if isinstance(x, ast.Name))
    return any(x.id == function.name and isinstance(x.ctx, ast.Load) for x in names)


def _inner(node: ast.AST, inside: bool) -> list[ast.FunctionDef]:
    """Functions that are defined while another runs."""
    found = []
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef)
        if inside and isinstance(child, ast.FunctionDef):
            found.append(child)
        found += _inner(child, is_function or (inside and not isinstance(child, ast.ClassDef)))
    return found


@pytest.mark.slow
def test_no_function_within_another_calls_itself() -> None:
    """It would be in a cycle with all that it reads, which stays until the interpreter looks for cycles."""
    found = [
        f"{path.relative_to(SOURCES)}:{function.lineno} {function.name}"
        for path in sorted(SOURCES.rglob("*.py"))
        for function in _inner(ast.parse(path.read_text(encoding="utf-8")), inside=False)
        if _calls_itself(function)
    ]
    assert found == []


def test_no_graph_waits_for_a_search_of_cycles(tmp_path: Path) -> None:
    module = _module()
    compiled = weft.compile(module, _x(1), options=weft.Options(budget_s=0, cache_dir=tmp_path, max_plans=1))
    gc.collect()
    gc.disable()
    try:
        for rows in (2, 3):
            torch.testing.assert_close(compiled(_x(rows)), module(_x(rows)))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        graphs = [x for x in gc.garbage if isinstance(x, Graph)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert graphs == []


def test_weights_before_a_refit_are_gone(tmp_path: Path) -> None:
    compiled = weft.compile(_module(), _x(1), options=weft.Options(budget_s=0, cache_dir=tmp_path))
    state = _module().state_dict()
    compiled.refit({k: v + 1 for k, v in state.items()}, recompile=True)
    old = [weakref.ref(p) for p in compiled._source._called.parameters()]  # type: ignore[attr-defined]
    assert len(old) == 4 and all(p() is not None for p in old)
    compiled.refit({k: v + 2 for k, v in state.items()}, recompile=True)
    assert [p() for p in old] == [None] * 4
