"""What bounds products of 8-bit floats on a Hopper GPU: variants of the same tile, and without their parts.

    python -m lab.gpu_float8 [--seconds 40] [--out FILE] [--dry]

Per product and tile: the kernel as it is; `woven`, with columns copied in the order of a thread's registers;
`in turn`, with sums that move to f32 while the next are made; and `no adds`, where they move in the last stage alone,
which is wrong and tells what moving costs. cuBLASLt's best algorithms beside them. Times by
`benchmarks.harness.race`. A line as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc, gate
from weft.gemm.spec import Gemm, typed
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.choose import every
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource

CASES = ((4096, 14336, 4096), (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048))
TILES = {
    False: ((256, 128, 1), (128, 192, 1), (128, 128, 1), (128, 128, 2), (256, 96, 2), (128, 96, 2)),
    True: ((128, 256, 0), (128, 192, 0)),
}
"""By whether sums stay in the tensor cores: rows, columns, and how sums move (`TmaConfig.apart`)."""
ADDS = "acc[i][j] += part[j];"


def variants(g: Gemm, facts: GpuFacts) -> Iterator[tuple[str, CudaSource]]:
    """(name, kernel) of one product."""
    p = product(g.problem())
    assert isinstance(p, Product), p
    known = every(p, replace(facts, fast_f8=g.fast))
    for bm, bn, apart in TILES[g.fast]:
        found = [x for x in known if plain(x[1], bm, bn)]
        for _, s in sorted(found, key=lambda x: (x[0], -x[1].stages))[:1]:
            for woven in (True,) if apart == 2 else (False, True):
                own = replace(s, interleaved=woven, two_level=apart)
                name = f"{bm}x{bn}x{s.stages}{' in turn' * (apart == 2)}{' woven' * woven}"
                source = tma.emit(p, own.schedule(), f"k{bm}_{bn}_{apart}{int(woven)}_{g.m}_{g.n}_{g.k}")
                if not isinstance(source, CudaSource):
                    continue
                yield name, source
                if ADDS in source.text:
                    text = source.text.replace(ADDS, f"if (st == last - 1) {ADDS}")
                    yield f"{name} no adds", replace(source, text=text)


def plain(s: TmaConfig, bm: int, bn: int) -> bool:
    """A tile without anything that is tried elsewhere."""
    return (s.bm, s.bn, s.consumers, s.min_ctas) == (bm, bn, 2, 1) and (s.multicast, s.stream_k, s.split) == (
        0,
        False,
        1,
    )


def compiled(nvrtc: Nvrtc, facts: GpuFacts, sources: Sequence[CudaSource]) -> list[CompiledCubin | str]:
    """Cubins, or why not."""
    found: list[CompiledCubin | str] = []
    made = nvrtc.compile_many([CompileJob(s.text, facts.arch, s.flags) for s in sources])
    for source, x in zip(sources, made, strict=True):
        if not isinstance(x, CompiledCubin):
            found.append(str(x).splitlines()[0])
            continue
        refused = gate(x, source.launches[0], facts)
        found.append(refused.reason if isinstance(refused, Declined) else x)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lab.gpu_float8", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="when no further product is begun (40)")
    parser.add_argument("--out", default="", help="file of results, JSON lines")
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    given = parser.parse_args(arguments)
    end = time.monotonic() + given.seconds
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise SystemExit(nvrtc.reason)
    cases = [typed(Gemm(*size, layout="nt", fast=fast), "e4m3") for size in CASES for fast in (False, True)]
    if given.dry:
        facts = profile("h200")
        for g in cases[:2]:
            found = list(variants(g, facts))
            for (name, _), made in zip(found, compiled(nvrtc, facts, [s for _, s in found]), strict=True):
                print(g.name, name, made if isinstance(made, str) else made.resources[0][1], flush=True)
        return
    import torch
    from benchmarks.harness.race import Race

    from weft.device.cuda.cublaslt import find_cublaslt

    torch.zeros(1, device="cuda")
    facts, lt = gpu_facts(None, calibrate=False), find_cublaslt()
    if isinstance(lt, Declined):
        raise SystemExit(lt.reason)
    for g in cases:
        if time.monotonic() > end:
            break
        found = list(variants(g, facts))
        race = Race(g, facts.l2_bytes)
        race._limit = 10.0  # without a part, the result is another
        for (name, source), made in zip(found, compiled(nvrtc, facts, [s for _, s in found]), strict=True):
            if isinstance(made, str):
                print(g.name, name, "refused:", made[:120], flush=True)
            else:
                race.add_kernel(name, source, str(made.path))
        race.add_library(lt, 4)
        done = race.run()
        best = min(min(x.samples_us) for x in done if x.side == "library" and x.samples_us)
        for x in done:
            if x.samples_us:
                us = min(x.samples_us)
                line = {
                    "case": g.name,
                    "side": x.side,
                    "name": x.name,
                    "us": round(us, 2),
                    "ratio": round(best / us, 3),
                }
                line |= {"tflops": round(g.flops / us / 1e6), "error": float(f"{x.error:.2e}")}
                print(json.dumps(line), flush=True)
                if given.out:
                    with Path(given.out).open("a") as out:
                        out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
