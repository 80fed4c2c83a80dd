"""Products with the casts that widen their operands from 8 bits: the tensor cores take the bytes.

Of integers in i32, and of 8-bit floats in f32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.ir.graph import Graph, Mask, Node, NodeId, bits
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.orchestrate.idiom import Idiom
from weft.orchestrate.stored import Stored, stored_root

BYTES = {
    DType.I32: frozenset({DType.I8, DType.U8}),
    DType.F32: frozenset({DType.F8E4M3, DType.F8E5M2}),
}
"""Types of the operands in memory, by that of the product."""


_RENAMING = frozenset({Prim.RESHAPE, Prim.TRANSPOSE, Prim.BROADCAST, Prim.SLICE})


def multiplied_as(graph: Graph, node: Node) -> DType:
    """The type in which tensor cores may take the operands of a contraction: that of 8-bit numbers, though widened.

    Of integers signed bytes, whatever their signs.
    """
    found = []
    for at in _renamed(graph, node):
        record = graph.nodes[at]
        found.append(graph.type_of(record.inputs[0]).dtype if record.prim is Prim.CAST else graph.type_of(at).dtype)
    if graph.type_of(node.inputs[0]).dtype is DType.I32 and BYTES[DType.I32].issuperset(found):
        return DType.I8
    return found[0] if all(dtype.is_float8 for dtype in found) else graph.type_of(node.inputs[0]).dtype


def _renamed(graph: Graph, node: Node) -> list[NodeId]:
    """The operands of a contraction, but for the order and number of their elements."""
    found = []
    for operand in node.inputs:
        at = operand
        while graph.nodes[at].prim in _RENAMING:
            at = graph.nodes[at].inputs[0]
        found.append(at)
    return found


def widening(graph: Graph, node: Node) -> frozenset[NodeId]:
    """The casts of operands that tensor cores take as they are in memory: they cost nothing."""
    return frozenset(_renamed(graph, node)) if multiplied_as(graph, node).itemsize == 1 else frozenset()


def narrow_groups(
    graph: Graph, stored: Stored, known: Iterable[tuple[Mask, tuple[NodeId, ...]]]
) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """(members, what is written) of groups that meet such a product in 8 bits.

    Every known group with one, with the casts in front of it; every known group that ends in such a cast, without; and
    those between two products, both ways.
    """
    casts = {v: found for v in bits(stored.work) if (found := _casts(graph, stored, v))}
    for members, written in known if casts else ():
        before, behind = 0, 0
        for v, found in casts.items():
            if members >> v & 1:
                before |= found | _transposes(graph, stored, found)
            elif members & found and members & ~found:
                behind |= found
        # with the casts in front, without those for a product behind, and both
        for inside in dict.fromkeys((members | before, members & ~behind, (members | before) & ~behind)):
            if inside == members or stored.dag.missing(inside):
                continue
            if not members & behind & ~inside:
                yield inside, written
            elif ends := stored.dag.written(inside, stored.results):
                yield inside, tuple(bits(ends))


def _read_by(stored: Stored, v: NodeId, reader: NodeId) -> bool:
    """Whether a value that is computed has one reader alone."""
    return bool(stored.work >> v & 1) and not stored.dag.consumers[v] & ~(1 << reader) and not stored.results >> v & 1


def _transposes(graph: Graph, stored: Stored, casts: Mask) -> Mask:
    """Of what casts widen, what is only turned for them."""
    found = 0
    for v in bits(casts):
        before = stored_root(graph, graph.nodes[v].inputs[0])
        if graph.nodes[before].prim is Prim.TRANSPOSE and _read_by(stored, before, v):
            found |= 1 << before
    return found


def _casts(graph: Graph, stored: Stored, node: NodeId) -> Mask:
    """The casts that are both operands of a product, but for their order; 0 where one is none, or is read by others."""
    bytes_ = BYTES.get(graph.type_of(node).dtype)
    if CATEGORY[graph.nodes[node].prim] is not Category.LINEAR or bytes_ is None:
        return 0
    found = 0
    for operand in graph.nodes[node].inputs:
        v, reader = stored_root(graph, operand), node
        while graph.nodes[v].prim is Prim.TRANSPOSE and _read_by(stored, v, reader):
            found |= 1 << v
            v, reader = stored_root(graph, graph.nodes[v].inputs[0]), v
        record = graph.nodes[v]
        widens = record.prim is Prim.CAST and graph.type_of(record.inputs[0]).dtype in bytes_
        if not widens or not _read_by(stored, v, reader):
            return 0
        found |= 1 << v
    return found


NARROW = Idiom(
    name="narrow",
    patterns=("product",),
    find=lambda scene: narrow_groups(scene.graph, scene.stored, tuple(scene.known)),
    multiplied=None,
    of_original=True,
)
