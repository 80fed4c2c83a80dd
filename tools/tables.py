"""Writes the tables of README.md and the documents from the records under benchmarks/results and lab/results.

    python tools/tables.py [--check]

A case that could not be measured when it was tried last stands in its table as failed. `--check` writes nothing, and
fails where a document holds another table than the records make.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.harness import noise

from tools import co_runner_tables, colocate_tables, pair_tables, record_tables, sanitize_table
from tools.record_tables import ROOT, failed, failures, geometric_mean, good, markdown, records

HOST_PEERS = {
    "eager": "eager", "inductor": "torch.compile", "freezing": "freezing", "onnxruntime": "ONNX Runtime"
}  # fmt: skip
"""Of the networks on a processor: the record's name of each, and the table's."""


def _peer(ms: float | None, fastest: float, over_best: float) -> str:
    """A peer's time: bold where it is ahead of everybody, empty where it was not measured."""
    text = "" if ms is None else f"{ms:.2f}"
    return f"**{text}**" if ms == fastest and over_best < 1 else text


def networks() -> str:
    """The networks against their peers."""
    lines = records("cpu", "networks")
    cases = good(lines)
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
        shown = [_peer(peers.get(peer), fastest, best[-1]) for peer in HOST_PEERS]
        why = str(c.get("why_lost", ""))
        rows.append(
            [name, weft, *shown, f"{eager[-1]:.2f}", f"{best[-1]:.2f}", f"{c['operators']} → {c['kernels']}",
             f"{c['tuning_s']:.0f} s", f"{c['warm_s']:.1f} s", "yes" if c["agrees"] else "NO",
             f"{c.get('device', lines[0]['device'])}, {c.get('commit', lines[0]['commit'])}", why]
        )  # fmt: skip
    rows.append(
        ["geometric mean"]
        + [""] * (1 + len(HOST_PEERS))
        + [f"**{geometric_mean(eager):.2f}**", f"**{geometric_mean(best):.2f}**"]
        + [""] * 6
    )
    head = ["network", "Weft ms", *HOST_PEERS.values(), "× eager", "× best peer", "operators → kernels", "tuning",
            "warm", "agrees", "measured on", "why lost"]  # fmt: skip
    rows += failed(lines, len(head))
    env = lines[0]
    note = (
        f"{env['device']}, {env['threads']} threads, torch {env['torch']}, commit {env['commit']}; `{env['command']}`"
    )
    return markdown(head, rows) + "\n\n" + note


def gpu_networks(suite: str = "networks") -> str:
    """The networks on a GPU; each peer's faster memory format counts."""
    lines = records("nvidia-h200", suite)
    cases = sorted(good(lines), key=lambda x: (_batch(x), str(x["case"])))
    if not cases:
        return "_not measured yet: `make gpu-bench`_"
    rows: list[list[str]] = []
    ratios: dict[int, list[float]] = {}
    slow = _autotuned()
    for c in cases:
        mine = float(str(c["weft_ms"]))
        kinds = _fastest(c)
        if ms := _beside(kinds, slow.get(str(c["case"]))):
            kinds["autotune"] = ms
        ratio = min(kinds.values()) / mine
        ratios.setdefault(_batch(c), []).append(ratio)
        shown = [f"{kinds[k]:.3f}" if k in kinds else "not measured" for k in ("eager", "inductor", "autotune")]
        theirs = c.get("peer_compile_s", {})
        assert isinstance(theirs, dict)
        compiled = max((v for n, v in theirs.items() if n.startswith("inductor")), default=0.0)
        name = f"{c['case']} ({c['commit']})" if "commit" in c else str(c["case"])
        rows.append(
            [name, f"**{mine:.3f}**" if ratio >= 1 else f"{mine:.3f}", *shown, f"{ratio:.2f}",
             f"{c['kernels']}", f"{c['floor_ms']:.4f}", _tuning(c),
             f"{compiled:.0f} s", _memory(c), _differing(c), str(c["plan"]), str(c.get("why_lost", ""))]
        )  # fmt: skip
    for batch, values in sorted(x for x in ratios.items() if len(x[1]) > 2):
        name = f"geometric mean, batch {batch} ({len(values)} cases)"
        rows.append([name, "", "", "", "", f"**{geometric_mean(values):.2f}**", *[""] * 8])
    head = ["network/batch/type", "Weft ms", "eager in a graph", "torch.compile in a graph", "max-autotune in a graph",
            "× best", "kernels", "floor ms", "tuning / warm", "torch.compile's compiling", "MB (torch.compile's)",
            "runs that differ", "plan", "why lost"]  # fmt: skip
    rows += failed(lines, len(head))
    env = lines[0]
    note = f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, commit {env['commit']}"
    return markdown(head, rows) + f"\n\n{note}; `{env['command']}`{SCALED if slow else ''}"


SCALED = "; max-autotune was timed beside eager in runs of its own, scaled by eager's times where those became less"


def _autotuned() -> dict[str, dict[str, float]]:
    """Of the runs with max-autotune, by case: milliseconds of eager and of it."""
    return {str(x["case"]): _fastest(x) for x in good(records("nvidia-h200", "autotune"))}


def _beside(kinds: Mapping[str, float], other: Mapping[str, float] | None) -> float | None:
    """Max-autotune's milliseconds in a run of its own, as they are beside these; None: it was not measured."""
    if other is None or not {"autotune", "eager"} <= other.keys() or "eager" not in kinds:
        return None
    return other["autotune"] * min(kinds["eager"] / other["eager"], 1.0)


def gpu_networks_again() -> str:
    """The networks measured once more, beside the rows of before: what changed since is no slower."""
    lines, then = (
        records("nvidia-h200", "networks-again"),
        {c["case"]: c for c in good(records("nvidia-h200", "networks"))},
    )
    cases = sorted((c for c in good(lines) if c["case"] in then), key=lambda x: (_batch(x), str(x["case"])))
    if not cases:
        return "_not measured yet: `python -m benchmarks.gpu_networks --suite networks-again --peers eager`_"
    yard = {c["case"]: _fastest(c)["eager"] / _fastest(then[c["case"]])["eager"] for c in cases}
    # eager runs the same kernels in both runs, but where cuDNN took another algorithm: that is the noise between runs
    apart = [abs(math.log(r)) for r in yard.values()]
    between = noise.quantile(sorted(x for x in apart if x < math.log(OTHER_ALGORITHM)))
    rows: list[list[str]] = []
    ratios = []
    for c in cases:
        old = then[c["case"]]
        ratio = c["weft_ms"] / old["weft_ms"]
        own = math.log1p(max(x["noise"]["noise"] if "noise" in x else 0.0 for x in (c, old)))
        said = noise.Judged(ratio, max(own, between))
        ratios.append(ratio)
        rows.append(
            [c["case"], f"{old['weft_ms']:.3f} ({old.get('commit', '')})", f"{c['weft_ms']:.3f}", f"{ratio:.3f}",
             f"{yard[c['case']]:.3f}", f"{math.expm1(said.bound):.1%}", said.said.value,
             f"{old['kernels']} → {c['kernels']}", f"{old['tuning_s']:.0f} → {c['tuning_s']:.0f}",
             f"{c['runs_that_differ']} of {c['runs']}", str(c.get("why_lost", ""))]
        )  # fmt: skip
    rows.append(["geometric mean", "", "", f"**{geometric_mean(ratios):.3f}**", *[""] * 7])
    head = ["network/batch/type", "ms then", "ms now", "now over then", "eager's, now over then", "noise", "so it is",
            "kernels", "s of search", "runs that differ", "why slower"]  # fmt: skip
    rows += failed(lines, len(head))
    env = lines[0]
    note = f"{env['device']}, driver {env['driver']}, torch {env['torch']}, commit {env['commit']}; `{env['command']}`"
    return markdown(head, rows) + f"\n\n{note}"


OTHER_ALGORITHM = 1.1
"""Eager's time over its own in another run, where cuDNN took another algorithm for a convolution."""


def _tuning(case: dict[str, object]) -> str:
    """Seconds of the first compilation, and of one that finds everything measured, where that was timed."""
    warm = float(str(case.get("warm_s", 0.0)))
    return f"{case['tuning_s']:.0f} / {warm:.1f} s" if warm else f"{case['tuning_s']:.0f} s"


def _fastest(case: dict[str, object]) -> dict[str, float]:
    """Milliseconds by kind of peer, each in its faster memory format."""
    peers = case["peers_ms"]
    assert isinstance(peers, dict)
    return {k: min(v for n, v in peers.items() if n.removesuffix("_last") == k) for k in _kinds(peers)}


def gpu_memory() -> str:
    """Memory-bound operators on a GPU against the bandwidth of a copy."""
    lines = records("nvidia-h200", "memory-bound")
    cases = good(lines)
    if not cases:
        return "_not measured yet: `python -m benchmarks.gpu_memory`_"
    rows, shares, ratios = [], [], []
    for c in cases:
        peers = c["peers_us"]
        assert isinstance(peers, dict)
        mine = float(str(c["weft_us"]))
        shares.append(float(str(c["share"])))
        ratio = min(peers.values(), default=0.0) / mine
        ratios += [ratio] if "inductor" in peers else []
        shown = [f"{peers[k]:.2f}" if k in peers else "not measured" for k in ("eager", "inductor")]
        rows.append(
            [str(c["case"]), f"{int(str(c['bytes'])) / 1e6:.2f}", f"**{mine:.2f}**" if ratio >= 1 else f"{mine:.2f}",
             f"{c['gb_s']:.0f}", f"{c['share']:.2f}", *shown, f"{ratio:.2f}" if peers else "", f"{c['kernels']}"]
        )  # fmt: skip
    least, middle = min(shares), sorted(shares)[len(shares) // 2]
    where = f"median share (least); geometric mean where torch.compile was measured ({len(ratios)})"
    rows.append([where, "", "", "", f"**{middle:.2f}** ({least:.2f})", "", "",
                 f"**{geometric_mean(ratios):.2f}**" if ratios else "", ""])  # fmt: skip
    head = ["operator, f16", "MB", "Weft µs", "GB/s", "of a copy's", "eager in a graph", "torch.compile in a graph",
            "× best", "launches"]  # fmt: skip
    rows += failed(lines, len(head))
    env = lines[0]
    note = f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, commit {env['commit']}"
    return markdown(head, rows) + f"\n\n{note}; `{env['command']}`"


GEMM_GROUPS = {
    "f16": "f16, nn and nt", "bf16": "bf16", "layouts": "f16, each layout", "epilogues": "what it does not fuse",
    "fused": "what it fuses", "f32": "f32 without TF32", "tf32": "TF32", "exhaustive": "90 configurations",
    "fp8": "f8e4m3 and f8e5m2", "fp8_fast": "f8e4m3, sums that stay in the tensor cores",
}  # fmt: skip
"""Groups of `benchmarks.cases.gemm` in words."""


def gpu_kernels() -> str:
    """Kernels by themselves against the best library call: a line per suite and group."""
    rows: list[list[str]] = []
    rows_failed: list[list[str]] = []
    seen: set[str] = set()
    notes: list[str] = []

    def add(suite: str, against: str, ratio: str, groups: Callable[[dict[str, object]], str]) -> None:
        lines = records("nvidia-h200", suite)
        found: dict[str, list[float]] = {}
        for c in (x for x in good(lines) if x.get(ratio)):
            found.setdefault(groups(c), []).append(float(str(c[ratio])))
        if suite not in seen:
            seen.add(suite)
            rows_failed.extend(failed(lines, 6))
        for name, values in found.items():
            lost = sum(v < 1 for v in values)
            rows.append([f"{suite}{', ' if name else ''}{name}", against, f"{len(values)}",
                         f"**{geometric_mean(values):.2f}**", f"{min(values):.2f}", f"{lost}"])  # fmt: skip
        if lines:
            commits = sorted({str(x.get("commit", lines[0]["commit"])) for x in lines})
            notes.append(f"{suite}: commit{'s' * (len(commits) > 1)} {', '.join(commits)}, `{lines[0]['command']}`")

    add("convolutions", "cuDNN, the convolution alone", "ratio_conv", lambda c: f"batch {c['batch']}")
    add("convolutions", "cuDNN, with what follows it", "ratio_chain", lambda c: f"batch {c['batch']}")
    add("attention", "the best backend of torch", "ratio",
        lambda c: f"{c['dtype']}{', 4,096 and 8,192 keys' if c.get('long') else ''}")  # fmt: skip
    layers = "the best of layers by cuBLASLt, eager, torch.compile, tiny-cuda-nn"
    add("mlp", layers, "ratio", lambda c: f"width {c['width']}")
    add("gemm", "cuBLASLt, the best of 16 algorithms", "ratio", lambda c: GEMM_GROUPS[str(c["group"])])
    products = [x for x in good(records("nvidia-h200", "products")) if x["who"] != "library"]
    best: dict[str, dict[str, object]] = {}
    for c in products:
        name = str(c["case"])
        if name not in best or float(str(c["us"])) < float(str(best[name]["us"])):
            best[name] = c
    for key, against in (("ratio", "cuBLAS, cuDNN: the product alone"), ("chain_ratio", "the same, then what follows")):
        values = [float(str(c[key])) for c in best.values()]
        if values:
            lost = sum(v < 1 for v in values)
            rows.append(["products and convolutions of large batches", against, f"{len(values)}",
                         f"**{geometric_mean(values):.2f}**", f"{min(values):.2f}", f"{lost}"])  # fmt: skip
    if products:
        env = records("nvidia-h200", "products")[0]
        notes.append(f"products: commits {', '.join(sorted({str(c['commit']) for c in products}))}, `{env['command']}`")
    if not rows:
        return "_not measured yet_"
    head = ["kernels", "against", "cases", "× (geometric mean)", "least", "lost"]
    return (
        markdown(head, rows + rows_failed)
        + "\n\nNVIDIA H200, graph replay, best of the first schedules; "
        + "; ".join(notes)
    )


def gpu_mlp() -> str:
    """Fully connected networks in one kernel against layers and torch.compile."""
    lines = records("nvidia-h200", "mlp")
    cases = [x for x in good(lines) if "floors_us" in x]
    if not cases:
        return "_not measured yet: `python -m benchmarks.gpu_mlp`_"
    keys = ("act", "width", "rows", "depth")
    cases.sort(key=lambda c: (c["dtype"], c["act"] != "relu", *(c[k] for k in keys)))
    rows: list[list[str]] = []
    ratios: dict[str, list[float]] = {}
    for c in cases:
        peers = c["peers_us"]
        assert isinstance(peers, dict)
        mine, ratio = float(str(c["weft_us"])), float(str(c["ratio"] or 0.0))
        few = int(str(c["rows"])) <= 1 << 12
        group = f"width {c['width']}" if int(str(c["rows"])) >= 1 << 18 else "2^12 rows" if few else "others"
        if c["act"] == "relu" and ratio:
            ratios.setdefault(group, []).append(ratio)
        shown = [f"{peers[k]:.1f}" if k in peers else "" for k in ("eager", "library", "compile", "autotune")]
        theirs = [float(us) for who, us in peers.items() if who.startswith("tcnn")]
        shown.append(f"{min(theirs):.1f}" if theirs else "")
        error = float(str(c["error"])) / float(str(c["eager_error"]))
        rows.append(
            [str(c["case"]), f"**{mine:.2f}**" if ratio >= 1 else f"{mine:.2f}", f"{c['tflops']:.0f}",
             f"{c['share']:.2f}{' (hot)' if c['hot'] else ''}", *shown, f"{ratio:.2f}" if ratio else "",
             f"{error:.2f}", str(c["why"])]
        )  # fmt: skip
    for group, values in sorted(ratios.items(), key=lambda x: (len(x[0]), x[0])):
        name = f"ReLU, {group}: geometric mean (least) of {len(values)}"
        mean = f"**{geometric_mean(values):.2f}** ({min(values):.2f})"
        rows.append([name, *[""] * 8, mean, "", ""])
    head = ["network", "Weft µs", "TFLOP/s", "share of the floor", "eager", "cuBLASLt per layer", "torch.compile",
            "max-autotune", "tiny-cuda-nn (its best way)", "× best", "error over eager's", "why under 0.6"]  # fmt: skip
    rows += failed(lines, len(head))
    env = lines[0]
    commits = ", ".join(sorted({str(c["commit"]) for c in cases}))
    note = f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, commit {commits}"
    return markdown(head, rows) + f"\n\n{note}; all in CUDA graphs, µs; `{env['command']}`"


def gpu_convolutions() -> str:
    """The distinct convolutions of each network at each batch size, against cuDNN."""
    lines = records("nvidia-h200", "convolutions")
    groups: dict[tuple[str, int], list[tuple[int, dict[str, object]]]] = {}
    for c in good(lines):
        counts = c.get("networks", {})
        assert isinstance(counts, dict)
        for name, count in counts.items():
            groups.setdefault((name, int(str(c["batch"]))), []).append((count, c))
    if not groups:
        return "_not measured yet: `python -m benchmarks.gpu_conv --batch 1,16 --keep`_"
    rows = []
    for (name, batch), cases in sorted(groups.items(), key=lambda g: (g[0][1], g[0][0])):
        ratios = {k: [float(str(c[k])) for _, c in cases] for k in ("ratio_conv", "ratio_chain")}
        sums = {k: sum(n * float(str(c[k])) for n, c in cases) for k in ("us", "conv_us", "chain_us")}
        rows.append(
            [f"{name}, batch {batch}", f"{len(cases)}", f"{geometric_mean(ratios['ratio_conv']):.2f}",
             f"**{geometric_mean(ratios['ratio_chain']):.2f}**", f"{min(ratios['ratio_chain']):.2f}",
             f"{sum(r < 1 for r in ratios['ratio_chain'])}", *(f"{sums[k]:.0f}" for k in sums)]
        )  # fmt: skip
    head = ["network", "distinct convolutions", "× cuDNN alone", "× with bias and activation", "least", "lost",
            "all of a network: Weft µs", "cuDNN alone", "with bias and activation"]  # fmt: skip
    env = lines[0]
    note = f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, commit {env['commit']}"
    counts = Counter(str(x.get("commit", env["commit"])) for x in lines if x["record"] == "case")
    others = [f"{n} cases at commit {commit}" for commit, n in sorted(counts.items()) if commit != env["commit"]]
    engines = sum("engine_us" in x for x in lines)
    older = "".join(f"; {x}" for x in others) + f"; {engines} against cuDNN's own engines, too"
    return markdown(head, rows) + f"\n\n{note}{older}; `{env['command']}`" + failures(lines)


def gpu_faults() -> str:
    """Broken kernels as candidates on a GPU: what became of them and of what was measured behind them."""
    lines = records("nvidia-h200", "gpu-faults")
    cases = good(lines)
    if not cases:
        return "_not run yet: `make gpu-faults`_"
    keys = ("injected", "expected", "selected", "harmed", "deaths", "workers")
    rows = []
    for c in cases:
        ratio = float(str(c["after_over_before"]))
        rows.append(
            [str(c["case"]), *(str(c[k]) for k in keys), f"{ratio:.2f}" if ratio else "", f"{c['seconds']:.0f}"]
        )
    head = ["fault", "injected", "named rightly", "selected", "sound kernels harmed", "tuner deaths", "workers",
            "sound kernel's time after it, over before", "s"]  # fmt: skip
    rows += failed(lines, len(head))
    env = lines[0]
    note = f"{env['device']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, commit {env['commit']}"
    return markdown(head, rows) + f"\n\n{note}; `{env['command']}`"


def _memory(case: dict[str, object]) -> str:
    """Peak of what a contender holds, weights included."""
    theirs = case.get("peer_own_bytes", {})
    assert isinstance(theirs, dict)
    mine = f"{int(str(case.get('own_bytes', 0))) / 1e6:.0f}"
    peers = [v for n, v in theirs.items() if n.startswith("inductor")]
    return f"{mine} ({min(peers) / 1e6:.0f})" if peers else mine


def _differing(case: dict[str, object]) -> str:
    return f"{case['runs_that_differ']} of {case['runs']}" if "runs" in case else ""


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


def foreign_kernels() -> str:
    """Kernels of public suites: how many NVRTC takes, and how many of these are fused as they lie."""
    every = good(records("cpu", "foreign-kernels"))
    rows = []
    for suite in [*dict.fromkeys(str(x["case"]).partition("/")[0] for x in every), ""]:
        cases = [x for x in every if str(x["case"]).startswith(f"{suite}/" if suite else "")]
        count = Counter(str(x["state"]) for x in cases)
        taken = count["fused"] + count["refused"]
        why = Counter(_why_refused(str(x["reason"])) for x in cases if x["state"] == "refused")
        spilled = sum(1 for x in cases if x.get("spilled_bytes"))
        headers = sum(1 for x in cases if x["state"] == "not taken by NVRTC" and "headers" in x)
        share = f"{count['fused'] / taken:.1%}" if taken else ""
        told = ", ".join(f"{n} {reason}" for reason, n in why.most_common()) or "-"
        last = told if suite else str(count["refused"])
        numbers = (len(cases), headers, taken, count["fused"])
        rows.append([suite or "all", *map(str, numbers), share, str(spilled), last])
    head = ["suite", "kernels", "need CUDA's headers", "NVRTC takes", "fused", "of those", "with spills", "refused"]
    return markdown(head, rows, (0, 7)) if every else "_not measured yet: `python -m benchmarks.fetch_suites`_"


def _why_refused(reason: str) -> str:
    """`k.cu:3: printf: its buffer ...` -> `printf`; `k.cu:3: x: a structure ...; ...` -> `a structure ...`."""
    first, *others = reason.partition(": ")[2].partition(";")[0].split(": ")
    if " " in first or not others or first in ("printf", "assert"):
        return re.sub(r"^\S*::\S* ", "", first)
    return others[0]


def fuse_seconds() -> str:
    """How long fusing one pair takes."""
    lines = good(records("cpu", "fuse-seconds"))
    rows = []
    for x in lines:
        became = "declined" if "declined" in x else f"{x['kernels']} for {' and '.join(map(str, x['architectures']))}"
        rows.append([str(x["case"]), f"{x['seconds']:.2f}", f"{x['core_seconds']:.2f}", became])
    head = ["pair", "s", "of the core, s", "compiled kernels"]
    return markdown(head, rows, (0, 3)) if rows else "_not measured yet: `python -m benchmarks.fuse_seconds`_"


_TRUST = {
    "random-programs": "random programs: right",
    "mutants": "mutants of kernels: caught before they are timed",
    "hostile": "hostile files: a named refusal",
    "budget": "budgets: kept",
    "library-plan": "library plans: within 1.1 of eager",
    "attention-models": "attention models: alive, right, not slower than eager",
    "soak": "soak: calls",
    "random-order": "all tests in a random order, on a busy machine: green",
}
"""What the counts of a suite say."""
_GOOD = ("right", "caught", "named", "kept", "green")
_NOT_TOLD = frozenset({"record", "suite", "total", *_GOOD, "verdicts", "operators", "ways", "limit"})
_FOLDERS = ("cpu", "nvidia-h200")


def trust() -> str:
    """A line for each suite and device: its summary, and the commit that ran."""
    rows = []
    for suite, (folder, what) in ((s, (f, w)) for s, w in _TRUST.items() for f in _FOLDERS):
        lines = records(folder, suite)
        if not lines:
            continue
        end: dict[str, Any] | None = next((x for x in reversed(lines) if x["record"] == "summary"), None)
        if end is None:
            rows.append([what, str(lines[0]["device"]), "", "", "the run did not end", str(lines[0]["commit"])])
            continue
        device = str(lines[0]["device"])
        devices = sorted({str(x.get("device", device)) for x in lines if x["record"] == "case"} or {device})
        right = next((end[k] for k in _GOOD if k in end), "")
        other = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in end.items() if k not in _NOT_TOLD)
        rows.append([what, ", ".join(devices), f"{end['total']}", f"{right}", other, str(lines[0]["commit"])])
    return markdown(["suite", "device", "total", "of it", "further", "commit"], rows)


def budgets() -> str:
    """Seconds inside of `weft.compile` and the answer: a line for each network and machine, a column a budget."""
    cases: dict[tuple[str, str, str], dict[float, str]] = {}
    for folder in _FOLDERS:
        lines = records(folder, "budget")
        for c in lines:
            if c["record"] == "case":
                name = str(c["case"]).split("/")[0]
                answer = str(c.get("plan", "none"))
                if folder == "cpu" and c["load"] == "idle":  # beside others times are worth nothing
                    answer = f"{float(str(c.get('speedup_eager') or 1)):.2f} ×, {answer}"
                cell = f"{float(str(c['inside_s'])):.1f} ({answer})" if "inside_s" in c else "not ended"
                key = name, str(c.get("device", lines[0]["device"])), str(c["load"])
                cases.setdefault(key, {})[float(str(c["budget_s"]))] = cell if c["kept"] else f"**{cell}**"
    columns = sorted({b for row in cases.values() for b in row})
    rows = [[*key, *(row.get(b, "") for b in columns)] for key, row in sorted(cases.items())]
    return markdown(["network", "device", "load", *(f"{b:g} s" for b in columns)], rows)


def library_plans() -> str:
    """The plan of library calls beside the framework's own execution."""
    rows = []
    for folder in _FOLDERS:
        lines = records(folder, "library-plan")
        for c in good(lines):
            mine, theirs = float(c["weft_ms"]), float(c["peers_ms"]["eager"])
            rows.append([c["case"], folder, f"{mine:.3f}", f"{theirs:.3f}", f"{mine / theirs:.2f}", f"{c['kernels']}"])
        rows += failed(lines, 6)
    return markdown(["case", "device", "library plan ms", "eager ms", "ratio", "calls"], rows)


_ZOO = ("right", "split", "refused", "wrong", "crashed")


def zoo() -> str:
    """Families of architectures on each device: what came of them; then every one that is not as it should be."""
    rows, odd, notes = [], [], []
    for folder in _FOLDERS:
        lines = records(folder, "zoo")
        cases = [x for x in lines if x["record"] == "case"]
        for family in [*dict.fromkeys(str(c.get("family", "")) for c in cases), *(["all"] if cases else [])]:
            mine = [c for c in cases if family in ("all", c.get("family", ""))]
            count = Counter(str(c.get("outcome", "crashed")) for c in mine)
            ratios = [float(c["speedup_eager"]) for c in mine if "speedup_eager" in c]
            told = [f"{sum(bool(c.get(k)) for c in mine)}" for k in ("faster", "slower")]
            mean = f"{geometric_mean(ratios):.2f}" if ratios else ""
            rows.append([family, folder, f"{len(mine)}", *(f"{count[o]}" for o in _ZOO), *told, mean])
        for c in cases:
            why = str(c.get("why", c.get("failed", ""))).replace("|", "/")
            outcome = str(c.get("outcome", "crashed"))
            if outcome not in _ZOO[:2]:
                odd.append(f"* `{c['case']}` ({folder}): {outcome} {c.get('code', '')}: {why}".replace(" :", ":"))
            elif c.get("slower"):
                odd.append(f"* `{c['case']}` ({folder}): slower, {c['speedup_eager']} times as fast as eager")
        if lines:
            commits = ", ".join(sorted({str(c["commit"]) for c in cases}))
            device = f"{lines[0]['device']}, {lines[0]['threads']} threads"
            notes.append(f"{folder}: {device}, torch {lines[0]['torch']}, commit {commits}; `{lines[0]['command']}`")
    if not rows:
        return "_not measured yet: `python -m benchmarks.zoo --out -`_"
    head = ["family", "device", "total", *_ZOO, "faster", "slower", "× eager"]
    return "\n\n".join(filter(None, (markdown(head, rows, (0, 1)), "\n".join(odd), "\n\n".join(notes))))


def ran(head: Mapping[str, Any]) -> str:
    """For below a table of a record of a processor: what it ran on, and its command."""
    return f"{head['device']}, {head['threads']} threads, torch {head['torch']}; `{head['command']}`"


def tvm() -> str:
    """Networks as TVM's MetaSchedule tunes them in some minutes, beside Weft and eager."""
    lines = records("cpu", "tvm")
    cases = good(lines)
    if not lines:
        return "_not measured yet: `python -m benchmarks.tvm_networks --out -`_"
    rows = []
    for c in cases:
        peers, ratio = dict(c["peers_ms"]), c["speedup_tvm"]
        wrong = f"wrong by {dict(c['errors'])['tvm']:.1e}"
        rows.append([
            str(c["case"]), f"{c['weft_ms']:.2f}", f"{peers['tvm']:.2f}" if ratio else wrong, f"{peers['eager']:.2f}",
            f"{ratio:.2f}" if ratio else "", f"{c['tuning_s']:.0f} s", f"{c['tvm_tuning_s']:.0f} s",
            f"{c['tvm_trials']}", f"{c['tvm_tuned_tasks']} of {c['tvm_tasks']}", str(c["commit"]),
        ])  # fmt: skip
    head = ["case", "Weft ms", "TVM", "eager", "TVM / Weft", "Weft's tuning", "TVM's tuning", "trials", "tasks tuned",
            "commit"]  # fmt: skip
    rows += failed(lines, len(head))
    return markdown(head, rows) + "\n\n" + ran(lines[0])


H200_TFLOPS = 989.4
"""Dense products in f16, by the data sheet."""


def published() -> str:
    """Figures of peers that could not be run, by their makers and on their GPUs, beside rows of ours."""
    known = {str(x["case"]): x for x in good(records("nvidia-h200", "networks"))}
    rows = []
    for p in json.loads((ROOT / "benchmarks" / "data" / "published.json").read_text()):
        ours = float(known[p["case"]]["weft_ms"])
        theirs, mine = (p["gflop"] / ms / peak for ms, peak in ((p["ms"], p["peak_tflops"]), (ours, H200_TFLOPS)))
        rows.append([
            p["peer"], p["case"].rpartition("/")[0], p["what"], p["on"], f"{p['ms']:.2f}", f"{100 * theirs:.0f} %",
            f"{ours:.3f}", f"{100 * mine:.0f} %", p["source"],
        ])  # fmt: skip
    ours_as = "Weft ms, f16, NVIDIA H200"
    head = ["peer", "case", "form", "its GPU", "ms, published", "of its peak", ours_as, "of its peak", "source"]
    return markdown(head, rows, (0, 1, 2, 3, 8))


def foreign_files() -> str:
    """ONNX files of public repositories: what came of them, and every one that is not right."""
    lines = records("cpu", "foreign-onnx")
    cases = [x for x in lines if x["record"] == "case"]
    if not cases:
        return "_not measured yet: `python -m tools.foreign_onnx FOLDER --fetch`_"
    kinds = ("right", "opaque", "split", "refused", "wrong", "crashed")
    owners = dict.fromkeys("/".join(str(c["case"]).split("/")[:2]) for c in cases)
    rows = []
    for owner in [*owners, "all"]:
        mine = [c for c in cases if owner == "all" or str(c["case"]).startswith(f"{owner}/")]
        count = Counter(str(c["status"]) for c in mine)
        ran = len(mine) - count["not_run"]
        good_ = sum(count[k] for k in kinds[:3])
        share = f"{100 * good_ / ran:.1f} %" if ran else ""
        rows.append([owner, f"{len(mine)}", f"{ran}", *(f"{count[k]}" for k in kinds), share])
    odd = []
    for c in cases:
        if c["status"] in kinds[3:]:
            why = str(c["reason"]).replace("|", "/")
            odd.append(f"* `{c['case']}`: {c['status']}: {why}")
    note = f"ONNX Runtime {lines[0]['versions']['onnxruntime']}, commit {lines[0]['commit']}; `{lines[0]['command']}`"
    head = ["repository", "files", "run by ONNX Runtime", *kinds, "right of those"]
    return "\n\n".join(filter(None, (markdown(head, rows, (0,)), "\n".join(odd), note)))


def classes(folder: str) -> str:
    """Classes of networks against their peers on a device."""
    lines = records(folder, "classes")
    cases = good(lines)
    if not cases:
        device = "" if folder == "cpu" else " --device cuda"
        return f"_not measured yet: `python -m benchmarks.classes{device}`_"
    slow, lost = (_autotuned(), _autotune_failed()) if folder != "cpu" else ({}, {})
    rows: list[list[str]] = []
    ratios: dict[str, float] = {}
    scaled = False
    for c in cases:
        name, peers, best, ratio = str(c["case"]), dict(c["peers_ms"]), str(c["best_peer"]), float(c["speedup_best"])
        refused = {**lost.get(f"{name}/f16", {}), **c["failed_peers"]}
        kinds = _fastest(c)
        if "autotune" not in kinds and (ms := _beside(kinds, slow.get(f"{name}/f16"))):
            kinds["autotune"], scaled = ms, True
            if ratio and ms < peers[best]:
                peers["autotune"], best, ratio = ms, "autotune", ms / c["weft_ms"]
        ratios[name] = ratio
        why = ", ".join(f"{who}: {why}" for who, why in refused.items()).replace("|", "/")
        why = re.sub(r"\x1b\[\d*m", "", why)  # what is made for a terminal
        shown = [f"{kinds['autotune']:.3f}" if "autotune" in kinds else ""] if folder != "cpu" else []
        rows.append(
            [str(c["class"]), f"`{name}`", "yes" if c["tuned"] else "no", f"{c['weft_ms']:.3f}", *shown,
             f"{peers[best]:.3f} ({best})" if best else "", f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**",
             str(c["kernels"]), str(c["plan"]), f"{c['tuning_s']:.0f} s", str(c.get("commit", "")), why]
        )  # fmt: skip
    more = ["max-autotune in a graph"] if folder != "cpu" else []
    head = ["class", "case", "looked at", "Weft ms", *more, "best peer", "× best peer", "kernels", "plan", "tuning",
            "commit", "peers that failed"]  # fmt: skip
    for who, of in (("all", cases), ("not looked at", [c for c in cases if not c["tuned"]])):
        measured = [ratios[c["case"]] for c in of if ratios[c["case"]]]
        mean = f"**{geometric_mean(measured):.2f}**" if measured else ""
        rows.append([f"geometric mean, {who}", *[""] * (4 + len(more)), mean, *[""] * 5])
    rows += failed(lines, len(head))
    return markdown(head, rows, (0, 1)) + "\n\n" + ran(lines[0]) + (SCALED if scaled else "")


def _autotune_failed() -> dict[str, dict[str, str]]:
    """Why max-autotune, or eager beside it, could not be measured, by case and peer."""
    lines = [x for x in records("nvidia-h200", "autotune") if x.get("record") == "case"]
    return {
        str(x["case"]): {"autotune": str(x["failed"])} if "failed" in x else dict(x.get("failed_peers", {}))
        for x in lines
    }


def classes_search(folder: str) -> str:
    """What searches of some seconds find, over what the longest finds."""
    lines = records(folder, "classes-search")
    cases = good(lines)
    if not cases:
        device = "" if folder == "cpu" else " --device cuda"
        return f"_not measured yet: `python -m benchmarks.classes{device} --search 5,10,15,30,60`_"
    seconds = list(dict.fromkeys(s for c in cases for s in dict(c["over_last"])))
    rows = [
        [str(c["class"]), f"`{c['case']}`", *(f"{dict(c['over_last']).get(s, math.nan):.2f}" for s in seconds)]
        for c in cases
    ]
    means = [[float(x) for c in cases if (x := dict(c["over_last"]).get(s))] for s in seconds]
    rows.append(["geometric mean", "", *(f"**{geometric_mean(x):.2f}**" for x in means)])
    head = ["class", "case", *(f"{s} s" for s in seconds)]
    rows += failed(lines, len(head))
    return markdown(head, rows, (0, 1)) + "\n\n" + ran(lines[0])


def latency_critical() -> str:
    """The steps of plans that best-effort jobs are fused with, and the fastest kernel of each among those measured."""
    data = json.loads((ROOT / "benchmarks" / "data" / "nvidia-h200" / "latency-critical.json").read_text())
    rows = []
    for kernel in data["kernels"]:
        schedule, us = kernel["timed"][0]
        params = dict(schedule["params"])
        sums = f", {params['split']} CTAs to a sum" if params.get("split", 1) > 1 else ""
        told = f"`{params['template']}`, {params['bm']}x{params['bn']}{sums}"
        rows.append([f"`{kernel['name']}`", f"{us:.1f}", str(kernel["times"]), told])
    return markdown(["kernel", "us", "times in the plan", "fastest kernel"], rows)


DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLES: dict[str, Callable[[], str]] = {
    "networks": networks,
    "gpu-networks": gpu_networks,
    "gpu-networks-again": gpu_networks_again,
    "gpu-networks-later": partial(gpu_networks, "networks-later"),
    "gpu-memory": gpu_memory,
    "gpu-kernels": gpu_kernels,
    "gpu-mlp": gpu_mlp,
    "gpu-convolutions": gpu_convolutions,
    "gpu-faults": gpu_faults,
    "conformance": conformance,
    "foreign-kernels": foreign_kernels,
    "fuse-seconds": fuse_seconds,
    "trust": trust,
    "budgets": budgets,
    "library-plans": library_plans,
    "zoo": zoo,
    "tvm": tvm,
    "published": published,
    "foreign-files": foreign_files,
    "classes": partial(classes, "cpu"),
    "classes-search": partial(classes_search, "cpu"),
    "classes-gpu": partial(classes, "nvidia-h200"),
    "classes-search-gpu": partial(classes_search, "nvidia-h200"),
    "latency-critical": latency_critical,
    **record_tables.TABLES,
    **co_runner_tables.TABLES,
    **colocate_tables.TABLES,
    **pair_tables.TABLES,
    **sanitize_table.TABLES,
}


def written(text: str) -> str:
    """A document with its tables anew: what stands between `<!-- table: NAME -->` and `<!-- end -->`."""
    for name, make in TABLES.items():
        if f"<!-- table: {name} -->" not in text:
            continue
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        table = make()
        text = pattern.sub(lambda m, table=table: m[1] + table + "\n" + m[2], text)  # type: ignore[misc]
    return text


def stale() -> list[str]:
    """The documents that hold another table than the records make."""
    return [p.name for p in DOCUMENTS if written(p.read_text()) != p.read_text()]


def main() -> None:
    """Write the tables, or say where they are old."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if old := stale():
            sys.exit(f"tables of another record than is kept: {', '.join(old)}; `python tools/tables.py` writes them")
        return
    for path in DOCUMENTS:
        text = path.read_text()
        if (made := written(text)) != text:
            path.write_text(made)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
