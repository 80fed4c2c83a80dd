"""A fully connected network with its parameters in one buffer, and its forward pass as a problem.

Values are numbered: 0 is x, l + 1 the result of layer l; where layers read several columns of the input matrix, those
are 0, -1, -2, ... A layer reads the last value unless `sources` says more.

Parameters lie one after the other as torch has them, weights (out, in) row-major, each aligned to 16 bytes of 16-bit
numbers; gradients lie at the same places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weft.generate.cuda.mlp.match import padded
from weft.generate.cuda.training.activation import Activation
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

ALIGNMENT = 8
"""Elements."""


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A parameter in the buffer; all in elements."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        n = 1
        for x in self.shape:
            n *= x
        return n


class Segment(NamedTuple):
    """A value among those that a layer reads side by side."""

    value: int
    column: int
    """Of the layer's weight, where it begins."""
    width: int
    first: int
    """Where it begins in fragments of 16 columns."""


class Added(NamedTuple):
    """An earlier value that a layer takes in: added to its pre-activation, or to its result."""

    value: int
    before: bool


@dataclass(frozen=True, slots=True)
class Network:
    """Layer l maps widths[l] to widths[l + 1] columns: h = acts[l](h W^T + b); with skips its inputs may be others."""

    widths: tuple[int, ...]
    acts: tuple[Activation, ...]
    biases: tuple[bool, ...]
    dtype: DType
    """Of products and results: f16 or bf16."""
    input_dtype: DType
    """Of the input: `dtype` or f32."""
    masters: DType | None = None
    """Of the parameters in memory, where that is not `dtype`: f32."""
    sources: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """Of each layer: the values that it reads side by side. None: the last one."""
    added: tuple[Added | None, ...] = field(default=(), repr=False)
    """Of each layer. None at all: nothing is added anywhere."""
    parts: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """(first column, columns) of the values 0, -1, ... in the input matrix; none: x is all of it."""
    row: int = field(default=0, repr=False)
    """Columns of the input matrix, where it has parts."""

    @property
    def plain(self) -> bool:
        """Whether each layer reads the last value alone."""
        return not (self.sources or self.added or self.parts)

    @property
    def identity(self) -> str:
        """By which its kernels are named: written with the names that fields had first, so that no name changes."""
        layers = f"widths={self.widths!r}, acts={self.acts!r}, biases={self.biases!r}"
        types = f"dtype={self.dtype!r}, given={self.input_dtype!r}, masters={self.masters!r}"
        skips = "" if self.plain else f"{self.sources}{self.added}{self.parts}{self.row}"
        return f"Network({layers}, {types}){skips}"

    @property
    def columns(self) -> int:
        """Of the input matrix."""
        return self.row if self.parts else self.widths[0]

    def reads(self, layer: int) -> tuple[int, ...]:
        """Values that a layer reads side by side."""
        return self.sources[layer] if self.sources else (layer,)

    def adds(self, layer: int) -> Added | None:
        """What a layer takes in besides."""
        return self.added[layer] if self.added else None

    def of(self, value: int) -> int:
        """Columns of a value."""
        return self.widths[value] if value >= 0 else self.parts[-value][1]

    def segments(self, layer: int) -> tuple[Segment, ...]:
        """What a layer reads, in the order in which it is multiplied: the last value first, while it is there."""
        columns: list[tuple[int, int]] = []
        column = 0
        for value in self.reads(layer):
            columns.append((value, column))
            column += self.of(value)
        found = []
        first = 0
        for value, start in sorted(columns, key=lambda x: x[0] != layer):
            found.append(Segment(value, start, self.of(value), first))
            first += padded(self.of(value)) // 16
        return tuple(found)

    def depth_of(self, layer: int) -> int:
        """Columns that a layer reads, each value padded to 16."""
        return sum(padded(self.of(v)) for v in self.reads(layer))

    @property
    def depth(self) -> int:
        """Layers."""
        return len(self.acts)

    def slices(self) -> tuple[ParameterSlice, ...]:
        """Weight, and bias where there is one, of each layer."""
        found = []
        at = 0
        for layer, (n, bias) in enumerate(zip(self.widths[1:], self.biases, strict=True)):
            k = sum(self.of(v) for v in self.reads(layer))
            for shape in ((n, k), *([(n,)] if bias else [])):
                one = ParameterSlice(at, shape)
                found.append(one)
                at += -(-one.size // ALIGNMENT) * ALIGNMENT
        return tuple(found)

    @property
    def elements(self) -> int:
        """Of the buffer."""
        last = self.slices()[-1]
        return last.offset + -(-last.size // ALIGNMENT) * ALIGNMENT

    def slices_of(self, layer: int) -> tuple[ParameterSlice, ParameterSlice | None]:
        """Weight and bias of a layer."""
        at = sum(2 if x else 1 for x in self.biases[:layer])
        slices = self.slices()
        return slices[at], slices[at + 1] if self.biases[layer] else None

    def width(self, value: int) -> int:
        """Columns of a value, padded to 16."""
        return padded(self.of(value))


def forward_problem(net: Network, rows: int, masters: DType | None = None) -> Problem:
    """The forward pass: inputs are x and the parameters in the order of `places`, these in `masters` if it is given."""
    kind = masters or net.dtype
    if not net.plain:
        return _forward_with_skips(net, rows, kind)
    b = GraphBuilder()
    h = b.cast(b.input(TensorType(net.input_dtype, (rows, net.widths[0]))), net.dtype)
    for k, n, bias, act in zip(net.widths, net.widths[1:], net.biases, net.acts, strict=False):
        w = b.cast(b.input(TensorType(kind, (n, k)), is_weight=True), net.dtype)
        h = b.add(Prim.MATMUL, h, b.transpose(w, (1, 0)))
        if bias:
            h = b.apply(Prim.ADD, h, b.cast(b.input(TensorType(kind, (n,)), is_weight=True), net.dtype))
        h = act.apply(b, h)
    graph = b.build([h])
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,))


def _forward_with_skips(net: Network, rows: int, kind: DType) -> Problem:
    b = GraphBuilder()
    whole = b.input(TensorType(net.input_dtype, (rows, net.columns)))
    values: dict[int, NodeId] = {}
    for i, (start, width) in enumerate(net.parts or ((0, net.columns),)):
        part = whole
        if width != net.columns:
            part = b.add(Prim.SLICE, whole, attrs=a.SliceAttrs((0, start), (rows, width), (1, 1)))
        values[-i] = b.cast(part, net.dtype)
    for layer, (n, bias, act) in enumerate(zip(net.widths[1:], net.biases, net.acts, strict=True)):
        read = [values[v] for v in net.reads(layer)]
        h = b.add(Prim.CONCAT, *read, attrs=a.ConcatAttrs(1)) if len(read) > 1 else read[0]
        w = b.cast(b.input(TensorType(kind, (n, b.type_of(h).shape[1])), is_weight=True), net.dtype)
        h = b.add(Prim.MATMUL, h, b.transpose(w, (1, 0)))
        if bias:
            h = b.apply(Prim.ADD, h, b.cast(b.input(TensorType(kind, (n,)), is_weight=True), net.dtype))
        added = net.adds(layer)
        if added is not None and added.before:
            h = b.apply(Prim.ADD, h, values[added.value])
        h = act.apply(b, h)
        if added is not None and not added.before:
            h = b.apply(Prim.ADD, h, values[added.value])
        values[layer + 1] = h
    graph = b.build([values[net.depth]])
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,))
