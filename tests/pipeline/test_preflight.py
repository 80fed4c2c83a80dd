"""What a model takes at once is known before anything is computed, and too much is refused by name."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.hostile import onnx_files as files
from tests.hostile.onnx_files import value
from tests.typed import noting

import weft
from weft.errors import LimitError
from weft.generate.library import execute
from weft.generate.library.execute import BoundCall
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.source import CallStep, LibraryCall, Ref, Schedule
from weft.pipeline.preflight import needed
from weft.tune import oracle

N = 1000


def chain(length: int) -> GraphBuilder:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (N,)), "x")
    for _ in range(length):
        x = b.add(Prim.EXP, x)
    return b


def test_a_chain_needs_two_values_however_long() -> None:
    found = [needed(chain(k).build([k]), wide=False).peak_bytes for k in (2, 50)]
    assert found[0] == found[1] == 4 * N * 4  # the input and the result given, two values alive


def test_what_is_read_late_stays_alive() -> None:
    b = chain(5)
    y = b.add(Prim.ADD, 1, 5)
    assert needed(b.build([y]), wide=False).peak_bytes == (2 + 3) * N * 4


def test_float64_counts_eight_bytes() -> None:
    graph = chain(3).build([3])
    assert needed(graph, wide=True).peak_bytes == 2 * N * 4 + 2 * N * 8


def test_views_take_nothing_and_copies_of_them_do() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 4)), "x")
    wide = b.broadcast(x, (N, 4))
    y = b.add(Prim.EXP, x)
    assert needed(b.build([y]), wide=False).peak_bytes < 100
    tiled = b.reshape(wide, (4 * N,))
    need = needed(b.build([tiled, y]), wide=False)
    assert need.peak_bytes >= 4 * N * 4 and need.largest == tiled


def test_weights_count_from_where_they_are_read() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (N,)), "x")
    weights = [b.constant(np.full(N, k, np.float32), DType.F32) for k in range(9)]
    for w in weights:
        x = b.add(Prim.ADD, x, w)
    found = needed(b.build([x]), wide=True).peak_bytes
    assert found == (9 + 2) * N * 4 + 3 * N * 8  # all as they are; in float64 one at a time


@pytest.mark.slow
def test_ten_thousand_nodes_take_no_time() -> None:
    graph = chain(100_000).build([100_000])
    start = time.process_time()
    needed(graph, wide=True)
    assert time.process_time() - start < 5


def ints(name: str, *values: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def summed(nodes: Any, initialisers: Any, kind: Any = TensorProto.FLOAT) -> Any:
    """A huge value that is summed up at once: the result is small."""
    return files.model(
        [*nodes, helper.make_node("ReduceSum", ["z"], ["y"], keepdims=0)],
        outputs=[value("y", (), kind)],
        initialisers=initialisers,
    )


def doubled(times: int) -> Any:
    names = ["x", *(f"v{k}" for k in range(times - 1)), "z"]
    return summed([helper.make_node("Concat", [a, a], [b], axis=0) for a, b in itertools.pairwise(names)], [])


BOMBS = {
    "Tile": lambda: summed([helper.make_node("Tile", ["x", "r"], ["z"], name="bomb")], [ints("r", 1 << 31)]),
    "Pad": lambda: summed([helper.make_node("Pad", ["x", "p"], ["z"], name="bomb")], [ints("p", 0, 1 << 31)]),
    "Expand": lambda: summed(
        [helper.make_node("Expand", ["x", "s"], ["w"]), helper.make_node("Exp", ["w"], ["z"], name="bomb")],
        [ints("s", 1 << 31, 2)],
    ),
    "Concat": lambda: doubled(31),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_name(name: str, tmp_path: Path) -> None:
    options = weft.Options(budget_s=0, compile_memory_bytes=1 << 30, cache_dir=tmp_path)
    start = time.process_time()
    with pytest.raises(LimitError, match="W105") as caught:
        weft.compile(files.raw(BOMBS[name]()), options=options)
    assert time.process_time() - start < 5
    assert ("'bomb'" in str(caught.value) or "Concat" in str(caught.value)) and "GiB" in str(caught.value)
    assert "WEFT_COMPILE_MEMORY_BYTES" in str(caught.value)


def test_what_is_free_is_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weft.platform.cpu.free_bytes", lambda: 1 << 20)
    with pytest.raises(LimitError, match="free"):
        weft.compile(files.raw(BOMBS["Tile"]()), options=weft.Options(budget_s=0, cache_dir=tmp_path))


class Grows(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1 << 20, 64).sum()


def test_torch_modules_too(tmp_path: Path) -> None:
    options = weft.Options(budget_s=0, compile_memory_bytes=1 << 28, cache_dir=tmp_path)
    with pytest.raises(LimitError, match="W105") as caught:
        weft.compile(Grows(), (torch.ones(2, 8),), options=options)
    assert "repeat" in str(caught.value) or "expand" in str(caught.value), str(caught.value)


@pytest.mark.slow
def test_a_library_call_gives_back_what_nobody_reads_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a network by single operators holds every value of it at once."""
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    kept = execute._keep

    def watched(result: Any, which: Any) -> Any:
        made = kept(result, which)
        held.append(weakref.ref(made))
        gc.collect()
        alive.append(sum(r() is not None for r in held))
        return made

    monkeypatch.setattr(execute, "_keep", watched)
    steps = tuple(CallStep("aten.exp.default", (Ref("in", 0) if k == 0 else Ref("tmp", k - 1),)) for k in range(8))
    call = LibraryCall(Schedule("library"), (), steps, (Ref("tmp", 7),))
    (y,) = BoundCall(call, {}).run([torch.zeros(4)])
    assert y.shape == (4,) and max(alive) <= 3


def test_the_reference_holds_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4,)), "x")
    weights = [b.constant(np.full(4, k, np.float32), DType.F32) for k in range(9)]
    for w in weights:
        x = b.add(Prim.ADD, x, w)
    made: list[int] = []
    own = oracle._weight

    def watched(graph: Any, i: Any, state: Any, device: Any) -> Any:
        made.append(i)
        return own(graph, i, state, device)

    order: list[int] = []
    monkeypatch.setattr(oracle, "_weight", watched)
    add = oracle.TABLE[Prim.ADD]
    monkeypatch.setitem(oracle.TABLE, Prim.ADD, noting(lambda *a: order.append(len(made)), add))
    found = oracle.evaluate(b.build([x]), [torch.zeros(4)], oracle.Mode.PRECISE, seed=0)
    assert order == list(range(1, 10))
    assert not isinstance(found, Declined)
    assert found.outputs[0].tolist() == [36.0] * 4 and found.exact == (True,)
