"""Clean-ups that are never worse: what every graph goes through before candidates are looked for.

Common subexpressions need no pass: a `GraphBuilder` never holds the same node twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir.graph import Graph
from weft.ir.passes.compose_casts import ComposeCastsPass
from weft.ir.passes.compose_slices import ComposeSlicesPass
from weft.ir.passes.compose_views import ComposeViewsPass
from weft.ir.passes.drop_unused import DropUnusedPass
from weft.ir.passes.fold_constants import FoldConstantsPass
from weft.ir.passes.fold_scales import FoldScalesPass
from weft.ir.passes.pick_early import PickEarlyPass
from weft.ir.passes.protocol import Pass, PassResult
from weft.ir.passes.roll_recurrences import RollRecurrencesPass
from weft.ir.passes.simplify_arithmetic import SimplifyArithmeticPass
from weft.ir.verify import verify_graph

__all__ = ["CleanUp", "Pass", "PassResult", "clean_up", "passes"]

_MAX_ROUNDS = 12
"""Every rule makes a graph smaller or moves work towards the constants, so few rounds do; a bound all the same."""


@dataclass(frozen=True, slots=True)
class CleanUp:
    """The cleaned graph and what it took."""

    graph: Graph
    log: tuple[tuple[str, int], ...]
    """(name of the pass, nodes changed) for each run that changed something, in order."""


def passes(*, strict: bool = False) -> tuple[Pass, ...]:
    """The passes in the order of one round; `strict` leaves out what is not exact."""
    exact: tuple[Pass, ...] = (
        DropUnusedPass(),
        ComposeCastsPass(),
        ComposeViewsPass(),
        ComposeSlicesPass(),
        PickEarlyPass(),
        FoldConstantsPass(strict=strict),
        SimplifyArithmeticPass(),
    )
    return exact if strict else (RollRecurrencesPass(), *exact, FoldScalesPass())


def clean_up(graph: Graph, *, strict: bool = False, verify: bool = False) -> CleanUp:
    """Run all passes until nothing changes; `verify` checks the graph after each.

    Inputs, outputs and their names stay as they are; origins follow their nodes.

    Raises:
        InvalidGraphError: with `verify`, a pass broke the graph [W901].
    """
    log: list[tuple[str, int]] = []
    idle: dict[str, Graph] = {}
    """Name of a pass -> the graph on which it found nothing to do."""
    for _ in range(_MAX_ROUNDS):
        before = len(log)
        for step in passes(strict=strict):
            if idle.get(step.name) is graph or step.requires(graph) is not None:
                continue  # the pass has nothing to do here
            graph, num_changes = step.run(graph)
            if not num_changes:
                idle[step.name] = graph
                continue
            log.append((step.name, num_changes))
            if verify:
                verify_graph(graph, data=True)
        if len(log) == before:
            break
    return CleanUp(graph, tuple(log))
