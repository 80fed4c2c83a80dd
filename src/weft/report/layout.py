"""Layered drawing of a directed acyclic graph: longest paths give the rows, barycentres the order in them.

After Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures" (1981), with
edges left unbent: an edge that spans several rows takes part in the ordering of its two ends only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SWEEPS = 6


@dataclass(frozen=True, slots=True)
class Drawing:
    """Where each node stands, in units of one column and one row."""

    column: tuple[float, ...]
    """Centre, from 0; neighbours in a row are at least 1 apart."""
    row: tuple[int, ...]


def draw(inputs: Sequence[Sequence[int]]) -> Drawing:
    """Place nodes given the positions of their inputs, each smaller than the node's own position.

    Raises:
        ValueError: an input that does not come before its node.
    """
    rows = _rows(inputs)
    layers: list[list[int]] = [[] for _ in range(max(rows, default=-1) + 1)]
    for node, row in enumerate(rows):
        layers[row].append(node)
    users: list[list[int]] = [[] for _ in inputs]
    for node, sources in enumerate(inputs):
        for source in sources:
            users[source].append(node)
    column = [0.0] * len(inputs)
    for layer in layers:
        _pack(layer, column)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        near: Sequence[Sequence[int]] = inputs if down else users
        for layer in layers if down else reversed(layers):
            wanted = {n: _mean([column[m] for m in near[n]], column[n]) for n in layer}
            layer.sort(key=lambda n: (wanted[n], n))
            _placed(layer, wanted, column)
    left = min(column, default=0.0)
    return Drawing(tuple(round(x - left, 2) for x in column), tuple(rows))


def _rows(inputs: Sequence[Sequence[int]]) -> list[int]:
    """Longest path from a source; sources then sink to just above their first user, so that weights stand near it."""
    rows: list[int] = []
    first_user = [-1] * len(inputs)
    for node, sources in enumerate(inputs):
        for source in sources:
            if not 0 <= source < node:
                raise ValueError(f"node {node} reads {source}, which does not come before it")
        rows.append(max((rows[s] + 1 for s in sources), default=0))
    for node, sources in enumerate(inputs):
        for source in sources:
            if first_user[source] < 0 or rows[node] < first_user[source]:
                first_user[source] = rows[node]
    return [u - 1 if not s and u > 0 else r for r, u, s in zip(rows, first_user, inputs, strict=True)]


def _pack(layer: Sequence[int], column: list[float]) -> None:
    for place, node in enumerate(layer):
        column[node] = place - (len(layer) - 1) / 2


def _placed(layer: Sequence[int], wanted: dict[int, float], column: list[float]) -> None:
    """Columns as near to those wanted as an order with gaps of 1 allows: least squares by pooling neighbours."""
    pools: list[list[float]] = []  # sum of (wanted - place), count
    for place, node in enumerate(layer):
        pools.append([wanted[node] - place, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] >= pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    place = 0
    for total, count in pools:
        for _ in range(int(count)):
            column[layer[place]] = total / count + place
            place += 1


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
