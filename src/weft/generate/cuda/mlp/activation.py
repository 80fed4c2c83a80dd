"""Activations that forward kernels compute as one step, by the text of their entry in `activations.KINDS`.

A chain's steps are primitives, and most activations are computed primitive by primitive, with the machine's own
functions where results have 16 bits. Where the steps from one value to another are an activation whose entry says
`fused`, with its default numbers, its own text stands for all of them: found by comparing the chain's graph with the
entry's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast

from weft.generate.cuda.activations import KINDS, Kind
from weft.generate.cuda.mlp.match import Chain
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType

_COMMUTATIVE = frozenset({Prim.ADD, Prim.MUL, Prim.MAX, Prim.MIN})
_VIEWS = frozenset({Prim.BROADCAST, Prim.RESHAPE})


@dataclass(frozen=True, slots=True)
class FusedActivation:
    """Steps of a chain that are an activation."""

    kind: Kind
    operand: NodeId
    """The value that it is of."""
    steps: frozenset[NodeId]
    """What its text stands for, the last step included."""

    @property
    def text(self) -> str:
        """C text of its call; {0}: the operand."""
        return f"{_struct(self.kind)}::of({{0}})"


def activation_at(p: Chain, node: NodeId) -> FusedActivation | None:
    """The activation whose last step a node is."""
    for kind in KINDS.values():
        if not kind.fused:
            continue
        for pattern, last in _patterns(kind.name, p.dtype):
            found = _matched(pattern, last, p, node, {})
            if found is not None:
                operand = found.pop(pattern.inputs[0])
                return FusedActivation(kind, operand, frozenset(found.values()))
    return None


def activations_of(p: Chain, part: int) -> list[FusedActivation]:
    """Those of a part."""
    return [found for node in p.steps[part] if (found := activation_at(p, node)) is not None]


def activation_functions(p: Chain) -> str:
    """C text of the functions that `FusedActivation.text` calls; empty where a chain has none."""
    kinds = {x.kind.name: x.kind for part in range(len(p.steps)) for x in activations_of(p, part)}
    return "".join(kind.forward(_struct(kind), p.dtype.value) for kind in kinds.values())


def unfused(p: Chain, part: int) -> tuple[list[Prim], float, float]:
    """For cost models: the steps that stand by themselves, and (plain, special) operations of the others."""
    fused = activations_of(p, part)
    inner = {v for x in fused for v in x.steps}
    plain, special = (sum(x.kind.slots[i] for x in fused) for i in range(2))
    return [p.graph.nodes[s].prim for s in p.steps[part] if s not in inner], plain, special


def _struct(kind: Kind) -> str:
    return f"WAct_{kind.name}"


@cache
def _patterns(name: str, dtype: DType) -> tuple[tuple[Graph, NodeId], ...]:
    """(graph, last step) of an activation with its default numbers: as written and as passes leave it."""
    kind = KINDS[name]
    found = []
    for of in (dtype, DType.F32):
        b = GraphBuilder()
        last = cast("NodeId", kind.graph(b, b.input(TensorType(of, (2, 3))), *kind.numbers.values()))
        graph = b.build([last])
        found += [(g, _before_rounding(g)) for g in (graph, clean_up(graph).graph)]
    return tuple(found)


def _before_rounding(graph: Graph) -> NodeId:
    """The last step, but for the cast behind it: where a value is rounded the chain says."""
    last = graph.nodes[graph.outputs[0]]
    return last.inputs[0] if last.prim is Prim.CAST else graph.outputs[0]


def _number(graph: Graph, node: NodeId) -> float | None:
    """The number that a node of a pattern has everywhere."""
    while graph.nodes[node].prim in _VIEWS:
        node = graph.nodes[node].inputs[0]
    if graph.nodes[node].prim is not Prim.CONSTANT or graph.type_of(node).size != 1:
        return None
    return float(graph.constant(node).reshape(()))


def _matched(
    pattern: Graph, of: NodeId, p: Chain, node: NodeId, known: Mapping[NodeId, NodeId]
) -> dict[NodeId, NodeId] | None:
    """Nodes of the pattern, constants left out -> values of the chain; None where a node is not computed so."""
    number = _number(pattern, of)
    if number is not None:
        return dict(known) if p.numbers.get(node) == number else None
    value = p.value(node)
    if of in known:
        return dict(known) if known[of] == value else None
    if node in p.numbers or node in p.vectors:
        return None
    mine, its = pattern.nodes[of], p.graph.nodes[value]
    if mine.prim is Prim.INPUT:
        return {**known, of: value}
    if its.prim is not mine.prim or its.attrs != mine.attrs or len(its.inputs) != len(mine.inputs):
        return None
    orders = [its.inputs, its.inputs[::-1]] if mine.prim in _COMMUTATIVE else [its.inputs]
    for operands in orders:
        found: dict[NodeId, NodeId] | None = {**known, of: value}
        for inner, operand in zip(mine.inputs, operands, strict=True):
            found = None if found is None else _matched(pattern, inner, p, operand, found)
        if found is not None:
            return found
    return None
