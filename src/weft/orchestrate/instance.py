"""What is chosen from and what is wanted, on bare numbers; running a choice symbolically.

Values are small integers; a value in two formats is two values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.errors import InvalidGraphError


@dataclass(frozen=True, slots=True)
class Option:
    """One priced kernel."""

    reads: frozenset[int]
    writes: frozenset[int]
    cost: float
    """Microseconds."""
    computes: frozenset[int] = frozenset()
    """Bases of values computed inside, for the cover cuts; may be empty."""
    launches: int = 1
    conversion: bool = False
    """Reads one value and writes the same in another format."""
    workspace: int = 0
    """Bytes that it needs while it runs."""


@dataclass(frozen=True, slots=True)
class Way:
    """One of several ways to compute a base, and what every plan computes that goes this way."""

    base: int
    own: int
    """Base that this way alone computes."""
    needs: frozenset[int]
    """Bases, in the sense of `Option.computes`. Fewer are right as well, only slower."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What is to be produced, and the kernels that may."""

    options: tuple[Option, ...]
    given: frozenset[int]
    """Values that stand in memory from the start."""
    results: frozenset[int]
    unavoidable: frozenset[int] = frozenset()
    """Bases that every plan computes; an empty set is always right, only slower."""
    ways: tuple[Way, ...] = ()
    """How bases with several primitives are computed; all ways of a base, or none."""
    rank: tuple[int, ...] = ()
    """Per value a topological position; empty: the value itself."""
    launch_us: float = 0.0
    """λ: cost per launch that is not inside `Option.cost`."""
    nbytes: tuple[int, ...] = ()
    """Per value its bytes; needed with a limit only."""
    memory_limit: int = 0
    """Bytes that what a plan writes may take at once; 0: no limit."""

    def price(self, index: int) -> float:
        """Cost of an option with its launches."""
        return self.options[index].cost + self.launch_us * self.options[index].launches

    def rank_of(self, value: int) -> int:
        """Topological position of a value."""
        return self.rank[value] if self.rank else value


def execute(instance: Instance, chosen: Iterable[int]) -> tuple[tuple[int, ...], frozenset[int]]:
    """Run a choice symbolically, lowest rank first: the order, and what stays out of reach.

    The second part is empty iff every chosen kernel ran and every result exists. Otherwise it holds the unavailable
    values that stuck kernels read or that are results.
    """
    return _run(instance, sorted(set(chosen), key=lambda k: _position(instance, k)))


def _run(instance: Instance, waiting: Sequence[int]) -> tuple[tuple[int, ...], frozenset[int]]:
    """As `execute`, of options by their positions."""
    have = set(instance.given)
    order: list[int] = []
    progress = True
    while waiting and progress:
        progress = False
        stuck = []
        for k in waiting:
            if instance.options[k].reads <= have:
                have |= instance.options[k].writes
                order.append(k)
                progress = True
            else:
                stuck.append(k)
        waiting = stuck
    missing = {v for k in waiting for v in instance.options[k].reads if v not in have}
    missing |= {g for g in instance.results if g not in have}
    return tuple(order), frozenset(missing)


def waiting_of(instance: Instance, kept: Iterable[int]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """How many values each option waits for, those that are given left out; and the options that wait for a value."""
    missing: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for k in kept:
        needed = instance.options[k].reads - instance.given
        missing[k] = len(needed)
        for v in needed:
            readers.setdefault(v, []).append(k)
    return missing, readers


def out_of_reach(instance: Instance) -> tuple[int, ...]:
    """Why results cannot be had: of the values that they hang on, lowest rank first, those that no kernel writes.

    What a kernel would write whose own operands are missing is none of them, nor what is converted from that. Empty:
    every result can be had.
    """
    have, waiting, progress = set(instance.given), list(instance.options), True
    while progress:
        ready = [o for o in waiting if o.reads <= have]
        waiting = [o for o in waiting if not o.reads <= have]
        progress = not all(o.writes <= have for o in ready)
        have |= {v for o in ready for v in o.writes}
    writers: dict[int, list[Option]] = {}
    for option in waiting:
        for v in option.writes - have:
            writers.setdefault(v, []).append(option)
    lost = instance.results - have
    seen, stack = set(lost), list(lost)
    while stack:
        missing = {v for o in writers.get(stack.pop(), ()) for v in o.reads if v not in have} - seen
        seen |= missing
        stack += missing
    written = {v for v in seen if any(not o.conversion for o in writers.get(v, ()))}
    first = {v for v in seen - written if not any(o.reads & written for o in writers.get(v, ()))}
    return tuple(sorted(first or lost, key=lambda v: (instance.rank_of(v), v)))


def _position(instance: Instance, k: int) -> tuple[int, bool, int]:
    option = instance.options[k]
    return (max(map(instance.rank_of, option.writes), default=0), option.conversion, k)


def trim(instance: Instance, chosen: Iterable[int]) -> tuple[int, ...]:
    """Drop kernels that a plan does not need, dearest first; the rest in execution order.

    Raises:
        InvalidGraphError: the plan cannot run.
    """
    kept = set(chosen)
    options = instance.options
    in_order = sorted(kept, key=lambda k: _position(instance, k))
    readers = Counter(v for k in kept for v in options[k].reads)
    readers.update(instance.results)
    writers = Counter(v for k in kept for v in options[k].writes)
    writers.update(instance.given)
    for k in sorted(kept, key=lambda k: (-instance.price(k), k)):
        option = options[k]
        # only if all it writes is unread or also written elsewhere; what is written elsewhere may hang on it
        if any(readers[v] and writers[v] <= 1 for v in option.writes):
            continue
        rest = [q for q in in_order if q != k]
        if not any(readers[v] for v in option.writes) or not _run(instance, rest)[1]:
            kept.remove(k)
            in_order = rest
            readers.subtract(option.reads)
            writers.subtract(option.writes)
    order, missing = _run(instance, in_order)
    if missing:
        raise InvalidGraphError(problem=f"a plan cannot run: values {sorted(missing)} are never written")
    return order
