"""Products by several algorithms of cuBLASLt beside the framework's own choice and generated kernels, on an NVIDIA GPU.

    python -m lab.gpu_lt [--out FILE] [--seconds S] [--kernels N] [--networks NAME:BATCH ...]

Each product goes through the tuner as it does in a compilation: verified, then timed with the others in one trial.
A line: microseconds of the best generated kernel, of the framework's call, and of each recorded algorithm, in the
order of the library's heuristic. With `--networks`: the time of a cold compilation with and without the algorithms, how
many were measured, and what the plans use.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases.linear import Sizes, linear
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import RESULTS, environment, exchange, folder_of_gpu, lines_of

from weft.errors import DeviceError
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule


@dataclass(frozen=True)
class Case:
    """A product with a constant right operand."""

    sizes: Sizes
    compute: str = "f16"
    bias: bool = False
    residual: bool = False
    activation: str = ""

    @property
    def name(self) -> str:
        """For people."""
        tail = "+".join(["bias"] * self.bias + ["residual"] * self.residual + [self.activation] * bool(self.activation))
        return f"{'x'.join(map(str, self.sizes))} {self.compute} {tail}".rstrip()


CASES = (
    Case((2048, 768, 768), bias=True, residual=True),
    Case((2048, 3072, 768), bias=True),
    Case((2048, 768, 3072), bias=True, residual=True),
    Case((3152, 2304, 768), bias=True),
    Case((3152, 3072, 768), bias=True, activation="gelu"),
    Case((3152, 768, 3072), bias=True, residual=True),
    Case((4096, 4096, 4096)),
    Case((16, 4096, 25088), bias=True, activation="relu"),
    Case((1, 4096, 4096), bias=True, activation="relu"),
    Case((2048, 3072, 768), "bf16", bias=True),
    Case((2048, 768, 3072), "tf32", bias=True, residual=True),
    Case((2048, 3072, 768), "f32", bias=True, activation="relu"),
)
"""Layers of BERT and ViT at batch 16, a large product, layers of VGG, and other types."""


def measured(case: Case, kernels: int, tools: Any) -> dict[str, Any]:
    """One product through the tuner, all algorithms whatever its size."""
    from weft.generate.library import lt
    from weft.generate.offer import kernels_of
    from weft.generate.registry import generators
    from weft.options import Options
    from weft.tune.store import Database
    from weft.tune.tuner import ProblemTrial, Tuner

    facts, nvrtc, options = tools
    assert isinstance(options, Options)
    problem = linear(
        DType.F32 if case.compute == "tf32" else DType(case.compute),
        sizes=case.sizes, flat=True, bias=case.bias, residual=case.residual, activation=case.activation,
    )  # fmt: skip
    facts = replace(facts, tf32=case.compute == "tf32")
    options = replace(options, allow_tf32=facts.tf32)
    asked: list[bool] = []
    rule = lt.is_contender

    def noted(p: Any, facts: Any) -> bool:
        asked.append(rule(p, facts))
        return True

    vars(lt)["is_contender"] = noted
    offers = [kernels_of(g, problem, facts, kernels) for g in generators(device="cuda")]
    pairs = [pair for offer in offers for pair in offer.kernels]
    vars(lt)["is_contender"] = rule
    start = time.perf_counter()
    with Tuner(options, facts, Database.open(None), compiler=nvrtc) as tuner:
        found = list(tuner.measure([ProblemTrial(problem, [(s, k, None) for s, k in pairs])]))
    seconds = time.perf_counter() - start
    times = {m.schedule: m.median_us if m.verdict is Verdict.OK else math.nan for m in found}

    def of(form: str) -> list[float]:
        return [round(t, 2) for s, t in times.items() if form_of(s) == form]

    ordered = sorted((s for s in times if form_of(s) == "lt"), key=lambda s: int(str(s.param("algorithm"))))
    return {
        "record": "case", "suite": "library algorithms", "case": case.name, "seconds": round(seconds, 1),
        "generated_us": min((t for t in of("generated") if t > 0), default=math.nan),
        "framework_us": [t for form in ("cublaslt", "operator", "primitives") for t in of(form)],
        "algorithms_us": [round(times[s], 2) for s in ordered],
        "workspaces": [s.param("workspace") for s in ordered],
        "offered": asked == [True],
        "refused": refused(found),
    }  # fmt: skip


def form_of(schedule: Schedule) -> str:
    """The library's form, or `generated`."""
    return str(dict(schedule.params).get("form", "")) if schedule.generator == "library" else "generated"


def refused(found: Sequence[Measurement]) -> list[str]:
    """Why calls of the library were not timed."""
    return [
        f"{m.schedule.param('form')}: {m.verdict.value} {m.error[:150]}"
        for m in found
        if m.verdict not in (Verdict.OK, Verdict.SLOW) and m.schedule.generator == "library"
    ]


def look(cases: Sequence[Case]) -> None:
    """What the heuristic answers, with and without the mask on reductions: splits/scheme/workspace per algorithm."""
    import torch

    from weft.device.cuda.cublaslt import IN_ORDER, LtProduct
    from weft.generate.library.algorithm import MOST_WORKSPACE
    from weft.generate.library.lt_call import library

    start = time.perf_counter()
    found = library()
    print(f"library opened in {(time.perf_counter() - start) * 1e3:.1f} ms: {found}"[:200], flush=True)
    if isinstance(found, Declined):
        return
    print(f"version {found.lt.version}, torch's CUDA {torch.version.cuda}", flush=True)
    for c in cases:
        activation: Any = "gelu_tanh" if c.activation == "gelu" else c.activation
        product = LtProduct(*c.sizes, c.compute, "nt", c.bias, c.residual, activation)
        for mask in (None, IN_ORDER):
            start = time.perf_counter()
            try:
                offered = found.lt.algorithms(product, 10, workspace=MOST_WORKSPACE, schemes=mask, alignment=16)
                took = (time.perf_counter() - start) * 1e3
                text = " ".join(f"{x.splits}/{x.scheme}/{x.workspace}" for x in offered)
                kept = len({x.data for x in offered if x.in_order})
                same = sum(getattr(found.lt.restore(product, x.data), "data", b"") == x.data for x in offered)
            except DeviceError as error:
                text, took, kept, same = str(error), 0.0, 0, 0
            print(f"{c.name} mask {mask}: {took:.2f} ms, {kept} differ, {same} restored: {text}", flush=True)


def told(line: dict[str, Any]) -> str:
    """A line for people."""
    best = min([t for t in line["algorithms_us"] if t > 0], default=math.nan)
    framework = min([t for t in line["framework_us"] if t > 0], default=math.nan)
    text = f"{line['case']:42s} generated {line['generated_us']:8.2f}  framework {framework:8.2f}  algorithms "
    text += " ".join(f"{t:.2f}" for t in line["algorithms_us"]) + f"  best/framework {best / framework:.2f}"
    text += "" if line["offered"] else "  (too small to be offered)"
    return text + "".join(f"\n    {x}" for x in line["refused"])


def network(name: str, batch: int, *, offered: bool, seconds: float) -> dict[str, Any]:
    """A cold compilation, with or without the algorithms."""
    import torch
    from benchmarks.models import load

    import weft
    from weft.generate.library import lt

    module, inputs = load(name)
    module = module.half().cuda()
    inputs = tuple(
        (x.half() if x.is_floating_point() else x).repeat(batch, *[1] * (x.dim() - 1)).cuda() for x in inputs
    )
    before = lt.is_contender
    if not offered:
        vars(lt)["is_contender"] = lambda p, facts: False
    try:
        with tempfile.TemporaryDirectory(prefix="weft-lt-") as cache, torch.no_grad():
            start = time.perf_counter()
            options = weft.Options(device="cuda", budget_s=seconds, cache_dir=Path(cache))
            made = weft.compile(module, inputs, options=options)
            took = time.perf_counter() - start
            wanted = made.executable(*inputs)
            start = time.perf_counter()
            again = weft.compile(module, inputs, options=options)
            warm = time.perf_counter() - start
            same = all(torch.equal(x, y) for x, y in zip(wanted, again.executable(*inputs), strict=True))
    finally:
        lt.is_contender = before
    record = made.record
    forms = Counter(
        "algorithm" if "form=lt" in k.schedule else "library" if k.schedule.startswith("library") else "generated"
        for k in record.steps
    )
    times = {t.name: round(t.median_us, 1) for t in record.plans}
    return {
        "record": "network", "suite": "library algorithms", "case": f"{name} batch {batch}", "offered": offered,
        "seconds": round(took, 1), "warm_s": round(warm, 2), "same_bits_warm": same,
        "stages": {s.name: round(s.seconds, 1) for s in record.stages},
        "measured": record.measured, "rejected": dict(record.rejected_kernels), "kernels": dict(forms), "us": times,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lab.gpu_lt", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default="", help="file of results, JSON lines")
    parser.add_argument("--seconds", type=float, default=80.0, help="when to stop (80)")
    parser.add_argument("--kernels", type=int, default=6, help="of each generator (6)")
    parser.add_argument("--networks", nargs="*", default=[], help="NAME:BATCH, compiled with and without; no products")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tuning for a network (120)")
    parser.add_argument("--record", action="store_true", help="put the results into the record")
    add_option(parser)
    given = parser.parse_args(sys.argv[1:] if arguments is None else list(arguments))
    left = Left(None, time.perf_counter() + given.seconds, only=given.left)
    lines: list[dict[str, Any]] = [environment("python -m lab.gpu_lt")]
    path = RESULTS / folder_of_gpu() / "library-algorithms.jsonl" if given.record else Path()
    there = lines_of(path) if given.record and given.left else []
    known = {(x.get("case"), x.get("offered")) for x in there if x.get("src") == lines[0]["src"]}

    def keep(line: dict[str, Any]) -> None:
        lines.append(line)
        if given.record:
            exchange(path, lines[0], [line], ("record", "case", "offered"))
        if given.out:
            Path(given.out).write_text("".join(json.dumps(x) + "\n" for x in lines))

    for number, text in enumerate(given.networks):
        name, _, batch = text.partition(":")
        for offered in (number % 2 == 1, number % 2 == 0):  # who goes first pays for what is loaded once
            if (f"{name} batch {batch}", offered) not in known and not left.over(text):
                line = network(name, int(batch or 1), offered=offered, seconds=given.budget)
                keep(line)
                print({k: v for k, v in line.items() if k not in ("record", "suite")}, flush=True)
    if given.networks:
        sys.exit(left.status())
    from weft.options import Options
    from weft.platform.cuda.platform import survey

    with tempfile.TemporaryDirectory(prefix="weft-lt-") as cache:
        options = Options(device="cuda", cache_dir=Path(cache))
        facts, nvrtc, _ = survey(options)
        look((CASES[0], CASES[6], CASES[8], CASES[10], CASES[11]))
        for case in CASES:
            if {(case.name, False), (case.name, True)} & known or left.over(case.name):
                continue
            line = measured(case, given.kernels, (facts, nvrtc, options))
            keep(line)
            print(told(line), flush=True)
    sys.exit(left.status())


if __name__ == "__main__":
    main()
