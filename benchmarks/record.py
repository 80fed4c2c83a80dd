"""The form of benchmark records: one environment line, then one line per case, as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import weft

ROOT = Path(__file__).parent
RESULTS = ROOT / "results"


def environment(command: str) -> dict[str, object]:
    """What a reader needs to judge the numbers."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    asked = ["git", "rev-parse", "--short", "HEAD"]
    # a copy of the tree without its history names its commit itself
    commit = (
        os.environ.get("WEFT_COMMIT")
        or subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    )
    gpu = _gpu() if torch.cuda.is_available() else {}
    return {
        "record": "environment",
        "device": cpu,
        **gpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "weft": weft.__version__,
        "commit": commit,
        "command": command,
    }


def _gpu() -> dict[str, object]:
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


class Record:
    """Prints lines and keeps them; the newest run replaces the file."""

    def __init__(self, device: str, suite: str) -> None:
        self.path = RESULTS / device / f"{suite}.jsonl"
        self._old = [json.loads(x) for x in self.path.read_text().splitlines()] if self.path.exists() else []
        self.lines: list[dict[str, object]] = []
        self.add(environment(" ".join(["python -m", *_module_command()])))

    def add(self, line: dict[str, object]) -> None:
        """Print one record and write the file anew."""
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(x) + "\n" for x in self.lines))

    def known(self) -> set[str]:
        """Cases of the runs before this one."""
        return set(self.before())

    def before(self) -> dict[str, dict[str, object]]:
        """Lines of the runs before this one, by case."""
        return {str(x["case"]): x for x in self._old if x.get("record") == "case"}

    def keep(self, cases: Iterable[str]) -> None:
        """Carry over old lines of cases that are not run now, with their commit: a partial run loses nothing."""
        wanted = set(cases)
        then = {"commit": self._old[0]["commit"]} if self._old and "commit" in self._old[0] else {}
        old = [x for x in self._old if x.get("record") == "case" and x.get("case") not in wanted]
        self.lines += [x if "commit" in x else {**x, **then} for x in old]
        self._write()


def _module_command() -> list[str]:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return [spec.name if spec else Path(sys.argv[0]).stem, *sys.argv[1:]]
