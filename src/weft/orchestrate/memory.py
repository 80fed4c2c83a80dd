"""What a plan needs in memory at once, and the constraints that keep it below a limit.

    (7)  L_{t,s} ≥ u_k                            every k that runs in slot s and reads t
         L_{t,s} ≥ L_{t,s+1}                      every slot s behind the first in which t may be written
         Σ_t b_t L_{t,s} + Σ_k (b_k + w_k) u_k ≤ M    every slot s, k those that run in it

L_{t,s} in [0, 1] says that t lies in memory while slot s runs; it is 1 for a result that was written before. Slots are
the ranks of what kernels write, a change of format behind the kernels of its rank. Exact for single outputs in this
order, and for others on the safe side: another order may need less.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.orchestrate.constraints import Rows
from weft.orchestrate.instance import Instance


def peak_bytes(instance: Instance, order: Sequence[int]) -> int:
    """The largest sum of values alive at one step of a plan, its workspace included; what is given does not count."""
    last: dict[int, int] = {}
    for step, k in enumerate(order):
        option = instance.options[k]
        last.update(dict.fromkeys(option.writes, step))
        last.update(dict.fromkeys(option.reads, step))
    last.update(dict.fromkeys(instance.results, len(order)))
    dying: dict[int, list[int]] = {}
    for value, step in last.items():
        dying.setdefault(step, []).append(value)
    alive: set[int] = set()
    now = peak = 0
    for step, k in enumerate(order):
        option = instance.options[k]
        now += sum(instance.nbytes[v] for v in option.writes - alive - instance.given)
        alive |= option.writes - instance.given
        peak = max(peak, now + option.workspace)
        ending = alive.intersection(dying.get(step, ()))
        now -= sum(instance.nbytes[v] for v in ending)
        alive -= ending
    return peak


def fits(instance: Instance, order: Sequence[int]) -> bool:
    """True if a plan stays within the instance's limit, or there is none."""
    return not instance.memory_limit or peak_bytes(instance, order) <= instance.memory_limit


def limit_memory(instance: Instance, kept: Sequence[int], rows: Rows, width: int) -> int:
    """Add (7) with columns from `width` on; returns the number of columns afterwards. The new ones are continuous."""
    return _Limiter(instance, kept, rows, width).run()


class _Limiter:
    def __init__(self, instance: Instance, kept: Sequence[int], rows: Rows, width: int) -> None:
        self.instance, self.kept, self.rows, self.width = instance, kept, rows, width
        options = instance.options
        keys = [(max(map(instance.rank_of, options[k].writes)), options[k].conversion) for k in kept]
        slots = {key: s for s, key in enumerate(sorted(set(keys)))}
        self.num_slots = len(slots)
        self.slot = [slots[key] for key in keys]
        """Per kept option."""
        self.birth: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for x, k in enumerate(kept):
            for v in options[k].writes - instance.given:
                self.birth[v] = min(self.slot[x], self.birth.get(v, self.num_slots))
            for v in options[k].reads - instance.given:
                self.last[v] = max(self.slot[x], self.last.get(v, -1))
        self.alive: dict[tuple[int, int], int] = {}
        """(value, slot) -> column."""

    def run(self) -> int:
        instance = self.instance
        for v, birth in sorted(self.birth.items()):
            if v not in instance.results:
                for s in range(birth + 1, self.last.get(v, birth) + 1):
                    self.alive[v, s] = self.width
                    self.width += 1
        for (v, s), column in self.alive.items():
            later = self.alive.get((v, s + 1))
            if later is not None:
                self.rows.add({column: 1.0, later: -1.0}, 0.0)
        for x, k in enumerate(self.kept):
            for v in sorted(instance.options[k].reads):
                needed = self.alive.get((v, self.slot[x]))
                if needed is not None:
                    self.rows.add({needed: 1.0, x: -1.0}, 0.0)
        self._add_limits()
        return self.width

    def _add_limits(self) -> None:
        instance, limit = self.instance, float(self.instance.memory_limit)
        used: list[dict[int, float]] = [{} for _ in range(self.num_slots)]
        room = [1.0] * self.num_slots
        for (v, s), column in self.alive.items():
            used[s][column] = -instance.nbytes[v] / limit
        for v in instance.results & self.birth.keys():
            for s in range(self.birth[v] + 1, self.num_slots):
                room[s] -= instance.nbytes[v] / limit
        for x, k in enumerate(self.kept):
            s, option = self.slot[x], instance.options[k]
            known = {v for v in option.writes & instance.results if self.birth.get(v, s) < s}
            written = sum(instance.nbytes[v] for v in option.writes - known - instance.given)
            used[s][x] = -(written + option.workspace) / limit
        for terms, bound in zip(used, room, strict=True):
            self.rows.add({c: value for c, value in terms.items() if value}, -bound)
