"""Chains of products with constant weights as candidates: small fully connected networks, whole.

A group holds one contraction; a chain over the same rows is an exception like attention, because a kernel keeps a tile
of rows in registers from the first layer to the last.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId, bits
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.orchestrate.contraction_cuda import are_apart, are_layers, layers_us
from weft.orchestrate.idiom import Idiom, Multiplied
from weft.orchestrate.stored import Stored, is_weight, stored_root

WIDEST = 512
"""Columns of a layer; two values side by side may be its input."""
WIDEST_INPUT = 4096
"""Columns of what the first layer reads."""
MAX_INPUTS = 160
"""Values that a chain reads, weights included: the kernel itself has one argument for all weights."""
MOST_INPUTS = 4
"""Of these, values that are no weights."""
MOST_RESULTS = 3
"""Values that a chain stores."""


def mlp_groups(graph: Graph, stored: Stored) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """(members, those that are written): the longest chains, with what is elementwise around them."""
    layers = 0
    for v in bits(stored.work):
        if _is_layer(graph, stored, v):
            layers |= 1 << v
    covered = 0
    for last in reversed(list(bits(layers))):
        if covered >> last & 1:
            continue
        yield from _with_heads(graph, stored, layers, last)
        several = 0
        for sink in reversed(_sinks(graph, stored, last)):
            if not several:
                # where others come in, one kernel for all and those between which it would be cut: measuring decides
                for members in _of_several(graph, stored, layers, last, sink):
                    if _is_whole(stored, layers, last, 1 << sink, members):
                        several |= members & layers
                        yield members, (sink,)
            whole = _chains(graph, stored, layers, last, sink)
            found = [m for m in whole if _is_whole(stored, layers, last, 1 << sink, m)]
            for members in found:
                covered |= members & layers
                yield members, (sink,)
            if found:
                several = 0
                break
        covered |= several


def _is_whole(stored: Stored, layers: Mask, last: NodeId, sinks: Mask, members: Mask) -> bool:
    """Whether a set holds two layers or more and writes nothing but the sinks."""
    chained = members >> last & 1 and (members & layers).bit_count() > 1
    return bool(chained and stored.dag.written(members, stored.results) == sinks and not stored.dag.missing(members))


def _with_heads(graph: Graph, stored: Stored, layers: Mask, last: NodeId) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """Chains of several results, or whose results stand side by side in one: a density beside a colour."""
    sink = _sinks(graph, stored, last)[-1]
    rows = _rows(graph, last)
    readers = stored.dag.consumers[sink]
    if readers.bit_count() == 1 and not stored.results >> sink & 1:
        (reader,) = bits(readers)
        sink = reader if _joins(graph, reader) and graph.type_of(reader).size % rows == 0 else sink
    sinks = 1 << sink
    while True:
        members = _grown(graph, stored, layers, last, sinks, 0)
        ends = _ends_of_others(graph, stored, layers, last, members)
        if not ends & ~sinks or (sinks | ends).bit_count() > MOST_RESULTS:
            break
        sinks |= ends
    front = _front(stored, layers, members)
    if sinks.bit_count() == 1 and (not _joins(graph, sink) or stored.reads[sink] & ~(members & ~front)):
        return  # one result, and not of layers beside each other
    own = members & layers
    if own.bit_count() <= sinks.bit_count() or not own & _behind(stored, members, layers):
        return  # layers beside each other are no chain
    for taken in dict.fromkeys((members, members & ~front)):
        given = stored.inputs_of(taken) & ~_constants(graph, stored, taken)
        if 0 < given.bit_count() <= MOST_INPUTS and _is_whole(stored, layers, last, sinks, taken):
            yield taken, tuple(bits(sinks))


def _ends_of_others(graph: Graph, stored: Stored, layers: Mask, last: NodeId, members: Mask) -> Mask:
    """What else is made of the values that a chain begins with because others read them too, if layers make it."""
    rows = _rows(graph, last)
    found = 0
    for v in bits(members):
        for u in bits(stored.dag.producers[v] & ~members):
            if graph.type_of(u).size % rows or not (layers >> u & 1 or _is_plain(graph, u)):
                continue
            found |= stored.results & 1 << u
            for w in bits(stored.dag.consumers[u] & ~members & layers):
                if _rows(graph, w) == rows:
                    found |= 1 << _sinks(graph, stored, w)[-1]
    return found


def _is_layer(graph: Graph, stored: Stored, v: NodeId) -> bool:
    """A product with a constant matrix, of few columns and 16 bits."""
    n = graph.nodes[v]
    if n.prim is not Prim.MATMUL or n.type.dtype not in (DType.F16, DType.BF16):
        return False
    right = graph.type_of(n.inputs[1])
    k, cols = right.shape[-2:]
    root = stored_root(graph, n.inputs[1])
    constant = graph.nodes[root].prim is Prim.CONSTANT or is_weight(graph, root)
    return (
        constant
        and n.type.size > 0 < right.size == k * cols
        and cols <= WIDEST
        and k <= WIDEST_INPUT
        and not stored.dag.producers[v] >> root & 1
    )


def _is_plain(graph: Graph, v: NodeId) -> bool:
    """Elementwise, columns side by side, or some columns of an input of the graph."""
    return CATEGORY[graph.nodes[v].prim] is Category.ELEMENTWISE or _joins(graph, v) or _is_columns(graph, v)


def _is_columns(graph: Graph, v: NodeId) -> bool:
    """Whether a value is columns of an input of the graph that lie side by side: kernels read them from there."""
    n = graph.nodes[v]
    if not isinstance(n.attrs, a.SliceAttrs):
        return False
    source = stored_root(graph, n.inputs[0])
    of = graph.type_of(n.inputs[0])
    rows = n.attrs.starts[:-1] == (0,) * (of.rank - 1) and n.attrs.sizes[:-1] == of.shape[:-1]
    return graph.nodes[source].prim is Prim.INPUT and of.rank > 0 and rows and n.attrs.steps == (1,) * of.rank


def _joins(graph: Graph, v: NodeId) -> bool:
    n = graph.nodes[v]
    return isinstance(n.attrs, a.ConcatAttrs) and n.attrs.axis == n.type.rank - 1


def _rows(graph: Graph, layer: NodeId) -> int:
    t = graph.type_of(layer)
    return t.size // max(1, t.shape[-1])


def _chains(graph: Graph, stored: Stored, layers: Mask, last: NodeId, sink: NodeId) -> list[Mask]:
    """What a sink is made of, with one input: whole, else from where others come in.

    Where it is whole and not simple in front of the first layer, also from there on: not every kernel takes that.
    """
    members = _grown(graph, stored, layers, last, 1 << sink, 0)
    front = _front(stored, layers, members)
    bare = members & ~front
    if _reads_one(graph, stored, members):
        (x,) = bits(stored.inputs_of(members) & ~_constants(graph, stored, members))
        size = graph.type_of(x).size
        simple = not any(_joins(graph, v) or graph.type_of(v).size != size for v in bits(front))
        return [members] if simple or not _reads_one(graph, stored, bare) else [members, bare]
    if _reads_one(graph, stored, bare):
        return [bare]
    given = stored.inputs_of(members) & ~_constants(graph, stored, members)
    joined = sum(1 << v for v in bits(members & ~layers & ~(1 << sink)) if stored.reads[v] & given)
    members = _grown(graph, stored, layers, last, 1 << sink, joined)
    members &= ~_front(stored, layers, members)
    return [members] if joined and _reads_one(graph, stored, members) else []


def _of_several(graph: Graph, stored: Stored, layers: Mask, last: NodeId, sink: NodeId) -> list[Mask]:
    """What a sink is made of, with two to four inputs that are no weights: whole, and without what stands in front."""
    members = _grown(graph, stored, layers, last, 1 << sink, 0)
    bare = members & ~_front(stored, layers, members)
    found = []
    for taken in dict.fromkeys((members, bare)):
        given = stored.inputs_of(taken) & ~_constants(graph, stored, taken)
        front = members & ~bare if taken == members else 0
        simple = not any(_joins(graph, v) for v in bits(front))
        if 1 < given.bit_count() <= MOST_INPUTS and simple:
            found.append(taken)
    return found


def _grown(graph: Graph, stored: Stored, layers: Mask, last: NodeId, sinks: Mask, apart: Mask) -> Mask:
    """Layers and elementwise values behind sinks, as far back as only they read each other; none of `apart`."""
    rows = _rows(graph, last)
    members = sinks
    waiting = list(bits(sinks))
    while waiting:
        for u in bits(stored.dag.producers[waiting.pop()] & ~members & ~apart):
            if stored.dag.consumers[u] & ~members or stored.results >> u & 1:
                continue  # it is looked at again when the last of its readers has joined
            inner = layers >> u & 1 and _rows(graph, u) == rows
            if inner or (_is_plain(graph, u) and graph.type_of(u).size % rows == 0):
                members |= 1 << u
                waiting.append(u)
    return members


def _constants(graph: Graph, stored: Stored, members: Mask) -> Mask:
    """Constants among what a set reads."""
    return sum(1 << i for i in bits(stored.inputs_of(members)) if graph.nodes[i].prim is Prim.CONSTANT)


def _reads_one(graph: Graph, stored: Stored, members: Mask) -> bool:
    """Whether a set reads one value beside constants."""
    return (stored.inputs_of(members) & ~_constants(graph, stored, members)).bit_count() == 1


def _front(stored: Stored, layers: Mask, members: Mask) -> Mask:
    """What stands in front of the first layer."""
    return members & ~layers & ~_behind(stored, members, layers)


def _behind(stored: Stored, members: Mask, layers: Mask) -> Mask:
    """The members that read, at any distance within the set, a layer of it."""
    found = 0
    waiting = list(bits(members & layers))
    while waiting:
        fresh = stored.dag.consumers[waiting.pop()] & members & ~found
        found |= fresh
        waiting += bits(fresh)
    return found


def _sinks(graph: Graph, stored: Stored, last: NodeId) -> list[NodeId]:
    """The last layer, and values behind it to which elementwise steps on it come together, in their order."""
    size = graph.type_of(last).size
    found = edge = fresh = 1 << last
    sinks = [last]
    while not stored.results >> sinks[-1] & 1:
        readers = 0
        for v in bits(fresh):
            readers |= stored.dag.consumers[v]
        fresh = sum(1 << u for u in bits(readers & ~found) if _is_alike(graph, u, size))
        if not fresh:
            break
        found |= fresh
        # what nobody outside reads stays so: the set only grows
        edge = sum(1 << v for v in bits(edge | fresh) if stored.dag.consumers[v] & ~found or stored.results >> v & 1)
        if edge.bit_count() == 1:
            sinks.append(next(bits(edge)))
    return sinks


def _is_alike(graph: Graph, v: NodeId, size: int) -> bool:
    return CATEGORY[graph.nodes[v].prim] is Category.ELEMENTWISE and graph.type_of(v).size == size


MLP = Idiom(
    name="mlp",
    patterns=("mlp",),
    find=lambda scene: mlp_groups(scene.graph, scene.stored),
    multiplied=Multiplied(lambda g, linear: are_layers(g, linear) and not are_apart(g, linear), layers_us, hides=True),
    most_inputs=MAX_INPUTS,
)
