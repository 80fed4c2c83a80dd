"""The matrix of pairs from the record of `benchmarks.gpu_pairs`, and a pair's row for the tuning database.

    python -m benchmarks.pairs_matrix [FILE] [-o pairs.html]

Without FILE the record `colocate-pairs.jsonl` of the H200. Pairs that failed stand in the matrix as not fused, with
what was said.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import RESULTS
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.errors import ArtifactError
from weft.generate.cuda.role.role import RoleSource
from weft.kernels.candidate import Problem
from weft.kernels.colocation import FusedSource, FusionShape, RoleRegisters
from weft.kernels.pairs import PairKey, PairRecord, PairSummary
from weft.report import render_pairs
from weft.tune.cuda_site import driver_version
from weft.tune.pairs import cubin_digest, key_of

SUITE = "colocate-pairs"


def row_of(
    names: tuple[str, str],
    problem: Problem,
    lc: RoleSource,
    be: Sequence[RoleSource],
    made: FusedSource,
    cubin: Path | None,
    facts: GpuFacts,
    compiler: Nvrtc,
) -> PairRecord:
    """A fused kernel's row for the database: its key, and no times yet (`weft.tune.pairs.timed` adds them).

    Args:
        names: of LC and BE, for people.
        problem: LC's.
        lc: what was fused.
        be: the job's stages.
        made: the fused kernel.
        cubin: its machine code; None: it is not compiled yet.
        facts: the GPU.
        compiler: that compiled it.

    Raises:
        OSError: the machine code cannot be read.
    """
    key = key_of(
        problem, be, made, gpu=facts.name, driver=driver_version(), compiler=f"{compiler.identity()} {facts.arch}"
    )
    return PairRecord(key, *names, lc.schedule, made.shape, cubin_digest(cubin) if cubin else "")


def summaries(rows: Iterable[Mapping[str, Any]]) -> list[PairSummary]:
    """Pairs of a record; the newest row of each counts.

    Raises:
        ArtifactError: a row of a pair that is none [W401].
    """
    environment: Mapping[str, Any] = {}
    found: dict[str, PairSummary] = {}
    for row in rows:
        if row.get("record") == "environment":
            environment = row
        elif row.get("record") == "case" and row.get("suite") == SUITE:
            try:
                found[str(row["case"])] = _summary(row, environment)
            except (KeyError, TypeError, ValueError) as error:
                raise ArtifactError(
                    problem=f"a row of a pair that is none: {error!r}",
                    remedy="measure it again with `python -m benchmarks.gpu_pairs`",
                ) from None
    return list(found.values())


def _summary(row: Mapping[str, Any], environment: Mapping[str, Any]) -> PairSummary:
    lc, slash, be = str(row["case"]).rpartition("/")
    if not slash:
        raise ValueError(f"{row['case']!r} is no pair")
    gpu, driver = (str(row.get(k, environment.get(k, "unknown"))) for k in ("device", "driver"))
    if "failed" in row:
        return PairSummary(lc, be, gpu, driver, (), 0, 1, str(row["failed"]))
    if not row["kept"]:
        measured = row.get("measured_ratio")
        said = row.get("wrong") or row.get("note") or f"{measured} of the best peer"
        return PairSummary(lc, be, gpu, driver, (), int(measured is not None), int(measured is None), str(said))
    ratio = float(row["ratio"])
    if not 0 < ratio < math.inf:
        raise ValueError(f"a ratio of {ratio}")
    point = PairRecord(
        PairKey("", "", "", 0, gpu, driver, ""),
        lc,
        be,
        shape=_shape(row["shape"]),
        launches=int(row["launches"]),
        lc_us=float(row["lc_us"]),
        be_us=float(row["be_us"]),
        fraction=float(row["fraction"]) * float(row.get("inside", 1.0)),
        slowdown=float(row["slowdown"]),
        ratio=ratio,
        peers=tuple(sorted((str(k), float(v)) for k, v in row.get("peers_us", {}).items())),
    )
    return PairSummary(lc, be, gpu, driver, (point,), 1, 0, "", point)


def _shape(data: Mapping[str, Any]) -> FusionShape:
    registers = data.get("registers")
    return FusionShape(**{**data, "registers": None if registers is None else RoleRegisters(**registers)})


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS / "nvidia-h200" / f"{SUITE}.jsonl")
    parser.add_argument("-o", "--output", type=Path, default=Path("pairs.html"))
    given = parser.parse_args(arguments)
    try:
        rows = [json.loads(line) for line in given.file.read_text(encoding="utf-8").splitlines() if line.strip()]
        page = render_pairs(summaries(rows))
        given.output.write_text(page, encoding="utf-8")
    except (OSError, ValueError, ArtifactError) as error:
        sys.exit(f"benchmarks.pairs_matrix: {error}")
    print(f"wrote {given.output}")


if __name__ == "__main__":
    main()
