"""The ten networks tuned by TVM's MetaSchedule beside Weft: f32, batch 1, on the processor, in interleaved rounds.

    python -m benchmarks.tvm_networks [NAME ...] [--python FILE] [--tune S] [--budget S] [--rounds N] [--timed S]
                                      [--seconds S] [--again] [--out -|FILE]

TVM has an environment of its own (`--python`, `build/tvm/env/bin/python`), without torch, which every process that
builds one of its kernels would import:

    python -m venv build/tvm/env
    build/tvm/env/bin/pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy onnx xgboost psutil \\
        cloudpickle tornado ml_dtypes        # with apache-tvm-ffi 0.1.15 it ends by a signal when it begins to tune

TVM reads the network's ONNX file and tunes its tasks for the instruction set of this processor, with the layouts of
weights among what is tuned (TVM's own pipeline for static shapes on a CPU), until it is ended after `--tune` seconds.
Its database stands in `build/tvm`, and the next run goes on from there: a row says for how many seconds and trials in
all, and how many tasks have some (the loops of others run as TVM lowers them by default). Weft has `--budget` seconds
and an empty cache. Both are checked against float64, then timed beside eager. What has a row is passed over unless it
is named or `--again`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
import torch

import weft
from benchmarks.classes import LIMITS, error_of, wide
from benchmarks.harness.record import Record, Row
from benchmarks.models import NETWORKS, load
from benchmarks.networks import BUILD, onnx_file
from weft.pipeline.finish import interleave
from weft.platform.cpu import host_sample

SUITE = "tvm"
TUNED = BUILD.parent / "tvm"
PYTHON = TUNED / "env" / "bin" / "python"
PROCESS = Path(__file__).parent / "peers" / "tvm_process.py"
_SHOWN = 2000
Call = Callable[[], object]


class TvmError(Exception):
    """TVM's process ended, and the last that it said."""


class Tvm:
    """A process that runs a network as TVM has it."""

    def __init__(self, python: Path, name: str, inputs: Sequence[torch.Tensor], temporary: Path) -> None:
        """Start, compile with what the network's database has, and run once. TvmError: it cannot."""
        given = temporary / "inputs.npz"
        np.savez(given, *(x.numpy() for x in inputs))
        self._log: IO[str] = (temporary / "serve.log").open("w+")
        command = _command(python, "serve", name, str(given))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        answer = json.loads(self._line())
        self.tasks = int(answer["tasks"])
        """Different kernels of the network."""
        with np.load(answer["outputs"], allow_pickle=False) as found:
            self.outputs = [torch.from_numpy(found[f"arr_{k}"]) for k in range(len(found.files))]
            """Results of the run."""

    def __call__(self) -> list[torch.Tensor]:
        self.sample(self, 1)
        return self.outputs

    def sample(self, run: Call, count: int) -> float:
        """Microseconds of a call, in its process if it is that one's."""
        if run is not self:
            return host_sample(run, count)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return float(self._line()) * 1e6 / count

    def close(self) -> None:
        """End it."""
        _end(self._process)
        self._log.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        self._log.seek(0)
        said = " | ".join(self._log.read().strip().splitlines()[-2:])[:_SHOWN]
        self.close()
        raise TvmError(f"TVM's process ended: {said}")


def _command(python: Path, what: str, name: str, *more: str) -> list[str]:
    return [
        str(python),
        str(PROCESS),
        what,
        str(onnx_file(name)),
        str(TUNED / name),
        str(torch.get_num_threads()),
        *more,
    ]


def _end(process: subprocess.Popen[str]) -> None:
    """The process, and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def tune(python: Path, name: str, seconds: float) -> None:
    """Add to the network's database for so long. TvmError: it ended by itself."""
    with (TUNED / name / "tune.log").open("w+") as log:
        command = _command(python, "tune", name)
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        finally:
            _end(process)
        log.seek(0)
        raise TvmError(f"tuning ended with status {process.returncode}: {log.read()[-_SHOWN:]}")


def measured_trials(folder: Path) -> tuple[int, int]:
    """Trials in a database of TVM's, and tasks that have some."""
    path = folder / "database_tuning_record.json"
    lines = path.read_text().splitlines() if path.exists() else []
    return len(lines), len({json.loads(line)[0] for line in lines})


def case_row(name: str, given: argparse.Namespace) -> Row:
    """Tune and time one network: the fields of its row."""
    folder = TUNED / name
    folder.mkdir(parents=True, exist_ok=True)
    clock = folder / "seconds.json"
    spent = float(json.loads(clock.read_text())) if clock.exists() else 0.0
    if given.tune > 0:
        tune(given.python, name, given.tune)
        spent += given.tune
        clock.write_text(json.dumps(spent))
    module, inputs = load(name)
    with torch.no_grad():
        exact = wide(module, inputs)
        with tempfile.TemporaryDirectory(dir=TUNED) as temporary:
            began = time.perf_counter()
            options = weft.Options(budget_s=given.budget, cache_dir=Path(temporary) / "cache")
            exe = weft.compile(module, inputs, options=options, name=name)
            tuning_s = time.perf_counter() - began
            tvm = Tvm(given.python, name, inputs, Path(temporary))
            try:
                calls: dict[str, Call] = {"weft": lambda: exe(*inputs), "tvm": tvm, "eager": lambda: module(*inputs)}
                errors = {who: error_of(call(), exact) for who, call in calls.items()}
                right = {who: call for who, call in calls.items() if errors[who] <= LIMITS["cpu"]}
                rounds, seconds = given.rounds, given.timed
                samples = interleave(right, rounds=rounds, seed=1, budget_s=seconds, sample=tvm.sample)
            finally:
                tvm.close()
    ms = {who: round(statistics.median(samples[who]) / 1e3, 4) for who in right}
    own, peers = ms.get("weft", math.inf), {who: x for who, x in ms.items() if who != "weft"}
    trials, reached = measured_trials(folder)
    return {
        "weft_ms": own, "peers_ms": peers, "errors": errors, "plan": exe.record.chosen, "tuning_s": round(tuning_s, 1),
        "speedup_tvm": round(peers["tvm"] / own, 3) if "tvm" in peers else None, "tvm_tuning_s": round(spent, 1),
        "tvm_trials": trials, "tvm_tasks": tvm.tasks, "tvm_tuned_tasks": reached,
        "samples_ms": {who: [round(x / 1e3, 4) for x in samples[who]] for who in right},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="networks; all, if none")
    parser.add_argument("--python", type=Path, default=PYTHON, help="of the environment that has TVM")
    parser.add_argument("--tune", type=float, default=600.0, help="seconds of TVM's tuning, of each network (600)")
    parser.add_argument("--budget", type=float, default=100.0, help="of Weft's search, in seconds (100)")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each time (9)")
    parser.add_argument("--timed", type=float, default=60.0, help="seconds for the rounds (60)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="none is begun after so many")
    parser.add_argument("--again", action="store_true", help="also what has a row")
    parser.add_argument("--out", type=Path, help="write the record: into this file, or `-`: into that of the suite")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(NETWORKS):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(NETWORKS)}")
    if not given.python.exists():
        parser.error(f"there is no {given.python}; `--help` says how TVM is installed")
    end = time.perf_counter() + given.seconds
    with tempfile.TemporaryDirectory(prefix="weft-tvm-") as temporary:
        path = None if given.out == Path("-") else given.out or Path(temporary) / "record.jsonl"
        record = Record("cpu", SUITE, path=path)
        for name in given.names or NETWORKS:
            case = f"{name}/b1/fp32"
            if time.perf_counter() > end or (case in record.known() and not given.again and not given.names):
                continue
            with record.measuring(case=case):
                row = case_row(name, given)
                record.add({"record": "case", "suite": SUITE, "case": case, "device": record.head["device"], **row})
        record.close()


if __name__ == "__main__":
    main()
