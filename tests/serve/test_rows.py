"""Which graphs may run rows of several callers at once, held against what the reference gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from weft.frontends.torch import import_exported
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.reference import evaluate
from weft.serve.rows import batch_of, independent

N = 4
Body = Callable[..., object]


class Module(torch.nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.linear = torch.nn.Linear(6, 6)
        self.conv = torch.nn.Conv2d(2, 4, 3, padding=1)
        self.norm = torch.nn.LayerNorm(6)
        self.table = torch.nn.Embedding(10, 6)
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.places = torch.nn.Parameter(torch.randn(N, 6))
        self.columns = torch.nn.Parameter(torch.randn(3, 6))

    def forward(self, *given: torch.Tensor) -> object:
        return self.body(self, *given)


def graph(body: Body, *given: torch.Tensor) -> Graph:
    return import_exported(torch.export.export(Module(body).eval(), given)).graph


def x(*shape: int) -> torch.Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(5))


KEPT: dict[str, tuple[Body, tuple[torch.Tensor, ...]]] = {
    "linear": (lambda m, a: m.linear(a).relu(), (x(6),)),
    "softmax": (lambda m, a: torch.softmax(m.norm(a), -1), (x(3, 6),)),
    "flattened": (lambda m, a: m.linear(a.reshape(-1, 6)).reshape(N, 3, 6), (x(3, 6),)),
    "convolution": (lambda m, a: torch.nn.functional.max_pool2d(m.conv(a), 2).flatten(1), (x(2, 4, 4),)),
    "attention": (lambda m, a: m.attention(a, a, a, need_weights=False)[0], (x(3, 6),)),
    "transposed and back": (lambda m, a: (a.transpose(0, 1) * 2).transpose(0, 1).contiguous(), (x(3, 6),)),
    "a product of two inputs": (lambda m, a, b: a @ b, (x(3, 6), x(6, 2))),
    "embedding": (lambda m, a: m.table(a) + 1, (torch.arange(3 * N).reshape(N, 3) % 10,)),
    "the same for every row": (lambda m, a: torch.cat([a + m.columns, m.columns.expand(N, 3, 6)], 1), (x(3, 6),)),
    "two inputs": (lambda m, a, b: (a + b, a.sum(1)), (x(6), x(6))),
    "slices of columns": (lambda m, a: torch.nn.functional.pad(a[:, 1:], (1, 0)), (x(6),)),
    "positions in a row": (lambda m, a: a * torch.arange(6), (x(6),)),
}
DECLINED: dict[str, tuple[Body, tuple[torch.Tensor, ...], str]] = {
    "a sum over rows": (lambda m, a: a + a.sum(0, keepdim=True), (x(6),), "reduces over the rows"),
    "a norm over the batch": (lambda m, a: (a - a.mean(0)) / a.std(0), (x(6),), "reduces over the rows"),
    "softmax over rows": (lambda m, a: torch.softmax(a, 0), (x(6),), "reduces over the rows"),
    "a value for each place": (lambda m, a: a + m.places, (x(6),), "for each place in the batch"),
    "the number of the row": (lambda m, a: a + torch.arange(N)[:, None], (x(6),), "for each place in the batch"),
    "rows turned round": (lambda m, a: a.flip(0), (x(6),), "some of the rows"),
    "a row of another": (lambda m, a: a + a[:1], (x(6),), "some of the rows"),
    "the gram matrix": (lambda m, a: a @ a.T, (x(6),), "%"),
    "a product over rows": (lambda m, a: a.T @ a, (x(N),), "%"),
    "columns for rows": (lambda m, a: a.T.contiguous(), (x(N),), "first axis"),
    "rows mixed by a view": (lambda m, a: m.linear(a.T.reshape(-1, 6)).reshape(N, 3), (x(3),), ""),
    "other batches": (lambda m, a, b: (a, b), (x(6), torch.ones(3, 6)), "in common"),
    "rows joined": (lambda m, a: torch.cat([a, a])[:N], (x(6),), "joins"),
    "rows picked": (lambda m, a: a[torch.tensor([1, 0, 3, 2])], (x(6),), "picks"),
    "rolled": (lambda m, a: a.roll(1, 0), (x(6),), ""),
}


@pytest.mark.parametrize("name", KEPT)
def test_rows_that_know_nothing_of_each_other(name: str) -> None:
    body, given = KEPT[name]
    found = graph(body, *given)
    assert batch_of(found) == N
    assert independent(found) is None
    assert rows_agree(found, given)


@pytest.mark.parametrize("name", DECLINED)
def test_rows_that_do_are_declined(name: str) -> None:
    body, given, why = DECLINED[name]
    found = independent(graph(body, *given))
    assert isinstance(found, Declined) and why in found.reason


def test_one_row_tells_nothing() -> None:
    assert independent(graph(lambda m, a: a + 1, torch.randn(1, 6))) is not None


def rows_agree(found: Graph, given: tuple[torch.Tensor, ...]) -> bool:
    """Whether rows stay what they are where those around them change, and where they move."""
    arrays = [g.numpy() for g in given]
    chance = np.random.default_rng(0)
    order = np.array([2, 0, 3, 1])
    other = [chance.permutation(a.reshape(-1)).reshape(a.shape) for a in arrays]
    mixed = [a[order] for a in arrays]
    for o, m in zip(other, mixed, strict=True):
        m[2:] = o[2:]
    before, after = evaluate(found, arrays), evaluate(found, mixed)
    return all(np.allclose(b[order][:2], c[:2], rtol=1e-4, atol=1e-5) for b, c in zip(before, after, strict=True))
