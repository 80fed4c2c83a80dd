"""Compiled models under long use on a CPU: threads that call them, new shapes, refits, saves and loads, and faults.

    python -m benchmarks.soak [--seconds 3600] [--callers 3] [--budget 3]

Three models are compiled, tuned and without a budget, and then live. What is tuned is compiled with `FIRST_S` before,
and remembered, so that there are plans on a busy machine too. Callers ask for shapes that are known and for new ones,
which push old plans out; one thread gives them other weights and back (`Compiled.refit`), one saves, loads and calls
what it loaded, one injects faults: it kills the worker that measures (SIGKILL), and takes the cache away for a while.
Every result must be that of one of the two sets of weights, by gate B against float64, and nothing may raise. The
process's memory is read once a second; it is flat where the line through the medians of its second half rises by less
than `FLAT_SHARE` of what it takes in an hour. What the C library's allocator has given out stands beside it: where that
is flat and the process grows, what grows is free memory in pieces. So do the process's mappings: a compiled object that
stays takes five.

The framework keeps what its CPU library made for a product or a convolution of some shape: up to 1,024 primitives of
oneDNN in the process, and 1,024 descriptions of such in each thread that called it (ideep). One shape of a small
product takes 0.57 MB, half of it in either, so that a process with new shapes grows for hours, by gigabytes. Both are
bounded by the framework's own settings (`CAPACITIES`), which are set here unless the environment does: what grows then
is ours.

Of each kind of failure (what was done, and where it raised) the first is kept, with how many followed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

import weft
from benchmarks.harness.record import RESULTS, environment
from weft.api import Compiled
from weft.device.files import private_directory
from weft.errors import ArtifactError
from weft.ir.types import DType
from weft.options import Options
from weft.pipeline.finish import as_array
from weft.tune.tolerance import gate_b

FLAT_SHARE = 0.05
WARM_UP = 1 / 2
"""Of the run: what is loaded once is loaded then, and every shape is new once."""
FIRST_S = 10.0
"""Budget of the compilations that are remembered before the clock runs."""
BATCHES = 12
MAX_PLANS = 4
CAPACITIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
"""Settings of the framework, read when it first calls oneDNN: primitives of the process, descriptions of a thread.
Few, so that all are there before the second half begins."""


class Perceptron(nn.Module):
    """Layers over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 48) to (n, 10)."""
        return torch.softmax(self.layers(x), -1)


class Convolutions(nn.Module):
    """A residual block and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 3, 20, 20) to (n, 5)."""
        y = torch.relu(self.norm(self.a(x)))
        return self.last((y + torch.relu(self.b(y))).mean((2, 3)))


class Block(nn.Module):
    """Attention and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 12, 32) to the same."""
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


MODELS: Mapping[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (48,)),
    "convolutions": (Convolutions, (3, 20, 20)),
    "block": (Block, (12, 32)),
}


@dataclass
class Subject:
    """A model that lives, with what it must give."""

    name: str
    compiled: Compiled
    weights: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    inputs: Mapping[int, torch.Tensor]
    """By batch."""
    expected: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    """In float64, by batch, with either weights."""
    known: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, name: str, options: Options) -> Subject:
        """Compile it for one row, with either weights where it is tuned: such plans are remembered."""
        kind, shape = MODELS[name]
        modules = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            modules.append(kind().eval())
        g = torch.Generator().manual_seed(3)
        inputs = {n: torch.randn((n, *shape), generator=g) for n in range(1, BATCHES + 1)}
        weights = tuple({k: v.clone() for k, v in m.state_dict().items()} for m in modules)
        wide = [m.double() for m in modules]
        with torch.no_grad():
            expected = {n: (wide[0](x.double()), wide[1](x.double())) for n, x in inputs.items()}
        model = kind().eval()
        for state in reversed(weights):
            model.load_state_dict(state)
            if options.budget_s > 0:
                weft.compile(model, inputs[1], options=replace(options, budget_s=max(FIRST_S, options.budget_s)))
        label = f"{name}, budget {options.budget_s:g} s"
        return cls(
            label, weft.compile(model, inputs[1], options=options), (weights[0], weights[1]), inputs, expected, {1}
        )

    def is_right(self, batch: int, got: object) -> bool:
        """Is it what one of the two sets of weights gives?"""
        assert isinstance(got, torch.Tensor)
        wanted = self.expected[batch]
        return any(gate_b(DType.F32, got=as_array(got), want=as_array(w)).ok for w in wanted)


@dataclass
class Log:
    """What happened, from all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[tuple[str, ...], dict[str, object]] = field(default_factory=dict)
    """The first of each kind, and how many there were."""
    rss_mb: list[float] = field(default_factory=list)
    in_use_mb: list[float] = field(default_factory=list)
    """Of the C library's allocator; where that cannot say, 0."""
    mappings: list[float] = field(default_factory=list)
    """How many the process has."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        """One more."""
        with self.lock:
            self.counts[what] += 1

    def fail(self, outcome: str, where: str, text: str, kind: str = "") -> None:
        """A result that is wrong, or an exception; `kind` tells those of one place from others."""
        with self.lock:
            self.counts[outcome] += 1
            head: dict[str, object] = {"record": "case", "suite": "soak", "case": where, "outcome": outcome, "count": 0}
            first = self.failures.setdefault((outcome, where, kind), {**head, "note": text[-600:]})
            first["count"] = cast("int", first["count"]) + 1


@dataclass
class Soak:
    """The threads and what they share."""

    subjects: list[Subject]
    cache: Path
    options: Options
    log: Log
    end: float

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.end

    def pause(self, seconds: float) -> None:
        """Sleep, or until the end."""
        time.sleep(max(0.0, min(seconds, self.end - time.monotonic())))

    def forever(self, what: str, step: Callable[[random.Random], None], seed: int) -> None:
        """One thread: what it raises is a failure, and it goes on."""
        chance = random.Random(seed)
        while not self.over:
            try:
                step(chance)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} in {place.filename}:{place.name}"
                self.log.fail("failed", what, traceback.format_exc(limit=-4), kind)
                self.pause(0.5)

    def call(self, chance: random.Random) -> None:
        """One call of a known shape."""
        subject = chance.choice(self.subjects)
        batch = chance.choice(sorted(subject.known)[-MAX_PLANS:])
        self.check(subject, batch, "calls")
        time.sleep(0.001)

    def check(self, subject: Subject, batch: int, what: str, model: Callable[..., object] | None = None) -> None:
        """Call and compare."""
        got = (model or subject.compiled)(subject.inputs[batch])
        if isinstance(got, tuple | list):
            (got,) = got
        self.log.count(what)
        if not subject.is_right(batch, got):
            self.log.fail("wrong", f"{what} {subject.name} {batch}", "neither of the two results")

    def grow(self, chance: random.Random) -> None:
        """A shape that is new, or was pushed out."""
        subject = chance.choice(self.subjects)
        batch = chance.randint(1, BATCHES)
        self.check(subject, batch, "shapes")
        subject.known = {*sorted(subject.known, key=lambda n: n != batch)[: MAX_PLANS - 1], batch, 1}
        self.pause(chance.uniform(1, 6))

    def refit(self, chance: random.Random) -> None:
        """Other weights."""
        subject = chance.choice(self.subjects)
        # small biases stand in the text of kernels: such plans are compiled anew
        subject.compiled.refit(subject.weights[chance.randrange(2)], recompile=True)
        self.log.count("refits")
        self.pause(chance.uniform(1, 5))

    def save(self, chance: random.Random) -> None:
        """Save, load, call."""
        subject = chance.choice(self.subjects)
        with tempfile.TemporaryDirectory(prefix="weft-soak-") as folder:
            path = Path(folder) / "model.weft"
            try:
                digest = subject.compiled.save(path)
            except ArtifactError as error:
                if "no plan of this model is left" not in str(error):
                    raise
                self.log.count("nothing to save")  # the workers were killed: the framework answers
                self.pause(2.0)
                return
            self.check(subject, 1, "loads", weft.load(path, trust=digest, options=self.options))
        self.pause(chance.uniform(2, 8))

    def fault(self, chance: random.Random) -> None:
        """A worker dies, or the cache is gone for a while."""
        self.pause(chance.uniform(2, 6))
        if chance.random() < 0.7:
            for pid in workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.log.count("workers killed")
            return
        cache = self.cache
        away = cache.with_name("away")
        cache.rename(away)
        with contextlib.suppress(IsADirectoryError):  # a compilation was faster: then it has an empty cache
            cache.write_text("")  # who is root may write into any directory, but into no file as if it were one
        self.pause(3.0)
        with contextlib.suppress(OSError):
            cache.unlink()
        while away.exists():
            # a compilation may have made a new one in between
            with contextlib.suppress(OSError):
                away.rename(cache)
                break
            shutil.rmtree(cache, ignore_errors=True)
        self.log.count("cache gone")

    def watch(self) -> None:
        """Memory, once a second."""
        page = resource.getpagesize()
        while not self.over:
            self.log.rss_mb.append(int(Path("/proc/self/statm").read_text().split()[1]) * page / 2**20)
            self.log.in_use_mb.append(in_use_mb())
            self.log.mappings.append(Path("/proc/self/maps").read_bytes().count(b"\n"))
            self.pause(1.0)


def workers() -> list[int]:
    """Process numbers of our children that measure."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(x) for x in (task / "children").read_text().split()]
    measuring = []
    for pid in found:
        with contextlib.suppress(OSError):
            if b"weft.tune.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                measuring.append(pid)
    return measuring


class _Mallinfo2(ctypes.Structure):
    """What glibc's allocator says of all its arenas, in bytes."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def in_use_mb() -> float:
    """MiB that the C library's allocator has given out."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0.0
    ask.restype = _Mallinfo2
    found = ask()
    return float((found.uordblks + found.hblkhd) / 2**20)


def growth(readings: list[float]) -> tuple[float, float]:
    """By how much memory (or what else was read once a second) rises in an hour, by the line through medians of tenths
    of what follows the warm-up, and the median itself; in the unit of the readings."""
    late = readings[int(len(readings) * WARM_UP) :]
    if len(late) < 20:
        return 0.0, statistics.median(readings or [0.0])
    tenth = len(late) // 10
    medians = [statistics.median(late[k * tenth : (k + 1) * tenth]) for k in range(10)]
    slope = statistics.linear_regression([(k + 0.5) * tenth for k in range(10)], medians).slope
    return slope * 3600, statistics.median(late)


def run(seconds: float, callers: int, budget_s: float, folder: Path) -> Log:
    """Everything, for so long."""
    log = Log()
    cache = private_directory(folder / "cache")
    options = Options(cache_dir=cache, budget_s=budget_s, max_plans=MAX_PLANS)
    subjects = [Subject.of(name, replace(options, budget_s=b)) for name in MODELS for b in sorted({0.0, budget_s})]
    soak = Soak(subjects, cache, options, log, time.monotonic() + seconds)
    jobs: list[tuple[str, Callable[[random.Random], None]]] = [("call", soak.call)] * callers
    jobs += [("grow", soak.grow), ("refit", soak.refit), ("save", soak.save), ("fault", soak.fault)]
    threads = [threading.Thread(target=soak.forever, args=(name, step, k)) for k, (name, step) in enumerate(jobs)]
    for thread in threads:
        thread.start()
    soak.watch()
    for thread in threads:
        thread.join()
    return log


def summary(log: Log, seconds: float) -> dict[str, object]:
    """The last line."""
    rise, median = growth(log.rss_mb)
    rise_in_use, in_use = growth(log.in_use_mb)
    rise_mappings, mappings = growth(log.mappings)
    others = ("shapes", "refits", "loads", "nothing to save", "workers killed", "cache gone")
    counts = log.counts
    return {
        "record": "summary", "suite": "soak",
        "seconds": round(seconds), "total": counts["calls"],
        "wrong": counts["wrong"], "failed": counts["failed"],
        **{k.replace(" ", "_"): counts[k] for k in others},
        "rss_mb": round(median, 1), "rise_mb_per_h": round(rise, 1), "bound_mb_per_h": round(FLAT_SHARE * median, 1),
        "in_use_mb": round(in_use, 1), "in_use_rise_mb_per_h": round(rise_in_use, 1),
        "mappings": round(mappings), "mappings_rise_per_h": round(rise_mappings),
        "flat": rise <= FLAT_SHARE * median,
    }  # fmt: skip


def main() -> None:
    """Soak, record; exits with 1 where anything was wrong or memory was not flat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--callers", type=int, default=3)
    parser.add_argument("--budget", type=float, default=3.0, help="of a compilation, in seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu" / "soak.jsonl")
    given = parser.parse_args()
    for name, value in CAPACITIES.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")  # a cache that is gone and workers that die are warned of each time
    with tempfile.TemporaryDirectory(prefix="weft-soak-") as folder:
        log = run(given.seconds, given.callers, given.budget, Path(folder))
    end = summary(log, given.seconds)
    step = max(1, len(log.rss_mb) // 60)
    series = {"rss_mb": log.rss_mb, "in_use_mb": log.in_use_mb, "mappings": log.mappings}
    memory = {"record": "memory", "every_s": step, **{k: [round(x) for x in v[::step]] for k, v in series.items()}}
    head = environment(" ".join(["python -m benchmarks.soak", *sys.argv[1:]]), on_cpu=True)
    head["settings"] = {name: os.environ[name] for name in CAPACITIES}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(x) + "\n" for x in (head, memory, *log.failures.values(), end)))
    for failure in log.failures.values():
        print(json.dumps(failure))
    print(json.dumps(end))
    sys.exit(0 if end["flat"] and not log.failures else 1)


if __name__ == "__main__":
    main()
