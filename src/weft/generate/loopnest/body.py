"""The value of any node at any index, on demand: where primitives become statements.

`Body.value(node, index)` walks up from what is wanted to what is in memory. Layout primitives only change the index,
elementwise ones print an expression, windows print small loops. Every value is placed in the outermost block in which
all that it depends on is known, so what a loop does not change is computed before it, and nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from weft.generate.expr import Value, c_type, elementwise, literal, splat, vector_type
from weft.generate.expr.ctype import register_kind, storage_type
from weft.generate.loopnest.index import Index, Loaded, Part, Var, flatten, index_of, unflatten
from weft.generate.loopnest.memory import Buffer, Unfused
from weft.generate.loopnest.nest import Nest
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType

Coord = tuple[Index, ...]
"""One index expression per dimension."""


@dataclass(frozen=True, slots=True)
class ScopedValue:
    """A value and the level of the block that defines it."""

    value: Value
    level: int


@dataclass(frozen=True, slots=True)
class Access:
    """One read or write that a stage makes per element, for choosing loops."""

    address: Index
    itemsize: int
    write: bool


@dataclass(frozen=True, slots=True)
class Lanes:
    """How a body is vectorised: over which variable, and whether only the first `count` lanes are alive."""

    var: Var
    count: str = ""
    """Name of a C variable; empty: all lanes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A small block in which strided reads are turned round: `inside` counts its rows, `rows` of them exist."""

    inside: Var
    rows: str
    level: int
    """Block that holds the tile's array, outside the loop of `inside`."""


TILE = 16
"""Rows of a tile."""

IDENTITY = {
    Prim.REDUCE_SUM: 0,
    Prim.WINDOW_SUM: 0,
    Prim.REDUCE_PROD: 1,
}


def identity(prim: Prim, dtype: DType) -> str:
    """Literal of the neutral element of a reduction or window."""
    if prim in IDENTITY:
        return literal(IDENTITY[prim], dtype)
    greatest = prim in (Prim.REDUCE_MIN, Prim.ARGMIN)
    if dtype.is_float:
        return literal(float("inf") if greatest else float("-inf"), dtype)
    if dtype is DType.BOOL:
        return literal(greatest, dtype)
    bits = 8 * dtype.itemsize - (dtype is not DType.U8)
    return literal(2**bits - 1 if greatest else 0 if dtype is DType.U8 else -(2**bits), dtype)


def combine(prim: Prim, dtype: DType, x: str, y: str) -> str:
    """Text of one step of a reduction or window: x op y."""
    match prim:
        case Prim.REDUCE_SUM | Prim.WINDOW_SUM:
            return f"w_plus({x}, {y})"
        case Prim.REDUCE_PROD:
            return f"w_times({x}, {y})"
        case Prim.REDUCE_MIN:
            return f"({x} & {y})" if dtype is DType.BOOL else f"w_min({x}, {y})"
        case _:
            return f"({x} | {y})" if dtype is DType.BOOL else f"w_max({x}, {y})"


class Body:
    """Emits values into a nest of blocks. One per kernel; the lanes change from loop to loop."""

    counter = "long"
    """C type of loop variables."""
    clamp = "w_clamp((long)"
    """How an index read at run time is forced into its bounds."""
    index = "long"
    """C type of an index read at run time."""
    unrolled = 0
    """Most taps of one dimension of a window that are always unrolled."""

    def __init__(self, graph: Graph, buffers: Mapping[NodeId, Buffer], nest: Nest) -> None:
        self.graph = graph
        self.buffers = buffers
        self.nest = nest
        self.lanes: Lanes | None = None
        self.busy: set[NodeId] = set()
        """Values that the open loops compute: readable only at the element at hand."""
        self.accesses: list[Access] = []
        self.conditions: list[tuple[Index, int]] = []
        """Index and size of every test `0 <= index < size` that was not decided at compile time."""
        self.joints: list[tuple[Index, int]] = []
        """Those of them that choose an operand of a join."""
        self.tile: Tile | None = None
        self.fixed: list[Index] = []
        """Indices that are used as values; loops in them cannot be merged."""
        self.floor = 0
        """Level of the loops' surroundings: a value stored by this kernel is never read further out."""
        self.count = 0
        self._serial = 0
        self._memo: list[dict[tuple[NodeId, Coord], ScopedValue]] = [{}]
        self._levels: dict[str, int] = {}

    # names and levels

    def name(self, prefix: str) -> str:
        """A fresh identifier."""
        self._serial += 1
        return f"{prefix}{self._serial}"

    def bind(self, var: Var, level: int) -> None:
        """A loop variable becomes known inside the block at `level`."""
        self._levels[var.name] = level

    @contextmanager
    def block(self, head: str) -> Iterator[int]:
        """Open a block; what is computed inside is forgotten at its end."""
        with self.nest.block(head) as level:
            self._memo.append({})
            yield level
            self._memo.pop()

    @contextmanager
    def loop(self, var: Var, lo: str = "0", hi: str = "", step: int = 1, pragma: str = "") -> Iterator[int]:
        """A counting loop that binds `var`."""
        head = f"for ({self.counter} {var.name} = {lo}; {var.name} < {hi or var.size}; {var.name} += {step})"
        if var.size == 1 and not hi:
            head = ""
        with self.block(f"{pragma}\n{head}" if pragma else head) as level:
            if head == "":
                self.nest.put(f"const {self.counter} {var.name} = 0;")
            self.bind(var, level)
            yield level

    @contextmanager
    def at(self, level: int) -> Iterator[None]:
        """Emit at an outer level for a while."""
        hidden = self._memo[level + 1 :]
        del self._memo[level + 1 :]
        with self.nest.at(level):
            yield
        self._memo += hidden

    def level_of(self, index: Index) -> int:
        """Level at which an index is known."""
        names = [v.name for v in index.variables] + [x.name for x in index.loaded()]
        return max((self._levels[n] for n in names), default=0)

    def remember(self, node: NodeId, coord: Coord, value: Value, level: int | None = None) -> None:
        """Later reads of `node` at `coord` use this value."""
        at = self.nest.level if level is None else level
        self._memo[at][node, coord] = ScopedValue(value, at)

    def define(self, dtype: DType, vector: bool, text: str, level: int, prefix: str = "e") -> ScopedValue:
        """A new constant variable at `level`."""
        name = self.name(prefix)
        value = Value(name, dtype, vector)
        self.nest.put(f"const {value.c_type} {name} = {text};", level)
        return ScopedValue(value, level)

    # memory

    def _varies(self, index: Index) -> bool:
        return self.lanes is not None and (self.lanes.var in index.variables or any(x.lanes for x in index.loaded()))

    def per_lane(self, dtype: DType, text: str, level: int) -> ScopedValue:
        """A vector made lane by lane from a text in `l`."""
        lanes = cast("Lanes", self.lanes)
        array = self.name("a")
        kind = f"w_{register_kind(dtype)}"
        self.nest.put(f"{kind} {array}[WL] = {{}};", level)
        self.nest.put(f"for (long l = 0; l < {lanes.count or 'WL'}; ++l) {array}[l] = {text};", level)
        return self.define(dtype, True, f"w_ldv({array})", level)

    def load(self, buffer: Buffer, address: Index, dtype: DType) -> ScopedValue:
        """Read one element, or one per lane."""
        self.accesses.append(Access(address, buffer.dtype.itemsize, False))
        level = self.level_of(address)
        if not buffer.fixed:
            level = max(level, self.floor)
        if not self._varies(address):
            return self.define(dtype, False, f"w_ld({buffer.name} + {address.text()})", level)
        lanes = cast("Lanes", self.lanes)
        if address.coefficient(lanes.var) == 1 and not any(x.lanes for x in address.loaded()):
            tail = f"_n({buffer.name} + {address.text()}, {lanes.count})" if lanes.count else ""
            return self.define(dtype, True, f"w_ldv{tail or f'({buffer.name} + {address.text()})'}", level)
        step = address.coefficient(lanes.var)
        if self.tile is not None and step is not None and address.coefficient(self.tile.inside) == 1:
            return self._from_tile(self.tile, buffer, address, step, dtype)
        if step in (2, -1) and not lanes.count and buffer.dtype in (DType.F32, DType.F64, DType.I32, DType.I64):
            suffix = "2" if step == 2 else "reversed"
            return self.define(dtype, True, f"w_ldv_{suffix}({buffer.name} + {address.text()})", level)
        gathered = self._gather(buffer, address, dtype)
        if gathered is not None:
            return gathered
        return self.per_lane(dtype, f"w_ld({buffer.name} + {address.text(lanes.var)})", level)

    def _gather(self, buffer: Buffer, address: Index, dtype: DType) -> ScopedValue | None:
        """Read at base + factor * (run-time index per lane); None when the address is of another form."""
        if buffer.dtype not in (DType.F32, DType.I32):
            return None
        found = [(t, c) for t, c in address.terms if isinstance(t, Loaded) and t.lanes]
        if len(found) != 1 or found[0][0].size * found[0][1] >= 2**31:
            return None
        term, factor = found[0]
        base = address + Index(0, ((term, -factor),))
        if self._varies(base):
            return None
        index = f"{term.name}_v * {factor}" if factor != 1 else f"{term.name}_v"
        level = self.level_of(address)
        return self.define(dtype, True, f"w_gather({buffer.name} + {base.text()}, {index})", level)

    def _from_tile(self, tile: Tile, buffer: Buffer, address: Index, step: int, dtype: DType) -> ScopedValue:
        """Read a row of a transposed tile, which is filled before the loop over its rows."""
        lanes = cast("Lanes", self.lanes)
        array = self.name("a")
        corner = address.substitute({tile.inside: Index()})
        kind = storage_type(buffer.dtype)
        self.nest.put(f"alignas(64) {kind} {array}[{TILE} * WL];", tile.level)
        self.nest.put(
            f"w_transpose({array}, {buffer.name} + {corner.text()}, {step}, {tile.rows}, {lanes.count or 'WL'});",
            tile.level,
        )
        level = max(self.level_of(address), tile.level + 1)
        return self.define(dtype, True, f"w_ldv({array} + {tile.inside.name} * WL)", level)

    def store(self, buffer: Buffer, coord: Coord, value: Value) -> None:
        """Write one element, or one per lane, in the innermost block."""
        address = buffer.address(coord)
        self.accesses.append(Access(address, buffer.dtype.itemsize, True))
        lanes = self.lanes
        if lanes is None or not self._varies(address):
            self.nest.put(f"w_st({buffer.name} + {address.text()}, {value.name});")
            return
        name = value.name if value.vector else splat(value.name, value.dtype)
        if address.coefficient(lanes.var) == 1:
            suffix, tail = ("_n", f", {lanes.count}") if lanes.count else ("", "")
            self.nest.put(f"w_stv{suffix}({buffer.name} + {address.text()}, {name}{tail});")
            return
        array = self.name("a")
        self.nest.put(f"w_{register_kind(value.dtype)} {array}[WL];")
        self.nest.put(f"w_stv({array}, {name});")
        at = f"{buffer.name} + {address.text(lanes.var)}"
        self.nest.put(f"for (long l = 0; l < {lanes.count or 'WL'}; ++l) w_st({at}, {array}[l]);")

    # values

    def value(self, node: NodeId, coord: Coord) -> ScopedValue:
        """The node's value at `coord`; a scalar where the vectorised variable does not matter."""
        key = (node, coord)
        for memo in reversed(self._memo):
            if key in memo:
                return memo[key]
        self.count += 1
        placed = self._make(node, coord)
        self._memo[placed.level][key] = placed
        return placed

    def _make(self, node: NodeId, coord: Coord) -> ScopedValue:
        record = self.graph.nodes[node]
        dtype = record.type.dtype
        if node in self.busy:
            raise Unfused(node)
        if node in self.buffers:
            buffer = self.buffers[node]
            return self.load(buffer, buffer.address(coord), dtype)
        match record.prim:
            case Prim.CONSTANT:
                number = (
                    self.graph.constant(node).reshape(()).item()
                    if record.type.rank == 0
                    else (self.graph.constant(node).reshape(-1)[0].item())
                )
                return ScopedValue(Value(literal(number, dtype), dtype, constant=float(number)), 0)
            case Prim.IOTA:
                return self._iota(coord[cast("a.IotaAttrs", record.attrs).axis], dtype)
            case Prim.WINDOW_SUM | Prim.WINDOW_MAX:
                return self._window(node, coord)
            case Prim.PAD:
                return self._pad(node, coord)
            case Prim.CONCAT:
                return self._concat(node, coord)
            case Prim.GATHER | Prim.TAKE_ALONG:
                return self._indexed(node, coord)
        if CATEGORY[record.prim] in (
            Category.REDUCE,
            Category.SCAN,
        ):  # a result that these very loops are still summing
            raise Unfused(node)
        if CATEGORY[record.prim] is not Category.ELEMENTWISE:
            return self.value(record.inputs[0], self.operand_coord(node, coord))
        operands = [self.value(x, coord) for x in record.inputs]
        text, vector = elementwise(record.prim, [x.value for x in operands], dtype)
        return self.define(dtype, vector, text, max(x.level for x in operands))

    def operand_coord(self, node: NodeId, coord: Coord) -> Coord:
        """Index of the operand of a layout primitive that has one operand and no test."""
        record = self.graph.nodes[node]
        inner = self.graph.type_of(record.inputs[0]).shape
        match record.attrs:
            case a.BroadcastAttrs():
                tail = coord[len(coord) - len(inner) :]
                return tuple(Index() if n == 1 else i for i, n in zip(tail, inner, strict=True))
            case a.ReshapeAttrs(shape):
                return unflatten(flatten(coord, shape), inner)
            case a.TransposeAttrs(perm):
                moved = [Index()] * len(perm)
                for i, p in enumerate(perm):
                    moved[p] = coord[i]
                return tuple(moved)
            case a.SliceAttrs(starts, _, steps):
                return tuple(i * k + s for i, s, k in zip(coord, starts, steps, strict=True))
            case _:
                raise NotImplementedError(record.prim)

    def _iota(self, index: Index, dtype: DType) -> ScopedValue:
        self.fixed.append(index)
        level = self.level_of(index)
        kind = c_type(dtype)
        if not self._varies(index):
            return self.define(dtype, False, f"({kind})({index.text()})", level)
        lanes = cast("Lanes", self.lanes)
        if index.coefficient(lanes.var) == 1 and dtype in (DType.I64, DType.I32, DType.F32, DType.F64):
            base = splat(f"({kind})({index.text()})", dtype)
            return self.define(dtype, True, f"{base} + __builtin_convertvector(w_lanes(), {vector_type(dtype)})", level)
        return self.per_lane(dtype, f"({kind})({index.text(lanes.var)})", level)

    def inside(self, tests: Sequence[tuple[Index, int]]) -> ScopedValue | bool:
        """Whether 0 <= index < size for all; a plain bool where the ranges decide."""
        open_tests = []
        for index, size in tests:
            lo, hi = index.bounds
            if hi < 0 or lo >= size:
                return False
            if lo < 0 or hi >= size:
                open_tests.append((index, size))
        if not open_tests:
            return True
        self.conditions += open_tests
        level = max(self.level_of(i) for i, _ in open_tests)
        if not any(self._varies(i) for i, _ in open_tests):
            text = " && ".join(f"w_inside({i.text()}, {n})" for i, n in open_tests)
            return self.define(DType.BOOL, False, text, level, "c")
        lane = cast("Lanes", self.lanes).var
        return self.per_lane(DType.BOOL, " && ".join(f"w_inside({i.text(lane)}, {n})" for i, n in open_tests), level)

    def choose(self, condition: ScopedValue, yes: ScopedValue, no: ScopedValue) -> ScopedValue:
        """condition ? yes : no; a scalar condition keeps vectors whole."""
        dtype = yes.value.dtype
        level = max(condition.level, yes.level, no.level)
        if not condition.value.vector:
            pair = [yes.value, no.value]
            vector = any(v.vector for v in pair)
            names = [v.name if v.vector or not vector else splat(v.name, dtype) for v in pair]
            return self.define(dtype, vector, f"{condition.value.name} ? {names[0]} : {names[1]}", level)
        text, vector = elementwise(Prim.SELECT, [condition.value, yes.value, no.value], dtype)
        return self.define(dtype, vector, text, level)

    def _pad(self, node: NodeId, coord: Coord) -> ScopedValue:
        record = self.graph.nodes[node]
        attrs = cast("a.PadAttrs", record.attrs)
        shape = self.graph.type_of(record.inputs[0]).shape
        moved = [i + -lo for i, lo in zip(coord, attrs.lo, strict=True)]
        if attrs.mode != "constant":
            kind = "reflect" if attrs.mode == "reflect" else "clamp"
            for i, n in zip(moved, shape, strict=True):
                lo, hi = i.bounds
                if lo < 0 or hi >= n:
                    self.conditions.append((i, n))
            return self.value(record.inputs[0], tuple(i.forced(kind, n) for i, n in zip(moved, shape, strict=True)))
        dtype = record.type.dtype
        number: float | bool = (
            attrs.value if dtype.is_float else bool(attrs.value) if dtype is DType.BOOL else int(attrs.value)
        )
        filler = ScopedValue(Value(literal(number, dtype), dtype), 0)
        condition = self.inside(list(zip(moved, shape, strict=True)))
        if condition is False or record.type.size == 0 or 0 in shape:
            return filler
        inner = self.value(record.inputs[0], tuple(i.forced("clamp", n) for i, n in zip(moved, shape, strict=True)))
        return inner if condition is True else self.choose(condition, inner, filler)

    def _concat(self, node: NodeId, coord: Coord) -> ScopedValue:
        record = self.graph.nodes[node]
        axis = cast("a.ConcatAttrs", record.attrs).axis
        chosen: ScopedValue | None = None
        offset = 0
        for operand in record.inputs:
            n = self.graph.type_of(operand).shape[axis]
            local = coord[axis] + -offset
            offset += n
            block, step, rest = _in_blocks(local, n)
            condition = self.inside([(block, n // step)]) if n else False
            if isinstance(condition, ScopedValue):
                self.joints.append((block, n // step))
            if condition is False:
                continue
            local = block.forced("clamp", n // step) * step + rest  # where it is outside, its value is not used
            value = self.value(operand, (*coord[:axis], local, *coord[axis + 1 :]))
            if condition is True:
                return value
            chosen = value if chosen is None else self.choose(condition, value, chosen)
        if chosen is None:  # an empty result: nothing will run
            return ScopedValue(Value(literal(0, record.type.dtype), record.type.dtype), 0)
        return chosen

    def _indexed(self, node: NodeId, coord: Coord) -> ScopedValue:
        record = self.graph.nodes[node]
        axis = cast("a.GatherAttrs", record.attrs).axis
        data, indices = record.inputs
        rank = self.graph.type_of(indices).rank
        size = self.graph.type_of(data).shape[axis]
        if record.prim is Prim.TAKE_ALONG:
            where = self.run_time(indices, coord, size)
            return self.value(data, (*coord[:axis], where, *coord[axis + 1 :]))
        where = self.run_time(indices, coord[axis : axis + rank], size)
        return self.value(data, (*coord[:axis], where, *coord[axis + rank :]))

    def run_time(self, indices: NodeId, coord: Coord, size: int) -> Index:
        """An index that the kernel reads or computes, forced into [0, size)."""
        placed = self.value(indices, coord)
        name = self.name("g")
        depends = frozenset(v for i in coord for v in i.variables)
        if not placed.value.vector:
            self.nest.put(f"const {self.index} {name} = {self.clamp}{placed.value.name}, {size});", placed.level)
        else:
            wide = f"w_clamp_lanes({placed.value.name}, {size})"
            self.nest.put(f"const w_i32v {name}_v = {wide}; w_i32 {name}[WL]; w_stv({name}, {name}_v);", placed.level)
        self._levels[name] = placed.level
        return Index(0, ((Loaded(name, size, placed.value.vector, depends), 1),))

    def _window(self, node: NodeId, coord: Coord) -> ScopedValue:
        record = self.graph.nodes[node]
        w = cast("a.WindowAttrs", record.attrs)
        first = len(coord) - len(w.kernel)
        level = max((self.level_of(i) for i in coord), default=0)
        vector = any(self._varies(i) for i in coord)
        dtype = record.type.dtype
        with self.at(level):
            name = self.name("w")
            total = Value(name, dtype, vector)
            start = identity(record.prim, dtype)
            self.nest.put(f"{total.c_type} {name} = {splat(start, dtype) if vector else start};")
            self._window_taps(node, list(coord), first, total)
        return ScopedValue(total, level)

    def _window_taps(self, node: NodeId, coord: list[Index], dim: int, total: Value) -> None:
        """Loops over the taps of dimension `dim` and those after it, then one step."""
        record = self.graph.nodes[node]
        w = cast("a.WindowAttrs", record.attrs)
        shape = self.graph.type_of(record.inputs[0]).shape
        if dim == len(coord):
            self._window_step(node, coord, total)
            return
        j = dim - (len(coord) - len(w.kernel))
        kernel, stride, lo, dilation = w.kernel[j], w.strides[j], w.pads_lo[j], w.dilations[j]
        origin = coord[dim] * stride + -lo
        n = shape[dim]
        reach = origin + (kernel - 1) * dilation
        whole = origin.bounds[0] >= 0 and reach.bounds[1] < n
        if not whole:
            self.conditions += [(origin, n), (reach, n)]
        if kernel == 1:
            self._window_taps(node, [*coord[:dim], origin, *coord[dim + 1 :]], dim + 1, total)
            return
        varies = self._varies(origin)
        if (varies and not (whole and kernel > 4)) or (whole and kernel <= 3) or kernel <= self.unrolled:
            for k in range(kernel):
                self._window_taps(node, [*coord[:dim], origin + k * dilation, *coord[dim + 1 :]], dim + 1, total)
            return
        var = Var(self.name("k"), kernel)
        if whole:
            bounds = ("0", str(kernel))
        elif dilation == 1:
            bounds = (f"w_most(0, -({origin.text()}))", f"w_least({kernel}, {n} - ({origin.text()}))")
        else:
            step = dilation
            bounds = (
                f"w_most(0, {step - 1} - ({origin.text()})) / {step}",
                f"w_least({kernel}, (w_most(0, {n} - ({origin.text()})) + {step - 1}) / {step})",
            )
        with self.loop(var, *bounds):
            position = origin + index_of(var) * dilation
            if not whole:  # the bounds of the loop keep it inside
                position = Index(0, ((Part("known", position, n), 1),))
            self._window_taps(node, [*coord[:dim], position, *coord[dim + 1 :]], dim + 1, total)

    def _window_step(self, node: NodeId, coord: list[Index], total: Value) -> None:
        record = self.graph.nodes[node]
        source, dtype = record.inputs[0], record.type.dtype
        shape = self.graph.type_of(source).shape
        condition = self.inside(list(zip(coord, shape, strict=True)))
        if condition is False:
            return
        at = tuple(i.forced("clamp", n) for i, n in zip(coord, shape, strict=True))
        value = self.value(source, at)
        if condition is not True:
            filler = ScopedValue(Value(identity(record.prim, dtype), dtype), 0)
            value = self.choose(condition, value, filler)
        name = value.value.name
        if total.vector and not value.value.vector:
            name = splat(name, dtype)
        self.nest.put(f"{total.name} = {combine(record.prim, dtype, total.name, name)};")


def _in_blocks(index: Index, n: int) -> tuple[Index, int, int]:
    """(block, size, rest) of an index into n elements, block * size + rest; whole blocks lie inside or outside.

    So neighbours that a thread or a vector has together take one test, and are read together.
    """
    size = math.gcd(n, *(c for _, c in index.terms))
    if size <= 1:
        return index, 1, 0
    rest = index.const % size
    return Index((index.const - rest) // size, tuple((t, c // size) for t, c in index.terms)), size, rest
