"""Radiance fields: layers with a second input and a skip, their kernels, and training against float64.

A position of 63 columns goes through eight layers, again in front of the sixth, a direction of 27 columns stands beside
the features in front of the last hidden layer. Source: arXiv:2003.08934, appendix A.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.harness.gpu_time import median_us
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompileJob, find_nvrtc
from weft.generate.cuda.mlp import template as mlp
from weft.generate.cuda.training import Gradient, forward_problem, gradient, shapes
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource
from weft.nn import FusedNetwork
from weft.nn.layers import Layers
from weft.nn.traces import Traced, traced
from weft.options import Options

BF16 = torch.bfloat16


class Radiance(nn.Module):
    """Colour of a point from a direction; both are encoded."""

    def __init__(self, width: int, depth: int = 8, given: int = 63, direction: int = 27) -> None:
        super().__init__()
        half = depth // 2 + 1
        self.below = nn.ModuleList([nn.Linear(given, width), *(nn.Linear(width, width) for _ in range(half - 1))])
        self.joined = nn.Linear(width + given, width)
        self.above = nn.ModuleList([nn.Linear(width, width) for _ in range(depth - half - 1)])
        self.features = nn.Linear(width, width)
        self.side, self.color = nn.Linear(width + direction, max(1, width // 2)), nn.Linear(max(1, width // 2), 3)

    def forward(self, x: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """(rows, 3)."""
        h = x
        for layer in self.below:
            h = torch.relu(layer(h))
        h = torch.relu(self.joined(torch.cat([x, h], -1)))
        for layer in self.above:
            h = torch.relu(layer(h))
        h = torch.cat([self.features(h), direction], -1)
        result: torch.Tensor = torch.sigmoid(self.color(torch.relu(self.side(h))))
        return result


def prepared(module: nn.Module) -> nn.Module:
    """Weights that keep the size of what they multiply, in numbers of bf16."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * (1.4 / p.shape[1] ** 0.5 if p.dim() == 2 else 0.1))
            p.copy_(p.to(BF16))
    return module


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the error over the norm of what is right."""
    want = want.detach()
    return float((got.detach().double() - want).norm() / want.norm().clamp_min(1e-30))


def layers_of(module: nn.Module, *widths: int) -> Layers:
    """As kernels see it."""
    found = traced(module, widths, 2)
    assert isinstance(found, Traced), found
    return found.layers


def texts_of(layers: Layers, rows: int, facts: GpuFacts, *, autocast: bool = True) -> dict[str, tuple[str, ...]]:
    """Texts of all kernels for forward and backward pass, with their flags."""
    masters = DType.F32 if autocast else None
    given = DType.F32 if autocast and not layers.parts else DType.BF16  # several inputs are joined in 16 bits
    net = layers.network(DType.BF16, given, masters)
    problem = forward_problem(net, rows)
    found = mlp.schedules(problem, facts)
    texts: dict[str, tuple[str, ...]] = {}
    for schedule in () if isinstance(found, Declined) else found:
        source = mlp.emit(problem, schedule, masters)
        if isinstance(source, CudaSource):
            texts[source.text] = source.flags
    plans = [gradient(net, facts, s, dtype=DType.F32 if autocast else DType.BF16) for s in shapes(net, facts)]
    return texts | {p.text: () for p in plans if isinstance(p, Gradient)}


def compile_all(cases: Sequence[tuple[Layers, int]], facts: GpuFacts) -> int:
    """All kernels into the cache at once, on all cores. Returns how many."""
    nvrtc = find_nvrtc()
    assert not isinstance(nvrtc, Declined), nvrtc.reason
    texts: dict[str, tuple[str, ...]] = {}
    for layers, rows in cases:
        texts |= texts_of(layers, rows, facts)
    nvrtc.compile_many([CompileJob(t, facts.arch, f) for t, f in texts.items()], cache_dir=Options().cache)
    return len(texts)


def run(
    net: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    dy: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """(result, gradients of the inputs, those of the parameters); products in `dtype` by autocast."""
    points = [x.detach().requires_grad_() for x in inputs]
    with torch.autocast("cuda", dtype or BF16, enabled=dtype is not None):
        y = net(*points)
    return [y, *torch.autograd.grad(y, [*points, *leaves], dy.to(y.dtype))]


def check(module: nn.Module, widths: Sequence[int], rows: int) -> dict[str, Any]:
    """Errors of result and gradients against float64 beside eager's under autocast; whether two runs are equal."""
    module = module.cuda()
    inputs = [torch.randn(rows, n, device="cuda").to(BF16).float() for n in widths]
    fused = FusedNetwork(module)
    with torch.autocast("cuda", BF16):
        why, back = fused.why_not(*inputs), fused.why_no_fused_backward(*inputs)
        columns = module(*(x[:1] for x in inputs)).shape[-1]
    dy = torch.randn(rows, columns, device="cuda").to(BF16)
    double = copy.deepcopy(module).double()
    exact = run(double, [x.double() for x in inputs], dy.double(), list(double.parameters()), None)
    leaves = list(module.parameters())
    eager, got, again = (run(f, inputs, dy, leaves, BF16) for f in (module, fused, fused))
    errors = [[error_of(t, e) for t, e in zip(r, exact, strict=True)] for r in (got, eager)]
    own, peer = (statistics.fmean(e) for e in errors)
    return {
        "error": own, "eager": peer, "forward": errors[0][0], "eager_forward": errors[1][0],
        "worst": max(a / max(b, 1e-3) for a, b in zip(*errors, strict=True)),
        "bits": all(torch.equal(a, b) for a, b in zip(got, again, strict=True)),
        "types": all(a.dtype == b.dtype for a, b in zip(got, eager, strict=True)),
        "right": own <= (1.2 if rows > 999 else 2.0) * peer + 1e-3, "why_not": why, "backward": back,
    }  # fmt: skip


def median(call: Callable[[], object], rows: int) -> float:
    """Of a graph of a few calls."""
    return round(median_us(call, launches=4 if rows < 1 << 19 else 2, rounds=7), 1)
