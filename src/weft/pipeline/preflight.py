"""Does a model fit into memory while it is compiled? Answered from its types, before anything is computed.

A few bytes of a model can ask for any amount (a tile, a one-hot, a wide stride); whoever computes it to find out takes
the machine down. Counted is the largest set of values that are alive at once when the graph runs in its own order,
primitive by primitive and, where it has a meaning in float64, in that: so does the judge of all plans.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import LimitError
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import FREE, Prim
from weft.ir.types import TensorType
from weft.options import Options
from weft.platform.table import platform_of

_RENAMES = frozenset({Prim.BROADCAST, Prim.TRANSPOSE, Prim.SLICE})
"""Views of their operand, whatever its strides."""
_LEAST_BYTES = 256 << 20
"""What a process that compiles takes anyway: smaller models are never refused."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a graph takes at once."""

    peak_bytes: int
    """Given inputs, weights and results included."""
    largest: NodeId
    """The largest value that is alive then."""
    largest_bytes: int


def needed(graph: Graph, *, wide: bool) -> Need:
    """The largest live set of a graph in its own order; `wide`: floats take eight bytes.

    Weights count once as they are, and once more, in float64 if `wide`, from where they are first read to where last.
    Cost: linear in the nodes.
    """
    nodes = graph.nodes
    owner: list[NodeId] = []
    """Whose memory a value lies in."""
    strided: list[bool] = []
    """Whether a reshape would have to copy it."""
    for i, n in enumerate(nodes):
        view = n.prim in _RENAMES or (n.prim is Prim.RESHAPE and not strided[n.inputs[0]])
        owner.append(owner[n.inputs[0]] if view else i)
        strided.append(n.prim in _RENAMES or (view and strided[n.inputs[0]]))
    kept = {owner[i] for i in graph.outputs}
    last = {owner[j]: i for i, n in enumerate(nodes) for j in n.inputs}
    dying: dict[NodeId, list[NodeId]] = {}
    for value, at in last.items():
        dying.setdefault(at, []).append(value)

    def size(i: NodeId) -> int:
        return _bytes(nodes[i].type, wide)

    given = sum(nodes[i].type.nbytes for i in graph.inputs) + sum(x.nbytes for x in graph.constants.values())
    given += sum(graph.type_of(i).nbytes for i in graph.outputs)
    best = Need(given, graph.outputs[0], graph.type_of(graph.outputs[0]).nbytes)
    now, alive = given, set[NodeId]()
    for i, n in enumerate(nodes):
        source = n.prim in (Prim.INPUT, Prim.CONSTANT)
        born = [owner[j] for j in n.inputs if nodes[owner[j]].prim in (Prim.INPUT, Prim.CONSTANT)]
        for value in dict.fromkeys([*born, *([i] if owner[i] == i and not source else [])]):
            if value not in alive:
                alive.add(value)
                now += size(value)
        if now > best.peak_bytes:
            largest = max(alive, key=size) if now > best.peak_bytes + best.peak_bytes // 8 else best.largest
            best = Need(now, largest, size(largest))
        for value in dying.get(i, ()):
            if value in alive and value not in kept:
                alive.discard(value)
                now -= size(value)
    return best


def _bytes(type: TensorType, wide: bool) -> int:
    return type.size * 8 if wide and type.dtype.is_float else type.nbytes


def check(graph: Graph, options: Options, free_bytes: int) -> None:
    """Refuse a graph that takes more than there is.

    Raises:
        LimitError: more memory (which operator, and how much it is) or more primitives than allowed [W105].
    """
    working = sum(n.prim not in FREE for n in graph.nodes)
    if working > options.max_primitives:
        raise LimitError(
            problem=f"the model has {working} primitives, the limit is {options.max_primitives}",
            remedy="compile it in parts, or allow more with WEFT_MAX_PRIMITIVES or Options.max_primitives",
        )
    # no float64 where an operator has none
    wide = platform_of(options.device).judges_in_float64 and all(n.prim is not Prim.OPAQUE for n in graph.nodes)
    need = needed(graph, wide=wide)
    room = options.compile_memory_bytes or max(free_bytes, _LEAST_BYTES)
    if need.peak_bytes <= room:
        return
    node = graph.nodes[need.largest]
    origin = graph.origins[node.origin] if node.origin >= 0 else None
    type = f"{node.type.dtype.value} {list(node.type.shape)[:8]}"
    raise LimitError(
        where=(origin.source if origin is not None else "") or _named(graph, need.largest),
        problem=f"a value of {_told(need.largest_bytes)} ({type}); compiling the model takes {_told(need.peak_bytes)}"
        f" at once, {_told(room)} {'are allowed' if options.compile_memory_bytes else 'are free'}",
        remedy="give smaller sizes, or allow more with WEFT_COMPILE_MEMORY_BYTES or Options.compile_memory_bytes",
    )


def _named(graph: Graph, i: NodeId) -> str:
    if graph.nodes[i].prim is Prim.INPUT:
        return f"input {graph.inputs.index(i)}"
    return "a weight" if graph.nodes[i].prim is Prim.CONSTANT else f"primitive {i} ({graph.nodes[i].prim.value})"


def _told(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 29 else f"{size / 2**20:.0f} MiB"
