"""The zoo: 150 architectures of other libraries, compiled as a user would, each in a process of its own.

    python -m benchmarks.zoo [--only WORD,WORD] [--again OUTCOME,OUTCOME] [--seconds S] [--device cpu|cuda]
                             [--budget S] [--out -|FILE]

A row says what came of an architecture at batch 1: `right`, `split` (right, in parts: torch runs what no plan holds),
`refused` (an error of Weft, by its code), `wrong` or `crashed` (another exception, a signal, or no answer in time).
Results are judged as `weft.compile` judges a plan, against the model in float64 where it runs so, else in float32 where
that is not its type, else against its own execution. Weft and eager are timed in interleaved rounds of one process, by
the margin rule that decides between plans: `slower` is who loses by more than 2 % in the median and surely by more than
nothing; where medians differ by that and it is not sure, up to 66 `rounds` are added. `load` is the machine's load
average when a row was done: on a busy one an export takes longer than the budget, and the framework's own execution
answers.

On a processor all are float32; on a GPU (`--device cuda`) the 60 that are marked, in float16. `timm`, `torchvision`,
`transformers` and `diffusers` are needed for all. With a budget of 0 nothing is timed. With `--out -` rows go into the
suite's record and add up: what has a row is passed over unless `--again` names its outcome (`all`, `slower` too), and
the summary counts all rows.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.cases.zoo_models import ARCHITECTURES, Architecture
from benchmarks.harness import own_process
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, folder_of
from benchmarks.models import vision_operators
from weft.frontends.torch.dtypes import FROM_TORCH
from weft.ir.types import DType
from weft.pipeline.finish import MARGIN, Sample, as_array, interleave, judged, wins
from weft.platform.cpu import host_sample

OUTCOMES = ("right", "split", "refused", "wrong", "crashed")
GOOD = OUTCOMES[:2]
SUITE = "zoo"
PRELOADED = ("scipy.optimize", "torch._dynamo", "torch.export._trace", "weft.api", "weft.frontends.torch",
             "weft.pipeline.parts", "transformers", "benchmarks.cases.zoo_models")  # fmt: skip
"""Imported once, by the process that all others are forked from; that one computes nothing and knows no GPU."""
ROUNDS, TIMED_S = 11, 4.0
AGAIN = 2
"""How often rounds are added, twice as many each time, where medians differ and the rule says nothing yet."""
AROUND_S = 120.0
"""For what a process does besides compiling: imports, the model's weights, float64, comparing, timing."""
_TOLD = 300
Row = dict[str, Any]
Runs = Callable[[], Any]


# --- in a process of its own


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in what a model gives, caches of keys and values among it, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [x for v in value.values() for x in tensors_of(v)]
    if isinstance(value, list | tuple):
        return [x for v in value for x in tensors_of(v)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [x for f in dataclasses.fields(value) for x in tensors_of(getattr(value, f.name))]
    layers = getattr(value, "layers", None)
    if layers is not None:
        return [
            x for layer in layers for x in tensors_of([getattr(layer, "keys", None), getattr(layer, "values", None)])
        ]
    return []


def moved(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: moved(v, change) for k, v in value.items()}
    return type(value)(moved(v, change) for v in value) if isinstance(value, list | tuple) else value


def as_type(device: str, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Floats in that type, everything on the device."""
    return lambda x: x.to(device, dtype) if x.is_floating_point() else x.to(device)


def measured(architecture: Architecture, device: str, budget_s: float) -> Row:
    """Make, compile, judge and time one architecture in this process; the fields of its row."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    module, args, kwargs = architecture.make()
    module = module.to(device, dtype)
    args, kwargs = moved(args, as_type(device, dtype)), moved(kwargs, as_type(device, dtype))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weft-zoo-") as cache:
        options = weft.Options(budget_s=budget_s, device=device, cache_dir=Path(cache))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                compiled = weft.compile(module, args, example_kwargs=kwargs or None, options=options)
            except weft.WeftError as error:
                lines = [x.strip() for x in str(error).splitlines() if x.strip()]
                return {"outcome": "refused", "code": error.code, "why": " | ".join(lines)[: 2 * _TOLD]}
        compile_s = round(time.perf_counter() - began, 2)
        with torch.no_grad():
            found = _judged(module, compiled, args, kwargs, dtype)
            mine, theirs = (lambda: compiled(*args, **kwargs)), (lambda: module(*args, **kwargs))
            timed = _timed(mine, theirs, options) if budget_s > 0 else {}
    record = compiled.record
    notes = [str(w.message) for w in said if str(w.message).startswith("Weft")]
    return {
        **found,
        **timed,
        "plan": record.chosen,
        "parts": len(compiled.parts),
        "operators": record.operators,
        "kernels": len(record.steps),
        "opaque": {f"{op}: {reason}"[:_TOLD]: count for op, reason, count in record.opaque},
        "compile_s": compile_s,
        "parameters": sum(p.numel() for p in module.parameters()),
        **({"notes": [n[:_TOLD] for n in notes]} if notes else {}),
    }


def _judged(
    module: torch.nn.Module, compiled: weft.Compiled, args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Row:
    """Whether what the compiled model gives is right, by the criterion of plans."""
    plain = tensors_of(module(*args, **kwargs))
    mine = tensors_of(compiled(*args, **kwargs))
    exact, against = plain, "eager"
    for name, wider in (("float64", torch.float64), ("float32", torch.float32)):
        if wider is dtype:
            continue
        wide = as_type(plain[0].device.type if plain else "cpu", wider)
        try:
            found = tensors_of(copy.deepcopy(module).to(wider)(*moved(args, wide), **moved(dict(kwargs), wide)))
        except Exception:  # whatever a model raises that knows some types alone
            continue
        if [x.shape for x in found] == [x.shape for x in plain]:  # else it decides otherwise, as a detector's boxes do
            exact, against = found, name
            break
    if [x.shape for x in mine] != [x.shape for x in plain]:
        why = f"gives {[tuple(x.shape) for x in mine]} and not {[tuple(x.shape) for x in plain]}"
        return {"outcome": "wrong", "why": why[:_TOLD], "against": against}
    worst, why = 0.0, ""
    for position, (got, own, truth) in enumerate(zip(mine, plain, exact, strict=True)):
        floats = got.is_floating_point()
        kind = FROM_TORCH[dtype] if floats else DType.from_numpy(as_array(got).dtype)
        truth_ = truth if floats else own  # which index is the largest may hang on a rounding
        check = judged(kind, as_array(got), as_array(truth_), as_array(own), floats=floats)
        worst = max(worst, check.worst if math.isfinite(check.worst) else math.inf)
        if not check.ok and not why:
            why = f"output {position}: {check.outside:.2%} outside, cosine {check.cosine:.6f}"
    good = "split" if compiled.parts else "right"
    return {"outcome": "wrong" if why else good, "error": worst, "against": against, **({"why": why} if why else {})}


def _timed(mine: Runs, theirs: Runs, options: weft.Options) -> Row:
    """Weft and eager, in interleaved rounds."""
    sample: Sample = host_sample
    if options.device == "cuda":
        from weft.platform.cuda.platform import sample_us as sample
    runs = {"weft": mine, "eager": theirs}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    more = 0
    while True:
        found = interleave(runs, rounds=ROUNDS << more, seed=1 + more, budget_s=TIMED_S * (1 << more), sample=sample)
        for name, values in found.items():
            samples[name] += values
        ms = {name: round(statistics.median(values) / 1e3, 4) for name, values in samples.items()}
        slower, faster = wins(samples["eager"], samples["weft"]), wins(samples["weft"], samples["eager"])
        more += 1
        alike = abs(ms["weft"] - ms["eager"]) <= MARGIN * ms["eager"]
        if slower or faster or alike or more > AGAIN:
            break
    return {
        "weft_ms": ms["weft"],
        "peers_ms": {"eager": ms["eager"]},
        "speedup_eager": round(ms["eager"] / ms["weft"], 3),
        "slower": slower,
        "faster": faster,
        "rounds": len(samples["weft"]),
    }


def answered(name: str, device: str, budget_s: float) -> Row:
    """What came of the architecture of that name."""
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    if architecture.library != "torch" and importlib.util.find_spec("torchvision"):
        vision_operators.provide()
    if architecture.library == "transformers":
        import transformers

        transformers.logging.set_verbosity_error()
    return measured(architecture, device, budget_s)


# --- asking such processes


def asked(name: str, device: str, budget_s: float, log: Path) -> Row:
    """The row of one architecture, from a process of its own that is ended when its time is over."""
    limit_s = 2 * budget_s + AROUND_S
    row: Row = {**own_process.asked(_CONTEXT, answered, (name, device, budget_s), limit_s, log)}
    why = row.pop("failed", None)
    found: Row = row if why is None else {"outcome": "crashed", "why": why, **row}
    return {**found, "load": round(os.getloadavg()[0], 1)}


_CONTEXT = multiprocessing.get_context("forkserver")


# --- the record


def wanted(
    device: str, only: Sequence[str], again: Sequence[str], known: Mapping[str, Mapping[str, Any]]
) -> list[Architecture]:
    """The architectures to be measured now, in their order."""

    def left(name: str) -> bool:
        row = known.get(name)
        if row is None or "all" in again:
            return True
        return str(row.get("outcome", "failed")) in again or ("slower" in again and bool(row.get("slower")))

    every = [a for a in ARCHITECTURES if a.on_gpu or device == "cpu"]
    return [a for a in every if any(word in a.name for word in only) and left(a.name)]


def missing(architectures: Iterable[Architecture]) -> list[str]:
    """Libraries that these need and that are not installed."""
    return sorted({a.library for a in architectures if importlib.util.find_spec(a.library) is None})


def summary(rows: Sequence[Mapping[str, Any]]) -> Row:
    """The last line of the record: how many rows there are of each kind."""
    count = Counter(str(r.get("outcome", "crashed")) for r in rows)
    return {
        "record": "summary", "suite": SUITE, "total": len(rows), "passed": sum(count[o] for o in GOOD),
        **{o: count[o] for o in OUTCOMES},
        "slower": sum(bool(r.get("slower")) for r in rows), "faster": sum(bool(r.get("faster")) for r in rows),
    }  # fmt: skip


def main() -> None:
    """Measure what is left, and say what came of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures whose name holds one of these texts, by commas")
    parser.add_argument("--again", default="", help="measure rows of these outcomes once more, by commas; or `all`")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no architecture is begun after so many")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", type=float, default=8.0, help="of a compilation, in seconds (8)")
    parser.add_argument("--out", type=Path, help="write the record: into this file, or `-`: into that of the suite")
    add_option(parser)
    given = parser.parse_args()
    end = time.perf_counter() + given.seconds
    _CONTEXT.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory(prefix="weft-zoo-") as folder:
        log = Path(folder) / "log.txt"
        path = None if given.out == Path("-") else given.out or Path(folder) / "record.jsonl"
        where = folder_of(given.device, _CONTEXT)
        if not where:
            sys.exit("benchmarks.zoo: torch sees no NVIDIA GPU; leave out `--device cuda`")
        record = Record(where, SUITE, path=path)
        again = ["all"] if given.left else [x for x in given.again.split(",") if x]
        left = wanted(given.device, given.only.split(","), again, record.before())
        if lacking := missing(left):
            sys.exit(f"not installed: {', '.join(lacking)} (`pip install {' '.join(lacking)}`)")
        turns = Left(record, end, only=given.left)
        for architecture in left:
            if not turns.begins(case=architecture.name):
                continue
            with record.measuring(case=architecture.name):
                row = asked(architecture.name, given.device, given.budget, log)
                head = {"record": "case", "suite": SUITE, "case": architecture.name, "family": architecture.family}
                record.add({**head, **row})
                if row["outcome"] == "wrong":
                    print(log.read_text()[-4000:], file=sys.stderr, flush=True)
        record.add(summary(record.cases))
        turns.close()


if __name__ == "__main__":
    main()
