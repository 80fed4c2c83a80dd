"""A plan with other weights: the same steps over constants that are made anew, verified before they are given out.

The model is imported and cleaned up again. Where the graph that comes out has the same nodes and differs in the data
of constants alone, every kernel of the plan computes what it was verified to compute, on other weights. Values that
decided something (a scale of one that vanished, two weights that were one because they were equal, a number in the text
of a kernel) make another graph or other kernels, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from weft.errors import RefitError
from weft.frontends.imported import Imported
from weft.ir.attrs import ConstantAttrs
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.passes import clean_up
from weft.ir.prims import FREE, Prim
from weft.kernels.plan import Plan
from weft.options import Options
from weft.pipeline import finish, reference
from weft.pipeline.indices import with_checks
from weft.pipeline.reference import working_dtype
from weft.platform.table import platform_of
from weft.runtime.any import AnyExecutable

Tensors = Sequence[torch.Tensor]
RECOMPILE = "compile the model with these weights, or call refit(..., recompile=True), which does"


def refitted(
    old: AnyExecutable, imported: Imported, options: Options, inputs: Tensors, eager: Callable[..., Tensors] | None
) -> AnyExecutable:
    """The plan of `old` for the model as it was imported with other weights.

    `inputs` are what it is judged on, like those of any plan; `eager` is the framework's own execution.

    Raises:
        RefitError: the new weights make another graph, or what the plan gives with them is not right [W012].
    """
    given, _ = with_checks(imported) if options.check_indices else (imported, ())
    cleaned = clean_up(given.graph, strict=options.strict)
    graph = platform_of(options.device).find_alternatives(cleaned.graph, strict=options.strict).graph
    place = difference(old.graph, graph)
    if place is not None:
        problem = f"with these weights the model becomes another graph{place}: their values decide what is computed"
        raise RefitError(problem=problem, remedy=RECOMPILE)
    for step, node in _written(old.graph, old.plan):
        if old.graph.nodes[node].attrs != graph.nodes[node].attrs:
            problem = f"a value that changed stands in the text of kernel {step}{_of(graph, node)}"
            raise RefitError(problem=problem, remedy=RECOMPILE)
    executable = old.with_graph(graph)
    placed = [x.to(executable.device) for x in inputs]
    expected = reference.outputs(imported.graph, placed, eager, allow_tf32=options.allow_tf32)
    executable.check_indices = False
    contender = finish.Contender("refit", lambda: executable(*placed), executable.kernels, 0.0, False, executable)
    check = finish.verify(contender, expected, working_dtype(graph))
    executable.check_indices = True
    if not check.ok:
        problem = f"the plan is not right with these weights: {check.note}"
        raise RefitError(problem=problem, remedy=RECOMPILE)
    platform_of(options.device).free_memory(garbage=True)  # weights that were packed
    return executable


def graph_of(plan: AnyExecutable, imported: Imported) -> tuple[Graph, int] | Declined:
    """A plan's graph made anew of the model that it is said to be of: with that one's weights and names of operators.

    Also how many of its constants are others than the plan's. Declined: it is no plan of this model, and from where on.
    """
    problem = ""
    for strict in (False, True):
        for given in (imported, with_checks(imported)[0]):
            cleaned = clean_up(given.graph, strict=strict)
            graph = platform_of(plan.linked.kind).find_alternatives(cleaned.graph, strict=strict).graph
            place = difference(plan.graph, graph, names=graph)
            if place is None:
                pairs = zip(plan.graph.nodes, graph.nodes, strict=True)
                return graph, sum(mine.attrs != theirs.attrs for mine, theirs in pairs)
            problem = problem or f"it is the plan of another model{place}"
    return Declined(problem)


def difference(old: Graph, new: Graph, names: Graph | None = None) -> str | None:
    """Where two graphs differ in more than the data of constants, in words (by `names`); None: nowhere."""
    for node, (mine, theirs) in enumerate(zip(old.nodes, new.nodes, strict=False)):
        same = mine.prim is theirs.prim and mine.inputs == theirs.inputs and mine.type == theirs.type
        constants = isinstance(mine.attrs, ConstantAttrs) and isinstance(theirs.attrs, ConstantAttrs)
        if not same or not (constants or mine.attrs == theirs.attrs):
            return _of(names or old, node) or _of(new, node)
    if len(old) != len(new) or old.inputs != new.inputs or old.outputs != new.outputs:
        return ""
    return None


def _of(graph: Graph, node: NodeId) -> str:
    """The source operator of a node, or of the first one after it that has one, in words."""
    for n in graph.nodes[node:]:
        if n.origin >= 0 and graph.origins[n.origin].source:
            return f", from the operator {graph.origins[n.origin].source[:120]!r} on"
    return ""


def _written(graph: Graph, plan: Plan) -> Iterator[tuple[int, NodeId]]:
    """Constants that kernels hold themselves instead of reading them, by step."""
    for position, step in enumerate(plan.steps):
        seen = {n for n, _ in step.inputs} | set(step.members)
        stack = [i for m in step.members for i in graph.nodes[m].inputs]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if graph.nodes[node].prim is Prim.CONSTANT:
                yield position, node
            elif graph.nodes[node].prim in FREE:
                stack.extend(graph.nodes[node].inputs)
