"""Networks on an NVIDIA GPU whose kernels let the next one start before they wait, against those that wait first.

    python -m lab.gpu_early [NETWORK ...] [--batch 1] [--budget 15] [--seconds 200]

With programmatic dependent launch a kernel says when its successor may start, which then waits for it to end. Weft's
kernels say so behind their own wait. Said before it, the successor's start overlaps with the kernel before, too; it
still waits for all, as each kernel ends only after its own wait. This compiles networks by both: Weft as it is, and a
copy in which `w_wait` says so first, and launches of one kernel wait before they read anything that is no weight.
The lines of `benchmarks.gpu_networks` with the times are printed; nothing is recorded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHANGES = {
    "intrinsics/weft_cuda_machine.h": (
        ("griddepcontrol.wait;", r"griddepcontrol.launch_dependents;\ngriddepcontrol.wait;"),
        ('  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");\n', ""),
    ),
    "loops/kernel.py": (
        ('settled = self.weights if first else {f"in{k}" for k in range(len(self.graph.inputs))}',
         "settled = self.weights"),
    ),
}  # fmt: skip


def early(folder: Path) -> Path:
    """A copy of the package whose kernels let the next one start early; AssertionError where a text is another."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in CHANGES.items():
        path = source / "weft" / "generate" / "cuda" / name
        text = path.read_text()
        for old, new in changes:
            assert old in text, (name, old)
            text = text.replace(old, new)
        path.write_text(text)
    return source


def main() -> None:
    """One network after the other, by both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["yolox_nano", "bert_base"])
    parser.add_argument("--batch", default="1")
    parser.add_argument("--budget", default="15")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--dry", action="store_true", help="make the copy only")
    given = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weft-early-") as scratch:
        packages = {"behind the wait": ROOT / "src", "before the wait": early(Path(scratch))}
        for name in () if given.dry else given.names:
            for label, package in packages.items():
                left = given.seconds - (time.perf_counter() - start)
                if left < float(given.budget):
                    print(f"time is up before {name}, {label}", flush=True)
                    continue
                command = [sys.executable, "-m", "benchmarks.gpu_networks", name, "--batch", given.batch, "--budget"]
                command += [given.budget, "--rounds", "9", "--cold-only", "--repeat", "200", "--layouts", "last"]
                command += ["--peers", "eager", "--suite", "early", "--verbose", "1"]
                cache = {"XDG_CACHE_HOME": f"{scratch}/{label.split()[0]}"}  # nothing of one is found by the other
                environment = {**os.environ, **cache, "PYTHONPATH": f"{package}:{ROOT}"}
                try:
                    done = subprocess.run(
                        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=left
                    )
                except subprocess.TimeoutExpired:
                    print(f"{name}, {label}: not done in {left:.0f} s", flush=True)
                    continue
                lines = [x for x in done.stdout.splitlines() if x.startswith("== ") or " us, predicted" in x]
                print(f"{name}, {label}:", *(lines or [done.stderr[-600:]]), sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
