"""How good the model of a GPU is, judged by what was measured: ranks, regret, bounds and the sign of fusions.

    python -m benchmarks.model_quality [first|later|types]                recorded tables, which `make test-all` replays
    python -m benchmarks.model_quality --database F... --facts F [--record F] [--networks A,B,...]

`F` are tuning databases (`tuning.sqlite3`) and the record of the GPU they belong to (`facts/gpu-*.json`), as they lie
in a cache directory; a recorded table of that GPU has its facts too. Source of the figures and of their targets:
performance notes, section 8.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.data.fusions import fusions
from benchmarks.data.measured import Table, Timed, load_table, problem_of, table_of
from benchmarks.data.recorded import kernels_of_then
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.predict import predicted_us
from weft.generate.cuda.templates import TENSOR
from weft.ir import attrs as a
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.orchestrate.estimate_cuda import gpu_estimate_us, gpu_lower_bound_us
from weft.tune.store import FILE_NAME, Database, Record

RECORDED = Path(__file__).parent / "data" / "nvidia-h200" / "kernels.json"
LATER = RECORDED.with_name("kernels-later.json")
"""Of twenty searches that had more templates to choose from."""
TYPES = RECORDED.with_name("kernels-types.json")
"""Of searches in f16, TF32 and f32, by kernels that end as today's do."""
TABLES = {"types": TYPES, "later": LATER, "first": RECORDED}
PLACES = {"first": "model-quality", "later": "model-quality-later", "types": "model-quality-types"}
"""Where the figures of a table stand in the document."""
OVERVIEW = "model-quality-tables"
DOCUMENT = Path(__file__).parent.parent / "docs" / "performance-model.md"
NOTICED = 0.05
"""Differences below this are noise."""
SPREAD = 1.5
"""Slowest over fastest kernel of a problem whose ranks are worth a correlation."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How the kernels of one problem are ranked; kernels that no model ranks count in the order they were offered."""

    problems: int
    kernels: int
    spearman: float
    """Median over problems with at least 4 kernels and a spread of at least 1.5; NaN without any."""
    pairs: int
    """Of kernels of one problem that differ by more than 5 %."""
    pairs_right: float
    recall_8: float
    """Share of problems whose best kernel is among the first 8."""
    regret_1: float
    """Mean over problems: best of the first k over best of all, minus 1."""
    regret_3: float
    regret_8: float
    regret_8_p90: float


@dataclass(frozen=True, slots=True)
class Estimates:
    """How the estimates of problems compare with their fastest kernels."""

    problems: int
    spearman: float
    ratio: float
    """Median of measured over estimated."""
    error: float
    """Median factor by which a problem is off that ratio."""
    error_p90: float


@dataclass(frozen=True, slots=True)
class Quality:
    """All figures of one table."""

    candidates: int
    problems: int
    violations: int
    """Measured times below the sound bound: wrongly pruned."""
    discarded: float
    """Share of kernels that a bound above the best time of their problem would have spared."""
    ranking: dict[str, Ranking]
    """By family of kernels, and of all."""
    estimates: dict[str, Estimates]
    """By family of problems, and of all."""
    fusions: int
    """Measured problems that do at once what two measured ones do in turn, more than 5 % apart."""
    fusions_right: float
    """Share of them whose faster side the estimates name."""


def family(problem: Problem) -> str:
    """What a problem mostly is."""
    graph = problem.graph
    categories = {CATEGORY[n.prim] for n in graph.nodes}
    for node in graph.nodes:
        if isinstance(node.attrs, a.ConvAttrs):
            return "grouped convolution" if node.attrs.groups > 1 else "convolution"
        if node.prim is Prim.MATMUL:
            return "product"
    if Category.REDUCE in categories:
        return "rows"
    return "window" if Category.WINDOW in categories else "pointwise"


def judge(table: Table) -> Quality:
    """The figures of a table."""
    problems = [problem_of(case.text) for case in table.cases]
    facts = [table.facts_of(case) for case in table.cases]
    bounds = [gpu_lower_bound_us(p, f) for p, f in zip(problems, facts, strict=True)]
    guesses = [gpu_estimate_us(p, f) for p, f in zip(problems, facts, strict=True)]
    families = [family(p) for p in problems]
    signs = _signs(table, guesses)
    timed = [(k, b, c.best_us) for c, b in zip(table.cases, bounds, strict=True) for k in c.kernels]
    return Quality(
        candidates=len(timed),
        problems=len(problems),
        violations=sum(k.us < bound for k, bound, _ in timed),
        discarded=sum(bound > best for _, bound, best in timed) / max(1, len(timed)),
        ranking=_rankings(table, problems),
        estimates=_estimates(families, guesses, [c.best_us for c in table.cases]),
        fusions=len(signs),
        fusions_right=_share(signs),
    )


def judge_recorded(name: str) -> Quality:
    """The figures of one of `TABLES`, the models speaking of the kernels that it was measured of."""
    with nullcontext() if name == "types" else kernels_of_then():
        return judge(load_table(TABLES[name]))


def _signs(table: Table, guesses: Sequence[float]) -> list[bool]:
    """Of each fusion that matters: whether the estimates name the faster side."""
    found = []
    for whole, *parts in table.fusions:
        fused, apart = table.cases[whole].best_us, sum(table.cases[i].best_us for i in parts)
        if abs(math.log(fused / apart)) > NOTICED:
            found.append((guesses[whole] < sum(guesses[i] for i in parts)) == (fused < apart))
    return found


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else math.nan


def _rankings(table: Table, problems: Sequence[Problem]) -> dict[str, Ranking]:
    groups: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for case, problem in zip(table.cases, problems, strict=True):
        by_kind: dict[str, list[Timed]] = defaultdict(list)
        for kernel in case.kernels:
            if kernel.schedule.generator == "cuda":
                by_kind[_kind(kernel, problem, tf32=case.tf32)].append(kernel)
        for kind, kernels in by_kind.items():
            groups[kind].append(_predicted(problem, kernels, table.facts_of(case)))
        if by_kind and "rows" not in by_kind:
            together = [k for found in by_kind.values() for k in found]
            groups["all that a model ranks"].append(_predicted(problem, together, table.facts_of(case)))
    return {kind: _ranking(groups[kind]) for kind in sorted(groups)}


def _kind(kernel: Timed, problem: Problem, *, tf32: bool) -> str:
    """Its template, or what its loops are over; apart where tensor cores take f32."""
    template = dict(kernel.schedule.params).get("template")
    if template is None:
        return "rows" if family(problem) == "rows" else "pointwise"
    wide = (
        tf32 and template in TENSOR and any(problem.graph.type_of(i).dtype is DType.F32 for i in problem.graph.inputs)
    )
    return f"{template}, TF32" if wide else str(template)


def _predicted(problem: Problem, kernels: Sequence[Timed], facts: GpuFacts) -> list[tuple[float, float]]:
    """(predicted, measured) microseconds of kernels."""
    found = []
    for position, kernel in enumerate(kernels):
        guess = predicted_us(problem, kernel.schedule, facts)
        found.append((float(position) if guess is None else guess, kernel.us))
    return found


def _ranking(problems: Sequence[Sequence[tuple[float, float]]]) -> Ranking:
    correlations, right = [], []
    regrets: dict[int, list[float]] = {1: [], 3: [], 8: []}
    recalled = []
    for pairs in problems:
        times = [us for _, us in pairs]
        if len(pairs) >= 4 and max(times) >= SPREAD * min(times):
            correlations.append(spearman([p for p, _ in pairs], times))
        for i, (p, us) in enumerate(pairs):
            right += [(p < q) == (us < vs) for q, vs in pairs[:i] if abs(math.log(us / vs)) > NOTICED]
        order = [us for _, us in sorted(pairs, key=lambda x: x[0])]
        recalled.append(min(order) in order[:8])
        for k, found in regrets.items():
            found.append(min(order[:k]) / min(order) - 1)
    return Ranking(
        problems=len(problems),
        kernels=sum(len(p) for p in problems),
        spearman=statistics.median(correlations) if correlations else math.nan,
        pairs=len(right),
        pairs_right=_share(right),
        recall_8=_share(recalled),
        regret_1=statistics.mean(regrets[1]),
        regret_3=statistics.mean(regrets[3]),
        regret_8=statistics.median(regrets[8]),
        regret_8_p90=quantile(regrets[8], 0.9),
    )


def _estimates(families: Sequence[str], guesses: Sequence[float], best: Sequence[float]) -> dict[str, Estimates]:
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, guess, us in zip(families, guesses, best, strict=True):
        groups[name].append((guess, us))
        groups["all"].append((guess, us))
    found = {}
    for name in sorted(groups):
        logs = [math.log(us / guess) for guess, us in groups[name]]
        middle = statistics.median(logs)
        off = [abs(x - middle) for x in logs]
        found[name] = Estimates(
            problems=len(logs),
            spearman=spearman([g for g, _ in groups[name]], [us for _, us in groups[name]]),
            ratio=math.exp(middle),
            error=math.exp(statistics.median(off)),
            error_p90=math.exp(quantile(off, 0.9)),
        )
    return found


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank; 0 where one side is constant."""
    x, y = _ranks(xs), _ranks(ys)
    if len(x) < 2 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    data = np.asarray(values, np.float64)
    return np.array([(np.sum(data < v) + np.sum(data <= v) - 1) / 2 for v in data])


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies."""
    return float(np.quantile(np.asarray(values, np.float64), share)) if values else math.nan


# The table in the document.

TARGETS = (
    ("measured below the sound bound", "0"),
    ("regret of the first 8 (median; p90)", "3 %; 10 %"),
    ("rank correlation, median over problems", "0.80"),
    ("best kernel among the first 8", "70 %"),
    ("sign of fusions", "90 %"),
)
"""What the notes ask for."""


def markdown(quality: Quality) -> str:
    """The figures as tables, targets beside them."""
    q = quality
    lines = ["| figure | target | found |", "|---|---:|---:|"]
    lines += [f"| {name} | {target} | {value} |" for (name, target), value in zip(TARGETS, _found(q), strict=True)]
    lines += ["", "| kernels | problems | kernels | rank correlation | pairs in order | regret of first | of first 3 |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for name, r in q.ranking.items():
        correlation = "" if math.isnan(r.spearman) else f"{r.spearman:.2f}"
        pairs = f"{_percent(r.pairs_right)} of {r.pairs}"
        lines.append(
            f"| {name} | {r.problems} | {r.kernels} | {correlation} | {pairs} | {_percent(r.regret_1)} |"
            f" {_percent(r.regret_3)} |"
        )
    lines += ["", "| problems | number | rank correlation | measured / estimated | median factor off | p90 |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for name, e in q.estimates.items():
        lines.append(
            f"| {name} | {e.problems} | {e.spearman:.2f} | {e.ratio:.2f} | {e.error:.2f} | {e.error_p90:.2f} |"
        )
    return "\n".join(lines)


def _found(q: Quality) -> tuple[str, ...]:
    """Of each of `TARGETS`."""
    everything = q.ranking["all that a model ranks"]
    return (
        f"{q.violations} of {q.candidates}",
        f"{_percent(everything.regret_8)}; {_percent(everything.regret_8_p90)}",
        "none" if math.isnan(everything.spearman) else f"{everything.spearman:.2f}",
        _percent(everything.recall_8),
        f"{_percent(q.fusions_right)} of {q.fusions}",
    )


def overview(qualities: Mapping[str, Quality]) -> str:
    """A row for each table."""
    lines = ["| table | problems | " + " | ".join(name for name, _ in TARGETS) + " |"]
    lines += [
        "|---|" + "---:|" * (1 + len(TARGETS)),
        "| target | | " + " | ".join(target for _, target in TARGETS) + " |",
    ]
    for name, q in qualities.items():
        lines.append(f"| `{name}` ({TABLES[name].name}) | {q.problems} | " + " | ".join(_found(q)) + " |")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return "none" if math.isnan(share) else f"{100 * share:.1f} %".replace(".0 %", " %")


def write_document(quality: Quality, path: Path = DOCUMENT, name: str = "model-quality") -> None:
    """The figures as tables into a document; see `put`."""
    put(markdown(quality), path, name)


def put(tables: str, path: Path = DOCUMENT, name: str = "model-quality") -> None:
    """Replace what stands between `<!-- table: NAME -->` and `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = pattern.subn(lambda m: f"{m[1]}{tables}\n{m[2]}", path.read_text())
    if count != 1:
        raise ValueError(f"{path.name} has no place for the table")
    path.write_text(text)


def to_json(quality: Quality) -> str:
    """Canonical JSON; figures that are not there are null."""
    data = json.loads(json.dumps(asdict(quality)), parse_constant=lambda _: None)
    return json.dumps(data, sort_keys=True, indent=1)


def read_databases(files: Sequence[Path], facts: Path, networks: Sequence[str]) -> Table:
    """The kernels in tuning databases, which are copied first: opening one may write to it."""
    record = GpuFacts.from_json(json.loads(facts.read_text())["facts"])
    records: list[Record] = []
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copyfile(file, Path(folder) / FILE_NAME)
            with Database.open(Path(folder)) as database:
                records += database.records()
    table = Table.from_json(table_of(records, record, networks).to_json())  # as it is kept
    return replace(table, fusions=fusions(table.cases, [problem_of(c.text) for c in table.cases]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if a kernel was faster than its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_quality", description=__doc__)
    parser.add_argument("table", nargs="?", choices=TABLES, default="types", help="a recorded table")
    parser.add_argument("--database", type=Path, nargs="+", help="one tuning.sqlite3 or several, instead of that")
    parser.add_argument("--facts", type=Path, help="the facts/gpu-*.json beside them, or a table of the same GPU")
    parser.add_argument("--networks", default="", help="what was tuned, in order, separated by commas")
    parser.add_argument("--record", type=Path, help="write the table of kernels here")
    parser.add_argument("--document", action="store_true", help=f"write the tables into docs/{DOCUMENT.name}")
    given = parser.parse_args(arguments)
    if (given.database is None) != (given.facts is None):
        parser.error("--database and --facts go together")
    if given.record is not None and given.database is None:
        parser.error("--record needs --database")
    if given.database is not None:
        table = read_databases(given.database, given.facts, [x for x in given.networks.split(",") if x])
        if not table.cases:
            parser.error("the database holds no kernel that was right")
        if given.record is not None:
            given.record.write_text(table.to_json())
        quality = judge(table)
    else:
        quality = judge_recorded(given.table)
    print(markdown(quality))
    print(to_json(quality))
    if given.document:
        qualities = {name: judge_recorded(name) for name in TABLES}
        put(overview(qualities), name=OVERVIEW)
        for name, found in qualities.items():
            write_document(found, name=PLACES[name])
    return int(quality.violations > 0)


if __name__ == "__main__":
    raise SystemExit(main())
