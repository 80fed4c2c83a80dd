from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import weft
from weft.frontends.torch import import_exported
from weft.pipeline.indices import with_checks
from weft.runtime.executable import InputError
from weft.runtime.indices import IndexOutsideError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _options(cache: Path, *, on: bool = True) -> weft.Options:
    return weft.Options(budget_s=0, cache_dir=cache, check_indices=on)


class Words(nn.Module):
    """Embeddings of words and of positions, which the model computes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.words, self.places = nn.Embedding(50, 24), nn.Embedding(12, 24)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = mask.cumsum(1).to(torch.int64) * 2
        return torch.tanh(self.words(ids) + self.places(places))


IDS = torch.arange(12).reshape(2, 6)
MASK = torch.ones(2, 6, dtype=torch.int64)


def test_an_index_of_an_input_is_named(cache: Path) -> None:
    model = Words().eval()
    compiled = weft.compile(model, (IDS, MASK * 0), options=_options(cache))
    torch.testing.assert_close(compiled(IDS, MASK * 0), model(IDS, MASK * 0))
    wrong = IDS.clone()
    wrong[1, 2] = 50
    with pytest.raises(
        IndexOutsideError, match=r"input 0: index 50 at \[1, 2\] is outside of \[0, 50\).*W013"
    ) as raised:
        compiled(wrong, MASK * 0)
    assert isinstance(raised.value, InputError)
    assert "embedding" in str(raised.value)
    torch.testing.assert_close(compiled(IDS, MASK * 0), model(IDS, MASK * 0))


def test_an_index_that_the_model_computes_is_named(cache: Path) -> None:
    compiled = weft.compile(Words().eval(), (IDS, MASK * 0), options=_options(cache))
    with pytest.raises(IndexOutsideError, match=r"an index that the model computes: index 12 at \[0, 5\]"):
        compiled(IDS, MASK)


def test_without_the_option_it_is_clamped(cache: Path) -> None:
    model = Words().eval()
    compiled = weft.compile(model, (IDS, MASK * 0), options=_options(cache, on=False))
    torch.testing.assert_close(compiled.executable(IDS + 100, MASK * 0)[0], model(IDS * 0 + 49, MASK * 0))


def test_a_saved_plan_checks_too(cache: Path, tmp_path: Path) -> None:
    model = Words().eval()
    weft.compile(model, (IDS, MASK * 0), options=_options(cache)).save(tmp_path / "m.weft")
    loaded = weft.load(tmp_path / "m.weft", options=weft.Options(cache_dir=cache))
    torch.testing.assert_close(loaded(IDS, MASK * 0), model(IDS, MASK * 0))
    with pytest.raises(IndexOutsideError, match="input 0: index 106"):
        loaded(IDS + 100 + 6, MASK * 0)


def test_a_plan_recalled_and_one_refitted_check_too(cache: Path) -> None:
    both = [weft.compile(Words().eval(), (IDS, MASK * 0), options=_options(cache)) for _ in range(2)]
    for compiled in both:
        with pytest.raises(IndexOutsideError, match="input 0: index -1"):
            compiled(IDS - 1, MASK * 0)
    compiled = both[-1]
    with torch.random.fork_rng():
        torch.manual_seed(8)
        other = nn.Embedding(50, 24).weight.detach()
    compiled.refit({"words.weight": other})
    torch.testing.assert_close(compiled(IDS, MASK * 0), torch.tanh(other[IDS] + Words().places.weight[0]))
    with pytest.raises(IndexOutsideError, match="input 0: index -1"):
        compiled(IDS - 1, MASK * 0)


class _Points(nn.Module):
    def forward(self, x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return x[i, j] * 2


@pytest.mark.parametrize(
    ("i", "j", "said"),
    [
        ([0, -3], [4, -5], ""),
        ([0, 3], [0, 0], r"input 1: index 3 at \[1\] is outside of \[-3, 3\)"),
        ([0, 1], [0, -6], r"input 2: index -6 at \[1\] is outside of \[-5, 5\)"),
        ([0, 0], [0, 7], r"input 2: index 7 at \[1\]"),  # together they would be within the nine rows
    ],
)
def test_each_part_of_a_position_is_held_to_its_own_bound(i: list[int], j: list[int], said: str, cache: Path) -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    at = [torch.tensor(k) for k in (i, j)]
    compiled = weft.compile(_Points(), (x, torch.tensor([0, 1]), torch.tensor([1, 2])), options=_options(cache))
    if not said:
        torch.testing.assert_close(compiled(x, *at), x[at[0], at[1]] * 2)
        return
    with pytest.raises(IndexOutsideError, match=said):
        compiled(x, *at)


class _Best(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.index_select(x, 0, x.sum(1).argmax().reshape(1))


def test_what_cannot_lie_outside_costs_nothing() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for module in (_Best(), nn.Sequential(nn.Linear(6, 6))):
        imported = import_exported(torch.export.export(module, (x,)))
        given, checks = with_checks(imported)
        assert given is imported
        assert checks == ()


def _onnx(op: str, inputs: Sequence[tuple[str, int, list[int]]], outputs: list[int], **attributes: Any) -> bytes:
    graph = helper.make_graph(
        [helper.make_node(op, [name for name, *_ in inputs], ["y"], name="pick", **attributes)], "g",
        [helper.make_tensor_value_info(*x) for x in inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, outputs)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


REAL, INT = TensorProto.FLOAT, TensorProto.INT64


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "good", "bad", "said"),
    [
        ("Gather", [("x", REAL, [4, 3]), ("i", INT, [2])], [2, 3], [0, -4], [0, 4], r"index 4 at \[1\].*\[-4, 4\)"),
        ("GatherElements", [("x", REAL, [4, 3]), ("i", INT, [1, 3])], [1, 3], [[0, 1, 3]], [[0, -5, 1]],
         r"index -5 at \[0, 1\]"),
        ("GatherND", [("x", REAL, [4, 3]), ("i", INT, [1, 2])], [1], [[3, -3]], [[0, 3]],
         r"index 3 at \[0\].*\[-3, 3\)"),
        ("ScatterElements", [("x", REAL, [4]), ("i", INT, [2]), ("u", REAL, [2])], [4], [0, 3], [1, 9],
         r"index 9 at \[1\].*\[-4, 4\)"),
    ],
)  # fmt: skip
def test_onnx_operators(
    op: str,
    inputs: list[tuple[str, int, list[int]]],
    outputs: list[int],
    good: list[int] | list[list[int]],
    bad: list[int] | list[list[int]],
    said: str,
    cache: Path,
) -> None:
    compiled = weft.compile(_onnx(op, inputs, outputs), options=_options(cache))
    chance = np.random.default_rng(0)
    values = [torch.from_numpy(chance.random(shape, dtype=np.float32)) for _, kind, shape in inputs if kind == REAL]
    compiled(values[0], torch.tensor(good), *values[1:])
    with pytest.raises(IndexOutsideError, match=said + rf".*pick.*\({op}\)"):
        compiled(values[0], torch.tensor(bad), *values[1:])
