"""Training of fully connected networks: `weft.nn.FusedMLP` against eager and torch.compile, on an NVIDIA GPU.

    python -m benchmarks.gpu_mlp_training [--only TEXT] [--seconds S] [--check] [--no-compile] [--wide] [--dry]

First the gradients of networks of many kinds, remainders of rows among them, against float64 and beside those of eager
in the same 16-bit type; twice the same bits. Then times of the forward pass, and of forward and backward pass together,
with float32 parameters under autocast to bfloat16: eager, torch.compile and FusedMLP called alike, host and device
together, the median over rounds of twenty calls between two synchronisations (training seldom waits for the device;
`step_4`: of four calls, as in records before this one); weights change in every step, as in training. Errors are norms
of the error over the norm of the result, the mean over all gradients of a network. `--dry` compiles for sm_80 and
sm_90a without a GPU. `graph` is a whole step replayed from a CUDA graph. `--wide` checks and times networks with layers
of 257 to 512 columns. Where the host's time goes: `lab.gpu_mlp_host`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, folder_of_gpu
from weft.device.cuda.facts import gpu_facts, profile
from weft.device.cuda.nvrtc import CompileJob, Nvrtc, find_nvrtc
from weft.generate.cuda import templates
from weft.generate.cuda.mlp import template as mlp
from weft.generate.cuda.training import Gradient, Network, forward_problem, gradient, layered, shapes
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource
from weft.nn import FusedMLP, Sine, fused_mlp, timing
from weft.nn.layered import candidates
from weft.nn.layers import Layers, layers_of
from weft.options import Options


class Own(nn.Module):
    """A user's activation."""

    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise."""
        return self.f(x)


ACTS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid,
    "gelu_tanh": lambda: nn.GELU("tanh"), "sin": lambda: Sine(3.0), "softplus": nn.Softplus, "elu": nn.ELU,
    "leaky_relu": lambda: nn.LeakyReLU(0.1), "mish": nn.Mish,
    "snake": lambda: Own(lambda x: x + torch.sin(2.0 * x) ** 2 / 2.0), "bump": lambda: Own(lambda x: torch.exp(-x * x)),
    "wave": lambda: Own(lambda x: x * torch.sin(5.0 * x)),
}  # fmt: skip
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
ROUNDS, STEPS, CALLS = 7, 4, 20


@dataclass(frozen=True, slots=True)
class Case:
    """A network of Linear layers; the last has no activation."""

    rows: int
    widths: tuple[int, ...]
    act: str = "relu"
    dtype: str = "bf16"
    autocast: bool = True

    @property
    def name(self) -> str:
        """For people."""
        how = "autocast" if self.autocast else "16-bit"
        return f"{self.rows} rows, {'-'.join(map(str, self.widths))} {self.act} {self.dtype} {how}"


CHECKS = (
    Case(1000, (64,) * 5), Case(4097, (32,) * 5, "silu"), Case(8449, (64, 64, 64, 3), "gelu", "f16"),
    Case(1, (16, 16, 16), "tanh"), Case(15, (8, 24, 40, 1), "sin", "f16"), Case(65, (3, 64, 64, 64, 1), "softplus"),
    Case(777, (63, 128, 128, 128, 4), "relu", "f16"), Case(5003, (128,) * 5, "silu"),
    Case(129, (2, 100, 100, 3), "elu"),
    Case(333, (5, 40, 72, 24, 136, 3), "gelu_tanh"), Case(4096, (64,) * 9, "relu", "bf16", autocast=False),
    Case(2000, (16,) * 9, "sigmoid", "f16", autocast=False), Case(3000, (256,) * 4),
    Case(70_001, (64,) * 5, "leaky_relu"),
    Case(200_003, (32, 64, 64, 16), "relu", "f16"), Case(999, (96,) * 5, "gelu"), Case(127, (1, 1, 16, 2), "relu"),
    Case(100_000, (192, 192, 192), "silu"), Case(6001, (128,) * 9, "relu"),
    Case(3000, (3, 64, 64, 64, 1), "snake"), Case(999, (40, 96, 96, 8), "wave", "f16"),
    Case(500, (8, 17, 128, 2), "bump"), Case(5000, (16, 128, 128, 4), "mish"),
    Case(20_000, (40, 256, 200, 256, 24), "tanh"), Case(50_001, (128,) * 12, "silu", "f16"),
)  # fmt: skip
TIMES = (
    Case(1 << 18, (64,) * 5), Case(1 << 18, (128,) * 5), Case(1 << 18, (32,) * 5), Case(1 << 20, (64,) * 5),
    Case(1 << 12, (64,) * 5), Case(1 << 18, (64,) * 5, "silu"), Case(1 << 18, (128,) * 9), Case(1 << 20, (32,) * 5),
    *(Case(1 << r, (w,) * (d + 1)) for r, d in ((20, 4), (12, 4), (18, 8), (15, 4)) for w in (128, 64, 32)),
    *(Case(1 << 18, (w,) * 5, act) for w in (64, 128) for act in ("silu", "gelu")),
    Case(1 << 18, (16,) * 5), Case(1 << 18, (256,) * 5), Case(1 << 18, (2, *(64,) * 4, 3), "sin"),
    Case(1 << 18, (63, *(128,) * 4, 4)),
)  # fmt: skip


WIDE_CHECKS = (
    Case(1000, (300,) * 4), Case(4097, (512,) * 4, "silu"), Case(333, (48, 512, 384, 5), "gelu", "f16"),
    Case(1, (384, 384, 384), "tanh"), Case(15, (300, 257, 500, 1), "sin", "f16"),
    Case(65, (3, 301, 400, 300, 1), "snake"), Case(5003, (784, 512, 10), "relu", "f16"),
    Case(127, (257, 511, 299), "elu"),
    Case(2001, (16, 512, 40, 512, 8), "sigmoid", autocast=False),
    Case(3000, (384,) * 5, "gelu_tanh", "f16", autocast=False),
    Case(70_001, (512,) * 3, "leaky_relu"), Case(999, (320, 24, 320), "softplus"), Case(129, (512, 400, 512), "wave"),
    Case(500, (1000, 64, 64, 10), "mish"),
)  # fmt: skip
WIDE_TIMES = (
    Case(1 << 18, (512,) * 5), Case(1 << 18, (384,) * 5), Case(1 << 18, (512,) * 5, "silu"), Case(1 << 15, (512,) * 5),
    Case(1 << 18, (63, 300, 300, 300, 4)), Case(1 << 16, (784, 512, 256, 10)),
)  # fmt: skip


def network(c: Case) -> nn.Sequential:
    """The module in float32, on the CPU."""
    torch.manual_seed(sum(c.widths))
    layers: list[nn.Module] = []
    for k, n in zip(c.widths, c.widths[1:], strict=False):
        layer = nn.Linear(k, n)
        nn.init.normal_(layer.weight, std=1.4 / k**0.5)
        nn.init.normal_(layer.bias, std=0.1)
        layers += [layer, ACTS[c.act]()]
    return nn.Sequential(*layers[:-1])


def run(net: nn.Module, x: torch.Tensor, dy: torch.Tensor, c: Case) -> list[torch.Tensor]:
    """(result, gradient of x, gradients of the parameters)."""
    net.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    if c.autocast:
        with torch.autocast("cuda", TYPES[c.dtype]):
            y = net(x)
    else:
        y = net(x)
    y.backward(dy.to(y.dtype))
    grads = [p.grad for p in net.parameters()]
    return [y.detach(), *(g for g in (x.grad, *grads) if g is not None)]


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the error over the norm of the result."""
    found = float((got.double() - exact).norm() / exact.norm().clamp_min(1e-30))
    return found if found == found else float("inf")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also of what is no number."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check(c: Case) -> dict[str, object]:
    """Errors against float64, and whether two runs are equal."""
    net = network(c).cuda()
    if not c.autocast:
        net = net.to(TYPES[c.dtype])
    torch.manual_seed(1)
    x = torch.randn(c.rows, c.widths[0], device="cuda", dtype=torch.float32 if c.autocast else TYPES[c.dtype])
    x = x.to(TYPES[c.dtype]).to(x.dtype)
    dy = torch.randn(c.rows, c.widths[-1], device="cuda").to(TYPES[c.dtype])
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p.to(TYPES[c.dtype]))
    exact_net = copy.deepcopy(net).double()
    wide = Case(c.rows, c.widths, c.act, c.dtype, autocast=False)
    exact = run(exact_net, x.double(), dy.double(), wide)
    eager = run(net, x, dy, c)
    fused = FusedMLP(net)
    got = run(fused, x, dy, c)
    again = run(fused, x, dy, c)
    with torch.autocast("cuda", TYPES[c.dtype], enabled=c.autocast):
        why, back = fused.why_not(x), fused.why_no_fused_backward(x.detach().requires_grad_())
    errors = [[error_of(t, e) for t, e in zip(run_, exact, strict=True)] for run_ in (got, eager)]
    own, peer = (statistics.fmean(e) for e in errors)
    return {
        "record": "check", "case": c.name, "error": own, "eager_error": peer, "forward": errors[0][0],
        "eager_forward": errors[1][0], "worst": max(a / max(b, 1e-9) for a, b in zip(*errors, strict=True)),
        "equal_bits": all(same_bits(a, b) for a, b in zip(got, again, strict=True)),
        "types": all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(got, eager, strict=True)),
        "right": own <= 1.2 * peer + 1e-3, "why_not": why, "backward": back,
    }  # fmt: skip


def changed_weights_are_seen() -> bool:
    """Whether a step of an optimizer changes the result; with a gradient scaler."""
    c = Case(500, (16, 32, 32, 4), "relu", "f16")
    fused = FusedMLP(network(c).cuda())
    eager = copy.deepcopy(nn.Sequential(*fused))
    x = torch.randn(c.rows, 16, device="cuda")
    results = []
    for net in (fused, eager):
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        loss = torch.zeros(())
        for _ in range(20):
            with torch.autocast("cuda", torch.float16):
                loss = (net(x).float() - x[:, :4].sin()).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(float(loss.detach()))
    print(f"loss after 20 steps: fused {results[0]:.5f}, eager {results[1]:.5f}", flush=True)
    return abs(results[0] - results[1]) < 0.02 * results[1]


def second_derivatives() -> bool:
    """Whether an Eikonal loss has the gradients that eager has."""
    c = Case(2000, (3, 64, 64, 1), "softplus", "bf16")
    fused = FusedMLP(network(c).cuda())
    eager = nn.Sequential(*fused)
    x = torch.randn(c.rows, 3, device="cuda")
    found: list[list[torch.Tensor]] = []
    for net in (fused, eager, eager):
        net.zero_grad(set_to_none=True)
        point = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=len(found) < 2):
            y = net(point)
        (slope,) = torch.autograd.grad(y.float().sum(), point, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        found.append([p.grad for p in net.parameters() if p.grad is not None and p.dim() == 2])
    errors = [statistics.fmean(error_of(a, b.double()) for a, b in zip(f, found[2], strict=True)) for f in found[:2]]
    print(f"gradients of an Eikonal loss: error {errors[0]:.4f}, eager {errors[1]:.4f}", flush=True)
    return errors[0] <= 1.5 * errors[1] + 1e-3


def microseconds(step: Callable[[], object], calls: int = CALLS) -> float:
    """Of one call, host included; so many between two synchronisations."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    samples = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(samples)


def on_device(step: Callable[[], object]) -> float:
    """Microseconds of one call on the device, the host far ahead: between events, behind a long kernel."""
    samples = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(20_000_000)
        start.record()
        for _ in range(STEPS):
            step()
        end.record()
        torch.cuda.synchronize()
        samples.append(float(start.elapsed_time(end)) * 1e3 / STEPS)
    return statistics.median(samples)


def in_a_graph(step: Callable[[], object]) -> float:
    """Microseconds of a replay of a step, the host far ahead."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return on_device(graph.replay)


def silent_optimizer() -> bool:
    """Whether training with an optimizer in one kernel, which leaves versions alone, goes as that of the modules."""
    c = Case(3000, (8, 64, 64, 2), "sin", "f16")
    fused = FusedMLP(network(c).cuda())
    eager = copy.deepcopy(nn.Sequential(*fused))
    x = torch.rand(c.rows, 8, device="cuda")
    wanted = torch.stack([(3 * x[:, 0]).sin(), x[:, 1] * x[:, 2]], 1)
    results = []
    loss = torch.zeros((), device="cuda")
    for net in (fused, eager):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(300):
            with torch.autocast("cuda", torch.float16):
                loss = (net(x).float() - wanted).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(float(loss.detach()))
    print(f"loss after 300 steps of a fused optimizer: fused {results[0]:.6f}, eager {results[1]:.6f}", flush=True)
    return results[0] <= 1.1 * results[1] + 1e-4


def measure(c: Case, *, compiled: bool) -> dict[str, object]:
    """Times of forward pass and of training step without optimizer."""
    net = network(c).cuda()
    x = torch.randn(c.rows, c.widths[0], device="cuda", dtype=TYPES[c.dtype]).requires_grad_()
    dy = torch.randn(c.rows, c.widths[-1], device="cuda", dtype=TYPES[c.dtype])
    ways: dict[str, nn.Module] = {"fused": FusedMLP(net), "eager": net}
    if compiled:
        torch.compiler.reset()
        ways["compile"] = torch.compile(net, dynamic=False)  # type: ignore[assignment]
    row: dict[str, object] = {"record": "time", "case": c.name}
    parameters = list(net.parameters())
    for name, way in ways.items():

        def forward(way: nn.Module = way) -> None:
            with torch.no_grad(), torch.autocast("cuda", TYPES[c.dtype]):
                way(x)

        def both(way: nn.Module = way) -> None:
            torch._foreach_mul_([p.detach() for p in parameters], 1.0)
            for leaf in (x, *parameters):
                leaf.grad = None
            with torch.autocast("cuda", TYPES[c.dtype]):
                y = way(x)
            y.backward(dy)

        try:
            row[name] = {
                "forward": round(microseconds(forward), 1), "step": round(microseconds(both), 1),
                "step_4": round(microseconds(both, 4), 1),
                "forward_device": round(on_device(forward), 1), "step_device": round(on_device(both), 1),
            }  # fmt: skip
            if name != "compile":
                cast("dict[str, float]", row[name])["graph"] = round(in_a_graph(both), 1)
        except RuntimeError as error:  # a peer that does not take the case is said, and the rest is measured
            row[name] = {
                **cast("dict[str, object]", row.get(name, {})),
                "failed": (str(error).splitlines() or [""])[0][:90],
            }
    row["parts"] = parts(c, x)
    with torch.autocast("cuda", TYPES[c.dtype]):
        row["why_not"] = cast("FusedMLP", ways["fused"]).why_not(x)
    return row


def parts(c: Case, x: torch.Tensor) -> dict[str, float]:
    """Microseconds of each of our kernels by the profiler."""
    fused = FusedMLP(network(c).cuda())
    dy = torch.randn(c.rows, c.widths[-1], device="cuda", dtype=TYPES[c.dtype])

    def step() -> None:
        with torch.autocast("cuda", TYPES[c.dtype]):
            y = fused(x)
        torch.autograd.grad(y, [x, *fused.parameters()], dy)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.key_averages():
        name = str(event.key)
        short = name.rsplit("_", 1)[-1] if name.startswith("k") and name[1:5].isalnum() else name[:28]
        if name.startswith("k") and "_" not in name:
            short = "forward" if max(c.widths) <= 256 else name[:6]
        found[short] = round(found.get(short, 0.0) + float(event.device_time_total) / 3, 1)
    return dict(sorted(found.items(), key=lambda x: -x[1])[:7])


def compile_all(cases: Sequence[Case], *, wide: bool = True) -> int:
    """All kernels into the cache at once, on all cores; `wide`: inputs under autocast are f32. Returns how many."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        return 0
    facts = gpu_facts(None, calibrate=False)
    texts: dict[str, tuple[str, ...]] = {}
    for c in cases:
        layers = layers_of(list(network(c)))
        assert isinstance(layers, Layers)
        dtype = DType(c.dtype)
        given = DType.F32 if c.autocast and wide else dtype
        masters = DType.F32 if c.autocast else None
        net = Network(layers.widths, layers.acts, layers.biases, dtype, given, masters)
        problem = forward_problem(net, c.rows)
        found = mlp.schedules(problem, facts)
        for schedule in () if isinstance(found, Declined) else found:
            source = mlp.emit(problem, schedule, masters)
            if isinstance(source, CudaSource):
                texts[source.text] = source.flags
        sums = DType.F32 if c.autocast else dtype
        plans = [gradient(net, facts, s, dtype=sums) for s in shapes(net, facts) or (None,)]
        texts |= {p.text: () for p in plans if isinstance(p, Gradient)}
    nvrtc.compile_many([CompileJob(t, facts.arch, f) for t, f in texts.items()], cache_dir=Options().cache)
    return len(texts)


def judged(*, yes: bool) -> None:
    """Whether wide networks whose training is faster by torch's operations are left to them."""
    vars(fused_mlp)["contest"] = timing.contest if yes else lambda ways: [float(k) for k in range(len(ways))]


def table(rows: Sequence[dict[str, object]]) -> str:
    """Ratios to FusedMLP."""
    lines = [f"{'case':52} {'fused us':>18} {'eager x':>14} {'compile x':>14}   (forward, step; host included; graph)"]
    for row in rows:
        found = {k: cast("dict[str, float]", row[k]) for k in ("fused", "eager", "compile") if k in row}
        own = found["fused"]
        if "failed" in own:
            lines.append(f"{row['case']:52} {own['failed']}")
            continue
        cells = f"{own['forward']:9.1f}{own['step']:9.1f}"
        for peer in ("eager", "compile"):
            times = found.get(peer, {})
            ok = "forward" in times
            cells += f"{times['forward'] / own['forward']:7.2f}{times['step'] / own['step']:7.2f} " if ok else " " * 15
        device = " ".join(
            f"{k} {v['step_device']} ({v.get('graph', '-')})" for k, v in found.items() if "step_device" in v
        )
        lines.append(f"{row['case']:52} {cells}  device: {device}\n{'':8}{row.get('parts')}")
    return "\n".join(lines)


def dry_layers(c: Case, nvrtc: Nvrtc) -> int:
    """Compile what is tried for a wide network; returns how many spill or fail, which are printed."""
    layers = layers_of(list(network(c)))
    assert isinstance(layers, Layers)
    given, masters = (DType.F32, DType.F32) if c.autocast else (DType(c.dtype), None)
    net = Network(layers.widths, layers.acts, layers.biases, DType(c.dtype), given, masters)
    sums, bad, count = masters or DType(c.dtype), 0, 0
    for facts in (profile("h200"), profile("a100")):
        back = layered.backward(net, c.rows, inputs=True, parameters=True, dtype=sums)
        problems = {p.problem.key: p for p in (*layered.forward(net, c.rows), *back)}
        texts: dict[str, tuple[tuple[str, ...], str]] = {layered.layered(net, facts.sms, sums).text: ((), "beside")}
        for p in problems.values():
            found = templates.schedules(p.problem, facts)
            if isinstance(found, Declined):
                print(f"{c.name}: {facts.arch}: {p.role} {p.layer}: {found.reason}")
                bad += 1
                continue
            for number, (source, rows) in enumerate(candidates(p, found)):
                texts[source.text] = (source.flags, f"{p.role} {p.layer} {number} {rows} {source.schedule}")
        for text, (flags, label) in texts.items():
            made = nvrtc.compile(text, arch=facts.arch, flags=flags, cache_dir=Options().cache)
            wrong = [r for _, r in made.resources if r.spill_stores or r.stack_bytes]
            count += 1
            if wrong or made.warnings:
                print(f"{c.name}: {facts.arch}: {label}: {wrong} {made.warnings}", flush=True)
            bad += bool(wrong or made.warnings)
    print(f"{c.name}: {count} texts", flush=True)
    return bad


def dry(*, wide: bool = False, only: str = "") -> int:
    """Compile the kernels of all cases; returns how many spill or fail."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        print(nvrtc.reason, file=sys.stderr)
        return 1
    if wide:
        return sum(dry_layers(c, nvrtc) for c in (*WIDE_CHECKS, *WIDE_TIMES) if only in c.name)
    bad = 0
    for c in (*CHECKS, *TIMES[:3]):
        layers = layers_of(list(network(c)))
        assert isinstance(layers, Layers)
        dtype = DType(c.dtype)
        net = Network(layers.widths, layers.acts, layers.biases, dtype, DType.F32 if c.autocast else dtype)
        for arch, facts in (("sm_90a", profile("h200")), ("sm_80", profile("a100"))):
            for shape in shapes(net, facts) or (None,):
                plan = gradient(net, facts, shape)
                if not isinstance(plan, Gradient):
                    print(f"{c.name}: {arch}: {plan.reason}")
                    continue
                cubin = nvrtc.compile(plan.text, arch=arch)
                entries = (plan.chain, plan.finish) if plan.inside else (plan.chain, plan.wgrad, plan.finish)
                used = {e.name.rsplit("_")[-1]: cubin.of(e.name) for e in entries}
                spills = {k: r.spill_stores for k, r in used.items() if r.spill_stores or r.stack_bytes}
                bad += bool(spills)
                registers = {k: r.registers for k, r in used.items()}
                print(f"{c.name}: {arch}: {registers} {shape}{f' SPILLS {spills}' if spills else ''}")
    return bad


def is_right(row: Mapping[str, object]) -> bool:
    """Whether what was checked was right; times say nothing about that."""
    if row.get("kind") != "check" or "failed" in row:
        return "failed" not in row
    return bool(row["right"] and row["equal_bits"] and row["types"] and row["why_not"] is None)


def main() -> int:
    """Check, then measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=150.0, help="no case is begun after so many")
    parser.add_argument("--check", action="store_true", help="errors only")
    parser.add_argument("--times", action="store_true", help="times only")
    parser.add_argument("--cases", type=int, default=100, help="times of the first so many cases")
    parser.add_argument("--compiled", type=int, default=3, help="torch.compile in the first so many cases (3)")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--wide", action="store_true", help="layers of 257 to 512 columns")
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    add_option(parser)
    given = parser.parse_args()
    if given.dry:
        return int(dry(wide=given.wide, only=given.only) > 0)
    started = time.perf_counter()
    right = True
    record = Record(folder_of_gpu(), "mlp-training", key=("kind", "case"))
    left = Left(record, started + given.seconds, only=given.left, good=is_right)
    checks = [] if given.times else [c for c in (WIDE_CHECKS if given.wide else CHECKS) if given.only in c.name]
    checks = [c for c in checks if not left.known(kind="check", case=c.name)]
    judged(yes=False)
    count = 0 if given.wide else compile_all(checks)
    print(f"{count} kernels in the cache after {time.perf_counter() - started:.0f} s", flush=True)
    for c in checks:
        if given.left and left.over(f"check {c.name}"):
            continue
        with record.measuring(kind="check", case=c.name):
            row = check(c)
            good = row["right"] and row["equal_bits"] and row["types"] and row["why_not"] is None
            right = right and bool(good)
            print(
                f"{'ok   ' if good else 'WRONG'} {c.name:52} error {row['error']:.4f} eager {row['eager_error']:.4f}"
                f" forward {row['forward']:.4f} {row['eager_forward']:.4f} worst {row['worst']:.2f}"
                f" bits {row['equal_bits']} types {row['types']} {row['why_not'] or ''} {row['backward'] or ''}",
                flush=True,
            )
            record.add({**row, "record": "case", "suite": "mlp-training", "kind": "check"})
    for test in () if given.times or given.wide else (changed_weights_are_seen, silent_optimizer, second_derivatives):
        try:
            good = test()
        except Exception as error:
            print(f"FAILED {test.__name__}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            good = False
        right = right and good
    rows: list[dict[str, object]] = []
    cases = WIDE_TIMES if given.wide else TIMES
    timed = [] if given.check else [c for c in cases if given.only in c.name][: given.cases]
    judged(yes=True)
    count = 0 if given.wide else compile_all(timed, wide=False)
    print(f"{count} kernels in the cache after {time.perf_counter() - started:.0f} s", flush=True)
    for i, c in enumerate(timed):
        if not left.begins(kind="time", case=c.name):
            continue
        with record.measuring(kind="time", case=c.name):
            row = measure(c, compiled=not given.no_compile and i < given.compiled)
            rows.append(row)
            own = cast("dict[str, object]", row["fused"])
            if "failed" in own:
                raise RuntimeError(str(own["failed"]))
            record.add({**row, "record": "case", "suite": "mlp-training", "kind": "time"})
    right = right and not record.failed
    if rows:
        print(table(rows))
    print("all right" if right else "SOMETHING IS WRONG")
    return left.status(not right)


if __name__ == "__main__":
    sys.exit(main())
