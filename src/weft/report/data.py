"""A record as the compact JSON that the page's script reads: strings once each, graphs with their drawings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from weft.generate.written import written_in
from weft.kernels.pretty import pretty
from weft.kernels.record import CompileRecord, NodeRecord, StepRecord
from weft.report.folding import equal, key_of, shown_once
from weft.report.layout import draw
from weft.report.text import clean, clean_source, finite

MAX_DRAWN = 8_000
"""Primitives beyond which only the graph of kernels is drawn: a browser would no longer follow the hand."""

MAX_STEPS = 8_000
MAX_NAMES = 12
"""Operators, inputs, outputs and neighbours that a kernel lists."""

SOURCE_LIMIT = 120_000
"""Characters of one kernel's text."""

_VALUE = re.compile(r"%(\d+)")

Json = object


class Strings:
    """Every text once; others refer to it by number. Names repeat a lot, and a page has a size limit."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._at: dict[str, int] = {}

    def number(self, text: str, limit: int = 160) -> int:
        """The number of a text, cleaned."""
        shown = clean(text, limit)
        if shown not in self._at:
            self._at[shown] = len(self.texts)
            self.texts.append(shown)
        return self._at[shown]


def page_data(record: CompileRecord, source_budget: int) -> dict[str, Json]:
    """Everything that the script draws; texts of kernels beyond `source_budget` characters in all are left out."""
    strings = Strings()
    steps = record.steps[:MAX_STEPS]
    # shares of a sum of which some is guessed say nothing
    total = (sum(s.cost_us for s in record.steps) or 1.0) if all(s.measured for s in record.steps) else math.nan
    texts, source_of = _sources(steps, source_budget)
    nodes = record.graph
    keys = [key_of(s) for s in steps]
    return {
        "kernels": [_step(s, total, strings, source_of[i]) for i, s in enumerate(steps)],
        "sources": texts,
        "nodes": [_node(n, strings) for n in nodes] if len(nodes) <= MAX_DRAWN else [],
        "views": _views(nodes, steps, shown_once(keys)),
        "equal": equal(keys),
        "strings": strings.texts,
        "totalUs": finite(total),
    }


def _sources(steps: Sequence[StepRecord], budget: int) -> tuple[list[str], list[int]]:
    """Distinct texts, dearest kernel first until the budget is spent, and each kernel's text (-1: left out)."""
    texts: list[str] = []
    at: dict[str, int] = {}
    for s in sorted(steps, key=lambda s: -s.cost_us):
        if s.source in at:
            continue
        at[s.source] = -1
        if min(len(s.source), SOURCE_LIMIT) > budget:  # laid out it is longer still, and that takes its time
            continue
        generated = not s.schedule.startswith("library(") and len(s.source) <= SOURCE_LIMIT
        shown = clean_source(pretty(s.source) if generated else s.source, SOURCE_LIMIT)
        if len(shown) <= budget:
            budget -= len(shown)
            at[s.source] = len(texts)
            texts.append(shown)
    return texts, [at[s.source] for s in steps]


def _step(s: StepRecord, total_us: float, strings: Strings, source: int) -> dict[str, Json]:
    def names(found: Sequence[str]) -> list[int]:
        shown = [strings.number(x) for x in found[:MAX_NAMES]]
        left_out = len(found) - MAX_NAMES
        return [*shown, strings.number(f"… {left_out} more")] if left_out > 0 else shown

    return {
        "n": s.position,
        "schedule": strings.number(s.schedule, 300),
        "written": strings.number(", ".join(written_in(s.schedule)), 300),
        "kind": strings.number(s.kind),
        "prims": strings.number(summarised(s.primitives), 400),
        "count": len(s.primitives),
        "nodes": list(s.nodes),
        "operators": names(s.operators),
        "inputs": names(s.inputs),
        "outputs": names(s.outputs),
        "cost": finite(s.cost_us) if s.measured else None,
        "measured": s.measured,
        "share": finite(s.cost_us / total_us),
        "bound": finite(s.bound_us),
        "predicted": finite(s.predicted_us),
        "inPlace": finite(s.in_place_us),
        "runner": strings.number(s.runner_up, 300) if s.runner_up else -1,
        "runnerUs": finite(s.runner_up_us),
        "tried": s.alternatives,
        "rejected": s.rejected,
        **({"sm": strings.number(s.sm_share, 300)} if s.sm_share else {}),
        "near": [
            [strings.number(n.what, 240), finite(n.cost_us), finite(n.parts_us), strings.number(n.reason)]
            for n in s.neighbours[:MAX_NAMES]
        ],
        "source": source,
    }


def summarised(primitives: Sequence[str]) -> str:
    """`conv, 3 × mul, add`: runs of one primitive counted, in order of first appearance."""
    counts: dict[str, int] = {}
    for p in primitives:
        counts[p] = counts.get(p, 0) + 1
    return ", ".join(p if n == 1 else f"{n} × {p}" for p, n in counts.items())


def _node(n: NodeRecord, strings: Strings) -> list[Json]:
    """Row of the table of nodes: primitive, type, operator, location, inputs, kernels."""
    return [
        strings.number(n.prim), strings.number(n.type), strings.number(n.operator), strings.number(n.location),
        list(n.inputs), list(n.steps),
    ]  # fmt: skip


def _views(nodes: Sequence[NodeRecord], steps: Sequence[StepRecord], stands: Sequence[int]) -> dict[str, Json]:
    inputs_of = _kernel_inputs(nodes, steps)
    views: dict[str, Json] = {"kernels": _view(range(len(steps)), inputs_of)}
    if any(i != k for i, k in enumerate(stands)):
        views["folded"] = _folded_view(inputs_of, stands)
    if 0 < len(nodes) <= MAX_DRAWN:
        inputs = [n.inputs for n in nodes]
        everything = list(range(len(nodes)))
        data = _data_side(nodes)
        views["primitives"] = _view(data or everything, inputs)
        views["all"] = _view(everything, inputs)
    return views


def _view(shown: Sequence[int], inputs: Sequence[Sequence[int]]) -> dict[str, Json]:
    """The part of a graph on `shown` (ascending), drawn."""
    place = {n: i for i, n in enumerate(shown)}
    edges = [[place[m] for m in dict.fromkeys(inputs[n]) if m in place and m < n] for n in shown]
    drawing = draw(edges)
    return {"ids": list(shown), "x": list(drawing.column), "y": list(drawing.row), "in": edges}


def _data_side(nodes: Sequence[NodeRecord]) -> list[int]:
    """Nodes that depend on an input of the model: weights and what is made of them alone only clutter a drawing."""
    live: set[int] = set()
    for i, n in enumerate(nodes):
        if n.prim == "input" or any(m in live for m in n.inputs) or n.steps:
            live.add(i)
    return sorted(live)


def _folded_view(inputs: Sequence[Sequence[int]], stands: Sequence[int]) -> dict[str, Json]:
    """Kernels with layers that repeat drawn once; `members`: the kernels that each box stands for.

    What a layer reads of the one before it, which is itself here, is not drawn.
    """
    members: dict[int, list[int]] = {}
    folded: dict[int, list[int]] = {}
    for i, k in enumerate(stands):
        members.setdefault(k, []).append(i)
        folded.setdefault(k, []).extend(stands[m] for m in inputs[i] if stands[m] < k)
    every = [folded.get(i, []) for i in range(len(stands))]
    return {**_view(sorted(members), every), "members": [members[k] for k in sorted(members)]}


def _kernel_inputs(nodes: Sequence[NodeRecord], steps: Sequence[StepRecord]) -> list[list[int]]:
    """For each chosen kernel whose results it reads, through nodes that no kernel computes."""
    maker = {value: i for i, s in enumerate(steps) for value in _values(s.outputs)}
    inputs = []
    for i, s in enumerate(steps):
        makers = dict.fromkeys(m for value in _values(s.inputs) for m in _makers(value, maker, nodes))
        inputs.append([m for m in makers if m < i])
    return inputs


def _values(described: Iterable[str]) -> list[int]:
    return [int(m.group(1)) for text in described if (m := _VALUE.match(text))]


def _makers(value: int, maker: Mapping[int, int], nodes: Sequence[NodeRecord]) -> list[int]:
    """Kernels whose results a value is a view of."""
    found: list[int] = []
    seen: set[int] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in maker:
            found.append(maker[v])
        elif v < len(nodes):
            todo.extend(m for m in nodes[v].inputs if m < v)
    return found
