"""torch.compile in mode max-autotune beside eager, both in CUDA graphs: the slow peer, in runs of its own.

    python -m benchmarks.gpu_autotune [NAME ...] [--batch 1,16] [--dtype f16] [--seconds 560]
    CUDA_VISIBLE_DEVICES=0 taskset -c 0-15 python -m benchmarks.gpu_autotune --jobs 8 --part 0/2 --seconds 350
    python -m benchmarks.gpu_autotune --classes [NAME ...] [--jobs 8] [--part 0/2] [--seconds 350]

Eager's graph is timed in the same interleaved rounds, and is the yardstick: `benchmarks.gpu_networks` and
`benchmarks.classes` time it beside Weft. Cases already on record are passed over, and no case is begun after
`--seconds`, so that the command can be given again until nothing is left.

`--classes` takes in place of the ten networks those of `benchmarks.classes`, all or those whose names begin so, in f16,
each at its batch, posed and checked as there. One that is among the ten (segformer_b0/b16, vgg16/b16) is the same case,
measured once. The compiler is given images with channels last, with `--layouts both` in either memory format.

With `--jobs N`, N networks are compiled at a time on one GPU, in processes of their own, those that take longest first.
Every timing on which Inductor bases a choice is made in the process's turn at the GPU (`side_by_side.Turn`). What runs
there outside a turn: each network's reference in float64 (a class's: on the processor), its weights' way to the GPU,
eager's graphs (three runs and a capture each), all before its compilation begins; then the inputs of kernels that are
about to be timed and one run of each, which brings it to the GPU, and three runs and a capture of what was compiled.
Inductor takes the least of up to 100 samples, so that little of this shows. After `--seconds`, or when all is compiled,
what still compiles is ended, and the networks are timed one at a time while the others idle, by the same protocol as
without `--jobs`. Compilers' files are kept apart by network: nobody meets what another left. A case's record has the
seconds that it waited for turns and held them in `turns_s`, and from start to graph in `prepared_s`; `peer_compile_s`
is then on a machine that others use too.

`--part K/N` takes every Nth of the missing cases, for N such runs on as many GPUs, started together. `--keep FILE`
leaves Inductor's own records of what it has timed (a few MB); with `--resume FILE`, as often as there are such files, a
case that was cut off goes on where it was, and its line says `resumed`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import re
import signal
import statistics
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import classes
from benchmarks.cases.class_models import GPU
from benchmarks.gpu_networks import error_of, peer, posed
from benchmarks.harness import record
from benchmarks.harness.left import MORE, add_option
from benchmarks.harness.side_by_side import PREPARING, Result, Task, Turn, niceness, run, work
from benchmarks.models import NETWORKS
from weft.pipeline.finish import interleave
from weft.platform.cuda import platform as gpu

LONGEST_FIRST = (
    "yolov4", "inception_v3", "resnet50", "efficientvit_b1", "yolox_nano",
    "segformer_b0", "vit_b16", "bert_base", "candy", "vgg16",
)  # fmt: skip
MEMBERS = {f"{member.case}/f16": member for member in GPU}
"""Of the classes, by their cases; who has the name of one of the ten networks is that one."""
MEASURE_S = 60.0
ENTRIES = ("benchmark_gpu", "benchmark_gpu_with_cuda_graph")
"""The methods of Inductor's benchmarkers in which anything is timed on a GPU."""


Posed = tuple[torch.nn.Module, Sequence[torch.Tensor], Callable[[Sequence[torch.Tensor]], float], float]
"""A module and its inputs on the GPU, the error of a result, and above which a time does not count."""


def pose(case: str) -> Posed:
    """The network of a case's name: one of the ten, or a class's."""
    name, batch, dtype = split(case)
    if name in NETWORKS:
        module, inputs, wide = posed(name, batch, dtype)
        return module, inputs, lambda got: error_of(got, wide), math.inf
    module, given, exact = classes.posed(MEMBERS[case], "cuda")
    return module, given, lambda got: classes.error_of(got, exact), classes.LIMITS["cuda"]


def prepared(case: str, rounds: int, layouts: str) -> Callable[[], dict[str, Any]]:
    """Compile one network and record its graphs; what then times them, and gives the case's line."""
    module, inputs, error, limit = pose(case)
    images = all(x.ndim == 4 for x in inputs)
    graphs, compile_s = {}, {}
    for who in ("eager", "autotune"):
        both = images and (who == "eager" or layouts == "both")
        for last in (False, True) if both else (images,):
            label = f"{who}_last" if last else who
            graphs[label], compile_s[label], _, _ = peer(who, module, inputs, channels_last=last)

    def measure() -> dict[str, Any]:
        errors = {k: error(graph.replay()) for k, graph in graphs.items()}
        wrong = {k: f"an error of {x:.1e}" for k, x in errors.items() if x > limit}
        runs = {k: graph.replay for k, graph in graphs.items() if k not in wrong}
        samples = interleave(runs, rounds=rounds, seed=1, budget_s=60, sample=gpu.sample_us)
        ms = {k: round(statistics.median(v) / 1e3, 5) for k, v in samples.items()}
        return {
            "record": "case", "suite": "autotune", "case": case,
            **({"class": MEMBERS[case].group} if case in MEMBERS else {}), "peers_ms": ms, "errors": errors,
            **({"failed_peers": wrong} if wrong else {}),
            "peer_compile_s": {k: round(v, 1) for k, v in compile_s.items()},
            "samples_ms": {k: [round(x / 1e3, 5) for x in v] for k, v in samples.items()},
        }  # fmt: skip

    return measure


def split(case: str) -> tuple[str, int, str]:
    """Network, batch and type of a case's name."""
    name, batch, dtype = case.split("/")
    return name, int(batch.removeprefix("b")), dtype


def one_by_one(cases: Sequence[str], given: argparse.Namespace) -> None:
    """Compile and time them here, each alone on the machine."""
    began = time.monotonic()
    for case in cases:
        if time.monotonic() - began > given.seconds:
            print(f"{case}: no time left", file=sys.stderr)
            continue
        try:
            put({**prepared(case, given.rounds, given.layouts)(), "jobs": 1})
        except Exception as error:  # the other cases are to be measured
            lost(case, f"{type(error).__name__}: {error}")
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def entry_points(benchmarking: ModuleType) -> list[tuple[type, str]]:
    """The methods in which Inductor times anything on a GPU, with the classes that define them.

    Raises:
        RuntimeError: this version's are others: timings would not be made in turn.
    """
    named = vars(benchmarking)
    found = [(x, name) for x in named.values() if isinstance(x, type) for name in ENTRIES if name in vars(x)]
    used = next((x for x in type(named.get("benchmarker")).__mro__ if ENTRIES[0] in vars(x)), None)
    if (used, ENTRIES[0]) not in found or used is named.get("Benchmarker"):
        raise RuntimeError(f"torch {torch.__version__} times kernels elsewhere than in {ENTRIES[0]}: cannot take turns")
    return found


@contextlib.contextmanager
def inductor_in_turn(turn: Turn) -> Iterator[int]:
    """While open, what Inductor times on a GPU is timed in this turn; how many of its functions do so.

    Raises:
        RuntimeError: this version, or its settings, would time something otherwise.
    """
    from torch._inductor import config, utils
    from torch._inductor.runtime import benchmarking

    for setting in ("autotune_in_subproc", "pipeline_max_autotune_gemm"):
        if getattr(config, setting, False):
            raise RuntimeError(f"torch._inductor.config.{setting} is set: its processes would not take turns")
    places: list[tuple[Any, str]] = list(entry_points(benchmarking))
    if not hasattr(utils, "_do_bench_using_profiling"):
        raise RuntimeError(f"torch._inductor.utils of torch {torch.__version__} times kernels in a way not known here")
    places.append((utils, "_do_bench_using_profiling"))
    before = [(owner, name, vars(owner)[name]) for owner, name in places]
    for owner, name, function in before:
        setattr(owner, name, _in_turn(turn, function))
    try:
        yield len(before)
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _in_turn(turn: Turn, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*given: Any, **named: Any) -> Any:
        # what is timed is the first thing given, after the benchmarker; its first run loads it, which takes longest
        kernel = next((x for x in (*given[:2], *named.values()) if callable(x)), None)
        if kernel is not None and turn.since == 0.0:
            kernel()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        with turn:
            return function(*given, **named)

    return timed


def worker(given: argparse.Namespace) -> None:
    """What one process of `side_by_side` does."""
    turn = Turn(given.turn)

    def prepare() -> Callable[[], Result]:
        from torch._inductor.async_compile import AsyncCompile

        if hasattr(AsyncCompile, "use_process_pool"):
            AsyncCompile.use_process_pool()  # starts the helpers, which do not come before others as this thread will
        niceness(PREPARING)
        with inductor_in_turn(turn) as count:
            print(f"{count} functions of torch {torch.__version__} take turns", file=sys.stderr)
            measure = prepared(given.worker, given.rounds, given.layouts)
        used = {"waited": round(turn.waited_s, 1), "held": round(turn.held_s, 1)}
        return lambda: {**measure(), "turns_s": used}

    work(given.line, given.parent, turn, prepare)


def side_by_side(cases: Sequence[str], given: argparse.Namespace) -> None:
    """Compile them in processes of their own, several at a time, then time them one by one."""
    cores = len(os.sched_getaffinity(0))
    threads = given.threads or max(2, cores // given.jobs)
    with tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        resumed = {case for file in given.resume if file.exists() for case in unpack(file, folder)}
        print(f"{len(cases)} cases, {given.jobs} at a time, {cores} cores, {threads} helpers each", flush=True)
        say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
        tasks = [task(case, folder, cores, threads, given) for case in cases]
        results = run(tasks, jobs=given.jobs, prepare_s=given.seconds, measure_s=MEASURE_S, say=say, lost=lost)
        try:
            with contextlib.closing(results):
                for case, seconds, line in results:
                    more = {"resumed": True} if folder_of(case) in resumed else {}
                    put({**line, "jobs": given.jobs, "prepared_s": round(seconds, 1), **more})
        finally:
            if given.keep:
                pack(folder, given.keep)


def folder_of(case: str) -> str:
    """The name of the folder of a case's files."""
    return case.replace("/", "-")


def task(case: str, folder: Path, cores: int, threads: int, given: argparse.Namespace) -> Task:
    """A worker for this case."""
    files = folder / folder_of(case)
    files.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_autotune", "--worker", case, "--rounds", str(given.rounds)]
    command += ["--layouts", given.layouts]
    environment = {
        **{k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"},  # Triton's lie in Inductor's folder then
        "TORCHINDUCTOR_CACHE_DIR": str(files),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "OMP_NUM_THREADS": str(max(1, cores // given.jobs)),
        "MKL_NUM_THREADS": str(max(1, cores // given.jobs)),
        "PYTHONUNBUFFERED": "1",
    }
    return Task(case, [*command, "--turn", str(folder / "turn")], folder / f"{files.name}.log", environment)


def put(line: dict[str, Any]) -> None:
    """Add a case to the record as it is by now: a run on another GPU may add to the same."""
    with recording():
        record.Record(record.folder_of_gpu(), "autotune").add(line)


def lost(case: str, why: str) -> None:
    """Add a case that failed."""
    print(f"{case}: failed: {why.splitlines()[0]}", file=sys.stderr, flush=True)
    with recording():
        record.Record(record.folder_of_gpu(), "autotune").fail(why, case=case)


def known() -> set[str]:
    """The cases on record that did not fail."""
    with recording():
        lines = record.lines_of(record.RESULTS / record.folder_of_gpu() / "autotune.jsonl")
    return {str(x["case"]) for x in lines if x.get("record") == "case" and "failed" not in x}


def status(cases: Sequence[str]) -> int:
    """The exit status of a run with `--left` that had these to measure; it does not ask at which sources."""
    with recording():
        lines = record.lines_of(record.RESULTS / record.folder_of_gpu() / "autotune.jsonl")
    failed = {str(x["case"]) for x in lines if x.get("record") == "case" and "failed" in x}
    return MORE if set(cases) - known() - failed else int(bool(failed.intersection(cases)))


def recording() -> Turn:
    """While open, nobody else reads or writes the record."""
    return Turn(Path(tempfile.gettempdir()) / f"weft-autotune-{os.getuid()}.lock")


def pack(folder: Path, file: Path) -> None:
    """Keep what Inductor has timed: one small file per kernel, and one per network for the choices."""
    kept = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (path.suffix == ".best_config" or path.parent.name == "cache") and path.name[0] != "."
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for path in kept:
            tar.add(path, arcname=str(path.relative_to(folder)))
    print(f"{file}: {len(kept)} files of timings", flush=True)


def unpack(file: Path, folder: Path) -> frozenset[str]:
    """Put back what was kept; the names of the cases' folders that are there now."""
    with tarfile.open(file) as tar:
        tar.extractall(folder, filter="data")
    return frozenset(x.name for x in folder.iterdir() if x.is_dir())


def part(text: str) -> tuple[int, int]:
    """`K/N` as two numbers."""
    found = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: want K/N with 0 <= K < N")
    return int(found[1]), int(found[2])


def cases_of(given: argparse.Namespace) -> list[str]:
    """The cases that are asked for, in the order of their list.

    Raises:
        ValueError: a name is nobody's, or options of the ten networks were given to classes.
    """
    if given.classes:
        if given.batch or given.dtype:
            raise ValueError("--batch and --dtype are for the ten networks: the classes' list has them")
        if unknown := [name for name in given.names if not any(case.startswith(name) for case in MEMBERS)]:
            there = ", ".join(member.case for member in MEMBERS.values())
            raise ValueError(f"no such network of a class: {', '.join(unknown)}; there are {there}")
        return [case for case in MEMBERS if not given.names or case.startswith(tuple(given.names))]
    if unknown := sorted(set(given.names) - set(NETWORKS)):
        raise ValueError(f"no such network: {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    return [
        f"{name}/b{batch}/{dtype}"
        for batch in (given.batch or "1,16").split(",")
        for dtype in (given.dtype or "f16").split(",")
        for name in given.names or NETWORKS
    ]


def longest_first(cases: Sequence[str]) -> list[str]:
    """Those of networks that take longest first; behind them, as they come, those of which it is not known."""

    def place(case: str) -> tuple[int, int]:
        name, batch, _ = split(case)
        return (LONGEST_FIRST.index(name), -batch) if name in LONGEST_FIRST else (len(LONGEST_FIRST), 0)

    return sorted(cases, key=place)


def main() -> None:
    """Run the networks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="networks, or with --classes how cases begin; all without")
    parser.add_argument("--classes", action="store_true", help="the networks of benchmarks.classes")
    parser.add_argument("--batch", default="", help="of the ten networks, by commas (1,16)")
    parser.add_argument("--dtype", default="", help="of the ten networks, by commas (f16)")
    parser.add_argument(
        "--layouts", choices=("both", "last"), default="last", help="memory formats given to the compiler"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--jobs", type=int, default=1, help="networks compiled at a time")
    parser.add_argument("--threads", type=int, default=0, help="helpers of each (default: cores / jobs, at least 2)")
    parser.add_argument("--part", type=part, default=(0, 1), help="K/N: every Nth of the missing cases")
    parser.add_argument("--keep", type=Path, help="a .tgz to leave what Inductor has timed in (with --jobs)")
    parser.add_argument(
        "--resume", type=Path, action="append", default=[], help="such a file to begin with, if there is one"
    )
    add_option(parser)
    for hidden, kind in (("--worker", str), ("--turn", Path), ("--line", int), ("--parent", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        wanted = cases_of(given)
    except ValueError as error:
        parser.error(str(error))
    if given.jobs < 2 and (given.keep or given.resume):
        parser.error("--keep and --resume need --jobs of 2 or more")
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_autotune: torch sees no NVIDIA GPU")
    warnings.simplefilter("ignore")
    if given.worker:
        worker(given)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    there = known()
    k, n = given.part
    if given.jobs > 1:
        wanted = longest_first(wanted)
    missing = [case for case in wanted if case not in there][k::n]
    if lacking := classes.missing([MEMBERS[case] for case in missing if case in MEMBERS]):
        sys.exit(f"benchmarks.gpu_autotune: not installed: {', '.join(lacking)} (`pip install {' '.join(lacking)}`)")
    if missing:
        (side_by_side if given.jobs > 1 else one_by_one)(missing, given)
    if given.left:
        sys.exit(status(missing))


if __name__ == "__main__":
    main()
