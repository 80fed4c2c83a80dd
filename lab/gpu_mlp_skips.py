"""Layers with a second input and skips on an NVIDIA GPU: one kernel, one cut at the input, torch; training.

    python -m lab.gpu_mlp_skips [--forward] [--plans] [--training] [--dry] [--seconds S] [--out FILE]

The network is a radiance field: a position of 63 columns through eight layers, again in front of the sixth, a direction
of 27 columns beside the features in front of the last hidden layer. Everything is replayed from CUDA graphs, random
normal data, microseconds, the median of rounds. `--forward`: every schedule of the one kernel (`bare`: without asking
for the direction's lines early). `--plans`: `weft.compile` with it and with the chain cut where the direction comes in,
beside eager and torch.compile, bf16. `--training`: forward and backward pass, float32 parameters under autocast to
bf16, first against float64; `parts` are the kernels of a step. `--dry` compiles for sm_80 and sm_90a without a GPU.
Source of the network: arXiv:2003.08934, appendix A.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.cases.radiance import (
    BF16,
    Radiance,
    check,
    compile_all,
    error_of,
    layers_of,
    median,
    prepared,
    texts_of,
)
from benchmarks.harness.gpu_time import Kernel
from tests.generate.cuda.skips import nerf, skips
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

import weft
from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc
from weft.generate.cuda.mlp import kernel as mlp
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource
from weft.nn import FusedNetwork
from weft.options import Options
from weft.orchestrate import mlp as groups

_SHOWN = ("template", "warps", "tiles", "stages", "fixed", "pingpong", "flow", "columns")
FORWARD = ((64, 20), (128, 20), (256, 20), (64, 18), (256, 18))
TRAINING = ((64, 18), (128, 18), (256, 18), (64, 20))


def put(out: Path | None, **record: Any) -> None:
    """A line, at once."""
    text = json.dumps(record)
    print(text, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _bare(source: CudaSource) -> CudaSource:
    """Without asking for the lines of a second input when a tile begins."""
    lines = source.text.split("\n")
    kept: list[str] = []
    skip = 0
    for i, line in enumerate(lines):
        if "const int near0 = row0 + m" in line:
            kept.pop()  # the head of the loop over tiles
            skip = 3
        if skip:
            skip -= 1
            continue
        kept.append(lines[i])
    return replace(source, text="\n".join(kept))


def _reference(problem: Problem, tensors: list[torch.Tensor], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The first rows by torch: `nerf`'s layers, all but the last with ReLU."""
    held = dict(zip(problem.graph.inputs, tensors, strict=True))
    weights = [t.to(dtype) for i, t in held.items() if getattr(problem.graph.nodes[i].attrs, "is_weight", False)]
    x, direction = (t[:rows].to(dtype) for t in tensors if t.dim() == 2 and t.shape[1] in (63, 27) and len(t) >= rows)
    h = x
    pairs = list(zip(weights[::2], weights[1::2], strict=True))
    for layer, (w, bias) in enumerate(pairs):
        h = torch.cat([x, h], 1) if layer == 5 else torch.cat([h, direction], 1) if layer == 9 else h
        h = h @ w + bias
        h = torch.relu(h) if layer < len(pairs) - 1 else h
    return h


def _kernels(width: int, rows: int, facts: GpuFacts, out: Path | None) -> None:
    """Every schedule of the one kernel, right first."""
    nvrtc = find_nvrtc()
    assert not isinstance(nvrtc, Declined), nvrtc.reason
    problem = skips(nerf(rows, width, DType.BF16))
    found = mlp.schedules(problem, facts)
    if isinstance(found, Declined):
        put(out, record="kernel", width=width, rows=rows, declined=found.reason)
        return
    made = [s for x in found if isinstance(s := mlp.emit(problem, x), CudaSource)]
    made += [_bare(made[0])]
    results = nvrtc.compile_many([CompileJob(s.text, facts.arch, s.flags) for s in made], cache_dir=Options().cache)
    ordered: list[torch.Tensor] = []
    for i in problem.graph.inputs:
        shape = problem.graph.type_of(i).shape
        weight = getattr(problem.graph.nodes[i].attrs, "is_weight", False)
        scale = 1.0 if not weight else 1.4 / shape[0] ** 0.5 if len(shape) == 2 else 0.1
        ordered.append((torch.randn(*shape, device="cuda") * scale).to(BF16))
    many = 4096
    exact, eager = (_reference(problem, ordered, many, kind) for kind in (torch.float64, BF16))
    flops = sum(2.0 * rows * t.numel() for t in ordered if t.dim() == 2 and t.shape[0] != rows)
    for source, result in zip(made, results, strict=True):
        if not isinstance(result, CompiledCubin):
            put(out, record="kernel", width=width, rows=rows, failed=str(result)[:200])
            continue
        y = torch.full((rows, 3), float("nan"), device="cuda", dtype=BF16)
        us = Kernel(source, str(result.path)).time(ordered, y, launches=2, rounds=7)
        parameters = dict(source.schedule.params)
        put(
            out, record="kernel", width=width, rows=rows, us=round(us, 1), tflops=round(flops / us / 1e6),
            bare=source is made[-1], error=round(error_of(y[:many], exact), 5),
            eager=round(error_of(eager, exact), 5),
            regs=result.of(source.launches[0].entry).registers, spill=result.of(source.launches[0].entry).spill_stores,
            shape={k: v for k, v in parameters.items() if k in _SHOWN},
        )  # fmt: skip


def _forward(width: int, rows: int, out: Path | None, *, peers: bool) -> None:
    module = prepared(Radiance(width)).to(BF16).cuda().eval()
    inputs = tuple(torch.randn(rows, n, device="cuda", dtype=BF16) for n in (63, 27))
    found: dict[str, Any] = {}
    several = vars(groups)["_of_several"]
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(*(x[:4096].double() for x in inputs))
        found["eager"] = median(lambda: module(*inputs), rows)
        found["eager_error"] = round(error_of(module(*inputs)[:4096], exact), 5)
        for name, offered in (("fused", several), ("cut", lambda *a: [])):
            vars(groups)["_of_several"] = offered
            with tempfile.TemporaryDirectory() as cache:
                options = weft.Options(device="cuda", budget_s=15.0, cache_dir=Path(cache))
                try:
                    compiled = weft.compile(module, inputs, options=options)
                    found[name] = median(lambda c=compiled: c(*inputs), rows)  # type: ignore[misc]
                    y = compiled(*inputs)
                    assert isinstance(y, torch.Tensor)
                    found[f"{name}_error"] = round(error_of(y[:4096], exact), 5)
                    steps = compiled.executable.plan.steps
                    found[f"{name}_kernels"] = [
                        str(dict(s.kernel.schedule.params).get("template", s.kernel.schedule.generator)) for s in steps
                    ]
                finally:
                    vars(groups)["_of_several"] = several
        if peers:
            compiled_by_torch = torch.compile(module)
            found["compile"] = median(lambda: compiled_by_torch(*inputs), rows)
    put(out, record="forward", width=width, rows=rows, **found)


def _training(width: int, rows: int, out: Path | None, *, peers: bool) -> None:
    module = prepared(Radiance(width)).cuda()
    first = check(copy.deepcopy(module), (63, 27), min(rows, 1 << 16) + 13)
    put(out, record="check", width=width, **{k: round(v, 5) if isinstance(v, float) else v for k, v in first.items()})
    inputs = [torch.randn(rows, n, device="cuda") for n in (63, 27)]
    dy = torch.randn(rows, 3, device="cuda", dtype=BF16)
    fused = FusedNetwork(module)

    def step(net: Callable[..., Any], *, wanted: Sequence[torch.Tensor]) -> Callable[[], object]:
        def call() -> object:
            with torch.autocast("cuda", BF16):
                y = net(*inputs)
            return torch.autograd.grad(y, wanted, dy.to(y.dtype))

        return call

    leaves = list(module.parameters())
    found: dict[str, Any] = {}
    ways: list[tuple[str, Callable[..., Any]]] = [("fused", fused), ("eager", module)]
    if peers:
        ways.append(("compile", torch.compile(module)))
    for name, net in ways:
        call = step(net, wanted=leaves)
        call()
        found[name] = median(call, rows)
    with torch.no_grad(), torch.autocast("cuda", BF16):
        for name, net in ways[:2]:
            net(*inputs)
            found[f"{name}_forward"] = median(lambda n=net: n(*inputs), rows)  # type: ignore[misc]
    put(out, record="training", width=width, rows=rows, **found)
    call = step(fused, wanted=leaves)
    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    times = sorted(((e.self_device_time_total / 3, e.key[-40:]) for e in seen.key_averages()), reverse=True)
    put(out, record="parts", width=width, rows=rows, us=[(round(t, 1), name) for t, name in times[:6]])


def dry() -> None:
    """Everything is compiled for sm_80 and sm_90a."""
    nvrtc = find_nvrtc()
    assert not isinstance(nvrtc, Declined), nvrtc.reason
    for arch, facts in (("sm_90a", profile("h200")), ("sm_80", profile("a100"))):
        for width, power in TRAINING:
            for text, flags in texts_of(layers_of(Radiance(width), 63, 27), 1 << power, facts).items():
                started = time.perf_counter()
                found = nvrtc.compile(text, arch=arch, flags=flags, timeout_s=300)
                spilled = {n: r.spill_stores for n, r in found.resources if r.spill_stores}
                seconds = round(time.perf_counter() - started, 1)
                put(None, arch=arch, width=width, spilled=spilled, warnings=found.warnings, s=seconds)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.dry:
        dry()
        return
    started = time.perf_counter()
    facts = gpu_facts(None, calibrate=False)
    torch.manual_seed(0)

    def left() -> bool:
        return time.perf_counter() - started < given.seconds

    def guarded(what: Callable[..., None], *arguments: Any, **options: Any) -> None:
        try:
            what(*arguments, **options)
        except Exception as error:  # the other cases may do
            put(given.out, failed=what.__name__, of=str(arguments[:2]), why=f"{type(error).__name__}: {error}"[:400])

    if given.forward:
        for width, power in FORWARD:
            if left():
                guarded(_kernels, width, 1 << power, facts, given.out)
    if given.plans:
        for width, power in ((64, 18), (256, 18), (128, 18)):
            if left():
                guarded(_forward, width, 1 << power, given.out, peers=True)
    if given.training:
        count = compile_all([(layers_of(Radiance(w), 63, 27), 1 << r) for w, r in TRAINING], facts)
        put(given.out, record="compiled", texts=count, s=round(time.perf_counter() - started, 1))
        for i, (width, power) in enumerate(TRAINING):
            if left():
                guarded(_training, width, 1 << power, given.out, peers=i < 3)


if __name__ == "__main__":
    main()
