"""How long `weft fuse` takes for one pair, without search, on one core: twenty pairs of our own best-effort kernels.

    python -m benchmarks.fuse_seconds [--rounds 3] [--core 0]

The kernels are those of `benchmarks/best_effort` in alphabetical order: each second one stands as the best-effort side
beside a product by TMA and wgmma, and each as the latency-critical side of the next one, the first ten pairs of either
sort.
Measured is what the command does once Python's modules are there: both sources are read, judged and wrapped, the fused
kernel, what is left of the job and the kernels alone are compiled for all architectures, and the folder is written. The
processes in which NVRTC runs are included. The least of the rounds is recorded, as seconds of the clock and of the
core. A pair that has no room in one CTA is recorded as declined, with what it took to say so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import benchmarks.best_effort
from benchmarks.harness.record import Record
from weft.colocate.fuse import Pair, fuse_pair, write
from weft.errors import KernelDeclinedError

HOME = Path(benchmarks.best_effort.__path__[0])
PRODUCT = 'product = "M=4096 N=1024 K=1024"\nlayout = "nt"\ndtype = "f16"\nepilogue = "none"\n'
PAIRS = 10
"""Of either sort."""


def kernels() -> list[Path]:
    """Our own kernels, by name."""
    return sorted(HOME.glob("*/*.toml"))


def name(path: Path) -> str:
    """`histo`, or `histo-count` where a folder has several."""
    several = len(list(path.parent.glob("*.toml"))) > 1
    return f"{path.parent.name}-{path.stem}" if several else path.parent.name


def pairs(product: Path) -> Iterator[tuple[str, Path, Path]]:
    """Name, latency-critical and best-effort kernel."""
    every = kernels()
    for path in every[::2][:PAIRS]:
        yield f"product + {name(path)}", product, path
    neighbours = [(lc, be) for lc, be in itertools.pairwise(every) if lc.parent != be.parent]
    for lc, be in neighbours[:PAIRS]:
        yield f"{name(lc)} + {name(be)}", lc, be


def used() -> float:
    """Seconds of the processor that this process and those that it started have had."""
    both = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in both)


def timed(lc: Path, be: Path, out: Path) -> tuple[float, float, Pair | str]:
    """Seconds of the clock and of the core, and the pair or why there is none."""
    clock, core = time.perf_counter(), used()
    found: Pair | str
    try:
        found = fuse_pair(lc, [be])
        write(found, out)
    except KernelDeclinedError as error:
        found = str(error).splitlines()[0]
    return time.perf_counter() - clock, used() - core, found


def told(runs: list[tuple[float, float, Pair | str]]) -> dict[str, object]:
    """What a row says of a pair's rounds."""
    pair = runs[0][2]
    row: dict[str, object] = {
        "seconds": round(min(x[0] for x in runs), 3),
        "core_seconds": round(min(x[1] for x in runs), 3),
    }
    if isinstance(pair, str):
        return {**row, "declined": pair}
    fused = [x.resources for x in pair.compiled if x.file == "fused"]
    return {
        **row,
        "read_seconds": round(min(x[2].seconds["read"] for x in runs if isinstance(x[2], Pair)), 3),
        "architectures": sorted({x.arch for x in pair.compiled}),
        "kernels": len(pair.compiled),
        "spilled_bytes": sum(x.spill_stores + x.spill_loads for x in fused),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each pair; the least time counts")
    parser.add_argument("--core", type=int, default=0, help="the core that all of it runs on")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    record = Record("cpu", "fuse-seconds")
    with tempfile.TemporaryDirectory() as folder:
        product = Path(folder) / "product.toml"
        product.write_text(PRODUCT)
        every = list(pairs(product))
        timed(every[0][1], every[0][2], Path(folder) / "first")  # imports
        for case, lc, be in every:
            with record.measuring(case=case):
                runs = [timed(lc, be, Path(folder) / "out") for _ in range(options.rounds)]
                record.add({"record": "case", "suite": "fuse-seconds", "case": case, **told(runs)})
    record.close()


if __name__ == "__main__":
    main()
