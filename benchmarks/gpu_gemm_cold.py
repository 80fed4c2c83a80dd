"""How long one product takes to tune from cold: `weft gemm` as a command, its caches empty, on an NVIDIA GPU.

    python -m benchmarks.gpu_gemm_cold [--out FILE] [--seconds S]

For each shape a cache directory of its own that is made for the run: nothing is known of the GPU, no kernel is
compiled, nothing is measured. The time is that of the process from its start to its end, and contains what is done
once per GPU and cache (`survey`). The last shape is asked for once more with another size in the same cache: the GPU is
known, the product is not. Target: under 15 s.

Where what the command line is made of is not installed, a process of this file takes the same steps (`--child`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, folder_of_gpu

SHAPES: tuple[tuple[str, ...], ...] = (
    ("MNK=1024", "--layout", "nt", "--epilogue", "bias_gelu"),
    ("M=16", "NK=4096", "--layout", "nt", "--dtype", "bf16"),
    ("MNK=4096",),
)
KNOWN = ("M=968", "N=1376", "K=2616", "--layout", "nt")
"""In the cache of the last shape."""
TARGET_S = 15.0
PARTS = ("start", "survey", "rank", "emit", "build", "worker", "run", "against")


def tune(arguments: Sequence[str], cache: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run `weft gemm` in a process of its own; what it took, or how it failed."""
    by = ["weft", "gemm"] if importlib.util.find_spec("typer") else ["benchmarks.gpu_gemm_cold", "--child"]
    command = [sys.executable, "-m", *by, *arguments, "--format", "json", "-o", str(folder)]
    line: dict[str, Any] = {"record": "case", "suite": "gemm cold", "case": " ".join(arguments), "by": by[0]}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            env={**os.environ, "WEFT_CACHE_DIR": str(cache)},
        )
    except subprocess.TimeoutExpired:
        return {**line, "error": f"not done after {limit_s:.0f} s"}
    line["wall_s"] = round(time.perf_counter() - start, 2)
    try:
        (found,) = json.loads(done.stdout)
    except ValueError:
        return {**line, "error": f"status {done.returncode}: {(done.stderr.strip().splitlines() or ['?'])[-1][:300]}"}
    states = [json.loads(x)["state"] for x in (Path(found["folder"]) / "timings.jsonl").read_text().splitlines()]
    return line | {
        "seconds": found["seconds"],
        "tried": found["tried"],
        "feasible": found["feasible"],
        "ok": states.count("ok"),
        "best_us": found["best"]["median_us"],
        "rank": found["best"]["rank"],
        "tflops": found["tflops"],
    }


def child(arguments: Sequence[str]) -> None:
    """What `weft gemm` does for one product, without its command line."""
    from weft.cli.age import age_s
    from weft.gemm import folder
    from weft.gemm.epilogue import epilogue
    from weft.gemm.search import search
    from weft.gemm.spec import Gemm, layout_of, read_tokens, typed
    from weft.options import Options
    from weft.platform.cuda.platform import survey
    from weft.tune.store import Database
    from weft.tune.tuner import Tuner

    parser = argparse.ArgumentParser()
    parser.add_argument("tokens", nargs="*")
    parser.add_argument("--layout", default="nn")
    parser.add_argument("--dtype", default="f16")
    parser.add_argument("--epilogue", default="none")
    parser.add_argument("--format")
    parser.add_argument("-o", dest="output", type=Path)
    given = parser.parse_intermixed_args(arguments)
    base = typed(Gemm(layout=layout_of(given.layout), epilogue=epilogue(given.epilogue)), given.dtype)
    g = read_tokens(given.tokens, base)
    options = Options.from_environment({**os.environ, "WEFT_DEVICE": "cuda"})
    seconds = {"start": age_s()}
    facts, nvrtc, _ = survey(options)
    seconds["survey"] = age_s() - seconds["start"]
    if nvrtc is None:
        raise SystemExit("no NVRTC")
    with Database.open(options.cache) as database, Tuner(options, facts, database, compiler=nvrtc) as tuner:
        found = search(g, facts, tuner.measure, limit=256)
        found.stage_s = seconds | found.stage_s | tuner.seconds
    if found.best is None:
        raise SystemExit(next((o.note for o in found.outcomes if o.note), "nothing was measured"))
    place = folder.write(given.output, found)
    print(json.dumps([{"name": g.name, "folder": str(place), **folder.parameters(found)}]))


def told(line: Mapping[str, Any]) -> str:
    """A line for people."""
    if "error" in line:
        return f"{line['case']}: {line['error']}"
    parts = ", ".join(f"{k} {line['seconds'][k]:.1f}" for k in PARTS if line["seconds"].get(k, 0) >= 0.05)
    verdict = "" if line["wall_s"] < TARGET_S else f" OVER {TARGET_S:.0f} s"
    best = f"{line['best_us']:.2f} us, the model's number {line['rank']} of {line['tried']} ({line['ok']} ok)"
    return f"{line['case']}: {line['wall_s']:.1f} s{verdict} ({parts}); best {best}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["--child"]:
        child(arguments[1:])
        return
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_gemm_cold", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default="", help="a file in place of the record")
    parser.add_argument("--seconds", type=float, default=60.0, help="when to stop (60)")
    add_option(parser)
    given = parser.parse_args(arguments)
    end = time.monotonic() + given.seconds
    out = Path(given.out) if given.out else None
    record = Record("" if out else folder_of_gpu(), "gemm-cold", path=out)
    late = Left(record, math.inf, only=given.left)
    with tempfile.TemporaryDirectory(prefix="weft-cold-") as folder:
        cases = [(shape, f"cache{i}") for i, shape in enumerate(SHAPES)]
        for i, (shape, cache) in enumerate([*cases, (KNOWN, cases[-1][1])]):
            left = end - time.monotonic()
            if left < 1:
                late.put_off(" ".join(shape))
                continue
            with record.measuring(case=" ".join(shape)):
                line = tune(shape, Path(folder) / cache, Path(folder) / f"out{i}", left)
                print(told(line), flush=True)
                if "error" in line:
                    record.fail(str(line["error"]), case=line["case"])
                else:
                    record.add(line)
    late.close()


if __name__ == "__main__":
    main()
