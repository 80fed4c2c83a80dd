"""The form of benchmark records: one environment line, then one line per case, as JSON."""

from __future__ import annotations

import json
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
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return {
        "record": "environment",
        "device": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "weft": weft.__version__,
        "commit": commit.stdout.strip(),
        "command": command,
    }


class Record:
    """Prints lines and keeps them; the newest run replaces the file."""

    def __init__(self, device: str, suite: str) -> None:
        self.path = RESULTS / device / f"{suite}.jsonl"
        self.lines: list[dict[str, object]] = []
        self.add(environment(" ".join(["python -m", *_module_command()])))

    def add(self, line: dict[str, object]) -> None:
        """Print one record and write the file anew."""
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(x) + "\n" for x in self.lines))

    def keep(self, cases: Iterable[str]) -> None:
        """Carry over old lines of cases that are not run now, so that a partial run loses nothing."""
        wanted = set(cases)
        if self.path.exists():
            old = [json.loads(x) for x in self.path.read_text().splitlines()]
            self.lines += [x for x in old if x.get("record") == "case" and x.get("case") not in wanted]


def _module_command() -> list[str]:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return [spec.name if spec else Path(sys.argv[0]).stem, *sys.argv[1:]]
