"""Networks between QuantizeLinear and DequantizeLinear compiled for a real GPU: their products are those of bytes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.orchestrate.test_integers import Net

import weft
from weft.fission.conv import conv
from weft.fission.linear import matmul
from weft.frontends.imported import Imported
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.source import CudaSource
from weft.pipeline.compile import compile_imported
from weft.pipeline.untuned import WAYS, build

pytestmark = pytest.mark.gpu

NEAR = 0.02
"""A value at the border of two steps may fall either way; anything else is far smaller."""
F32, F16 = DType.F32, DType.F16


def known(y: NodeId | Declined) -> NodeId:
    assert not isinstance(y, Declined), y
    return y


def layers(rows: int, width: int, hidden: int) -> Graph:
    net = Net()
    y = net.through(net.b.input(TensorType(F32, (rows, width))), 0.03, 0)
    y = known(matmul(net.b, y, net.weight(width, hidden, axis=1)))
    y = net.through(net.b.apply(Prim.MAX, y, 0.0), 0.4, 0, np.uint8)
    y = known(matmul(net.b, y, net.weight(hidden, width, axis=1)))
    return clean_up(net.b.build([net.through(y, width * hidden**0.5 / 1024 / 4, 0)]), strict=False).graph


def images(count: int, channels: int, size: int) -> Graph:
    net = Net()
    how: dict[str, Any] = {"strides": (1, 1), "pads_lo": (1, 1), "pads_hi": (1, 1), "dilations": (1, 1)}
    y = net.through(net.b.input(TensorType(F32, (count, channels, size, size))), 0.03, 0)
    for scale in (0.3, 3.0, 30.0):
        y = known(conv(net.b, y, net.weight(channels, channels, 3, 3, axis=0), **how))
        y = net.through(net.b.apply(Prim.MAX, y, 0.0), scale, 0, np.uint8)
    return clean_up(net.b.build([y]), strict=False).graph


def halves(rows: int, width: int, hidden: int) -> Graph:
    """The layers in f16, for their time."""
    b, rng = GraphBuilder(), np.random.default_rng(0)
    y = b.input(TensorType(F16, (rows, width)))
    for m, n in ((width, hidden), (hidden, width)):
        w = (rng.standard_normal((m, n)) / m**0.5).astype(np.float16)
        y = known(matmul(b, b.apply(Prim.MAX, y, 0.0), b.constant(w)))
    return b.build([y])


MULTIPLIED = ("w_product_s8s8", "w_product_u8s8", "w_mma_s8s8", "w_mma_u8s8", "w_dot_s8s8", "w_dot_u8s8")
GRAPHS: dict[str, Callable[[], Graph]] = {
    "layers": lambda: layers(1024, 1024, 4096),
    "small layers": lambda: layers(256, 256, 256),
    "images": lambda: images(4, 128, 14),
}


def median_us(run: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    """One of ten in a graph."""
    for _ in range(3):
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run(x)
    found = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e2)
    return statistics.median(found)


@pytest.mark.parametrize("name", list(GRAPHS))
def test_products_are_those_of_bytes(name: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    options = weft.Options(device="cuda", budget_s=30.0, cache_dir=tmp_path)
    x = torch.randn(graph.type_of(graph.inputs[0]).shape)
    wanted = torch.from_numpy(evaluate(graph, [x.numpy()])[0]).double()
    made = build(Imported(graph, 0), options, WAYS)
    plans = {**made.executables, "tuned": compile_imported(Imported(graph, 0), options).executable}
    for way, plan in plans.items():
        difference = plan(x.cuda())[0].double().cpu() - wanted
        error = float((difference.square().mean() / wanted.square().mean()).sqrt())
        assert error < NEAR, (way, error)
    kernels = {way: [s.kernel for s in plan.plan.steps] for way, plan in plans.items()}
    bytes_ = {
        way: sum(isinstance(k, CudaSource) and any(x in k.text for x in MULTIPLIED) for k in found)
        for way, found in kernels.items()
    }
    sys.stdout.write(f"{name}: products of bytes {bytes_}, steps {[len(k) for k in kernels.values()]}, tuned")
    sys.stdout.write(f" {median_us(plans['tuned'], x.cuda()):.1f} us\n")
    if name == "layers":
        assert bytes_["fused"] == 2
        half = compile_imported(Imported(halves(1024, 1024, 4096), 0), options).executable
        sys.stdout.write(f"{name} in f16: {median_us(half, x.half().cuda()):.1f} us\n")
