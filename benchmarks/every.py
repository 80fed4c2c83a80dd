"""Every suite that is measured on a GPU, in calls of under ten minutes: `make gpu-bench-all`.

    python -m benchmarks.every [--seconds 540] [--only SUITE,...] [--again] [--list]

Each suite is a process of its own with a hard limit; its output is in `build/gpu-bench-all/SRC/SUITE.log`. A call ends
before `--seconds` are over and says which suites are done, which were cut short, and what is left; the next one goes on
from there. What is done is kept in `build/gpu-bench-all.json` by the hash of `src/`, and rows of records name that hash
(`benchmarks/harness/left.py`): nothing is measured twice at the same sources, and where the file is lost, rows remain.
Peers that compile for minutes (`autotune`, those of training steps) stand as they are: no source of ours changes them.

A suite that fails is said with its last line and is not tried again, unless `--only` names it: then cases that failed
are measured once more. One that is cut short again and again with nothing new has failed, too. `--again` measures
suites anew. What needs something that is not there (compute-sanitizer, libraries, a second GPU) is passed over, and
said in every call. Records that no suite here writes are in `OTHERS`.

The exit status is 0 where all is done or passed over, 75 where there is more to do, 1 where something failed and
nothing else is left to do.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import final

import torch

from benchmarks.harness.left import MORE
from benchmarks.harness.record import ENDED, RESULTS, folder_of, lines_of, sources

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
START_S = 20.0
"""A process takes so long before its first case."""
END_S = 5.0
"""After SIGTERM a process may say what it was doing."""
SPARE_S = 2 * END_S
"""Of a call: for ending what runs, and for what is said then."""
STALLED = 2
"""So many runs that leave nothing new are a failure."""
MARK = "WEFT_BENCHMARKS_CALL"
"""In the environment of all that a call starts, by which it is found."""
OTHERS = {
    "networks-again": "an earlier commit's `networks`, with eager alone; `networks` has every peer",
    "replay-times": "of kernels that differ between two commits, which `tools/replay.py` finds",
}
"""Records that no suite here writes, and why."""

Command = tuple[str, ...]
Needs = Callable[[], str]
"""What is not there; empty: all is."""


def nothing() -> str:
    """Of a suite that any GPU can run."""
    return ""


def program(name: str, of: str) -> Needs:
    """A program, as it is found on the way or where CUDA is installed."""

    def lacking() -> str:
        there = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
        return "" if there else f"no {name} (it comes with {of})"

    return lacking


def libraries(*names: str) -> Needs:
    """Packages of Python."""

    def lacking() -> str:
        missing = [x for x in names if importlib.util.find_spec(x) is None]
        return f"not installed: {', '.join(missing)} (`pip install {' '.join(missing)}`)" if missing else ""

    return lacking


def file(path: str, how: str) -> Needs:
    """A file in the tree, and who makes it."""
    return lambda: "" if (ROOT / path).exists() else f"no {path} ({how})"


def gpus(count: int) -> Needs:
    """So many GPUs."""
    return lambda: "" if torch.cuda.device_count() >= count else f"it needs {count} GPUs"


@dataclass(frozen=True, slots=True)
class Suite:
    """Commands of one name, one after the other, and what they write."""

    name: str
    steps: tuple[Command, ...]
    """Modules with their arguments. `{seconds}`: when nothing more is begun; `{kept}`: a folder of these sources."""
    records: tuple[str, ...]
    case_s: float = 60.0
    """What was begun takes no longer, as a rule: no command is begun with less."""
    prepare: tuple[Command, ...] = ()
    """Comes first, and decides whether the steps are run."""
    needs: Needs = nothing

    @property
    def commands(self) -> tuple[Command, ...]:
        """All, in their order."""
        return (*self.prepare, *self.steps)


def _step(text: str) -> Command:
    return tuple(text.split())


def suite(
    name: str, *steps: str, records: str = "", case_s: float = 60.0, prepare: str = "", needs: Needs = nothing
) -> Suite:
    """`records`: by commas, the name of the suite without."""
    written = tuple((records or name).split(","))
    return Suite(name, tuple(map(_step, steps)), written, case_s, (_step(prepare),) if prepare else (), needs)


_LEFT = "--left --seconds {seconds}"
_NETWORKS = f"benchmarks.gpu_networks --batch 1,16 --cold-only --repeat 200 --layouts last {_LEFT}"
_COLOCATE = f"benchmarks.gpu_colocate --budget 18 {_LEFT}"
_CO_RUNNER = f"benchmarks.gpu_corunner --budget 18 {_LEFT}"
_NETWORK_CO_RUNNER = f"benchmarks.gpu_network_corunner --budget 18 {_LEFT}"
_GEMM = "f16 bf16 layouts epilogues fused f32 tf32 fp8 fp8_fast"
_LIBRARY = "lab.gpu_lt --record"
_TCNN = "build/tiny-cuda-nn/libweft_tcnn.so"
_MPS = program("nvidia-cuda-mps-control", "the driver")


def _colocate(name: str, needs: Needs = nothing) -> Suite:
    return suite(
        f"colocate-{name}",
        f"{_COLOCATE} --suite {name} --plans {{kept}}/plans --samples {{kept}}/samples --out -",
        prepare=f"{_COLOCATE} --suite {name} --prepare {{kept}}/plans",
        case_s=180.0,
        needs=needs,
    )


SUITES = (
    suite("networks", f"{_NETWORKS} --dtype f16 --budget 40 --rounds 9", case_s=180.0),
    suite("gemm", f"benchmarks.gpu_gemm_lt {_GEMM} --kernels 16 --out {{kept}}/gemm.jsonl --record {_LEFT}",
          case_s=30.0),
    suite("gemm-cold", f"benchmarks.gpu_gemm_cold {_LEFT}", case_s=90.0),
    suite("convolutions", f"benchmarks.gpu_conv --batch 1,16 --keep {_LEFT}"),
    suite(
        "attention",
        f"benchmarks.gpu_attention --first 0 {_LEFT}",
        f"benchmarks.gpu_attention --first 0 --long {_LEFT}",
    ),
    suite("memory-bound", f"benchmarks.gpu_memory --schedules 8 {_LEFT}"),
    suite("mlp", f"benchmarks.gpu_mlp --dtype bf16 {_LEFT}", case_s=90.0),
    suite(
        "mlp-tiny-cuda-nn",
        f"benchmarks.gpu_mlp --dtype f16 --tiny-cuda-nn {_TCNN} {_LEFT}",
        records="mlp",
        case_s=150.0,
        needs=file(_TCNN, "benchmarks/peers/tiny_cuda_nn says how it is built"),
    ),
    suite(
        "mlp-training",
        f"benchmarks.gpu_mlp_training {_LEFT}",
        f"benchmarks.gpu_mlp_training --wide {_LEFT}",
        case_s=90.0,
    ),
    suite("grouped", f"benchmarks.gpu_grouped --batch 1,16 --out - {_LEFT}"),
    suite("pooled", f"benchmarks.gpu_pooled --batch 1,16 --out - {_LEFT}"),
    suite("products", "lab.gpu_gemm --record --left --until {seconds}"),
    suite("int8", f"lab.gpu_int8 --record {_LEFT}"),
    suite("padded", f"lab.gpu_padded --dtypes f16,f32 --out - {_LEFT}", case_s=75.0),
    suite(
        "library-algorithms",
        f"{_LIBRARY} {_LEFT}",
        f"{_LIBRARY} --budget 60 {_LEFT} --networks bert_base:16 vit_b16:16",
        case_s=120.0,
    ),
    suite("library-plan", f"benchmarks.library_plan --gpu --rounds 9 {_LEFT}", case_s=90.0),
    suite("networks-bf16", f"{_NETWORKS} --dtype bf16 --budget 15 --rounds 7 --suite networks-later",
          records="networks-later", case_s=150.0),
    suite("networks-f32", f"{_NETWORKS} --dtype f32,tf32 --budget 15 --rounds 7 --suite networks-later",
          records="networks-later", case_s=180.0),
    suite("classes", f"benchmarks.classes --device cuda --peers eager,inductor --warm 0 --timed 15 {_LEFT}",
          case_s=360.0, needs=libraries("timm", "torchvision", "transformers")),
    suite("zoo", f"benchmarks.zoo --device cuda --out - {_LEFT}", case_s=150.0,
          needs=libraries("timm", "torchvision", "transformers", "diffusers")),
    suite("training", f"benchmarks.gpu_training --who weft,eager,inductor --limit 400 --out - {_LEFT}", case_s=420.0),
    suite("training-faults", f"benchmarks.training_faults --device cuda --out - {_LEFT}", case_s=120.0),
    suite("distributed", f"benchmarks.gpu_distributed --limit 400 --out - {_LEFT}", case_s=420.0, needs=gpus(2)),
    suite("budget", f"benchmarks.budget --device cuda {_LEFT}", case_s=200.0),
    suite("autotune", "benchmarks.gpu_autotune --batch 1,16 --jobs 4 --keep {kept}/autotune.tgz"
          f" --resume {{kept}}/autotune.tgz {_LEFT}", case_s=180.0),
    suite("autotune-classes", "benchmarks.gpu_autotune --classes --jobs 8 --keep {kept}/autotune-classes.tgz"
          f" --resume {{kept}}/autotune-classes.tgz {_LEFT}", records="autotune", case_s=180.0,
          needs=libraries("timm", "torchvision", "transformers")),
    suite("best-effort", f"benchmarks.gpu_best_effort --out - {_LEFT}"),
    suite("colocate-pairs", "benchmarks.gpu_pairs --cache {kept}/cubins --database {kept}/database"
          f" --out - {_LEFT}", case_s=150.0),
    suite(
        "colocate-guests",
        f"{_CO_RUNNER} --plans {{kept}}/plans --only resnet50,bert_base,vit_b16 --rounds 2 --out -",
        f"{_CO_RUNNER} --plans {{kept}}/plans --only resnet50/b1 --kinds dense --rounds 2 --out -",
        f"{_CO_RUNNER} --plans {{kept}}/plans --only resnet50/b1 --first --out -",
        prepare=f"{_CO_RUNNER} --prepare {{kept}}/plans --only resnet50,bert_base,vit_b16",
        case_s=180.0,
    ),
    suite(
        "colocate-steps",
        f"{_CO_RUNNER} --plans {{kept}}/plans --only resnet50/b1 --steps --out -",
        prepare=f"{_CO_RUNNER} --prepare {{kept}}/plans --only resnet50/b1",
        case_s=240.0,
    ),
    suite("colocate-stop", f"benchmarks.gpu_stop --cache {{kept}}/cubins --out - {_LEFT}", case_s=90.0),
    suite(
        "colocate-networks",
        f"{_NETWORK_CO_RUNNER} --plans {{kept}}/plans --out -",
        prepare=f"{_NETWORK_CO_RUNNER} --prepare {{kept}}/plans",
        case_s=180.0,
    ),
    _colocate("policies"),
    _colocate("batch1"),
    _colocate("bursts"),
    _colocate("end-to-end"),
    _colocate("mps", _MPS),
    suite(
        "colocate-predictors",
        f"benchmarks.colocate_predictors --plans {{kept}}/plans --budget 18 --out - {_LEFT}",
        prepare=f"{_COLOCATE} --suite policies --prepare {{kept}}/plans --only resnet50/b1",
        case_s=300.0,
    ),
    suite(
        "colocate-faults",
        f"benchmarks.colocate_faults --device cuda --plans {{kept}}/plans --budget 18 --out - {_LEFT}",
        prepare=f"{_COLOCATE} --suite policies --prepare {{kept}}/plans --only resnet50/b1",
        case_s=300.0,
    ),
    suite("colocate-sanitize", f"tools.sanitize_pairs --cache {{kept}}/cubins --out - {_LEFT}", case_s=90.0,
          needs=program("compute-sanitizer", "the CUDA toolkit")),
    suite("gpu-faults", f"benchmarks.gpu_faults {_LEFT}"),
    suite("attention-models", "benchmarks.gpu_trust --only models", "benchmarks.gpu_trust --only faults", case_s=420.0),
    suite("mutants", "benchmarks.mutants --device cuda --count 285 --journal {kept}/mutants.jsonl", case_s=120.0),
    suite(
        "random-programs",
        *(f"benchmarks.random_programs --device cuda --count 300 --part {k}/6" for k in range(1, 7)),
        case_s=300.0,
    ),
)  # fmt: skip
"""In the order in which they are measured: what the documents say most about first."""


# ---- what is known


@dataclass(slots=True)
class State:
    """How far a suite is, at some sources."""

    done: int = 0
    """Commands that ended with everything measured, or have failed."""
    failed: str = ""
    """The last line of the first command that failed."""
    cut: str = ""
    """Why the last run was no whole one."""
    stalled: int = 0
    """Runs, one after the other, that left nothing new."""
    seen: str = ""
    """A digest of what was there after the last run."""
    seconds: float = 0.0


@final
class Progress:
    """States by suite, in a file that is whole at any time."""

    def __init__(self, path: Path, src: str) -> None:
        """What other sources left in the file stays there."""
        self._path, self._src = path, src
        self._every: dict[str, dict[str, dict[str, object]]] = {}
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text())
            self._every = found if isinstance(found, dict) else {}

    def of(self, name: str) -> State:
        """The state of a suite."""
        told = self._every.get(self._src, {}).get(name, {})
        try:
            return State(**told)  # type: ignore[arg-type]
        except TypeError:  # another version's
            return State()

    def keep(self, name: str, state: State) -> None:
        """Put down a state."""
        self._every.setdefault(self._src, {})[name] = asdict(state)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._every, indent=1) + "\n")
        new.replace(self._path)


def unmark(path: Path, *, failed_only: bool) -> None:
    """Rows of a record that are to be measured once more: they stand, but not as rows of any sources."""
    rows = lines_of(path)
    for row in rows:
        if row.get("record") != "environment" and "src" in row and ("failed" in row or not failed_only):
            row["src"] = ""
    if rows:
        path.write_text("".join(json.dumps(x) + "\n" for x in rows))


# ---- processes


def started_by(mark: str) -> Iterator[int]:
    """Processes that have this mark in their environment, whatever session or parent they have now."""
    want = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if want in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def end_all(mark: str) -> None:
    """End what has this mark: asked at first, killed then; what hangs in a driver is left to it."""
    until = time.monotonic() + END_S
    sign = signal.SIGTERM
    asked: set[int] = set()
    while left := set(started_by(mark)):
        late = time.monotonic() > until
        sign = signal.SIGKILL if late else signal.SIGTERM
        for pid in left - (set() if late else asked):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sign)
        asked |= left
        if time.monotonic() > until + END_S:
            return
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    status: int | None
    """None: by the limit."""
    last: str
    """The last line that it printed."""
    seconds: float


def run(command: Sequence[str], log: Path, limit_s: float, mark: str) -> Ended:
    """A process to its end or the limit, with all that it started; its output is added to `log`.

    Whoever interrupts this interrupts the process. `mark`: of processes that this call may end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began, at = time.monotonic(), log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, MARK: mark}, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_all(mark)
            if process.poll() is None:  # before it had its environment
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
    with log.open("rb") as told:
        told.seek(at)
        lines = [x for x in told.read().decode(errors="replace").splitlines() if x.strip()]
    return Ended(status, lines[-1].strip()[:300] if lines else "it said nothing", time.monotonic() - began)


# ---- suites


@final
class Call:
    """One call: what there is to do, until when, and what came of it."""

    def __init__(
        self, progress: Progress, kept: Path, results: Path, seconds: float, mark: str, began: float | None = None
    ) -> None:
        """`kept`: the folder of these sources; `results`: that of the GPU's records; `began`: of `time.monotonic`."""
        self._progress, self._kept, self._results, self._mark = progress, kept, results, mark
        self._seconds, self._end = seconds, (time.monotonic() if began is None else began) + seconds

    def told(self, s: Suite) -> str:
        """What is left of a suite, for people; empty: nothing."""
        state = self._progress.of(s.name)
        if state.done >= len(s.commands):
            return ""
        least = s.case_s + START_S + SPARE_S
        why = f"; it needs a call of {least:g} s" if self._seconds < least else f"; {state.cut}" if state.cut else ""
        return f"{state.done} of {len(s.commands)} commands done{why}"

    def forget(self, s: Suite) -> None:
        """Measure a suite anew."""
        for name in s.records:
            unmark(self._results / f"{name}.jsonl", failed_only=False)
        for path in self._paths(s):
            if path.is_file():
                path.unlink()
        self._progress.keep(s.name, State())

    def retry(self, s: Suite) -> None:
        """Measure once more what failed of a suite that did."""
        if self._progress.of(s.name).failed:
            for name in s.records:
                unmark(self._results / f"{name}.jsonl", failed_only=True)
            self._progress.keep(s.name, State())

    def advance(self, s: Suite) -> None:
        """Run what is left of a suite, as long as there is time for a case of it."""
        state = self._progress.of(s.name)
        while state.done < len(s.commands) and self._left_s() >= s.case_s + START_S:
            self._one(s, state)

    def _left_s(self) -> float:
        return self._end - SPARE_S - time.monotonic()

    def _one(self, s: Suite, state: State) -> None:
        limit_s, number = self._left_s(), state.done
        command = self.command(s, number, limit_s)
        _say(f"{s.name}: {' '.join(command)}")
        state.cut = "it was interrupted"
        self._progress.keep(s.name, state)
        ended = run([sys.executable, "-m", *command], self._kept / f"{s.name}.log", limit_s, self._mark)
        state.seconds = round(state.seconds + ended.seconds, 1)
        state.cut, why = "", ""
        if ended.status is None:
            state.cut = f"ended after {ended.seconds:.0f} s"
        elif ended.status == MORE:
            state.cut = ended.last
        elif ended.status != 0:
            why = f"{_said(ended.status)}: {ended.last}"
        if state.cut:
            why = self._stalls(s, state)
        if why:
            state.failed = state.failed or why
            _say(f"{s.name}: FAILED: {why}")
        if why or not state.cut:
            # what was not prepared cannot be measured
            state.done = len(s.commands) if why and number < len(s.prepare) else number + 1
            state.stalled, state.seen, state.cut = 0, "", ""
        self._progress.keep(s.name, state)
        if not why:
            told = f"cut short: {state.cut}" if state.cut else f"done ({state.done} of {len(s.commands)})"
            _say(f"{s.name}: {told}, {ended.seconds:.0f} s")

    def _stalls(self, s: Suite, state: State) -> str:
        """Counts a run that was cut short; why the command has failed, if it has."""
        now = self._seen(s)
        state.stalled = state.stalled + 1 if now == state.seen else 0
        state.seen = now
        return f"nothing new after {STALLED} more runs: {state.cut}" if state.stalled >= STALLED else ""

    def command(self, s: Suite, number: int, limit_s: float) -> list[str]:
        """A command of a suite, with nothing in it to be filled in."""
        values = {"seconds": f"{max(1.0, limit_s - s.case_s):.0f}", "kept": str(self._kept)}
        return [x.format(**values) for x in s.commands[number]]

    def _paths(self, s: Suite) -> list[Path]:
        told = [x.format(seconds="", kept=self._kept) for c in s.commands for x in c if "{kept}" in x]
        return [Path(x) for x in dict.fromkeys(told)]

    def _seen(self, s: Suite) -> str:
        """A digest of rows, and of files that a suite keeps, by their sizes."""
        state = hashlib.sha256()
        for name in s.records:
            for row in lines_of(self._results / f"{name}.jsonl"):
                if row.get("record") not in ("environment", "summary") and row.get("failed") != ENDED:
                    state.update(json.dumps(row).encode())
        for path in self._paths(s):
            for one in sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []:
                state.update(f"{one} {one.stat().st_size if one.is_file() else 0}".encode())
        return state.hexdigest()


def _say(text: str) -> None:
    print(text, flush=True)


def _said(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def chosen(only: str) -> list[Suite]:
    """The suites of these names, by commas; all, if none.

    Raises:
        ValueError: one of them is no suite.
    """
    names = [x for x in only.split(",") if x]
    if unknown := set(names) - {s.name for s in SUITES}:
        raise ValueError(f"no suite {sorted(unknown)[0]!r}; there are {', '.join(s.name for s in SUITES)}")
    return [s for s in SUITES if not names or s.name in names]


def measure(suites: Sequence[Suite], call: Call, progress: Progress) -> int:
    """Run what is left, and say how all of them stand; the exit status."""
    passed: dict[str, str] = {}
    for s in suites:
        if progress.of(s.name).done < len(s.commands):
            if why := s.needs():
                passed[s.name] = why
            else:
                call.advance(s)
    left = {s.name: call.told(s) for s in suites if s.name not in passed and call.told(s)}
    failed = {s.name: progress.of(s.name).failed for s in suites if progress.of(s.name).failed}
    done = [s.name for s in suites if s.name not in {*left, *failed, *passed}]
    for text in report(done, failed, passed, left):
        _say(text)
    return MORE if left else int(bool(failed))


def report(
    done: Sequence[str], failed: Mapping[str, str], passed: Mapping[str, str], left: Mapping[str, str]
) -> Iterator[str]:
    """What is said at the end of a call."""
    yield f"done ({len(done)}): {', '.join(done) or 'none'}"
    for title, found in (("failed", failed), ("passed over", passed), ("left", left)):
        yield f"{title} ({len(found)}):" if found else f"{title}: none"
        yield from (f"    {name}: {why}" for name, why in found.items())


def _interrupted(_sign: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Go on; returns the exit status."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="the call has ended before so many (540)")
    parser.add_argument("--only", default="", metavar="SUITE,...", help="these suites, by commas")
    parser.add_argument("--again", action="store_true", help="measure anew what was measured at these sources, too")
    parser.add_argument("--list", action="store_true", help="no GPU: print suites and commands")
    given = parser.parse_args(arguments)
    try:
        suites = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    src = sources()
    kept = BUILD / "gpu-bench-all" / src
    if given.list:
        for s in suites:
            print("\n".join([s.name, *(f"    python -m {' '.join(c)}" for c in s.commands)]))
        return 0
    least = min(s.case_s for s in suites) + START_S + SPARE_S
    if given.seconds < least:
        parser.error(f"--seconds {given.seconds:g}: a case may take {least:g}, with what is around it")
    device = folder_of("cuda", multiprocessing.get_context("spawn"))
    if not device:
        sys.exit("benchmarks.every: torch sees no NVIDIA GPU; `--list` needs none")
    signal.signal(signal.SIGTERM, _interrupted)
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "gpu-bench-all.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("benchmarks.every: another call is under way in this tree")
        end_all(str(ROOT))  # what a call that was killed has left
        progress = Progress(BUILD / "gpu-bench-all.json", src)
        call = Call(progress, kept, RESULTS / device, given.seconds, str(ROOT), began)
        _say(f"{device}, src {src}, {kept}")
        for s in suites:
            if given.again:
                call.forget(s)
            elif given.only:
                call.retry(s)
        try:
            return measure(suites, call, progress)
        except KeyboardInterrupt:
            print("interrupted; the next call goes on", file=sys.stderr)
            return 130


if __name__ == "__main__":
    sys.exit(main())
