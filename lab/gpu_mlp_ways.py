"""Training by one kernel for all layers, by a kernel for each product, and by torch, on an NVIDIA GPU.

    python -m lab.gpu_mlp_ways [--only TEXT] [--compile] [--dry] [--seconds S] [--out FILE]

Forward and backward pass for the parameters' gradients, float32 parameters under autocast to bf16, of plain networks
and of the radiance fields of `gpu_mlp_skips`. Each way is forced, compared with float64 (norms, beside those of eager;
equal bits in two runs) and timed: microseconds of a replay from a graph, the median of rounds. `chosen` is what is
chosen by itself and in how many seconds that is settled; `products` are those of the second way with their own times
(alone, warm, as they were chosen) and floors: the larger of bytes over 4.2 TB/s and operations over 800 TFLOP/s;
`kernels` are those of a step that take longest. `--compile`: torch.compile's time, too. `--dry` says the work of each
network, and compiles the kernels of the second way for sm_80 and sm_90a, without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.cases.radiance import BF16, Radiance, error_of, median, prepared
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

from lab.gpu_mlp_skips import put
from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc
from weft.generate.cuda import templates
from weft.generate.cuda.training import Network
from weft.generate.cuda.training import layered as text
from weft.generate.cuda.training.layered import Product
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.nn import FusedMLP, fused_mlp, kernels, layered
from weft.nn.layered import candidates
from weft.nn.layers import Layers, layers_of
from weft.nn.traces import Traced, traced

ROWS = 1 << 18
BYTES_A_US, FLOPS_A_US = 4.2e6, 8e8
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "radiance 256": (lambda: Radiance(256), (63, 27), ROWS),
    "radiance 128": (lambda: Radiance(128), (63, 27), ROWS),
    "plain 4 x 256": (lambda: _plain(256, 4), (256,), ROWS),
    "radiance 192": (lambda: Radiance(192), (63, 27), ROWS),
    "plain 4 x 128": (lambda: _plain(128, 4), (128,), ROWS),
    "plain 4 x 192": (lambda: _plain(192, 4), (192,), ROWS),
    "plain 8 x 128": (lambda: _plain(128, 8), (128,), ROWS),
    "radiance 256, 2^14 rows": (lambda: Radiance(256), (63, 27), 1 << 14),
    "plain 4 x 256, 2^14 rows": (lambda: _plain(256, 4), (256,), 1 << 14),
    "plain 4 x 256, 2^12 rows": (lambda: _plain(256, 4), (256,), 1 << 12),
}


def _plain(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def network(module: nn.Module, widths: Sequence[int]) -> Network:
    """As kernels see it."""
    plain = isinstance(module, nn.Sequential)
    found = layers_of(list(module.children())) if plain else traced(module, widths, 2)
    layers = found.layers if isinstance(found, Traced) else found
    assert isinstance(layers, Layers), layers
    return layers.network(DType.BF16, DType.F32 if plain else DType.BF16, DType.F32)


def work(p: Product) -> tuple[int, int]:
    """(bytes, operations) of a product: each tensor once."""
    g = p.problem.graph
    types = [g.type_of(i) for i in (*g.inputs, *g.outputs)]
    size = sum(t.dtype.itemsize * _count(t.shape) for t in types)
    left, right = (g.type_of(i).shape for i in g.inputs[:2])
    inner = left[0] if p.role == "weights" else left[1]
    out = left[1] * right[1] if p.role == "weights" else left[0] * right[0]
    return size, 2 * out * inner


def _count(shape: Sequence[int]) -> int:
    n = 1
    for x in shape:
        n *= x
    return n


def floor_us(products: Sequence[Product]) -> float:
    """The least time of products by themselves."""
    return sum(max(size / BYTES_A_US, flops / FLOPS_A_US) for size, flops in map(work, products))


def products_of(net: Network, rows: int) -> list[Product]:
    """Of a step."""
    return [*text.forward(net, rows), *text.backward(net, rows, inputs=False, parameters=True, dtype=DType.F32)]


def timed_products(found: layered.ByLayers, rows: int) -> list[list[object]]:
    """(role, layer, microseconds, floor, kernel) of each product."""
    lines: list[list[object]] = []
    for p in products_of(found.net, rows):
        kernel = found._chosen.get(p.problem.key)
        if isinstance(kernel, layered.Chosen):
            us = kernel.us
            name = kernel.bound.source.schedule.param("template")
            lines.append([p.role, p.layer, round(us, 1), round(floor_us([p]), 1), name, kernel.sum_rows > 0])
    return lines


def forced(way: str) -> None:
    """Networks met from now on are trained by `way`."""
    kernels.kernels_of.cache_clear()
    contested = 128 if way == "chosen" else 1 << 30 if way == "chain" else 1
    kernels.CONTESTED = contested
    fused_mlp.CONTESTED_ROWS = 1 << 13 if way == "chosen" else 1
    plain = vars(forced).setdefault("contest", fused_mlp._Run._contest)
    fused_mlp._Run._contest = plain if way != "layers" else lambda *a: True  # type: ignore[method-assign]


def measure(name: str, out: Path | None, *, by_torch: bool) -> None:
    """All ways of one network."""
    make, widths, rows = CASES[name]
    torch.manual_seed(0)
    module = prepared(make()).cuda()
    inputs = [torch.randn(rows, n, device="cuda").to(BF16).float() for n in widths]
    leaves = list(module.parameters())
    dy = torch.randn_like(module(*(x[:1] for x in inputs)).expand(rows, -1)).to(BF16)
    double = copy.deepcopy(module).double()
    exact = _gradients(double, [x.double() for x in inputs], dy.double(), list(double.parameters()), None)
    eager = _mean(_gradients(module, inputs, dy, leaves, BF16), exact)
    put(
        out,
        case=name,
        rows=rows,
        floor=round(floor_us(products_of(network(copy.deepcopy(module).cpu(), widths), rows))),
    )
    ways = ["layers", "chain", "chosen", "torch", *(["compile"] if by_torch else [])]
    net: Any
    for way in ways:
        started = time.perf_counter()
        forced(way)
        net = module if way == "torch" else torch.compile(module) if way == "compile" else FusedMLP.from_module(module)
        call = _step(net, inputs, leaves, dy)
        call()
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        row: dict[str, Any] = {"way": way, "us": median(call, rows), "first_s": round(first, 1)}
        if way in ("layers", "chain", "chosen"):
            one, two = (_gradients(net, inputs, dy, leaves, BF16) for _ in range(2))
            row |= {"error": round(_mean(one, exact), 5), "eager": round(eager, 5)}
            row["bits"] = all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
            (own,) = net._images._runs.values()
            if isinstance(own, fused_mlp._Run):
                row["ways"], layers = list(own.kernels.ways.values()), own.kernels.by_layers()
                row["contest"] = [[round(t) for t in ts if t < 1e9] for ts in own.kernels.times.values()]
                row["refused"] = None if layers is None else str(layers.refused(rows))
                if way == "layers" and layers is not None:
                    put(out, case=name, products=timed_products(layers, rows))
        put(out, case=name, **row)
        if way in ("layers", "chain"):
            put(out, case=name, way=way, kernels=_kernels(call))
    forced("chosen")


def _step(
    net: Any, inputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], dy: torch.Tensor
) -> Callable[[], object]:
    def call() -> object:
        with torch.autocast("cuda", BF16):
            y = net(*inputs)
        return torch.autograd.grad(y, leaves, dy.to(y.dtype))

    return call


def _gradients(
    net: Any,
    inputs: Sequence[torch.Tensor],
    dy: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    with torch.autocast("cuda", dtype or BF16, enabled=dtype is not None):
        y = net(*inputs)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def _mean(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return statistics.fmean(error_of(a, b) for a, b in zip(found, exact, strict=True))


def _kernels(call: Callable[[], object], most: int = 14) -> list[list[object]]:
    """(microseconds of a step, launches, name) of the kernels that take longest."""
    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    times = sorted(((e.self_device_time_total, e.count, e.key[-24:]) for e in seen.key_averages()), reverse=True)
    return [[round(t, 1), n, name] for t, n, name in times[:most]]


def dry(only: str) -> None:
    """Work, and what the compiler says."""
    nvrtc = find_nvrtc()
    assert not isinstance(nvrtc, Declined), nvrtc.reason
    for name, (make, widths, rows) in CASES.items():
        if only not in name:
            continue
        net = network(make(), widths)
        products = products_of(net, rows)
        by_role = {r: round(floor_us([p for p in products if p.role == r])) for r in ("forward", "below", "weights")}
        put(None, case=name, floor=round(floor_us(products)), roles=by_role, products=len(products))
        for facts in (profile("h200"), profile("a100")):
            put(None, case=name, arch=facts.arch, **_compiled(net, products, facts, nvrtc))


def _compiled(net: Network, products: Sequence[Product], facts: GpuFacts, nvrtc: Any) -> dict[str, object]:
    texts: dict[str, tuple[str, ...]] = {text.layered(net, facts.sms).text: ()}
    declined = []
    for p in {p.problem.key: p for p in products}.values():
        schedules = templates.schedules(p.problem, facts)
        if isinstance(schedules, Declined):
            declined.append(f"{p.role} {p.layer}: {schedules.reason}")
            continue
        texts |= {s.text: s.flags for s, _ in candidates(p, schedules)}
    found = nvrtc.compile_many([CompileJob(t, facts.arch, f) for t, f in texts.items()])
    made = [x for x in found if isinstance(x, CompiledCubin)]
    return {
        "texts": len(texts), "failed": len(found) - len(made), "declined": declined,
        "spilled": sum(any(r.spill_stores for _, r in x.resources) for x in made),
        "warned": sum(bool(x.warnings) for x in made),
    }  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.dry:
        dry(given.only)
        return
    started = time.perf_counter()
    for name in CASES:
        if given.only in name and time.perf_counter() - started < given.seconds:
            try:
                measure(name, given.out, by_torch=given.compile)
            except Exception as error:  # the other cases may do
                put(given.out, case=name, failed=f"{type(error).__name__}: {error}"[:400])


if __name__ == "__main__":
    main()
