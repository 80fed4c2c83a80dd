"""What all tables share: records, rows that failed, markdown; and the tables of single studies and fused kernels."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STUDIES = ROOT / "lab" / "results" / "nvidia-h200"
"""Tables of probes: a record whose first line names the columns."""
GPU = "nvidia-h200"
_NETWORKS = {"vgg16": "VGG-16", "resnet50": "ResNet-50", "inception_v3": "Inception-v3"}
_GROUPS = {
    "inception 35 1x1": "Inception-v3, 35x35: four 1x1",
    "inception 35": "the same: 5x5 and 3x3",
    "inception 35 pool": "the same: 5x5, 3x3 and the 1x1 of the pool",
    "inception 17": "17x17: 1x7 and 7x1",
    "inception 17 pool": "17x17: 1x7, 7x1 and the 1x1 of the pool",
    "inception 8": "8x8: 1x3, 3x1, 1x3, 3x1",
    "segformer decoder": "SegFormer's decoder: 16384, 4096, 1024, 256 rows to 256",
    "q beside k, v": "q (1024 rows to 160) beside k and v (256 to 320)",
    "experts up": "eight experts, 3 to 412 rows (four times at 16), 512 to 2048",
    "experts down": "the same, 2048 to 512",
    "detector heads": "3x3 convolutions of a detector at 52, 26, 13",
}
_PADDED = {
    "layers 1003": "1000-1003-1003-1001, GELU, 4096 rows",
    "residual 35": "7 convolutions 3x3 of 35 channels with sums, 8 x 56 x 56",
    "head 255": "3x3, 128-255-128, SiLU, 8 x 40 x 40",
    "focus yolox": "12 channels of four pixels, 3x3 to 16, 16 x 416 x 416",
    "neck 3": "3x3, 64-3-64, 4 x 128 x 128",
    "chain 35": "3x3, 64-35-35-35-64, 8 x 56 x 56",
    "layers 100": "128-100-100-100-64, 65536 rows",
    "layers 255 35": "512-255-35-512, 8192 rows",
}
_READ_TBS = 4.0
"""At which the weights of a product with few rows are read."""


def records(device: str, suite: str) -> list[dict[str, Any]]:
    """Lines of one suite; empty if it was never run."""
    return lines_of(RESULTS / device / f"{suite}.jsonl")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Lines of a record; empty if there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def good(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of cases that were measured."""
    return [dict(x) for x in lines if x.get("record") == "case" and "failed" not in x]


def failed(lines: Iterable[Mapping[str, Any]], columns: int = 0) -> list[list[str]]:
    """Rows of cases that could not be measured when they were tried last: none of them is left out of a table."""
    rows = []
    for x in lines:
        if x.get("record") == "case" and "failed" in x:
            name = str(x.get("case", x.get("name")))
            name += "".join(f", {k} {x[k]}" for k in ("batch", "group") if k in x)
            last = f" (last measured at {x['last_measured']})" if "last_measured" in x else ""
            rows.append([name, f"**failed** at {x['commit']}: {x['failed']}{last}", *[""] * (columns - 2)])
    return rows


def failures(lines: Iterable[Mapping[str, Any]]) -> str:
    """The same for below a table whose rows are no cases."""
    rows = failed(lines, 2)
    return "".join(f"\n\n{name}: {why}" for name, why in rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> str:
    """A table; columns of text are left-aligned."""
    marks = ["---" if i in set(left) else "---:" for i in range(len(head))]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(marks) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def note(lines: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]] | None = None) -> str:
    """For below a table: GPU, driver and command of its record, and the commits of `rows` (without: of all lines)."""
    env = lines[0]
    commits = ", ".join(sorted({str(x["commit"]) for x in (lines if rows is None else rows) if "commit" in x}))
    return f"\n\n{env['device']}, driver {env.get('driver', '?')}, commit {commits}; `{env['command']}`"


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm; 0 for nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


def study(name: str) -> str:
    """A table of a probe: its columns and cells as they stand in the record."""
    head, *lines = lines_of(STUDIES / f"{name}.jsonl")
    columns: list[str] = head["columns"]
    rows, first = [], ""
    for x in lines:
        label = "" if x["case"] == first else str(x["case"])
        first = str(x["case"])
        rows.append([label, *(str(x.get(k, "")) for k in columns[1:])])
    words = [sum(r[i][:1].isalpha() or r[i][:1] == "`" for r in rows) * 2 > len(rows) for i in range(len(columns))]
    return markdown(columns, rows, {0} | {i for i, text in enumerate(words) if text})


def padded() -> str:
    """Small networks with odd channels, with padded tensors and without."""
    lines = records(GPU, "padded")
    rows = []
    for x in good(lines):
        name, dtype = x["case"].split("/")
        plain, wide = x["us"]["plain"], x["us"]["padded"]
        ratio = f"**{plain / wide:.2f}**" if plain / wide > 1.05 else f"{plain / wide:.2f}"
        kernels = f"{x['plain_kernels']} → {x['padded_kernels']}"
        rows.append([f"{name} ({_PADDED.get(name, '')})", dtype, f"{plain:.1f}", f"{wide:.1f}", ratio, kernels])
    head = ["network", "type", "without µs", "with µs", "×", "kernels"]
    return markdown(head, [*rows, *failed(lines, len(head))])


def pooled() -> str:
    """A convolution and what follows it in one kernel / by the two fastest kernels."""
    lines = records(GPU, "pooled")
    cells: dict[str, dict[int, str]] = {}
    for x in good(lines):
        case = re.fullmatch(r"(\d+)x(\d+) -> (\d+) (\S+)/(\d), (.*)", x["case"])
        assert case, x["case"]
        behind = f"1x1 to {case[6]}"
        if found := re.fullmatch(r"\((\d), (\d), \d\)", case[6]):
            behind = f"pool {found[1]}x{found[1]}" + (f"/{found[2]}" if found[1] != found[2] else "")
        stride = f"/{case[5]}" if case[5] != "1" else ""
        name = f"{_NETWORKS[x['name'].split()[0]]}: {case[4]}{stride} to {case[3]} at {case[2]}, {behind}"
        one, two = x["fused_us"], x["two_us"]
        text = f"{two:.1f} (no kernel)" if one is None else f"{one:.1f} / {two:.1f}"
        cells.setdefault(name, {})[x["batch"]] = f"**{text}**" if one is not None and one < two else text
    rows = [[name, *(row.get(b, "") for b in (1, 16))] for name, row in cells.items()]
    return markdown(["pair", "batch 1", "batch 16"], [*rows, *failed(lines, 3)])


def grouped() -> str:
    """Products one after another / on parallel branches / in one launch."""
    lines = records(GPU, "grouped")
    cells: dict[str, dict[str, str]] = {}
    for x in good(lines):
        if "row_us" not in x:
            continue
        name, batch = x["name"].rsplit(" b", 1)
        one = f"**{x['one_us']:.1f}**" if x["one_us"] < min(x["row_us"], x["parallel_us"]) else f"({x['one_us']:.1f})"
        cells.setdefault(_GROUPS.get(name, name), {})[batch] = f"{x['row_us']:.1f} / {x['parallel_us']:.1f} / {one}"
    rows = [[name, *(row.get(b, "") for b in ("1", "16"))] for name, row in cells.items()]
    return markdown(["group", "batch 1", "batch 16"], [*rows, *failed(lines, 3)])


def _size(name: str) -> tuple[int, int, int]:
    found = re.match(r"M=(\d+)_N=(\d+)_K=(\d+)", name)
    assert found, name
    return int(found[1]), int(found[2]), int(found[3])


def int8() -> str:
    """Products of bytes: the fastest of each side in two races."""
    lines = records(GPU, "int8")
    best: dict[str, dict[str, float]] = {}
    for x in lines:
        if "case" in x and "us" in x:
            side = "_int_mm" if x["name"] == "_int_mm" else x["side"]
            row = best.setdefault(x["case"], {})
            key = f"{x['race']} {side}"
            row[key] = min(row.get(key, math.inf), x["us"])
    columns = ("i32 weft", "i32 library", "i32 _int_mm", "bf16 weft", "bf16 library")
    rows = []
    for case, row in sorted(best.items(), key=lambda c: (len(set(_size(c[0]))), math.prod(_size(c[0])))):
        m, n, k = _size(case)
        name = f"{m}^3" if m == n == k else f"{m}x{n}x{k}"
        rows.append([name, *(f"{row[c]:.1f}" if c in row else "" for c in columns)])
    return markdown(["product", "sums", "cuBLASLt", "`_int_mm`", "scaled", "cuBLASLt and torch"], rows)


def few_rows() -> str:
    """Products in f16 with up to 32 rows, of the record of products."""
    lines = records(GPU, "gemm")
    rows = []
    for x in good(lines):
        m, n, k = _size(x["case"])
        if x["group"] != "f16" or m > 32:
            continue
        floor = 2 * (m * k + n * k + m * n) / _READ_TBS / 1e6
        template = re.search(r"template=(\w+)", x["weft_name"])
        rows.append(
            [f"{m}", f"{n} x {k}", f"{floor:.1f}", f"{x['weft_us']:.1f}", template[1] if template else "",
             f"{x['library_us']:.1f}", f"{x['ratio']:.2f}"]
        )  # fmt: skip
    rows.sort(key=lambda r: int(r[0]))
    head = ["M", "N x K", "floor", "Weft", "template", "cuBLASLt", "ratio"]
    few = [x for x in lines if x.get("group") == "f16" and x.get("record") == "case" and _size(x["case"])[0] <= 32]
    return markdown(head, [*rows, *failed(few, len(head))], (1, 4))


def mlp_training() -> str:
    """Steps of training by `weft.nn` and by its peers; those of before there was a record, until it is measured."""
    lines = records(GPU, "mlp-training")
    rows = []
    for x in good(lines):
        if x["kind"] != "time":
            continue
        own, eager, compiled = (x.get(who, {}) for who in ("fused", "eager", "compile"))
        ratios = [f"{other['step'] / own['step']:.2f}" if "step" in other else "" for other in (eager, compiled)]
        graphs = [f"{w['graph']:.0f}" if isinstance(w.get("graph"), float | int) else "" for w in (own, eager)]
        rows.append([x["case"], f"{own['forward']:.0f}", f"{own['step']:.0f}", *ratios, *graphs])
    if not lines:
        return study("mlp-training")
    head = ["network", "forward µs", "step µs", "× eager", "× torch.compile", "step in a graph µs", "eager's"]
    times = markdown(head, [*rows, *failed(lines, len(head))])
    checks = [x for x in good(lines) if x["kind"] == "check"]
    right = sum(bool(x["right"] and x["equal_bits"]) for x in checks)
    note = f"{lines[0]['device']}, torch {lines[0]['torch']}, commit {lines[0]['commit']}; `{lines[0]['command']}`"
    told = f"; gradients of {right} of {len(checks)} networks right against float64, with equal bits" if checks else ""
    return f"{times}\n\n{note}{told}"


_KINDS = {
    "identical": "same text", "text_only": "same machine code", "nondeterministic": "same, of several",
    "code": "other machine code", "launch": "other launch", "cannot_be_made": "cannot be made",
    "not_compiled": "not compiled", "gone": "gone", "new": "new",
}  # fmt: skip
"""The kinds of `tools/replay.py`, as a reader of the table calls them."""


def replay() -> str:
    """Kernels of two commits by kind: networks by the GPU that they are planned for, then cases of the tests."""
    lines = records("cpu", "replay")
    cases = sorted(good(lines), key=lambda x: (x["base"], x["case"].startswith("test_"), x["case"]))
    if not cases:
        return "_not compared yet: `make replay BASE=COMMIT WITH=--record`_"
    shown = [k for k in _KINDS if any(c[k] for c in cases)]
    rows = [[c["case"], f"{c['base']} to {c['commit']}", *(str(c[k]) for k in shown)] for c in cases]
    total = [sum(c[k] for c in cases) for k in shown]
    rows.append(["in all", "", *(f"**{x}**" for x in total)])
    compilers = " and ".join(sorted({c["nvrtc"].split()[0] for c in cases}))
    return markdown(["kernels of", "commits", *(_KINDS[k] for k in shown)], rows, (0, 1)) + f"\n\nNVRTC {compilers}"


def is_slower(row: Mapping[str, Any]) -> bool:
    """Whether a kernel of `tools.replay_times` is: by over 2 %, and by over three times what it differs from itself."""
    ratio, noise = float(str(row["ratio"])), abs(float(str(row["noise"])) - 1.0)
    return ratio - 1.0 > max(0.02, 3.0 * noise)


def replay_times() -> str:
    """Kernels with other machine code than at an earlier commit beside the old ones, by the test that has them."""
    lines = records("nvidia-h200", "replay-times")
    cases = good(lines)
    if not cases:
        return "_not measured yet: `python -m tools.replay_times build/differing.json --out -`_"
    groups: dict[str, list[dict[str, Any]]] = {}
    for c in cases:
        groups.setdefault(str(c["case"]).split()[0], []).append(c)
    rows = []
    for name, own in [*sorted(groups.items()), ("in all", cases)]:
        timed = [c for c in own if "ratio" in c]
        ratios = [float(c["ratio"]) for c in timed]
        noise = max((abs(float(c["noise"]) - 1.0) for c in timed), default=0.0)
        shown = (
            [f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}"] if ratios else ["", "", ""]
        )
        slower = [c for c in timed if is_slower(c)]
        most = f"{1e3 * max(float(c['new_us']) - float(c['old_us']) for c in slower):.0f}" if slower else ""
        rows.append([name, str(len(timed)), *shown, f"{noise:.3f}", str(len(slower)), most,
                     str(sum(not c["same_bits"] for c in timed)), str(len(own) - len(timed))])  # fmt: skip
    head = ["kernels of", "timed", "new over old", "least", "most", "a kernel over itself: farthest from 1", "slower",
            "by ns at most", "other bits", "left out"]  # fmt: skip
    return markdown(head, rows) + note(lines, cases)


_WAYS = {
    "loop": "plain loop, one process", "embedded": "`Server`, in this process", "isolated": "`Server`, with its worker",
    "http": "HTTP, binary tensors", "grpc": "gRPC",
}  # fmt: skip


def serve() -> str:
    """A server on this machine beside the plan in a plain loop: a closed loop, then arrivals at half of its rate."""
    lines = records("cpu", "serve")
    cases = {str(c["case"]): c for c in good(lines)}
    rows = []
    for way, told in _WAYS.items():
        closed, opened = cases.get(f"{way}: closed"), cases.get(f"{way}: open")
        if closed is None or opened is None:
            continue
        times = [" / ".join(f"{c[f'p{q}_ms']:.2f}" for q in (50, 95, 99)) for c in (closed, opened)]
        rows.append([told, f"{closed['per_second']:.0f}", times[0], f"{opened['rate']:.0f}", times[1],
                     f"{opened['sent_late_p99_ms']:.1f}", f"{closed['load_average']:.0f}"])  # fmt: skip
    if not rows:
        return "_not measured yet: `python -m benchmarks.serve`_"
    head = ["", "a second, closed loop", "p50 / p95 / p99 ms", "Poisson arrivals a second", "p50 / p95 / p99 ms",
            "sender late, p99 ms", "load average"]  # fmt: skip
    env = lines[0]
    said = (
        f"{env['device']}, {env['threads']} threads, torch {env['torch']}, commit {env['commit']}; `{env['command']}`"
    )
    return markdown(head, rows + failed(lines, len(head))) + f"\n\n{said}"


def _run_by(lines: Sequence[Mapping[str, Any]]) -> str:
    env = lines[0]
    return (
        f"{env['device']}, {env['threads']} threads, torch {env['torch']}, commit {env['commit']}; `{env['command']}`"
    )


def _flat(cases: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Resident memory of a process: at half of the run, and at its end."""
    row = cases.get(f"memory: {name}", {})
    return f"{row['half_mib']:.1f} / {row['last_mib']:.1f}" if "half_mib" in row else "-"


def serve_soak() -> str:
    """Hours of resnet50 through a server, beside the same plan in a plain loop."""
    lines = records("cpu", "serve-soak")
    cases = {str(c["case"]): c for c in good(lines)}
    if "server" not in cases or "count" not in cases:
        return "_not measured yet: `python -m benchmarks.serve_soak`_"
    count = cases["count"]
    rows = []
    for case, told in (("server", "`weft serve`, HTTP"), ("plain loop", "plain loop")):
        c = cases[case]
        rows.append([told, f"{c['hours']:.2f}", f"{c['rate']:g}", str(c["asked"]), str(c["queries"]), str(c["wrong"]),
                     str(c["errors"]), " / ".join(f"{c[f'p{q}_ms']:.0f}" for q in (50, 95, 99)), f"{c['most_ms']:.0f}",
                     f"{c['sent_late_p99_ms']:.0f}"])  # fmt: skip
    head = ["", "hours", "arrivals a second", "asked", "answered", "other bits", "errors", "p50 / p95 / p99 ms",
            "most ms", "sender late, p99 ms"]  # fmt: skip
    memory = [
        [name, _flat(cases, name), f"{cases[f'memory: {name}'].get('mib_an_hour', math.nan):+.1f}"]
        for name in ("worker", "front end", "command", "plain loop", "caller")
        if f"memory: {name}" in cases
    ]
    ended = f"lost {count['lost']}" if "lost" in count else f"under way when this was written {count['under_way']}"
    text = (f"The server counted {count['answered_by_the_server']} answers, {ended}, processes that died "
            f"{count['processes_died']}.")  # fmt: skip
    return (
        markdown(head, rows + failed(lines, len(head))) + f"\n\n{text}\n\n"
        + markdown(["resident memory", "at half of the run / at its end, MiB", "second half, MiB an hour"], memory)
        + f"\n\n{_run_by(lines)}"
    )  # fmt: skip


def serve_many() -> str:
    """A million queries to a small network through a server, beside the same plan in a plain loop."""
    lines = records("cpu", "serve-many")
    cases = {str(c["case"]): c for c in good(lines)}
    rows = []
    for case, told, processes in (
        ("plain loop", "plain loop", ("process",)),
        ("HTTP", "`weft serve`, HTTP, binary tensors", ("front end", "worker")),
        ("gRPC", "`weft serve`, gRPC", ("front end", "worker")),
        ("Server", "`Server` and its worker", ("queue and callers", "worker")),
    ):
        c = cases.get(case)
        if c is None:
            continue
        memory = ", ".join(f"{p} {_flat(cases, f'{case}, {p}')}" for p in processes)
        rows.append([told, str(c["asked"]), str(c.get("answered_by_the_server", "-")), str(c["lost"]),
                     str(c["doubled"]), str(c["wrong"]), str(c["errors"]), f"{c['per_second']:.0f}",
                     " / ".join(f"{c[f'p{q}_ms']:.2f}" for q in (50, 95, 99)), memory,
                     f"{c['load_average']:.0f}"])  # fmt: skip
    if not rows:
        return "_not measured yet: `python -m benchmarks.serve_many`_"
    head = ["", "asked", "counted by the server", "lost", "doubled", "wrong", "errors", "a second",
            "p50 / p95 / p99 ms", "MiB at half of the run / at its end", "load average"]  # fmt: skip
    return markdown(head, rows + failed(lines, len(head))) + f"\n\n{_run_by(lines)}"


def serve_faults() -> str:
    """Processes of a server that are killed: how long until the next right answer."""
    lines = records("cpu", "serve-faults")
    rows = []
    for c in good(lines):
        spread = " / ".join(f"{c[k]:.2f}" for k in ("p50_s", "p90_s", "p99_s", "most_s"))
        bound = 0.5 if "standby" in c["case"] else 10.0
        within = sum(x <= bound for x in c["all_s"])
        rows.append([c["case"], str(c["kills"]), spread, f"{within} of {len(c['all_s'])} in {bound:g} s",
                     str(c["asked"]), str(c["right"]), str(c["wrong"]), str(c["errors"]),
                     f"{c['load_average']:.0f}"])  # fmt: skip
    if not rows:
        return "_not measured yet: `python -m benchmarks.serve_faults`_"
    head = ["killed", "times", "next answer after, p50 / p90 / p99 / most s", "within", "asked", "right", "wrong",
            "errors", "load average"]  # fmt: skip
    return markdown(head, rows + failed(lines, len(head))) + f"\n\n{_run_by(lines)}"


def serve_overload() -> str:
    """Two models of one server, one of which gets more queries than it can answer."""
    lines = records("cpu", "serve-overload")
    rows = []
    for c in good(lines):

        def spread(kind: str, c: Mapping[str, Any] = c) -> str:
            if f"{kind}_p50_ms" not in c:
                return "-"
            return " / ".join(f"{c[f'{kind}_{x}_ms']:.0f}" for x in ("p50", "p99", "most"))

        asked = f"{c['load']:g} x {c['keeps_up_with']:g}" if "keeps_up_with" in c else f"{c['rate']:g}"
        rows.append([c["case"], asked, f"{c['timeout_s']:g}", str(c["asked"]), str(c["answered"]), spread("answered"),
                     str(c["late"]), f"{c['admitted_in_time']:.2%}", str(c["refused"]), spread("refused"),
                     str(c["wrong"]), f"{c['sent_late_p99_ms']:.0f}", f"{c['load_average']:.0f}"])  # fmt: skip
    if not rows:
        return "_not measured yet: `python -m benchmarks.serve_overload`_"
    head = ["model", "arrivals a second", "timeout, s", "asked", "answered", "p50 / p99 / most ms", "late (504)",
            "admitted, in time", "refused (429)", "p50 / p99 / most ms", "wrong", "sender late, p99 ms",
            "load average"]  # fmt: skip
    return markdown(head, rows + failed(lines, len(head))) + f"\n\n{_run_by(lines)}"


def training(device: str = GPU, module: str = "gpu_training") -> str:
    """Training steps beside their peers."""
    lines = records(device, "training")
    cases = good(lines)
    if not cases:
        return f"_not measured yet: `python -m benchmarks.{module} --out -`_"
    rows = []
    for c in cases:
        own, best = c["runs"].get("weft", {}), c.get("best_peer", "")
        peers = ", ".join(f"{who} {ms:.2f}" for who, ms in c["peers_ms"].items())
        ratio = f"{c['speedup_best']:.2f}" if "speedup_best" in c else ""
        bold = ratio if float(ratio or 1) >= 1 else f"**{ratio}**"
        rows.append([
            f"`{c['case']}`",
            f"{c['weft_ms']:.2f}" if "weft_ms" in c else str(own.get("failed", "")),
            peers,
            bold + (f" ({best})" if best else ""),
            *([f"{c['memory_share']:.2f}" if "memory_share" in c else ""] if device == GPU else []),
            *([_trained(c.get("trained"))] if device == GPU else []),
            {"True": "yes", "False": "**no**"}.get(str(c.get("right")), ""),
            str(own.get("plan", "")),
            str(own.get("kernels", "")),
            f"{own['tuning_s']:.0f}" if "tuning_s" in own else "",
            str(c.get("commit", "")),
        ])  # fmt: skip
    memory = ["memory over torch.compile's", "loss at last (eager's range)"] if device == GPU else []
    head = ["network/batch", "Weft ms", "peers ms", "× best peer", *memory, "losses right",
            "plan", "kernels", "seconds of search", "commit"]  # fmt: skip
    return markdown(head, rows + failed(lines, len(head))) + f"\n\n{_run_by(lines)}"


def _trained(found: dict[str, Any] | None) -> str:
    """Weft's mean loss after many steps, beside the least and most of eager's seeds; bold outside of them."""
    if not found:
        return ""
    mean, (least, most) = f"{found['weft']:.4g}", found["eager"]
    return f"{mean if found['inside'] else f'**{mean}**'} ({least:.4g} to {most:.4g})"


def training_faults() -> str:
    """Faults in training steps, on a processor and on a GPU."""
    rows, notes = list[list[str]](), ""
    head = ["fault", "device", "injected", "right", "wrong", "commit"]
    for device in ("cpu", GPU):
        lines = records(device, "training-faults")
        for x in good(lines):
            wrong = "; ".join(x["wrong"]) or "none"
            rows.append([x["case"], device, f"{x['injected']}", f"{x['right']}", wrong, str(x.get("commit", ""))])
        rows += failed(lines, len(head))
        notes += f"\n\n{_run_by(lines)}" if good(lines) else ""
    if not rows:
        return "_not measured yet: `python -m benchmarks.training_faults --out -`_"
    return markdown(head, rows) + notes


TABLES: dict[str, Callable[[], str]] = {
    "training": training,
    "training-faults": training_faults,
    "training-cpu": partial(training, "cpu", "training"),
    "serve": serve,
    "serve-soak": serve_soak,
    "serve-many": serve_many,
    "serve-faults": serve_faults,
    "serve-overload": serve_overload,
    "replay": replay,
    "replay-times": replay_times,
    "padded": padded,
    "pooled": pooled,
    "grouped": grouped,
    "int8": int8,
    "few-rows": few_rows,
    **{path.stem: partial(study, path.stem) for path in sorted(STUDIES.glob("*.jsonl"))},
    "mlp-training": mlp_training,
}
