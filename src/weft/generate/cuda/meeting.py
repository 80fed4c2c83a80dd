"""Forms whose blocks meet through memory: how many blocks share rows, and how many rows each of them has.

A meeting takes a time of its own (`GpuFacts.grid_barrier_us`), during which a block neither reads nor writes. Where
all blocks run at once, the fewest that fill the machine are best; where there is far more to read, several blocks on a
multiprocessor take turns at that. What all blocks leave for each other is read by all that share the rows: many rows
of a block, or many blocks, cost as much as the data itself.
"""

from __future__ import annotations

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.forms import Form
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.rewrite import Rewriter

THREADS = 256
SECTOR = 32
"""Bytes that memory gives at once: what lies beside each other of a block's rows is no less."""
LARGE = 1 << 16
"""Bytes per multiprocessor from which blocks take turns."""
SHARE = 1 << 15
"""Bytes of a block then."""
MOST_BLOCKS = 160
"""Of one row."""
MOST_LEFT = 1 << 15
"""Bytes that a block reads of what the others leave."""
LEFT = 16
"""Bytes of those per row."""


def meetings(facts: GpuFacts, rows: int, stored: int, *, access: int, lanes: int, beside: bool) -> list[Form]:
    """Forms for mean and variance of so many rows of `stored` bytes in all, the most promising first.

    `beside`: neighbours in memory belong to different rows, of which a thread has `lanes`, read at once.
    """
    found = []
    large = stored > facts.sms * LARGE
    for columns in (max(1, SECTOR // access), max(1, SECTOR // access) * 2) if beside else (0,):
        every = columns * lanes if beside else 1
        groups = -(-rows // every)
        for each in (SHARE, SHARE // 2) if large else (stored // facts.sms, stored // facts.sms // 2):
            blocks = round(stored / groups / max(each, 1))
            if every <= 32 and 2 <= blocks <= MOST_BLOCKS and blocks * every * LEFT <= MOST_LEFT:
                per_row = 0 if beside else THREADS
                found.append(Form(THREADS, columns=columns, per_row=per_row, once=True, meet=blocks))
    return found


def factors_together(graph: Graph) -> Graph:
    """The graph with (x * a) * b made x * (a * b) where a and b are repeated along x: one factor of each row.

    A block that waits for others has nothing to hide its arithmetic behind.
    """
    users: dict[NodeId, int] = {}
    for node in graph.nodes:
        for i in node.inputs:
            users[i] = users.get(i, 0) + 1
    rewriter = Rewriter(graph)

    def visit(b: GraphBuilder, _node: object, _inputs: tuple[NodeId, ...]) -> NodeId | None:
        record = graph.nodes[rewriter.position]
        if record.prim is not Prim.MUL or not record.type.dtype.is_float:
            return None
        for product, factor in (record.inputs, record.inputs[::-1]):
            inner = graph.nodes[product]
            if inner.prim is not Prim.MUL or users[product] > 1 or not _is_repeated(graph, factor):
                continue
            for x, other in (inner.inputs, inner.inputs[::-1]):
                if _is_repeated(graph, other) and not _is_repeated(graph, x):
                    both = b.apply(Prim.MUL, rewriter.mapped[other], rewriter.mapped[factor])
                    return b.apply(Prim.MUL, rewriter.mapped[x], both)
        return None

    return rewriter.run(visit)


def _is_repeated(graph: Graph, node: NodeId) -> bool:
    return graph.nodes[node].prim is Prim.BROADCAST
