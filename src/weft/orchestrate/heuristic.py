"""A good plan without a solver: flow forward, extraction backward, exact local replacement.

Source: area recovery in FPGA technology mapping (area flow, then exact area), applied to kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.errors import InvalidGraphError
from weft.orchestrate.instance import Instance, execute, trim

ROUNDS = 8


def heuristic_plan(instance: Instance, kept: Sequence[int]) -> tuple[int, ...]:
    """Chosen options in execution order; made of the options in `kept`.

    Raises:
        InvalidGraphError: the options do not produce the results.
    """
    plan = _Cover(instance, kept).plan()
    if execute(instance, plan)[1]:  # options with several outputs wait for each other
        single = [k for k in kept if len(instance.options[k].writes) == 1]
        plan = _Cover(instance, single).plan() if _reaches(instance, single) else _forward(instance, kept)
    if execute(instance, plan)[1]:
        plan = _forward(instance, kept)
    return trim(instance, plan)


def _reaches(instance: Instance, kept: Iterable[int]) -> bool:
    return not execute(instance, _forward(instance, kept))[1]


def _forward(instance: Instance, kept: Iterable[int]) -> list[int]:
    """Everything that can run and adds something, cheapest first: a last resort, executable where anything is."""
    have = set(instance.given)
    waiting = sorted(kept, key=lambda k: (instance.price(k), k))
    plan: list[int] = []
    progress = True
    while progress:
        progress = False
        for k in waiting:
            option = instance.options[k]
            if option.reads <= have and not option.writes <= have:
                have |= option.writes
                plan.append(k)
                progress = True
                break
    return plan


class _Cover:
    """One producer per needed value, with reference counts."""

    def __init__(self, instance: Instance, kept: Sequence[int]) -> None:
        self.instance = instance
        self.kept = kept
        self.writers: dict[int, list[int]] = {}
        readers: dict[int, set[frozenset[int]]] = {}
        for k in kept:
            option = instance.options[k]
            for v in option.writes - instance.given:
                self.writers.setdefault(v, []).append(k)
            for v in option.reads - instance.given:
                readers.setdefault(v, set()).add(option.writes)
        self.fanout = {v: len(r) for v, r in readers.items()}
        self.flow: dict[int, float] = {}
        self.choice: dict[int, int] = {}
        self.needs: dict[int, int] = {}
        """References to a value."""
        self.used: dict[int, int] = {}
        """Needed values per chosen option."""

    def plan(self) -> list[int]:
        self._flow_forward()
        for g in sorted(self.instance.results - self.instance.given):
            if g not in self.choice:
                raise InvalidGraphError(problem=f"no kernel produces value {g}")
            self._need(g)
        for _ in range(ROUNDS):
            if not self._improve():
                break
        return [k for k, n in self.used.items() if n > 0]

    def _flow_forward(self) -> None:
        """f(v) = min over producers of (price + Σ f(read) / fan-out) / values written, until it stands."""
        instance = self.instance
        order = sorted(
            self.kept,
            key=lambda k: (max(map(instance.rank_of, instance.options[k].writes)), instance.options[k].conversion),
        )
        genuine: set[int] = set()
        for _ in range(4):  # one sweep settles single outputs; several outputs and conversions may need more
            changed = False
            for k in order:
                option = instance.options[k]
                needed = option.reads - instance.given
                if any(v not in self.flow for v in needed) or (option.conversion and not needed <= genuine):
                    continue
                total = instance.price(k) + sum(self.flow[v] / max(1, self.fanout.get(v, 1)) for v in needed)
                written = option.writes - instance.given
                share = total / max(1, len(written))
                for v in written:
                    if not option.conversion:
                        genuine.add(v)
                    if share < self.flow.get(v, float("inf")) - 1e-12:
                        self.flow[v] = share
                        self.choice[v] = k
                        changed = True
            if not changed:
                break

    def _need(self, value: int) -> float:
        """Reference a value; returns the cost of what has to be added. (Iterative: chains are long.)."""
        cost = 0.0
        waiting = [value]
        while waiting:
            v = waiting.pop()
            if v in self.instance.given:
                continue
            self.needs[v] = self.needs.get(v, 0) + 1
            if self.needs[v] == 1:
                cost += self._start(self.choice[v], waiting)
        return cost

    def _start(self, k: int, waiting: list[int]) -> float:
        self.used[k] = self.used.get(k, 0) + 1
        if self.used[k] > 1:
            return 0.0
        waiting.extend(self.instance.options[k].reads)
        return self.instance.price(k)

    def _use(self, k: int) -> float:
        waiting: list[int] = []
        return self._start(k, waiting) + sum(self._need(v) for v in waiting)

    def _leave(self, k: int) -> float:
        """Drop a reference to an option; returns the cost of what is no longer needed."""
        cost = 0.0
        leaving = [k]
        while leaving:
            q = leaving.pop()
            self.used[q] -= 1
            if self.used[q]:
                continue
            cost += self.instance.price(q)
            for v in self.instance.options[q].reads - self.instance.given:
                self.needs[v] -= 1
                if not self.needs[v]:
                    leaving.append(self.choice[v])
        return cost

    def _improve(self) -> bool:
        better = False
        values = sorted((v for v, n in self.needs.items() if n), key=self.instance.rank_of, reverse=True)
        for v in values:
            if not self.needs.get(v):
                continue  # an earlier replacement made it superfluous
            old = self.choice[v]
            freed = self._leave(old)
            best, best_cost = old, freed
            for k in self.writers[v]:
                if k == old or not self._available(k, v):
                    continue
                self.choice[v] = k
                cost = self._use(k)
                self._leave(k)
                if cost < best_cost - 1e-9:
                    best, best_cost = k, cost
            self.choice[v] = best
            self._use(best)
            better |= best != old
        return better

    def _available(self, k: int, value: int) -> bool:
        """Every read has a producer, and none of them waits for `value` itself."""
        option = self.instance.options[k]
        needed = option.reads - self.instance.given
        if any(v not in self.choice for v in needed):
            return False
        if option.conversion and any(self.instance.options[self.choice[v]].conversion for v in needed):
            return False
        if len(option.writes) == 1 and not option.conversion:
            return True  # reads only what stands before its sink
        seen: set[int] = set()
        waiting = list(needed)
        while waiting:
            v = waiting.pop()
            if v == value:
                return False
            if v not in seen:
                seen.add(v)
                waiting.extend(self.instance.options[self.choice[v]].reads - self.instance.given)
        return True
