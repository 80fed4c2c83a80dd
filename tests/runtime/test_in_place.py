"""Results in the caller's own tensors: what a kernel may do to its operand, and when nobody reads that any more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.cases.embedding_gradient import updated_problem
from tests.runtime.plans import library_plan

from weft.device.cuda.facts import profile
from weft.generate.cuda.generator import CudaGenerator
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.plan import Plan, Step
from weft.kernels.source import CudaSource
from weft.runtime.in_place import held_by_caller, overwrites, places_of, written_last
from weft.runtime.lanes import order_of
from weft.runtime.values import survey

F32 = DType.F32
SIZE = 1 << 20


def momentum(size: int = SIZE) -> Graph:
    """(weights, gradient, momentum, rate) -> new momentum, new weights."""
    b = GraphBuilder()
    w, g, m = (b.input(TensorType(F32, (size,))) for _ in range(3))
    rate = b.input(TensorType(F32, ()))
    new = b.apply(Prim.ADD, b.apply(Prim.MUL, m, b.scalar(0.9, F32)), g)
    return b.build([new, b.apply(Prim.SUB, w, b.apply(Prim.MUL, new, rate))])


def kernels(graph: Graph) -> list[CudaSource]:
    rows = tuple(Format.ROW for _ in graph.inputs), tuple(Format.ROW for _ in graph.outputs)
    problem = Problem(graph, str(graph), *rows)
    generator = CudaGenerator()
    schedules = generator.schedules(problem, profile("h200"))
    assert not isinstance(schedules, Declined)
    return [x for s in schedules if isinstance(x := generator.emit(problem, s), CudaSource)]


def step_of(graph: Graph, kernel: CudaSource) -> Step:
    members = tuple(i for i, n in enumerate(graph.nodes) if n.prim not in (Prim.INPUT, Prim.CONSTANT))
    inputs, outputs = (tuple((n, Format.ROW) for n in nodes) for nodes in (graph.inputs, graph.outputs))
    return Step(kernel, inputs, outputs, members, Kind.GROUP, "", 1.0)


@pytest.mark.parametrize("size", [SIZE, SIZE + 4, 1000, 128])
def test_an_update_may_overwrite_what_it_reads(size: int) -> None:
    """Threads beyond the end read the last element, or none, and store nothing."""
    graph = momentum(size)
    w, g, m, _ = graph.inputs
    new, weights = graph.outputs
    found = kernels(graph)
    assert found
    for kernel in found:
        step = step_of(graph, kernel)
        assert overwrites(graph, step, w, weights) and overwrites(graph, step, m, new)
        assert overwrites(graph, step, g, new)


@pytest.mark.parametrize("sizes", [(1 << 14, 1 << 12), (1000, 128)])
def test_updates_in_one_launch_overwrite_what_they_alone_read(sizes: tuple[int, int]) -> None:
    """Each has blocks of its own: what another one reads may be written before it does."""

    def updates(*, shared: bool) -> Graph:
        b = GraphBuilder()
        results = []
        for size in sizes:
            w, g = (b.input(TensorType(F32, (size,))) for _ in range(2))
            results += [b.apply(Prim.SUB, w, g)]
        if shared:  # another number of elements: in a part of its own
            first = b.add(Prim.SLICE, 0, attrs=a.SliceAttrs((0,), (96,), (1,)))
            results += [b.apply(Prim.EXP, first)]
        return b.build(results)

    for graph, alone in ((updates(shared=False), True), (updates(shared=True), False)):
        found = kernels(graph)
        assert found
        for kernel in found:
            step = step_of(graph, kernel)
            assert overwrites(graph, step, graph.inputs[0], graph.outputs[0]) == alone
            assert overwrites(graph, step, graph.inputs[2], graph.outputs[1])


def test_what_other_elements_depend_on_stays() -> None:
    b = GraphBuilder()
    x, y = (b.input(TensorType(F32, (1024, 1024))) for _ in range(2))
    turned = b.add(Prim.TRANSPOSE, x, attrs=a.TransposeAttrs((1, 0)))
    graph = b.build([b.apply(Prim.ADD, turned, y)])
    b = GraphBuilder()
    x, y = b.input(TensorType(F32, (1024,))), b.input(TensorType(F32, (1024, 1024)))
    wide = b.build([b.apply(Prim.ADD, b.broadcast(b.reshape(x, (1, 1024)), (1024, 1024)), y)])
    for given in (graph, wide):
        found = kernels(given)
        assert found
        for kernel in found:
            assert not overwrites(given, step_of(given, kernel), given.inputs[0], given.outputs[0])


def test_a_read_behind_a_write_is_seen() -> None:
    graph = momentum()
    kernel = next(k for k in kernels(graph) if overwrites(graph, step_of(graph, k), graph.inputs[0], graph.outputs[1]))
    for text in (
        kernel.text.rstrip().rstrip("}") + " w_ld(in0 + 1); }",
        kernel.text.replace("role.pdl_trigger();", "for (int i = 0; i < 2; ++i) {}"),
        kernel.text.replace("role.pdl_trigger();", "const w_f32 e0 = w_ld(in0 + 0);"),  # by all threads
        kernel.text.replace("const w_index t = ", "const w_index u = "),
    ):
        changed = replace(kernel, text=text)
        assert not overwrites(graph, step_of(graph, changed), graph.inputs[0], graph.outputs[1])
    for launch in (replace(kernel.launches[0], cluster=(2, 1, 1)), replace(kernel.launches[0], grid=(512, 2, 1))):
        changed = replace(kernel, launches=(launch,))
        assert not overwrites(graph, step_of(graph, changed), graph.inputs[0], graph.outputs[1])
    assert not overwrites(graph, step_of(graph, replace(kernel, workspace_bytes=4)), graph.inputs[0], graph.outputs[1])


def test_an_embedding_table_is_updated_where_it_lies() -> None:
    """By a kernel of two launches that declares it: what lies elsewhere, and the gradient that is read by row, stay."""
    for rule, tables in (("sgd", (2, 3)), ("adam", (2, 3, 4))):
        graph = updated_problem((64,), 64, 16, rule=rule).graph
        found = kernels(graph)
        assert found and all(len(k.launches) == 2 and k.workspace_bytes for k in found)
        for kernel in found:
            step = step_of(graph, kernel)
            for result in graph.outputs:
                assert all(overwrites(graph, step, graph.inputs[k], result) for k in tables)
                assert not overwrites(graph, step, graph.inputs[0], result)
            undeclared = step_of(graph, replace(kernel, input_output_aliases=()))
            assert not overwrites(graph, undeclared, graph.inputs[2], graph.outputs[0])
            others = step_of(graph, replace(kernel, input_output_aliases=((2, 1),)))
            assert [overwrites(graph, others, graph.inputs[2], o) for o in graph.outputs[:2]] == [False, True]


def test_a_table_that_is_also_read_by_row_stays() -> None:
    """As many rows as indices, and the gradient by index is an operand in its own place, too."""
    problem = updated_problem((64,), 64, 16)
    graph = problem.graph
    dy, _, weight, *_ = graph.inputs
    nodes = tuple(
        replace(n, inputs=tuple(dy if n.prim is not Prim.OPAQUE and i == weight else i for i in n.inputs))
        for n in graph.nodes
    )
    graph = replace(graph, nodes=nodes)
    found = kernels(graph)
    assert found
    for kernel in found:
        assert {k for k, _ in kernel.input_output_aliases} == {3}
        step = step_of(graph, kernel)
        assert not any(overwrites(graph, step, dy, o) for o in graph.outputs)
        assert overwrites(graph, step, graph.inputs[3], graph.outputs[0])


@pytest.mark.parametrize("late", [False, True])
def test_a_table_is_updated_behind_who_looks_it_up(late: bool) -> None:
    """As in a training step, whose results are written into the table's and the momentum's own tensors."""
    inner = updated_problem((64,), 64, 16).graph
    b = GraphBuilder()
    given = [b.input(inner.type_of(i)) for i in inner.inputs]
    read = b.add(Prim.GATHER, given[2], given[1], attrs=a.GatherAttrs(0))
    moved = dict(zip(inner.inputs, given, strict=True))
    for i, n in enumerate(inner.nodes):
        if n.prim is not Prim.INPUT:
            moved[i] = b.add(n.prim, *(moved[j] for j in n.inputs), attrs=n.attrs)
    looked = b.apply(Prim.TANH, read)
    graph = b.build([*(moved[o] for o in inner.outputs), looked])
    free = (Prim.INPUT, Prim.CONSTANT, Prim.BROADCAST)
    members = tuple(moved[i] for i, n in enumerate(inner.nodes) if n.prim not in free)
    inputs, outputs = (tuple((moved[n], Format.ROW) for n in nodes) for nodes in (inner.inputs, inner.outputs))
    update = Step(kernels(inner)[0], inputs, outputs, members, Kind.GROUP, "", 1.0)
    others = [s for s in library_plan(graph).steps if s.outputs[0][0] in (read, looked)]
    plan = Plan("step", (*others, update) if late else (update, *others))
    values = survey(graph, plan)
    table, moment = lying(64 * 16).reshape(64, 16), lying(64 * 16).reshape(64, 16)
    bound, written = {2: table, 3: moment}, [(0, moment), (1, table)]
    held = held_by_caller(graph, plan, values, order_of(plan, values, 1), written, bound, 256)
    assert {key[0] for key in held} == {*graph.outputs[: 2 if late else 1]}
    ordered = written_last(graph, plan, values, written, bound)
    values = survey(graph, ordered)
    assert len(held_by_caller(graph, ordered, values, order_of(ordered, values, 1), written, bound, 256)) == 2


def _two_steps(*, late: bool) -> tuple[Graph, Plan]:
    """An update by one kernel, and a reader of the old weights before it or behind it."""
    b = GraphBuilder()
    w, g = (b.input(TensorType(F32, (SIZE,))) for _ in range(2))
    new, used = b.apply(Prim.SUB, w, g), b.apply(Prim.TANH, w)
    graph = b.build([new, used])
    plan = library_plan(graph)
    inner = GraphBuilder()
    x, y = (inner.input(TensorType(F32, (SIZE,))) for _ in range(2))
    alone = inner.build([inner.apply(Prim.SUB, x, y)])
    kernel = next(k for k in kernels(alone) if overwrites(alone, step_of(alone, k), x, alone.outputs[0]))
    steps = [replace(s, kernel=kernel) if s.outputs[0][0] == new else s for s in plan.steps]
    steps.sort(key=lambda s: (s.outputs[0][0] == new) == late)
    return graph, replace(plan, steps=tuple(steps))


def lying(size: int, at: int = 0) -> torch.Tensor:
    room = torch.zeros(4 * size + 1024, dtype=torch.uint8)
    start = -room.data_ptr() % 256 + at
    return room[start : start + 4 * size].view(torch.float32)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("branches", [1, 2])
def test_nobody_may_read_what_was_overwritten(branches: int, late: bool) -> None:
    """`late`: the update is the last step, which in several lanes says nothing about the other one's end."""
    graph, plan = _two_steps(late=late)
    values = survey(graph, plan)
    order = order_of(plan, values, branches)
    w, apart = lying(SIZE), lying(SIZE)
    key = graph.outputs[0], Format.ROW

    def found(bound: dict[int, torch.Tensor], target: torch.Tensor) -> bool:
        held = held_by_caller(graph, plan, values, order, [(0, target)], bound, 256)
        assert set(held) <= {key}
        return key in held

    assert found({0: w}, w) == (late and branches == 1)
    assert found({}, w), "what is copied in is read elsewhere"
    assert found({0: w}, apart)
    assert not found({0: w}, lying(SIZE, 4)), "it has to be aligned"
    assert not found({0: w}, w.double())
    assert not found({0: w}, w.reshape(1024, 1024).t())
    whole = lying(2 * SIZE)
    assert not found({0: whole[:SIZE]}, whole[256 : 256 + SIZE]), "part of an operand"
    assert found({0: whole[:SIZE]}, whole[SIZE:])


def test_one_tensor_gets_one_result_without_a_copy() -> None:
    graph, plan = _two_steps(late=True)
    values = survey(graph, plan)
    target = lying(SIZE)
    written = [(0, target), (0, lying(SIZE)), (1, target)]
    held = held_by_caller(graph, plan, values, order_of(plan, values, 1), written, {}, 256)
    assert {key[0]: at for key, (at, _) in held.items()} == {graph.outputs[0]: 0}


@pytest.mark.parametrize("branches", [1, 2])
def test_an_update_waits_for_who_reads_the_old_value(branches: int) -> None:
    graph, early = _two_steps(late=False)
    w = lying(SIZE)
    plan = written_last(graph, early, survey(graph, early), [(0, w)], {0: w})
    assert [s.outputs for s in plan.steps] == [s.outputs for s in reversed(early.steps)]
    values = survey(graph, plan)
    held = held_by_caller(graph, plan, values, order_of(plan, values, branches), [(0, w)], {0: w}, 256)
    assert len(held) == (branches == 1)
    for written, bound in (([(0, lying(SIZE))], {0: w}), ([(0, w)], {}), ([], {0: w})):
        assert written_last(graph, early, survey(graph, early), written, bound) is early


def test_a_step_that_is_waited_for_stays() -> None:
    b = GraphBuilder()
    w, g = (b.input(TensorType(F32, (SIZE,))) for _ in range(2))
    new = b.apply(Prim.SUB, w, g)
    graph = b.build([new, b.apply(Prim.TANH, new), b.apply(Prim.EXP, w)])
    plan, x = library_plan(graph), lying(SIZE)
    assert written_last(graph, plan, survey(graph, plan), [(0, x)], {0: x}) is plan


ROWS, ACROSS = 512, 4096


def _chain(*, axis: int = 1, again: bool = False) -> tuple[Graph, tuple[NodeId, NodeId, NodeId]]:
    """tanh, softmax over an axis, exp: a step each; `again`: something else reads what softmax does, behind it."""
    b = GraphBuilder()
    x = b.input(TensorType(F32, (ROWS, ACROSS)))
    first = b.apply(Prim.TANH, x)
    e = b.apply(Prim.EXP, first)
    total = b.add(Prim.REDUCE_SUM, e, attrs=a.ReduceAttrs((axis,)))
    second = b.apply(Prim.DIV, e, total)
    third = b.apply(Prim.EXP, second)
    results = [b.apply(Prim.MUL, third, third), *([b.apply(Prim.NEG, first)] if again else [])]
    return b.build(results), (first, second, third)


def _steps(graph: Graph, at: tuple[NodeId, NodeId, NodeId], kernel: CudaSource) -> Plan:
    """The plan of a chain; `kernel` is the softmax's, the others' are the first there are."""

    def between(before: NodeId, node: NodeId) -> tuple[NodeId, ...]:
        free = (Prim.INPUT, Prim.CONSTANT, Prim.RESHAPE, Prim.BROADCAST)
        return tuple(i for i in range(before + 1, node + 1) if graph.nodes[i].prim not in free)

    b = GraphBuilder()
    x = b.input(TensorType(F32, (ROWS, ACROSS)))
    plain = kernels(b.build([b.apply(Prim.EXP, x)]))[0]
    steps, before = [], graph.inputs[0]
    results = [(n, graph.nodes[n].inputs[0]) for n in graph.outputs]
    for node, own, read in (
        (at[0], plain, before), (at[1], kernel, at[0]), (at[2], plain, at[1]), *((n, plain, r) for n, r in results),
    ):  # fmt: skip
        members = between(read, node) if node in at else (node,)
        steps.append(Step(own, ((read, Format.ROW),), ((node, Format.ROW),), members, Kind.GROUP, "", 1.0))
    return Plan("chain", tuple(steps))


def _softmaxes(axis: int) -> list[CudaSource]:
    b = GraphBuilder()
    e = b.apply(Prim.EXP, b.input(TensorType(F32, (ROWS, ACROSS))))
    total = b.add(Prim.REDUCE_SUM, e, attrs=a.ReduceAttrs((axis,)))
    return kernels(b.build([b.apply(Prim.DIV, e, total)]))


def _places(graph: Graph, plan: Plan, branches: int = 1) -> dict[NodeId, NodeId]:
    values = survey(graph, plan)
    within = values.first_write.keys() - {(n, Format.ROW) for n in values.finals}
    found = places_of(graph, plan, values, order_of(plan, values, branches), within)
    return {result[0]: operand[0] for result, operand in found.items()}


def test_results_take_the_place_of_what_nobody_reads_any_more() -> None:
    graph, (first, second, third) = _chain()
    found = [_places(graph, _steps(graph, (first, second, third), k)) for k in _softmaxes(1)]
    assert all(x[third] == second and first not in x for x in found)
    assert any(x.get(second) == first for x in found), "a row is read before it is written"
    whole = next(k for k, x in zip(_softmaxes(1), found, strict=True) if second in x)
    plan = _steps(graph, (first, second, third), whole)
    assert _places(graph, plan, 4) == _places(graph, plan), "a chain is in one lane"


def test_a_row_that_is_read_behind_a_write_or_across_blocks_keeps_its_place() -> None:
    graph, at = _chain()
    whole = next(k for k in _softmaxes(1) if at[1] in _places(graph, _steps(graph, at, k)))
    head, _, body = whole.text.rpartition('extern "C" __global__')
    waits = "w_cluster_sync();" if whole.launches[0].cluster != (1, 1, 1) else "role.sync();"
    form = dict(whole.schedule.params)
    for changed in (
        replace(whole, text=whole.text.rstrip().rstrip("}") + " w_ld(in0 + 1); }"),
        replace(whole, text=head + 'extern "C" __global__' + body.replace(waits, "")),
        replace(whole, workspace_bytes=4),
        replace(whole, schedule=replace(whole.schedule, params=tuple(sorted({**form, "num_splits": 2}.items())))),
        replace(whole, schedule=replace(whole.schedule, params=tuple(sorted({**form, "columns": 4}.items())))),
    ):
        assert at[1] not in _places(graph, _steps(graph, at, changed))
    graph, at = _chain(axis=0)
    assert all(at[1] not in _places(graph, _steps(graph, at, k)) for k in [whole, *_softmaxes(0)])


@pytest.mark.parametrize("branches", [1, 2])
def test_what_is_read_behind_a_step_keeps_its_place(branches: int) -> None:
    graph, at = _chain(again=True)
    whole = next(k for k in _softmaxes(1) if at[1] in _places(_chain()[0], _steps(_chain()[0], _chain()[1], k)))
    assert _places(graph, _steps(graph, at, whole), branches) == {at[2]: at[1]}
