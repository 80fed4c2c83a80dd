"""Records of suites: a line that says where and how was measured, then the newest row of every case, as JSON lines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path

import torch

import weft
from weft.tune.keys import PACKAGE, source_hash

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DIRTY = "-dirty"
"""Behind a commit: the sources were not those of the commit."""
_SOURCES = ("src", "benchmarks", "tests", "tools", "lab", "pyproject.toml")
_RESULTS = (":(exclude)benchmarks/results", ":(exclude)lab/results")
_SHOWN = 8
_TOLD = 300
"""Characters of an error that a row keeps."""
ENDED = "the run ended meanwhile"
"""Why a case failed with which its process was killed."""
TRIES = 2
"""So often a case with which its process is killed is begun at the same sources."""

Row = dict[str, object]


def environment(command: str, *, on_cpu: bool = False) -> Row:
    """What a reader needs to judge the numbers: the first line of a record.

    `on_cpu`: of what ran on the processor; else the device is the GPU, where there is one.
    """
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    gpu = _gpu() if torch.cuda.is_available() and not on_cpu else {}
    return {
        "record": "environment",
        "device": cpu,
        **gpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "weft": weft.__version__,
        "src": sources(),
        **_sources(),
        "command": command,
    }


def sources() -> str:
    """A hash of the files in `src/`: which compiler was measured, whatever else a commit changed."""
    return source_hash(PACKAGE, (".",))[:12]


def _sources() -> Row:
    """The commit, marked and with the files that differ where the tree is not the commit's.

    A copy of the tree without its history names its commit itself, by `WEFT_COMMIT`.
    """
    if told := os.environ.get("WEFT_COMMIT"):
        return {"commit": told}
    commit = _git("rev-parse", "--short", "HEAD").strip()
    if not commit:
        return {"commit": "unknown"}
    changed = [x[3:] for x in _git("status", "--porcelain", "--", *_SOURCES, *_RESULTS).splitlines()]
    if not changed:
        return {"commit": commit}
    more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    return {"commit": commit + DIRTY, "changed": [*changed[:_SHOWN], *more]}


def _git(*arguments: str) -> str:
    """What git says of this tree; nothing where there is no git, or no history."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _gpu() -> Row:
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    asked = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    shown = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    values = [x.strip() for x in shown[0].split(",")] if shown else []
    names = ("driver", "sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz", "power_limit_w")
    return {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **dict(zip(names, values, strict=False)),
    }


def folder_of_gpu() -> str:
    """The name of the folder of this GPU's records."""
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def folder_of(device: str, context: BaseContext) -> str:
    """The folder of the records of `cpu` or of the GPU; empty where torch sees no GPU.

    A GPU is asked for in a process of `context`: this one is not to know it.
    """
    if device == "cpu":
        return "cpu"
    with context.Pool(1) as pool:
        found: str = pool.apply(_gpu_folder)
    return found


def _gpu_folder() -> str:
    return folder_of_gpu() if torch.cuda.is_available() else ""


def lines_of(path: Path) -> list[Row]:
    """The lines of a record; none where there is no file, and a last one that was cut off does not count."""
    found: list[Row] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


class Record:
    """The newest row of every case of a suite on a device, in a file that is written anew with every row.

    A run replaces the rows of what it measures, and no others: a row of an earlier run stands, with the commit that it
    was measured at, until its case is measured again. A case that fails is a row, too (`measuring`), and takes the
    place of what was measured before: nothing that fails now looks as if it did not. Lines that are no cases, such as
    a summary, are those of the newest run.
    """

    def __init__(
        self, device: str, suite: str, *, path: Path | None = None, key: Sequence[str] = ("case",), command: str = ""
    ) -> None:
        """`path`: a file in place of the suite's own. `key`: the fields of a row that say which case it is."""
        self.suite, self.path, self._key = suite, path or RESULTS / device / f"{suite}.jsonl", tuple(key)
        self.failed: list[str] = []
        """Cases of this run that failed."""
        old = lines_of(self.path)
        then = old[0] if old and old[0].get("record") == "environment" else {}
        self.head = environment(command or " ".join(["python -m", *_module_command()]), on_cpu=device == "cpu")
        self._rows = {self._case(x): _stamped(x, then, self.head) for x in old if x.get("record") == "case"}
        self._others: list[Row] = []
        print(json.dumps(self.head), flush=True)

    def _case(self, row: Mapping[str, object]) -> tuple[object, ...]:
        return tuple(row.get(k) for k in self._key)

    @property
    def lines(self) -> list[Row]:
        """All lines as they are written: environment, cases, others."""
        return [self.head, *self._rows.values(), *self._others]

    @property
    def cases(self) -> list[Row]:
        """The newest row of every case, failed ones among them."""
        return list(self._rows.values())

    def before(self) -> dict[str, Row]:
        """Rows by what they call their case."""
        return {str(x["case"]): x for x in self._rows.values()}

    def known(self) -> set[str]:
        """Cases that have a row."""
        return set(self.before())

    def add(self, row: Mapping[str, object]) -> None:
        """Print one line and write the file anew; a case takes the place of its older row."""
        line = dict(row)
        if line.get("record") == "case":
            if line.setdefault("commit", self.head["commit"]) == self.head["commit"]:
                line.setdefault("src", self.head["src"])
            self._rows[self._case(line)] = line
        else:
            self._others.append(line)
        print(json.dumps(line), flush=True)
        self.write()

    def fail(self, reason: str, **case: object) -> None:
        """The row of a case that could not be measured; it names the commit that the case was last measured at."""
        row: Row = {"record": "case", "suite": self.suite, **case}
        old = self._rows.get(self._case(row), {})
        measured = old.get("last_measured") if "failed" in old else old.get("commit")
        told = (reason.splitlines() or ["no reason given"])[0][:_TOLD]
        self.add({**row, "failed": told, **({"last_measured": measured} if measured else {})})

    @contextmanager
    def measuring(self, **case: object) -> Iterator[None]:
        """Within it one case is measured, and its row added. What it raises becomes its row, and the run goes on.

        Until then its row says that it did not end, should the process be killed. Whoever interrupts the run leaves
        the row as it was.
        """
        at = self._case(case)
        old = self._rows.get(at)
        measured = {} if old is None else {"last_measured": old.get("last_measured") or old.get("commit")}
        tries = tries_of(old, self.head) + 1
        pending: Row = {"record": "case", "suite": self.suite, **case, "failed": ENDED, **measured}
        pending |= {"src": self.head["src"], "tries": tries}
        self._rows[at] = pending
        self.write()
        why = ""
        try:
            yield
            why = "it gave no row" if self._rows[at] is pending else ""
        except Exception as error:  # the other cases are to be measured
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
        except BaseException:
            self._restore(at, old)
            raise
        if why:
            self._restore(at, old)
            self.fail(why, **case)
        if "failed" in self._rows[at]:
            self.failed.append(" ".join(str(x) for x in at))
            print(f"{self.failed[-1]}: {self._rows[at]['failed']}", file=sys.stderr, flush=True)

    def _restore(self, at: tuple[object, ...], old: Row | None) -> None:
        if old is None:
            self._rows.pop(at, None)
        else:
            self._rows[at] = old
        self.write()

    def at_these_sources(self, **case: object) -> Row | None:
        """The row of a case that was measured, or failed, at these sources; None: it is to be measured.

        With whom a process was killed is tried again, `TRIES` times in all.
        """
        row = self._rows.get(self._case(case))
        if row is None or row.get("src") != self.head["src"] or 0 < tries_of(row, self.head) < TRIES:
            return None
        return row

    def forget(self, *cases: str) -> None:
        """Rows of cases that there are no more."""
        self._rows = {k: x for k, x in self._rows.items() if x.get("case") not in cases}
        self.write()

    def write(self) -> None:
        """The file, anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(x) + "\n" for x in self.lines))

    def close(self) -> None:
        """SystemExit that names the cases of this run that failed, if there are any."""
        if self.failed:
            sys.exit(f"failed: {', '.join(self.failed)}")


def tries_of(row: Mapping[str, object] | None, head: Mapping[str, object]) -> int:
    """How often the process of this case was killed at the sources of `head`, if that is all that is known of it."""
    if row is None or row.get("failed") != ENDED or row.get("src") != head.get("src"):
        return 0
    return int(str(row.get("tries", 1)))


def exchange(path: Path, head: Row, rows: Sequence[Row], key: Sequence[str]) -> None:
    """Put rows into a record in place of all that it has of the same keys, where a case has several rows."""
    new = {tuple(x.get(k) for k in key) for x in rows}
    old = lines_of(path)
    then = next((x for x in old if x.get("record") == "environment"), head)
    kept = [_stamped(x, then, head) for x in old if x.get("record") != "environment"]
    kept = [x for x in kept if tuple(x.get(k) for k in key) not in new]
    own = {"commit": head["commit"], "src": head["src"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(x) + "\n" for x in (head, *kept, *({**x, **own} for x in rows))))


def merge(path: Path, head: Row, rows: Sequence[Row], key: Sequence[str]) -> None:
    """Put the rows of a run that was recorded elsewhere into a record, in place of the same cases."""
    old = lines_of(path)
    then = next((x for x in old if x.get("record") == "environment"), head)
    kept = {tuple(x.get(k) for k in key): _stamped(x, then, head) for x in old if x.get("record") == "case"}
    kept |= {tuple(x.get(k) for k in key): _stamped(x, head, head) for x in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(x) + "\n" for x in (head, *kept.values())))


def _stamped(row: Row, then: Mapping[str, object], now: Mapping[str, object]) -> Row:
    """A row of an earlier run, with its commit, and its device where that was another."""
    mine = {k: then[k] for k in ("commit", "src") if k in then and "commit" not in row}
    if then.get("device") != now.get("device") and "device" in then:
        mine["device"] = then["device"]
    return {**row, **{k: v for k, v in mine.items() if k not in row}}


def _module_command() -> list[str]:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return [spec.name if spec else Path(sys.argv[0]).stem, *sys.argv[1:]]
