"""Index arithmetic: integer expressions over loop variables, kept in a form where divisions cancel.

An `Index` is a constant plus a sum of coefficient x term. A term is a loop variable, or a quotient, remainder, clamp or
reflection of another index, or a value that the kernel loads. Every term knows its range, so `(i*8 + j) // 8` is `i`
when j < 8: chains of reshape, transpose, slice and broadcast mostly come out affine, with no division left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Var:
    """A loop variable that counts 0 .. size-1."""

    name: str
    size: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value."""
        return 0, max(self.size - 1, 0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An integer that the kernel computes at run time, already forced into its bounds."""

    name: str
    """A C variable, or an array with one entry per lane."""
    size: int
    lanes: bool
    depends: frozenset[Var]

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value."""
        return 0, max(self.size - 1, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """A function of an index.

    `quotient` or `remainder` by `k` (floor; never of a negative number), `clamp` or `reflect` into [0, k), or `known`:
    the value itself, which the surrounding loop keeps in [0, k).
    """

    kind: str
    of: Index
    k: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value."""
        lo, hi = self.of.bounds
        if self.kind == "quotient":
            return lo // self.k, hi // self.k
        if self.kind in ("clamp", "known"):
            return max(lo, 0), max(min(hi, self.k - 1), 0)
        return 0, self.k - 1


Term = Var | Loaded | Part


@dataclass(frozen=True, slots=True)
class Index:
    """const + sum of coefficient * term; terms are unique and in a fixed order."""

    const: int = 0
    terms: tuple[tuple[Term, int], ...] = ()

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value that the ranges of the terms allow."""
        lo = hi = self.const
        for term, c in self.terms:
            a, b = term.bounds
            lo += min(a * c, b * c)
            hi += max(a * c, b * c)
        return lo, hi

    @property
    def variables(self) -> frozenset[Var]:
        """Loop variables on which the value depends."""
        found: set[Var] = set()
        for term, _ in self.terms:
            match term:
                case Var():
                    found.add(term)
                case Loaded():
                    found |= term.depends
                case Part():
                    found |= term.of.variables
        return frozenset(found)

    def loaded(self) -> Iterable[Loaded]:
        """All run-time values inside."""
        for term, _ in self.terms:
            if isinstance(term, Loaded):
                yield term
            elif isinstance(term, Part):
                yield from term.of.loaded()

    def coefficient(self, var: Var) -> int | None:
        """Coefficient of a variable; None if it (also) occurs inside another term."""
        found = 0
        for term, c in self.terms:
            if term == var:
                found = c
            elif (isinstance(term, Part) and var in term.of.variables) or (
                isinstance(term, Loaded) and var in term.depends
            ):
                return None
        return found

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.const + other, self.terms)
        merged = dict(self.terms)
        for term, c in other.terms:
            merged[term] = merged.get(term, 0) + c
        return _index(self.const + other.const, merged)

    def __mul__(self, k: int) -> Index:
        if k == 0:
            return Index()
        return Index(self.const * k, tuple((t, c * k) for t, c in self.terms))

    def __floordiv__(self, k: int) -> Index:
        """Quotient of a non-negative index."""
        if k == 1:
            return self
        whole, rest = self._split(k)
        lo, hi = rest.bounds
        if lo // k == hi // k:
            return whole + lo // k
        return whole + Index(0, ((Part("quotient", rest, k), 1),))

    def __mod__(self, k: int) -> Index:
        """Remainder of a non-negative index."""
        if k == 1:
            return Index()
        _, rest = self._split(k)
        lo, hi = rest.bounds
        if lo // k == hi // k:
            return rest + -(lo // k) * k
        return Index(0, ((Part("remainder", rest, k), 1),))

    def _split(self, k: int) -> tuple[Index, Index]:
        """(q, r) with self = q*k + r, where r >= 0 and as small as is plain to see."""
        whole, rest = {}, {}
        for term, c in self.terms:
            if c % k == 0:
                whole[term] = c // k
            else:
                rest[term] = c
        q, r = _index(0, whole), _index(self.const, rest)
        shift = r.bounds[0] // k  # keeps what is divided non-negative: C truncates where Python floors
        return q + shift, r + -shift * k

    def forced(self, kind: str, k: int) -> Index:
        """Clamped or reflected into [0, k); the index itself where its range is inside already."""
        lo, hi = self.bounds
        if lo >= 0 and hi < k:
            return self
        if kind == "reflect":
            if hi <= 0:
                return self * -1
            if lo >= k - 1:
                return self * -1 + 2 * (k - 1)
        if kind == "clamp":
            if hi <= 0:
                return Index()
            if lo >= k - 1:
                return Index(k - 1)
        return Index(0, ((Part(kind, self, k), 1),))

    def substitute(self, values: Mapping[Var, Index]) -> Index:
        """The same with variables replaced."""
        total = Index(self.const)
        for term, c in self.terms:
            match term:
                case Var():
                    total = total + values.get(term, Index(0, ((term, 1),))) * c
                case Loaded():
                    total = total + Index(0, ((term, c),))
                case Part(kind, of, k):
                    inner = of.substitute(values)
                    if kind == "quotient":
                        total = total + (inner // k) * c
                    elif kind == "remainder":
                        total = total + (inner % k) * c
                    else:
                        total = total + inner.forced(kind, k) * c
        return total

    def text(self, lane: Var | None = None) -> str:
        """C text; with `lane`, that variable is read as `(name + l)` and run-time values per lane as `name[l]`."""
        parts = []
        for term, c in self.terms:
            t = ""
            match term:
                case Var(name, _):
                    t = f"({name} + l)" if term == lane else name
                case Loaded(name, _, lanes, _):
                    t = f"{name}[l]" if lanes and lane is not None else name
                case Part(kind, of, k):
                    inner = of.text(lane)
                    if kind == "quotient":
                        t = f"(({inner}) / {k})"
                    elif kind == "remainder":
                        t = f"(({inner}) % {k})"
                    elif kind == "known":
                        t = f"({inner})"
                    else:
                        t = f"w_{kind}({inner}, {k})"
            parts.append(t if c == 1 else f"{t} * {c}")
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts).replace("+ -", "- ")


def _key(term: Term) -> str:
    return repr(term)


def _index(const: int, terms: dict[Term, int]) -> Index:
    terms = {t: c for t, c in terms.items() if c}
    # (x / k) * k + x % k is x again: what a merged loop variable leaves behind
    for term in list(terms):
        if isinstance(term, Part) and term.kind == "remainder" and term in terms:
            twin = Part("quotient", term.of, term.k)
            c = terms[term]
            if terms.get(twin) == c * term.k:
                del terms[term], terms[twin]
                back = Index(const, tuple(terms.items())) + term.of * c
                return _index(back.const, dict(back.terms))
    return Index(const, tuple(sorted(terms.items(), key=lambda item: _key(item[0]))))


def index_of(var: Var) -> Index:
    """The value of a loop variable; 0 for a loop of one turn."""
    return Index() if var.size <= 1 else Index(0, ((var, 1),))


def flatten(index: Iterable[Index], shape: Iterable[int]) -> Index:
    """Row-major position of an index vector."""
    total = Index()
    for i, n in zip(index, shape, strict=True):
        total = total * n + i
    return total


def unflatten(position: Index, shape: tuple[int, ...]) -> tuple[Index, ...]:
    """Index vector of a row-major position (0 <= position < size)."""
    out: list[Index] = []
    for n in reversed(shape):
        if n <= 1:
            out.append(Index())
            continue
        out.append(position % n)
        position = position // n
    return tuple(reversed(out))


def inner_coefficient(index: Index, var: Var) -> int | None:
    """Coefficient of a variable away from edges, where clamps and reflections do nothing."""
    total = 0
    for term, c in index.terms:
        if isinstance(term, Part) and term.kind not in ("quotient", "remainder"):
            inner = inner_coefficient(term.of, var)
            if inner is None:
                return None
            total += c * inner
            continue
        alone = Index(0, ((term, 1),)).coefficient(var)
        if alone is None:
            return None
        total += c * alone
    return total
