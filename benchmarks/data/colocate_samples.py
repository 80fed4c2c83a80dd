"""Samples of an H200 that `weft colocate simulate` replays, from the records of earlier measurements.

    python -m benchmarks.data.colocate_samples [--check]

makes `nvidia-h200/colocate-samples.json` without a GPU: times of networks (`networks.jsonl`), of one network beside
another job in several ways (`colocate-guests.jsonl`), of fused kernels (`colocate-pairs.jsonl`) and of stops
(`colocate-stop.jsonl`). Every figure names its record, case and commit. What the records lack is left out, not guessed:
raw times of single queries were not kept, so distributions are those of recorded quantiles (networks: of the medians
of rounds). `--check` writes nothing, and fails where the file says otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.kernels.samples import (
    FORMAT,
    JobSamples,
    ModelSamples,
    ModeSamples,
    SampleRecord,
    Source,
    Spread,
    StepSamples,
    write,
)
from weft.kernels.scheduling import Sharing

RESULTS = Path(__file__).parents[1] / "results" / "nvidia-h200"
FILE = Path(__file__).parent / "nvidia-h200" / "colocate-samples.json"
LATENCY_CRITICAL = FILE.with_name("latency-critical.json")
WORK = "dense"
"""The job that whole queries were measured beside."""
STOPS_OF_BATCH = "ffma/b16/256/graph"
"""Stops of the jobs of pairs were not recorded: this one is of blocks of the same length, about 40 us."""
_WAYS: Mapping[str, Sharing] = {"co-runner": "co-runner", "green": "partition", "short": "priority"}
Row = Mapping[str, Any]


class _Sources:
    """Sources by number, each once."""

    def __init__(self) -> None:
        self.rows: dict[Source, int] = {}

    def add(self, file: str, row: Row, note: str = "") -> int:
        return self.rows.setdefault(Source(file, row["case"], row["commit"], note), len(self.rows))


def rows_of(name: str) -> tuple[Row, list[Row]]:
    """The environment of a record, and its cases."""
    lines = [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]
    (environment,) = [x for x in lines if x["record"] == "environment"]
    return environment, [x for x in lines if x["record"] == "case"]


def build() -> SampleRecord:
    """The record, from all others."""
    sources = _Sources()
    environment, networks = rows_of("networks.jsonl")
    _, guests = rows_of("colocate-guests.jsonl")
    _, stops = rows_of("colocate-stop.jsonl")
    _, pairs = rows_of("colocate-pairs.jsonl")
    stop_rows = {r["case"]: r for r in stops}
    beside = [r for r in guests if r["case"].startswith(f"resnet50/b1/{WORK}/") and "lc_us" in r]
    models = [_network(r, sources) for r in networks]
    models = [_within_budget(beside, sources) if m.name == "resnet50/b1" else m for m in models]
    jobs = [_work(beside, stop_rows, sources)]
    steps = _steps(pairs, sources)
    jobs += _jobs(pairs, stop_rows, sources)
    modes = [_mode(r, sources) for r in beside if r["way"] in _WAYS]
    stop = stop_rows[STOPS_OF_BATCH]
    note = "the host's clock less the GPU's, of the medians: what a launch or a flag takes to reach the GPU"
    launch = Spread(
        ((0.5, round(stop["host_p50_us"] - stop["p50_us"], 2)),), sources.add("colocate-stop.jsonl", stop, note)
    )
    return SampleRecord(
        FORMAT, environment["device"], environment["driver"], tuple(models), tuple(jobs), tuple(modes), tuple(steps),
        launch, tuple(sources.rows),
    )  # fmt: skip


def _network(row: Row, sources: _Sources) -> ModelSamples:
    times = sorted(1e3 * ms for ms in row["samples_ms"]["weft"])
    note = "medians of rounds, not single queries"
    source = sources.add("networks.jsonl", row, note)
    points = tuple((round((i + 0.5) / len(times), 6), round(us, 3)) for i, us in enumerate(times))
    return ModelSamples(row["case"].removesuffix("/f16"), Spread(points, source), row["kernels"], 0)


def _within_budget(beside: Sequence[Row], sources: _Sources) -> ModelSamples:
    """The plan under a budget, which is the one that was measured beside a job: times of the same run."""
    row = next(r for r in beside if "alone_us" in r)
    note = "alone_us: the plan under a budget of each SM, alone in the same rounds"
    source = sources.add("colocate-guests.jsonl", row, note)
    return ModelSamples("resnet50/b1", _quantiles(row["alone_us"], source), 56, row["sm_clock_mhz"])


def _quantiles(us: Mapping[str, float], source: int) -> Spread:
    return Spread(((0.5, us["p50"]), (0.95, us["p95"]), (0.99, us["p99"])), source)


def _mode(row: Row, sources: _Sources) -> ModeSamples:
    name = row["case"].rsplit("/", 1)[1]
    way = row["way"]
    idle = row["be_own"] if way == "co-runner" else row["be"] if way == "green" else 1.0
    note = {"green": "idle rate: that beside queries, on the same SMs", "short": "short blocks on the lowest priority"}
    source = sources.add("colocate-guests.jsonl", row, note.get(way, ""))
    called = {"co-runner": f"co-runner {name}", "short": "priority"}.get(way, name)
    return ModeSamples(
        "resnet50/b1", WORK, called, _WAYS[way], _quantiles(row["lc_us"], source), row["be"], idle, row["sm_clock_mhz"]
    )


def _work(beside: Sequence[Row], stops: Mapping[str, Row], sources: _Sources) -> JobSamples:
    row = next(r for r in beside if r["way"] == "serial")
    note = "kernel: half a query's time, as in turns of serial50; block: 1 over the full rate"
    source = sources.add("colocate-guests.jsonl", row, note)
    alone = row["alone_us"]["p50"]
    stop = _stop(stops[f"{WORK}/b1/256/graph"], sources)
    return JobSamples(WORK, round(alone / 2, 2), round(1e6 / row["be_full_rate"], 3), stop, source)


def _stop(row: Row, sources: _Sources, note: str = "") -> Spread:
    points = tuple((float(q), us) for q, us in row["quantiles_us"].items())
    return Spread(points, sources.add("colocate-stop.jsonl", row, note))


def _jobs(pairs: Sequence[Row], stops: Mapping[str, Row], sources: _Sources) -> list[JobSamples]:
    """The twelve jobs; each by the row in which it was quickest alone."""
    stop = _stop(
        stops[STOPS_OF_BATCH], sources, "of another job, with blocks of about 40 us: those of pairs are shorter"
    )
    best: dict[str, Row] = {}
    for row in pairs:
        name = row["case"].rsplit("/", 1)[1]
        if "be_us" in row and row.get("blocks") and row["be_us"] < best.get(name, {"be_us": float("inf")})["be_us"]:
            best[name] = row
    return [
        JobSamples(name, r["be_us"], round(r["be_us"] / r["blocks"], 6), stop, sources.add("colocate-pairs.jsonl", r))
        for name, r in sorted(best.items())
    ]


def _steps(pairs: Sequence[Row], sources: _Sources) -> list[StepSamples]:
    """Fused kernels, with how often the plan of batch 16 has the LC kernel."""
    times = {k["name"]: k["times"] for k in json.loads(LATENCY_CRITICAL.read_text(encoding="utf-8"))["kernels"]}
    found = []
    for row in pairs:
        if "fraction" not in row or not row["fraction"] > 0:
            continue
        kernel, job = row["case"].rsplit("/", 1)
        idle = row.get("idle_slowdown")
        found.append(
            StepSamples(
                f"{kernel.split('/')[0]}/b16", job, kernel.split("/")[1], times[kernel], row["lc_us"], row["slowdown"],
                row["fraction"], float("nan") if idle is None else idle,
                bool(row["kept"]) and row["fraction"] > row["slowdown"], sources.add("colocate-pairs.jsonl", row),
            )
        )  # fmt: skip
    return sorted(found, key=lambda s: (s.model, s.job, s.step))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the file says otherwise")
    given = parser.parse_args(arguments)
    text = write(build())
    if given.check:
        same = FILE.is_file() and FILE.read_text(encoding="utf-8") == text
        print("the same" if same else f"{FILE.name} says otherwise: make it anew")
        return 0 if same else 1
    FILE.write_text(text, encoding="utf-8")
    print(f"{FILE.name}: {len(text) >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
