"""Where the time of a step of training goes: on the host, and by the products of wide networks.

    python -m lab.gpu_mlp_host [--products] [--seconds S]

By pieces, and function by function (each with those that it calls); then an optimizer that changes parameters without a
new version. `--products` says what the kernels tried for each product of a wide network take, beside torch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu_mlp_training import TIMES, TYPES, WIDE_TIMES, Case, judged, network, silent_optimizer
from torch import nn

from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.cuda import templates
from weft.generate.cuda.training import Network, layered
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.nn import FusedMLP, fused_mlp, timing
from weft.nn.layered import TORCH, candidates, compiled_kernels, trials_of
from weft.nn.layers import Layers, layers_of
from weft.options import Options
from weft.tune.store import Database
from weft.tune.tuner import Tuner


def host(c: Case, steps: int = 100) -> dict[str, float]:
    """Microseconds that a step spends in functions of the host, whatever thread they run on."""
    from weft.device.cuda.direct import Direct
    from weft.nn import autograd, fused_mlp, kernels

    spent: dict[str, float] = {}

    def timed(home: Any, name: str) -> Callable[[], None]:
        plain = vars(home)[name]
        call = plain.__func__ if isinstance(plain, staticmethod) else plain

        def around(*args: object, **options: object) -> object:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                label = f"{getattr(home, '__name__', '')}.{name}".replace("weft.nn.", "")
                spent[label] = spent.get(label, 0.0) + (time.perf_counter() - start) * 1e6 / steps

        setattr(home, name, staticmethod(around) if isinstance(plain, staticmethod) else around)
        return lambda: setattr(home, name, plain)

    net = FusedMLP(network(c).cuda())
    x = torch.randn(c.rows, c.widths[0], device="cuda", dtype=TYPES[c.dtype]).requires_grad_()
    dy = torch.randn(c.rows, c.widths[-1], device="cuda", dtype=TYPES[c.dtype])
    parameters = list(net.parameters())

    def step() -> None:
        for leaf in (x, *parameters):
            leaf.grad = None
        start = time.perf_counter()
        with torch.autocast("cuda", TYPES[c.dtype]):
            y = net(x)
        middle = time.perf_counter()
        y.backward(dy)
        spent["forward"] = spent.get("forward", 0.0) + (middle - start) * 1e6 / steps
        spent["grad"] = spent.get("grad", 0.0) + (time.perf_counter() - middle) * 1e6 / steps

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    places = (
        (fused_mlp.SeenCall, "holds"), (fused_mlp.SeenCall, "__call__"), (fused_mlp._Run, "forward"),
        (fused_mlp._Run, "backward"), (fused_mlp._Run, "reads"), (kernels.ForwardCall, "run"),
        (kernels.ForwardCall, "pack"), (kernels.BackwardCall, "run"), (kernels.BackwardCall, "pack"),
        (Direct, "launch"), (autograd, "_asked"), (autograd._Fused, "backward"),
    )  # fmt: skip
    spent.clear()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    plain = dict(spent)
    spent.clear()
    undo = [timed(home, name) for home, name in places]
    try:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    finally:
        for back in undo:
            back()
    return {
        **{f"{k}, nothing timed inside": round(v, 1) for k, v in plain.items()},
        **{k: round(v, 1) for k, v in spent.items()},
    }


def pieces(c: Case, steps: int = 100, *, inputs: bool = False) -> dict[str, float]:
    """Microseconds of the host for what a step is made of, by itself; `alone`: backward on the calling thread."""
    net = FusedMLP(network(c).cuda())
    eager = nn.Sequential(*net)
    x = torch.randn(c.rows, c.widths[0], device="cuda", dtype=TYPES[c.dtype]).requires_grad_(inputs)
    dy = torch.randn(c.rows, c.widths[-1], device="cuda", dtype=TYPES[c.dtype])
    parameters = list(net.parameters())

    def step(way: nn.Module, *, back: bool = True) -> None:
        for p in (x, *parameters):
            p.grad = None
        with torch.autocast("cuda", TYPES[c.dtype]):
            y = way(x)
        if back:
            y.backward(dy)

    def alone(way: nn.Module) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            step(way)

    def nothing() -> None:
        with torch.autocast("cuda", TYPES[c.dtype]):
            pass

    def inference() -> None:
        with torch.no_grad():
            step(net, back=False)

    step(net)
    (run,) = [r for r in net._images._runs.values() if isinstance(r, fused_mlp._Run)]
    (ahead,), (back,), (seen,) = run._calls.values(), run._backs.values(), net._images.calls.values()
    bound = ahead.forward.packing.bind((1, 1, 1), (32, 1, 1), [0] * (1 + len(parameters)))
    addresses, dense = [p.data_ptr() for p in parameters], x.detach()
    sums = torch.empty(run.kernels.elements, device="cuda")
    room = run._room(back.scratch_bytes, dense.device)
    dx = dense.clone()
    ends = dense.data_ptr(), dy.data_ptr(), dx.data_ptr() if inputs else 0, sums.data_ptr(), room.data_ptr()
    one = torch.ones(8, device="cuda", requires_grad=True)
    weight = torch.ones(8, device="cuda")
    ways: dict[str, Callable[[], object]] = {
        "autocast": nothing, "no grad": inference, "forward": lambda: step(net, back=False), "step": lambda: step(net),
        "step alone": lambda: alone(net), "eager forward": lambda: step(eager, back=False),
        "eager step": lambda: step(eager), "eager step alone": lambda: alone(eager),
        "least backward": lambda: (one * weight).backward(weight), "empty": lambda: torch.empty(64, device="cuda"),
        "capturing": torch.cuda.is_current_stream_capturing, "stream": timing.stream, "product": lambda: one * weight,
        "look": lambda: seen.holds(net._modules.values(), x),
        "one launch": lambda: ahead.pack(addresses, timing.stream()),
        "kernels of backward": lambda: back.run(*ends, timing.stream()),
        "views": lambda: [sums.as_strided(*v) for v in run.kernels.views],
        "launch by the bindings": lambda: bound._launch(bound._config, bound._handle, ahead._pack._arguments[2], 0),
    }  # fmt: skip
    found = {}
    for name, call in ways.items():
        samples = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps // 4):
                call()
            samples.append((time.perf_counter() - start) / (steps // 4) * 1e6)
        found[name] = round(statistics.median(samples), 1)
    return found


def products(c: Case, seconds: float) -> None:
    """Prints what the kernels take that were tried for each product of a wide network, and torch's product alone."""
    started = time.perf_counter()
    layers = layers_of(list(network(c)))
    nvrtc = find_nvrtc()
    assert isinstance(layers, Layers)
    assert isinstance(nvrtc, Nvrtc)
    facts = gpu_facts(None, calibrate=False)
    net = Network(layers.widths, layers.acts, layers.biases, DType(c.dtype), DType(c.dtype), DType.F32)
    seen: set[str] = set()
    generator = torch.Generator("cuda").manual_seed(0)
    both = layered.forward(net, c.rows), layered.backward(net, c.rows, inputs=True, parameters=True, dtype=DType.F32)
    for p in (*both[0], *both[1]):
        if p.problem.key in seen or time.perf_counter() - started > seconds:
            continue
        seen.add(p.problem.key)
        found = templates.schedules(p.problem, facts)
        emitted = [] if isinstance(found, Declined) else candidates(p, found)
        own = compiled_kernels(emitted, facts, nvrtc, Options().cache)
        times = []
        with (
            Database.open(Options().cache) as database,
            Tuner(Options(device="cuda"), facts, database, compiler=nvrtc) as tuner,
        ):
            for some, trial in trials_of(net, p, own):
                of = {x.source.schedule: {**dict(x.source.schedule.params), "sums": x.sum_rows} for x in some}
                times += [(m.median_us, of[m.schedule]) for m in tuner.measure([trial])]
        types = [p.problem.graph.type_of(i) for i in p.problem.graph.inputs[:2]]
        left, right = (torch.randn(t.shape, generator=generator, device="cuda").to(TORCH[t.dtype]) for t in types)
        plain = (lambda a=left, b=right: a.t() @ b) if p.role == "weights" else (lambda a=left, b=right: a @ b.t())
        shape = f"{p.role} {p.layer}: {tuple(left.shape)} {tuple(right.shape)}"
        print(f"{shape}; torch's product alone {timing.contest([plain])[0]:.1f} us", flush=True)
        for number, (us, known) in enumerate(times):
            if us == min(x for x, _ in times) or number < 5:
                names = (
                    "template",
                    "bm",
                    "bn",
                    "split",
                    "pingpong",
                    "multicast",
                    "stream_k",
                    "stages",
                    "persistent_ctas",
                    "sums",
                )
                print(
                    f"    {number}: {us:8.1f}  " + " ".join(f"{n}={known[n]}" for n in names if known.get(n)),
                    flush=True,
                )


def main() -> int:
    """See the module; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--seconds", type=float, default=45.0)
    given = parser.parse_args()
    if given.products:
        judged(yes=False)
        products(WIDE_TIMES[0], given.seconds)
        return 0
    for inputs in (False, True):
        print("pieces", TIMES[4].name, inputs, json.dumps(pieces(TIMES[4], inputs=inputs)), flush=True)
    right = silent_optimizer()
    for c in (TIMES[0], TIMES[4]):
        print(c.name, json.dumps(host(c)), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
