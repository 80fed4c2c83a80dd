"""Layers with several inputs and skips on a real GPU: random architectures, forward and backward against float64."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.cases.radiance import BF16, Radiance, check, compile_all, layers_of, median, prepared, run
from tests.generate.cuda.mlp.test_mlp_skips import CASES, heads
from tests.generate.cuda.mlps import BF16 as KERNEL_BF16
from tests.generate.cuda.mlps import normal
from tests.generate.cuda.skips import nerf, random_skips, skips
from tests.gpu.machine import Gpu, Known
from tests.typed import narrow, numbers
from torch import nn

import weft
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.generate.cuda.mlp import template as mlp
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.ir.types import DType
from weft.kernels.source import CudaSource
from weft.nn import FusedNetwork
from weft.orchestrate import mlp as groups

# the first product of a thread for backward passes says that it has no context yet, whoever asks for it
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]
LIMIT_S = 300

SPILLED = 128
"""Bytes of a thread's registers in memory that a network may have which nobody chose."""
SECONDS = 75.0
"""What is not begun by then is skipped."""
STARTED = time.monotonic()
CHAINS = 40
MODULES = 10


class Own(nn.Module):
    """Any layers with skips: what each reads and takes in is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        depth = rng.randint(2, 5)
        wide = rng.choice([rng.randint(1, 80), 16 * rng.randint(1, 5)])
        widths = [wide if rng.random() < 0.7 else rng.randint(1, 80) for _ in range(depth)]
        self.given = tuple(rng.choice([wide, rng.randint(1, 64)]) for _ in range(rng.choice([1, 1, 2, 3])))
        columns = {-1 - i: n for i, n in enumerate(self.given)}
        self.reads: list[list[int]] = []
        self.added: list[tuple[int, bool] | None] = []
        layers = []
        for layer in range(depth):
            read = [layer - 1 if layer else -1]
            read += [v for v in columns if v not in read and rng.random() < 0.2]
            if layer == depth - 1:  # all that is given is read somewhere
                read += [v for v in range(-len(self.given), 0) if all(v not in r for r in (*self.reads, read))]
            rng.shuffle(read)
            layers.append(nn.Linear(sum(columns[v] for v in read), widths[layer], bias=rng.random() < 0.8))
            fitting = [v for v in columns if columns[v] == widths[layer]]
            self.added.append((rng.choice(fitting), rng.random() < 0.5) if fitting and rng.random() < 0.6 else None)
            self.reads.append(read)
            columns[layer] = widths[layer]
        self.layers = nn.ModuleList(layers)
        self.rows = rng.choice([1, 15, 17, 127, 1000, 4097, 20_001])
        acts = [nn.SiLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.Identity]
        if self.rows > 999:  # one sign that rounding turns is seen in the gradients of few rows
            acts.append(nn.ReLU)
        self.acts = nn.ModuleList(rng.choice(acts)() for _ in layers)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        values = {-1 - i: x for i, x in enumerate(inputs)}
        for i, (layer, act) in enumerate(zip(self.layers, self.acts, strict=True)):
            read = [values[v] for v in self.reads[i]]
            h = layer(torch.cat(read, -1) if len(read) > 1 else read[0])
            added = self.added[i]
            if added is not None and added[1]:
                h = h + values[added[0]]
            h = act(h)
            values[i] = h + values[added[0]] if added is not None and not added[1] else h
        return values[len(self.layers) - 1]


class One(Own):
    """Traced functions have as many arguments as there are inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class Two(Own):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, y)


class Three(Own):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, y, z)


def module_of(seed: int) -> Own:
    torch.manual_seed(seed)
    kind = (One, Two, Three)[len(Own(seed).given) - 1]
    return prepared(kind(seed))  # type: ignore[return-value]


def late() -> None:
    if time.monotonic() - STARTED > SECONDS:
        pytest.skip(f"{SECONDS} s are over")


@pytest.fixture(scope="module")
def compiled() -> None:
    facts = gpu_facts(None, calibrate=False)
    cases = [(layers_of(m, *m.given), m.rows) for m in map(module_of, range(MODULES))]
    compile_all([*cases, (layers_of(Radiance(64), 63, 27), 20_001)], facts)


@pytest.mark.parametrize("seed", range(MODULES))
def test_gradients_of_any_skips(seed: int, compiled: None) -> None:
    late()
    module = module_of(seed)
    row = check(module, module.given, module.rows)
    assert row["why_not"] is None and row["backward"] is None, row
    assert row["right"] and row["bits"] and row["types"], (module, row)


def test_gradients_of_a_radiance_field(compiled: None) -> None:
    late()
    torch.manual_seed(64)
    row = check(prepared(Radiance(64)), (63, 27), 20_001)
    assert row["why_not"] is None and row["backward"] is None, row
    assert row["right"] and row["bits"] and row["types"], row


def test_a_radiance_field_is_trained(compiled: None) -> None:
    """Steps of an optimizer with and without the kernels end alike."""
    late()
    torch.manual_seed(0)
    plain = Radiance(32, 4).cuda()
    fused = FusedNetwork(copy.deepcopy(plain))
    x, d = torch.randn(4097, 63, device="cuda"), torch.randn(4097, 27, device="cuda")
    wanted = torch.sigmoid(x[:, :3] + d[:, :3])
    losses = []
    for net in (plain, fused):
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        loss = torch.tensor(torch.inf)
        for _ in range(60):
            with torch.autocast("cuda", BF16):
                loss = (net(x, d).float() - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < 1.15 * losses[0] + 1e-4, losses


@pytest.mark.parametrize("half", range(2))
def test_chains_of_several_inputs(
    half: int, gpu: tuple[Gpu, GpuFacts], record_property: Callable[[str, object], None]
) -> None:
    """Any networks, two schedules of each that the gate takes: near float64, the same bits twice."""
    late()
    machine, facts = gpu
    nets = [random_skips(seed, most_work=2e8) for seed in range(half, CHAINS, 2)]
    nets += [net for net, _ in list(CASES.values())[half:15:2]]
    nets += [nerf(8449, 256, KERNEL_BF16), nerf(20_001, 64, DType.F16, one=True)][half : half + 1]
    cases = []
    for net in nets:
        problem = skips(net)
        found = mlp.schedules(problem, facts)
        if isinstance(found, Declined):
            assert "do not fit" in found.reason, (net, found.reason)
            continue
        made = [s for x in found if isinstance(s := mlp.emit(problem, x), CudaSource)]
        assert len(made) == len(found)
        cases.append((net, problem, made[:2] if len(made) < 4 else [made[0], made[-1]]))
    assert len(cases) >= len(nets) * 0.9
    known = Known(machine.nvrtc, machine.arch, [s for *_, made in cases for s in made])
    runner = Gpu(known, machine.arch)
    wrong, refused = {}, []
    for net, problem, made in cases:
        inputs = normal(problem)
        exact = np.asarray(evaluate(problem.graph, inputs, precise=True)[0], dtype=np.float64)
        own = np.asarray(evaluate(problem.graph, inputs)[0], dtype=np.float64)
        size, eager = (float(np.sqrt(np.mean(x**2))) for x in (exact, own - exact))
        unit = 2.0**-8 if net.dtype is KERNEL_BF16 else 2.0**-11
        for source in made:
            result = known.compile(source.text, arch=machine.arch, flags=source.flags)
            if result.warnings or result.of(source.launches[0].entry).spill_stores > SPILLED:
                refused.append(str(net))
                continue
            got = np.asarray(runner.run(problem, source, inputs, 2)[0], dtype=np.float64)
            error = float(np.sqrt(np.mean((got - exact) ** 2)))
            if not error <= 1.2 * eager + 0.25 * unit * size:
                wrong[str(net)] = str(source.schedule), error, eager, size
    record_property("networks of which a kernel spills or is serialised", refused)
    assert not wrong, wrong
    assert len(refused) <= len(cases) // 5, refused


def test_a_module_of_two_inputs_becomes_one_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """And that takes less time than the same network cut where the second input comes in."""
    late()
    torch.manual_seed(0)
    net = prepared(Radiance(64)).half().cuda().eval()
    inputs = tuple(torch.randn(1 << 18, n, device="cuda").half() for n in (63, 27))
    with torch.no_grad():
        eager, exact = net(*inputs).double(), copy.deepcopy(net).double()(*(x.double() for x in inputs))
    own = float((eager - exact).norm() / exact.norm())
    times: dict[str, float] = {}
    kinds: dict[str, list[str]] = {}
    several = groups._of_several
    for name, offered in (("one", several), ("cut", lambda *a: [])):
        monkeypatch.setattr(groups, "_of_several", offered)
        options = weft.Options(device="cuda", budget_s=30.0, cache_dir=tmp_path / name)
        fused = weft.compile(net, inputs, options=options)
        error = float((narrow(torch.Tensor, fused(*inputs)).double() - exact).norm() / exact.norm())
        assert error <= 1.2 * own + 1e-4, (name, error, own)
        steps = fused.executable.plan.steps
        kinds[name] = [str(dict(s.kernel.schedule.params).get("template", s.kernel.schedule.generator)) for s in steps]
        with torch.no_grad():
            times[name] = median(partial(fused, *inputs), 1 << 18)
    record_property("kernels", kinds)
    record_property("microseconds", times)
    assert kinds["one"] == ["mlp"], kinds
    assert len(kinds["cut"]) > 1 and times["one"] < times["cut"], (kinds, times)


def test_inputs_that_need_no_gradient(compiled: None) -> None:
    """Gradients of the parameters alone are the same bits."""
    late()
    torch.manual_seed(1)
    module = prepared(Radiance(64)).cuda()
    fused = FusedNetwork(module)
    x, d = torch.randn(3001, 63, device="cuda"), torch.randn(3001, 27, device="cuda")
    dy = torch.randn(3001, 3, device="cuda")
    leaves = list(module.parameters())
    both = run(fused, (x, d), dy, leaves, BF16)[3:]
    with torch.autocast("cuda", BF16):
        y = fused(x, d)
    alone = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))


@pytest.mark.parametrize("joined", [False, True])
def test_several_results(joined: bool, gpu: tuple[Gpu, GpuFacts]) -> None:
    late()
    machine, facts = gpu
    problems = [
        heads(rows, w, d, joined=joined)
        for rows, w, d in ((8449, 64, KERNEL_BF16), (1000, 256, DType.F16), (65, 300, DType.F16))
    ]
    made = []
    for problem in problems:
        found = mlp.schedules(problem, facts)
        assert not isinstance(found, Declined), found.reason
        made.append([s for x in found[:2] if isinstance(s := mlp.emit(problem, x), CudaSource)])
    runner = Gpu(Known(machine.nvrtc, machine.arch, [s for sources in made for s in sources]), machine.arch)
    for problem, sources in zip(problems, made, strict=True):
        inputs = normal(problem)
        exact, own = (evaluate(problem.graph, inputs, precise=precise) for precise in (True, False))
        for source in sources:
            for got, want, near in zip(runner.run(problem, source, inputs, 2), exact, own, strict=True):
                error, eager, size = (
                    float(np.sqrt(np.mean(v**2)))
                    for v in (numbers(got) - numbers(want), numbers(near) - numbers(want), numbers(want))
                )
                assert error <= 1.2 * eager + 2.0**-10 * size, (str(source.schedule), error, eager, size)
