"""ONNX files of public repositories, compiled as a user would, beside ONNX Runtime.

    python -m tools.foreign_onnx FOLDER [--fetch] [--match TEXT] [--jobs 2] [--no-record]

With `--fetch` git brings the files of `SOURCES`, each at its commit, into FOLDER/OWNER/NAME first (100 MB; needs the
network). Then every file in FOLDER runs in ONNX Runtime on drawn inputs, sizes that the file leaves open by the first
of `ATTEMPTS` with which it runs, and through `weft.compile` without measuring; equal files count once. ONNX Runtime
takes the operators one by one: fused with their quantization, they round elsewhere than the file says. Per file one
line: `right` (every operator taken apart), `opaque` (right, with operators run by a library), `split` (right, as two
partitions, one of which ONNX Runtime runs), `refused` (an error of Weft, by its code), `wrong`, `crashed`, or `not_run`
(ONNX Runtime does not run it, or gives other numbers in a second run). The summary's share is of those that ONNX
Runtime runs. Exit status 1 if anything is wrong or crashed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from google.protobuf.message import DecodeError

import weft
from tools import pool
from weft.api import flat
from weft.frontends.onnx.check import walk_nodes
from weft.frontends.onnx.opaque import RANDOM
from weft.ir.types import Array
from weft.pipeline.finish import as_array
from weft.pipeline.parts import NAME

SUITE = "foreign-onnx"
RECORD = Path("benchmarks/results/cpu/foreign-onnx.jsonl")
RIGHT = ("right", "opaque", "split")
LARGEST = 200 << 20
"""Bytes of a file; larger ones are left out by name."""


@dataclass(frozen=True, slots=True)
class Source:
    """Files of a repository."""

    repository: str
    """OWNER/NAME at GitHub."""
    commit: str


SOURCES = (
    Source("tracel-ai/burn-onnx", "7db1e206c9f3c8842dd5430010c172fa53457164"),
    Source("kraiskil/onnx2c", "ea045cc169e9338bc8fe5b54d5109d2f2828db44"),
    Source("stanleybak/vnncomp2021", "90419aadcf06cf543ce5c1706cae1059dc9fa6cf"),
    Source("microsoft/onnxruntime-extensions", "319f8d2c02c4e2f013129bea52e70e75ba79bbcf"),
    Source("microsoft/onnxruntime-inference-examples", "428b0399b871c258683ccfa9e9eb9e449ef01843"),
    Source("sonos/tract", "38b383fbd8ee33873fd0b58fcc23480011554c0c"),
    Source("emmtrix/emx-onnx-cgen", "0952ecc93058c22f9f59f35fdd0917effb594273"),
    Source("webonnx/wonnx", "c62f5d336c152102882a163ebc1eb18e63550de8"),
)
"""Layers as other compilers test their importers with, networks of a verification contest, examples of use."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How inputs are drawn."""

    size: int
    """Of each dimension that the file leaves open."""
    whole: tuple[int, int]
    """Integers are in this range, its end excluded."""


ATTEMPTS = (Attempt(2, (0, 2)), Attempt(1, (1, 2)), Attempt(1, (0, 1)), Attempt(16, (0, 2)), Attempt(224, (0, 2)))
NUMPY = {
    "float": np.float32, "double": np.float64, "float16": np.float16, "bool": np.bool_, "int8": np.int8,
    "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16, "int32": np.int32, "uint32": np.uint32,
    "int64": np.int64, "uint64": np.uint64,
}  # fmt: skip
CLOSE = {np.dtype(np.float64): 1e-6, np.dtype(np.float32): 1e-3, np.dtype(np.float16): 2e-2}
"""Of an error, over the larger of an element and a tenth of the largest: both sides round, and sum in other orders."""


class NotRunError(Exception):
    """ONNX Runtime does not run the file."""


def fetch(folder: Path, sources: Sequence[Source] = SOURCES, host: str = "https://github.com") -> None:
    """Bring the files of the sources, by git; what is there already is left.

    Raises:
        CalledProcessError: git fails.
    """
    for source in sources:
        there = folder / source.repository
        if (there / ".git").exists():
            continue
        there.mkdir(parents=True)
        address = f"{host}/{source.repository}"
        for command in (
            ["init", "-q"],
            ["sparse-checkout", "set", "--no-cone", "*.onnx"],
            ["fetch", "-q", "--depth", "1", "--filter=blob:none", address, source.commit],
            ["-c", "advice.detachedHead=false", "checkout", "-q", "FETCH_HEAD"],
        ):
            subprocess.run(["git", "-C", str(there), *command], check=True)


def files(folder: Path) -> Iterator[Path]:
    """All of a folder, one of each content, in order of their names."""
    seen = set()
    for path in sorted(p for p in folder.rglob("*.onnx") if p.is_file()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest not in seen:
            seen.add(digest)
            yield path


def drawn(session: onnxruntime.InferenceSession, how: Attempt) -> dict[str, Array]:
    """Inputs of a file by name: normals, small integers, truth values.

    Raises:
        NotRunError: it takes something else.
    """
    chance = np.random.default_rng(0)
    found: dict[str, Array] = {}
    for x in session.get_inputs():
        kind = x.type.removeprefix("tensor(").removesuffix(")")
        if kind not in NUMPY:
            raise NotRunError(f"input {x.name!r} is a {x.type}")
        dtype = np.dtype(NUMPY[kind])
        shape = [d if isinstance(d, int) and d >= 0 else how.size for d in x.shape or ()]
        if dtype.kind == "f":
            found[x.name] = np.asarray(chance.standard_normal(shape)).astype(dtype)
        elif dtype.kind == "b":
            found[x.name] = np.asarray(chance.integers(0, 2, shape)).astype(dtype)
        else:
            found[x.name] = np.asarray(chance.integers(*how.whole, shape)).astype(dtype)
    return found


def wanted(path: Path) -> tuple[dict[str, Array], list[Array]]:
    """Inputs with which ONNX Runtime runs the file, and what it answers.

    Raises:
        NotRunError: there are none, or it answers what can be no tensor of numbers, or something else every time.
        DecodeError: the file is no model.
    """
    nodes = walk_nodes(onnx.load(str(path), load_external_data=False).graph.node)
    if drawing := sorted({n.op_type for n in nodes} & RANDOM - {"Dropout"}):
        raise NotRunError(f"random: {', '.join(drawing)}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it has many
        raise NotRunError(_short(error)) from error
    why = ""
    for how in ATTEMPTS:
        inputs = drawn(session, how)
        try:
            outputs, again = (session.run(None, inputs) for _ in range(2))
        except Exception as error:
            why = why or _short(error)
            continue
        if not outputs or not all(isinstance(y, np.ndarray) and y.dtype.kind in "fiub" for y in outputs):
            raise NotRunError("its outputs are no tensors of numbers")
        if not all(_same(y, z) for y, z in zip(outputs, again, strict=True)):
            raise NotRunError("random: two runs give different numbers")
        return inputs, outputs
    raise NotRunError(why)


def _same(x: Array, y: Array) -> bool:
    return x.shape == y.shape and np.array_equal(x, y, equal_nan=x.dtype.kind == "f")


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.partition(' failed:')[2] or text}"[:200]  # no path of this machine


def difference(got: Sequence[Array], want: Sequence[Array]) -> str:
    """Empty if the outputs agree; else the first difference."""
    if len(got) != len(want):
        return f"{len(got)} outputs instead of {len(want)}"
    for k, (y, z) in enumerate(zip(got, want, strict=True)):
        if y.dtype != z.dtype or y.shape != z.shape:
            return f"output {k} is {y.dtype}{list(y.shape)} instead of {z.dtype}{list(z.shape)}"
        if z.dtype.kind != "f":
            if not np.array_equal(y, z):
                return f"output {k}: {int((y != z).sum())} of {z.size} elements differ"
            continue
        if not np.array_equal(np.isfinite(y), np.isfinite(z)) or not _same(*(x[~np.isfinite(z)] for x in (y, z))):
            return f"output {k}: other infinities or NaN"
        finite = np.isfinite(z)
        mine, theirs = (x[finite].astype(np.float64) for x in (y, z))
        if not mine.size:
            continue
        scale = np.maximum(np.abs(theirs), 0.1 * np.abs(theirs).max())
        worst = float((np.abs(mine - theirs) / np.maximum(scale, 1e-30)).max())
        if worst > CLOSE[z.dtype]:
            return f"output {k} is off by {worst:.2e}"
    return ""


def run_file(path: Path) -> dict[str, Any]:
    """One line of the record, without its name."""
    try:
        inputs, want = wanted(path)
    except (NotRunError, DecodeError) as error:
        return {"status": "not_run", "reason": str(error)}
    try:
        with tempfile.TemporaryDirectory(prefix="weft-foreign-") as folder:
            options = weft.Options(budget_s=0.0, cache_dir=Path(folder))
            given = {name: torch.from_numpy(x) for name, x in inputs.items()}
            made = weft.compile(str(path), given, options=options)
        got = [as_array(y) for y in flat(made(*given.values()))]
    except weft.WeftError as error:
        status = "crashed" if error.code.startswith("W9") else "refused"
        return {"status": status, "code": error.code, "reason": str(error).splitlines()[0][:300]}
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return {"status": "crashed", "reason": f"{_short(error)} ({Path(at.filename).name}:{at.lineno})"}
    if why := difference(got, want):
        return {"status": "wrong", "reason": why}
    opaque = sorted({op for op, _, _ in made.record.opaque})
    return {
        "status": "split" if made.record.chosen == NAME else "opaque" if opaque else "right",
        **({"opaque": opaque} if opaque else {}),
    }


def work(task: tuple[str, str]) -> dict[str, Any]:
    """A file of (folder, path in it) as a line of the record."""
    folder, name = task
    began = time.perf_counter()
    path = Path(folder) / name
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if path.stat().st_size > LARGEST:
            found: dict[str, Any] = {"status": "not_run", "reason": "too large"}
        else:
            found = run_file(path)
    return {"record": "case", "suite": SUITE, "case": name, **found, "seconds": round(time.perf_counter() - began, 2)}


def summary_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts over all lines, and the names of what is not right."""
    counts = Counter(x["status"] for x in lines)
    ran = len(lines) - counts["not_run"]
    good = sum(counts[k] for k in RIGHT)
    return {
        "record": "summary", "suite": SUITE, "total": len(lines), "run_by_onnxruntime": ran, "right": good,
        "share": round(good / ran, 4) if ran else 0.0,
        **{k: counts[k] for k in ("opaque", "split", "refused", "wrong", "crashed", "not_run")},
        "others": {x["case"]: x["status"] for x in lines if x["status"] not in (*RIGHT, "not_run")},
    }  # fmt: skip


def main() -> int:
    """Run the files; the exit status says whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the files")
    parser.add_argument("--fetch", action="store_true", help="bring them first")
    parser.add_argument("--match", default="", help="only files whose name contains this; no record is written")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per file")
    parser.add_argument("--no-record", action="store_true")
    given = parser.parse_args()
    if given.fetch:
        fetch(given.folder)
    tasks = [
        (str(given.folder), str(p.relative_to(given.folder))) for p in files(given.folder) if given.match in str(p)
    ]
    if not tasks:
        sys.exit(f"tools.foreign_onnx: no ONNX file in {given.folder}: --fetch brings some")
    lines = []
    for (_, name), outcome in pool.run(work, tasks, jobs=given.jobs, timeout_s=given.timeout):
        if isinstance(outcome, pool.Lost):
            outcome = {"record": "case", "suite": SUITE, "case": name, "status": "crashed", "reason": outcome.reason}
        lines.append(outcome)
        if given.match or outcome["status"] not in (*RIGHT, "not_run"):
            print(json.dumps(outcome), flush=True)
    lines.sort(key=lambda x: str(x["case"]))
    summary = summary_of(lines)
    print(json.dumps(summary), flush=True)
    if not given.no_record and not given.match:
        RECORD.write_text("".join(json.dumps(x) + "\n" for x in (_header(), *lines, summary)))
    return 1 if summary["wrong"] + summary["crashed"] else 0


def _header() -> dict[str, Any]:
    from benchmarks.harness import record

    versions = {"numpy": np.__version__, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    sources = {s.repository: s.commit for s in SOURCES}
    return {
        **record.environment("python -m tools.foreign_onnx FOLDER --fetch"),
        "versions": versions,
        "sources": sources,
    }


if __name__ == "__main__":
    sys.exit(main())
