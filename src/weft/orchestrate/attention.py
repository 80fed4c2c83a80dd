"""Attention as candidates: two products with the softmax between them, which the growth of groups never joins.

A group holds one contraction, because few other pairs of contractions have a kernel that is faster than two; attention
is the exception, so it is looked for by its shape: product, softmax, product. Each place gives a few sets: the core,
with the index maps of queries, keys and values, and with the cheap arithmetic before these (biases); behind it,
transposes. Linear attention is a small product that another one reads: with all that is cheap around the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.prims import CATEGORY, Category, Prim
from weft.orchestrate.idiom import Idiom
from weft.orchestrate.stored import Stored, stored_root

_MAPS = frozenset({Prim.TRANSPOSE, Prim.SLICE})
_CHEAP = _MAPS | {Prim.CAST, Prim.ADD, Prim.SUB, Prim.MUL, Prim.DIV}
_BEHIND = frozenset({Prim.TRANSPOSE, Prim.CAST})
_AROUND = _CHEAP | {Prim.MAX, Prim.MIN, Prim.PAD}
"""Around linear attention."""
_SMALL = 48
"""Rows and columns of its first product."""
_SOFTMAX = frozenset({Prim.REDUCE_MAX, Prim.EXP, Prim.REDUCE_SUM, Prim.DIV})


def attention_groups(graph: Graph, stored: Stored) -> Iterator[tuple[Mask, NodeId]]:
    """(members, the one member that is written): convex sets, the largest of a place last."""
    for second in bits(stored.work):
        if graph.nodes[second].prim is not Prim.MATMUL:
            continue
        yield from _linear(graph, stored, second)
        core = _core(graph, stored, second)
        if not core:
            continue
        behind, sink = _behind(graph, stored, second)
        operands = _operands(graph, stored, core)
        seen: set[Mask] = set()
        for prims in (frozenset[Prim](), _MAPS, _CHEAP):
            members = core | behind | _above(graph, stored, operands, prims)
            if members not in seen and not stored.dag.missing(members):
                seen.add(members)
                yield members, sink


def _linear(graph: Graph, stored: Stored, second: NodeId) -> Iterator[tuple[Mask, NodeId]]:
    """Linear attention with what it concatenates, and without."""
    first = graph.nodes[second].inputs[0]
    small = max(graph.type_of(first).shape[-2:], default=0) <= _SMALL
    if graph.nodes[first].prim is not Prim.MATMUL or not small or stored.dag.consumers[first] != 1 << second:
        return
    core = 1 << first | 1 << second
    behind, sink = _cone(graph, stored, second)
    operands = _operands(graph, stored, core)
    for prims in (_AROUND | {Prim.CONCAT}, _AROUND):
        members = core | behind | _above(graph, stored, operands, prims)
        if not stored.dag.missing(members):
            yield members, sink
        if not any(graph.nodes[m].prim is Prim.CONCAT for m in bits(members)):
            return


def _cone(graph: Graph, stored: Stored, start: NodeId) -> tuple[Mask, NodeId]:
    """What is cheap behind a value and reads nothing else, as far as it ends in one value; that value."""
    found, best, sink = 1 << start, 0, start
    while True:
        readers = 0
        for v in bits(found):
            readers |= stored.dag.consumers[v]
        grown = 0
        for v in bits(readers & ~found):
            inside = not stored.dag.producers[v] & ~found & stored.work
            if inside and graph.nodes[v].prim in _CHEAP and not stored.results & stored.dag.producers[v]:
                grown |= 1 << v
        if not grown:
            return best, sink
        found |= grown
        ends = stored.dag.written(found, stored.results)
        if ends.bit_count() == 1:
            best, sink = found & ~(1 << start), next(bits(ends))


def _core(graph: Graph, stored: Stored, second: NodeId) -> Mask:
    """The two products and what is elementwise or reduces between them; 0 where that is no softmax."""
    weights = stored_root(graph, graph.nodes[second].inputs[0])
    if not stored.dag.producers[second] >> weights & 1:
        return 0  # the weights are computed in another way in this version
    between = products = 0
    waiting = [weights]
    while waiting:
        v = waiting.pop()
        category = CATEGORY[graph.nodes[v].prim]
        if graph.nodes[v].prim is Prim.MATMUL:
            products |= 1 << v
        elif category in (Category.ELEMENTWISE, Category.REDUCE) and not between >> v & 1:
            between |= 1 << v
            waiting.extend(bits(stored.dag.producers[v]))
    prims = {graph.nodes[v].prim for v in bits(between)}
    if not prims >= _SOFTMAX or products.bit_count() != 1:
        return 0
    return between | products | 1 << second


def _operands(graph: Graph, stored: Stored, core: Mask) -> Mask:
    """Queries, keys and values: what the two products read."""
    found = 0
    for v in bits(core):
        if graph.nodes[v].prim is Prim.MATMUL:
            found |= stored.dag.producers[v]
    return found & ~core


def _above(graph: Graph, stored: Stored, start: Mask, prims: frozenset[Prim]) -> Mask:
    """Members above some values: a value of these primitives, and what it reads, as long as that is one too."""
    allowed = mask_of(v for v in bits(stored.work) if graph.nodes[v].prim in prims)
    found = 0
    frontier = start & allowed
    while frontier:
        found |= frontier
        grown = 0
        for v in bits(frontier):
            grown |= stored.dag.producers[v]
        frontier = grown & allowed & ~found
    return found


def _behind(graph: Graph, stored: Stored, second: NodeId) -> tuple[Mask, NodeId]:
    """Transposes and casts behind the second product, as long as they are its only readers; the last of them."""
    found, sink = 0, second
    while not stored.results >> sink & 1:
        readers = stored.dag.consumers[sink]
        if readers.bit_count() != 1:
            break
        reader = next(bits(readers))
        if graph.nodes[reader].prim not in _BEHIND:
            break
        found |= 1 << reader
        sink = reader
    return found, sink


ATTENTION = Idiom(
    name="attention",
    patterns=("attention", "linear attention"),
    find=lambda scene: ((members, (sink,)) for members, sink in attention_groups(scene.graph, scene.stored)),
    multiplied=None,
)
