"""Operator conformance: the test cases that ship with ONNX, run through Weft.

    python -m tools.conformance [--engine reference|compiled] [--suites node,simple,...] [--match TEXT] [--jobs 2]
                                [--resume] [--no-record]

The oracle is the expected output of each case, with the suite's own tolerances. Per case one JSON line:
status is `native` (passed, every operator taken apart), `fallback` (passed, with opaque operators), `refused`
(a named error), `skipped` (needs a download), `wrong` or `crashed`. Exit status 1 if anything is wrong or crashed.

The compiled engine builds each case's distinct plans of `weft.pipeline.untuned` with the product's compiler and flags;
every one of them must give the expected output. `generated` in a line says how many kernels were generated, `calls` how
many library calls the plan with the fewest has. Cases run in worker processes: one that dies or hangs is `crashed`.
Finished cases are kept under build/conformance; `--resume` takes them from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from tools import pool
from weft.errors import UnsupportedError, WeftError
from weft.frontends.imported import Imported, OpaqueUse
from weft.frontends.onnx.importer import ExampleInput
from weft.frontends.onnx.opaque import RANDOM
from weft.frontends.onnx.read import read_model, read_partition
from weft.frontends.onnx.tensors import DTYPES
from weft.frontends.onnx.trial import session_of
from weft.generate.library.opaque_onnx import run_onnx
from weft.ir.attrs import OpaqueAttrs
from weft.ir.reference import evaluate
from weft.ir.types import Array, DType
from weft.tune.tolerance import TOLERANCES

SUITES = {
    "node": "conformance-onnx-node",
    "simple": "conformance-onnx-simple",
    "pytorch-operator": "conformance-onnx-pytorch-operator",
    "pytorch-converted": "conformance-onnx-pytorch-converted",
}
EMULATED = {"bfloat16": DType.BF16, "float8_e4m3fn": DType.F8E4M3, "float8_e5m2": DType.F8E5M2}
"""What NumPy lacks, by the names that ONNX's package gives it."""
PROGRESS = Path("build/conformance")
CACHE = PROGRESS / "cache"
"""Of compiled kernels: apart from the user's own."""


@dataclass(frozen=True)
class Run:
    """The outputs of one data set, by way of computing them, and what is worth noting."""

    outputs: Mapping[str, Sequence[Array]]
    notes: Mapping[str, int]


Engine = Callable[[Imported, Sequence[Array]], Run]


class RefusedError(Exception):
    """The case cannot enter Weft, for a reason that is named."""


def opaque(attrs: OpaqueAttrs, inputs: Sequence[Array]) -> Sequence[Array]:
    """Opaque operators through ONNX Runtime."""
    return run_onnx(attrs.payload, inputs)


def reference(imported: Imported, inputs: Sequence[Array]) -> Run:
    """Primitive by primitive, in NumPy."""
    return Run({"reference": evaluate(imported.graph, inputs, opaque=opaque)}, {})


def compiled(imported: Imported, inputs: Sequence[Array], ways: Sequence[str] = ()) -> Run:
    """Through the whole compiler, without measuring: every distinct plan (in some ways only), linked and run."""
    import torch

    from weft.generate.library.execute import TORCH_DTYPE
    from weft.kernels.source import LibraryCall
    from weft.options import Options
    from weft.pipeline.finish import as_array as to_numpy
    from weft.pipeline.untuned import WAYS, build

    types = [imported.graph.type_of(i) for i in imported.graph.inputs]
    tensors = [torch.from_numpy(np.array(x)).to(TORCH_DTYPE[t.dtype]) for x, t in zip(inputs, types, strict=True)]
    made = build(imported, Options(cache_dir=CACHE), ways or WAYS)
    outputs = {way: [to_numpy(y) for y in run(*tensors)] for way, run in made.executables.items()}
    calls = min(sum(isinstance(s.kernel, LibraryCall) for s in e.plan.steps) for e in made.executables.values())
    return Run(outputs, {"plans": len(outputs), "generated": made.generated, "calls": calls})


ENGINES: dict[str, Engine] = {"reference": reference, "compiled": compiled}


def as_array(value: Any) -> tuple[DType, Array]:
    """A value of a test case as ours: types that NumPy lacks become exact float32.

    Raises:
        RefusedError: sequences, optionals, strings and element types outside of the set.
    """
    if isinstance(value, onnx.TensorProto):
        dtype = DTYPES.get(value.data_type)
        if dtype is None:
            raise RefusedError(f"element type {onnx.TensorProto.DataType.Name(value.data_type)}")
        array = numpy_helper.to_array(value)
        return dtype, np.asarray(array.astype(np.float32) if dtype.is_emulated else array)
    if not isinstance(value, (np.ndarray, np.generic)):
        raise RefusedError(f"value of kind {type(value).__name__}")
    array = np.asarray(value)
    if array.dtype.name in EMULATED:
        return EMULATED[array.dtype.name], array.astype(np.float32)
    try:
        return DType.from_numpy(array.dtype), array
    except KeyError:
        raise RefusedError(f"element type {array.dtype}") from None


def data_sets(case: Any, model: onnx.ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
    """(inputs, outputs) of each data set."""
    if case.data_sets is not None:
        yield from case.data_sets
        return
    for folder in sorted(Path(case.model_dir).glob("test_data_set_*")):
        found: list[list[Any]] = []
        for kind, infos in (("input", model.graph.input), ("output", model.graph.output)):
            values = []
            for k in range(len(list(folder.glob(f"{kind}_*.pb")))):
                info = infos[k].type.WhichOneof("value")
                if info != "tensor_type":
                    raise RefusedError(f"value of kind {info}")
                tensor = onnx.TensorProto()
                tensor.ParseFromString((folder / f"{kind}_{k}.pb").read_bytes())
                values.append(tensor)
            found.append(values)
        yield found[0], found[1]


def compare(got: Sequence[Array], want: Sequence[tuple[DType, Array]], rtol: float, atol: float) -> str:
    """Empty if the outputs match; else the first difference."""
    if len(got) != len(want):
        return f"{len(got)} outputs, expected {len(want)}"
    for k, (y, (dtype, z)) in enumerate(zip(got, want, strict=True)):
        if y.dtype != dtype.numpy or y.shape != z.shape:
            return f"output {k} is {y.dtype}{y.shape}, expected {dtype.numpy}{z.shape}"
        try:
            # bf16: two units in the last place, as onnx.backend.test.runner does
            np.testing.assert_allclose(
                cast("Any", y), cast("Any", z), rtol=max(rtol, 2**-6) if dtype is DType.BF16 else rtol, atol=atol
            )
        except AssertionError as error:
            return f"output {k}: {' '.join(str(error).split())[:200]}"
    return ""


def more_exact(
    imported: Imported, inputs: Sequence[Array], got: Sequence[Array], want: Sequence[tuple[DType, Array]]
) -> bool:
    """True where the expected floats are themselves rounding noise: float64 agrees with them, and more with ours.

    Some cases were computed in f16 or f32 step by step and ask for more digits than that leaves. The float64
    evaluation must confirm the expected output to eight units in the last place of its largest element, so a
    mistake of the importer cannot pass here; ours must be at least as close to it, element by element.
    """
    exact = evaluate(imported.graph, inputs, precise=True, opaque=opaque)
    for y, (dtype, z), e in zip(got, want, exact, strict=True):
        if not dtype.is_float or y.dtype != z.dtype or y.shape != z.shape:
            if not np.array_equal(y, z):
                return False
            continue
        if not z.size:
            continue
        mine, theirs = (np.abs(np.asarray(v, np.float64) - np.asarray(e, np.float64)) for v in (y, z))
        eps = 2 * TOLERANCES[dtype].unit if dtype.is_emulated else float(np.finfo(cast("Any", z.dtype)).eps)
        # one unit of slack: both are rounded to their own type
        if not (theirs <= 8 * eps * np.abs(e).max()).all() or not (mine <= theirs + eps * np.abs(e)).all():
            return False
    return True


def in_two(
    raw: bytes, examples: Sequence[ExampleInput], inputs: Sequence[Array], engine: Engine, error: UnsupportedError
) -> tuple[Imported, Run]:
    """What `weft.compile` makes of a model that no graph holds: a partition by the engine, the rest by ONNX Runtime.

    Raises:
        UnsupportedError: `error`, where ONNX Runtime does not run it.
    """
    try:
        cut, _ = read_partition(raw, examples=examples)
        if cut.operators.keys() & RANDOM:
            raise error  # no two runs are alike, nor is what is expected
        session = session_of(cut.rest, 1)
        run = engine(cut.compiled, inputs) if cut.compiled.graph.outputs else Run({"rest": []}, {})
        outputs: dict[str, Sequence[Array]] = {}
        for way, ours in run.outputs.items():
            fed = zip(session.get_inputs(), cut.feed(inputs, ours), strict=True)
            outputs[way] = cut.gather(ours, session.run(None, {x.name: v for x, v in fed}))
    except Exception as failed:  # ONNX Runtime's classes share no base
        raise error from failed
    left = tuple(OpaqueUse(op, "of the second partition", n) for op, n in cut.operators.items())
    return replace(cut.compiled, opaque=(*cut.compiled.opaque, *left)), Run(outputs, run.notes)


def run_case(case: Any, engine: Engine) -> dict[str, Any]:
    """One line of the record, without suite and name."""
    if case.url and not (case.model_dir and Path(case.model_dir).is_dir()):
        return {"status": "skipped", "reason": "needs a download"}
    imported = None
    notes: dict[str, Any] = {}
    try:
        raw = (
            case.model.SerializeToString()
            if case.model is not None
            else (Path(case.model_dir) / "model.onnx").read_bytes()
        )
        model = case.model if case.model is not None else onnx.load_from_string(raw)
        for inputs, outputs in data_sets(case, model):
            given = [as_array(v) for v in inputs]
            want = [as_array(v) for v in outputs]
            # inputs that have defaults are graph inputs of older files too; a case may give fewer
            examples = [ExampleInput(d, a.shape, a) for d, a in given]
            in_parts = False
            try:
                imported, _ = read_model(raw, examples=examples)
                run = engine(imported, [a for _, a in given])
            except UnsupportedError as error:
                in_parts = True
                imported, run = in_two(raw, examples, [a for _, a in given], engine, error)
            notes.update(run.notes)
            for way, got in run.outputs.items():
                problem = compare(got, want, case.rtol, case.atol)
                if problem and not in_parts and more_exact(imported, [a for _, a in given], got, want):
                    notes["note"] = "the expected output is rounding noise: closer to float64 than it is"
                elif problem:
                    return {"status": "wrong", "reason": f"{way}: {problem}", "opaque": [u.op for u in imported.opaque]}
    except RefusedError as error:
        return {"status": "refused", "reason": f"{error}: outside of Weft's closed set"}
    except WeftError as error:
        kind = "crashed" if error.code.startswith("W9") else "refused"
        return {"status": kind, "reason": str(error).splitlines()[0][:300], "code": error.code}
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "status": "crashed",
            "reason": f"{type(error).__name__}: {str(error)[:200]} ({Path(trace.filename).name}:{trace.lineno})",
        }
    if imported is None:
        return {"status": "skipped", "reason": "no data"}
    if imported.opaque:
        line: dict[str, Any] = {"status": "fallback", "opaque": {u.op: u.reason for u in imported.opaque}}
    else:
        line = {"status": "native"}
    return {**line, **notes}


@cache
def cases_of(kind: str) -> Mapping[str, Any]:
    """The cases of a suite by name, without those for other devices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {c.name: c for c in load_model_tests(kind=kind) if "_cuda" not in c.name}


def work(task: tuple[str, str, str]) -> dict[str, Any]:
    """One case of (suite, name, engine) as a line of the record."""
    kind, name, engine = task
    started = time.perf_counter()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        line = run_case(cases_of(kind)[name], ENGINES[engine])
    return _line(kind, name, line, time.perf_counter() - started)


def _line(kind: str, name: str, found: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    return {"record": "case", "suite": SUITES[kind], "case": name, **found, "seconds": round(seconds, 3)}


def run_suite(
    kind: str, engine: str, names: Sequence[str], *, jobs: int, timeout_s: int, progress: Path | None, resume: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Some cases of a suite, and its summary. `progress` is a file of finished cases, read again by `resume`."""
    done: dict[str, dict[str, Any]] = {}
    if progress is not None:
        progress.parent.mkdir(parents=True, exist_ok=True)
        if resume and progress.exists():
            found = [json.loads(x) for x in progress.read_text().splitlines()]
            done = {x["case"]: x for x in found if x["case"] in names}
        else:
            progress.write_text("")
    tasks = [(kind, name, engine) for name in names if name not in done]
    for (_, name, _), outcome in pool.run(work, tasks, jobs=jobs, timeout_s=timeout_s):
        if isinstance(outcome, pool.Lost):
            outcome = _line(kind, name, {"status": "crashed", "reason": outcome.reason}, 0.0)
        done[name] = outcome
        if progress is not None:
            with progress.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
    lines = [done[name] for name in names]
    return lines, summary_of(kind, lines)


def summary_of(kind: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts over the lines of a suite."""
    counts = Counter(x["status"] for x in lines)
    found: dict[str, Any] = {
        "record": "summary",
        "suite": SUITES[kind],
        "total": len(lines),
        "passed": counts["native"] + counts["fallback"],
        **{k: counts[k] for k in ("native", "fallback", "refused", "skipped", "wrong", "crashed")},
    }
    if any("plans" in x for x in lines):
        native = [x for x in lines if x["status"] == "native"]
        found["without_calls"] = sum(x["calls"] == 0 for x in native)
        found["kernels"] = sum(x.get("generated", 0) for x in lines)
    return found


def header(engine: str, kind: str) -> dict[str, Any]:
    """The header of a record."""
    from benchmarks.harness import record

    versions = {"numpy": np.__version__, "onnx": onnx.__version__}
    try:
        import onnxruntime

        versions["onnxruntime"] = onnxruntime.__version__
    except ImportError:
        pass
    head = record.environment(f"python -m tools.conformance --engine {engine} --suites {kind}")
    return {**head, "versions": versions, "engine": engine}


def main() -> int:
    """Run the suites; the exit status says whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="reference")
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--timeout", type=int, default=60, help="seconds per case")
    parser.add_argument("--record", type=Path, default=Path("benchmarks/results/cpu"), help="folder of the records")
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--resume", action="store_true", help="keep what an interrupted run of this engine finished")
    chosen = parser.parse_args()
    bad = 0
    for kind in chosen.suites.split(","):
        names = [name for name in cases_of(kind) if chosen.match in name]
        lines, summary = run_suite(
            kind,
            chosen.engine,
            names,
            jobs=chosen.jobs,
            timeout_s=chosen.timeout,
            progress=None if chosen.match else PROGRESS / f"{SUITES[kind]}-{chosen.engine}.jsonl",
            resume=chosen.resume,
        )
        shown = lines if chosen.match else [x for x in lines if x["status"] in ("wrong", "crashed")]
        for line in (*shown, summary):
            print(json.dumps(line), flush=True)
        bad += summary["wrong"] + summary["crashed"]
        if not chosen.no_record and not chosen.match:
            chosen.record.mkdir(parents=True, exist_ok=True)
            text = "\n".join(json.dumps(x) for x in (header(chosen.engine, kind), *lines, summary))
            (chosen.record / f"{SUITES[kind]}.jsonl").write_text(text + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
