"""What the framework keeps for a stream, on a real GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from weft.runtime.streams import take_workspaces

pytestmark = pytest.mark.gpu

LIMIT_S = 60
LARGE = 1 << 29
HERE = torch.device("cuda")


def _reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _product() -> None:
    """A product and its gradients, whose large tensors are gone behind it."""
    x = torch.ones((LARGE // 4 // 1024, 1024), device=HERE, requires_grad=True)
    w = torch.ones((1024, 16), device=HERE, requires_grad=True)
    torch.autograd.grad((x.relu() @ w).relu().sum(), (x, w))


def test_workspaces_that_were_taken_before_keep_no_large_segment() -> None:
    stream = torch.cuda.Stream(HERE)
    torch.empty(LARGE, device=HERE, dtype=torch.uint8)  # freed, and kept by the framework
    with torch.cuda.stream(stream):
        take_workspaces(HERE)
        before = _reserved()
        _product()
        assert torch.cuda.memory_reserved() > before + LARGE  # what is to be given back
    assert _reserved() <= before


def test_they_are_taken_once_for_a_stream_and_not_while_a_graph_is_recorded() -> None:
    stream = torch.cuda.Stream(HERE)
    with torch.cuda.stream(stream):
        take_workspaces(HERE)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        take_workspaces(HERE)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    other, graph = torch.cuda.Stream(HERE), torch.cuda.CUDAGraph()
    x = torch.zeros(4, device=HERE)
    with torch.cuda.graph(graph, stream=other):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        take_workspaces(HERE)
        x.add_(1)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph.replay()
    assert x.tolist() == [1.0] * 4
