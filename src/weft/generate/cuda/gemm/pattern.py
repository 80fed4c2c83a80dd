"""One product or convolution with what surrounds it: the pattern that most templates write kernels of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast, final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common.float8 import has_float8
from weft.generate.cuda.gemm.common.normed import MOST_SHAPES
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.template import Alone, Feature, Ranked, Template, too_old
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.kernels.candidate import Problem

MOST = 12
"""Schedules of one problem."""
FIRST = 3
"""Schedules that are measured of every problem."""
NEAR = 1.5
"""What is modelled slower than so many times the best comes after all templates' best."""


@final
class ProductPattern:
    """One CONV (1-d or 2-d) or MATMUL of f16, bf16, f32 or 8-bit numbers.

    What else is there is elementwise on its result, or renamings, padding and constant gathers of its input; a MATMUL
    may have a normalised left operand, or partial sums of its result for a norm behind it.
    """

    name = "product"
    idioms = ("norms", "narrow")

    def match(self, problem: Problem, *, tf32: bool) -> Product | Declined:
        """The product's normal form."""
        return product(problem, tf32=tf32, changing=True)

    def offers(
        self,
        m: Product,
        facts: GpuFacts,
        templates: Sequence[Template[Product]],
        alone: Alone,  # noqa: ARG002 - it is one
    ) -> Ranked | Declined:
        """Best first by the models, the best of every near template before the second best of any."""
        ranked = asked(m, facts, templates)
        if isinstance(ranked, Declined):
            return ranked
        if Feature.NORM in features(m):
            return _normed(ranked)
        return ordered(ranked)[:MOST]


PRODUCT = ProductPattern()


def features(p: Product) -> frozenset[Feature]:
    """What a product has beyond a plain one."""
    if p.norm is not None or p.partial_stats is not None:
        return frozenset({Feature.NORM})
    if p.bytes is not None:
        return frozenset({Feature.BYTES})
    if p.changing:
        return frozenset({Feature.CHANGING})
    return frozenset({Feature.FLOAT8} if has_float8(cast("Graph", p.c.graph)) else ())


def taking(p: Product, templates: Sequence[Template[Product]]) -> list[Template[Product]]:
    """The templates that may be asked about a product."""
    has = features(p)
    return [t for t in templates if has <= t.takes]


def asked(p: Product, facts: GpuFacts, templates: Sequence[Template[Product]]) -> Ranked | Declined:
    """What the templates of the table offer, in its order."""
    old = too_old(facts)
    if old is not None:
        return old
    limited = features(p) <= {Feature.FLOAT8, Feature.CHANGING}  # of the others there are few
    ranked: Ranked = []
    least = math.inf  # modelled cycles of what is offered always
    for template in taking(p, templates):
        found = template.configurations(p, facts)
        if isinstance(found, Declined):
            continue
        if limited and template.near < math.inf:
            found = [x for x in found if x[0] <= template.near * least < math.inf]
        else:
            least = min(least, *(cycles for cycles, _ in found), math.inf)
        ranked += found
    return ranked


def ordered(ranked: Ranked) -> Ranked:
    """Best first by the model, but the best of every near template before the second best of any: few are measured."""
    seen: dict[object, int] = {}
    keyed = []
    ranked = sorted(ranked, key=lambda x: x[0])
    for cycles, schedule in ranked:
        template = schedule.param("template")
        seen[template] = seen.get(template, 0) + 1
        keyed.append((seen[template] > 1 or cycles > NEAR * ranked[0][0], cycles, schedule))
    found = [(cycles, schedule) for _, cycles, schedule in sorted(keyed, key=lambda x: x[:2])]
    # the first three are measured: one of another template is among them, however sure the models are
    first = found[0][1].param("template") if found else None
    if len(found) > FIRST and all(s.param("template") == first for _, s in found[:FIRST]):
        other = next((x for x in found if x[1].param("template") != first), None)
        if other is not None:
            found.remove(other)
            found.insert(FIRST - 1, other)
    return found


def _normed(ranked: Ranked) -> Ranked | Declined:
    """What both templates offer, the best by their models and the norm's instructions first."""
    if not ranked:
        return Declined("no shape has registers and shared memory for the norm")
    found = sorted(ranked, key=lambda x: x[0])
    best = found[0][1].param("template")
    other = next((x for x in found if x[1].param("template") != best), None)
    kept = found[:MOST_SHAPES]
    if other is not None and other not in kept:
        kept = [*kept[: MOST_SHAPES - 1], other]
    return kept
