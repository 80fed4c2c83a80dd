"""Fully connected networks on a real GPU: every schedule of many of them against float64; a module in one kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.generate.cuda.mlp.test_mlp import CASES
from tests.generate.cuda.mlps import BF16, F16, F32, Net, mlp, normal, random_net
from tests.gpu.machine import Gpu, Known
from tests.typed import narrow

import weft
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

LIMIT_S = 300
SPILLED = 128
"""Bytes of a thread's registers in memory that a network may have which nobody chose."""
RANDOM = 200
"""Networks that are drawn."""
SECONDS = 100.0
"""Nets that are not begun by then are skipped."""
_ACTS = ("relu", "silu", "gelu", "gelu tanh", "tanh", "sin", "sigmoid")

NETS: dict[str, Net] = {
    **{name: net for name, (net, _) in CASES.items()},
    **{
        f"width {w}, {act}, {d.value}": Net(rows, (w,) * (depth + 1), act, d)
        for w, depth, rows, act, d in (
            (1, 2, 127, "relu", F16), (3, 3, 1, "silu", BF16), (8, 4, 15, "tanh", F16), (16, 8, 1000, "relu", BF16),
            (17, 3, 63, "gelu", F16), (32, 8, 65, "sin", BF16), (48, 4, 8447, "gelu tanh", BF16),
            (64, 8, 8449, "relu", BF16), (64, 4, 16, "silu", F16), (96, 4, 129, "sigmoid", F16),
            (100, 3, 4097, "relu", BF16), (128, 8, 5000, "gelu", BF16), (128, 4, 5001, "silu", F16),
            (160, 3, 777, "tanh", BF16), (192, 6, 4100, "relu", F16), (200, 4, 300, "silu", BF16),
            (256, 4, 4099, "relu", BF16), (256, 8, 20_001, "relu", F16), (256, 3, 64, "gelu", F16),
        )
    },
    **{
        f"width {w}, {depth} layers": Net(rows, (w,) * (depth + 1), act, d, residual=depth == 4)
        for w, depth, rows, act, d in (
            (512, 3, 5001, "relu", BF16), (384, 4, 999, "silu", F16), (300, 9, 64, "tanh", BF16),
        )
    },
    "radiance field, wide": Net(4001, (63, *(512,) * 5, 4), "relu", F16, last=False, skip=(3,)),
    "pixels": Net(10_000, (784, 512, 256, 10), "relu", BF16, given=F32, last=False),
    "odd pixels": Net(70, (1001, 257, 3), "formula", F16),
    "many rows": Net(200_001, (64,) * 5, "relu", BF16),
    "radiance field": Net(65_537, (63, *(128,) * 7, 4), "relu", F16, last=False),
    "radiance field with its input beside": Net(8001, (63, *(256,) * 7, 4), "relu", F16, last=False, skip=(4,)),
    "ragged": Net(3001, (5, 40, 72, 24, 136, 3), "gelu", BF16, last=False),
    "f32 outside": Net(2049, (64, 64, 64, 64), "tanh", F16, given=F32),
    "residual, wide": Net(5003, (256,) * 5, "relu", BF16, residual=True),
    "residual, deep": Net(5003, (64,) * 9, "silu", F16, residual=True),
    "no bias": Net(4096, (64,) * 5, "relu", F16, bias=False, turned=True),
    "deep": Net(3000, (32,) * 33, _ACTS[0], F16),
    "each its own": Net(999, (48,) * 8, _ACTS, BF16),
}  # fmt: skip


Compiled = tuple[dict[str, list[CudaSource]], dict[str, CompiledCubin], Gpu, float]


@pytest.fixture(scope="module")
def compiled(gpu: tuple[Gpu, GpuFacts]) -> Compiled:
    """All sources by net, their cubins by text, and what runs them without compiling them again."""
    machine, facts = gpu
    found: dict[str, list[CudaSource]] = {}
    for name, net in NETS.items():
        problem = mlp(net)
        schedules = templates.schedules(problem, facts)
        assert not isinstance(schedules, Declined), (name, schedules.reason)
        made = [templates.emit(problem, s) for s in schedules]
        found[name] = [s for s in made if isinstance(s, CudaSource)]
        assert len(found[name]) == len(schedules)
    everything = [s for made in found.values() for s in made]
    known = Known(machine.nvrtc, machine.arch, everything)
    by_text = {s.sha256: known.compile(s.text, arch=machine.arch, flags=s.flags) for s in everything}
    return found, by_text, Gpu(known, machine.arch), time.monotonic()


@pytest.mark.parametrize("name", list(NETS))
def test_every_schedule(name: str, compiled: Compiled) -> None:
    sources, _, machine, started = compiled
    if time.monotonic() - started > SECONDS:
        pytest.skip(f"{SECONDS} s are over")
    problem = mlp(NETS[name])
    inputs = normal(problem)
    exact, own = _exact(problem, inputs)
    size = float(np.sqrt(np.mean(exact**2)))
    eager = float(np.sqrt(np.mean((own - exact) ** 2)))
    unit = 2.0**-8 if NETS[name].dtype is BF16 else 2.0**-11
    for source in sources[name]:
        got = np.asarray(machine.run(problem, source, inputs, 2)[0], dtype=np.float64)
        error = float(np.sqrt(np.mean((got - exact) ** 2)))
        assert error <= 1.2 * eager + 0.25 * unit * size, (str(source.schedule), error, eager, size)


@pytest.mark.parametrize("first", range(0, RANDOM, 50))
def test_random_networks(first: int, gpu: tuple[Gpu, GpuFacts], record_property: Callable[[str, object], None]) -> None:
    """Any networks, one schedule of each that the gate takes: near float64, the same bits twice."""
    machine, facts = gpu
    cases: list[tuple[int, list[CudaSource]]] = []
    for seed in range(first, first + 50):
        problem = mlp(random_net(seed))
        schedules = templates.schedules(problem, facts)
        if isinstance(schedules, Declined):
            assert "do not fit" in schedules.reason or "several layers read" in schedules.reason, schedules.reason
            continue
        sources = [templates.emit(problem, schedules[(seed + i) % len(schedules)]) for i in range(2)]
        assert all(isinstance(source, CudaSource) for source in sources), sources
        cases.append((seed, [s for s in sources if isinstance(s, CudaSource)]))
    assert len(cases) >= 45
    known = Known(machine.nvrtc, machine.arch, [s for _, both in cases for s in both])
    runner = Gpu(known, machine.arch)
    wrong = {}
    refused = []
    for seed, both in cases:
        taken = [s for s in both if _is_taken(known.compile(s.text, arch=machine.arch, flags=s.flags), s)]
        if len(taken) < 2:
            refused.append(seed)
        if not taken:
            continue
        net = random_net(seed)
        problem = mlp(net)
        inputs = normal(problem, seed)
        exact, own = _exact(problem, inputs)
        size, eager = (float(np.sqrt(np.mean(x**2))) for x in (exact, own - exact))
        got = np.asarray(runner.run(problem, taken[0], inputs, 2)[0], dtype=np.float64)
        error = float(np.sqrt(np.mean((got - exact) ** 2)))
        unit = 2.0**-8 if net.dtype is BF16 else 2.0**-11
        if not error <= 1.2 * eager + 0.25 * unit * size:
            wrong[seed] = net, taken[0].schedule.params, error, eager, size
    record_property("networks of which a kernel spills or is serialised", refused)
    assert not wrong, wrong
    assert len(refused) <= len(cases) // 5, refused


def _is_taken(compiled_: CompiledCubin, source: CudaSource) -> bool:
    """Whether the compiler neither serialised its products nor spilled much: the tuner measures no others."""
    return not compiled_.warnings and compiled_.of(source.launches[0].entry).spill_stores <= SPILLED


def _exact(problem: Any, inputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and as the graph's own types give it."""
    exact = np.asarray(evaluate(problem.graph, inputs, precise=True)[0], dtype=np.float64)
    return exact, np.asarray(evaluate(problem.graph, inputs)[0], dtype=np.float64)


def test_kernels_do_not_spill(compiled: Compiled) -> None:
    sources, by_text, _, _ = compiled
    spilled = {}
    for name, made in sources.items():
        for source in made:
            result = by_text[source.sha256]
            own = result.of(source.launches[0].entry)
            if own.spill_stores or result.warnings:
                spilled[name, str(source.schedule)] = own.spill_stores, result.warnings[:1]
    assert not spilled, spilled


def test_a_module_becomes_one_kernel(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(5) for m in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    net = torch.nn.Sequential(*layers).half().cuda().eval()
    x = torch.randn(1 << 18, 64, device="cuda", dtype=torch.float16)
    options = weft.Options(device="cuda", budget_s=30.0, cache_dir=tmp_path)
    fused = weft.compile(net, (x,), options=options)
    with torch.no_grad():
        got = fused(x)
        assert isinstance(got, torch.Tensor)
        eager, exact = net(x).double(), net.double()(x.double())
    error, own = (((y - exact).norm() / exact.norm()).item() for y in (got.double(), eager))
    assert error <= 1.2 * own
    steps = fused.executable.plan.steps
    assert len(steps) == 1, [str(s.kernel.schedule) for s in steps]
    assert steps[0].kernel.schedule.param("template") == "mlp"


class _Radiance(torch.nn.Module):
    """An encoding of the position, features of it, and the direction beside them: two inputs, two kernels of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bands: torch.Tensor
        self.register_buffer("bands", 2.0 ** torch.arange(4))
        self.below = torch.nn.Sequential(*_linear(24, 64, 64, 64))
        self.above = torch.nn.Sequential(*_linear(64 + 16, 64, 64), torch.nn.Linear(64, 3), torch.nn.Sigmoid())

    def forward(self, x: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        t = (x[..., None] * self.bands).flatten(-2)
        features = self.below(torch.cat([torch.sin(t), torch.cos(t)], -1))
        return self.above(torch.cat([features, direction], -1))


def _linear(*widths: int) -> list[torch.nn.Module]:
    return [m for k, n in pairwise(widths) for m in (torch.nn.Linear(k, n), torch.nn.ReLU())]


def test_layers_around_a_second_input_are_one_or_two_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = _Radiance().half().cuda().eval()
    rows = 1 << 18
    inputs = tuple(torch.randn(rows, n, device="cuda").half() for n in (3, 16))
    fused = weft.compile(net, inputs, options=weft.Options(device="cuda", budget_s=30.0, cache_dir=tmp_path))
    with torch.no_grad():
        got, eager = narrow(torch.Tensor, fused(*inputs)).double(), net(*inputs).double()
        exact = net.double()(*(x.double() for x in inputs))
    # sines of rounded angles err alike on both sides; what counts is the layers
    error, own = (float((y - exact).norm() / exact.norm()) for y in (got, eager))
    assert error <= 1.2 * own + 1e-4, (error, own)
    steps, nodes = fused.executable.plan.steps, fused.graph.nodes
    layers = [s for s in steps if str(dict(s.kernel.schedule.params).get("template")).startswith("mlp")]
    assert 1 <= len(layers) <= 2, steps
    others = {nodes[n].prim for s in steps if s not in layers for n in s.members}
    assert not others & {Prim.MATMUL, Prim.CONV}, others
