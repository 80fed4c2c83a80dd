"""Schedules with a cross-CTA reduction through global memory: how many CTAs share rows, and how many rows each has.

The grid barrier takes a time of its own (`GpuFacts.grid_barrier_us`), during which a CTA neither reads nor writes.
Where all CTAs are co-resident, the fewest that fill the machine are best; where there is far more to read, some CTAs of
a multiprocessor read while others wait. Partial results are read by all CTAs that share the rows: many rows of a CTA,
or many CTAs, cost as much as the data itself.
"""

from __future__ import annotations

import math

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.loops.forms import LEAST_CTAS, Form
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.rewrite import Rewriter

THREADS = (128, 256, 512)
SECTOR = 32
"""Bytes that memory gives at once: what lies beside each other of a block's rows is no less."""
MOST_LEFT = 1 << 15
"""Bytes that a block reads of what the others leave."""
LEFT = 8
"""Bytes of those per row."""
KEPT = 13 << 10
"""Bytes of shared memory that a block needs beside what waits."""
MOST_ROWS = 32
"""Of a block: a warp joins what its threads have of them."""


def cross_cta_forms(
    facts: GpuFacts, rows: int, stored: int, *, access: int, lanes: int, beside: bool, wide: bool = False
) -> list[Form]:
    """Forms for mean and variance of so many rows of `stored` bytes in all, the most promising first, at most two.

    `beside`: neighbours in memory belong to different rows, of which a thread has `lanes`, read at once. `wide`: of a
    block's rows as many lie side by side as for much data.
    """
    c = costs_of(facts).reductions
    found = []
    large = stored > facts.sms * c.shared_bytes
    for sectors in (2, 1) if large else (2,) if wide else (1, 2):
        columns = max(1, SECTOR * sectors // access) if beside else 0
        every = columns * lanes if beside else 1
        groups = -(-rows // every)
        share = c.cta_bytes * sectors if large else stored // facts.sms
        blocks = round(stored / groups / max(share, 1))
        if every <= MOST_ROWS and LEAST_CTAS <= blocks <= c.most_ctas and blocks * every * LEFT <= MOST_LEFT:
            threads = 128 if share <= c.small_bytes else 256
            forms = (
                Form(n, columns=columns, per_row=0 if beside else n, single_pass=True, cross_cta=blocks)
                for n in THREADS
            )
            found += [f for f in forms if f.threads == threads or (f.threads == 2 * threads and not large)]
    return list(dict.fromkeys(found))[:2]


def balanced(facts: GpuFacts, rows: int, stored: int, *, access: int, lanes: int) -> list[Form]:
    """Of much data, rows side by side: so many blocks that each multiprocessor has as many as the others, or nearly."""
    c = costs_of(facts).reductions
    columns = max(1, 2 * SECTOR // access)
    groups = -(-rows // (columns * lanes))
    if stored <= facts.sms * c.shared_bytes or columns * lanes > MOST_ROWS:
        return []
    each = stored / (2 * c.cta_bytes) / facts.sms
    found = [facts.sms * max(1, n) // groups for n in (math.ceil(each), math.floor(each))]
    return [
        Form(256, columns=columns, single_pass=True, cross_cta=n)
        for n in dict.fromkeys(found)
        if LEAST_CTAS <= n <= c.most_ctas
    ]


def stashed(facts: GpuFacts, rows: int, stored: int, *, access: int, lanes: int, beside: int) -> list[Form]:
    """Of much data with `beside` rows side by side: what blocks read waits in shared memory.

    Two blocks of a multiprocessor: one reads while the other waits or writes, and of the rows of those that run all
    parts do. Where a block's rows are a small part of those side by side, short runs cost more than that gains.
    """
    c = costs_of(facts).reductions
    columns = max(1, 2 * SECTOR // access)
    every = columns * lanes
    if every > MOST_ROWS or beside > 2 * every or stored <= facts.sms * c.shared_bytes:
        return []
    group, at_once, most = stored * every // rows, 2 * facts.sms, facts.shared_per_sm // 2 - KEPT
    parts = [n for n in range(LEAST_CTAS, min(at_once, c.most_ctas) + 1) if group <= most * n]
    best = max(parts, key=lambda n: (at_once // n * n, -n), default=0)
    return [Form(256, columns=columns, single_pass=True, cross_cta=best, smem_stash=True)] if best else []


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
