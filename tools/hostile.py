"""Runs the corpus of hostile files, each in a process of its own, and records what Weft answered.

    python -m tools.hostile [-o benchmarks/results/cpu/hostile.jsonl] [--only WORD] [--jobs 2]

A file is *named* where, within the limits, the model is refused with a code W1xx or W2xx, or compiled. Seconds are
those of `weft.compile`, without the imports of this package; memory is the greatest of this process, beyond what these
imports take, and of those that it started.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MOST_S, MOST_BYTES = 5.0, 2 << 30
ALLOWED_BYTES = 1 << 30
"""What values may take while a model is compiled: so that the answer does not hang on the machine."""
_ENDS_S = 120
_CODES = ("W1", "W2")


def child(name: str, folder: str) -> None:
    """Make one file, compile it, print the answer."""
    import resource
    import warnings

    from tests.hostile.corpus import corpus
    from tests.hostile.onnx_files import raw

    import weft
    import weft.api
    import weft.pipeline

    root = Path(folder) / "model"
    root.mkdir()
    (root.parent / "secret.bin").write_bytes(b"\0" * 8)
    path = root / "m.onnx"
    path.write_bytes(raw(corpus()[name](root)))
    options = weft.Options(budget_s=0, compile_memory_bytes=ALLOWED_BYTES, cache_dir=Path(os.environ["WEFT_CACHE_DIR"]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weft.compile(path, options=options)
        answer = {"code": "", "text": "compiled"}
    except weft.WeftError as error:
        answer = {"code": error.code, "text": str(error)[:300]}
    except Exception as error:  # a bug: told as what it is
        answer = {"code": "none", "text": f"{type(error).__name__}: {error}"[:300]}
    seconds = time.perf_counter() - start
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    theirs = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps({**answer, "seconds": round(seconds, 2), "bytes": max(mine, theirs) * 1024}))


def ask(name: str) -> dict[str, Any]:
    """The record of one file."""
    with tempfile.TemporaryDirectory(prefix="weft-hostile-") as folder:
        command = [sys.executable, "-m", "tools.hostile", "--child", name, folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ENDS_S, check=False)
            found = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            found = {"code": "none", "text": f"more than {_ENDS_S} s", "seconds": float(_ENDS_S), "bytes": 0}
        except (ValueError, IndexError):
            found = {"code": "none", "text": "the process died", "seconds": 0.0, "bytes": 0}
    code = str(found["code"])
    named = (not code or code.startswith(_CODES)) and found["seconds"] < MOST_S and found["bytes"] < MOST_BYTES
    return {"record": "file", "name": name, "named": named, **found}


def main() -> int:
    """Run the corpus; 0 if every file was named."""
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="", help="files with this word in their name")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    from tests.hostile.corpus import corpus

    import weft

    names = [name for name in corpus() if given.only in name]
    os.environ.setdefault("WEFT_CACHE_DIR", tempfile.mkdtemp(prefix="weft-hostile-cache-"))
    ask(names[0])  # probes the machine, which is no part of a file's seconds
    with ThreadPoolExecutor(given.jobs) as pool:
        records = list(pool.map(ask, names))
    for r in records:
        if not r["named"]:
            print(f"NOT NAMED {r['name']}: {r['seconds']} s, {r['bytes'] >> 20} MiB, {r['text']!r}")
    summary = {
        "record": "summary", "suite": "hostile", "total": len(records), "named": sum(r["named"] for r in records),
        "worst_s": max(r["seconds"] for r in records), "worst_bytes": max(r["bytes"] for r in records),
    }  # fmt: skip
    head = {
        "record": "header", "suite": "hostile", "weft": weft.__version__, "python": platform.python_version(),
        "cores": os.cpu_count(), "most_s": MOST_S, "most_bytes": MOST_BYTES, "allowed_bytes": ALLOWED_BYTES,
    }  # fmt: skip
    print(json.dumps(summary))
    if given.output:
        given.output.write_text("".join(json.dumps(r) + "\n" for r in (head, *records, summary)))
    return 0 if summary["named"] == summary["total"] else 1


if __name__ == "__main__":
    sys.exit(main())
