"""Which forms of a kernel are worth measuring, by static rules."""

from __future__ import annotations

from weft.device.cuda.facts import GpuFacts
from weft.generate.cpp.plan import REDUCTIONS, live_nodes, reduced_axes
from weft.generate.cuda.forms import Form
from weft.kernels.candidate import Problem


def forms(problem: Problem, facts: GpuFacts) -> list[Form]:
    """The most promising first, at most eight."""
    graph = problem.graph
    reductions = [n for n in live_nodes(graph) if graph.nodes[n].prim in REDUCTIONS]
    if not reductions:
        return _pointwise(problem, facts)
    return _rows(problem, facts, reductions)


def _pointwise(problem: Problem, facts: GpuFacts) -> list[Form]:
    size = max(problem.graph.type_of(n).size for n in problem.graph.outputs)
    itemsize = min(problem.graph.type_of(n).dtype.itemsize for n in problem.graph.outputs)
    vectors = size * itemsize // 16
    wide = [Form(threads=256), Form(threads=128), Form(threads=256, items=2), Form(threads=128, items=4)]
    narrow = [Form(threads=128, vector=8), Form(threads=256, vector=4)]
    if vectors < facts.sms * 128:  # few vectors: narrower ones fill the machine
        return [Form(threads=128), Form(threads=64), *narrow, Form(threads=64, vector=8)]
    if vectors < facts.sms * 1024:
        return [*wide[:2], narrow[0], wide[2], narrow[1]]
    return [wide[0], wide[2], wide[1], wide[3], Form(threads=512)]


def _rows(problem: Problem, facts: GpuFacts, reductions: list[int]) -> list[Form]:
    graph = problem.graph
    largest = max(reductions, key=lambda n: graph.type_of(graph.nodes[n].inputs[0]).size)
    total = graph.type_of(graph.nodes[largest].inputs[0]).size
    rows = max(graph.type_of(largest).size, 1)
    length = total // rows
    dependent = len({reduced_axes(graph, n) for n in reductions}) > 1 or len(reductions) > 1
    found = [Form(threads=128), Form(threads=256), Form(threads=256, vector=8)]
    if length >= 1024:
        found.append(Form(threads=512, per_row=512))
    if rows * length >= 1 << 15 and rows < 4 * facts.sms:
        splits = max(2, min(64, 2 * facts.sms // rows))
        split = [Form(threads=256, fuse=False, split=splits), Form(threads=256, fuse=False, split=max(2, splits // 4))]
        clusters = [Form(threads=1024, per_row=1024, cluster=c) for c in (8, 4) if length >= c * 2048]
        found = [*(clusters if facts.capability >= 90 else []), *split, *found]
    elif length <= 256:
        found += [Form(threads=128, per_row=32), Form(threads=128, per_row=8)]
    if dependent:
        found.append(Form(threads=256, fuse=False))
    found.append(Form(threads=256, keep=False))
    return list(dict.fromkeys(found))[:8]
