"""Training steps in f32 on the processor: Weft against eager and torch.compile.

    python -m benchmarks.training [NAME ...] [--again] [--who weft,eager,inductor] [--budget S] [--limit S]
                                  [--seconds S] [--rounds N] [--timed S] [--small] [--out -|FILE]

The networks of `benchmarks.gpu_training` with batches that two cores take about a second for. A case has a process of
its own, in which all contenders are compiled, say the losses of the first five batches from the same weights, and are
timed in interleaved rounds. Peers have fused optimizers; networks of images have channels last everywhere. `right`:
the first loss is no further from that of float64 than twice eager's and 2^-16 of it, the others than the furthest of
eager's so.

What has a row is passed over unless it is named or `--again`. With `--out -` rows go into the suite's record.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.training import HOST_CASES, Trained
from benchmarks.harness import own_process
from benchmarks.harness.record import Record, Row
from benchmarks.harness.training_steps import PRELOADED, SUITE, Placed, Step, by_peer, by_weft, case_row, summary
from weft.pipeline.finish import interleave

WHO = ("weft", "eager", "inductor")
_CONTEXT = multiprocessing.get_context("forkserver")


# --- in a process of its own


def measured(name: str, given: Mapping[str, Any]) -> Row:
    """The entries of all contenders, by their names."""
    case, runs = HOST_CASES[name], {}
    calls: dict[str, Callable[[], object]] = {}
    for who in given["who"]:
        try:
            step, batch, runs[who] = prepared(case, who, given)
        except Exception as error:  # it is the contender's result
            traceback.print_exc()
            runs[who] = {"failed": own_process.said(error)}
        else:
            calls[who] = lambda step=step, batch=batch: step(*batch)  # type: ignore[misc]
    samples = interleave(calls, rounds=given["rounds"], seed=1, budget_s=given["timed"])
    for who in calls:
        ms = [x / 1e3 for x in samples[who]]
        runs[who].update(ms=round(statistics.median(ms), 4), samples_ms=[round(x, 4) for x in ms])
    if "eager" in calls:
        runs["eager"]["losses_f64"] = exact_losses(case, small=given["small"])
    return dict(runs)


def prepared(case: Trained, who: str, given: Mapping[str, Any]) -> tuple[Step, tuple[torch.Tensor, ...], Row]:
    """A contender's step, the batch it is timed with, and what is known of it."""
    began = time.perf_counter()
    placed = Placed(case, "cpu", small=given["small"], fused=who != "weft")
    if who == "weft":
        step, row = by_weft(placed, given["budget"], warm=False, autocast=False)
    else:
        step, row = by_peer(placed, who, autocast=False)
        del row["graph"]
    batch = placed.batch(0)
    step(*batch)
    row["first_step_s"] = round(time.perf_counter() - began, 1)
    return step, batch, {**row, "losses": placed.losses(step)}


def exact_losses(case: Trained, *, small: bool) -> list[float]:
    """Of the first batches in float64, but for the loss itself, which casts what it is given."""
    placed = Placed(case, "cpu", small=small, fused=False)
    wide = copy.copy(placed)
    wide.model = placed.model.double()
    wide.optimizer = case.optimizer(wide.model.parameters(), fused=False, capturable=False)
    step = wide.loop(wide.loss, autocast=False)
    return wide.losses(lambda *batch: step(*(x.double() if x.is_floating_point() else x for x in batch)))


# --- the record


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is left, and say what came of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases whose name begins so; all, if none")
    parser.add_argument("--again", action="store_true", help="also what has a row")
    parser.add_argument("--who", default=",".join(WHO))
    parser.add_argument("--budget", type=float, default=60.0, help="of Weft's search, in seconds (60)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that a case may take (900)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="none is begun after so many")
    parser.add_argument("--rounds", type=int, default=11, help="samples of each time (11)")
    parser.add_argument("--timed", type=float, default=40.0, help="seconds for the rounds (40)")
    parser.add_argument("--small", action="store_true", help="small forms of the networks")
    parser.add_argument("--out", type=Path, help="write the record: into this file, or `-`: into that of the suite")
    given = parser.parse_args(arguments)
    who = given.who.split(",")
    if unknown := set(who) - set(WHO):
        parser.error(f"--who: {', '.join(sorted(unknown))} is none of {', '.join(WHO)}")
    cases = [c for c in HOST_CASES if not given.names or any(c.startswith(x) for x in given.names)]
    if not cases:
        parser.error(f"no case begins with {' or '.join(given.names)}")
    settings: Row = {k: getattr(given, k) for k in ("budget", "small", "rounds")}
    end = time.perf_counter() + given.seconds
    _CONTEXT.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory(prefix="weft-training-") as temporary:
        path = None if given.out == Path("-") else given.out or Path(temporary) / "record.jsonl"
        record = Record("cpu", SUITE, path=path)
        asked = {**vars(given), "who": who}
        for name in cases:
            if time.perf_counter() > end or (name in record.before() and not given.again and not given.names):
                continue
            runs = own_process.asked(_CONTEXT, measured, (name, asked), given.limit, Path(temporary) / "log.txt")
            seconds, failed = runs.pop("seconds"), runs.pop("failed", None)
            row = case_row(name, runs, settings)  # type: ignore[arg-type]
            record.add({**row, "seconds": seconds, **({"failed": failed} if failed else {})})
        record.add(summary([r for r in record.cases if "runs" in r]))


if __name__ == "__main__":
    main()
