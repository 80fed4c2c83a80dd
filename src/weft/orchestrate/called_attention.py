"""Calls of attention with what only moves their operands and results, which no group that grows holds.

In a training step Q, K and V are slices of the one tensor that a product gives, and their gradients are concatenated
for the products that read them. A kernel reads and writes both where they lie. The gradients' call reads the slices
again, so that nobody stores them: a path from them through the forward call comes back to its set.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.opaque import call_members
from weft.ir.prims import Prim
from weft.orchestrate.calls import views_in_front
from weft.orchestrate.idiom import Idiom
from weft.orchestrate.stored import Stored, stored_root

OPERATORS = frozenset({"weft.attention.default", "weft.attention_backward.default"})


def called_groups(graph: Graph, stored: Stored) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """(members, those that are written): a call with its operands' views, with its results side by side, with both."""
    done = 0
    for node in bits(stored.work):
        attrs = graph.nodes[node].attrs
        if not isinstance(attrs, a.OpaqueAttrs) or attrs.op not in OPERATORS or done >> node & 1:
            continue
        call = call_members(graph, node) & stored.work
        done |= call
        views, joined = views_in_front(graph, stored, call), _joined(graph, stored, call)
        found: dict[Mask, tuple[NodeId, ...]] = {call | views: tuple(bits(call))}
        if joined is not None:
            found |= {call | behind | 1 << joined: (joined,) for behind in (0, views)}
        found.pop(call, None)
        for members, written in found.items():
            between = stored.dag.missing(members)
            if not any(between & stored.dag.descendants[w] for w in written):
                yield members, written


def _joined(graph: Graph, stored: Stored, call: Mask) -> NodeId | None:
    """The concatenation of the call's results, if nobody else reads them."""
    readers = 0
    for result in bits(call):
        readers |= stored.dag.consumers[result]
    if readers.bit_count() != 1 or call & stored.results:
        return None
    (reader,) = bits(readers)
    node = graph.nodes[reader]
    parts = mask_of(stored_root(graph, i) for i in node.inputs)
    return reader if node.prim is Prim.CONCAT and parts == call else None


CALLED_ATTENTION = Idiom(
    name="called_attention",
    patterns=("attention", "attention_gradient"),
    find=lambda scene: called_groups(scene.graph, scene.stored),
    multiplied=None,
)
