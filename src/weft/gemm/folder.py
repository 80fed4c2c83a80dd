"""The folder of one product: kernel, parameters, timings, plot, and a script that runs the kernel again.

cuda.cu           the best kernel's text, laid out for a reader (`library.json` where a library call is the best)
kernel.json       the same with how it is launched, as `weft.kernels.codec` has it
parameters.json   the product, the best configuration, times, what was asked and what was found
timings.jsonl     a line for every configuration: estimate, verdict, all samples
search.svg        estimate and time over rank
script.py         runs the kernel again on a GPU: checks it, and times it against cuBLASLt
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from weft.errors import ArtifactError
from weft.gemm.epilogue import epilogue
from weft.gemm.plot import plot
from weft.gemm.search import Outcome, SearchResult
from weft.gemm.spec import Gemm, Search, layout_of, typed
from weft.generate.written import written_in
from weft.kernels.codec import kernel_from_json, kernel_to_json
from weft.kernels.pretty import pretty
from weft.kernels.source import CudaSource

SCRIPT = '''"""Runs the kernel beside this file on an NVIDIA GPU: checks it, and times it against cuBLASLt."""

from pathlib import Path

from weft.gemm.again import again

if __name__ == "__main__":
    again(Path(__file__).resolve().parent)
'''


def write(root: Path, result: SearchResult, suffix: str = "") -> Path:
    """Write the folder of a search beneath `root`; what an earlier search left there is replaced.

    Raises:
        ArtifactError: it cannot be written [W401].
    """
    folder = root / (result.gemm.name + suffix)
    files = {
        "parameters.json": json.dumps(parameters(result), indent=2, sort_keys=True, allow_nan=False) + "\n",
        "timings.jsonl": "".join(
            json.dumps(outcome_json(o, rank), sort_keys=True, allow_nan=False) + "\n"
            for rank, o in enumerate(result.outcomes, 1)
        ),
        "search.svg": plot(result),
    }
    if result.kernel is not None:
        kernel = json.dumps(kernel_to_json(result.kernel), allow_nan=False) + "\n"
        files |= {"cuda.cu": pretty(result.kernel.text), "kernel.json": kernel, "script.py": SCRIPT}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        for stale in {"cuda.cu", "script.py", "kernel.json"} - files.keys():
            (folder / stale).unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(
            where=str(folder), problem=f"it cannot be written: {error.strerror}", remedy="choose another place by -o"
        ) from None
    return folder


def parameters(result: SearchResult) -> dict[str, object]:
    """What was asked and what was found, as JSON."""
    g, best = result.gemm, result.best
    return {
        "gemm": {
            "m": g.m, "n": g.n, "k": g.k, "layout": g.layout, "dtype": g.types, "epilogue": g.epilogue.text,
            **({"fast": g.fast} if g.dtype.is_float8 else {}), "constant": g.constant, "t": g.most,
            "O": g.search.value, "search": g.search.name.lower(),
        },
        "device": result.device,
        "feasible": result.feasible,
        "tried": len(result.outcomes),
        "table": result.table or None,
        "measured": result.measured,
        "seconds": {"search": round(result.seconds, 3), **{k: round(s, 3) for k, s in result.stage_s.items()}},
        "best": outcome_json(best, result.outcomes.index(best) + 1) if best is not None else None,
        "written_in": written_in(str(result.kernel.schedule)) if result.kernel is not None else (),
        "launches": [
            {"grid": x.grid, "block": x.block, "shared_bytes": x.shared_bytes, "cluster": x.cluster}
            for x in (result.kernel.launches if result.kernel is not None else ())
        ],
        "tflops": round(result.tflops, 2),
        "against": result.against or None,
    }  # fmt: skip


def outcome_json(o: Outcome, rank: int) -> dict[str, object]:
    """One configuration; numbers that JSON lacks are null."""
    return {
        "rank": rank,
        "template": o.template,
        "parameters": {k: list(v) if isinstance(v, tuple) else v for k, v in o.schedule.params},
        "modelled_us": _number(o.modelled_us),
        "state": o.state,
        "median_us": _number(o.median_us),
        "samples_us": [round(x, 4) for x in o.samples_us],
        "registers": o.registers or None,
        "note": o.note[:500],
    }


def _number(x: float) -> float | None:
    return round(x, 4) if math.isfinite(x) else None


def read(folder: Path) -> tuple[Gemm, CudaSource]:
    """The product and the kernel of a folder.

    Raises:
        ArtifactError: a file is missing or is not what `write` writes [W401].
    """
    try:
        asked = json.loads((folder / "parameters.json").read_text(encoding="utf-8"))["gemm"]
        source = kernel_from_json(json.loads((folder / "kernel.json").read_text(encoding="utf-8")))
        g = Gemm(
            int(asked["m"]), int(asked["n"]), int(asked["k"]), int(asked["t"]), Search(asked["O"]),
            layout_of(asked["layout"]), epilogue=epilogue(asked["epilogue"]), constant=bool(asked["constant"]),
            fast=bool(asked.get("fast", False)),
        )  # fmt: skip
        g = typed(g, str(asked["dtype"]))
        text = (folder / "cuda.cu").read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(
            where=folder.name,
            problem=f"no readable kernel in it: {type(error).__name__}",
            remedy="`weft gemm` writes it",
        ) from None
    if not isinstance(source, CudaSource):
        raise ArtifactError(where=folder.name, problem="its kernel is a library call", remedy="there is nothing to run")
    return g, replace(source, text=text)
