"""Operators that are nothing but many elementwise steps on slices: a maximum pool with places, the gradient of a pool.

No group that grows holds such an operator whole, and a part of one is worth nothing: a tensor would be stored for each
element of a window. So it is taken as a whole or not at all, and counts for nothing where primitives are counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from weft.ir.graph import Graph, Mask, bits, mask_of
from weft.ir.prims import CATEGORY, Category, Prim
from weft.orchestrate.stored import Stored, is_weight, origin_cover

LEAST = 16
"""Primitives from which on an operator is one of many."""
_MOVED = frozenset({Prim.SLICE, Prim.PAD})


@dataclass(frozen=True, slots=True)
class Moving:
    """One operator."""

    members: Mask
    results: Mask
    inner: Mask
    """Members whose values nobody outside reads."""
    tables: Mask
    """Weights that it reads."""


def moving(graph: Graph, stored: Stored) -> tuple[Moving, ...]:
    """All of them whose members are there as the operator made them."""
    plausible = {k for k, n in Counter(node.origin for node in graph.nodes).items() if k >= 0 and n >= LEAST // 2}
    found = []
    for index in sorted(plausible):
        cover = origin_cover(graph, stored, index)
        if cover is None or cover[0].bit_count() < LEAST or not _moves(graph, cover[0]):
            continue
        members, results = cover
        inner = members & ~results & ~stored.dag.written(members, stored.results)
        if not stored.dag.missing(members):
            constants = mask_of(v for v in bits(stored.inputs_of(members)) if is_weight(graph, v))
            found.append(Moving(members, results, inner, constants))
    return tuple(found)


def _moves(graph: Graph, members: Mask) -> bool:
    """Whether they are elementwise steps and slices, some of these."""
    others = [graph.nodes[v].prim for v in bits(members) if CATEGORY[graph.nodes[v].prim] is not Category.ELEMENTWISE]
    return Prim.SLICE in others and _MOVED.issuperset(others)
