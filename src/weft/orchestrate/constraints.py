"""The integer program's constraints as sparse rows; `program` says what each is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.orchestrate.instance import Instance

if TYPE_CHECKING:
    from scipy import sparse


@dataclass(slots=True)
class Rows:
    """Constraints Σ a_k u_k ≥ bound, gathered sparsely."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def copy(self) -> Rows:
        """A copy that can grow by itself."""
        return Rows(list(self.rows), list(self.columns), list(self.values), list(self.bounds))

    def matrix(self, width: int) -> sparse.csr_array:
        """Coefficients, `width` columns."""
        from scipy import sparse  # here, because a plan that is recalled needs no solver

        return sparse.csr_array((self.values, (self.rows, self.columns)), shape=(len(self.bounds), width))

    def add(self, terms: dict[int, float], bound: float) -> None:
        """Σ terms ≥ bound; terms by column."""
        self.rows.extend([len(self.bounds)] * len(terms))
        self.columns.extend(terms)
        self.values.extend(terms.values())
        self.bounds.append(bound)


def build_rows(instance: Instance, kept: Sequence[int]) -> Rows:
    """(1) to (5): columns are positions in `kept`, then the instance's ways."""
    options = instance.options
    rows = Rows()
    writers: dict[int, list[int]] = {}
    genuine: dict[int, list[int]] = {}
    alone: dict[int, list[int]] = {}
    covers: dict[int, list[int]] = {}
    for x, k in enumerate(kept):
        option = options[k]
        for v in option.writes:
            writers.setdefault(v, []).append(x)
            if not option.conversion:
                genuine.setdefault(v, []).append(x)
        if len(option.writes) == 1:
            alone.setdefault(next(iter(option.writes)), []).append(x)
        for p in option.computes:
            covers.setdefault(p, []).append(x)
    for g in sorted(instance.results - instance.given):
        rows.add(dict.fromkeys(writers.get(g, ()), 1.0), 1.0)  # (1)
    joint: dict[tuple[int, int], list[int]] = {}
    for x, k in enumerate(kept):
        option = options[k]
        for j in sorted(option.reads - instance.given):
            if option.conversion:
                demand(rows, genuine.get(j, ()), [x])  # (5)
            elif len(option.writes) == 1:
                joint.setdefault((j, next(iter(option.writes))), []).append(x)
            else:
                demand(rows, writers.get(j, ()), [x])  # (2)
    for (j, _), readers in sorted(joint.items()):
        demand(rows, writers.get(j, ()), readers)  # (2')
    for _, same in sorted(alone.items()):
        if len(same) > 1:
            rows.add(dict.fromkeys(same, -1.0), -1.0)  # (3)
    for p in sorted(instance.unavoidable):
        if p in covers:
            rows.add(dict.fromkeys(covers[p], 1.0), 1.0)  # (4)
    _add_ways(instance, len(kept), covers, rows)
    return rows


def _add_ways(instance: Instance, start: int, covers: Mapping[int, Sequence[int]], rows: Rows) -> None:
    """(4'): the column `start` + i says that way i is gone; ways that need each other's bases are chained."""
    ways: dict[int, list[int]] = {}
    for x, way in enumerate(instance.ways, start):
        ways.setdefault(way.base, []).append(x)
    for base, columns in sorted(ways.items()):
        if base in instance.unavoidable:
            rows.add(dict.fromkeys(columns, 1.0), 1.0)
    for x, way in enumerate(instance.ways, start):
        for p in sorted(way.needs - instance.unavoidable):
            demand(rows, covers.get(p, ()), [x])
            if p in ways:
                demand(rows, ways[p], [x])


def demand(rows: Rows, producers: Iterable[int], readers: Iterable[int]) -> None:
    """Σ producers ≥ Σ readers, by column."""
    terms = dict.fromkeys(producers, 1.0)
    for x in readers:
        terms[x] = terms.get(x, 0.0) - 1.0
    rows.add(terms, 0.0)
