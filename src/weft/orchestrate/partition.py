"""Cut a large instance where few values are alive, so that each part can be solved by itself.

The cuts are those of a plan at hand: behind a step at which everything written before is done with, but for a few
values. A part has what is alive in front of it as given, what is alive behind it as results, and the options between.
The plan's own steps are among them, so the parts' plans together can run and cost no more than the plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.ir.graph import bits
from weft.orchestrate.instance import Instance, Option, Way

WIDEST_CUT = 3
"""Values alive at a cut."""


@dataclass(frozen=True, slots=True)
class Part:
    """An instance of its own, and which options of the whole it holds."""

    instance: Instance
    options: tuple[int, ...]
    """Per option of the part its position in the whole."""
    plan: tuple[int, ...]
    """The plan's steps of this part, as positions in the part."""
    signature: tuple[object, ...]
    """Equal for parts that differ in names only: their options stand in corresponding order."""


def parts_of(
    instance: Instance, kept: Sequence[int], plan: Sequence[int], least: int, first: int | None = None
) -> list[Part]:
    """Parts of at least `least` options each where the plan can be cut so often; one part if it cannot be cut at all.

    The first part has at least `first` options, so that another division of the same plan cuts it elsewhere.
    `plan` is in execution order, and its steps are among `kept`.
    """
    cuts = list(_cuts(instance, plan))
    spans = [_span(instance, k) for k in kept]
    tops = sorted(top for _, top in spans)
    chosen: list[tuple[int, int, frozenset[int]]] = []  # (steps before, rank, alive)
    for position, rank, alive in cuts:
        low = chosen[-1][1] if chosen else -1
        count = bisect_right(tops, rank) - bisect_right(tops, low)
        wanted = least if chosen or first is None else first
        if count >= wanted and bisect_right(tops, rank) <= len(tops) - least // 2:
            chosen.append((position, rank, alive))
    found = []
    start, low, before = 0, -1, frozenset[int]()
    end = (len(plan), max((top for _, top in spans), default=0), frozenset[int]())
    for position, rank, alive in [*chosen, end]:
        steps = plan[start:position]
        inside = {k for k, (bottom, top) in zip(kept, spans, strict=True) if low < bottom and top <= rank}
        inside.update(k for k in kept if instance.options[k].conversion and instance.options[k].reads <= before)
        inside.update(steps)
        found.append(part_of(instance, inside, steps, before, alive))
        start, low, before = position, rank, alive
    return found


def _span(instance: Instance, k: int) -> tuple[int, int]:
    ranks = [instance.rank_of(v) for v in instance.options[k].writes]
    return min(ranks), max(ranks)


def _cuts(instance: Instance, plan: Sequence[int]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """(steps before, highest rank written before, values alive) wherever the ranks before are below those behind."""
    last: dict[int, int] = {}
    for step, k in enumerate(plan):
        last.update(dict.fromkeys(instance.options[k].reads - instance.given, step))
    lowest = [0] * len(plan)
    low = max((_span(instance, k)[1] for k in plan), default=0) + 1
    for step in reversed(range(len(plan))):
        lowest[step] = low = min(low, _span(instance, plan[step])[0])
    alive: set[int] = set()
    top = -1
    for step, k in enumerate(plan[:-1]):
        alive |= {v for v in instance.options[k].writes if last.get(v, -1) > step}
        alive -= {v for v in instance.options[k].reads if last.get(v, -1) <= step}
        top = max(top, _span(instance, k)[1])
        if top < lowest[step + 1] and len(alive) <= WIDEST_CUT:
            yield step + 1, top, frozenset(alive)


def part_of(
    instance: Instance, inside: set[int], steps: Sequence[int], before: frozenset[int], alive: frozenset[int]
) -> Part:
    """Options and the plan's steps among them as an instance of their own: what is given, what is to be written."""
    options = instance.options
    values = before.union(*(options[k].reads | options[k].writes for k in inside))
    number = {v: i for i, v in enumerate(sorted(values, key=lambda v: (instance.rank_of(v), v)))}

    def shape(k: int) -> tuple[object, ...]:
        o = options[k]
        reads, writes = (sorted(number[v] for v in some) for some in (o.reads, o.writes))
        return (max(writes), writes, reads, o.conversion, o.cost, o.launches, o.workspace, k)

    order = sorted(inside, key=shape)
    position = {k: i for i, k in enumerate(order)}
    given = (instance.given & values) | before
    written = frozenset[int]().union(*(options[k].writes for k in steps))
    results = (alive & values) | (instance.results & written)
    part = replace(
        instance,
        options=tuple(options[k] for k in order),
        given=given,
        results=results,
        unavoidable=frozenset(),
        ways=(),
    )
    signature = (
        tuple(repr(shape(k)[:-1]) for k in order),
        *(tuple(sorted(number[v] for v in some)) for some in (given, results)),
    )
    return Part(tighten(part, instance.ways), tuple(order), tuple(position[k] for k in steps), signature)


def tighten(instance: Instance, ways: Sequence[Way] = ()) -> Instance:
    """The instance with what its options leave no choice about: unavoidable bases, and what each way needs.

    A value needs what all its writers compute or need; the greatest fixed point, from "everything" for all, is exact.
    """
    options = instance.options
    needs: dict[int, int] = dict.fromkeys(instance.given, 0)
    computed = [sum(1 << p for p in o.computes) for o in options]
    changed = True
    behind = [-1] * len(options)
    while changed:
        changed = False
        for k, option in enumerate(options):
            mask = computed[k]
            for v in option.reads:
                mask |= needs.get(v, -1)
            behind[k] = mask
            if mask == -1:
                continue  # its operands have not been reached
            for v in option.writes:
                less = needs.get(v, -1) & mask
                if less != needs.get(v, -1):
                    needs[v] = less
                    changed = True
    every = 0
    for g in instance.results:
        every |= needs.get(g, 0)
    found = (_narrowed(way, options, behind, every) for way in ways)
    return replace(instance, unavoidable=frozenset(bits(every)), ways=tuple(way for way in found if way is not None))


def _narrowed(way: Way, options: Sequence[Option], behind: Sequence[int], every: int) -> Way | None:
    """A way with what all options need that go it; None where there is none."""
    common = -1
    for option, mask in zip(options, behind, strict=True):
        if way.own in option.computes:
            common &= mask
    return None if common == -1 else replace(way, needs=frozenset(bits(common & ~every)))
