"""A chain of products with constant weights over the same rows, and what is elementwise between them.

    h[0] = f0(x),  h[l + 1] = f_l(h[l] W[l], vectors, earlier values)

Every value of the chain is a matrix of `rows` rows in row-major order, whatever shape the graph gives it. A value that
a later product or a later step reads is *kept*: it is rounded to 16 bits, as the graph says. What is read from memory
is an *input*: x by the first product, others beside a value (side by side, or in a step) where they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from weft.generate.contraction.values import Expr, NotStridedError, Reader, View
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

WIDEST = 512
"""Columns of a value of the chain."""
WIDEST_INPUT = 4096
"""Columns of x, where the first product alone reads it."""
MOST_INPUTS = 4
"""Tensors that a chain reads beside weights."""
_LIMIT = 1 << 31
_VECTORS = (DType.F16, DType.BF16, DType.F32)


@dataclass(frozen=True, slots=True)
class Source:
    """A weight or a vector in memory: element (row, column) lies at offset + row * steps[0] + column * steps[1]."""

    kind: Literal["input", "constant"]
    index: int
    """Position among the problem's inputs, or the node of a constant."""
    dtype: DType
    steps: tuple[int, int]
    offset: int


@dataclass(frozen=True, slots=True)
class InputMatrix:
    """A matrix in memory: element (row, column) lies at offset + row * steps[0] + column * steps[1]."""

    index: int
    """Position among the problem's inputs."""
    dtype: DType
    width: int
    steps: tuple[int, int]
    offset: int

    @property
    def dense(self) -> bool:
        """Whether its rows lie side by side."""
        return self.steps == (self.width, 1) and self.offset == 0


@dataclass(frozen=True, slots=True)
class Layer:
    """One product."""

    node: NodeId
    left: tuple[NodeId, ...]
    """The values that it multiplies, side by side: x, or kept values."""
    widths: tuple[int, ...]
    """Their columns."""
    n: int
    weight: Source
    beside: tuple[NodeId, ...] = ()
    """Those of `left` that come from memory, in front of this product."""

    @property
    def k(self) -> int:
        """Rows of the weight."""
        return sum(self.widths)

    @property
    def depth(self) -> int:
        """Rows of the weight in fragments of 16, of which no two values share one."""
        return sum(padded(w) for w in self.widths)


@dataclass(frozen=True, slots=True)
class End:
    """A value that is stored: columns of a result, from `offset` on, whose rows are `step` apart."""

    node: NodeId
    part: int
    index: int
    """Position among the problem's outputs."""
    step: int
    offset: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Products in order, and per part what it computes; part 0 stands in front of the first product."""

    graph: Graph
    rows: int
    dtype: DType
    """Of the products."""
    x: NodeId
    layers: tuple[Layer, ...]
    steps: tuple[tuple[NodeId, ...], ...]
    """Elementwise nodes of each part in order; part l + 1 is behind product l."""
    kept: tuple[tuple[NodeId, ...], ...]
    """Values that each part leaves in registers for later ones."""
    vectors: Mapping[NodeId, Source]
    """Broadcast values that vary by column."""
    numbers: Mapping[NodeId, float]
    out: NodeId
    """The value that is stored behind the last product."""
    ends: tuple[End, ...]
    """All that are stored, that one first."""
    inputs: Mapping[NodeId, InputMatrix]
    """x, and what else is read from memory."""
    before: Mapping[NodeId, tuple[NodeId, ...]]
    """Values of layers' `beside` -> the elementwise nodes that make them of inputs."""

    @property
    def first(self) -> NodeId:
        """The value that is made of x in front of the first product."""
        return self.kept[0][0]

    @property
    def memory(self) -> tuple[int, ...]:
        """Positions of the inputs that are read besides weights, that of x first."""
        return tuple(dict.fromkeys((self.inputs[self.x].index, *(g.index for g in self.inputs.values()))))

    def ends_of(self, part: int) -> tuple[End, ...]:
        """What a part stores."""
        return tuple(e for e in self.ends if e.part == part)

    @property
    def stored_bytes(self) -> int:
        """Of all results."""
        return sum(self.graph.type_of(e.node).nbytes for e in self.ends)

    def read(self, part: int) -> tuple[NodeId, ...]:
        """Inputs that the steps of a part read from memory."""
        if part == 0:
            return ()
        operands = {self.value(o) for s in self.steps[part] for o in self.graph.nodes[s].inputs}
        kept = {v for kept in self.kept[:part] for v in kept}
        return tuple(v for v in self.inputs if v in operands and v not in kept)

    def value(self, node: NodeId) -> NodeId:
        """The value that a node is under another shape."""
        return flat(self.graph, node)

    def width(self, node: NodeId) -> int:
        """Columns of a value."""
        return self.graph.type_of(node).size // self.rows

    @property
    def plain_input(self) -> bool:
        """Whether the first product reads x as it lies in memory."""
        return not self.steps[0] and self.graph.type_of(self.x).dtype is self.dtype


def padded(n: int) -> int:
    """The next multiple of 16."""
    return -(-n // 16) * 16


class _NoChainError(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def flat(graph: Graph, node: NodeId) -> NodeId:
    """The value behind reshapes."""
    while graph.nodes[node].prim is Prim.RESHAPE:
        node = graph.nodes[node].inputs[0]
    return node


def chain(problem: Problem) -> Chain | Declined:
    """The chain that a problem is, or why it is none that the template takes."""
    graph = problem.graph
    if any(CATEGORY[n.prim] is Category.LINEAR and n.prim is not Prim.MATMUL for n in graph.nodes):
        return Declined("a convolution in a chain of products")
    if any(f is not Format.ROW for f in problem.input_formats + problem.output_formats):
        return Declined("a chain of products with channels last")
    if any(graph.type_of(i).size >= _LIMIT for i in (*graph.inputs, *graph.outputs)):
        return Declined("a value of 2^31 elements or more")
    try:
        return _Matcher(problem).chain()
    except (_NoChainError, NotStridedError) as no:
        return Declined(no.reason)


class _Matcher:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        self.reader = Reader(problem, {})
        self.part: dict[NodeId, int] = {}
        """Of values of the chain: 0 for those in front of the first product, else 1 + the product they stand behind."""
        self.vectors: dict[NodeId, Source] = {}
        self.numbers: dict[NodeId, float] = {}
        self.inputs: dict[NodeId, InputMatrix] = {}
        self.x = -1
        self.rows = 0

    def chain(self) -> Chain:
        graph = self.graph
        products = [i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL]
        if len(products) < 2:
            raise _NoChainError("fewer than two products")
        first = graph.type_of(products[0])
        self.rows = first.size // first.shape[-1] if first.size else 0
        if not 0 < self.rows < 1 << 30:
            raise _NoChainError(f"a chain of products with {self.rows} rows")
        dtype = first.dtype
        if dtype not in (DType.F16, DType.BF16):
            raise _NoChainError(f"a chain of products in {dtype.value}")
        order: list[NodeId] = []
        pieces = self._pieces()
        for node, *_ in pieces:  # those that few products make come first: what they read is there then
            self._visit(node, order)
        layers = tuple(self._layer(i) for i in order if graph.nodes[i].prim is Prim.MATMUL)
        if len(layers) != len(products):
            raise _NoChainError("a product that the result of a chain does not depend on")
        numbers = {layer.node: at for at, layer in enumerate(layers)}
        fronts = self._fronts(order)
        main = self._main(layers[0], fronts)
        aside = {v for v, of in fronts.items() if of != {self.x} or v in (self.x, *layers[0].left)} - {main}
        layers = tuple(replace(x, beside=tuple(v for v in x.left if v in aside)) for x in layers)
        for node in order:
            operands = [self.part[o] for o in self._row_operands(node) if o not in aside]
            self.part[node] = 1 + numbers[node] if node in numbers else max(operands, default=0)
        ends = tuple(End(v, self.part[v], *rest) for v, *rest in reversed(pieces))
        if ends[0].part != len(layers) or not all(e.part for e in ends) or any(v in aside for v, *_ in pieces):
            raise _NoChainError("results of a chain that are not those of layers")
        out = ends[0].node
        inner = {v for v in order if v not in numbers and v not in self.inputs and not self._joins(v)}
        steps = tuple(self._steps(order, inner, aside, at) for at in range(len(layers) + 1))
        kept = self._kept(layers, order, dtype, aside)
        if kept[0] != (main,):
            raise _NoChainError("several values in front of the first product of a chain")
        before = {v: self._made_of(v, order, inner) for layer in layers for v in layer.beside}
        inputs = {self.x: self.inputs[self.x], **{v: g for v, g in self.inputs.items() if v != self.x}}
        found = Chain(
            graph, self.rows, dtype, self.x, layers, steps, kept, dict(self.vectors), dict(self.numbers), out,
            ends, inputs, before,
        )  # fmt: skip
        self._check(found, order, aside)
        return found

    def _pieces(self) -> list[tuple[NodeId, int, int, int]]:
        """(value, output, step, offset) of what is stored; that of the most products last."""
        graph = self.graph
        found: list[tuple[NodeId, int, int, int]] = []
        for index, output in enumerate(graph.outputs):
            value = flat(graph, output)
            width = graph.type_of(value).size // self.rows
            parts = self._operands_side_by_side(value)
            at = 0
            for part in parts:
                found.append((part, index, width, at))
                at += graph.type_of(part).size // self.rows
            if at != width or graph.type_of(value).size != width * self.rows:
                raise _NoChainError("a result over other rows")
        if len({v for v, *_ in found}) < len(found):
            raise _NoChainError("a result that is stored twice")
        return sorted(found, key=lambda x: self._products_below(x[0]))

    def _operands_side_by_side(self, value: NodeId) -> list[NodeId]:
        if not self._joins(value):
            return [value]
        return [p for i in self.graph.nodes[value].inputs for p in self._operands_side_by_side(flat(self.graph, i))]

    def _products_below(self, node: NodeId) -> int:
        """How many products a value is made of."""
        seen: set[NodeId] = set()
        waiting = [node]
        while waiting:
            v = waiting.pop()
            if v not in seen:
                seen.add(v)
                waiting += self.graph.nodes[v].inputs
        return sum(self.graph.nodes[v].prim is Prim.MATMUL for v in seen)

    def _check(self, found: Chain, order: list[NodeId], aside: set[NodeId]) -> None:
        """Widths, types and places of values that the kernels take."""
        graph = self.graph
        for node in (v for v in order if not self._joins(v)):
            front = node == found.x or (self.part[node] == 0 and node not in aside)
            most = WIDEST_INPUT if front else WIDEST
            if not 1 <= found.width(node) <= most:
                raise _NoChainError(f"{found.width(node)} columns in a chain of products")
        if any(graph.type_of(v).dtype not in _VECTORS for v in (*(e.node for e in found.ends), *found.inputs)):
            raise _NoChainError("a chain of products that reads or stores no floats")
        x = found.inputs[found.x]
        if x.steps[1] != 1 and x.width > 1:
            raise _NoChainError("columns of a chain's input that do not lie side by side")
        if len(found.memory) > MOST_INPUTS:
            raise _NoChainError(f"a chain of products of {len(found.memory)} inputs")
        if any(o in found.vectors for made in found.before.values() for s in made for o in graph.nodes[s].inputs):
            raise _NoChainError("a vector in front of a value that stands beside another")

    def _fronts(self, order: list[NodeId]) -> dict[NodeId, set[NodeId]]:
        """Values in front of all products -> the inputs of which they are made."""
        found: dict[NodeId, set[NodeId]] = {}
        for node in order:
            operands = [] if node in self.inputs else self._row_operands(node)
            if self.graph.nodes[node].prim is Prim.MATMUL or any(v not in found for v in operands):
                continue
            if self._joins(node):
                continue
            found[node] = {node} if node in self.inputs else set().union(*(found[v] for v in operands))
        return found

    def _main(self, first: Layer, fronts: Mapping[NodeId, set[NodeId]]) -> NodeId:
        """The value that the first product reads as the chain's input, whose own one is noted: the widest of one."""
        widths = dict(zip(first.left, first.widths, strict=True))
        plain = [
            v for v, of in ((v, fronts.get(v, set())) for v in first.left)
            if len(of) == 1 and self.inputs[next(iter(of))].width == widths[v]
        ]  # fmt: skip
        if not plain:
            raise _NoChainError("a first product of a chain that reads no input by itself")
        found = max(plain, key=lambda v: (widths[v], -first.left.index(v)))
        (self.x,) = fronts[found]
        return found

    def _steps(self, order: list[NodeId], inner: set[NodeId], aside: set[NodeId], at: int) -> tuple[NodeId, ...]:
        """Elementwise nodes of a part, with those that make what it reads of inputs."""
        own = {i for i in inner if self.part[i] == at and i not in aside}
        read = {o for i in own for o in self._row_operands(i) if o in aside}
        own.update(*(self._made_of(v, order, inner) for v in read))
        return tuple(i for i in order if i in own)

    def _made_of(self, node: NodeId, order: list[NodeId], inner: set[NodeId]) -> tuple[NodeId, ...]:
        """The elementwise nodes from inputs to a value in front of the products."""
        found: set[NodeId] = set()
        waiting = [node]
        while waiting:
            v = waiting.pop()
            if v in inner and v not in found:
                found.add(v)
                waiting += self._row_operands(v)
        return tuple(i for i in order if i in found)

    def _row_operands(self, node: NodeId) -> list[NodeId]:
        n = self.graph.nodes[node]
        inputs = n.inputs[:1] if n.prim is Prim.MATMUL else n.inputs
        return [v for v in (flat(self.graph, i) for i in inputs) if v in self.part]

    def _visit(self, node: NodeId, order: list[NodeId]) -> None:
        """Values of the chain, operands first."""
        waiting: list[tuple[NodeId, bool]] = [(node, False)]
        while waiting:
            v, done = waiting.pop()
            if done:
                if v not in self.part:
                    self.part[v] = 0
                    order.append(v)
                continue
            if v in self.part:
                continue
            waiting.append((v, True))
            n = self.graph.nodes[v]
            if self._is_input(v):
                continue
            if n.prim is Prim.MATMUL:
                waiting.append((flat(self.graph, n.inputs[0]), False))
            elif self._joins(v):
                waiting += [(flat(self.graph, i), False) for i in reversed(n.inputs)]
            elif CATEGORY[n.prim] is Category.ELEMENTWISE:
                rest = [i for i in n.inputs if not self._uniform(i, n.type.size)]
                waiting += [(flat(self.graph, i), False) for i in reversed(rest)]
            else:
                raise _NoChainError(f"{n.prim.value} in a chain of products")

    def _is_input(self, node: NodeId) -> bool:
        """Whether a value lies in memory: an input, some columns of one, or a number of each row; notes where."""
        n = self.graph.nodes[node]
        if n.prim is Prim.INPUT and not getattr(n.attrs, "is_weight", False):
            width = n.type.size // self.rows
            position = self.graph.inputs.index(node)
            self.inputs[node] = InputMatrix(position, n.type.dtype, width, (width, 1), 0)
            return n.type.size == self.rows * width
        if n.prim not in (Prim.SLICE, Prim.BROADCAST):
            return False
        leaf = self.reader.read(node)
        if leaf.kind != "input" or leaf.view is None:
            return False
        if getattr(self.graph.nodes[self.graph.inputs[leaf.index]].attrs, "is_weight", False):
            return False
        width = n.type.size // self.rows
        if n.type.size != self.rows * width:
            return False
        view = leaf.view.reshape((self.rows, width))
        steps = view.strides[0] if self.rows > 1 else width, view.strides[1] if width > 1 else 1
        self.inputs[node] = InputMatrix(leaf.index, leaf.dtype, width, steps, view.offset)
        return True

    def _joins(self, node: NodeId) -> bool:
        """Whether a node puts rows side by side."""
        n = self.graph.nodes[node]
        return isinstance(n.attrs, a.ConcatAttrs) and n.attrs.axis == n.type.rank - 1

    def _uniform(self, node: NodeId, size: int) -> bool:
        """Whether an operand is a number or a vector along the columns; notes which."""
        if node in self.vectors or node in self.numbers:
            return True
        n = self.graph.nodes[node]
        source = node
        while self.graph.nodes[source].prim in (Prim.RESHAPE, Prim.BROADCAST):
            source = self.graph.nodes[source].inputs[0]
        s = self.graph.nodes[source]
        constant = s.prim is Prim.CONSTANT or (s.prim is Prim.INPUT and getattr(s.attrs, "is_weight", False))
        if not constant:
            if n.prim is Prim.BROADCAST and s.prim is not Prim.INPUT:
                raise _NoChainError("a value that is repeated in a chain of products")
            return False
        leaf = self.reader.read(node)
        if leaf.kind == "number":
            self.numbers[node] = leaf.number
            return True
        width = size // self.rows
        view = _view(leaf).reshape((self.rows, width))
        if (self.rows > 1 and view.strides[0]) or leaf.dtype not in _VECTORS:
            raise _NoChainError("a constant that differs by row")
        self.vectors[node] = _source(leaf, View(view.shape, (0, view.strides[1]), view.offset))
        return True

    def _layer(self, node: NodeId) -> Layer:
        n = self.graph.nodes[node]
        left, right = (self.graph.type_of(i) for i in n.inputs)
        k, cols = left.shape[-1], n.type.shape[-1]
        if n.type.size != self.rows * cols or left.size != self.rows * k or right.size != k * cols:
            raise _NoChainError("products over different rows")
        if n.type.dtype is not left.dtype or right.dtype is not left.dtype:
            raise _NoChainError("a product of two types")
        leaf = self.reader.read(n.inputs[1])
        if leaf.kind == "number":
            source = n.inputs[1]
            while self.graph.nodes[source].inputs:
                source = self.graph.nodes[source].inputs[0]
            weight = Source("constant", source, right.dtype, (0, 0), 0)
            return Layer(node, *self._left(n.inputs[0]), cols, weight)
        constant = leaf.kind == "constant" or (
            leaf.kind == "input" and getattr(self.graph.nodes[self.graph.inputs[leaf.index]].attrs, "is_weight", False)
        )
        if not constant:
            raise _NoChainError("a chain of products whose weights are computed")
        return Layer(node, *self._left(n.inputs[0]), cols, _source(leaf, _view(leaf).reshape((k, cols))))

    def _left(self, node: NodeId) -> tuple[tuple[NodeId, ...], tuple[int, ...]]:
        """Values side by side, and their columns."""
        value = flat(self.graph, node)
        parts = tuple(flat(self.graph, i) for i in self.graph.nodes[value].inputs) if self._joins(value) else (value,)
        if any(self._joins(v) for v in parts):
            raise _NoChainError("a concatenation of concatenations in a chain of products")
        return parts, tuple(self.graph.type_of(v).size // self.rows for v in parts)

    def _kept(
        self, layers: tuple[Layer, ...], order: list[NodeId], dtype: DType, aside: set[NodeId]
    ) -> tuple[tuple[NodeId, ...], ...]:
        wanted: dict[NodeId, None] = {v: None for layer in layers for v in layer.left}
        for node in order:
            if self.graph.nodes[node].prim is not Prim.MATMUL and not self._joins(node):
                if any(self._joins(o) for o in self._row_operands(node)):
                    raise _NoChainError("a step on a concatenation in a chain of products")
                late = [o for o in self._row_operands(node) if self.part[o] < self.part[node]]
                wanted.update(dict.fromkeys(o for o in late if o not in aside and node not in aside))
        for node in wanted:
            kind = self.graph.type_of(node).dtype
            if kind is not dtype:
                raise _NoChainError(f"a value of {kind.value} between products of {dtype.value}")
        own = [v for v in order if v in wanted and v not in aside]
        return tuple(tuple(v for v in own if self.part[v] == at) for at in range(len(layers) + 1))


def _view(leaf: Expr) -> View:
    if leaf.view is None:
        raise _NoChainError("a constant that is computed")
    return leaf.view


def _source(leaf: Expr, view: View) -> Source:
    if leaf.kind not in ("input", "constant"):
        raise _NoChainError(f"{leaf.kind} among the constants of a chain of products")
    kind: Literal["input", "constant"] = "input" if leaf.kind == "input" else "constant"
    return Source(kind, leaf.index, leaf.dtype, (view.strides[0], view.strides[1]), view.offset)


def last_use(p: Chain) -> dict[NodeId, int]:
    """Kept value -> the last part that reads it; part l + 1 begins with product l."""
    found: dict[NodeId, int] = {}
    for at, layer in enumerate(p.layers, start=1):
        found.update({v: max(found.get(v, 0), at) for v in layer.left if v not in layer.beside})
    for at, steps in enumerate(p.steps):
        for node in steps:
            for operand in p.graph.nodes[node].inputs:
                value = p.value(operand)
                if any(value in kept for kept in p.kept[:at]):
                    found[value] = max(found.get(value, 0), at)
    return found
