"""What a library call on a GPU takes besides its arithmetic: launches, traffic, copies into another order.

Two ways to run an operator differ in these alone, so a plan that nobody measured is chosen by them. The constants are
those of the device's profile (`costmodel.constants.Library`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from weft.costmodel.constants import Library
from weft.costmodel.profile import costs_of
from weft.device.any import DeviceFacts
from weft.device.cuda.facts import GpuFacts
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Kind, Problem
from weft.kernels.formats import Format, formats_of
from weft.kernels.source import LibraryCall

_HALVES = (DType.F16, DType.BF16)
_ROW_INSIDE = ("reflection_pad", "replication_pad", "instance_norm", "group_norm", "index_select", "gather", "unfold")
"""Operators that make their operand row-major, and give a row-major result."""
_VIEWS = ("permute", "reshape", "expand", "slice")
Strides = tuple[int, ...]


def overhead_us(problem: Problem, call: LibraryCall, kind: Kind, facts: DeviceFacts) -> float:
    """Microseconds of launches, of what is read and written, and of copies inside.

    Raises:
        TypeError: the facts of a device that has no such costs, which is a CPU.
    """
    if not isinstance(facts, GpuFacts):
        raise TypeError(f"calls are counted in launches on GPUs; these are facts of {type(facts).__name__}")
    c = costs_of(facts).library
    graph = problem.graph
    (output,), (format_,) = graph.outputs[:1], problem.output_formats[:1]
    if kind is Kind.CONVERT:
        return _copy_us(graph, output, c) + 2 * graph.type_of(output).nbytes / c.moved
    names = [step.target.split(".")[1] for step in call.run]
    cost = sum(graph.type_of(node).nbytes for node in (*graph.inputs, *graph.outputs)) / c.moved
    cost += c.launch_us * max(1, sum(name not in _VIEWS for name in names))
    strides, copied = _strides(problem)
    cost += sum(_copy_us(graph, node, c) for node in copied)
    if all(name in _VIEWS for name in names):
        return cost + _copy_us(graph, output, c) - c.launch_us  # the copy is the call
    read = _operands(graph)
    last = any(_is_last(graph, x, strides[x]) for x in read)
    if any(name.startswith(_ROW_INSIDE) for name in names):
        cost += sum(_copy_us(graph, x, c) for x in read if _is_last(graph, x, strides[x]))
        last = False
    for node, n in enumerate(graph.nodes):
        if n.prim is Prim.CONV and not last and n.type.dtype in _HALVES:
            whole = cast("a.ConvAttrs", n.attrs).groups < n.type.shape[1]
            moved = sum(graph.type_of(x).nbytes for x in (n.inputs[0], node))
            cost += (2 * c.launch_us if whole else 0.0) + moved / c.turned_by_cudnn
        if n.prim is Prim.MATMUL and n.type.rank > 3:
            cost += sum(_copy_us(graph, x, c) for x in n.inputs if x in strides and not _merges(graph, x, strides[x]))
    if any(name.startswith("upsample_bilinear") for name in names) and not last:
        cost += graph.type_of(output).nbytes / c.row_upsample
    if last and any(name.startswith("max_pool") for name in names):
        cost += c.last_pool_us * max(
            math.prod(n.attrs.kernel) for n in graph.nodes if isinstance(n.attrs, a.WindowAttrs)
        )
    several = len(formats_of(graph.type_of(output))) > 1
    if (
        several
        and len(graph.type_of(output).shape) == 4
        and (format_ is Format.LAST) is not last
        and any(graph.type_of(x).rank == 4 and len(formats_of(graph.type_of(x))) > 1 for x in read)
    ):
        cost += graph.type_of(output).nbytes / c.turned + (0.0 if call.out_variant else c.launch_us)
    return cost + sum(_copy_us(graph, x, c) for x in read if _is_transposed(graph, x, strides[x]))


def _copy_us(graph: Graph, node: NodeId, c: Library) -> float:
    return c.launch_us + graph.type_of(node).nbytes / c.turned


def _operands(graph: Graph) -> list[NodeId]:
    """What the primitives that are no views read: inputs and views of them, without weights."""
    found: dict[NodeId, None] = {}
    for n in graph.nodes:
        if n.prim not in FREE and n.prim is not Prim.INPUT and not _is_view(n.prim):
            found.update(dict.fromkeys(i for i in n.inputs if _source(graph, i) is not None))
    return list(found)


def _is_view(prim: Prim) -> bool:
    return prim in (Prim.TRANSPOSE, Prim.SLICE)


def _source(graph: Graph, node: NodeId) -> NodeId | None:
    """The input that a value is a view of; None for a weight, and for what is computed."""
    n = graph.nodes[node]
    while n.prim in (Prim.TRANSPOSE, Prim.SLICE, Prim.RESHAPE):
        node = n.inputs[0]
        n = graph.nodes[node]
    return None if n.prim is not Prim.INPUT or cast("a.InputAttrs", n.attrs).is_weight else node


def _strides(problem: Problem) -> tuple[dict[NodeId, Strides], list[NodeId]]:
    """In elements, of inputs and of their views; and the views that are none: their elements are copied."""
    graph = problem.graph
    found = {n: f.strides(graph.type_of(n).shape) for n, f in zip(graph.inputs, problem.input_formats, strict=True)}
    copied = []
    for node, n in enumerate(graph.nodes):
        if n.prim in (Prim.TRANSPOSE, Prim.SLICE, Prim.RESHAPE) and n.inputs[0] in found:
            before = found[n.inputs[0]]
            if isinstance(n.attrs, a.TransposeAttrs):
                found[node] = tuple(before[k] for k in n.attrs.perm)
            elif isinstance(n.attrs, a.SliceAttrs):
                found[node] = tuple(s * step for s, step in zip(before, n.attrs.steps, strict=True))
            else:
                seen = viewed(graph.type_of(n.inputs[0]).shape, before, n.type.shape)
                if seen is None:
                    copied.append(node)
                found[node] = Format.ROW.strides(n.type.shape) if seen is None else seen
    return found, copied


def viewed(shape: Sequence[int], strides: Strides, wanted: Sequence[int]) -> Strides | None:
    """Strides of the same elements in another shape; None where only a copy has that."""
    if 0 in shape:
        return Format.ROW.strides(tuple(wanted))
    runs: list[tuple[int, int]] = []  # (elements, distance) of dimensions that follow each other
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * s:
            runs[-1] = runs[-1][0] * n, s
        else:
            runs.append((n, s))
    found: list[int] = []
    left, distance = 1, 1
    for n in reversed(wanted):
        if n == 1:
            found.append(distance)
            continue
        if left == 1:
            left, distance = runs.pop() if runs else (1, 1)
        if left % n:
            return None
        found.append(distance)
        left, distance = left // n, distance * n
    return tuple(reversed(found))


def _is_last(graph: Graph, node: NodeId, strides: Strides) -> bool:
    shape = graph.type_of(node).shape
    return len(shape) == 4 and shape[1] > 1 and math.prod(shape[2:]) > 1 and strides[1] == 1


def _merges(graph: Graph, node: NodeId, strides: Strides) -> bool:
    """Whether all dimensions but the last two are one, which is what batched products take."""
    shape = graph.type_of(node).shape
    return viewed(shape, strides, (math.prod(shape[:-2]), *shape[-2:])) is not None


def _is_transposed(graph: Graph, node: NodeId, strides: Strides) -> bool:
    """Whether neighbours lie apart, in what is no image and no operand of a product."""
    shape = graph.type_of(node).shape
    if any(CATEGORY[n.prim] is Category.LINEAR and node in n.inputs for n in graph.nodes):
        return False
    wide = [s for n, s in zip(shape, strides, strict=True) if n > 1]
    return bool(wide) and wide[-1] != 1 and not _is_last(graph, node, strides)
