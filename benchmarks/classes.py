"""Classes of networks beside every peer: 27 cases on a GPU in f16, 18 on a processor in f32.

    python -m benchmarks.classes [NAME ...] [--device cpu|cuda] [--budget S] [--seconds S] [--rounds N] [--again]
                                 [--peers eager,inductor,...] [--threads N] [--out FILE]

Each case runs in a process of its own: Weft and all peers, checked against float64, then timed in interleaved rounds.
Peers on a processor: eager, torch.compile (`inductor`), the same with `freezing`, ONNX Runtime; on a GPU eager and
torch.compile, each in both memory formats and in a CUDA graph, with `autotune` in mode max-autotune. A peer that
fails, or has not compiled within its limit, is said in the row. Rows add up; what has one is passed over unless named
or `--again`. `--search 5,10,15,30,60` measures instead what a search of so many seconds finds, each from an empty
database, all plans in the same interleaved rounds; record `classes-search`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.cases.class_models import CPU, GPU, Member
from benchmarks.harness import noise
from benchmarks.harness.child import Child, Silence
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu
from benchmarks.models import vision_operators
from weft.api import flat
from weft.pipeline.finish import Sample, interleave
from weft.platform.cpu import host_sample

SUITE, SEARCHES = "classes", "classes-search"
PEERS = {"cpu": "eager,inductor,freezing,onnxruntime", "cuda": "eager,inductor,autotune"}
COMPILE_S = 540.0
"""What a peer may take, about: a process has this for each of its peers."""
LIMITS = {"cpu": 1e-4, "cuda": 2e-2}
"""Of an error, as a norm over that of the exact result: f32, f16. Above it a contender's time does not count."""
Call = Callable[[], object]


# --- in a process of its own


def measured(member: Member, given: argparse.Namespace) -> Row:
    """Compile, check and time one case; the fields of its row."""
    module, inputs, exact = posed(member, given.device)
    with tempfile.TemporaryDirectory(prefix="weft-classes-") as folder:
        row, run = compiled(module, inputs, Path(folder) / "cache", given)
        calls, failed, seconds = peers(module, inputs, Path(folder), given)
        calls = {"weft": run, **calls}
        errors = {name: error_of(call(), exact) for name, call in calls.items()}
        right = {name: call for name, call in calls.items() if errors[name] <= LIMITS[given.device]}
        failed |= {name: f"an error of {errors[name]:.1e}" for name in calls if name not in right}
        samples = interleave(
            noise.twice(right), rounds=given.rounds, seed=1, budget_s=given.timed, sample=sampler(given.device)
        )
    ms = {name: round(statistics.median(samples[name]) / 1e3, 5) for name in right}
    others = {name: x for name, x in ms.items() if name != "weft"}
    best = min(others, key=lambda name: others[name], default="")
    return {
        "class": member.group, "tuned": member.tuned, "weft_ms": ms.get("weft", math.inf), "peers_ms": others,
        "best_peer": best, "speedup_best": round(others[best] / ms["weft"], 3) if best and "weft" in ms else 0.0,
        "noise": noise.of_rounds(samples, "weft", best).record() if best and "weft" in ms else None,
        "errors": errors, "failed_peers": failed, "peer_compile_s": seconds, **row,
        "samples_ms": {name: [round(x / 1e3, 5) for x in samples[name]] for name in right},
    }  # fmt: skip


def searched(member: Member, given: argparse.Namespace) -> Row:
    """What searches of some seconds find: the fields of a row."""
    module, inputs, exact = posed(member, given.device)
    seconds = [float(x) for x in given.search.split(",")]
    rows, calls = {}, {}
    with tempfile.TemporaryDirectory(prefix="weft-classes-") as folder:
        for budget in seconds:
            asked_for = argparse.Namespace(**{**vars(given), "budget": budget, "warm": 0})
            row, call = compiled(module, inputs, Path(folder) / f"{budget:g}", asked_for)
            row["error"] = error_of(call(), exact)
            rows[f"{budget:g}"], calls[f"{budget:g}"] = row, call
        samples = interleave(calls, rounds=given.rounds, seed=1, budget_s=given.timed, sample=sampler(given.device))
    ms = {name: round(statistics.median(x) / 1e3, 5) for name, x in samples.items()}
    last = f"{seconds[-1]:g}"
    return {
        "class": member.group, "tuned": member.tuned, "ms": ms,
        "over_last": {name: round(x / ms[last], 3) for name, x in ms.items()},
        **{key: {name: row[key] for name, row in rows.items()} for key in ("plan", "kernels", "tuning_s", "error")},
    }  # fmt: skip


def posed(member: Member, device: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor]:
    """The module and its inputs on the device, in its type, and the exact result."""
    if importlib.util.find_spec("torchvision"):
        vision_operators.provide()
    torch.manual_seed(0)
    module, inputs = member.make()
    with torch.no_grad():
        exact = wide(module, inputs)
    if device == "cuda":
        module, inputs = module.half().cuda(), tuple(halves(x).cuda() for x in inputs)
    return module, inputs, exact


def sampler(device: str) -> Sample:
    """How calls are timed: by the device's clock or the host's."""
    if device == "cuda":
        from weft.platform.cuda.platform import sample_us

        return sample_us
    return host_sample


def halves(x: torch.Tensor) -> torch.Tensor:
    """Floats in f16."""
    return x.half() if x.is_floating_point() else x


def wide(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    double = copy.deepcopy(module).double()
    found: torch.Tensor = double(*(x.double() if x.is_floating_point() else x for x in inputs))
    return found


def error_of(found: object, exact: torch.Tensor) -> float:
    """Norm of the difference over that of the exact result; infinite where there is another shape or a NaN."""
    got = flat(found)[0].detach().double().cpu()
    if got.shape != exact.shape:
        return math.inf
    error = float((got - exact).norm() / exact.norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


def compiled(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], cache: Path, given: argparse.Namespace
) -> tuple[Row, Call]:
    """Weft's plan: what a row says of it, and a call."""
    options = weft.Options(budget_s=given.budget, device=given.device, cache_dir=cache)
    began = time.perf_counter()
    exe = weft.compile(module, list(inputs), options=options)
    tuning_s = time.perf_counter() - began
    again = time.perf_counter()
    if given.warm:
        weft.compile(module, list(inputs), options=options)
    warm_s = time.perf_counter() - again
    r = exe.record
    if given.verbose:
        for stage in r.stages:
            print(f"   {stage.seconds:6.2f} s {stage.name}: {stage.detail}", file=sys.stderr)
        for p in r.plans:
            times = f"{p.median_us:.1f} us, predicted {p.predicted_us:.1f}"
            print(f"   {p.name}: {times}, {p.kernels} kernels {p.note}", file=sys.stderr)
        for step in sorted(r.steps, key=lambda s: -s.cost_us)[: given.verbose]:
            what = "+".join(step.primitives)[:90]
            print(f"   {step.cost_us:9.2f} us {step.schedule} {what} {step.outputs}", file=sys.stderr)
    row: Row = {
        "threads": torch.get_num_threads(), "plan": r.chosen, "kernels": len(r.steps), "operators": r.operators,
        "budget_s": given.budget,
        "tuning_s": round(tuning_s, 1), "warm_s": round(warm_s, 2),
        "plans": [[p.name, round(p.median_us, 1), round(p.predicted_us, 1), p.verified, p.note] for p in r.plans],
    }  # fmt: skip
    try:
        replay = getattr(exe.executable, "replay", None)  # of a plan for a GPU
    except weft.WeftError:  # the framework's own execution answers
        replay = None
    if replay is not None:
        exe(*inputs)
        return row, replay
    return row, lambda: exe(*inputs)


def peers(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], folder: Path, given: argparse.Namespace
) -> tuple[dict[str, Call], dict[str, str], dict[str, float]]:
    """Calls by name, why others are not there, seconds to compile."""
    calls: dict[str, Call] = {}
    failed, seconds = {}, {}
    for name in given.peers.split(","):
        images = given.device == "cuda" and all(x.ndim == 4 for x in inputs)
        for last in (False, True) if images else (False,):
            label = f"{name}_last" if last else name
            began = time.perf_counter()
            try:
                with limited(COMPILE_S):
                    if given.device == "cuda":
                        calls[label] = on_gpu(name, module, inputs, last=last)
                    else:
                        calls[label] = on_host(name, module, inputs, folder)
                    calls[label]()
            except Exception as error:  # a peer that fails is said, and the rest is measured
                calls.pop(label, None)
                failed[label] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
            seconds[label] = round(time.perf_counter() - began, 1)
    return calls, failed, seconds


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Within it the process is interrupted after so many seconds.

    Raises:
        TimeoutError: it was.
    """

    def over(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def on_host(name: str, module: torch.nn.Module, inputs: Sequence[torch.Tensor], folder: Path) -> Call:
    """A peer on the processor."""
    torch.compiler.reset()
    if name == "onnxruntime":
        return runtime(module, inputs, folder)
    model: Callable[..., object] = module
    if name == "inductor":
        model = torch.compile(module)
    elif name == "freezing":
        model = torch.compile(copy.deepcopy(module), options={"freezing": True})

    def call() -> object:
        with torch.no_grad():
            return model(*inputs)

    call()
    return call


def runtime(module: torch.nn.Module, inputs: Sequence[torch.Tensor], folder: Path) -> Call:
    """The module's ONNX file in ONNX Runtime, with as many threads as torch."""
    import onnxruntime

    path = folder / "model.onnx"
    torch.onnx.export(module, tuple(inputs), path, dynamo=True, opset_version=18, external_data=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    feed = {n: x.numpy() for n, x in zip(names, inputs, strict=True)}
    return lambda: [torch.from_numpy(x) for x in session.run(None, feed)]


def on_gpu(name: str, module: torch.nn.Module, inputs: Sequence[torch.Tensor], *, last: bool) -> Call:
    """A peer in a CUDA graph."""
    from benchmarks.gpu_networks import peer

    captured, *_ = peer(name, module, list(inputs), channels_last=last)
    return captured.replay


# --- the record


def missing(members: Sequence[Member]) -> list[str]:
    """Libraries that these need and that are not installed."""
    return sorted({m.library for m in members if m.library and importlib.util.find_spec(m.library) is None})


def summary(rows: Sequence[Mapping[str, Any]]) -> Row:
    """The last line of the record: geometric means, and what is behind its best peer."""
    good = [r for r in rows if r.get("speedup_best")]

    def mean(of: Sequence[Mapping[str, Any]]) -> float:
        return round(math.exp(statistics.fmean(math.log(r["speedup_best"]) for r in of)), 3) if of else 0.0

    groups = dict.fromkeys(str(r["class"]) for r in good)
    return {
        "record": "summary", "suite": SUITE, "total": len(rows), "measured": len(good), "mean": mean(good),
        "mean_tuned": mean([r for r in good if r["tuned"]]),
        "mean_others": mean([r for r in good if not r["tuned"]]),
        "classes": {g: mean([r for r in good if r["class"] == g]) for g in groups},
        "behind": [r["case"] for r in good if r["speedup_best"] < 1],
    }  # fmt: skip


def asked(member: Member, given: argparse.Namespace) -> Row:
    """The row of a case, from a process of its own.

    Raises:
        RuntimeError: it ended without one, or not in time.
    """
    command = [sys.executable, "-m", "benchmarks.classes", "--one", member.case]
    for name in ("device", "budget", "rounds", "peers", "timed", "verbose", "warm", "search", "threads"):
        command += [f"--{name}", str(getattr(given, name))]
    searching_s = sum(float(x) for x in given.search.split(",")) if given.search else 2 * given.budget
    limit = time.perf_counter() + searching_s + COMPILE_S * len(given.peers.split(","))
    with Child(command) as child:
        try:
            while (line := child.line(limit - time.perf_counter())) is not None:
                if line.startswith("{"):
                    row: Row = json.loads(line)
                    return row
        except Silence:
            raise RuntimeError("not done in time") from None
        raise RuntimeError(f"the process ended with status {child.status}")


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("names", nargs="*", help="cases whose names begin so; all without")
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--budget", type=float, default=0.0, help="of a compilation in seconds (60; 30 on a GPU)")
    found.add_argument("--seconds", type=float, default=math.inf, help="no case begins after them")
    found.add_argument("--rounds", type=int, default=15)
    found.add_argument("--timed", type=float, default=60.0, help="seconds of interleaved rounds")
    found.add_argument("--peers", default="", help="by commas; all of the device without")
    found.add_argument("--again", action="store_true", help="measure what has a row, too")
    found.add_argument("--warm", type=int, default=1, help="0: do not compile once more from the tuning database")
    found.add_argument("--threads", type=int, default=0, help="of everybody on a processor; as many as cores without")
    found.add_argument("--verbose", type=int, default=0, help="show stages, plans and so many kernels")
    found.add_argument("--search", default="", help="budgets in seconds, by commas: what each of them finds")
    found.add_argument("--out", type=Path, help="write the record into this file")
    add_option(found)
    found.add_argument("--one", default="", help=argparse.SUPPRESS)
    return found


def main() -> None:
    """Measure what is left, or in a process of its own one case."""
    given = parser().parse_args()
    given.budget = given.budget or (30.0 if given.device == "cuda" else 60.0)
    given.peers = given.peers or PEERS[given.device]
    members = {m.case: m for m in (GPU if given.device == "cuda" else CPU)}
    if given.one:
        warnings.simplefilter("ignore")
        if given.threads:
            torch.set_num_threads(given.threads)
        row = searched(members[given.one], given) if given.search else measured(members[given.one], given)
        print(json.dumps(row), flush=True)
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.classes: torch sees no NVIDIA GPU; leave out `--device cuda`")
    suite = SEARCHES if given.search else SUITE
    record = Record("cpu" if given.device == "cpu" else folder_of_gpu(), suite, path=given.out)
    chosen = [m for m in members.values() if not given.names or any(m.case.startswith(n) for n in given.names)]
    every = given.again or given.names or given.left
    left = [m for m in chosen if every or m.case not in record.known()]
    if lacking := missing(left):
        sys.exit(f"benchmarks.classes: not installed: {', '.join(lacking)} (`pip install {' '.join(lacking)}`)")
    turns = Left(record, time.perf_counter() + given.seconds, only=given.left)
    for member in left:
        if not turns.begins(case=member.case):
            continue
        with record.measuring(case=member.case):
            record.add({"record": "case", "suite": suite, "case": member.case, **asked(member, given)})
    if not given.search:
        record.add(summary(record.cases))
    turns.close()


if __name__ == "__main__":
    main()
