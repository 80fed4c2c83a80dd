"""Operators of other libraries that a plan runs by ATen's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import weft
from weft.errors import UnsupportedError
from weft.frontends.torch import import_exported
from weft.frontends.torch.foreign import FOREIGN

NAME = "transformers.grouped_mm_fallback.default"


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    """transformers' own, or one that computes what it says."""
    try:
        from transformers.integrations import moe  # noqa: F401

        yield
        return
    except ImportError:
        pass
    own = torch.library.Library("transformers", "DEF")
    own.define("grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor")
    own.impl("grouped_mm_fallback", by_groups, "CPU")
    torch.library.register_fake(
        "transformers::grouped_mm_fallback", lambda x, w, offs: x.new_empty(x.size(0), w.size(2)), lib=own
    )
    yield
    own._destroy()


def by_groups(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.size(0), weight.size(2), dtype=x.dtype)
    start = 0
    for matrix, end in zip(weight, offs.tolist(), strict=True):
        out[start:end] = x[start:end] @ matrix
        start = end
    return out


class Experts(torch.nn.Module):
    def __init__(self, groups: int = 3, wide: int = 16, narrow: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(groups * wide + narrow)
        self.weight = torch.nn.Parameter(torch.randn(groups, wide, narrow, generator=draw).to(dtype))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.ops.transformers.grouped_mm_fallback(torch.relu(x), self.weight, offs) + 1


def rows(count: int = 10, wide: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, wide, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("ends", [[3, 5, 10], [0, 0, 10], [10, 10, 10], [2, 2, 7], [0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_product_of_groups_of_rows_is_one_call_of_aten(ends: list[int], dtype: torch.dtype, tmp_path: Path) -> None:
    module, x, offs = Experts().eval(), rows(), torch.tensor(ends, dtype=dtype)
    compiled = weft.compile(module, (x, offs), options=weft.Options(budget_s=0, cache_dir=tmp_path))
    assert not compiled.parts
    assert [(op, count) for op, _, count in compiled.record.opaque] == [(NAME, 1)]
    # rows behind the last group are zero, whatever was in memory
    wanted = by_groups(torch.relu(x), module.weight.detach(), offs) + 1
    for other in (compiled, compiled.executable):
        found = other(x, offs)
        torch.testing.assert_close(found if isinstance(found, torch.Tensor) else found[0], wanted)


def test_other_groups_in_another_call(tmp_path: Path) -> None:
    module, x = Experts().eval(), rows()
    compiled = weft.compile(module, (x, torch.tensor([1, 2, 10])), options=weft.Options(budget_s=0, cache_dir=tmp_path))
    for ends in ([10, 10, 10], [0, 9, 9]):
        offs = torch.tensor(ends)
        wanted = by_groups(torch.relu(x), module.weight.detach(), offs) + 1
        torch.testing.assert_close(compiled.executable(x, offs)[0], wanted)


def test_a_saved_plan_needs_no_such_library(tmp_path: Path) -> None:
    module, x, offs = Experts().eval(), rows(), torch.tensor([3, 5, 10])
    compiled = weft.compile(module, (x, offs), options=weft.Options(budget_s=0, cache_dir=tmp_path))
    digest = compiled.save(tmp_path / "m.weft")
    loaded = weft.load(tmp_path / "m.weft", trust=digest)
    torch.testing.assert_close(loaded(x, offs), module(x, offs).detach())


@pytest.mark.parametrize(
    ("wide", "narrow", "count", "dtype", "reason"),
    [
        (10, 8, 10, torch.float32, "rows of 10 elements"),
        (16, 6, 10, torch.float32, "rows of 6 elements"),
        (16, 12, 10, torch.bfloat16, "rows of 12 elements"),
        (16, 8, 0, torch.float32, "of nothing"),
        (16, 8, 10, torch.float64, "of f64"),
    ],
)
def test_what_aten_does_not_take_is_left_to_the_library(
    wide: int, narrow: int, count: int, dtype: torch.dtype, reason: str
) -> None:
    module, x = Experts(3, wide, narrow, dtype).eval(), rows(count, wide, dtype)
    program = torch.export.export(module, (x, torch.tensor([0, 0, count])))
    with pytest.raises(UnsupportedError, match=reason):
        import_exported(program)


def test_on_a_gpu_the_library_keeps_it() -> None:
    program = torch.export.export(Experts().eval(), (rows(), torch.tensor([3, 5, 10])))
    with pytest.raises(UnsupportedError) as found:
        import_exported(program, device="cuda")
    assert NAME in str(found.value) or "cpu" in str(found.value)


def test_every_operator_stands_for_one_of_aten() -> None:
    assert set(FOREIGN) == {NAME}
    for foreign in FOREIGN.values():
        assert foreign.target.namespace == "aten"
        assert not foreign.target._schema.is_mutable
