"""Broken kernels as candidates on a real GPU, through the real tuner: none may win, none may harm what comes after it.

    python -m benchmarks.gpu_faults [KIND ...] [--count 50] [--jobs 12] [--seconds 420] [--resume]

Every fault is a kernel of its own text. One trial has a library call, one or more broken kernels and a sound kernel
that comes after them. A kernel that breaks the context or does not end costs its worker, which is started anew and must
pass the canary; starting one takes seconds, most of them for loading the framework, and a hang is waited for five
seconds, so `--jobs` tuners with a worker each share the GPU. Times are compared around the first fault of each kind,
alone on the GPU: the sound kernel behind it against the same kernel in an untouched worker.
`--seconds` ends the run early; `--resume` adds to what the file of results holds.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.harness.left import MORE, add_option
from benchmarks.harness.record import Record, folder_of_gpu
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CallStep, CudaSource, Kernel, KernelBinary, Launch, LibraryCall, Pointer, Ref, Schedule
from weft.options import Options
from weft.tune.store import Database
from weft.tune.tuner import ProblemTrial, Tuner, winner

SIZE = 1 << 16
BLOCK = 256
TEXT = """
extern "C" __global__ void run(const float* x, const float* w, float* y, volatile float* work) {{
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float v = x[i] * w[i];
  {body}
}}
// {name} {number}
"""
SOUND = "y[i] = v;"
TOGETHER = 5
"""Broken kernels of one trial where none of them costs a worker."""
SLOWER = 1.25
"""A sound kernel's time after a fault, over its time before: above this the measurement was harmed."""


@dataclass(frozen=True)
class Kind:
    """One way to be broken."""

    body: Callable[[int], str]
    """Text by number: where and how differs."""
    verdicts: frozenset[Verdict]
    fatal: bool
    """It costs a worker."""
    share: int
    """Of the time, next to the other kinds."""


def _illegal(n: int) -> str:
    where = (16 + 64 * n, (1 << 52) + 4096 * n, 4 * n)[n % 3]
    if n % 2:
        return f"y[i] = v; if (i == {n * 997 % SIZE}) y[i] = v + *(volatile float*){where}ull;"
    return f"y[i] = v; if (i == {n * 997 % SIZE}) *(volatile float*){where}ull = v;"


def _misaligned(n: int) -> str:
    first = n * 991 % (SIZE - 64) & ~3
    off = 1 + n % 3
    return (
        f"y[i] = v; if (i == {n * 31 % SIZE}) *(float4*)(y + {first + off}) = make_float4(v, v, v, v);",
        f"y[i] = v; if (i == {n * 31 % SIZE}) *(volatile float*)((char*)(y + {first}) + {off}) = v;",
    )[n % 2]


def _misaligned_shared(n: int) -> str:
    read = f"if (i == {n}) work[0] = *(volatile float*)((char*)s + {4 * (n % 32) + 1 + n % 3});"
    return f"__shared__ float s[64]; s[threadIdx.x & 63] = v; __syncthreads(); y[i] = v; {read}"


def _hang(n: int) -> str:
    return (
        "while (work[i] != 123456.789f) {} y[i] = v;",
        f"if (i == {n * 97}) while (work[i] != 123456.789f) {{}} y[i] = v;",
        f"if (blockIdx.x == {n % (SIZE // BLOCK)}) while (work[{n}] != -{n}.25f) __nanosleep(100); y[i] = v;",
        "for (unsigned k = 1; k != 0; k |= 1) work[i] = v * k; y[i] = v;",
    )[n % 4]


def _wrong(n: int) -> str:
    at = n * 1009 % SIZE
    return (
        f"y[i] = i == {at} ? v * 1.5f + 1.0f : v;",
        f"y[i] = i == {at} ? -v - 1.0f : v;",
        f"y[i] = i >= {at} ? x[i] * w[(i + {n + 1}) % {SIZE}] : v;",
        f"y[i] = v * (1.0f + {n + 1}e-4f);",
        f"y[i] = blockIdx.x == {n} ? x[i] + w[i] : v;",
    )[n % 5]


def _partial(n: int) -> str:
    return (
        f"if (i < {SIZE - 1 - n}) y[i] = v;",
        f"if (blockIdx.x != {n}) y[i] = v;",
        f"if (i % {n + 2} != 1) y[i] = v;",
        f"if (i != {n * 1013 % SIZE}) y[i] = v;",
    )[n % 4]


def _guard(n: int) -> str:
    at = SIZE + n % 64 if n % 2 else -1 - n % 64
    return f"y[i] = v; if (i == {n * 89}) y[{at}] = v;"


_WRONG = frozenset({Verdict.WRONG, Verdict.NAN_CLASS, Verdict.PRECISION})
KINDS: Mapping[str, Kind] = {
    "illegal access": Kind(_illegal, frozenset({Verdict.CRASH}), fatal=True, share=3),
    "infinite loop": Kind(_hang, frozenset({Verdict.HANG}), fatal=True, share=5),
    "misaligned access": Kind(_misaligned, frozenset({Verdict.CRASH}), fatal=True, share=3),
    "misaligned access in shared memory": Kind(_misaligned_shared, frozenset({Verdict.CRASH}), fatal=True, share=3),
    "wrong result": Kind(
        _wrong, frozenset({Verdict.WRONG, Verdict.NAN_CLASS, Verdict.PRECISION}), fatal=False, share=1
    ),
    "partial write": Kind(_partial, frozenset({Verdict.UNWRITTEN}), fatal=False, share=1),
    "guard-zone write": Kind(_guard, frozenset({Verdict.GUARD}), fatal=False, share=1),
}


def problem(key: str) -> Problem:
    """Two vectors multiplied; the key keeps trials apart."""
    b = GraphBuilder()
    t = TensorType(DType.F32, (SIZE,))
    return Problem(b.build([b.add(Prim.MUL, b.input(t), b.input(t))]), key, (Format.ROW, Format.ROW), (Format.ROW,))


def source(name: str, number: int, body: str) -> CudaSource:
    """A kernel of that body; its name and number are part of its text."""
    pointers = (Pointer("in", 0), Pointer("in", 1), Pointer("out"), Pointer("work"))
    return CudaSource(
        Schedule("cuda", (("name", name), ("number", number))),
        TEXT.format(body=body, name=name, number=number),
        (Launch("run", (SIZE // BLOCK, 1, 1), (BLOCK, 1, 1), pointers),),
        workspace_bytes=4 * SIZE,
    )


MULTIPLY = LibraryCall(
    Schedule("library"), (), (CallStep("aten.mul.Tensor", (Ref("in", 0), Ref("in", 1))),), (Ref("tmp", 0),)
)
Choice = tuple[Schedule, Kernel, KernelBinary | None]


def trial(name: str, numbers: Sequence[int]) -> ProblemTrial:
    """The broken kernels of one kind, then a sound kernel; a library call stands where it is measured once."""
    broken: list[Choice] = [(k.schedule, k, None) for k in (source(name, n, KINDS[name].body(n)) for n in numbers)]
    sound = source("sound", numbers[0] if numbers else -1, SOUND)
    calls: list[Choice] = [(MULTIPLY.schedule, MULTIPLY, None)]
    return ProblemTrial(problem(f"{name} {list(numbers)}"), [*broken, *calls, (sound.schedule, sound, None)])


@dataclass
class Tally:
    """What became of the faults of one kind."""

    injected: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    expected: int = 0
    selected: int = 0
    """Broken kernels that were accepted, or chosen among those of their trial."""
    harmed: int = 0
    """Sound kernels or library calls behind a fault without a verdict of their own, or rejected."""
    deaths: int = 0
    """Tuners that raised."""
    workers: int = 0
    seconds: float = 0.0
    slower: float = 0.0
    """Time of the sound kernel after a fault over before; 0: not compared."""

    def take(self, name: str, found: Sequence[Measurement], count: int) -> None:
        """Count one trial."""
        broken = [m for m in found if dict(m.schedule.params).get("name") == name]
        sound = [m for m in found if m not in broken]
        best = winner(found, None)
        self.injected += count
        self.verdicts.update(m.verdict.value for m in broken)
        self.expected += sum(m.verdict in KINDS[name].verdicts for m in broken)
        self.selected += sum(m.verdict is Verdict.OK for m in broken) + (best in broken)
        self.harmed += 2 - sum(m.verdict is Verdict.OK for m in sound)


@dataclass(frozen=True)
class Bench:
    """What every tuner needs."""

    facts: GpuFacts
    nvrtc: Nvrtc
    options: Options

    @classmethod
    def here(cls, cache: Path) -> Bench:
        """For the first GPU; SystemExit where there is none."""
        found = find_nvrtc()
        if isinstance(found, Declined):
            sys.exit(f"benchmarks.gpu_faults: no NVRTC ({found.reason})")
        # one compiler per tuner: trials are taken from the common list as late as possible
        options = Options(device="cuda", cache_dir=cache, threads=1, build_jobs=1)
        return cls(gpu_facts(cache, calibrate=False), found, options)

    def tuner(self) -> Tuner:
        """With a database of its own, so that nothing is looked up."""
        return Tuner(self.options, self.facts, Database.open(None), compiler=self.nvrtc)


def compare(bench: Bench, name: str, tally: Tally) -> None:
    """The first fault of a kind alone on the GPU: the sound kernel's time after it, over before."""
    start = time.monotonic()
    with bench.tuner() as tuner:
        before = [statistics.median(times(tuner, f"before {k}")) for k in range(3)]
        tally.take(name, list(tuner.measure([trial(name, [0])])), 1)
        after = [statistics.median(times(tuner, f"after {k}")) for k in range(3)]
        tally.workers += tuner.workers_started
    tally.slower = statistics.median(after) / statistics.median(before)
    tally.seconds += time.monotonic() - start


def times(tuner: Tuner, key: str) -> tuple[float, ...]:
    """Samples of the sound kernel, in microseconds; RuntimeError where it was rejected."""
    sound = source("sound", -1, SOUND)
    (found,) = tuner.measure([ProblemTrial(problem(key), [(sound.schedule, sound, None)])])
    if found.verdict is not Verdict.OK:
        raise RuntimeError(f"a sound kernel was rejected: {found.verdict.value} {found.error}")
    return found.samples_us


def inject(bench: Bench, name: str, numbers: Sequence[int], tally: Tally, *, jobs: int, deadline: float) -> None:
    """Faults of one kind by several tuners at once; those not begun at the deadline (monotonic) are left out."""
    together = 1 if KINDS[name].fatal else TOGETHER
    waiting: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    parts = [numbers[k : k + together] for k in range(0, len(numbers), together)]
    for part in parts:
        waiting.put(part)
    lock = threading.Lock()
    start = time.monotonic()

    def work() -> None:
        while not waiting.empty() and time.monotonic() < deadline:
            taken: dict[str, Sequence[int]] = {}

            def trials(taken: dict[str, Sequence[int]] = taken) -> Iterator[ProblemTrial]:
                while time.monotonic() < deadline:
                    try:
                        part = waiting.get_nowait()
                    except queue.Empty:
                        return
                    made = trial(name, part)
                    taken[made.problem.key] = part
                    yield made

            found: dict[str, list[Measurement]] = {}
            tuner = bench.tuner()
            died = False
            try:
                with tuner:
                    for m in tuner.measure(trials()):
                        found.setdefault(m.problem_key, []).append(m)
            except Exception as error:  # whatever it is, it must not have happened
                print(f"{name}: a tuner died: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                died = True
            with lock:
                for key, part in taken.items():
                    if key in found:
                        tally.take(name, found[key], len(part))
                    elif died:
                        waiting.put(part)
                tally.deaths += died
                tally.workers += tuner.workers_started
            if died and tally.deaths > 3:
                return

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(parts)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally.seconds += time.monotonic() - start


def run(
    bench: Bench, names: Sequence[str], count: int, *, jobs: int, seconds: float, tallies: dict[str, Tally]
) -> Iterator[str]:
    """Every kind up to `count` faults, or as many as fit; yields after each kind."""
    deadline = time.monotonic() + seconds
    for place, name in enumerate(names):
        tally = tallies.setdefault(name, Tally())
        now = time.monotonic()
        until = now + (deadline - now) * KINDS[name].share / sum(KINDS[x].share for x in names[place:])
        if tally.injected == 0 and KINDS[name].fatal and now < until:
            compare(bench, name, tally)
        if tally.injected < count:
            inject(bench, name, range(tally.injected, count), tally, jobs=jobs, deadline=until)
        print(f"{name}: {tally.injected} in {tally.seconds:.1f} s, {dict(tally.verdicts)}", flush=True)
        yield name


def table(tallies: Mapping[str, Tally]) -> str:
    """For people."""
    head = ["fault", "injected", "named rightly", "selected", "harmed", "tuner deaths", "workers", "after/before", "s"]
    rows = [
        [
            name, str(t.injected), str(t.expected), str(t.selected), str(t.harmed), str(t.deaths), str(t.workers),
            f"{t.slower:.3f}" if t.slower else "-", f"{t.seconds:.1f}",
        ]
        for name, t in tallies.items()
    ]  # fmt: skip
    width = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for first, *others in [head, *rows]:
        cells = [first.ljust(width[0]), *(x.rjust(w) for x, w in zip(others, width[1:], strict=True))]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def is_good(tally: Tally) -> bool:
    """Nothing selected, nobody harmed, nobody dead, every fault named as what it is."""
    sound = not (tally.selected or tally.harmed or tally.deaths)
    return sound and tally.expected == tally.injected and tally.slower <= SLOWER


def line(name: str, tally: Tally) -> dict[str, object]:
    """One record."""
    return {
        "record": "case", "suite": "gpu-faults", "case": name, "injected": tally.injected,
        "expected": tally.expected, "verdicts": dict(tally.verdicts), "selected": tally.selected,
        "harmed": tally.harmed, "deaths": tally.deaths, "workers": tally.workers,
        "after_over_before": round(tally.slower, 4), "seconds": round(tally.seconds, 1),
    }  # fmt: skip


def tally_of(record: Mapping[str, object]) -> Tally:
    """Inverse of `line`."""
    names = ("injected", "expected", "selected", "harmed", "deaths", "workers")
    numbers = {name: int(str(record[name])) for name in names}
    verdicts = record["verdicts"]
    assert isinstance(verdicts, dict)
    return Tally(
        verdicts=Counter(verdicts),
        seconds=float(str(record["seconds"])),
        slower=float(str(record["after_over_before"])),
        **numbers,  # type: ignore[arg-type]
    )


def summary(tallies: Mapping[str, Tally]) -> dict[str, object]:
    """The last line of the record."""
    total = list(tallies.values())
    return {
        "record": "summary", "suite": "gpu-faults", "total": sum(t.injected for t in total),
        "selected": sum(t.selected for t in total), "harmed": sum(t.harmed for t in total),
        "deaths": sum(t.deaths for t in total), "missed": sum(t.injected - t.expected for t in total),
    }  # fmt: skip


def known(rows: Iterable[Mapping[str, object]]) -> dict[str, Tally]:
    """What a record holds of kinds that there are and that did not fail."""
    return {str(x["case"]): tally_of(x) for x in rows if x["case"] in KINDS and "failed" not in x}


def main() -> None:
    """Inject, record, print one table; the exit status is 1 where anything was selected, harmed or missed."""
    jobs = max(1, min(12, 3 * len(os.sched_getaffinity(0)) // 4))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=list(KINDS))
    parser.add_argument("--count", type=int, default=50, help="faults of each kind")
    parser.add_argument("--jobs", type=int, default=jobs, help="tuners at once")
    parser.add_argument("--seconds", type=float, default=420.0, help="no fault is begun after so many")
    parser.add_argument("--resume", action="store_true", help="add to the results that the file holds")
    add_option(parser)
    given = parser.parse_args()
    unknown = sorted(set(given.kinds) - set(KINDS))
    if unknown:
        parser.error(f"{unknown[0]!r} is none of: {', '.join(KINDS)}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_faults: torch sees no NVIDIA GPU")
    record = Record(folder_of_gpu(), "gpu-faults")
    if given.left:
        given.resume = True
    old = known(x for x in record.cases if not given.left or x.get("src") == record.head["src"])
    tallies = {name: t for name, t in old.items() if given.resume or name not in given.kinds}
    with tempfile.TemporaryDirectory(prefix="weft-faults-") as cache:
        bench = Bench.here(Path(cache))
        done = run(bench, given.kinds, given.count, jobs=given.jobs, seconds=given.seconds, tallies=tallies)
        for name in given.kinds:
            with record.measuring(case=name):
                next(done)
                record.add(line(name, tallies[name]))
            if record.failed:
                break
    record.add(summary(known(record.cases)))
    print(table(tallies))
    if given.left and not record.failed and any(tallies[name].injected < given.count for name in given.kinds):
        sys.exit(MORE)
    sys.exit(0 if all(map(is_good, tallies.values())) and not record.failed else 1)


if __name__ == "__main__":
    main()
