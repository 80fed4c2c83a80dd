"""Conformance of `torch.compile(backend="weft")` with eager over torch's own operator samples (OpInfo).

    python -m tools.opinfo [--engine reference|compiled] [--samples 2] [--only REGEX] [--jobs 2] [--resume]

One line per operator and element type; a sample's outcome is one of

    native      everything was split into primitives
    fallback    some calls are opaque: ATen runs them inside the executable
    eager       the graph was refused by name, or dynamo captured none
    wrong       differs from eager by more than torch.testing allows
    crashed     raises where eager does not, or meets a bug in Weft; or its process dies or hangs
    skipped     random, uninitialised or not runnable by eager; the reason is counted

A float32 result outside torch.testing's default limits is judged once more against eager in float64: it passes where
its error is not more than twice that of eager in float32 plus the default limit. Anything else is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

from tools import pool
from weft.frontends.imported import Imported
from weft.options import Options
from weft.torch_backend import Backend, Engine, Region, reference_engine
from weft.torch_backend.engine import Run

DTYPES = (torch.float32, torch.int64, torch.bool)
PROGRESS = Path("build/conformance")
CACHE = PROGRESS / "cache"
"""Of compiled kernels: apart from the user's own."""
OUTCOMES = ("native", "fallback", "eager", "wrong", "crashed", "skipped")
SEVERITY = ("crashed", "wrong", "eager", "fallback", "native", "skipped")
"""The outcome of an operator is the first of its samples' in this order."""
_REFUSED = re.compile(r"\[W2\d\d\]$")
"""Ends the reason of a region that is refused by name; any other reason is a bug that eager hides from the user."""
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)


@dataclass
class Line:
    """What one operator did with one element type."""

    op: str
    dtype: str
    samples: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def kept(self) -> dict[str, object]:
        """As JSON has it."""
        return {"op": self.op, "dtype": self.dtype, "samples": dict(self.samples), "reasons": dict(self.reasons)}

    @property
    def outcome(self) -> str:
        """The worst of the samples."""
        return next((o for o in SEVERITY if self.samples[o]), "skipped")


ENGINES: dict[str, Engine | None] = {"reference": reference_engine, "compiled": None}
"""None: all plans of the compiler, see `Ways`."""
TIMEOUT_S = 300.0
"""For all samples of one operator and element type."""


@final
class Ways:
    """An engine whose executables switch between a region's plans, between calls."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        """Of the plans that some region has."""
        self.now = ""
        self.generated = 0

    def __call__(self, imported: Imported, options: Options, eager: Run) -> Run:
        """See `weft.torch_backend.Engine`."""
        from weft.pipeline.untuned import build

        del eager
        plans = build(imported, options)
        self.names.update(dict.fromkeys(plans.executables))
        self.generated += plans.generated
        first = next(iter(plans.executables.values()))
        return lambda tensors: plans.executables.get(self.now, first)(*tensors)


def _clone(value: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, value)


def _tensors(value: Any) -> list[Any]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, torch.Tensor | bool | int | float)]


def _call(op: Callable[..., Any], sample: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The sample as a function of its tensors alone."""
    leaves, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            filled[i] = t
        head, args, kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
        return op(head, *args, **kwargs)

    return call, [leaves[i].detach() for i in where]


def _with_arguments(call: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """What a call returns, and what it leaves in its arguments."""
    given = _clone(list(tensors))
    return call(*given), given


def _eager(call: Callable[..., Any], tensors: Sequence[torch.Tensor], seed: int) -> Any:
    torch.manual_seed(seed)
    return _with_arguments(call, tensors)


def _same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(_tensors(found), _tensors(wanted), equal_nan=True, check_stride=False, check_layout=True)


def _as_good_as_eager(found: Any, wanted: Any, call: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a float32 result is within twice eager's own error of float64, plus the default limits."""
    wide = [t.double() if t.dtype is torch.float32 else t for t in tensors]
    try:
        truth = _tensors(_eager(call, wide, 0))
    except Exception:
        return False
    for x, y, z in zip(_tensors(found), _tensors(wanted), truth, strict=True):
        if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32 or z.dtype is not torch.float64:
            if isinstance(x, torch.Tensor) and not torch.equal(x, y):
                return False
            continue
        if x.shape != y.shape or x.shape != z.shape or not torch.equal(torch.isfinite(x), torch.isfinite(y)):
            return False
        ok = torch.isfinite(z) & torch.isfinite(x)
        error, allowed = (x.double() - z).abs(), 2 * (y.double() - z).abs() + 1e-5 + 1.3e-6 * z.abs()
        if not bool((error <= allowed)[ok].all()):
            return False
    return True


def _outcome(regions: Sequence[Region]) -> tuple[str, str]:
    if not regions:
        return "eager", "dynamo captured no graph"
    fallen = [r.fallback for r in regions if r.fallback]
    for reason in fallen:
        if not _REFUSED.search(reason):
            return "crashed", reason
    if fallen:
        return "eager", fallen[0]
    opaque = [f"{u.op}: {u.reason}" for r in regions if r.program for u in r.program.imported.opaque]
    return ("fallback", opaque[0]) if opaque else ("native", "")


def run_sample(info: Any, sample: Any, engine: Engine | None) -> tuple[str, str]:
    """Outcome of one sample, and why; without an engine, of all plans of the compiler."""
    if any(t.layout is not torch.strided for t in tree_flatten((sample.input, sample.args))[0] if torch.is_tensor(t)):
        return "skipped", "sparse sample"
    call, tensors = _call(info.op, sample)
    try:
        wanted, again = _eager(call, tensors, 0), _eager(call, tensors, 1)
    except Exception as error:
        return "skipped", f"eager raises {type(error).__name__}"
    try:
        _same(again, wanted)
    except Exception:
        return "skipped", "random"
    regions: list[Region] = []
    ways = Ways()
    torch._dynamo.reset()
    backend = Backend(Options(cache_dir=CACHE), engine or ways, regions.append)
    found: list[tuple[str, Any]] = []
    try:
        with torch.no_grad():
            compiled = torch.compile(call, backend=backend, fullgraph=False)
            found.append(("", _with_arguments(compiled, tensors)))
            for way in list(ways.names)[1:]:
                ways.now = way
                found.append((f"{way}: ", _with_arguments(compiled, tensors)))
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    outcome, reason = _outcome(regions)
    for way, result in found:
        try:
            _same(result, wanted)
        except AssertionError as error:
            if not _as_good_as_eager(result, wanted, call, tensors):
                return "wrong", way + re.sub(r"\s+", " ", str(error))[:300]
            reason = reason or "outside the float32 limits, but as near to float64 as eager"
    return outcome, reason


def run_operator(index: int, dtype: torch.dtype, engine: str, samples: int) -> Line:
    """One operator with one element type."""
    info = op_db[index]
    line = Line(info.formatted_name, str(dtype).removeprefix("torch."))
    if info.name in UNINITIALISED:
        line.samples["skipped"] += 1
        line.reasons["uninitialised"] += 1
        return line
    for _, sample in zip(range(samples), _samples(info, dtype), strict=False):
        if isinstance(sample, Exception):
            outcome, reason = "skipped", f"no samples: {type(sample).__name__}"
        else:
            outcome, reason = run_sample(info, sample, ENGINES[engine])
        line.samples[outcome] += 1
        if reason:
            line.reasons[reason] += 1
    return line


def _samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    torch.manual_seed(0)
    try:
        yield from info.sample_inputs("cpu", dtype, requires_grad=False)
    except Exception as error:
        yield error


def work(job: tuple[int, int, str, int]) -> Line:
    """One operator with one element type, in a process of its own settings."""
    index, dtype, engine, samples = job
    warnings.simplefilter("ignore")
    logging.getLogger("weft").setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    return run_operator(index, DTYPES[dtype], engine, samples)


def jobs_of(engine: str, samples: int, only: str) -> list[tuple[int, int, str, int]]:
    """All operators whose name matches, with each element type that they take."""
    return [
        (i, k, engine, samples)
        for i, info in enumerate(op_db)
        if re.search(only, info.formatted_name)
        for k, dtype in enumerate(DTYPES)
        if info.supports_dtype(dtype, "cpu")
    ]


def run(
    engine: str, samples: int, only: str, jobs: int, *, progress: Path | None = None, resume: bool = False
) -> tuple[list[Line], float]:
    """Lines in the order of OpInfo, and seconds. `progress` is a file of finished lines, read again by `resume`."""
    started = time.monotonic()
    done: dict[tuple[int, int], Line] = {}
    if progress is not None:
        progress.parent.mkdir(parents=True, exist_ok=True)
        if resume and progress.exists():
            for text in progress.read_text().splitlines():
                kept = json.loads(text)
                line = Line(kept["op"], kept["dtype"], Counter(kept["samples"]), Counter(kept["reasons"]))
                done[tuple(kept["key"])] = line  # type: ignore[index]
        else:
            progress.write_text("")
    todo = [job for job in jobs_of(engine, samples, only) if job[:2] not in done]
    for job, outcome in _outcomes(todo, jobs):
        if isinstance(outcome, pool.Lost):
            name = op_db[job[0]].formatted_name
            dtype = str(DTYPES[job[1]]).removeprefix("torch.")
            outcome = Line(name, dtype, Counter(crashed=1), Counter({outcome.reason: 1}))
        done[job[:2]] = outcome
        if progress is not None:
            with progress.open("a") as file:
                file.write(json.dumps({"key": job[:2], **outcome.kept()}) + "\n")
    return [done[key] for key in sorted(done)], time.monotonic() - started


def _outcomes(todo: Sequence[tuple[int, int, str, int]], jobs: int) -> Iterator[tuple[Any, Any]]:
    """In worker processes; with no jobs in this one, for tests."""
    if jobs:
        yield from pool.run(work, todo, jobs=jobs, timeout_s=TIMEOUT_S)
        return
    threads, limit = torch.get_num_threads(), torch._dynamo.config.recompile_limit
    levels = {name: logging.getLogger(name).level for name in ("weft", "torch")}
    try:
        for job in todo:
            with warnings.catch_warnings():
                found = work(job)
            yield job, found
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.config.recompile_limit = limit
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def records(lines: Sequence[Line]) -> Iterator[dict[str, object]]:
    """One record per line and a summary that counts samples."""
    for line in lines:
        yield {
            "record": "case",
            "suite": "opinfo",
            "case": f"{line.op}/{line.dtype}",
            "outcome": line.outcome,
            "samples": dict(line.samples),
            "reasons": dict(line.reasons.most_common(4)),
        }
    count: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    for line in lines:
        count.update(line.samples)
        skips.update({r: n for r, n in line.reasons.items() if line.outcome == "skipped"})
    passed = count["native"] + count["fallback"] + count["eager"]
    yield {
        "record": "summary",
        "suite": "opinfo",
        "total": sum(count.values()),
        "operators": len({line.op for line in lines}),
        "passed": passed,
        **{o: count[o] for o in OUTCOMES},
        "skip_reasons": dict(skips.most_common(8)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the summary and what went wrong; 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="reference")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression on operator names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/cpu/opinfo.jsonl for a whole run")
    parser.add_argument("--resume", action="store_true", help="keep what an interrupted run of this engine finished")
    chosen = parser.parse_args(arguments)
    progress = None if chosen.only else PROGRESS / f"opinfo-{chosen.engine}.jsonl"
    lines, seconds = run(
        chosen.engine, chosen.samples, chosen.only, chosen.jobs, progress=progress, resume=chosen.resume
    )
    found = list(records(lines))
    output = chosen.output
    if output is None and not chosen.only:
        output = Path(__file__).parent.parent / "benchmarks" / "results" / "cpu" / "opinfo.jsonl"
    if output is not None:
        from benchmarks.harness.record import environment

        head = {**environment(f"python -m tools.opinfo --engine {chosen.engine}"), "engine": chosen.engine}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("".join(json.dumps(x) + "\n" for x in (head, *found)))
    bad = [x for x in found if x.get("outcome") in ("wrong", "crashed")]
    for x in (*bad, {**found[-1], "seconds": round(seconds, 1)}):
        print(json.dumps(x))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
