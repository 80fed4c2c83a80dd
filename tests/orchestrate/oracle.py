"""The optimum by exhaustion: Dijkstra over sets of written values. Knows nothing of the integer program."""

from __future__ import annotations

import heapq

from weft.ir.graph import mask_of
from weft.orchestrate.instance import Instance


def oracle(instance: Instance) -> float:
    """Cost of the cheapest way to write all results; infinite if there is none."""
    start = mask_of(instance.given)
    goal = mask_of(instance.results)
    edges = [(mask_of(o.reads), mask_of(o.writes), instance.price(k)) for k, o in enumerate(instance.options)]
    best = {start: 0.0}
    heap = [(0.0, start)]
    while heap:
        cost, state = heapq.heappop(heap)
        if cost > best[state]:
            continue
        if not goal & ~state:
            return cost
        for reads, writes, price in edges:
            if not reads & ~state and writes & ~state:
                larger = state | writes
                if cost + price < best.get(larger, float("inf")):
                    best[larger] = cost + price
                    heapq.heappush(heap, (cost + price, larger))
    return float("inf")
