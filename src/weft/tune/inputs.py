"""The inputs that a kernel must survive before it is timed. Everything follows from the problem and a seed.

Three sets, each run under two poisons (the last is also the set that is timed), and a fourth where it means anything:

* INTEGERS: whole numbers in {-2..2}. Where sums stay exact the result must be bit-equal, so that a lost or doubled
  slice of a reduction shows at zero tolerance. In a chain of products the second operands hold ones only, and few of
  them: else the values double and double until 16-bit floats overflow, where rounding decides which are infinite.
* ADVERSARIAL: normal values with large, tiny, denormal, signed zero, NaN and infinite ones planted at random and
  around multiples of 16 (tile edges). Only the NaN / +Inf / -Inf / finite classes are compared there, and whole
  values where no rounding is involved.
* ROWS: the whole numbers, but where a problem shifts exponentials by the maximum of their row (softmax, attention)
  these rows lie so far apart that what is shifted by anything else overflows or vanishes (`tune.rows`).
* NORMAL: zero-mean, because positive data hide a loss of precision. The precision gate and the timing use it.
  If most of the result is not finite on it (a logarithm or root of negative values), the inputs that lead there
  are made positive, else all of them are kept in (0.1, 0.9); the oracle decides, not the kernel.

Roles are read off the graph: an integer that reaches an index operand stays in range, a divisor is not zero, a
shift count is below the width. The second operand of a product is scaled by 1/sqrt(K), so that what follows it
(exponentials, say) sees values of order one, as in a real network. Exponentials that are the factors of a recurrence
stay near one over all of its steps, else every value overflows or nothing is carried on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch

from weft.generate.library.execute import TORCH_DTYPE
from weft.ir import attrs as a
from weft.ir.graph import Graph
from weft.ir.opaque import embedding_table
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType, TensorType
from weft.tune.rows import move_rows
from weft.tune.shifts import shifts

SETS_VERSION = 3
"""Part of the key of every verdict."""


class InputSet(Enum):
    """The closed set of kinds; see the module."""

    INTEGERS = "integers"
    ADVERSARIAL = "adversarial"
    ROWS = "rows far apart"
    NORMAL = "normal"


class Domain(Enum):
    """How NORMAL draws floats; tried in this order."""

    ZERO_MEAN = "zero-mean"
    POSITIVE_ROOTS = "positive where a root or logarithm follows"
    UNIT = "in (0.1, 0.9)"
    ABOVE_ONE = "in (1.1, 2)"


@dataclass(slots=True)
class Role:
    """What an input's values must obey."""

    index_below: int = 0
    """Values stay in [0, index_below); 0: no index."""
    divisor: bool = False
    shift_below: int = 0
    root: bool = False
    """Reaches a root or a logarithm without passing through a reduction."""
    scale: float = 1.0
    decay: float = 1.0
    """Scale of what an exponential makes a factor of a recurrence of, in every set."""
    thinned: int = 0
    """Terms of the sums in a chain of products, of which few may count; 0: no such."""


CHAIN = 3
"""Products that follow one another from here on make a chain."""
FEW = 2.0
"""Terms that count, on average, in a sum of a chain."""

LEAST_SCALE_F8 = 2.0**-4
"""8-bit floats have no values much below their least normal ones."""

_DOMAIN_LIMITED = frozenset({Prim.SQRT, Prim.RSQRT, Prim.LOG, Prim.LOG1P, Prim.POW, Prim.ACOSH})


def roles(graph: Graph) -> tuple[Role, ...]:
    """One role per input, found by walking back from the operands that need something."""
    found = {i: Role() for i in graph.inputs}
    chained = _products_in_a_row(graph) >= CHAIN
    for node in graph.nodes:
        if node.prim in (Prim.GATHER, Prim.TAKE_ALONG) and isinstance(node.attrs, a.GatherAttrs):
            size = graph.type_of(node.inputs[0]).shape[node.attrs.axis]
            for i in _sources(graph, node.inputs[1], found, through_arithmetic=True):
                if graph.type_of(i).dtype.is_integer:
                    old = found[i].index_below
                    found[i].index_below = min(old, size) if old else max(size, 1)
        elif node.prim in (Prim.DIV, Prim.MOD, Prim.FMOD) and node.type.dtype.is_integer:
            for i in _sources(graph, node.inputs[1], found, through_arithmetic=False):
                found[i].divisor = True
        elif node.prim in (Prim.SHL, Prim.SHR):
            for i in _sources(graph, node.inputs[1], found, through_arithmetic=False):
                found[i].shift_below = node.type.dtype.itemsize * 8
        elif node.prim is Prim.OPAQUE:
            # nothing is known of a framework's operator; 0 and 1 are valid as index, count or flag nearly everywhere
            table = embedding_table(node.attrs)
            for operand in node.inputs:
                for i in _sources(graph, operand, found, through_arithmetic=False):
                    if graph.type_of(i).dtype.is_integer:
                        found[i].index_below = 2 if table is None else max(table.rows, 1)
        elif node.prim is Prim.SCAN and len(node.inputs) == 2 and isinstance(node.attrs, a.ScanAttrs):
            for i in _decaying(graph, node.inputs[0], node.inputs[1], found):
                found[i].decay = 1.0 / max(node.type.shape[node.attrs.axis], 1)
        elif node.prim in _DOMAIN_LIMITED:
            for i in _sources(graph, node.inputs[0], found, through_arithmetic=True):
                found[i].root = True
        elif node.prim in (Prim.MATMUL, Prim.CONV):
            k = _contracted(graph, node.inputs, node.attrs)
            for i in _sources(graph, node.inputs[1], found, through_arithmetic=False):
                found[i].scale = 1.0 / math.sqrt(max(k, 1))
                found[i].thinned = k if chained else 0
    return tuple(found[i] for i in graph.inputs)


def _decaying(graph: Graph, factor: int, term: int, inputs: dict[int, Role]) -> list[int]:
    """Inputs of the exponentials among a recurrence's factors; those of its terms only where there are no others."""
    seen, stack = {factor}, [factor]
    found: set[int] = set()
    while stack:
        n = graph.nodes[stack.pop()]
        if n.prim is Prim.EXP:
            found.update(_sources(graph, n.inputs[0], inputs, through_arithmetic=True))
        elif CATEGORY[n.prim] not in _STOP:
            stack += (fresh := set(n.inputs) - seen)
            seen |= fresh
    floats = [i for i in sorted(found) if graph.type_of(i).dtype.is_float]
    of_terms = set(_sources(graph, term, inputs, through_arithmetic=True))
    return [i for i in floats if i not in of_terms] or floats


def _products_in_a_row(graph: Graph) -> int:
    """The most products on a way from an input to an output."""
    found: list[int] = []
    for node in graph.nodes:
        before = max((found[j] for j in node.inputs), default=0)
        found.append(before + (node.prim in (Prim.MATMUL, Prim.CONV)))
    return max(found, default=0)


def _contracted(graph: Graph, operands: tuple[int, ...], attrs: a.Attrs) -> int:
    if isinstance(attrs, a.ConvAttrs):
        w = graph.type_of(operands[1]).shape
        return math.prod(w[2:]) * (w[0] // attrs.groups if attrs.transposed else w[1])
    return graph.type_of(operands[0]).shape[-1]


_STOP = frozenset({Category.LINEAR, Category.OPAQUE})


def _sources(graph: Graph, node: int, inputs: dict[int, Role], *, through_arithmetic: bool) -> list[int]:
    """Inputs that a value comes from; through data movement alone, or through elementwise arithmetic too."""
    seen, stack, out = {node}, [node], []
    while stack:
        i = stack.pop()
        if i in inputs:
            out.append(i)
        n = graph.nodes[i]
        moves = CATEGORY[n.prim] in (Category.BROADCAST, Category.VIEW, Category.LAYOUT) or n.prim is Prim.CAST
        if CATEGORY[n.prim] in _STOP or not (moves or through_arithmetic):
            continue  # what lies behind a product, or behind arithmetic, is not this value
        for j in n.inputs[:1] if n.prim in (Prim.GATHER, Prim.TAKE_ALONG) else n.inputs:
            if j not in seen:
                seen.add(j)
                stack.append(j)
    return out


def draw(
    graph: Graph, kind: InputSet, domain: Domain, *, seed: int, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """One tensor per input, row-major, in the graph's own element types. The same arguments give the same bits.

    A GPU draws its own: other values than the CPU's, equally distributed. ROWS before anything is moved: `draw_rows`.
    """
    found = roles(graph)
    # the dot-product instructions of 16-bit floats flush denormals (x86: vdpbf16ps), so Inf * denormal is not asked
    products = any(n.prim in (Prim.MATMUL, Prim.CONV) and n.type.dtype.itemsize == 2 for n in graph.nodes)
    denormals = not products
    out = []
    for k, (node, role) in enumerate(zip(graph.inputs, found, strict=True)):
        generator = torch.Generator(device).manual_seed((seed * 1_000_003 + k * 7919 + _SALT[kind]) & (2**63 - 1))
        out.append(_tensor(graph.type_of(node), role, kind, domain, generator, denormals=denormals))
    return out


def draw_rows(
    graph: Graph, domain: Domain, *, seed: int, device: torch.device | str = "cpu"
) -> list[torch.Tensor] | None:
    """The set ROWS. None: no exponentials are shifted, no input moves their rows, or inputs must stay in a range."""
    if domain is not Domain.ZERO_MEAN or not shifts(graph):
        return None
    inputs = draw(graph, InputSet.ROWS, domain, seed=seed, device=device)
    return inputs if move_rows(graph, inputs, torch.Generator(device).manual_seed(seed)) else None


_SALT = {InputSet.INTEGERS: 11, InputSet.ADVERSARIAL: 23, InputSet.ROWS: 29, InputSet.NORMAL: 37}
_WHOLE = frozenset({InputSet.INTEGERS, InputSet.ROWS})


PERIOD = 262_147
"""On a CPU so many elements are drawn, and repeated in larger tensors: drawing is ten times as slow as copying. A prime
number, so that no step from element to element, row to row or tile to tile leads to equal values everywhere."""


def _tensor(
    t: TensorType, role: Role, kind: InputSet, domain: Domain, g: torch.Generator, *, denormals: bool
) -> torch.Tensor:
    size = math.prod(t.shape)
    shape = (PERIOD,) if g.device.type == "cpu" and size > PERIOD else t.shape
    values = _repeated(_drawn(t.dtype, shape, role, kind, domain, g), t.shape)
    if kind is InputSet.ADVERSARIAL and t.dtype.is_float:
        _plant(values, t.dtype, g, denormals=denormals)
    return values.to(TORCH_DTYPE[t.dtype])


def _repeated(drawn: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Row-major, the elements over and over."""
    if drawn.shape == shape:
        return drawn
    size, period = math.prod(shape), drawn.numel()
    out = torch.empty(size, dtype=drawn.dtype)
    whole = size // period * period
    out[:whole].view(-1, period).copy_(drawn)
    out[whole:].copy_(drawn[: size - whole])
    return out.view(shape)


def _drawn(
    dtype: DType, shape: tuple[int, ...], role: Role, kind: InputSet, domain: Domain, g: torch.Generator
) -> torch.Tensor:
    """Values of the set, those of floats in f32 or f64."""
    if dtype is DType.BOOL:
        return _integers(0, 2, shape, g).to(torch.bool)
    if dtype.is_integer:
        low, high = _integer_range(dtype, role, kind)
        values = _integers(low, high, shape, g)
        if role.divisor:
            values = torch.where(values == 0, torch.ones_like(values), values)
        return values.to(TORCH_DTYPE[dtype])
    if kind in _WHOLE:
        whole = _integers(-2, 3, shape, g)
        if role.root and domain is not Domain.ZERO_MEAN:
            whole = whole.abs() + 1
        if role.thinned > FEW:
            kept = torch.rand(shape, generator=g, device=g.device) < FEW / role.thinned
            whole = torch.where(kept, torch.where(whole < 0, -1, 1), 0)
        found = whole.to(TORCH_DTYPE[dtype])
    else:
        found = _floats(dtype, shape, role, domain, g)
    return found if role.decay == 1.0 else found * role.decay


def _integer_range(dtype: DType, role: Role, kind: InputSet) -> tuple[int, int]:
    if role.index_below:
        return 0, role.index_below
    if role.shift_below:
        return 0, role.shift_below
    if kind in _WHOLE:
        return (0, 5) if dtype is DType.U8 else (-2, 3)
    wide = 100 if kind is InputSet.ADVERSARIAL else 20
    return (0, wide) if dtype is DType.U8 else (-wide, wide + 1)


def _floats(dtype: DType, shape: tuple[int, ...], role: Role, domain: Domain, g: torch.Generator) -> torch.Tensor:
    held = torch.float64 if dtype is DType.F64 else torch.float32
    if domain is Domain.UNIT:
        return torch.rand(shape, generator=g, dtype=held, device=g.device) * 0.8 + 0.1
    if domain is Domain.ABOVE_ONE:
        return torch.rand(shape, generator=g, dtype=held, device=g.device) * 0.9 + 1.1
    values = _normals(shape, held, g)
    if role.root and domain is Domain.POSITIVE_ROOTS:
        return values.abs() + 0.1
    return values * (max(role.scale, LEAST_SCALE_F8) if dtype.is_float8 else role.scale)


def _normals(shape: tuple[int, ...], held: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Standard normals, the first that are drawn from a generator."""
    return _drawn_first(shape, g, _Normals(held))


def _integers(low: int, high: int, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Of [low, high), int64; the first that are drawn from a generator."""
    return _drawn_first(shape, g, _Integers(low, high))


@dataclass(frozen=True, slots=True)
class _Normals:
    held: torch.dtype

    def draw(self, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=self.held, device=g.device)


@dataclass(frozen=True, slots=True)
class _Integers:
    low: int
    high: int

    def draw(self, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
        return torch.randint(self.low, self.high, shape, generator=g, device=g.device)


def _drawn_first(shape: tuple[int, ...], g: torch.Generator, what: _Normals | _Integers) -> torch.Tensor:
    """What a generator that was just seeded gives. On a CPU a copy: large inputs of all problems have equal draws."""
    if g.device.type != "cpu":
        return what.draw(shape, g)
    values, state = _remembered(g.initial_seed(), shape, what)
    g.set_state(state)
    return values.clone()


@lru_cache(maxsize=32)
def _remembered(seed: int, shape: tuple[int, ...], what: _Normals | _Integers) -> tuple[torch.Tensor, torch.Tensor]:
    """A draw, 2 MiB at most, and the generator's state behind it."""
    g = torch.Generator().manual_seed(seed)
    return what.draw(shape, g), g.get_state()


def _plant(values: torch.Tensor, dtype: DType, g: torch.Generator, *, denormals: bool) -> None:
    """Put special values into a share of at most 1/16 of the elements, in place."""
    n = values.numel()
    if n == 0:
        return
    info = torch.finfo(TORCH_DTYPE[dtype])
    large, tiny = math.sqrt(info.max) / 16, math.sqrt(info.tiny)
    denormal = info.smallest_normal / 4 if denormals else tiny
    special = [large, -large, tiny, -tiny, denormal, -denormal, 0.0, -0.0, math.nan, math.inf, -math.inf]
    count = max(1, min(n // 16, 22)) if n > 1 else 1
    at = torch.randint(0, n, (count,), generator=g, device=g.device).cpu().tolist()
    edges = (torch.arange(0, min(n, 16 * 1024), 16) - 1).clamp(0, n - 1).tolist()
    picked = torch.randint(0, len(edges), (max(1, count // 2),), generator=g, device=g.device).cpu().tolist()
    where = [*at, *(edges[k] for k in picked), n - 1][: max(1, n // 8)]
    start = int(torch.randint(0, len(special), (1,), generator=g, device=g.device))
    planted = {position: special[(start + k) % len(special)] for k, position in enumerate(where)}
    positions = torch.tensor(list(planted)).to(values.device)
    values.view(-1)[positions] = torch.tensor(list(planted.values()), dtype=values.dtype).to(values.device)
