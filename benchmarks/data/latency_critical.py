"""The costliest products and convolutions of five networks at batch 16 in f16: what co-location is measured beside.

    python -m benchmarks.data.latency_critical [--check] [NAME ...]

makes `nvidia-h200/latency-critical.json` from the networks and the tables of measured kernels, without a GPU. A
network's plan is the cheapest one over the times of these tables, as a search that measured all of them would have
found it; a problem that is in no table costs four times its estimate. Of the plan's steps those count whose fastest
generated kernel is a product or a convolution by warpgroups (TMA and wgmma, or wgmma alone); the `MOST` dearest by
the time of one call are taken, each shape once. `--check` writes nothing, and fails where the file says otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import cast

import torch

from benchmarks.cases.colocate_lc import FILE, GPU, WARPGROUPS, Recorded, from_json, linear_node, to_json
from benchmarks.data.measured import Timed, load_table
from benchmarks.models import load
from weft.device.cuda.facts import profile
from weft.frontends.torch import import_exported
from weft.ir import attrs as a
from weft.ir.graph import Graph
from weft.ir.passes import clean_up
from weft.ir.prims import CATEGORY, Category, Prim
from weft.kernels.source import Schedule
from weft.options import Options
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.select import Priced, select
from weft.pipeline.choose import UNMEASURED_FACTOR
from weft.pipeline.problems import Task, collect
from weft.pipeline.setting import limits_of
from weft.platform.cuda.platform import Cuda

TABLES = ("kernels.json", "kernels-later.json")
"""Measured kernels of networks in f16."""
NETWORKS = ("vgg16", "resnet50", "inception_v3", "bert_base", "vit_b16")
BATCH = 16
MOST = 2
"""Kernels of a network."""
KEPT = 8
"""Measured kernels of a problem that are noted, the fastest."""


def shape_name(graph: Graph) -> str:
    """`conv3x3-64-256-56`: window, channels read and made (one number if they are equal), columns of the image read;
    `s2` behind the window for strides; `product-2048x768x3072`: rows, columns, sum.

    Raises:
        ValueError: the graph has not exactly one product or convolution.
    """
    node = linear_node(graph)
    left, right = (graph.type_of(i).shape for i in node.inputs[:2])
    if node.prim is Prim.MATMUL:
        *rows, columns = node.type.shape
        return f"product-{'x'.join(map(str, (*rows, columns, left[-1])))}"
    attrs = cast("a.ConvAttrs", node.attrs)
    window = "x".join(map(str, right[2:])) + (f"s{attrs.strides[-1]}" if max(attrs.strides) > 1 else "")
    channels = (left[1],) if left[1] == node.type.shape[1] else (left[1], node.type.shape[1])
    return "-".join([f"conv{window}", *map(str, channels), str(left[-1])])


@cache
def _measured() -> Mapping[str, tuple[Timed, ...]]:
    """Problem -> its kernels, the fastest first, each at its least time."""
    least: dict[str, dict[Schedule, float]] = {}
    for file in TABLES:
        for case in load_table(FILE.with_name(file)).cases:
            known = least.setdefault(case.text, {})
            for kernel in case.kernels:
                known[kernel.schedule] = min(kernel.us, known.get(kernel.schedule, kernel.us))
    return {
        text: tuple(sorted((Timed(s, us) for s, us in known.items()), key=lambda t: t.us))
        for text, known in least.items()
    }


def steps_of(network: str) -> list[Task]:
    """The problems of the network's plan, one for each step."""
    module, inputs = load(network, BATCH)
    cast_ = tuple(x.half() if x.is_floating_point() else x for x in inputs)
    with torch.no_grad():
        program = torch.export.export(module.eval().half(), cast_)
    found = find_alternatives(clean_up(import_exported(program).graph, strict=False).graph, on_gpu=True)
    facts, options = profile(GPU), Options(device="cuda")
    candidates = enumerate_candidates(found.graph, limits_of(options, facts), found).candidates
    problems = collect(found.graph, candidates, found, facts, most_at_once=Cuda.policy.uses_at_once)
    priced: list[Priced] = []
    tasks: list[Task] = []
    for task in problems.tasks.values():
        kernels = _measured().get(task.problem.key)
        us = kernels[0].us if kernels else UNMEASURED_FACTOR * max(task.estimate_us, 1.0)
        for candidate, ins, outs in task.formats:
            priced.append(Priced(candidate, ins, outs, us))
            tasks.append(task)
    best = select(found.graph, priced, alternatives=found, plans=1, core=True)[0]
    return [tasks[i] for i in best.chosen]


def costliest(network: str, most: int = MOST) -> list[Recorded]:
    """The dearest steps of a network's plan that are products or convolutions by warpgroups, each shape once."""
    steps = steps_of(network)
    count = Counter(task.problem.key for task in steps)
    found: dict[str, Recorded] = {}
    for problem in {task.problem.key: task.problem for task in steps}.values():
        timed = _measured().get(problem.key, ())
        own = next((t for t in timed if t.schedule.generator == "cuda"), None)
        if own is None or dict(own.schedule.params).get("template") not in WARPGROUPS:
            continue
        if sum(CATEGORY[n.prim] is Category.LINEAR for n in problem.graph.nodes) != 1:
            continue
        one = Recorded(f"{network}/{shape_name(problem.graph)}", problem, count[problem.key], timed[:KEPT])
        if one.name not in found or found[one.name].timed[0].us < timed[0].us:
            found[one.name] = one
    return sorted(found.values(), key=lambda r: -r.timed[0].us)[:most]


def difference(was: Sequence[Recorded], now: Sequence[Recorded]) -> str:
    """Where two lists of the same networks' kernels differ; empty: nowhere."""
    if (names := [r.name for r in was]) != (found := [r.name for r in now]):
        return f"{names} became {found}"
    for one, other in zip(was, now, strict=True):
        if json.loads(to_json([one])) != json.loads(to_json([other])):
            return f"{one.name} is another problem, or has other times"
    return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make or check the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NETWORKS)}; the others stay as they are")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the file says otherwise")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(NETWORKS):
        parser.error(f"no network {sorted(unknown)[0]!r}")
    kept = from_json(FILE.read_text(encoding="utf-8")) if FILE.is_file() else ()
    wrong = False
    made: list[Recorded] = []
    for network in NETWORKS:
        was = [r for r in kept if r.name.startswith(f"{network}/")]
        now = was if given.names and network not in given.names else costliest(network)
        made += now
        if said := difference(was, now):
            wrong = True
            print(f"{network}: {said}")
        for r in now:
            print(f"{r.name}: {r.timed[0].us:.1f} us, {r.times} times, {r.timed[0].schedule}")
    if not given.check:
        FILE.write_text(to_json(made), encoding="utf-8")
    sys.exit(1 if given.check and wrong else 0)


if __name__ == "__main__":
    main()
