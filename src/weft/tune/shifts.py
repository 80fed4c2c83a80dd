"""Where a graph shifts exponentials by the maximum of their row, as softmax and attention do; graphs alone, no tensors.

A `Way` leads from a node to a value through what passes on sums: moves, casts, constant factors, additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from weft.ir.graph import Graph
from weft.ir.prims import Prim

MOVES = frozenset({Prim.BROADCAST, Prim.RESHAPE, Prim.TRANSPOSE, Prim.SLICE})
"""Primitives of one operand whose elements they only move."""


@dataclass(frozen=True, slots=True)
class Shift:
    """exp(c * (x - max(x)))."""

    difference: int
    """The node x - max(x)."""
    maximum: int
    """The node max(x)."""
    exponential: int


@dataclass(frozen=True, slots=True)
class Way:
    """From a node to a value, through what passes on sums."""

    nodes: tuple[int, ...]
    gain: float
    """What the last node gains by 1 that is added to the first one."""
    beside: tuple[int, ...] = ()
    """Inputs that are added on the way."""


def shifts(graph: Graph) -> tuple[Shift, ...]:
    """All of a graph, one for each maximum, in its order."""
    found: dict[int, Shift] = {}
    for i, node in enumerate(graph.nodes):
        if node.prim is not Prim.EXP:
            continue
        for way in ways(graph, node.inputs[0], Prim.SUB, sums=False):
            x, shift = graph.nodes[way.nodes[0]].inputs
            maximum = _maximum(graph, shift)
            if maximum is not None and _moved_from(graph, x) == _moved_from(graph, graph.nodes[maximum].inputs[0]):
                found.setdefault(maximum, Shift(way.nodes[0], maximum, i))
    return tuple(found.values())


def asks_for_empty_rows(graph: Graph) -> frozenset[int]:
    """Comparisons with a row's maximum or with the sum of its exponentials that ask whether anything is in the row.

    The maximum is infinite then, or the sum 0, which is at least 1 else: rounding decides neither.
    """
    found = shifts(graph)
    maxima, exponentials = {s.maximum for s in found}, {s.exponential for s in found}
    asking = set()
    for i, node in enumerate(graph.nodes):
        if node.prim not in (Prim.EQ, Prim.NE):
            continue
        x, number = (_moved_from(graph, j) for j in node.inputs)
        of = graph.nodes[x]
        value = uniform(graph, number)
        total = of.prim is Prim.REDUCE_SUM and _moved_from(graph, of.inputs[0]) in exponentials
        if (x in maxima and value is not None and math.isinf(value)) or (total and value == 0.0):
            asking.add(i)
    return frozenset(asking)


def _moved_from(graph: Graph, i: int) -> int:
    """The value that moves and casts make the node of."""
    while graph.nodes[i].prim in MOVES or graph.nodes[i].prim is Prim.CAST:
        i = graph.nodes[i].inputs[0]
    return i


def _maximum(graph: Graph, i: int) -> int | None:
    """The maximum that is subtracted; where it is infinite a number may stand in its place."""
    i = _moved_from(graph, i)
    if graph.nodes[i].prim is Prim.SELECT:
        chosen = [_moved_from(graph, j) for j in graph.nodes[i].inputs[1:]]
        i = next((j for j in chosen if graph.nodes[j].prim is Prim.REDUCE_MAX), i)
    return i if graph.nodes[i].prim is Prim.REDUCE_MAX else None


def ways(graph: Graph, to: int, start: Prim, *, sums: bool) -> Iterator[Way]:
    """Ways from nodes of a primitive to a value, one by each node.

    `sums`: through additions of anything and choices, else through additions of inputs alone.
    """
    waiting = [Way((to,), 1.0)]
    seen: set[int] = set()
    while waiting:
        way = waiting.pop()
        first = way.nodes[0]
        if first in seen:
            continue
        seen.add(first)
        if graph.nodes[first].prim is start:
            yield way
            continue
        for i, gain, added in reversed(_passed_on(graph, first, sums=sums)):
            waiting.append(Way((i, *way.nodes), way.gain * gain, (*way.beside, *added)))


def _passed_on(graph: Graph, i: int, *, sums: bool) -> list[tuple[int, float, tuple[int, ...]]]:
    """Operands of a node, what it gains by 1 that is added to one, and the input that is added to that one."""
    node = graph.nodes[i]
    x = node.inputs
    if node.prim in MOVES or (node.prim is Prim.CAST and graph.type_of(x[0]).dtype.is_float):
        return [(x[0], 1.0, ())]
    if node.prim is Prim.NEG:
        return [(x[0], -1.0, ())]
    if node.prim is Prim.MUL:
        return [(j, factor, ()) for j, other in (x, x[::-1]) if (factor := uniform(graph, other))]
    if node.prim is Prim.DIV:
        return [(x[0], 1.0 / divisor, ())] if (divisor := uniform(graph, x[1])) else []
    if node.prim in (Prim.ADD, Prim.SUB):
        both = ((x[0], 1.0, x[1]), (x[1], 1.0 if node.prim is Prim.ADD else -1.0, x[0]))
        if sums:
            return [(j, gain, ()) for j, gain, _ in both]
        added = [(j, gain, _moved_from(graph, other)) for j, gain, other in both]
        return [(j, gain, (other,)) for j, gain, other in added if graph.nodes[other].prim is Prim.INPUT]
    return [(x[1], 1.0, ()), (x[2], 1.0, ())] if sums and node.prim is Prim.SELECT else []


def uniform(graph: Graph, i: int) -> float | None:
    """The number that all elements of a constant of floats are; None: it is none, or they differ."""
    i = _moved_from(graph, i)
    if graph.nodes[i].prim is not Prim.CONSTANT or not graph.type_of(i).dtype.is_float:
        return None
    data = graph.constant(i)
    return float(data.flat[0]) if data.size and bool((data == data.flat[0]).all()) else None
