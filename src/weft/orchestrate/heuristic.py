"""A good plan without a solver: flow forward, extraction backward, exact local replacement.

Source: area recovery in FPGA technology mapping (area flow, then exact area), applied to kernels.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from weft.orchestrate.instance import Instance, execute, trim, waiting_of

ROUNDS = 8
LEAST_GAIN = 1e-9
"""Microseconds that a change saves at least."""


def heuristic_plan(instance: Instance, kept: Sequence[int]) -> tuple[int, ...]:
    """Chosen options in execution order; made of the options in `kept`.

    Raises:
        InvalidGraphError: the options do not produce the results.
    """
    for several in (True, False):
        plan = _Cover(instance, kept, several=several).plan()
        if plan and not execute(instance, plan)[1]:
            return trim(instance, plan)
    return trim(instance, _forward(instance, kept))


def improved(instance: Instance, kept: Sequence[int], plan: Sequence[int]) -> tuple[int, ...]:
    """A plan, changed one option at a time for as long as it gets cheaper; made of its own options and those in `kept`.

    It finds what a solver leaves that stops within a gap: the gap of a plan with a few large kernels is worth more than
    all of its small ones.
    """
    order, missing = execute(instance, plan)
    if missing:
        return tuple(plan)
    cover = _Cover(instance, sorted({*kept, *plan}), several=True)
    found = cover.plan(order)
    if not found or execute(instance, found)[1]:
        return tuple(plan)
    found = list(trim(instance, found))
    cheaper = sum(map(instance.price, found)) < sum(map(instance.price, plan)) - LEAST_GAIN
    return tuple(found) if cheaper else tuple(plan)


def _forward(instance: Instance, kept: Iterable[int]) -> list[int]:
    """Everything that can run and adds something, cheapest first: a last resort, executable where anything is."""
    have = set(instance.given)
    missing, readers = waiting_of(instance, kept)
    ready = [(instance.price(k), k) for k, count in missing.items() if not count]
    heapq.heapify(ready)
    plan: list[int] = []
    while ready:
        _, k = heapq.heappop(ready)
        new = instance.options[k].writes - have
        if not new:
            continue
        have |= new
        plan.append(k)
        for q in (q for v in new for q in readers.get(v, ())):
            missing[q] -= 1
            if not missing[q]:
                heapq.heappush(ready, (instance.price(q), q))
    return plan


class _Cover:
    """One producer per needed value, with reference counts."""

    def __init__(self, instance: Instance, kept: Sequence[int], *, several: bool) -> None:
        self.instance = instance
        self.kept = kept
        self.several = several
        """Whether options with several outputs may replace others."""
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
        self.price = {k: instance.price(k) for k in kept}
        self.reads = {k: tuple(instance.options[k].reads - instance.given) for k in kept}
        """What an option reads and something must produce."""
        # the order in which costs are added up is that of the whole set
        self.asks = {k: tuple(v for v in instance.options[k].reads if v not in instance.given) for k in kept}

    def plan(self, start: Sequence[int] = ()) -> list[int]:
        """The options in use; none if some result has no producer. `start`: a plan to begin with, as it runs."""
        self._flow_forward()
        for k in reversed(start):  # the first that writes a value is its producer
            self.choice.update(dict.fromkeys(self.instance.options[k].writes - self.instance.given, k))
        wanted = self.instance.results - self.instance.given
        if not wanted <= self.choice.keys():
            return []
        for g in sorted(wanted):
            self._need(g)
        for _ in range(ROUNDS):
            if not self._improve():
                break
        return [k for k, n in self.used.items() if n > 0]

    def _flow_forward(self) -> None:
        """f(v) = min over producers of price + Σ f(read) / fan-out, over one output each where that is possible."""
        instance = self.instance

        def rank(k: int) -> tuple[int, bool, int]:
            option = instance.options[k]
            return (max(map(instance.rank_of, option.writes)), option.conversion, k)

        order = sorted(self.kept, key=rank)
        alone = {v for k in self.kept if len(w := instance.options[k].writes) == 1 for v in w}
        for _ in range(4):  # one sweep settles single outputs; several outputs may need more
            changed = False
            for k in order:
                option = instance.options[k]
                if len(option.writes) > 1 and option.writes <= alone:
                    continue  # for the local replacement
                needed = option.reads - instance.given
                if any(v not in self.flow for v in needed):
                    continue
                if option.conversion and any(instance.options[self.choice[v]].conversion for v in needed):
                    continue  # one hop from a real producer
                flow = instance.price(k) + sum(self.flow[v] / max(1, self.fanout.get(v, 1)) for v in needed)
                for v in option.writes - instance.given:
                    if flow < self.flow.get(v, float("inf")) - 1e-12:
                        self.flow[v] = flow
                        self.choice[v] = k
                        changed = True
            if not changed:
                break

    def _need(self, value: int) -> float:
        """Reference a value; returns the cost of what has to be added. (Iterative: chains are long.)."""
        needs, used, choice = self.needs, self.used, self.choice
        cost = 0.0
        waiting = [value]
        while waiting:
            v = waiting.pop()
            count = needs[v] = needs.get(v, 0) + 1
            if count == 1:
                k = choice[v]
                users = used[k] = used.get(k, 0) + 1
                if users == 1:
                    waiting += self.asks[k]
                    cost += self.price[k]
        return cost

    def _use(self, k: int) -> float:
        """Reference an option; returns the cost of what has to be added."""
        users = self.used[k] = self.used.get(k, 0) + 1
        if users > 1:
            return 0.0
        inner = 0.0
        for v in self.asks[k]:
            inner += self._need(v)
        return self.price[k] + inner

    def _leave(self, k: int) -> float:
        """Drop a reference to an option; returns the cost of what is no longer needed."""
        needs, used, choice = self.needs, self.used, self.choice
        cost = 0.0
        leaving = [k]
        while leaving:
            q = leaving.pop()
            users = used[q] = used[q] - 1
            if users:
                continue
            cost += self.price[q]
            for v in self.reads[q]:
                count = needs[v] = needs[v] - 1
                if not count:
                    leaving.append(choice[v])
        return cost

    def _improve(self) -> bool:
        better = False
        values = sorted((v for v, n in self.needs.items() if n), key=self.instance.rank_of, reverse=True)
        for v in values:
            if not self.needs.get(v):
                continue  # an earlier replacement made it superfluous
            best = self._better(v)
            if best >= 0:
                self._switch(best, v)
                better = True
        return better

    def _better(self, v: int) -> int:
        """The option that saves most if it produces a value instead of the one that does; -1: none."""
        best, best_gain = -1, LEAST_GAIN
        old = self.choice[v]
        freed = -1.0
        for k in self.writers[v]:
            if k == old or not self._available(k):
                continue
            if len(self.instance.options[k].writes) > 1:
                if freed >= 0.0:
                    self._use(old)
                    freed = -1.0
                switched, gain = self._switch(k, v)
                self._restore(k, switched)
                values = [w for w, _ in switched]
            else:  # what `old` alone needed is set free once for all of them
                if freed < 0.0:
                    freed = self._leave(old)
                if not self.used.get(k) and freed - self.price[k] <= best_gain:
                    continue  # it costs its own price at least
                self.choice[v] = k
                gain = freed - self._use(k)
                self._leave(k)
                self.choice[v] = old
                values = [v]
            if gain > best_gain and self._acyclic(k, values):
                best, best_gain = k, gain
        if freed >= 0.0:
            self._use(old)
        return best

    def _switch(self, k: int, value: int) -> tuple[list[tuple[int, int]], float]:
        """Let `k` produce `value` and what else it writes and is needed: (value, old option) each, and the saving.

        It is referenced before the others are left: what only these need may be one of its values.
        """
        choice = self.choice
        writes = [value, *sorted(self.instance.options[k].writes - {value})]
        switched = [(w, choice[w]) for w in writes if self.needs.get(w) and choice[w] != k]
        choice.update((w, k) for w, _ in switched)
        added = freed = 0.0
        for _ in switched:
            added += self._use(k)
        for _, old in switched:
            freed += self._leave(old)
        return switched, freed - added

    def _restore(self, k: int, switched: list[tuple[int, int]]) -> None:
        """Take a switch back. A value that nobody needed any more comes back with what needs it."""
        needed = [old for w, old in switched if self.needs[w]]
        self.choice.update(switched)
        for old in needed:
            self._use(old)
        for _ in needed:
            self._leave(k)

    def _available(self, k: int) -> bool:
        """Every read has a producer, a conversion's a real one, and nothing is converted from a conversion."""
        options = self.instance.options
        option = options[k]
        if len(option.writes) > 1 and not self.several:
            return False
        needed = option.reads - self.instance.given
        if not needed <= self.choice.keys():
            return False
        return not (option.conversion and any(options[self.choice[v]].conversion for v in needed))

    def _acyclic(self, k: int, values: list[int]) -> bool:
        """Whether no read of `k` waits for one of the values that it would produce."""
        options = self.instance.options
        seen: set[int] = set()
        waiting = list(options[k].reads - self.instance.given)
        while waiting:
            v = waiting.pop()
            if v in values:
                return False
            if v not in seen:
                seen.add(v)
                waiting.extend(options[self.choice[v]].reads - self.instance.given)
        return True
