"""Runs the corpus of hostile files, each in a process of its own, and records what Weft answered.

    python -m tools.hostile [-o benchmarks/results/cpu/hostile.jsonl] [--only WORD] [--part K/N] [--jobs J] [--fresh]

A file is *named* where, within the limits, the model is refused with a code W1xx or W2xx, or compiled. The processes
are forked from one that has imported all that a compilation imports and has computed nothing: seconds and bytes are
those of `weft.compile` alone, and memory is what it takes beyond that process, or the most that one of its own
processes takes; `cpu_s` are seconds of the processor, of all of them. A file that is too slow is asked again, `ASKED`
times at most, as other work on the machine is none of its; the quickest answer counts. A line is printed for each file
as it comes, and stands in the record from then on: a run that is broken off goes on where it was, and one that came
to its end asks those again that were not named (all with `--fresh`, or where the sources have changed).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.record import environment

import weft
from weft.tune.keys import PACKAGE, source_hash

MOST_S, MOST_BYTES = 5.0, 2 << 30
ALLOWED_BYTES = 1 << 30
"""What values may take while a model is compiled: so that the answer does not hang on the machine."""
ASKED = 3
ENDS_S = 60.0
"""After which a process is ended."""
_CODES = ("W1", "W2")
MEASURED = "weft.compile in a process forked from one that has imported what a compilation imports"
Found = dict[str, Any]


# --- in a process of its own


def answer(name: str, folder: str) -> Found:
    """Make one file, compile it, say what came of it."""
    from tests.hostile.corpus import corpus
    from tests.hostile.onnx_files import raw

    root = Path(folder) / "model"
    root.mkdir()
    (root.parent / "secret.bin").write_bytes(b"\0" * 8)
    path = root / "m.onnx"
    path.write_bytes(raw(corpus()[name](root)))
    options = weft.Options(budget_s=0, compile_memory_bytes=ALLOWED_BYTES, cache_dir=Path(os.environ["WEFT_CACHE_DIR"]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    try:
        weft.compile(path, options=options)
        said = {"code": "", "text": "compiled"}
    except weft.WeftError as error:
        said = {"code": error.code, "text": str(error).replace(folder, "FOLDER")[:300]}
    except Exception as error:  # a bug: told as what it is
        said = {"code": "none", "text": f"{type(error).__name__}: {error}"[:300]}
    seconds = time.perf_counter() - start
    mine, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = sum(x.ru_utime + x.ru_stime for x in (mine, theirs))
    memory = max(mine.ru_maxrss - before, theirs.ru_maxrss) * 1024
    return {**said, "seconds": round(seconds, 2), "cpu_s": round(busy, 2), "bytes": memory}


def modules(_: str, folder: str) -> Found:
    """Compile a right model and a wrong one, which also probes the machine; all that was imported by then."""
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 4]) for n in "xy")
    path = Path(folder) / "m.onnx"
    for op in ("Softmax", "Nothing"):
        graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        path.write_bytes(model.SerializeToString())
        with contextlib.suppress(weft.WeftError):
            weft.compile(path, options=weft.Options(budget_s=0, cache_dir=Path(os.environ["WEFT_CACHE_DIR"])))
    return {"names": sorted(n for n in sys.modules if n != "__main__")}


# --- asking such processes


@dataclass(frozen=True)
class Asked:
    """A process that was forked and has not answered."""

    name: str
    pid: int
    pipe: int
    folder: str
    deadline: float


def ask(function: Callable[[str, str], Found], name: str, seconds: float) -> Asked:
    """Fork a process that answers by `function`; it ends with the answer."""
    folder = tempfile.mkdtemp(prefix="weft-hostile-")
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the libraries' threads, which have computed nothing
        pid = os.fork()
    if pid:
        os.close(theirs)
        return Asked(name, pid, ours, folder, time.monotonic() + seconds)
    status = 1
    try:
        os.setsid()
        os.close(ours)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(quiet, stream)
        warnings.simplefilter("ignore")
        said = json.dumps(function(name, folder)).encode()
        while said:
            said = said[os.write(theirs, said) :]
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is ended here


def answered(asked: Asked) -> Found:
    """The answer of a process whose pipe can be read, or whose time is over."""
    told = b""
    late = False
    while True:
        left = asked.deadline - time.monotonic()
        if not select.select([asked.pipe], [], [], max(0.0, left))[0]:
            late = True
            break
        piece = os.read(asked.pipe, 1 << 16)
        if not piece:
            break
        told += piece
    with contextlib.suppress(ProcessLookupError):
        os.killpg(asked.pid, signal.SIGKILL)
    _, status = os.waitpid(asked.pid, 0)
    os.close(asked.pipe)
    shutil.rmtree(asked.folder, ignore_errors=True)
    nothing = {"code": "none", "seconds": 0.0, "cpu_s": 0.0, "bytes": 0}
    if late:
        return {**nothing, "text": f"more than {ENDS_S:g} s", "seconds": ENDS_S}
    try:
        found: Found = json.loads(told)
    except ValueError:
        how = (
            f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.waitstatus_to_exitcode(status)}"
        )
        return {**nothing, "text": f"the process died: {how}"}
    return found


def is_named(found: Found) -> bool:
    """See the module."""
    code = str(found["code"])
    return (not code or code.startswith(_CODES)) and found["seconds"] < MOST_S and found["bytes"] < MOST_BYTES


def outcomes(names: Sequence[str], jobs: int) -> Iterator[Found]:
    """The record of each file, as they come."""
    waiting = deque((name, 1) for name in names)
    running: dict[int, tuple[Asked, int]] = {}
    best: dict[str, Found] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, times = waiting.popleft()
            asked = ask(answer, name, ENDS_S)
            running[asked.pipe] = asked, times
        soonest = min(a.deadline for a, _ in running.values())
        ready = select.select(list(running), [], [], max(0.0, soonest - time.monotonic()))[0]
        for pipe in ready or [p for p, (a, _) in running.items() if a.deadline <= time.monotonic()]:
            asked, times = running.pop(pipe)
            found = answered(asked)
            old = best.get(asked.name)
            best[asked.name] = found = found if old is None or found["seconds"] < old["seconds"] else old
            slow = MOST_S <= found["seconds"] < ENDS_S
            if slow and times < ASKED:
                waiting.appendleft((asked.name, times + 1))
                continue
            yield {"record": "file", "name": asked.name, "named": is_named(found), "asked": times, **found}


def prepare() -> None:
    """Import in this process what a compilation imports; nothing is computed, so that it can be forked."""
    found = answered(ask(modules, "", 20 * ENDS_S))
    if "names" not in found:
        sys.exit(f"nothing can be compiled here: {found['text']}")
    for name in found["names"]:
        with contextlib.suppress(Exception):  # some can only be imported by others
            importlib.import_module(name)


# --- the record


def header(command: str) -> Found:
    """What a record is of."""
    return {
        **environment(command), "suite": "hostile", "cores": len(os.sched_getaffinity(0)), "most_s": MOST_S,
        "most_bytes": MOST_BYTES, "allowed_bytes": ALLOWED_BYTES, "measured": MEASURED,
        "sources": source_hash(PACKAGE, (".",))[:16],
    }  # fmt: skip


_ALIKE = ("device", "python", "torch", "most_s", "most_bytes", "allowed_bytes", "measured", "sources")
"""In the headers of records of which one goes on with the other."""


def known(path: Path | None, head: Found) -> list[Found]:
    """The files that are named in a record which was broken off, or has others; none where it is of something else."""
    if path is None or not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last may have been cut off
            lines.append(json.loads(text))
    if not lines or any(lines[0].get(k) != head[k] for k in _ALIKE):
        return []
    return [x for x in lines if x["record"] == "file" and x["named"]]


def summary(records: Sequence[Found]) -> Found:
    """The last line."""
    return {
        "record": "summary", "suite": "hostile", "total": len(records), "named": sum(r["named"] for r in records),
        "worst_s": max((r["seconds"] for r in records), default=0.0),
        "worst_bytes": max((r["bytes"] for r in records), default=0),
    }  # fmt: skip


def part(text: str) -> tuple[int, int]:
    """K/N."""
    one, _, parts = text.partition("/")
    if not (one.isdigit() and parts.isdigit() and 1 <= int(one) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: K/N, K from 1 to N")
    return int(one), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the corpus; 0 if every file was named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="", help="files with this word in their name")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="every Nth file from the Kth on")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="forget what the record has")
    given = parser.parse_args(arguments)
    from tests.hostile.corpus import corpus

    every = list(corpus())
    first, parts = given.part
    names = [name for name in every[first - 1 :: parts] if given.only in name]
    os.environ.setdefault("WEFT_CACHE_DIR", tempfile.mkdtemp(prefix="weft-hostile-cache-"))
    head = header(" ".join(["python -m tools.hostile", *(sys.argv[1:] if arguments is None else arguments)]))
    records = {r["name"]: r for r in known(None if given.fresh else given.output, head)}
    left = [name for name in names if name not in records]
    if left:
        prepare()
    if given.output:
        given.output.write_text("".join(json.dumps(r) + "\n" for r in (head, *records.values())))
    for r in outcomes(left, given.jobs):
        records[r["name"]] = r
        how = "named    " if r["named"] else "NOT NAMED"
        said = str(r["text"]).splitlines()[0][:120]
        print(f"{how} {r['name']}: {r['seconds']} s, {r['bytes'] >> 20} MiB, {r['code']} {said!r}", flush=True)
        if given.output:
            with given.output.open("a") as record:
                record.write(json.dumps(r) + "\n")
    ordered = [records[name] for name in every if name in records]
    end = summary(ordered)
    print(json.dumps(end))
    if given.output:
        given.output.write_text("".join(json.dumps(r) + "\n" for r in (head, *ordered, end)))
    return 0 if end["named"] == end["total"] else 1


if __name__ == "__main__":
    sys.exit(main())
