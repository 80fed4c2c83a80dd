"""Library calls for a GPU, without one: which forms apply."""

from __future__ import annotations

import pytest
import torch

from weft.frontends.torch import import_exported
from weft.generate.library import LibraryGenerator
from weft.ir.declined import Declined
from weft.kernels.candidate import Kind, Problem
from weft.kernels.source import LibraryCall, Schedule
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def attention(dtype: torch.dtype) -> Problem:
    given = tuple(torch.randn(1, 2, 16, 32, dtype=dtype) for _ in range(3))
    graph = import_exported(torch.export.export(Attention(), given)).graph
    for candidate in enumerate_candidates(graph).candidates:
        if candidate.kind is Kind.ORIGIN:
            choice = format_choices(graph, candidate)[0]
            found = extract(graph, candidate, choice.inputs, choice.outputs).problem
            if found.origin_rule == "sdpa":
                return found
    raise AssertionError("no attention in the graph")


@pytest.mark.parametrize(
    ("dtype", "backends"),
    [
        (torch.float32, {"efficient"}),
        (torch.float16, {"flash", "efficient", "cudnn"}),
        (torch.bfloat16, {"flash", "efficient", "cudnn"}),
    ],
)
def test_flash_and_cudnn_take_floats_of_16_bits_only(dtype: torch.dtype, backends: set[str]) -> None:
    problem = attention(dtype)
    made = {
        name: LibraryGenerator().emit(problem, Schedule("library", (("backend", name), ("form", "attention"))))
        for name in ("flash", "efficient", "cudnn")
    }
    assert {name for name, call in made.items() if isinstance(call, LibraryCall)} == backends
    declined = [call for call in made.values() if isinstance(call, Declined)]
    assert all("16 bits" in call.reason for call in declined)
