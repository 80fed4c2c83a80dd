"""A kernel against cuBLASLt on this GPU: for `weft gemm --against cublas`, and for the script in a product's folder."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch

from weft.device.cuda.cublaslt import MOST, CublasLt, find_cublaslt
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import DeviceError, WeftError
from weft.gemm.folder import read
from weft.gemm.race import Contender, Race
from weft.gemm.search import Found, Outcome, refusal
from weft.gemm.spec import Gemm
from weft.ir.declined import Declined
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource, Schedule


def against_cublas(
    g: Gemm, source: CudaSource, facts: GpuFacts, nvrtc: Nvrtc, cache: Path | None, *, tf32: bool = False
) -> dict[str, object]:
    """A kernel and the best of the heuristic's first 16 algorithms in one interleaved run, as JSON.

    Raises:
        DeviceError: there is no cuBLASLt, or the GPU fails [W301].
    """
    lt = _library()
    race = Race(g, facts.l2_bytes, tf32=tf32)
    made = nvrtc.compile(source.text, arch=facts.arch, flags=source.flags, cache_dir=cache)
    why = refusal(made, source, facts)
    if why:
        raise DeviceError(where=source.entry, problem=f"the kernel is not fit for {facts.name}: {why}")
    race.add_kernel(str(source.schedule), source, str(made.path))
    race.add_library(lt, MOST, tf32=tf32)
    found = race.run()
    told: dict[str, object] = {
        "peer": f"cuBLASLt {lt.version}, {len(found) - 1} algorithms",
        "refused": {f"{x.side} {x.name}": x.refused for x in found if x.refused},
    }
    best = {}
    for side in ("weft", "library"):
        own = [x for x in found if x.side == side and not x.refused]
        if own:
            first = best[side] = min(own, key=lambda x: x.median_us)
            told[side] = {
                "name": first.name,
                "median_us": round(first.median_us, 4),
                "samples_us": [round(us, 4) for us in first.samples_us],
                "error": float(f"{first.error:.3e}"),
            }
    told["ratio"] = round(best["library"].median_us / best["weft"].median_us, 4) if len(best) == 2 else None
    return told


def library_alone(g: Gemm, facts: GpuFacts, *, tf32: bool = False) -> Found:
    """The library's algorithms for a product, timed against each other.

    Raises:
        DeviceError: there is no cuBLASLt, or the GPU fails [W301].
    """
    start = time.monotonic()
    race = Race(g, facts.l2_bytes, tf32=tf32)
    race.add_library(_library(), min(MOST, g.most), tf32=tf32)
    outcomes = [_outcome(x) for x in race.run()]
    right = [o for o in outcomes if o.median_us < math.inf]
    best = min(right, key=lambda o: o.median_us, default=None)
    found = Found(g, facts.name, len(outcomes), outcomes, best, measured=True)
    found.seconds = time.monotonic() - start
    return found


def _outcome(x: Contender) -> Outcome:
    schedule = Schedule("cublaslt", (("algorithm", int(x.name.split()[-1])),))
    state = Verdict.OK if not x.refused else Verdict.WRONG if "wrong" in x.refused else Verdict.RESOURCE
    return Outcome(schedule, math.nan, state.value, tuple(x.samples_us), x.median_us, x.refused)


def _library() -> CublasLt:
    found = find_cublaslt()
    if isinstance(found, Declined):
        raise DeviceError(problem=f"nothing to compare with: {found.reason}")
    return found


def again(folder: Path) -> None:
    """Run the kernel of a folder; prints JSON. For the folder's script: errors end in their text and exit code."""
    try:
        if not torch.cuda.is_available():
            raise DeviceError(problem="this torch sees no NVIDIA GPU")
        torch.zeros(1, device="cuda")
        g, source = read(folder)
        facts, nvrtc = gpu_facts(None, calibrate=False), find_nvrtc()
        if isinstance(nvrtc, Declined):
            raise DeviceError(problem=f"the kernel cannot be compiled: {nvrtc.reason}")
        tf32 = g.dtype.value == "f32" and source.schedule.param("template") not in ("simt", "gemv")
        with tempfile.TemporaryDirectory(prefix="weft-gemm-") as cache:
            told = against_cublas(g, source, facts, nvrtc, Path(cache), tf32=tf32)
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    except WeftError as error:
        sys.stderr.write(f"weft: {error}\n")
        raise SystemExit(error.exit_code) from None
