"""Numbers that a module holds as tensors of one element, and that its Python reads: a trace knows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from weft.errors import RefitError, WeftError


def options(path: Path) -> weft.Options:
    return weft.Options(budget_s=0, cache_dir=path)


def given(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Padded(nn.Module):
    """A convolution whose padding is computed from buffers, as EnCodec's is."""

    stride: torch.Tensor
    kernel: torch.Tensor
    total: torch.Tensor

    def __init__(self, stride: int = 2) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 4, 5, stride=stride)
        self.register_buffer("stride", torch.tensor(stride))
        self.register_buffer("kernel", torch.tensor(5))
        self.register_buffer("total", self.kernel - self.stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = torch.ceil((x.shape[-1] - self.kernel + self.total) / self.stride + 1).to(torch.int64) - 1
        more = frames * self.stride + self.kernel - self.total - x.shape[-1]
        return self.convolution(nn.functional.pad(x, (self.total, more)))  # type: ignore[arg-type]


class Scaled(nn.Module):
    """A factor that Python reads, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.read, self.kept = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * self.kept
        return y * float(self.read) if self.read.item() > 1 else y


class Counted(nn.Module):
    """Python reads a buffer that it has written before."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * int(self.calls)


class Sized(nn.Module):
    """A size that the values of its input give."""

    least: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("least", torch.tensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[: int(self.least + (x > 100).sum())]


@pytest.mark.parametrize("length", [11, 16, 33])
def test_sizes_that_are_computed_of_buffers_are_numbers(length: int, tmp_path: Path) -> None:
    module, x = Padded().eval(), given(1, 3, length)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    compiled = weft.compile(module, x, options=options(tmp_path))
    assert not compiled.parts
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
        torch.testing.assert_close(compiled.executable(x)[0], module(x))
        other = given(1, 3, length + 7)  # another plan
        torch.testing.assert_close(compiled(other), module(other))
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


def test_other_numbers_are_no_other_weights_of_the_same_plan(tmp_path: Path) -> None:
    module, x = Padded(2).eval(), given(1, 3, 16)
    compiled = weft.compile(module, x, options=options(tmp_path))
    other = Padded(2).eval()
    other.total.fill_(6)
    with pytest.raises(RefitError):
        compiled.refit(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
        compiled.refit(other.state_dict(), recompile=True)
        torch.testing.assert_close(compiled(x), other(x))


def test_a_factor_that_python_reads_follows_a_refit(tmp_path: Path) -> None:
    module, x = Scaled().eval(), given(3, 4)
    compiled = weft.compile(module, x, options=options(tmp_path))
    assert not compiled.parts
    with torch.no_grad():
        torch.testing.assert_close(compiled.executable(x)[0], module(x))
        for read, kept in ((2.0, 5.0), (4.0, 5.0), (0.5, 5.0)):
            module.read.fill_(read)
            module.kept.fill_(kept)
            compiled.refit(module.state_dict(), recompile=True)
            torch.testing.assert_close(compiled(x), module(x))


def test_what_a_call_writes_is_no_number_of_the_module(tmp_path: Path) -> None:
    with pytest.raises(WeftError) as found:
        weft.compile(Counted().eval(), given(3, 4), options=options(tmp_path))
    assert found.value.code in ("W201", "W207")


def test_what_a_call_decides_is_no_number_of_the_module(tmp_path: Path) -> None:
    module, x = Sized().eval(), given(3, 4)
    with pytest.warns(UserWarning, match="depends on the values of tensors"):
        compiled = weft.compile(module, x, options=options(tmp_path))
    assert compiled.parts
    with torch.no_grad():
        for tensor in (x, x + 200, x):
            torch.testing.assert_close(compiled(tensor), module(tensor))
