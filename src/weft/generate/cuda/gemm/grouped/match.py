"""Products that need nothing of each other, as one problem; and a product whose columns are several results.

Each member is a problem of its own with one contraction. A result that is a slice of a product, whatever renames it on
the way (heads of attention), is a product with fewer columns of the weight: the slice moves through what is
elementwise, through renamings and through the contraction, into the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.generate.cuda.gemm.common.product import Product, in_columns, product
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

MOST_MEMBERS = 16
"""Members of one kernel: its text holds the loop of each."""


@dataclass(frozen=True, slots=True)
class Member:
    """A product of the group."""

    problem: Problem
    product: Product
    inputs: tuple[int, ...]
    """Per input its position among those of the whole."""
    outputs: tuple[int, ...]
    """The same for outputs."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a value: per dimension the first index and how many."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All of it."""
        return Box((0,) * len(shape), tuple(shape))

    def all_but(self, axis: int, shape: Sequence[int]) -> bool:
        """Whether every other dimension is whole."""
        places = enumerate(zip(self.starts, self.sizes, shape, strict=True))
        return all(i == axis or (start == 0 and size == n) for i, (start, size, n) in places)


class _RefusedError(Exception):
    """Carries the reason out of the recursion; never leaves this module."""


def is_group(problem: Problem) -> bool:
    """Whether a problem has several results of several contractions, none behind another, or of one that is sliced."""
    g = problem.graph
    linear = [i for i, n in enumerate(g.nodes) if CATEGORY[n.prim] is Category.LINEAR]
    if len(set(g.outputs)) < 2 or not linear:
        return False
    return _sliced_behind(g, linear[0]) if len(linear) == 1 else not any(i in _behind(g, linear) for i in linear)


def _behind(g: Graph, nodes: Sequence[NodeId]) -> set[NodeId]:
    """What reads some nodes, also through others."""
    found: set[NodeId] = set()
    for i in range(min(nodes) + 1, len(g)):
        if any(j in found or j in nodes for j in g.nodes[i].inputs):
            found.add(i)
    return found


def is_split(problem: Problem) -> bool:
    """Whether the results of a group are slices of one product."""
    return sum(CATEGORY[n.prim] is Category.LINEAR for n in problem.graph.nodes) == 1


def merged(problem: Problem, *, tf32: bool = False) -> Product | None:
    """The product whose columns are the results of a problem as they are; None where they are turned, or of several."""
    g = problem.graph
    linear = [i for i, n in enumerate(g.nodes) if CATEGORY[n.prim] is Category.LINEAR]
    if len(linear) > 1 or any(g.nodes[i].prim is Prim.TRANSPOSE for i in _behind(g, linear)):
        return None
    whole, _ = _Cut(problem).problem_of(linear, [Format.ROW])
    found = product(whole, tf32=tf32)
    return None if isinstance(found, Declined) else found


def _sliced_behind(g: Graph, linear: NodeId) -> bool:
    return any(g.nodes[i].prim is Prim.SLICE for i in _behind(g, [linear]))


def members(problem: Problem, *, tf32: bool = False) -> tuple[Member, ...] | Declined:
    """The products that a problem is, or why they are not one kernel; `tf32`: operands of f32 are rounded."""
    g = problem.graph
    if any(n.type.size == 0 for n in g.nodes):
        return Declined("a product of no elements in a group")
    owners = _owners(g)
    if isinstance(owners, Declined):
        return owners
    parts: list[tuple[int, ...]] = []
    for linear in dict.fromkeys(owners):
        own = tuple(k for k, owner in enumerate(owners) if owner == linear)
        parts += [(k,) for k in own] if len(own) > 1 and _sliced_behind(g, linear) else [own]
    if not 2 <= len(parts) <= MOST_MEMBERS:
        return Declined(f"{len(parts)} products in one kernel; it takes 2 to {MOST_MEMBERS}")
    found = []
    for part in parts:
        one = _member(problem, part, tf32=tf32)
        if isinstance(one, Declined):
            return one
        found.append(one)
    kinds = {m.product.multiplied for m in found}
    if len(kinds) > 1:
        return Declined(f"products of {' and '.join(sorted(kinds))} in one kernel")
    return tuple(found)


def _owners(g: Graph) -> list[NodeId] | Declined:
    """Per output the one contraction that it depends on."""
    above: list[frozenset[NodeId]] = []
    for i, n in enumerate(g.nodes):
        own = frozenset({i}) if CATEGORY[n.prim] is Category.LINEAR else frozenset()
        above.append(own.union(*(above[j] for j in n.inputs)))
    for o in g.outputs:
        if not above[o]:
            return Declined("a result that depends on no product")
        if len(above[o]) > 1:
            return Declined("products that depend on each other, or meet in a result")
    if len(set(g.outputs)) != len(g.outputs):
        return Declined("an output occurs twice")
    return [next(iter(above[o])) for o in g.outputs]


def _member(problem: Problem, outputs: tuple[int, ...], *, tf32: bool) -> Member | Declined:
    try:
        ends, formats = zip(*((problem.graph.outputs[k], problem.output_formats[k]) for k in outputs), strict=True)
        sub, inputs = _Cut(problem).problem_of(ends, formats)
    except _RefusedError as refused:
        return Declined(str(refused))
    p = product(sub, tf32=tf32)
    if isinstance(p, Declined):
        return p
    if p.bytes:
        return Declined("numbers of 8 bits in a group of products")
    return Member(sub, in_columns(p), inputs, outputs)


class _Cut:
    """Copies what some outputs need, only the columns of the product that they hold."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.b = GraphBuilder()
        self.depends: set[NodeId] = set()
        for i, n in enumerate(self.graph.nodes):
            if CATEGORY[n.prim] is Category.LINEAR or any(j in self.depends for j in n.inputs):
                self.depends.add(i)
        self.copied: dict[NodeId, NodeId] = {}
        self.cut: dict[tuple[NodeId, Box], NodeId] = {}
        self.inputs: list[int] = []

    def problem_of(self, ends: Sequence[NodeId], formats: Sequence[Format]) -> tuple[Problem, tuple[int, ...]]:
        """The problem of some nodes, and per input its position in the whole."""
        graph = self.b.build([self._of(o, Box.whole(self.graph.type_of(o).shape)) for o in ends])
        ins = tuple(self.problem.input_formats[i] for i in self.inputs)
        key = f"{graph} {[f.value for f in ins]} {[f.value for f in formats]}"  # not measured by itself
        return Problem(graph, key, ins, tuple(formats)), tuple(self.inputs)

    def _whole(self, at: NodeId) -> NodeId:
        """A copy of a node that depends on no product, and of what it reads."""
        stack = [at]
        g = self.graph
        while stack:
            i = stack[-1]
            n = g.nodes[i]
            waiting = [j for j in n.inputs if j not in self.copied]
            if i in self.copied:
                stack.pop()
            elif waiting:
                stack.extend(reversed(waiting))
            elif isinstance(n.attrs, a.InputAttrs):
                self.copied[i] = self.b.input(n.type, is_weight=n.attrs.is_weight)
                self.inputs.append(n.attrs.index)
            elif isinstance(n.attrs, a.ConstantAttrs):
                self.copied[i] = self.b.adopt_constant(n.attrs.digest, g.constant(i), n.type)
            else:
                self.copied[i] = self.b.add(n.prim, *(self.copied[j] for j in n.inputs), attrs=n.attrs)
        return self.copied[at]

    def _of(self, at: NodeId, box: Box) -> NodeId:
        """A node that is the `box` of `at`; as deep as what follows a product."""
        key = (at, box)
        if key not in self.cut:
            self.cut[key] = self._made(at, box)
        return self.cut[key]

    def _made(self, at: NodeId, box: Box) -> NodeId:
        n = self.graph.nodes[at]
        shape = n.type.shape
        if at not in self.depends:
            copy = self._whole(at)
            return copy if box == Box.whole(shape) else self._sliced(copy, box)
        if CATEGORY[n.prim] is Category.LINEAR:
            return self._contraction(at, box)
        if isinstance(n.attrs, a.SliceAttrs):
            if set(n.attrs.steps) - {1}:
                raise _RefusedError("a slice in steps behind a product")
            starts = tuple(s + o for s, o in zip(box.starts, n.attrs.starts, strict=True))
            return self._of(n.inputs[0], Box(starts, box.sizes))
        if isinstance(n.attrs, a.TransposeAttrs):
            perm = n.attrs.perm
            places = [perm.index(i) for i in range(len(perm))]
            before = Box(tuple(box.starts[i] for i in places), tuple(box.sizes[i] for i in places))
            return self.b.transpose(self._of(n.inputs[0], before), perm)
        if n.prim is Prim.RESHAPE:
            under = _before_reshape(self.graph.type_of(n.inputs[0]).shape, shape, box)
            return self.b.reshape(self._of(n.inputs[0], under), box.sizes)
        if CATEGORY[n.prim] is Category.ELEMENTWISE:
            return self.b.add(n.prim, *(self._of(i, box) for i in n.inputs), attrs=n.attrs)
        raise _RefusedError(f"{n.prim.value} behind a product of a group")

    def _sliced(self, x: NodeId, box: Box) -> NodeId:
        return self.b.slice(x, box.starts, box.sizes, (1,) * len(box.sizes))

    def _contraction(self, at: NodeId, box: Box) -> NodeId:
        n = self.graph.nodes[at]
        if any(i in self.depends for i in n.inputs):
            raise _RefusedError("products that depend on each other, or meet in a result")
        shape = n.type.shape
        conv = n.prim is Prim.CONV
        axis = 1 if conv else len(shape) - 1
        x, w = self._whole(n.inputs[0]), self._whole(n.inputs[1])
        if box != Box.whole(shape):
            if not box.all_but(axis, shape):
                raise _RefusedError("results that are not whole columns of their product")
            if isinstance(n.attrs, a.ConvAttrs) and (n.attrs.groups > 1 or n.attrs.transposed):
                raise _RefusedError("slices of a convolution in groups")
            ws = self.b.type_of(w).shape
            along = 0 if conv else len(ws) - 1
            starts = tuple(box.starts[axis] if i == along else 0 for i in range(len(ws)))
            sizes = tuple(box.sizes[axis] if i == along else m for i, m in enumerate(ws))
            w = self._sliced(w, Box(starts, sizes))
        return self.b.add(n.prim, x, w, attrs=n.attrs)


def _before_reshape(before: tuple[int, ...], after: tuple[int, ...], box: Box) -> Box:
    """The part of a value that becomes `box` by a reshape from `before` to `after`."""
    if box == Box.whole(after):
        return Box.whole(before)
    starts: list[int] = []
    sizes: list[int] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first_i, first_j = i, j
        left = right = 1
        if i < len(before):
            left, i = before[i], i + 1
        if j < len(after):
            right, j = after[j], j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        while i < len(before) and before[i] == 1 and (j == len(after) or after[j] != 1):
            i += 1
        while j < len(after) and after[j] == 1 and (i == len(before) or before[i] != 1):
            j += 1
        part = Box(box.starts[first_j:j], box.sizes[first_j:j])
        lo, count = _range(after[first_j:j], part)
        own = _box_of(before[first_i:i], lo, count)
        starts += own.starts
        sizes += own.sizes
    return Box(tuple(starts), tuple(sizes))


def _range(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """First element and number of a box that is a stretch of a row-major array."""
    lead = 0
    while lead < len(shape) and box.sizes[lead] == 1:
        lead += 1
    inner = range(lead + 1, len(shape))
    if any(box.starts[i] or box.sizes[i] != shape[i] for i in inner):
        raise _RefusedError("a slice that is no stretch of a product's columns")
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return sum(s * step for s, step in zip(box.starts, steps, strict=True)), math.prod(box.sizes)


def _box_of(shape: Sequence[int], lo: int, count: int) -> Box:
    """The box of a row-major array that is so many elements from `lo` on."""
    starts, sizes = [], []
    for i, n in enumerate(shape):
        step = math.prod(shape[i + 1 :])
        start = lo // step
        if count >= step:
            if lo % step or count % step or start + count // step > n:
                raise _RefusedError("a slice that is no stretch of a product's columns")
            starts += [start, *(0 for _ in shape[i + 1 :])]
            sizes += [count // step, *shape[i + 1 :]]
            return Box(tuple(starts), tuple(sizes))
        starts.append(start)
        sizes.append(1)
        lo %= step
    return Box(tuple(starts), tuple(sizes))
