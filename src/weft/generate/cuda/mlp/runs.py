"""Layers of a chain that are alike: one loop instead of a copy of the text for each."""

from __future__ import annotations

from weft.generate.cuda.mlp.match import Chain, last_use
from weft.ir.graph import NodeId

SHORTEST = 3
"""Fewer layers alike are written out."""

Run = tuple[int, int]
"""(first part, number of parts)"""


def runs(p: Chain, fixed: int = 0) -> tuple[Run, ...]:
    """Runs of inner layers with equal sizes and steps, each of which reads only what the last one left.

    The first `fixed` layers are not like the others.
    """
    uses = last_use(p)
    found: list[Run] = []
    part = 2
    while part < len(p.layers):
        first = _signature(p, part, uses)
        end = part + 1
        if first is not None:
            while end < len(p.layers) and end != fixed + 1 and _signature(p, end, uses) == first:
                end += 1
            if end - part >= SHORTEST:
                found.append((part, end - part))
        part = end
    return tuple(found)


def _signature(p: Chain, part: int, uses: dict[NodeId, int]) -> object | None:
    """Equal for parts with the same text; None for one that must stand alone."""
    layer = p.layers[part - 1]
    if p.ends_of(part) or p.kept[part - 1] != layer.left or len(p.kept[part]) != 1 or layer.widths != (layer.n,):
        return None
    (left,) = layer.left
    if uses[left] != part:
        return None
    names: dict[NodeId, object] = {layer.node: "product", left: "left"}
    steps = []
    for at, node in enumerate(p.steps[part]):
        record = p.graph.nodes[node]
        operands: list[object] = []
        for o in record.inputs:
            value = p.value(o)
            if o in p.numbers:
                operands.append((repr(p.numbers[o]), p.graph.type_of(o).dtype))
            elif o in p.vectors:
                names.setdefault(o, f"vector {len(names)}")
                operands.append((names[o], p.graph.type_of(o).dtype))
            elif value in names:
                operands.append(names[value])
            else:
                return None
        names[node] = at
        steps.append((record.prim, record.attrs, record.type.dtype, tuple(operands)))
    return layer.k, tuple(steps), names.get(p.kept[part][0])
