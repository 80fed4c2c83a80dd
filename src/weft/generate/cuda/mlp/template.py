"""Chains of layers over the same rows in one kernel: the pattern and its templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.mlp import pair, wide
from weft.generate.cuda.mlp.image import Image
from weft.generate.cuda.mlp.kernel import emit
from weft.generate.cuda.mlp.match import Chain, chain
from weft.generate.cuda.mlp.shapes import MlpConfig, cycles, shapes
from weft.generate.cuda.template import Alone, Declared, Kinds, Ranked, Template, in_order, ranked_by, too_old
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


class Layers(NamedTuple):
    """A chain, and the problem that it is."""

    problem: Problem
    chain: Chain


@final
class ChainPattern:
    """Chains of products with constant weights; two products that are none may be attention."""

    name = "mlp"
    idioms = ("mlp",)

    def match(self, problem: Problem, *, tf32: bool) -> Layers | Declined | None:
        """The layers; 16-bit products, which TF32 is not for."""
        products = sum(n.prim is Prim.MATMUL for n in problem.graph.nodes)
        if products < 2:
            return None
        found = chain(problem)
        if isinstance(found, Declined):
            return found if products > 2 else None
        return Layers(problem, found)

    def offers(
        self, m: Layers, facts: GpuFacts, templates: Sequence[Template[Layers]], alone: Alone
    ) -> Ranked | Declined:
        """A layer at a time where values fit into registers; else a piece of a layer at a time."""
        return too_old(facts) or _offered(m, facts, [t for t in templates if t is not MLP_WIDE])


CHAIN = ChainPattern()


@final
class Mlp(Declared):
    """A warp, or a warpgroup, has rows of its own, all layers of which it keeps in registers."""

    def config(self, schedule: Schedule) -> MlpConfig:
        """How rows are divided, and where weights are."""
        return MlpConfig.of(schedule)

    def configurations(self, m: Layers, facts: GpuFacts) -> Ranked:
        """As rules order what the model has near the best."""
        return ranked_by(self, m, [s.schedule() for s in shapes(m.chain, facts)], facts)

    def every(self, m: Layers, facts: GpuFacts) -> Ranked:
        """As offered: the rules say which of the others were never faster."""
        return self.configurations(m, facts)

    def cost(self, m: Layers, schedule: Schedule, facts: GpuFacts) -> float:
        """Products, what is between them, weights and memory."""
        s = MlpConfig.of(schedule)
        return cycles(Image.of(m.chain, group=s.group), s, facts)

    def emit(self, m: Layers, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return emit(m.problem, schedule)


@final
class MlpPair(Declared):
    """Two CTAs of a cluster have half of the columns each."""

    def config(self, schedule: Schedule) -> pair.MlpPairConfig:
        """Stages and CTAs."""
        return pair.MlpPairConfig.of(schedule)

    def configurations(self, m: Layers, facts: GpuFacts) -> Ranked:
        """One where wide layers have few rows; else none."""
        return ranked_by(self, m, pair.schedules(m.chain, facts), facts)

    def every(self, m: Layers, facts: GpuFacts) -> Ranked:
        """As offered: there is no other."""
        return self.configurations(m, facts)

    def cost(self, m: Layers, schedule: Schedule, facts: GpuFacts) -> float | None:
        """None: it was measured where it is offered."""
        return None

    def emit(self, m: Layers, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return emit(m.problem, schedule)


@final
class MlpWide(Declared):
    """A layer is made a piece of its columns at a time; values lie in shared memory."""

    def config(self, schedule: Schedule) -> wide.MlpWideConfig:
        """How rows and columns are divided."""
        return wide.MlpWideConfig.of(schedule)

    def configurations(self, m: Layers, facts: GpuFacts) -> Ranked | Declined:
        """Few, unlike each other."""
        found = wide.schedules(m.chain, facts)
        return found if isinstance(found, Declined) else ranked_by(self, m, found, facts)

    def every(self, m: Layers, facts: GpuFacts) -> Ranked | Declined:
        """As offered: few fit."""
        return self.configurations(m, facts)

    def cost(self, m: Layers, schedule: Schedule, facts: GpuFacts) -> float:
        """Products, what is between them, and weights."""
        return wide.cycles(m.chain, wide.MlpWideConfig.of(schedule), facts)

    def emit(self, m: Layers, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return emit(m.problem, schedule)


__all__ = ["CHAIN", "MLP", "MLP_PAIR", "MLP_WIDE", "emit", "schedules"]

MLP_PAIR = MlpPair(names=("mlp_pair",), pattern=CHAIN, written=("cuda/mlp/pair.py",))
MLP = Mlp(names=("mlp",), pattern=CHAIN, written=("cuda/mlp/kernel.py",), kinds=Kinds(search=("pingpong",)))
MLP_WIDE = MlpWide(names=("mlp_wide",), pattern=CHAIN, written=("cuda/mlp/wide.py",))


def _offered(m: Layers, facts: GpuFacts, narrow: Sequence[Template[Layers]]) -> Ranked | Declined:
    found = in_order(narrow, m, facts)
    fits = not isinstance(found, Declined) and any(s.param("template") in MLP.names for _, s in found)
    return found if fits else MLP_WIDE.configurations(m, facts)


def schedules(problem: Problem, facts: GpuFacts) -> Sequence[Schedule] | Declined:
    """What is offered of a chain, of one layer too, the most promising first; Declined for what is none."""
    old = too_old(facts)
    if old is not None:
        return old
    found = chain(problem)
    if isinstance(found, Declined):
        return found
    ranked = _offered(Layers(problem, found), facts, (MLP_PAIR, MLP))
    return ranked if isinstance(ranked, Declined) else [s for _, s in ranked]
