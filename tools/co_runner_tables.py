"""Tables of whole plans beside co-runners: what was chosen beside the best of each peer, the first query, stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.record_tables import GPU, failed, good, markdown, note, records

Line = Mapping[str, Any]
TURNS = 1.0
"""Added work of a model and a job that take turns."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shown(row: Line | None) -> list[str]:
    """p50, p99, rate of best-effort work, added work."""
    if row is None:
        return ["", "", "", ""]
    return [f"{row['lc_p50']:.2f}", f"{row['lc_p99']:.2f}", f"{row['be']:.2f}", f"{row['added']:.2f}"]


def _batch(case: str) -> int:
    return int(case.split("/")[1].removeprefix("b"))


def best_of(rows: Sequence[Line], way: str) -> Line | None:
    """The row of a peer that adds most."""
    return max((x for x in rows if x.get("way") == way and "added" in x), key=lambda x: float(x["added"]), default=None)


def co_runner_rows(lines: Sequence[Line]) -> list[list[str]]:
    """A line per model, batch and kind of work, the smaller batch first, and a mean per batch."""
    groups: dict[str, list[Line]] = {}
    for x in good(lines):
        if str(x["case"]).count("/") == 3 and x.get("way") != "first":
            groups.setdefault(str(x["case"]).rpartition("/")[0], []).append(x)
    rows: list[list[str]] = []
    sums: dict[int, list[Line | None]] = {}
    for name, own in sorted(groups.items(), key=lambda g: (_batch(g[0]), g[0])):
        taken = next((x for x in own if x.get("chosen")), None)
        sums.setdefault(_batch(name), []).append(taken)
        some = next((x for x in own if "alone_us" in x and "plain" not in str(x["case"])), None)
        alone = [f"{some['alone_us']['p50']:.1f}", f"{some['price']:.3f}"] if some else ["", ""]
        way = str(taken["case"]).rpartition("/")[2] if taken else "none: in turn"
        peers: list[str] = []
        for kind in ("short", "green", "slices"):
            best = best_of(own, kind)
            shown = _shown(best)
            named = f" ({str(best['case']).rpartition('/')[2]})" if best is not None and kind == "green" else ""
            peers += [shown[0] + named, shown[1], shown[3]]
        clock = f"{taken['sm_clock_mhz']:.0f}, {taken['watts']:.0f}" if taken else ""
        rows.append([name, *alone, way, *_shown(taken), *peers, clock])
    width = len(HEAD)
    for batch, all_ in sorted(sums.items()):
        kept = [x for x in all_ if x is not None]
        added = _mean([x["added"] if x is not None else TURNS for x in all_])
        name = f"batch {batch}: chosen in {len(kept)} of {len(all_)}; mean (worst p50, p99)"
        worst = [f"{max(x[k] for x in kept):.2f}" for k in ("lc_p50", "lc_p99")] if kept else ["", ""]
        row = [name, "", "", "", *worst, f"{_mean([x['be'] for x in kept]):.2f}" if kept else "", f"**{added:.2f}**"]
        rows.append([*row, *[""] * (width - len(row))])
    return rows


HEAD = [
    "model/batch/work", "alone µs", "over the plan without a budget", "chosen co-runner", "p50", "p99", "BE rate",
    "added work", "short blocks: p50", "p99", "added", "best green split: p50", "p99", "added", "slices of 2 ms: p50",
    "p99", "added", "MHz, W",
]  # fmt: skip


def _table(
    suite: str,
    rows_of: Callable[[Sequence[Line]], list[list[str]]],
    head: Sequence[str],
    command: str,
    left: Sequence[int] = (0,),
    *,
    with_failed: bool = False,
    kept: Callable[[Line], bool] = lambda x: True,
) -> str:
    """Rows of a record with where they are from; or what makes them. `kept`: of its cases, those of the table."""
    lines = [x for x in records(GPU, suite) if x.get("record") != "case" or kept(x)]
    rows = rows_of(lines)
    if not rows:
        return f"_not measured yet: `python -m benchmarks.{command}`_"
    return markdown(head, rows + (failed(lines, len(head)) if with_failed else []), left) + note(lines)


def co_runners() -> str:
    """The chosen co-runner of each model and kind of work, and its peers in the same run."""
    return _table("colocate-guests", co_runner_rows, HEAD, "gpu_corunner", (0, 3), with_failed=True)


NETWORK_WAYS = ("stages", "stages-duty25", "stages-ctas1", "stages-ctas1-duty50", "priority", "green", "slices2")


def network_rows(lines: Sequence[Line]) -> list[list[str]]:
    """A line per model, batch and network; of green splits the one that adds most."""
    groups: dict[str, list[Line]] = {}
    for x in good(lines):
        groups.setdefault(str(x["case"]).rpartition("/")[0], []).append(x)
    rows: list[list[str]] = []
    for name, own in sorted(groups.items(), key=lambda g: (_batch(g[0]), g[0])):
        ways = {str(x["case"]).rpartition("/")[2]: x for x in own}
        if (base := ways.get("nothing")) is None:
            continue
        cells: list[str] = []
        for way in NETWORK_WAYS:
            row = best_of(own, way) if way == "green" else ways.get(way)
            if row is None or "added" not in row:
                cells.append("" if row is None else "declined")
                continue
            named = f" ({str(row['case']).rpartition('/')[2]})" if way == "green" else ""
            cells.append(" ".join(_shown(row)) + named)
        alone = [f"{base['lc_us']['p50']:.1f}", f"{base['price']:.3f}", f"{base['inference_us']:.0f}"]
        stops = [f"{x['stop_us']:.0f}" for w, x in ways.items() if w.startswith("stages") and "stop_us" in x]
        clock = ways.get("stages-ctas1", base)
        rows.append(
            [
                name,
                *alone,
                *cells,
                max(stops, key=float, default=""),
                f"{clock['sm_clock_mhz']:.0f}, {clock['watts']:.0f}",
            ]
        )
    return rows


def networks() -> str:
    """Whole networks beside models: p50 and p99 of queries over alone, the network's rate, added work."""
    head = ["model/batch/network/batch", "alone µs", "over the plan without a budget", "network alone µs", "stages",
            "in 25 % of the time", "1 CTA on an SM", "1 CTA, 50 %", "priority", "best green split", "slices of 2 ms",
            "most µs of a stop", "MHz, W"]  # fmt: skip
    return _table("colocate-networks", network_rows, head, "gpu_network_corunner", with_failed=True)


def budget_rows(lines: Sequence[Line]) -> list[list[str]]:
    """What the budget costs each model, beside what nothing costs (A/A)."""
    found = [x for x in good(lines) if x.get("way") == "nothing"]
    rows = [
        [str(x["case"]).removesuffix("/nothing"), f"{x['plain_us']['p50']:.1f}", f"{x['lc_us']['p50']:.1f}",
         f"{x['price']:.3f}", f"{x['lc_us']['p99'] / x['lc_us']['p50']:.3f}", f"{x['again']['lc_p50']:.3f}",
         f"{x['again']['lc_p99']:.3f}", f"{x['plain_steps']}, {x['steps']}", str(x["sm_budget"])]
        for x in sorted(found, key=lambda x: (_batch(str(x["case"])), str(x["case"])))
    ]  # fmt: skip
    if found:
        prices = [float(x["price"]) for x in found]
        rows.append(["mean (worst)", "", "", f"**{_mean(prices):.3f}** ({max(prices):.3f})", *[""] * 5])
    return rows


def co_runner_budgets() -> str:
    """Plans with and without a budget, beside nothing."""
    head = ["model/batch", "without a budget: p50 µs", "within: p50 µs", "ratio", "p99 over p50", "A/A of p50",
            "A/A of p99", "steps", "budget"]  # fmt: skip
    return _table("colocate-guests", budget_rows, head, "gpu_corunner")


def first_query_rows(lines: Sequence[Line]) -> list[list[str]]:
    """The first query over those that follow, with steps before it on and off."""
    found = [x for x in good(lines) if x.get("way") == "first"]
    rows = []
    for x in sorted(found, key=lambda x: str(x["case"])):
        model, batch, _, where, steps = str(x["case"]).split("/")
        us = [f"{v:.1f}" for v in x["us"][:2]]
        ratios = [f"{x[k]:.2f}" for k in ("first_over_usual", "second_over_usual")]
        ends = [f"{x['host_us']:.0f}", f"{x['blocked']} of {x['trials']}"]
        rows.append([f"{model}/{batch}", where, steps, *us, f"{x['usual_us']:.1f}", *ratios, *ends])
    return rows


def first_query() -> str:
    """The first query beside a co-runner."""
    head = ["model/batch", "beside", "steps before it", "first µs", "second µs", "usual µs", "first over usual",
            "second over usual", "first by the host's clock µs", "waited for the co-runner's end"]  # fmt: skip
    return _table("colocate-guests", first_query_rows, head, "gpu_corunner --first", (0, 1, 2))


_STOP = ["block µs", "1 %", "25 %", "p50", "75 %", "p99", "99.9 %", "most", "by the host's clock: p50, p99", "stops",
         "blocks", "lost or doubled"]  # fmt: skip


def _stop_row(x: Line) -> list[str]:
    q = x["quantiles_us"]
    return [f"{x['block_us']:.1f}", f"{q['0.01']:.1f}", f"{q['0.25']:.1f}", f"**{x['p50_us']:.1f}**",
            f"{q['0.75']:.1f}", f"**{x['p99_us']:.1f}**", f"{q['0.999']:.1f}", f"{q['1']:.1f}",
            f"{x['host_p50_us']:.1f}, {x['host_p99_us']:.1f}", f"{x['trials']}", f"{x['blocks']}",
            f"{x['lost_or_doubled']}"]  # fmt: skip


def _in_role(x: Line) -> bool:
    return str(x.get("case")).startswith("role/")


def stop_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Stop latencies, and how many blocks were counted."""
    return [[str(x["case"]), *_stop_row(x)] for x in sorted(good(lines), key=lambda x: str(x["case"]))]


def stops() -> str:
    """Stop latency of co-runners."""
    head = ["work/block as beside batch/threads/raised by", *_STOP]
    command = "gpu_stop --what co-runner"
    return _table("colocate-stop", stop_rows, head, command, with_failed=True, kept=lambda x: not _in_role(x))


def role_stop_rows(lines: Sequence[Line]) -> list[list[str]]:
    """The same of roles, with how long LC takes alone and by how much a latency may be too long."""
    return [
        [str(x["case"]).removeprefix("role/"), f"{x['lc_us']:.1f}", *_stop_row(x), f"{x['clock_us']:.1f}"]
        for x in sorted(good(lines), key=lambda x: str(x["case"]))
    ]


def role_stops() -> str:
    """Stop latency of roles in fused kernels."""
    head = ["work/block as beside batch/LC kernel", "LC alone µs", *_STOP, "may be too long by µs"]
    return _table("colocate-stop", role_stop_rows, head, "gpu_stop --what role", with_failed=True, kept=_in_role)


def presence_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Queries beside what stays on the GPU and does no work that counts, with and without dependent launch."""
    found = [x for x in lines if x.get("way") == "presence" or "/presence/" in str(x.get("case"))]
    rows = []
    for x in found:
        model, batch, _, guest = str(x["case"]).split("/")
        if "failed" in x:
            rows.append([f"{model}/{batch}", guest, f"waits for its end: {x['failed']}", "", "", ""])
            continue
        us = [f"{x[f'{k}_us']:.1f}" for k in ("dependent", "independent")]
        ratios = [f"{x[f'{k}_ratio']:.3f}" if f"{k}_ratio" in x else "" for k in ("dependent", "independent")]
        rows.append([f"{model}/{batch}", guest, us[0], ratios[0], us[1], ratios[1]])
    return rows


def presence() -> str:
    """What of a co-runner's presence a plan feels."""
    head = ["model/batch", "beside", "query µs", "over alone", "without dependent launch µs", "over alone"]
    return _table("colocate-steps", presence_rows, head, "gpu_corunner --steps", (0, 1))


TABLES: dict[str, Callable[[], str]] = {
    "co-runners": co_runners,
    "co-runner-budgets": co_runner_budgets,
    "first-query": first_query,
    "co-runner-networks": networks,
    "co-runner-stops": stops,
    "role-stops": role_stops,
    "co-runner-presence": presence,
}
