"""Writes the tables of README.md and docs/performance.md from the records under benchmarks/results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def records(device: str, suite: str) -> list[dict[str, object]]:
    """Lines of one suite; empty if it was never run."""
    path = RESULTS / device / f"{suite}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is left-aligned."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm; 0 for nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


def networks() -> str:
    """The networks against their peers."""
    lines = records("cpu", "networks")
    cases = [x for x in lines if x["record"] == "case"]
    if not cases:
        return "_not measured yet: `make bench`_"
    rows, eager, best = [], [], []
    for c in cases:
        peers = c["peers_ms"]
        assert isinstance(peers, dict)
        fastest = min(peers.values())
        eager.append(float(peers["eager"]) / float(str(c["weft_ms"])))
        best.append(float(fastest) / float(str(c["weft_ms"])))
        name = str(c["case"]).split("/")[0]
        weft = f"**{c['weft_ms']:.2f}**" if best[-1] >= 1 else f"{c['weft_ms']:.2f}"
        shown = [f"**{v:.2f}**" if v == fastest and best[-1] < 1 else f"{v:.2f}" for v in peers.values()]
        why = str(c.get("why_lost", ""))
        rows.append(
            [name, weft, *shown, f"{eager[-1]:.2f}", f"{best[-1]:.2f}", f"{c['operators']} → {c['kernels']}",
             f"{c['tuning_s']:.0f} s", f"{c['warm_s']:.1f} s", "yes" if c["agrees"] else "NO",
             f"{c.get('device', lines[0]['device'])}, {c.get('commit', lines[0]['commit'])}", why]
        )  # fmt: skip
    rows.append(
        ["geometric mean", "", "", "", "", f"**{geometric_mean(eager):.2f}**", f"**{geometric_mean(best):.2f}**"]
        + [""] * 6
    )
    head = ["network", "Weft ms", "eager", "torch.compile", "ONNX Runtime", "× eager", "× best peer",
            "operators → kernels", "tuning", "warm", "agrees", "measured on", "why lost"]  # fmt: skip
    env = lines[0]
    note = (
        f"{env['device']}, {env['threads']} threads, torch {env['torch']}, commit {env['commit']}; `{env['command']}`"
    )
    return markdown(head, rows) + "\n\n" + note


def gpu_networks() -> str:
    """The networks on a GPU; each peer's faster memory format counts."""
    lines = records("nvidia-h200", "networks")
    cases = sorted((x for x in lines if x["record"] == "case"), key=lambda x: (_batch(x), str(x["case"])))
    if not cases:
        return "_not measured yet: `make gpu-bench`_"
    rows: list[list[str]] = []
    ratios: dict[int, list[float]] = {}
    for c in cases:
        peers = c["peers_ms"]
        assert isinstance(peers, dict)
        mine = float(str(c["weft_ms"]))
        kinds = {k: min(v for n, v in peers.items() if n.removesuffix("_last") == k) for k in _kinds(peers)}
        ratio = min(kinds.values()) / mine
        ratios.setdefault(_batch(c), []).append(ratio)
        shown = [f"{kinds[k]:.3f}" if k in kinds else "not measured" for k in ("eager", "inductor")]
        rows.append(
            [str(c["case"]), f"**{mine:.3f}**" if ratio >= 1 else f"{mine:.3f}", *shown, f"{ratio:.2f}",
             f"{c['kernels']}", f"{c['floor_ms']:.4f}", f"{c['tuning_s']:.0f} s", str(c["plan"]),
             str(c.get("why_lost", ""))]
        )  # fmt: skip
    for batch, values in sorted(ratios.items()):
        name = f"geometric mean, batch {batch} ({len(values)} networks)"
        rows.append([name, "", "", "", f"**{geometric_mean(values):.2f}**", *[""] * 5])
    head = ["network/batch/type", "Weft ms", "eager in a graph", "torch.compile in a graph", "× best", "kernels",
            "floor ms", "tuning", "plan", "why lost"]  # fmt: skip
    env = lines[0]
    note = f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, commit {env['commit']}"
    return markdown(head, rows) + f"\n\n{note}; `{env['command']}`"


def gpu_memory() -> str:
    """Memory-bound operators on a GPU against the bandwidth of a copy."""
    lines = records("nvidia-h200", "memory-bound")
    cases = [x for x in lines if x["record"] == "case" and "weft_us" in x]
    if not cases:
        return "_not measured yet: `python -m benchmarks.gpu_memory`_"
    rows, shares, ratios = [], [], []
    for c in cases:
        peers = c["peers_us"]
        assert isinstance(peers, dict)
        mine = float(str(c["weft_us"]))
        shares.append(float(str(c["share"])))
        ratio = min(peers.values(), default=0.0) / mine
        ratios += [ratio] if peers else []
        shown = [f"{peers[k]:.2f}" if k in peers else "not measured" for k in ("eager", "inductor")]
        rows.append(
            [str(c["case"]), f"{int(str(c['bytes'])) / 1e6:.2f}", f"**{mine:.2f}**" if ratio >= 1 else f"{mine:.2f}",
             f"{c['gb_s']:.0f}", f"{c['share']:.2f}", *shown, f"{ratio:.2f}" if peers else "", f"{c['kernels']}"]
        )  # fmt: skip
    least, middle = min(shares), sorted(shares)[len(shares) // 2]
    rows.append(["median share (least), geometric mean", "", "", "", f"**{middle:.2f}** ({least:.2f})", "", "",
                 f"**{geometric_mean(ratios):.2f}**" if ratios else "", ""])  # fmt: skip
    head = ["operator, f16", "MB", "Weft µs", "GB/s", "of a copy's", "eager in a graph", "torch.compile in a graph",
            "× best", "launches"]  # fmt: skip
    env = lines[0]
    note = f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, commit {env['commit']}"
    return markdown(head, rows) + f"\n\n{note}; `{env['command']}`"


def _batch(case: dict[str, object]) -> int:
    return int(str(case["case"]).split("/")[1][1:])


def _kinds(peers: dict[str, float]) -> list[str]:
    return sorted({name.removesuffix("_last") for name in peers})


def conformance() -> str:
    """Counts of the conformance suites, and the engine that each record is of."""
    rows = []
    for name in ("conformance-onnx-node", "conformance-onnx-simple", "conformance-onnx-pytorch-operator",
                 "conformance-onnx-pytorch-converted", "opinfo"):  # fmt: skip
        lines = records("cpu", name)
        summary = next((x for x in reversed(lines) if x["record"] == "summary"), None)
        if summary is not None:
            keys = ("total", "passed", "native", "without_calls", "fallback", "refused", "wrong", "crashed")
            shown = {**summary, "refused": summary.get("refused", summary.get("eager", ""))}
            rows.append([name, str(lines[0].get("engine", "")), *(str(shown.get(k, "")) for k in keys)])
    head = ["suite", "engine", "cases", "passed", "native", "own kernels only", "fallback", "refused", "wrong",
            "crashed"]  # fmt: skip
    return markdown(head, rows) if rows else "_not measured yet: `make conformance`_"


TABLES = {
    "networks": networks,
    "gpu-networks": gpu_networks,
    "gpu-memory": gpu_memory,
    "conformance": conformance,
}


def main() -> None:
    """Replace what stands between `<!-- table: NAME -->` and `<!-- end -->`."""
    for path in (ROOT / "README.md", ROOT / "docs" / "performance.md"):
        text = path.read_text()
        for name, make in TABLES.items():
            pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
            table = make()
            text = pattern.sub(lambda m, table=table: m[1] + table + "\n" + m[2], text)  # type: ignore[misc]
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
