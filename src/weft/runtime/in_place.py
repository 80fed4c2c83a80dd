"""Which results of a plan a caller's tensor may hold itself, also one that the plan reads: new weights in place of old.

A result is then written where its last readers are done with what lay there: by a later step, or by the step that reads
it, if each thread has read all that it writes before it does (`overwrites`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol, final, runtime_checkable

import torch

from weft.generate.library.execute import TORCH_DTYPE
from weft.ir.attrs import ReduceAttrs
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.kernels.formats import Format
from weft.kernels.plan import Plan, Step
from weft.kernels.source import CudaSource, KernelSource
from weft.runtime.lanes import Order, order_of
from weft.runtime.values import Key, Values, survey

InPlace = Callable[
    [Mapping[int, torch.Tensor], Sequence[tuple[int, torch.Tensor]]], Callable[..., Sequence[torch.Tensor]]
]
"""From inputs by position and (output, tensor that gets it): what a call then runs."""


@final
@dataclass(frozen=True, slots=True)
class Baking:
    """An `InPlace` for what may hold numbers, so that a graph can be recorded; called itself it holds none."""

    inputs: frozenset[int]
    """By position: their values are such numbers."""
    held: Callable[[Mapping[int, torch.Tensor]], InPlace]
    """From the values of these inputs now: what holds them, and is right while they are the same."""
    read: InPlace
    """What reads them at each call, and is slower."""

    def __call__(
        self, bound: Mapping[int, torch.Tensor], written: Sequence[tuple[int, torch.Tensor]]
    ) -> Callable[..., Sequence[torch.Tensor]]:
        """As `InPlace`."""
        return self.read(bound, written)


@runtime_checkable
class Placed(Protocol):
    """What writes into tensors that stay where they are, and can do without: before it is recorded."""

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """The results, those of these tensors in them."""

    def dry(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """The results; nothing that is given is written."""


@runtime_checkable
class Placing(Protocol):
    """A model that writes in place by itself."""

    @property
    def in_place(self) -> InPlace:
        """What makes a `Placed` of it."""


NOTHING_BOUND: Mapping[int, torch.Tensor] = MappingProxyType({})
_BODY = 'extern "C" __global__'
_STORE = re.compile(r"\bw_st\w*\s*(?:<[^>]*>)?\s*\(")
_SHARED = 1 << 20
"""Bytes of a value from which on it is worth asking whether a result may lie in its place."""
_PART = re.compile(r"^\s*const w_index t = .*\brole\.thread\(\);$", re.MULTILINE)
"""A part of a kernel's elementwise loops begins, in a range of blocks of its own: each thread has its elements."""
_INNERMOST = re.compile(r"{([^{}]*)}")
_OVERLAPPING = re.compile(r"^\s*x\d+ = \d+;$", re.MULTILINE)
"""The last vector of a loop of C++ begins before the end of the one before."""


def copies(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], None]]:
    """Calls that copy values into tensors, (tensor, value) each: one for each type.

    Of several types in one call the framework copies tensor by tensor on a GPU.
    """
    alike: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in pairs:
        targets, values = alike.setdefault(target.dtype, ([], []))
        targets.append(target)
        values.append(value)
    return [partial(torch._foreach_copy_, targets, values) for targets, values in alike.values()]


def overwrites(graph: Graph, step: Step, source: NodeId, result: NodeId) -> bool:
    """Whether a step gives the same `result` where that lies in the memory of its operand `source`.

    So it is for elementwise loops that store every element once, where all that depends on the operand has its shape,
    and an element is read before it is written; and for kernels of which that is declared.
    """
    kernel = step.kernel
    if not isinstance(kernel, CudaSource | KernelSource) or not _is_elementwise(graph, step, source, result):
        return False
    slots = [k for k, key in enumerate(step.inputs) if key == (source, Format.ROW)]
    place = step.outputs.index((result, Format.ROW))
    if isinstance(kernel, CudaSource):
        return _may_alias(kernel, slots, place) or _cuda_reads_first(kernel, slots, place)
    return _cpp_reads_first(kernel, slots, place)


def places_of(graph: Graph, plan: Plan, values: Values, order: Order, within: Container[Key]) -> dict[Key, Key]:
    """Results that may lie where an operand lay that nobody reads behind their step: each with that operand.

    Of elementwise loops, and of loops over rows that have read a row before they write it: logits and their gradient.

    Args:
        graph: that of the plan.
        plan: steps.
        values: of the plan.
        order: which steps have ended when another begins.
        within: values whose places may be chosen, none of them a result of the plan.
    """
    found: dict[Key, Key] = {}
    taken: set[Key] = set()
    for i, step in enumerate(plan.steps):
        if not isinstance(step.kernel, CudaSource):
            continue
        dying = [
            key
            for key in dict.fromkeys(step.inputs)
            if key in within
            and graph.type_of(key[0]).nbytes >= _SHARED
            and all(u == i or order.before[i] >> u & 1 for u in values.users(key))
        ]
        for result in step.outputs if dying else ():
            if result not in within or values.writers[result] != [i]:
                continue
            for key in dying:
                if key not in taken and key[1] is result[1] and _takes_the_place(graph, step, key, result):
                    found[result] = key
                    taken.add(key)
                    break
    return found


def _takes_the_place(graph: Graph, step: Step, source: Key, result: Key) -> bool:
    """As `overwrites`, of values in any format, by kernels for a GPU."""
    kernel, t = step.kernel, graph.type_of(source[0])
    assert isinstance(kernel, CudaSource)
    slots = [k for k, key in enumerate(step.inputs) if key[0] == source[0]]
    if len(slots) != 1 or t.shape != graph.type_of(result[0]).shape:
        return False
    if t.dtype.itemsize != graph.type_of(result[0]).dtype.itemsize:
        return False
    reach = _reach(graph, step, source[0], result[0])
    if reach is None:
        return False
    place = step.outputs.index(result)
    if reach == "element":
        return _may_alias(kernel, slots, place) or _cuda_reads_first(kernel, slots, place)
    return source[1] is Format.ROW and _cuda_reads_rows_first(kernel, slots)


def _reach(graph: Graph, step: Step, source: NodeId, result: NodeId) -> str | None:
    """What an element of an operand decides of a step's result: that `element`, or its `row` along the last axis.

    None: more, or it cannot be told, as members may read one value under several numbers.
    """
    shape = graph.type_of(result).shape
    members, named = set(step.members), {node for node, _ in step.inputs}
    statistics = (shape[:-1], (*shape[:-1], 1))
    dependent, reach = {source}, "element"
    if result not in members or not shape:
        return None
    for m in sorted(members):
        node, depends = graph.nodes[m], False
        for x in node.inputs:
            seen = [x]
            while seen[-1] not in members and seen[-1] not in named and graph.nodes[seen[-1]].inputs:
                if graph.nodes[seen[-1]].prim not in FREE:
                    return None
                seen.append(graph.nodes[seen[-1]].inputs[0])
            if graph.nodes[seen[-1]].prim is Prim.INPUT and seen[-1] not in named:
                return None
            if seen[-1] in dependent:
                depends = True
                shapes = [graph.type_of(v).shape for v in seen]
                if any(s != shape and s not in statistics for s in shapes):
                    return None
                # what has been broadcast is not a statistic again
                if any(a in statistics and b == shape and shape not in statistics for a, b in pairwise(shapes)):
                    return None
        if not depends:
            continue
        if isinstance(node.attrs, ReduceAttrs) and CATEGORY[node.prim] is Category.REDUCE:
            if node.attrs.axes != (len(shape) - 1,) or graph.type_of(node.inputs[0]).shape != shape:
                return None
            reach = "row"
        elif CATEGORY[node.prim] is not Category.ELEMENTWISE:
            return None
        if node.type.shape != shape and node.type.shape not in statistics:
            return None
        dependent.add(m)
    return reach


def _is_elementwise(graph: Graph, step: Step, source: NodeId, result: NodeId) -> bool:
    """Whether all of the step that depends on the operand has its shape, and the result elements as large."""
    t, shape = graph.type_of(source), graph.type_of(result).shape
    if t.shape != shape or t.dtype.itemsize != graph.type_of(result).dtype.itemsize:
        return False
    dependent, members = {source}, set(step.members)
    for m, node in enumerate(graph.nodes):
        if dependent.isdisjoint(node.inputs):
            continue
        if node.prim in FREE:
            dependent.add(m)  # a member may read through it
            continue
        if m not in members:
            continue
        if CATEGORY[node.prim] is not Category.ELEMENTWISE or node.type.shape != shape:
            return False
        dependent.add(m)
    return True


def _may_alias(kernel: CudaSource, slots: Sequence[int], place: int) -> bool:
    """Whether it is declared that a result may lie where an operand lies, in each position where that is given."""
    return bool(slots) and all((k, place) in kernel.input_output_aliases for k in slots)


def _cuda_reads_first(kernel: CudaSource, slots: Sequence[int], place: int) -> bool:
    """Whether each thread of one launch has read its elements of the operand before it writes, and nobody else does.

    Elementwise loops stand in parts, each with a range of blocks, whose threads store an element once: those beyond the
    end store nothing, whatever they have read. Every part that reads the operand has to write the result, behind that:
    what another one reads may have been written. What stands before the parts is read by all threads.
    """
    if len(kernel.launches) != 1 or kernel.workspace_bytes or kernel.state_bytes:
        return False
    form, (launch,) = dict(kernel.schedule.params), kernel.launches
    if "template" in form or form.get("tile") or "items" not in form or launch.cluster != (1, 1, 1):
        return False
    if launch.grid[1:] != (1, 1):
        return False
    head, _, body = kernel.text.rpartition(_BODY)
    body = body[body.find("{") :]
    before, *parts = (body[i:j] for i, j in pairwise([0, *(m.start() for m in _PART.finditer(body)), len(body)]))
    if not head or not parts or "for (" in body or _STORE.search(before):
        return False
    read = re.compile("|".join(rf"\bin{k}\b" for k in slots))
    written = re.compile(rf"\bout{place}\b")
    for part in parts:
        reads, store = [m.start() for m in read.finditer(part)], _STORE.search(part)
        if reads and not (store is not None and written.search(part) and max(reads) < store.start()):
            return False
    own = [part for part in parts if written.search(part)]
    return bool(slots) and not read.search(before) and any(read.search(part) for part in own)


def _cuda_reads_rows_first(kernel: CudaSource, slots: Sequence[int]) -> bool:
    """Whether all that shares a row has read the operand's before one of them writes: what is read stays in registers.

    Blocks, or clusters of them, have whole rows, none of which another one has.
    """
    if len(kernel.launches) != 1 or kernel.workspace_bytes or kernel.state_bytes:
        return False
    form, (launch,) = dict(kernel.schedule.params), kernel.launches
    if "template" in form or "items" not in form or not {"cross_cta", "num_splits"}.isdisjoint(form):
        return False
    if form.get("tile") or form.get("columns") or form.get("spread") or launch.grid[1:] != (1, 1):
        return False
    head, _, body = kernel.text.rpartition(_BODY)
    body = body[body.find("{") :]
    reads = [m.start() for k in slots for m in re.finditer(rf"\bin{k}\b", body)]
    stores = [m.start() for m in _STORE.finditer(body)]
    waits = body.find("role.sync();" if launch.cluster == (1, 1, 1) else "w_cluster_sync();")
    return bool(head and reads and stores) and max(reads) < waits < min(stores)


def _cpp_reads_first(kernel: KernelSource, slots: Sequence[int], place: int) -> bool:
    """Whether each turn of the innermost loops reads the operand's elements and writes the result's, in this order.

    No loop then reads what an earlier one wrote, and no vector what the one before it wrote.
    """
    form = dict(kernel.schedule.params)
    _, found, body = kernel.text.partition(f"static void {kernel.entry}_body(")
    if "template" in form or "rows" not in form or not found or kernel.workspace_bytes or "#pragma omp barrier" in body:
        return False
    # behind the declarations, of which those of outputs come last
    declared, end = body.find(f"out{place} = "), body.find(f'extern "C" void {kernel.entry}(')
    if not slots or not 0 <= declared < end or _OVERLAPPING.search(body):
        return False
    body = body[body.find("\n", declared) : end]
    read = re.compile("|".join(rf"\bin{k}\b" for k in slots))
    written = re.compile(rf"\bout{place}\b")
    for block in _INNERMOST.findall(body):
        reads, writes = ([m.start() for m in x.finditer(block)] for x in (read, written))
        if reads and writes and max(reads) > min(writes):
            return False
        if bool(reads) != bool(writes):
            return False
    around = _INNERMOST.sub("", body)
    return written.search(body) is not None and not read.search(around) and not written.search(around)


def aliasing(kernel: KernelSource) -> KernelSource:
    """The same kernel, whose results may lie in the memory of operands: its compiler is told of it."""
    return replace(kernel, text=kernel.text.replace("__restrict ", ""))


def written_last(
    graph: Graph,
    plan: Plan,
    values: Values,
    written: Sequence[tuple[int, torch.Tensor]],
    bound: Mapping[int, torch.Tensor],
) -> Plan:
    """The plan with each step whose results nobody reads behind the last reader of what they are written over.

    An update of weights that computes the new momentum for itself reads the old one; that of the momentum waits for it.
    """
    places: dict[int, list[NodeId]] = {}
    for k, x in bound.items():
        places.setdefault(x.data_ptr(), []).append(graph.inputs[k])
    over: dict[int, set[NodeId]] = {}
    for output, target in written:
        key = values.finals[output], Format.ROW
        for writer in values.writers.get(key, ()):
            over.setdefault(writer, set()).update(places.get(target.data_ptr(), ()))
    at = [float(i) for i in range(len(plan.steps))]
    for writer, operands in over.items():
        if any(values.readers.get(key) for key in plan.steps[writer].outputs):
            continue  # a step that is waited for stays
        readers = {r for n in operands for r in values.readers.get((n, Format.ROW), ()) if r != writer}
        at[writer] = max([at[writer], *(r + 0.5 for r in readers)])
    order = sorted(range(len(at)), key=lambda i: (at[i], i))
    return plan if order == list(range(len(at))) else replace(plan, steps=tuple(plan.steps[i] for i in order))


@dataclass(frozen=True, slots=True)
class Ending:
    """A plan for a processor whose last steps alone write tensors of the caller's: no Python runs between them."""

    plan: Plan
    values: Values
    first: int
    """Of these steps, by position."""
    held: Mapping[int, torch.Tensor]
    """By the position of an output: the caller's tensor that it is written into."""
    over: frozenset[int]
    """Steps that write over what they read."""


def ending(
    graph: Graph,
    plan: Plan,
    values: Values,
    written: Sequence[tuple[int, torch.Tensor]],
    bound: Mapping[int, torch.Tensor],
    alignment: int,
) -> Ending:
    """Put steps whose results nobody else reads at the end, and say which of these the caller's tensors hold.

    Args: as for `held_by_caller`.
    """
    plan = written_last(graph, plan, values, written, bound)
    values = survey(graph, plan)
    ends = zip(graph.outputs, values.finals, strict=True)
    other = {end for node, end in ends if not _is_that(graph, node, end)}
    own = {(values.finals[k], Format.ROW) for k, _ in written if values.finals[k] not in other}

    def is_last(step: Step) -> bool:
        unread = all(len(values.writers[key]) == 1 and not values.readers.get(key) for key in step.outputs)
        return isinstance(step.kernel, KernelSource) and unread and own.issuperset(step.outputs)

    steps = sorted(plan.steps, key=is_last)
    first = len(steps) - sum(map(is_last, steps))
    plan = replace(plan, steps=tuple(steps))
    values = survey(graph, plan)
    once = [(k, x) for k, x in written if values.finals.count(values.finals[k]) == 1]
    found = held_by_caller(graph, plan, values, order_of(plan, values, 1), once, bound, alignment)
    held, over = {}, set()
    for key, (at, target) in found.items():
        (writer,) = values.writers[key]
        if writer < first:
            continue
        held[once[at][0]] = target.detach()
        read = [x for k, x in bound.items() if (graph.inputs[k], Format.ROW) in plan.steps[writer].inputs]
        if any(_overlap(target, x) for x in read):
            over.add(writer)
    return Ending(plan, values, first, held, frozenset(over))


def held_by_caller(
    graph: Graph,
    plan: Plan,
    values: Values,
    order: Order,
    written: Sequence[tuple[int, torch.Tensor]],
    bound: Mapping[int, torch.Tensor],
    alignment: int,
) -> dict[Key, tuple[int, torch.Tensor]]:
    """Stored values that may lie in the tensors that are to get them: the position in `written`, and the tensor.

    Args:
        graph: that of the plan.
        plan: steps.
        values: of the plan.
        order: which steps have ended when another begins.
        written: outputs by position, and what gets them.
        bound: inputs by position that are read where they lie.
        alignment: of the memory of values, in bytes.
    """
    found: dict[Key, tuple[int, torch.Tensor]] = {}
    taken: list[torch.Tensor] = []
    for at, (output, target) in enumerate(written):
        node, end = graph.outputs[output], values.finals[output]
        key = end, Format.ROW
        t = graph.type_of(end)
        if key in found or len(values.writers.get(key, ())) != 1 or not _is_that(graph, node, end):
            continue
        if target.dtype is not TORCH_DTYPE[t.dtype] or target.nbytes != t.nbytes or not t.nbytes:
            continue
        if not target.is_contiguous() or target.data_ptr() % alignment or any(_overlap(target, x) for x in taken):
            continue
        (writer,) = values.writers[key]
        if not isinstance(plan.steps[writer].kernel, CudaSource | KernelSource):
            continue  # what a library call does with its operands, nobody says
        if all(
            _is_read_before(graph, plan, values, order, graph.inputs[k], x, target, writer, end)
            for k, x in bound.items()
            if _overlap(target, x)
        ):
            found[key] = at, target
            taken.append(target)
    return found


def _is_read_before(
    graph: Graph,
    plan: Plan,
    values: Values,
    order: Order,
    operand: NodeId,
    held: torch.Tensor,
    target: torch.Tensor,
    writer: int,
    result: NodeId,
) -> bool:
    """Whether nobody reads what lies in the tensor once the writer writes there."""
    for reader in values.readers.get((operand, Format.ROW), ()):
        if reader != writer:
            if not order.before[writer] >> reader & 1:
                return False
        elif held.data_ptr() != target.data_ptr() or not overwrites(graph, plan.steps[writer], operand, result):
            return False
    return operand not in values.finals


def is_stored(graph: Graph, values: Values, output: int) -> bool:
    """Whether an output, by position, has the elements of a value that a step stores, in their order."""
    end = values.finals[output]
    return (end, Format.ROW) in values.first_write and _is_that(graph, graph.outputs[output], end)


def _is_that(graph: Graph, node: NodeId, end: NodeId) -> bool:
    """Whether an output has the elements of a stored value in their order."""
    while node != end and graph.nodes[node].prim is Prim.RESHAPE:
        node = graph.nodes[node].inputs[0]
    return node == end


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of dense tensors; of others all that lies between their first and last element counts."""
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes
    span = sum((n - 1) * s for n, s in zip(other.shape, other.stride(), strict=True)) + 1 if other.numel() else 0
    return begin < other.data_ptr() + span * other.element_size() and other.data_ptr() < end
