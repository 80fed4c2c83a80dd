"""What `orchestrate` has of it."""

from __future__ import annotations

from tests.platform.vendor.facts import XpuFacts

from weft.kernels.candidate import Problem

LAUNCH_US = 3.0
asked: list[str] = []
"""Keys of the problems that were estimated."""


def estimate_us(problem: Problem, facts: XpuFacts) -> float:
    """A launch, and the bytes at the bandwidth."""
    asked.append(problem.key)
    graph = problem.graph
    return LAUNCH_US + sum(graph.type_of(n).nbytes for n in (*graph.inputs, *graph.outputs)) / facts.bandwidth / 1e3


def lower_bound_us(problem: Problem, facts: XpuFacts) -> float:
    """Nothing is known."""
    return 0.0
