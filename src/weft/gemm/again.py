"""A kernel against a library on this GPU: for `weft gemm --against`, and for the script in a product's folder.

Both sides run in a measuring worker, are verified by the gate of all kernels and timed in its rounds, with everything
that they read or write rotating through more than the L2 cache.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from weft.device.cuda.cublaslt import MOST
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import DeviceError, WeftError
from weft.gemm import cutlass
from weft.gemm.folder import read
from weft.gemm.library import ABSENT, contenders, found_library, schedule_of
from weft.gemm.search import Outcome, SearchResult
from weft.gemm.spec import Gemm
from weft.gemm.worker import MODULE
from weft.ir.declined import Declined
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource, Kernel, Schedule
from weft.options import Options
from weft.tune.cuda_timing import CUDA_POLICY
from weft.tune.store import Database
from weft.tune.transport import ProcessTransport, Transport
from weft.tune.tuner import ProblemTrial, Tuner

ROTATED = replace(CUDA_POLICY, cache="rotated")
_THREADS = 2
"""Of the worker's host."""


def measured(
    g: Gemm,
    kernels: Sequence[tuple[Schedule, Kernel]],
    facts: GpuFacts,
    nvrtc: Nvrtc | None,
    cache: Path | None,
    *,
    tf32: bool,
    transport: Transport | None = None,
) -> dict[Schedule, Measurement]:
    """Kernels of one product, verified and timed against each other in a worker; those that do not exist are left out.

    Results are judged on finite values: what a library makes of NaN is its own affair.

    Raises:
        DeviceError: no worker can be started, or the GPU computes wrongly [W301].
    """
    problem = g.problem()
    problem = replace(problem, key=f"finite\n{problem.key}", finite=True)
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    options = Options(device=f"cuda:{device}", allow_tf32=tf32, allow_fast_f8=g.fast, cache_dir=cache)
    worker = transport or ProcessTransport(_THREADS, environ=os.environ, module=MODULE)
    with (
        Database.open(cache) as database,
        Tuner(options, facts, database, compiler=nvrtc, transport=worker, policy=ROTATED) as tuner,
    ):
        trial = ProblemTrial(problem, [(s, kernel, None) for s, kernel in kernels])
        return {m.schedule: m for m in tuner.measure([trial]) if ABSENT not in m.error}


def against_cublas(
    g: Gemm,
    source: CudaSource,
    facts: GpuFacts,
    nvrtc: Nvrtc,
    cache: Path | None,
    *,
    tf32: bool = False,
    transport: Transport | None = None,
) -> dict[str, object]:
    """A kernel and the best of the heuristic's first 16 algorithms in one interleaved run, as JSON.

    Raises:
        DeviceError: there is no cuBLASLt, or the GPU fails [W301].
    """
    version = found_library().version
    calls = contenders(g, tf32=tf32)
    names = {schedule_of(k): f"algorithm {k}" for k in range(MOST)}
    found = measured(g, [(source.schedule, source), *calls], facts, nvrtc, cache, tf32=tf32, transport=transport)
    count = sum(s in found for s in names)
    return {"peer": f"cuBLASLt {version}, {count} algorithms", **_told(source, names, found)}


def against_cutlass(
    g: Gemm,
    source: CudaSource,
    facts: GpuFacts,
    nvrtc: Nvrtc,
    cache: Path | None,
    *,
    tf32: bool = False,
    transport: Transport | None = None,
) -> dict[str, object]:
    """A kernel and the best of CUTLASS's for the product in one interleaved run, as JSON; they are built first.

    Raises:
        DeviceError: there is no CUTLASS or no nvcc, its kernels do not take the product or the GPU, none could be
            built, or the GPU fails [W301].
    """
    peer = cutlass.find_cutlass()
    if isinstance(peer, Declined):
        raise DeviceError(problem=f"nothing to compare with: {peer.reason}")
    refusal = cutlass.declined(g, arch=facts.arch, tf32=tf32)
    if refusal is not None:
        raise DeviceError(problem=f"nothing of CUTLASS to compare with: {refusal.reason}")
    with tempfile.TemporaryDirectory(prefix="weft-cutlass-") as folder:
        calls, unbuilt = cutlass.contenders(g, peer, cache or Path(folder))
        if not calls:
            raise DeviceError(problem=f"none of CUTLASS's kernels could be built: {next(iter(unbuilt.values()))}")
        names = cutlass.names_of([*(s for s, _ in calls), *unbuilt])
        found = measured(g, [(source.schedule, source), *calls], facts, nvrtc, cache, tf32=tf32, transport=transport)
    told = {"peer": f"CUTLASS {peer.version}, {len(calls)} kernels", **_told(source, names, found)}
    refused = told["refused"]
    assert isinstance(refused, dict)
    refused.update({f"library {names[s]}": why for s, why in unbuilt.items()})
    return told


def _told(
    source: CudaSource, names: Mapping[Schedule, str], found: Mapping[Schedule, Measurement]
) -> dict[str, object]:
    """The kernel beside the best of a library's: what was refused, both medians, and their ratio."""
    sides = {"weft": {source.schedule: str(source.schedule)}, "library": names}
    told: dict[str, object] = {
        "refused": {
            f"{side} {name}": f"{m.verdict.value}: {m.error}"
            for side, own in sides.items()
            for s, name in own.items()
            if (m := found.get(s)) is not None and m.verdict is not Verdict.OK
        },
    }
    best: dict[str, Measurement] = {}
    for side, own in sides.items():
        right = [found[s] for s in own if s in found and found[s].verdict is Verdict.OK]
        if right:
            first = best[side] = min(right, key=lambda m: m.median_us)
            told[side] = {
                "name": own[first.schedule],
                "median_us": round(first.median_us, 4),
                "samples_us": [round(us, 4) for us in first.samples_us],
                "error_of_limit": float(f"{first.rmse:.3e}"),
            }
    told["ratio"] = round(best["library"].median_us / best["weft"].median_us, 4) if len(best) == 2 else None
    return told


AGAINST = {"cublas": against_cublas, "cutlass": against_cutlass}
"""What a kernel can be compared with."""


def library_alone(
    g: Gemm, facts: GpuFacts, cache: Path | None = None, *, tf32: bool = False, transport: Transport | None = None
) -> SearchResult:
    """The library's algorithms for a product, timed against each other.

    Raises:
        DeviceError: there is no cuBLASLt, or the GPU fails [W301].
    """
    start = time.monotonic()
    found_library()
    calls = contenders(g, tf32=tf32, most=min(MOST, g.most))
    found = measured(g, calls, facts, None, cache, tf32=tf32, transport=transport)
    outcomes = [_outcome(found[s]) for s, _ in calls if s in found]
    right = [o for o in outcomes if o.median_us < math.inf]
    best = min(right, key=lambda o: o.median_us, default=None)
    made = SearchResult(g, facts.name, len(outcomes), outcomes, best, measured=True)
    made.seconds = time.monotonic() - start
    return made


def _outcome(m: Measurement) -> Outcome:
    return Outcome(m.schedule, math.nan, m.verdict.value, m.samples_us, m.median_us, m.error)


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
