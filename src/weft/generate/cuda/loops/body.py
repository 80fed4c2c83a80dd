"""Values of nodes as statements of one thread: as `loopnest.body` goes through them, with memory accesses widened.

A thread computes several neighbouring elements one by one, as scalars. What they read is collected first (`Accesses`):
elements that lie in one aligned chunk of 4, 8 or 16 bytes, at constant distances, are then read by one wide load, and
stored likewise. That needs no knowledge of loops: it holds for strided windows and permuted tensors as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.generate.cuda.intrinsics.approx import FUNCTIONS, NARROW, is_approximated, times_inverse
from weft.generate.cuda.loops.scatter import OUT, Scatter
from weft.generate.expr import Value, c_type
from weft.generate.loopnest.body import Access, Body, Coord, ScopedValue
from weft.generate.loopnest.index import Index, Loaded, Var, index_of
from weft.generate.loopnest.memory import Buffer
from weft.generate.loopnest.nest import Nest
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

UNROLLED_TAPS = 5
"""Windows of at most so many taps per dimension have no loop."""


@dataclass(slots=True)
class Accesses:
    """Which elements of which aligned chunks a kernel reads; filled by a first pass, asked by a second."""

    max_bytes: int
    seen: dict[tuple[str, int, Index], set[int]] = field(default_factory=dict)
    frozen: bool = False
    names: dict[tuple[NodeId, Coord], str] = field(default_factory=dict)
    """Names of indices that are read at run time."""

    def note(self, buffer: Buffer, address: Index) -> None:
        """Count one read."""
        if self.frozen:
            return
        for width in self._widths(buffer, address):
            block = address.const // width * width
            key = (buffer.name, width, Index(block, address.terms))
            self.seen.setdefault(key, set()).add(address.const - block)

    def width(self, buffer: Buffer, address: Index) -> int:
        """Elements of the widest chunk of which at least half is used; 1: the element alone."""
        for width in reversed(self._widths(buffer, address)):
            block = address.const // width * width
            if len(self.seen.get((buffer.name, width, Index(block, address.terms)), ())) * 2 > width:
                return width
        return 1

    def _widths(self, buffer: Buffer, address: Index) -> list[int]:
        """Sizes of chunks that certainly lie inside the buffer, ascending."""
        size = math.prod(d.size for d in buffer.digits)
        found = []
        width = 2
        while width * buffer.dtype.itemsize <= self.max_bytes:
            if any(c % width for _, c in address.terms):
                break
            block = address + (address.const // width * width - address.const)
            if size % width == 0 or block.bounds[1] + width <= size:
                found.append(width)
            width *= 2
        return found


TileKey = tuple[str, Index, int]
"""A tile of an input: buffer, address of its corner, distance of its rows."""


@dataclass(slots=True)
class TileView:
    """A part of the inputs in shared memory, seen from an element `down * scale + lane`, `right` of two axes.

    In the text, `tv` and `tb` are `down` and `right` less the tile's corner.
    """

    down: Var
    right: Var
    scale: int
    pitch: int
    outer: frozenset[Var]
    """Loops outside of the tile: all that the address of its corner may depend on."""
    lane: int = 0
    arrays: dict[TileKey, str] = field(default_factory=dict)

    def find(self, buffer: Buffer, address: Index) -> str | None:
        """Text of the pointer to an element that goes through a tile, else None."""
        step = address.coefficient(self.down)
        if not step or step % self.scale or step == self.scale or address.coefficient(self.right) != 1:
            return None
        row = step // self.scale
        base = address + Index(-row * self.lane, ((self.down, -step), (self.right, -1)))
        if not base.variables <= self.outer or any(True for _ in base.loaded()):
            return None
        name = self.arrays.setdefault((buffer.name, base, row), "m0")
        return f"{name} + ((tv * {self.scale}u + {self.lane}u) * {self.pitch}u + tb)"


class CudaBody(Body):
    """Emits values of one thread."""

    counter = "w_signed"
    clamp = "w_clamp_index((w_i64)"
    index = "w_index"
    unrolled = UNROLLED_TAPS

    def __init__(
        self, graph: Graph, buffers: Mapping[NodeId, Buffer], nest: Nest, accesses: Accesses | None = None
    ) -> None:
        super().__init__(graph, buffers, nest)
        self.wide = accesses
        self.pending: list[tuple[Buffer, Index, Value, str]] = []
        """Stores that wait for their neighbours."""
        self.asked: set[tuple[NodeId, Coord]] = set()
        """Values that were read or computed since the set was last emptied, wherever they came from."""
        self.view: TileView | None = None
        self.arrays = 0
        self.chunks: dict[str, tuple[str, int, DType]] = {}
        """What was read at once: name of the array, then text of its address, elements, and their type in memory."""
        self.approximate = False
        """Whether the machine's own functions are exact enough."""
        self.noted: dict[NodeId, list[Coord]] | None = None
        """Where to note outermost gathers and the coordinates of their results, if anybody asks."""
        self.scatter: Scatter | None = None
        """How the result shows what is stored, if not element by element."""
        self.nested = False
        """Whether a noted gather reads another one."""
        self._inside = False
        self._before_rounding: dict[str, tuple[Value, DType]] = {}
        """Casts to 16 bits and what they round."""
        self._numbers: dict[str, int] = {}

    def value(self, node: NodeId, coord: Coord) -> ScopedValue:
        """As in the base, noting what was asked for."""
        self.asked.add((node, coord))
        return super().value(node, coord)

    def _make(self, node: NodeId, coord: Coord) -> ScopedValue:
        record = self.graph.nodes[node]
        if node in self.busy or node in self.buffers:
            return super()._make(node, coord)
        if record.prim is Prim.CAST and record.type.dtype in NARROW:
            placed = super()._make(node, coord)
            self._before_rounding[placed.value.name] = self.value(record.inputs[0], coord).value, record.type.dtype
            return placed
        approximate = self.approximate and c_type(record.type.dtype) == "w_f32" and is_approximated(self.graph, node)
        if not approximate:
            return super()._make(node, coord)
        operands = [self.value(x, coord) for x in record.inputs]
        if record.prim is Prim.DIV and (divisor := operands[1].value.constant) is not None:
            product = times_inverse(operands[0].value.name, divisor)
            return (
                self.define(record.type.dtype, False, product, operands[0].level)
                if product
                else super()._make(node, coord)
            )
        names = [x.value.name for x in operands]
        if record.prim is Prim.DIV and operands[1].level < operands[0].level:
            text = f"{names[0]} * {self._inverse(operands[1])}"
        else:
            text = FUNCTIONS[record.prim].format(*names)
        return self.define(record.type.dtype, False, text, max(x.level for x in operands))

    def _indexed(self, node: NodeId, coord: Coord) -> ScopedValue:
        if self.noted is None:
            return super()._indexed(node, coord)
        if self._inside:
            self.nested = True
            return super()._indexed(node, coord)
        self.noted.setdefault(node, []).append(coord)
        self._inside = True
        try:
            return super()._indexed(node, coord)
        finally:
            self._inside = False

    def know(self, name: str) -> None:
        """A variable of the innermost open block: what depends on it stays inside."""
        self._levels[name] = self.nest.level

    def _inverse(self, divisor: ScopedValue) -> str:
        """Name of 1 / divisor, outside of the loop that divides by it."""
        key = (-(1 << 21), (Index(0, ((Var(divisor.value.name, 2), 1),)),))
        memo = self._memo[divisor.level]
        if key not in memo:
            text = FUNCTIONS[Prim.RECIPROCAL].format(divisor.value.name)
            memo[key] = self.define(DType.F32, False, text, divisor.level)
        return memo[key].value.name

    def run_time(self, indices: NodeId, coord: Coord, size: int) -> Index:
        """As in the base, but once per coordinate, so that neighbours that read at one index share wide loads.

        Its name is that of its first occurrence in any pass, as addresses of passes are compared.
        """
        key = (-(1 << 20) - indices, (*coord, Index(size)))
        depends = frozenset(v for i in coord for v in i.variables)
        for memo in reversed(self._memo):
            if key in memo:
                return Index(0, ((Loaded(memo[key].value.name, size, lanes=False, depends=depends), 1),))
        placed = self.value(indices, coord)
        names = self.wide.names if self.wide is not None else {}
        name = names.setdefault(key, f"g{len(names)}")
        self.nest.put(f"const {self.index} {name} = {self.clamp}{placed.value.name}, {size});", placed.level)
        self._levels[name] = placed.level
        self._memo[placed.level][key] = ScopedValue(Value(name, DType.I64), placed.level)
        return Index(0, ((Loaded(name, size, lanes=False, depends=depends), 1),))

    def declare(self, coord: Coord) -> None:
        """The indices that a coordinate names and that are read at run time."""
        asked = {name: key for key, name in self.wide.names.items()} if self.wide is not None else {}
        for index in coord:
            for loaded in index.loaded():
                number, (*where, size) = asked[loaded.name]
                self.run_time(-(1 << 20) - number, tuple(where), size.const)

    def known(self, node: NodeId, coord: Coord) -> ScopedValue | None:
        """The value, if it is at hand."""
        for memo in reversed(self._memo):
            if (node, coord) in memo:
                return memo[node, coord]
        return None

    def load(self, buffer: Buffer, address: Index, dtype: DType) -> ScopedValue:
        """Read one element: alone, or out of a wide load that its neighbours share."""
        self.accesses.append(Access(address, buffer.dtype.itemsize, False))
        level = self.level_of(address)
        if not buffer.fixed:
            level = max(level, self.floor)
        if self.view is not None and (text := self.view.find(buffer, address)) is not None:
            return self.define(dtype, False, f"w_ld({text})", max(level, self.level_of(index_of(self.view.right))))
        width = 1
        if self.wide is not None:
            self.wide.note(buffer, address)
            width = self.wide.width(buffer, address) if self.wide.frozen else 1
        if width == 1:
            return self.define(dtype, False, f"w_ld({_element(buffer, address)})", level)
        block = address.const // width * width
        array = self._chunk(buffer, Index(block, address.terms), width, level)
        return ScopedValue(Value(f"{array}[{address.const - block}]", dtype), level)

    def _chunk(self, buffer: Buffer, address: Index, width: int, level: int) -> str:
        """Name of an array that holds `width` elements from `address` on."""
        key = (-1 - width, (address, Index(self._numbers.setdefault(buffer.name, len(self._numbers)))))
        for memo in reversed(self._memo):
            if key in memo:
                return memo[key].value.name
        self.arrays += 1
        name = f"q{self.arrays}"
        self.nest.put(f"{c_type(buffer.dtype)} {name}[{width}];", level)
        self.nest.put(f"w_ldv<{width}>({_element(buffer, address)}, {name});", level)
        self.chunks[name] = _element(buffer, address), width, buffer.dtype
        self._memo[level][key] = ScopedValue(Value(name, buffer.dtype), level)
        return name

    def store(self, buffer: Buffer, coord: Coord, value: Value) -> None:
        """Keep a store until `flush`."""
        address = buffer.address(coord)
        self.accesses.append(Access(address, buffer.dtype.itemsize, True))
        before, rounded = self._before_rounding.get(value.name, (value, None))
        if rounded is buffer.dtype and c_type(before.dtype) == "w_f32":  # the store rounds
            value = before
        shown = self.scatter.at(coord) if self.scatter is not None and buffer.name == OUT else ""
        self.pending.append((buffer, address, value, shown))

    def flush(self, guard: str = "") -> None:
        """Write what is pending, neighbours together; `guard`: only where this condition holds."""
        groups: dict[tuple[str, tuple[object, ...], str], dict[int, tuple[Buffer, Index, Value]]] = {}
        for buffer, address, value, shown in self.pending:
            groups.setdefault((buffer.name, address.terms, shown), {})[address.const] = buffer, address, value
        self.pending = []
        with self.block(f"if ({guard})" if guard else ""):
            for (_, _, shown), group in groups.items():
                self._store_group(group, shown)

    def _store_group(self, group: dict[int, tuple[Buffer, Index, Value]], shown: str) -> None:
        most = self.wide.max_bytes if self.wide is not None else 1
        left = dict(group)
        for const in sorted(group):
            if const not in left:
                continue
            buffer, address, value = left[const]
            width = 1
            while (
                2 * width * buffer.dtype.itemsize <= most
                and const % (2 * width) == 0
                and all(c % (2 * width) == 0 for _, c in address.terms)
                and all(const + k in left for k in range(2 * width))
            ):
                width *= 2
            if width == 1 and not shown:
                self.nest.put(f"w_st({_element(buffer, address)}, {value.name});")
            else:
                self.arrays += 1
                name = f"q{self.arrays}"
                values = ", ".join(left[const + k][2].name for k in range(width))
                self.nest.put(f"const {c_type(buffer.dtype)} {name}[{width}] = {{{values}}};")
                call, more = ("w_show", f", {shown}") if shown else ("w_stv", "")
                self.nest.put(f"{call}<{width}>({_element(buffer, address)}, {name}{more});")
            for k in range(width):
                del left[const + k]


def _element(buffer: Buffer, address: Index) -> str:
    """Text of a pointer to one element. Indices are unsigned: only a sum that is never negative may stand alone."""
    if not address.terms:
        return f"{buffer.name} + {address.const}"
    varying = Index(0, address.terms)
    if varying.bounds[0] < 0:
        return f"{buffer.name} + ({address.text()})"
    text = f"{buffer.name} + ({varying.text()})"
    sign = "-" if address.const < 0 else "+"
    return f"{text} {sign} {abs(address.const)}" if address.const else text
