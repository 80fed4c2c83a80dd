"""Makes the table of measured schedules that is shipped for a GPU, and shows how good it is; no GPU is needed.

    python -m benchmarks.shipped_table            how often the first choice is near the best, networks left out in turn
    python -m benchmarks.shipped_table --write    make the table of all records, into the package
    python -m benchmarks.shipped_table --document the same figures, into docs/performance-model.md

The records are those in `data/nvidia-h200`: kernels of networks (`kernels*.json`), and configurations of products by
themselves (`exhaustive.json`, `configurations.json`). A network is judged by a table that has seen neither of its batch
sizes, a product by itself by a table of all the others. Only kinds of schedules that were measured can be judged: of a
problem, those that the models liked best.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cases.gemm import GROUPS
from benchmarks.data.measured import load_table, problem_of
from benchmarks.gpu_gemm_lt import CONFIGURATIONS, EXHAUSTIVE, by_name, read_times, times_of
from benchmarks.model_quality import DOCUMENT, LATER, RECORDED, family, put
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.product import product
from weft.generate.cuda.gemm.mma import cost
from weft.generate.cuda.generator import CudaGenerator
from weft.generate.cuda.loops.choose import forms
from weft.generate.cuda.shipped import Bucket, Shipped, base_of, kind_of, loops_bucket, product_bucket, promoted
from weft.generate.cuda.shipped.table import FILES, Tried
from weft.generate.cuda.space import space
from weft.ir.declined import Declined
from weft.ir.prims import CATEGORY, Category
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule

ROOT = Path(__file__).parent.parent
GPU = "NVIDIA H200"
TABLE = ROOT / "src/weft/generate/cuda/shipped" / FILES[GPU]
NETWORKS = RECORDED.with_name("networks.jsonl")
SEARCHES = (
    *("candy", "candy", "segformer_b0", "segformer_b0", "resnet50", "resnet50", "bert_base", "bert_base"),
    *("yolox_nano", "yolox_nano", "inception_v3", "inception_v3", "yolov4", "yolov4", "vit_b16", "vit_b16"),
    *("vgg16", "vgg16", "vgg16", "efficientvit_b1", "efficientvit_b1"),
)
"""Networks of the searches in `kernels-later.json`, which numbers them (one of vgg16 in two parts)."""
ALONE = "product alone"
"""With its name in place of a network's: each is judged by a table of all the others."""
CAPPED = 1.0
"""Logarithm of the ratio to the fastest above which differences say nothing."""
KINDS = 12
"""Of a product by itself, the fastest kinds: the rest was tried because it was not expected to be fast."""
NEAR = (0.03, 0.10)


@dataclass(frozen=True, slots=True)
class Known:
    """A problem with the times of its kernels."""

    network: str
    problem: Problem
    bucket: Bucket
    times: Mapping[Schedule, float]
    """Generated kernels alone."""

    @property
    def alone(self) -> bool:
        """Whether it is a product by itself."""
        return self.network.startswith(ALONE)

    def by_kind(self) -> dict[str, float]:
        """The best time of each kind."""
        found: dict[str, float] = {}
        for s, us in self.times.items():
            found[kind_of(s)] = min(us, found.get(kind_of(s), math.inf))
        return found

    def slower(self) -> dict[str, float]:
        """By kind, the logarithm of its best time over the fastest of all."""
        times = self.by_kind()
        least = min(times.values())
        few = sorted(((kind, min(CAPPED, math.log(us / least))) for kind, us in times.items()), key=lambda x: x[1])
        return dict(few[:KINDS] if self.alone else few)


def bucket_of(problem: Problem, facts: GpuFacts) -> Bucket | None:
    """Where a problem stands in the table; None where it has no say."""
    linear = sum(CATEGORY[n.prim] is Category.LINEAR for n in problem.graph.nodes)
    if linear == 0:
        return loops_bucket(problem)
    p = product(problem, tf32=facts.tf32) if linear == 1 else Declined("several contractions")
    return None if isinstance(p, Declined) else product_bucket(p, cost.sizes_of(p))


def known(facts: GpuFacts, records: Sequence[Path] = (RECORDED, LATER)) -> list[Known]:
    """All problems of the records with at least two kernels; products by themselves beside them."""
    found = []
    for path in records:
        for case in load_table(path).cases:
            network = SEARCHES[int(case.network)] if case.network.isdecimal() else case.network
            times = {k.schedule: k.us for k in case.kernels if k.schedule.generator == "cuda"}
            found.append((network, problem_of(case.text), times))
    found += [(f"{ALONE} {name}", problem, times) for name, problem, times in _alone(facts)]
    placed = ((n, p, bucket_of(p, facts), times) for n, p, times in found if len(times) > 1)
    return [Known(n, p, bucket, times) for n, p, bucket, times in placed if bucket is not None]


def _alone(facts: GpuFacts) -> Iterator[tuple[str, Problem, dict[Schedule, float]]]:
    """Products by themselves, with their names; schedules that no longer exist do not count."""
    cases = {g.name: g for group in GROUPS.values() for g in group}
    for line in (x for path in (EXHAUSTIVE, CONFIGURATIONS) if path.exists() for x in read_times(path)):
        problem = cases[line["case"]].problem()
        ranked = space(problem, facts)
        times = times_of(line)
        named = {} if isinstance(ranked, Declined) else by_name([s for _, s in ranked], times)
        yield line["case"], problem, {named[s]: us for s, us in times.items() if s in named}


def table_of(cases: Iterable[Known]) -> Shipped:
    """The table that these problems make."""
    found: dict[str, dict[tuple[int, ...], dict[str, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for case in cases:
        for kind, slower in case.slower().items():
            found[case.bucket.key][case.bucket.point].setdefault(kind, []).append(slower)
    buckets = {
        key: {
            point: tuple(Tried(kind, len(x), statistics.mean(x)) for kind, x in sorted(kinds.items()))
            for point, kinds in rows.items()
        }
        for key, rows in found.items()
    }
    return Shipped(GPU, buckets)


def stale(table: Shipped, cases: Iterable[Known]) -> set[str]:
    """Kinds of a table of which no schedule that was measured has a kernel today."""
    left = {t.kind for rows in table.buckets.values() for ts in rows.values() for t in ts}
    generator = CudaGenerator()
    for case in cases:
        for s in case.times:
            if kind_of(s) in left and not isinstance(generator.emit(case.problem, s), Declined):
                left.remove(kind_of(s))
    return left


def without(table: Shipped, kinds: Collection[str]) -> Shipped:
    """A table with these kinds left out."""
    buckets = {
        key: {point: kept for point, ts in rows.items() if (kept := tuple(t for t in ts if t.kind not in kinds))}
        for key, rows in table.buckets.items()
    }
    return replace(table, buckets=buckets)


@dataclass(frozen=True, slots=True)
class Chosen:
    """First choices for one problem: their times over that of the fastest measured kernel, minus 1."""

    family: str
    network: str
    model: float
    table: float


def judged(cases: Sequence[Known], facts: GpuFacts, networks: Collection[str] = ()) -> list[Chosen]:
    """First choices of the models alone, and with a table of all other networks; `networks`: for those only."""
    found = []
    nobody = replace(facts, name="none")
    for network in networks or dict.fromkeys(case.network for case in cases):
        table = table_of(case for case in cases if case.network != network)
        for case in cases:
            if case.network == network:
                order, modelled = _order(case.problem, nobody)
                times = case.by_kind()
                timed = {s: us for s in order if (us := times.get(kind_of(s), times.get(base_of(kind_of(s)))))}
                order = [s for s in order if s in timed]
                if len({kind_of(s) for s in order}) > 1:
                    first = promoted(case.bucket, order, GPU, modelled, table)[0]
                    least = min(times.values())
                    ratios = (timed[s] / least - 1 for s in (order[0], first))
                    name = ALONE if case.alone else family(case.problem)
                    found.append(Chosen(name, network, *ratios))
    return found


def _order(problem: Problem, facts: GpuFacts) -> tuple[list[Schedule], dict[Schedule, float]]:
    """Schedules in the order of the models, and what these say where they give a number."""
    if not any(CATEGORY[n.prim] is Category.LINEAR for n in problem.graph.nodes):
        return [form.schedule() for form in forms(problem, facts)], {}
    p = product(problem, tf32=facts.tf32)
    ranked = [] if isinstance(p, Declined) else templates.modelled(p, facts)
    return [s for _, s in ranked], {s: cycles for cycles, s in ranked}


def figures(chosen: Sequence[Chosen]) -> str:
    """A table in Markdown: how good first choices are, by family."""
    lines = ["| problems | number | regret, models alone | with the table | within 3 % | with the table |"]
    lines[0] += " within 10 % | with the table |"
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    groups = {name: [x for x in chosen if x.family == name] for name in sorted({x.family for x in chosen})}
    for name, xs in {"all": list(chosen), **groups}.items():
        means = [statistics.mean(x) for x in ([c.model for c in xs], [c.table for c in xs])]
        cells = [f"{100 * x:.1f} %" for x in means]
        for near in NEAR:
            shares = (sum(v <= near for v in x) / len(x) for x in ([c.model for c in xs], [c.table for c in xs]))
            cells += [f"{100 * share:.0f} %" for share in shares]
        lines.append(f"| {name} | {len(xs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def provenance(cases: Sequence[Known], facts: GpuFacts) -> dict[str, object]:
    """What the table was made of."""
    records = [path for path in (RECORDED, LATER, EXHAUSTIVE, CONFIGURATIONS) if path.exists()]
    head = json.loads(NETWORKS.read_text().splitlines()[0])
    return {
        "command": "python -m benchmarks.shipped_table --write",
        "gpu": facts.name,
        "driver": head["driver"],
        "cuda": head["cuda"],
        "problems": len(cases),
        "measurements": sum(len(case.times) for case in cases),
        "records": [{"file": path.name, **_put_in(path)} for path in records],
    }


def _put_in(path: Path) -> dict[str, str]:
    """Commit and date with which a record came."""
    asked = ["git", "log", "-1", "--format=%h %as", "--", str(path)]
    told = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, check=False).stdout.split()
    if len(told) != 2:
        raise SystemExit(f"{path.name} has no commit yet: the table names those of its records")
    return {"commit": told[0], "date": told[1]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, or write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shipped_table", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"make {TABLE.relative_to(ROOT)}")
    parser.add_argument("--document", action="store_true", help=f"write the figures into docs/{DOCUMENT.name}")
    given = parser.parse_args(arguments)
    facts = load_table(LATER).facts
    cases = known(facts)
    if given.write:
        made = replace(table_of(cases), provenance=provenance(cases, facts))
        gone = stale(made, cases)
        TABLE.write_text(without(made, gone).to_json())
        print(f"{TABLE.relative_to(ROOT)}: {TABLE.stat().st_size} bytes of {len(cases)} problems")
        print("left out, as they no longer exist:", ", ".join(sorted(gone)) or "nothing")
        return
    text = figures(judged(cases, facts))
    print(text)
    if given.document:
        put(text, name="shipped")


if __name__ == "__main__":
    main()
