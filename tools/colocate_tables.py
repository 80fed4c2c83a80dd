"""Tables of models with latency targets beside jobs, from the records of `benchmarks.gpu_colocate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tools.record_tables import failed, geometric_mean, good, markdown, note, records

Line = Mapping[str, Any]
HEAD = ["model/batch/job/load/policy", "target ms", "p50 ms", "p99 ms", "kept", "p99 over exclusive", "BE rate",
        "system", "of the best peer", "simulated: p50", "p95", "p99", "BE", "send delay, decision µs"]  # fmt: skip
"""Of `simulated`: simulated over measured."""
NEAR = 0.05
"""A simulation is right within so much."""
WHAT = ("p50_ms", "p95_ms", "p99_ms", "be")


def over(row: Line, what: str) -> str:
    """A figure of the simulation over the measured one; empty where that is 0."""
    was = float(row[what])
    return f"{float(row['simulated'][what]) / was:.3f}" if was > 0 else ""


def near(row: Line) -> bool:
    """Whether p50, p95, p99 and the job's rate were simulated within `NEAR`."""
    return all(abs(float(x) - 1.0) <= NEAR for what in WHAT if (x := over(row, what)))


def policy_rows(lines: Sequence[Line]) -> list[list[str]]:
    """A line to each run; one that says what all of them came to."""
    cases = sorted((x for x in good(lines) if "policy" in x), key=lambda x: str(x["case"]))
    rows: list[list[str]] = []
    for x in cases:
        if "declined" in x:
            rows.append([str(x["case"]), f"not run: {x['declined']}", *[""] * (len(HEAD) - 2)])
            continue
        kept = f"**void**: {x['void']}" if "void" in x else "yes" if x["kept"] else "no"
        decision = f", {x['decision_us']:.1f}" if "decision_us" in x else ""
        rows.append([
            str(x["case"]), f"{x['target_ms']:.3f}", f"{x['p50_ms']:.3f}", f"{x['p99_ms']:.3f}", kept,
            f"{x['over_exclusive']:.3f}", f"{x['be']:.3f}", f"{x['system']:.3f}",
            f"{x['ratio']:.3f}" if "ratio" in x else "", *(over(x, w) for w in WHAT),
            f"{x['send_delay_us']:.1f}{decision}",
        ])  # fmt: skip
    ran = [x for x in cases if "declined" not in x and "void" not in x]
    mine = [x for x in ran if x["policy"] == "weft"]
    if mine:
        ratios = [float(x["ratio"]) for x in mine if "ratio" in x]
        kept = f"**{sum(bool(x['kept']) for x in mine)} of {len(mine)}**"
        mean = f"**{geometric_mean(ratios):.3f}**, least {min(ratios):.3f}" if ratios else ""
        right = f"{sum(map(near, ran))} of {len(ran)} within {NEAR:.0%}"
        rows.append(["weft in all", "", "", "", kept, "", "", "", mean, right, "", "", "", ""])
    return rows


def table(suite: str) -> str:
    """Of one suite."""
    lines = records("nvidia-h200", f"colocate-{suite}")
    rows = policy_rows(lines)
    if not rows:
        return f"_not measured yet: `python -m benchmarks.gpu_colocate --plans DIR --suite {suite} --out -`_"
    return markdown(HEAD, rows + failed(lines, len(HEAD))) + note(lines, good(lines))


def bursts() -> str:
    """Late queries beside those of `exclusive` on the same arrivals."""
    lines = records("nvidia-h200", "colocate-bursts")
    cases = sorted((x for x in good(lines) if "policy" in x), key=lambda x: str(x["case"]))
    if not cases:
        return "_not measured yet: `python -m benchmarks.gpu_colocate --plans DIR --suite bursts --out -`_"
    alone = {str(x["case"]).rpartition("/")[0]: x for x in cases if x["policy"] == "exclusive"}
    rows: list[list[str]] = []
    for x in cases:
        if "declined" in x:
            rows.append([str(x["case"]), f"not run: {x['declined']}", *[""] * 6])
            continue
        own = alone.get(str(x["case"]).rpartition("/")[0], {})
        rows.append([
            str(x["case"]), f"{x['target_ms']:.3f}", f"{x['p99_ms']:.3f}{' **void**' if 'void' in x else ''}",
            f"{x['late']} of {x['queries']}", str(own.get("late", "")),
            f"{x.get('refused', 0)}", f"{x['be']:.3f}", f"{x['simulated']['p99_ms']:.3f}, {x['simulated']['be']:.3f}",
        ])  # fmt: skip
    head = ["model/batch/job/arrivals/load/policy", "target ms", "p99 ms", "late", "late of exclusive", "refused",
            "BE rate", "simulated: p99 ms, BE"]  # fmt: skip
    return markdown(head, rows + failed(lines, len(head))) + note(lines, good(lines))


def faults() -> str:
    """Faults injected on the host and on a GPU."""
    rows: list[list[str]] = []
    notes = ""
    head = ["fault", "device", "injected", "right", "wrong", "seconds until all goes on: median", "most"]
    for device in ("cpu", "nvidia-h200"):
        lines = records(device, "colocate-faults")
        for x in good(lines):
            took = [f"{x[k]:.3f}" if k in x else "" for k in ("again_s", "again_most_s")]
            wrong = "; ".join(x["wrong"])
            rows.append([str(x["case"]), device, f"{x['injected']}", f"{x['right']}", wrong or "none", *took])
        rows += failed(lines, len(head))
        if good(lines) and device == "cpu":
            notes += f"\n\n{lines[0]['device']}, busy, commit {lines[0]['commit']}; `{lines[0]['command']}`"
        elif good(lines):
            notes += note(lines, good(lines))
    if not rows:
        return "_not measured yet: `python -m benchmarks.colocate_faults --out -`_"
    return markdown(head, rows) + notes


def predictors() -> str:
    """Predicted against measured durations, and work to a joule."""
    lines = records("nvidia-h200", "colocate-predictors")
    cases = sorted((x for x in good(lines) if "kind" in x), key=lambda x: str(x["case"]))
    if not cases:
        return "_not measured yet: `python -m benchmarks.colocate_predictors --plans DIR --out -`_"
    head = ["model/batch/job/what", "held out", "mean error", "p95", "aim", "clock MHz", "first window"]
    rows: list[list[str]] = []
    for x in cases:
        if x["kind"] == "power":
            continue
        if "declined" in x:
            rows.append([str(x["case"]), f"not measured: {x['declined']}", *[""] * (len(head) - 2)])
            continue
        mean = f"{x['mean_error']:.2%}" if x["reached"] else f"**{x['mean_error']:.2%}**"
        first = f"{x['first_error']:.2%}" if "first_error" in x else ""
        clock = str(x.get("clock_mhz", ""))
        rows.append(
            [str(x["case"]), str(x["held_out"]), mean, f"{x['p95_error']:.2%}", f"{x['aim']:.0%}", clock, first]
        )
    powers = ["model/batch/job/policy", "watts", "clock MHz", "queries to a joule", "BE ms to a joule",
              "work of both, ms to a joule"]  # fmt: skip
    of_power = [
        [str(x["case"]), f"not measured: {x['declined']}", *[""] * 4] if "declined" in x else [
            str(x["case"]), f"{x['watts']:.1f}", str(x["clock_mhz"]), f"{x['queries_per_joule']:.3f}",
            f"{x['be_ms_per_joule']:.4f}", f"{x['work_ms_per_joule']:.4f}",
        ]
        for x in cases if x["kind"] == "power"
    ]  # fmt: skip
    both = markdown(head, rows + failed(lines, len(head)))
    return both + (f"\n\n{markdown(powers, of_power)}" if of_power else "") + note(lines, good(lines))


TABLES: dict[str, Callable[[], str]] = {
    f"colocate-{suite}": partial(table, suite) for suite in ("policies", "batch1", "end-to-end", "mps")
} | {"colocate-bursts": bursts, "colocate-faults": faults, "colocate-predictors": predictors}
