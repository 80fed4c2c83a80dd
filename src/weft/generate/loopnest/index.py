"""Index arithmetic: integer expressions over loop variables, kept in a form where divisions cancel.

An `Index` is a constant plus a sum of coefficient x term. A term is a loop variable, or a quotient, remainder, clamp or
reflection of another index, or a value that the kernel loads. Every term knows its range, so `(i*8 + j) // 8` is `i`
when j < 8: chains of reshape, transpose, slice and broadcast mostly come out affine, with no division left.

Emitters ask for the same few expressions again and again, in every lane and every form of a kernel. So equal ones are
mostly one object (`_shared`), which remembers its hash, its range and what arithmetic on it gave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import final

_MOST_SHARED = 1 << 15
"""Objects of a kind that are remembered; then the memory starts anew. Equality does not depend on it."""


@final
class Var:
    """A loop variable that counts 0 .. size-1."""

    __slots__ = ("_hash", "_one", "name", "size")
    __match_args__ = ("name", "size")

    name: str
    size: int

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._hash = hash((name, size))
        self._one: Index | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Var) and self.name == other.name and self.size == other.size

    def __repr__(self) -> str:
        return f"Var(name={self.name!r}, size={self.size!r})"

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value."""
        return 0, max(self.size - 1, 0)


@final
class Loaded:
    """An integer that the kernel computes at run time, already forced into its bounds."""

    __slots__ = ("_hash", "depends", "lanes", "name", "size")
    __match_args__ = ("name", "size", "lanes", "depends")

    name: str
    """A C variable, or an array with one entry per lane."""
    size: int
    lanes: bool
    depends: frozenset[Var]

    def __init__(self, name: str, size: int, lanes: bool, depends: frozenset[Var]) -> None:
        self.name, self.size, self.lanes, self.depends = name, size, lanes, depends
        self._hash = hash((name, size, lanes, depends))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Loaded)
            and self._hash == other._hash
            and (self.name, self.size, self.lanes, self.depends) == (other.name, other.size, other.lanes, other.depends)
        )

    def __repr__(self) -> str:
        return f"Loaded(name={self.name!r}, size={self.size!r}, lanes={self.lanes!r}, depends={self.depends!r})"

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value."""
        return 0, max(self.size - 1, 0)


@final
class Part:
    """A function of an index.

    `quotient` or `remainder` by `k` (floor; never of a negative number), `clamp` or `reflect` into [0, k), or `known`:
    the value itself, which the surrounding loop keeps in [0, k).
    """

    __slots__ = ("_hash", "_text", "bounds", "k", "kind", "of")
    __match_args__ = ("kind", "of", "k")

    kind: str
    of: Index
    k: int
    bounds: tuple[int, int]
    """Least and greatest value."""

    def __init__(self, kind: str, of: Index, k: int) -> None:
        self.kind, self.of, self.k = kind, of, k
        self._hash = hash((kind, of, k))
        self._text = ""
        lo, hi = of.bounds
        if kind == "quotient":
            self.bounds = lo // k, hi // k
        elif kind in ("clamp", "known"):
            self.bounds = max(lo, 0), max(min(hi, k - 1), 0)
        else:
            self.bounds = 0, k - 1

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Part)
            and self._hash == other._hash
            and self.kind == other.kind
            and self.k == other.k
            and self.of == other.of
        )

    def __repr__(self) -> str:
        if not self._text:
            self._text = f"Part(kind={self.kind!r}, of={self.of!r}, k={self.k!r})"
        return self._text


Term = Var | Loaded | Part


@final
class Index:
    """const + sum of coefficient * term; terms are unique and in a fixed order."""

    __slots__ = ("_bounds", "_hash", "_memo", "_normal", "_repr", "_text", "_variables", "const", "terms")
    __match_args__ = ("const", "terms")

    const: int
    terms: tuple[tuple[Term, int], ...]

    def __init__(self, const: int = 0, terms: tuple[tuple[Term, int], ...] = ()) -> None:
        self.const, self.terms = const, terms
        self._hash = hash((const, terms))
        self._bounds: tuple[int, int] | None = None
        self._variables: frozenset[Var] | None = None
        self._memo: dict[Index | int, Index] = {}
        """Sums by the other index, remainders by k, quotients by -k."""
        self._normal = not terms or (len(terms) == 1 and terms[0][1] != 0)
        """Whether it is certain that adding zero leaves it as it is."""
        self._repr = self._text = ""

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Index)
            and self._hash == other._hash
            and self.const == other.const
            and self.terms == other.terms
        )

    def __repr__(self) -> str:
        if not self._repr:
            self._repr = f"Index(const={self.const!r}, terms={self.terms!r})"
        return self._repr

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest value that the ranges of the terms allow."""
        if self._bounds is None:
            lo = hi = self.const
            for term, c in self.terms:
                a, b = term.bounds
                if c > 0:
                    lo += a * c
                    hi += b * c
                else:
                    lo += b * c
                    hi += a * c
            self._bounds = lo, hi
        return self._bounds

    @property
    def variables(self) -> frozenset[Var]:
        """Loop variables on which the value depends."""
        if self._variables is None:
            found: set[Var] = set()
            for term, _ in self.terms:
                match term:
                    case Var():
                        found.add(term)
                    case Loaded():
                        found |= term.depends
                    case Part():
                        found |= term.of.variables
            self._variables = frozenset(found)
        return self._variables

    def loaded(self) -> Iterable[Loaded]:
        """All run-time values inside."""
        for term, _ in self.terms:
            if isinstance(term, Loaded):
                yield term
            elif isinstance(term, Part):
                yield from term.of.loaded()

    def coefficient(self, var: Var) -> int | None:
        """Coefficient of a variable; None if it (also) occurs inside another term."""
        if var not in self.variables:
            return 0
        found = 0
        for term, c in self.terms:
            if isinstance(term, Var):
                if term == var:
                    found = c
            elif var in (term.of.variables if isinstance(term, Part) else term.depends):
                return None
        return found

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return _shared(self.const + other, self.terms, self._normal) if other else self
        if not other.terms and self._normal:
            return _shared(self.const + other.const, self.terms, True) if other.const else self
        if not self.terms and other._normal:
            return _shared(self.const + other.const, other.terms, True) if self.const else other
        found = self._memo.get(other)
        if found is None:
            merged = dict(self.terms)
            for term, c in other.terms:
                merged[term] = merged.get(term, 0) + c
            found = self._memo[other] = _index(self.const + other.const, merged)
        return found

    def __mul__(self, k: int) -> Index:
        if k == 0:
            return ZERO
        if k == 1:
            return self
        return _shared(self.const * k, tuple([(t, c * k) for t, c in self.terms]), self._normal)

    def __floordiv__(self, k: int) -> Index:
        """Quotient of a non-negative index."""
        if k == 1:
            return self
        found = self._memo.get(-k)
        if found is None:
            found = self._memo[-k] = self._quotient(k)
        return found

    def _quotient(self, k: int) -> Index:
        whole, rest = self._split(k)
        lo, hi = rest.bounds
        if lo // k == hi // k:
            return whole + lo // k
        rest, k, _ = _common(rest, k)
        return whole + Index(0, ((Part("quotient", rest, k), 1),))

    def __mod__(self, k: int) -> Index:
        """Remainder of a non-negative index."""
        if k == 1:
            return ZERO
        found = self._memo.get(k)
        if found is None:
            found = self._memo[k] = self._remainder(k)
        return found

    def _remainder(self, k: int) -> Index:
        _, rest = self._split(k)
        lo, hi = rest.bounds
        if lo // k == hi // k:
            return rest + -(lo // k) * k
        common, inner, left = _common(rest, k)
        return Index(left, ((Part("remainder", common, inner), k // inner),))

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
        linear = self._normal and not any(isinstance(t, Part) for t, _ in self.terms)
        if linear and values.keys().isdisjoint(self.variables):
            return self
        total = Index(self.const)
        for term, c in self.terms:
            match term:
                case Var():
                    total = total + (values[term] if term in values else _of(term)) * c
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
        if lane is None and self._text:
            return self._text
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
        text = " + ".join(parts).replace("+ -", "- ")
        if lane is None:
            self._text = text
        return text


def _common(index: Index, k: int) -> tuple[Index, int, int]:
    """(x, k / m, r) with index = m x + r, r < m: then index / k = x / (k / m), index % k = m (x % (k / m)) + r.

    So neighbours that a thread has together divide the same number.
    """
    m = math.gcd(k, *(c for _, c in index.terms))
    left = index.const % m
    return _shared((index.const - left) // m, tuple((t, c // m) for t, c in index.terms), index._normal), k // m, left


ZERO = Index()
_known: dict[tuple[int, tuple[tuple[Term, int], ...]], Index] = {}


def _shared(const: int, terms: tuple[tuple[Term, int], ...], normal: bool) -> Index:
    """An index with this content, the same one as last time if that is remembered."""
    key = (const, terms)
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_SHARED:
            _known.clear()
        found = _known[key] = Index(const, terms)
    if normal:
        found._normal = True
    return found


def _of(var: Var) -> Index:
    """A variable as an index."""
    if var._one is None:
        var._one = _shared(0, ((var, 1),), True)
    return var._one


def _index(const: int, terms: dict[Term, int]) -> Index:
    items = [(t, c) for t, c in terms.items() if c]
    # (x / k) * k + x % k is x again: what a merged loop variable leaves behind
    for term, c in items:
        if isinstance(term, Part) and term.kind == "remainder":
            twin = Part("quotient", term.of, term.k)
            if terms.get(twin) == c * term.k:
                left = tuple((t, n) for t, n in items if t != term and t != twin)
                back = Index(const, left) + term.of * c
                return _index(back.const, dict(back.terms))
    if len(items) > 1:
        items.sort(key=_first)
    return _shared(const, tuple(items), True)


def _first(item: tuple[Term, int]) -> str:
    return repr(item[0])


def index_of(var: Var) -> Index:
    """The value of a loop variable; 0 for a loop of one turn."""
    return ZERO if var.size <= 1 else _of(var)


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
    if var not in index.variables:
        return 0
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
