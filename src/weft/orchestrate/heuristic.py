"""A good plan without a solver: flow forward, extraction backward, exact local replacement.

Source: area recovery in FPGA technology mapping (area flow, then exact area), applied to kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.orchestrate.instance import Instance, execute, trim

ROUNDS = 8


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

    def plan(self) -> list[int]:
        """The options in use; none if some result has no producer."""
        self._flow_forward()
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
            best, best_gain = -1, 1e-9
            for k in self.writers[v]:
                if k == self.choice[v] or not self._available(k):
                    continue
                switched, gain = self._switch(k, v)
                self._restore(k, switched)
                if gain > best_gain and self._acyclic(k, [w for w, _ in switched]):
                    best, best_gain = k, gain
            if best >= 0:
                self._switch(best, v)
                better = True
        return better

    def _switch(self, k: int, value: int) -> tuple[list[tuple[int, int]], float]:
        """Let `k` produce `value` and what else it writes and is needed: (value, old option) each, and the saving."""
        freed = 0.0
        switched: list[tuple[int, int]] = []
        for w in [value, *sorted(self.instance.options[k].writes - {value})]:
            if self.needs.get(w) and self.choice[w] != k:
                switched.append((w, self.choice[w]))
                freed += self._leave(self.choice[w])
        added = 0.0
        for w, _ in switched:
            self.choice[w] = k
        for _ in switched:
            added += self._use(k)
        return switched, freed - added

    def _restore(self, k: int, switched: list[tuple[int, int]]) -> None:
        for _ in switched:
            self._leave(k)
        for w, old in switched:
            self.choice[w] = old
        for _, old in switched:
            self._use(old)

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
