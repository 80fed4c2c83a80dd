"""Tables of pairs: a latency-critical kernel and a best-effort job in its CTAs, over the best of their peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.record_tables import GPU, failed, geometric_mean, good, markdown, note, records

Line = Mapping[str, Any]


def _sides(case: object) -> tuple[str, str]:
    """The LC kernel and the BE job."""
    lc, _, be = str(case).rpartition("/")
    return lc, be


def pair_cases(lines: Sequence[Line]) -> list[Line]:
    """All pairs that were tried; one that failed is not fused."""
    return [x if "failed" not in x else {**x, "kept": False, "ratio": 1.0} for x in lines if x.get("record") == "case"]


def pair_rows(lines: Sequence[Line]) -> list[list[str]]:
    """A line per LC kernel, a column per job: the ratio that was measured, those kept in bold."""
    found = pair_cases(lines)
    jobs = sorted({_sides(x["case"])[1] for x in found})
    kernels: dict[str, dict[str, Line]] = {}
    for x in found:
        lc, be = _sides(x["case"])
        kernels.setdefault(lc, {})[be] = x
    rows = [["", "", *jobs]]
    for lc, row in kernels.items():
        cells = []
        for be in jobs:
            pair = row.get(be, {"kept": False})
            measured = f"{pair['measured_ratio']:.2f}" if "measured_ratio" in pair else "none" if be in row else ""
            ratio = "failed" if "failed" in pair else measured
            cells.append(f"**{ratio}**" if pair["kept"] else ratio)
        alone = next((f"{x['lc_us']:.1f}" for x in row.values() if "lc_us" in x), "")
        rows.append([f"`{lc}`", alone, *cells])
    of = [[x for x in found if _sides(x["case"])[1] == be and "be_us" in x] for be in jobs]
    rows.append(["alone, µs", "", *(f"{x[0]['be_us']:.0f}" if x else "" for x in of)])
    return rows


def pairs() -> str:
    """The ratio of the best peer's time to that of the fused form, and what it comes to."""
    lines = records(GPU, "colocate-pairs")
    found = pair_cases(lines)
    if not found:
        return "_not measured yet: `python -m benchmarks.gpu_pairs`_"
    head, *rows = pair_rows(lines)
    kept = [x["ratio"] for x in found if x["kept"]]
    told = (
        f"{len(found)} pairs, {len(kept)} kept; geometric mean with the others at 1.00:"
        f" {geometric_mean([x['ratio'] for x in found]):.3f}; of those kept: {geometric_mean(kept):.3f};"
        f" not right: {sum('wrong' in x for x in found)}; failed: {sum('failed' in x for x in found)}."
    )
    bad = failed(lines, len(head))
    return markdown(["LC kernel", "alone µs", *head[2:]], [*rows, *bad]) + f"\n\n{told}" + note(lines, found)


def pair_peers() -> str:
    """Which peer was the best, and what the kept pairs cost LC."""
    lines = records(GPU, "colocate-pairs")
    rows = []
    for x in sorted((x for x in good(lines) if x["kept"]), key=lambda x: -float(x["ratio"])):
        peer = min(x["peers_us"], key=x["peers_us"].get)
        shape = x["shape"]
        way = f"{shape['replicas']} x {shape['threads']} {shape['place']}"
        rows.append([f"`{x['case']}`", f"{x['ratio']:.3f}", f"{x['fraction']:.2f}", f"{x['slowdown']:.2f}",
                     f"{x['idle_slowdown']:.2f}", peer, way])  # fmt: skip
    head = ["pair", "ratio", "BE time f", "LC's loss s", "with nothing to draw", "best peer", "BE threads"]
    return markdown(head, rows, (0, 5, 6)) if rows else "_not measured yet: `python -m benchmarks.gpu_pairs`_"


def lc_units() -> str:
    """What the latency-critical kernels leave of each unit, counted; at the pairs' own clock, where it was recorded."""
    from benchmarks.cases.colocate_lc import lc_kernel, lc_names
    from benchmarks.cases.lc_units import used

    from weft.ir.declined import Declined

    clocks: dict[str, float] = {}
    for x in good(records(GPU, "colocate-pairs")):
        if "sm_clock_mhz" in x:
            clocks.setdefault(_sides(x["case"])[0], float(x["sm_clock_mhz"]["lc"]))
    rows = []
    for name in lc_names():
        found = used(lc_kernel(name), clocks.get(name, 0.0))
        if isinstance(found, Declined):
            rows.append([f"`{name}`", "", "", "", "", "", "", "", f"not counted: {found.reason}"])
            continue
        shares = (found.tensor, found.shared, found.port, found.memory)
        clock = f"{found.clock_mhz:.0f}" + ("" if name in clocks else " (usual)")
        rows.append([f"`{name}`", f"{found.us:.1f}", clock, found.tile, *(f"{x:.2f}" for x in shares), found.bound])
    head = [
        "LC kernel",
        "µs",
        "MHz",
        "tile",
        "tensor cores",
        "shared memory",
        "L2 to SM",
        "memory, at least",
        "bound by",
    ]
    return markdown(head, rows, (0, 3, 8))


TABLES: dict[str, Callable[[], str]] = {"pairs": pairs, "pair-peers": pair_peers, "lc-units": lc_units}
