"""Every layout, type, epilogue and odd size of a product together, and a few of them that hold every pair."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from weft.device.cuda.facts import GpuFacts
from weft.gemm.epilogue import epilogue
from weft.gemm.spec import LAYOUTS, Gemm, typed
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource

KINDS = ("f16", "bf16", "f32", "tf32", "e4m3", "e5m2_e4m3", "i8")
EIGHT = KINDS[4:]
EPILOGUES = ("none", "bias_gelu", "silu(acc) * full", "acc * row + col", "bias_residual_relu", "tanh(acc + bias) * 0.5")
SIZES = ((77, 33, 45), (129, 255, 1001), (1, 251, 517), (200, 136, 328))
"""Odd, odd and long, one row, ends of tiles whose rows are aligned."""


@dataclass(frozen=True)
class Crossed:
    """One combination."""

    layout: str
    kind: str
    epilogue: str
    size: tuple[int, int, int]

    @property
    def gemm(self) -> Gemm:
        """As a product; of 8-bit numbers the sum is a multiple of 16, and a right operand across it is constant."""
        m, n, k = self.size
        eight = self.kind in EIGHT
        g = Gemm(m, n, -(-k // 16) * 16 if eight else k, layout=self.layout, epilogue=epilogue(self.epilogue))
        g = typed(g, "f32" if self.kind == "tf32" else self.kind)
        return replace(g, constant=eight and self.layout == "nn")

    def facts(self, facts: GpuFacts) -> GpuFacts:
        """With leave to round f32, where that is asked for."""
        return replace(facts, tf32=self.kind == "tf32")

    def kernels(self, facts: GpuFacts, most: int) -> list[CudaSource]:
        """The first kernel of each template that `weft.compile` would measure."""
        facts, problem = self.facts(facts), self.gemm.problem()
        schedules = templates.schedules(problem, facts)
        assert not isinstance(schedules, Declined), (self, schedules.reason)
        firsts = {s.param("template"): s for s in reversed(schedules)}
        made = [templates.emit(problem, s) for s in schedules if firsts[s.param("template")] is s]
        found = [x for x in made if isinstance(x, CudaSource)]
        assert found, self
        return found[:most]


def layouts(kind: str) -> Sequence[str]:
    """Those that the templates take: 8-bit numbers lie along the sum."""
    return ("nt", "nn") if kind in EIGHT else LAYOUTS


@cache
def crossed() -> tuple[Crossed, ...]:
    """All of them."""
    return tuple(
        Crossed(layout, kind, text, size)
        for kind in KINDS
        for layout in layouts(kind)
        for text in EPILOGUES
        for size in SIZES
    )


@cache
def spread() -> tuple[Crossed, ...]:
    """Few that hold every pair of a layout, a kind, an epilogue and a size that can meet (greedily chosen)."""

    def pairs(x: Crossed) -> set[tuple[object, object]]:
        return set(itertools.combinations((x.layout, x.kind, x.epilogue, x.size), 2))

    wanted = set().union(*map(pairs, crossed()))
    found: list[Crossed] = []
    while wanted:
        best = max(crossed(), key=lambda x: len(pairs(x) & wanted))
        found.append(best)
        wanted -= pairs(best)
    return tuple(found)
