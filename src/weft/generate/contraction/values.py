"""Values of a problem as expressions over strided views of its inputs: index maps cost nothing.

Reshapes, transposes, slices and broadcasts between an input and its reader become strides of the input; elementwise
primitives stay as a tree. What no stride can say (a reshape that would copy, a concatenation, padding) is declined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem


class NotStridedError(Exception):
    """A value is no expression over strided views; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class View:
    """Index i is at element offset + sum of strides[d] * i[d]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def transpose(self, perm: Sequence[int]) -> View:
        """Dimension i of the result is dimension perm[i]."""
        return View(tuple(self.shape[p] for p in perm), tuple(self.strides[p] for p in perm), self.offset)

    def slice(self, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> View:
        """Element i of the result is starts + i * steps."""
        offset = self.offset + sum(s * t for s, t in zip(self.strides, starts, strict=True))
        strides = tuple(s * t for s, t in zip(self.strides, steps, strict=True))
        return View(tuple(sizes), strides, offset)

    def broadcast(self, shape: Sequence[int]) -> View:
        """As NumPy: aligned to the right, missing and size-1 dimensions repeat."""
        missing = len(shape) - len(self.shape)
        strides = tuple(0 if n == 1 else s for n, s in zip(self.shape, self.strides, strict=True))
        return View(tuple(shape), (0,) * missing + strides, self.offset)

    def reshape(self, shape: Sequence[int]) -> View:
        """The same elements in row-major order under another shape.

        Raises:
            NotStridedError: no strides say that.
        """
        if 0 in shape:
            return View(tuple(shape), (0,) * len(shape), self.offset)
        runs: list[tuple[int, int]] = []  # (size, step) of dimensions that act as one, slowest first
        for n, step in zip(self.shape, self.strides, strict=True):
            if n == 1:
                continue
            if runs and runs[-1][1] == step * n:
                runs[-1] = (runs[-1][0] * n, step)
            else:
                runs.append((n, step))
        strides = [0] * len(shape)
        left, inner = 1, 0
        for d in reversed(range(len(shape))):
            if shape[d] == 1:
                continue
            if left == 1 and runs:
                left, inner = runs.pop()
            if left % shape[d]:
                raise NotStridedError("a reshape that would copy")
            strides[d] = inner
            inner *= shape[d]
            left //= shape[d]
        return View(tuple(shape), tuple(strides), self.offset)


@dataclass(frozen=True, slots=True)
class Grouped(View):
    """A view whose dimensions may each be several steps, (size, stride) slowest first: it lacks `strides`.

    What no stride can say between two reshapes, they may say behind the second: heads that share keys, say.
    """

    steps: tuple[tuple[tuple[int, int], ...], ...] = ()

    def transpose(self, perm: Sequence[int]) -> View:
        """Dimension i of the result is dimension perm[i]."""
        return Grouped(tuple(self.shape[p] for p in perm), (), self.offset, tuple(self.steps[p] for p in perm))

    def slice(self, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> View:
        """Not of what has no strides.

        Raises:
            NotStridedError: unless the slice is everything.
        """
        if any(starts) or tuple(sizes) != self.shape or any(t != 1 for t in steps):
            raise NotStridedError("a slice of a reshape that would copy")
        return self

    def broadcast(self, shape: Sequence[int]) -> View:
        """As NumPy: aligned to the right, missing and size-1 dimensions repeat."""
        missing = len(shape) - len(self.shape)
        repeated = (((n, 0),) for n in shape[:missing])
        kept = (g if n == m else ((m, 0),) for n, m, g in zip(self.shape, shape[missing:], self.steps, strict=True))
        return Grouped(tuple(shape), (), self.offset, (*repeated, *kept))

    def reshape(self, shape: Sequence[int]) -> View:
        """The same elements in row-major order under another shape."""
        flat = [step for group in self.steps for step in group]
        return regrouped(View(tuple(n for n, _ in flat), tuple(s for _, s in flat), self.offset), shape)


def regrouped(view: View, shape: Sequence[int]) -> View:
    """A reshape: a plain view where strides say it, else one of grouped steps.

    Raises:
        NotStridedError: sizes that do not divide each other.
    """
    try:
        return view.reshape(shape)
    except NotStridedError:
        if isinstance(view, Grouped):
            raise
    left = [(n, s) for n, s in zip(view.shape, view.strides, strict=True) if n != 1]
    groups = []
    for size in reversed(shape):
        group: list[tuple[int, int]] = []
        need = size
        while need > 1:
            n, step = left.pop() if left else (1, 0)
            taken = math.gcd(n, need)
            if taken == 1 or taken not in (n, need):
                raise NotStridedError("a reshape that would copy")
            group.insert(0, (taken, step))
            if taken < n:
                left.append((n // taken, step * taken))
            need //= taken
        groups.append(tuple(group) or ((1, 0),))
    return Grouped(tuple(shape), (), view.offset, tuple(reversed(groups)))


def plain(view: View) -> View:
    """The view itself.

    Raises:
        NotStridedError: it has no strides.
    """
    if isinstance(view, Grouped):
        raise NotStridedError("a reshape that would copy")
    return view


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """A value: a leaf (`kind`) with its view, a number, or a primitive of operands; compared by identity.

    A `choice` is a concatenation: its first operand counts along the axis; operand i + 1 stands where that is below
    limits[i] and in no operand before; every operand has a view of the whole.
    """

    kind: Literal["input", "constant", "iota", "number", "scores", "product", "apply", "choice"]
    dtype: DType
    view: View | None = None
    """Of input, constant and iota (the value of an iota is the position that its view gives)."""
    index: int = -1
    """Position among the problem's inputs, or the node of a constant."""
    number: float = 0.0
    prim: Prim = Prim.CAST
    args: tuple[Expr, ...] = ()
    limits: tuple[int, ...] = ()

    def mapped(self, change: Callable[[View], View], done: dict[int, Expr] | None = None) -> Expr:
        """The same value with every view changed; operands that occur twice stay one."""
        done = {} if done is None else done
        if id(self) not in done:
            if self.args:
                args = tuple(x.mapped(change, done) for x in self.args)
                done[id(self)] = Expr(self.kind, self.dtype, prim=self.prim, args=args, limits=self.limits)
            elif self.view is None:
                done[id(self)] = self
            else:
                done[id(self)] = Expr(self.kind, self.dtype, change(self.view), self.index)
        return done[id(self)]

    def parts(self) -> list[Expr]:
        """This and all below it, operands first, each once."""
        found: dict[int, Expr] = {}
        self._add_to(found)
        return list(found.values())

    def _add_to(self, found: dict[int, Expr]) -> None:
        if id(self) not in found:
            for x in self.args:
                x._add_to(found)
            found[id(self)] = self

    @property
    def leaves(self) -> list[Expr]:
        """What is read from memory, or counted."""
        return [x for x in self.parts() if x.view is not None]

    @property
    def has_scores(self) -> bool:
        """Whether the result of the first product is inside."""
        return any(x.kind == "scores" for x in self.parts())


def number(value: float, dtype: DType) -> Expr:
    """A known value, the same everywhere."""
    return Expr("number", dtype, number=value)


_VIEWS = frozenset({Prim.RESHAPE, Prim.TRANSPOSE, Prim.SLICE, Prim.BROADCAST})


class Reader:
    """Finds the expressions of a problem's nodes; those of some nodes are `known`. Concatenations only where asked.

    With `late`, views may be grouped until they are asked for by `plain`.
    """

    def __init__(
        self, problem: Problem, known: Mapping[NodeId, Expr], *, concat: bool = False, late: bool = False
    ) -> None:
        self._problem = problem
        self._graph = problem.graph
        self._positions = {node: i for i, node in enumerate(problem.graph.inputs)}
        self._found = dict(known)
        self._concat = concat
        self._late = late

    def read(self, node: NodeId) -> Expr:
        """The expression of a node in its own shape.

        Raises:
            NotStridedError: it is none.
        """
        if node not in self._found:
            self._found[node] = self._make(node)
        return self._found[node]

    def _make(self, node: NodeId) -> Expr:
        n = self._graph.nodes[node]
        if n.prim is Prim.INPUT:
            position = self._positions[node]
            strides = self._problem.input_formats[position].strides(n.type.shape)
            return Expr("input", n.type.dtype, View(n.type.shape, strides), position)
        if n.prim is Prim.CONSTANT:
            return self._constant(node)
        if n.prim is Prim.IOTA:
            axis = cast("a.IotaAttrs", n.attrs).axis
            return Expr("iota", n.type.dtype, View(n.type.shape, tuple(int(d == axis) for d in range(n.type.rank))))
        if n.prim in _VIEWS:
            return self._viewed(node)
        if CATEGORY[n.prim] is Category.ELEMENTWISE:
            return Expr("apply", n.type.dtype, prim=n.prim, args=tuple(map(self.read, n.inputs)))
        if n.prim is Prim.CONCAT and self._concat:
            return self._chosen(node)
        raise NotStridedError(f"{n.prim.value} in front of a product of attention")

    def _chosen(self, node: NodeId) -> Expr:
        n = self._graph.nodes[node]
        axis = cast("a.ConcatAttrs", n.attrs).axis
        count = Expr("iota", DType.I32, View(n.type.shape, tuple(int(d == axis) for d in range(n.type.rank))))
        parts: list[Expr] = []
        limits: list[int] = []
        start = 0
        for operand in n.inputs:
            part = self.read(operand)
            if part.kind != "input":
                raise NotStridedError("a concatenation of computed values")
            parts.append(part.mapped(_placed(n.type.shape, axis, start)))
            start += self._graph.type_of(operand).shape[axis]
            limits.append(start)
        return Expr("choice", n.type.dtype, args=(count, *parts), limits=tuple(limits))

    def _constant(self, node: NodeId) -> Expr:
        t = self._graph.type_of(node)
        data = np.asarray(self._graph.constant(node))
        if data.size == 1:
            return number(data.reshape(()).item(), t.dtype)
        if t.nbytes > 4096:
            raise NotStridedError(f"a constant of {t.nbytes} B in the text of a kernel")
        strides = [0] * t.rank
        step = 1
        for d in reversed(range(t.rank)):
            strides[d] = step
            step *= t.shape[d]
        return Expr("constant", t.dtype, View(t.shape, tuple(strides)), node)

    def _viewed(self, node: NodeId) -> Expr:
        n = self._graph.nodes[node]
        source = self.read(n.inputs[0])
        if source.has_scores:
            before = self._graph.type_of(n.inputs[0]).shape
            if n.prim is not Prim.RESHAPE or before[-1] != n.type.shape[-1]:
                raise NotStridedError(f"{n.prim.value} of the scores")
        shape = n.type.shape
        if n.prim is Prim.RESHAPE:
            return source.mapped(lambda v: regrouped(v, shape) if self._late else v.reshape(shape))
        if n.prim is Prim.TRANSPOSE:
            perm = cast("a.TransposeAttrs", n.attrs).perm
            return source.mapped(lambda v: v.transpose(perm))
        if n.prim is Prim.SLICE:
            s = cast("a.SliceAttrs", n.attrs)
            return source.mapped(lambda v: v.slice(s.starts, s.sizes, s.steps))
        return source.mapped(lambda v: v.broadcast(shape))


def _placed(shape: tuple[int, ...], axis: int, start: int) -> Callable[[View], View]:
    """The view of a part of a concatenation by the positions of the whole."""
    return lambda v: View(shape, v.strides, v.offset - start * v.strides[axis])


def written(problem: Problem, chain: Sequence[NodeId], shape: tuple[int, ...]) -> View:
    """Where the elements of the value in front of `chain` (views and casts, last first) lie in the problem's output.

    The view may be grouped.

    Raises:
        NotStridedError: no strides say that.
    """
    graph = problem.graph
    sink = graph.outputs[0]
    view = View(graph.type_of(sink).shape, problem.output_formats[0].strides(graph.type_of(sink).shape))
    for node in chain:
        n = graph.nodes[node]
        before = graph.type_of(n.inputs[0]).shape
        if n.prim is Prim.TRANSPOSE:
            perm = cast("a.TransposeAttrs", n.attrs).perm
            view = view.transpose([perm.index(i) for i in range(len(perm))])
        elif n.prim is Prim.RESHAPE:
            view = regrouped(view, before)
        elif n.prim is not Prim.CAST:
            raise NotStridedError(f"{n.prim.value} behind attention")
    assert view.shape == shape
    return view
