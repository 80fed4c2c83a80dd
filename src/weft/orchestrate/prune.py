"""Which kernels are worth measuring: first what is provably dominated goes, then the least likely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.ir.graph import Graph, bits
from weft.kernels.candidate import Kind
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.instance import Instance
from weft.orchestrate.program import reduced_costs, solve
from weft.orchestrate.select import Priced, build_instance

PLAN_GAP = 1e-2
PLAN_SECONDS = 10.0
"""For the plan of estimates, whose error is larger than any gap."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What to measure, and why the rest is left out."""

    keep: tuple[int, ...]
    """Positions in `priced`, the most promising first."""
    dropped: Counter[str]


def prune(
    graph: Graph,
    priced: Sequence[Priced],
    *,
    bounds_us: Sequence[float] = (),
    measured: Mapping[int, float] | None = None,
    limit: int = 0,
    alternatives: Alternatives | None = None,
) -> Pruned:
    """Order kernels by how likely a good plan uses them, and drop those that none does.

    `priced` carries estimates. `bounds_us` are sound lower bounds, `measured` times of some positions. Dropped for
    certain is a kernel whose bound exceeds a measured cover of it: kernels that write the same values, read no others
    and compute nothing outside it. The rest is ordered by the reduced cost in the relaxed program over its own cost:
    how much the estimate must be wrong before a plan with it wins; the plan that is best by the estimates goes first.
    Row-major singles, operators and changes of format come before all whatever they cost, as they make every plan
    feasible; they are kept beyond `limit` (0: no limit).
    """
    measured = measured or {}
    dropped: Counter[str] = Counter()
    keep = list(range(len(priced)))
    instance = build_instance(graph, priced, alternatives=alternatives)
    if bounds_us and measured:
        covers = _Covers(instance, priced, measured)
        keep = [k for k in keep if k in measured or bounds_us[k] <= covers.cost(k)]
        dropped["bound above a measured cover"] = len(priced) - len(keep)
    base = [k for k in keep if is_base(priced[k])]
    ratios = reduced_costs(instance, keep)
    reduced = replace(instance, options=tuple(instance.options[k] for k in keep))
    planned = {keep[x] for x in solve(reduced, gap=PLAN_GAP, seconds=PLAN_SECONDS).chosen}

    def rank(k: int) -> tuple[bool, float, int]:
        return (k not in planned, ratios[k] / _positive(priced[k]), k)

    others = sorted((k for k in keep if not is_base(priced[k])), key=rank)
    if limit and len(base) + len(others) > limit:
        room = max(0, limit - len(base))
        dropped["unlikely in any plan by its estimate"] = len(others) - room
        others = others[:room]
    return Pruned((*base, *others), dropped)


def is_base(kernel: Priced) -> bool:
    """True for kernels that make every plan feasible: row-major singles and operators, changes of format."""
    if kernel.candidate.kind is Kind.CONVERT:
        return True
    formats = kernel.input_formats + kernel.output_formats
    return kernel.candidate.kind in (Kind.SINGLE, Kind.ORIGIN) and Format.LAST not in formats


def _positive(kernel: Priced) -> float:
    return max(kernel.cost_us, 1e-3)


class _Covers:
    """Cheapest measured ways to do the work of a kernel in parts."""

    def __init__(self, instance: Instance, priced: Sequence[Priced], measured: Mapping[int, float]) -> None:
        self.instance = instance
        self.measured = measured
        self.members = {k: priced[k].candidate.members for k in measured}
        self.priced = priced
        self.of_member: dict[int, list[int]] = {}
        for k in measured:
            for m in list(bits(self.members[k]))[:1]:
                self.of_member.setdefault(m, []).append(k)

    def cost(self, k: int) -> float:
        """An upper bound of the cheapest cover of `k` by other measured kernels; infinite without one."""
        instance, option = self.instance, self.instance.options[k]
        inside = self.priced[k].candidate.members
        parts = [
            q
            for m in bits(inside)
            for q in self.of_member.get(m, ())
            if q != k and not self.members[q] & ~inside
        ]  # fmt: skip
        parts.sort(key=lambda q: max(map(instance.rank_of, instance.options[q].writes)))
        cost = dict.fromkeys(option.reads | instance.given, 0.0)
        for q in parts:
            part = instance.options[q]
            if all(v in cost for v in part.reads):
                total = self.measured[q] + sum(cost[v] for v in part.reads)
                for v in part.writes:
                    cost[v] = min(cost.get(v, float("inf")), total)
        return sum(cost.get(v, float("inf")) for v in option.writes)
