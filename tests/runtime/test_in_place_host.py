"""C++ kernels that write over what they read: the bits are those of results elsewhere, wherever that is allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cpp.run_kernels import Trial, build, to_memory, trials
from tests.ir.random_graphs import random_inputs
from tests.runtime.test_in_place import momentum

from weft.device.launch import NativeKernel, pointer_array
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.plan import Step
from weft.runtime.in_place import aliasing, overwrites

F32 = DType.F32
ROW = Format.ROW


def problem_of(graph: Graph, name: str) -> Problem:
    return Problem(graph, name, tuple(ROW for _ in graph.inputs), tuple(ROW for _ in graph.outputs))


def step_of(trial: Trial) -> Step:
    graph, problem = trial.problem.graph, trial.problem
    members = tuple(i for i, n in enumerate(graph.nodes) if n.prim not in (Prim.INPUT, Prim.CONSTANT))
    inputs = tuple(zip(graph.inputs, problem.input_formats, strict=True))
    outputs = tuple(zip(graph.outputs, problem.output_formats, strict=True))
    return Step(trial.source, inputs, outputs, members, Kind.GROUP, "", 1.0)


def pairs(trial: Trial) -> list[tuple[int, int]]:
    """Inputs and outputs by position that may share their memory."""
    graph, step = trial.problem.graph, step_of(trial)
    stored = [k for k, key in enumerate(step.outputs) if key[1] is ROW and step.outputs.count(key) == 1]
    return [
        (i, o)
        for o in stored
        for i, key in enumerate(step.inputs)
        if key[1] is ROW and overwrites(graph, step, key[0], step.outputs[o][0])
    ]


def launched(trial: Trial, kernel: NativeKernel, shared: dict[int, int]) -> list[np.ndarray]:
    """Bytes of all outputs; `shared`: the input in whose memory an output lies."""
    graph, problem = trial.problem.graph, trial.problem

    def room(size: int) -> np.ndarray:
        raw = np.full(size + 64, 0x5B, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + size]

    ins = []
    for n, x, f in zip(graph.inputs, trial.inputs, problem.input_formats, strict=True):
        ins.append(room(graph.type_of(n).nbytes))
        ins[-1][:] = to_memory(x, graph.type_of(n), f)
    outs = [ins[shared[k]] if k in shared else room(graph.type_of(n).nbytes) for k, n in enumerate(graph.outputs)]
    work = room(trial.source.workspace_bytes)
    arrays = [pointer_array([x.ctypes.data for x in side]) for side in (ins, outs)]
    kernel(arrays[0], arrays[1], work.ctypes.data, pointer_array([]))
    return [x.copy() for x in outs]


def assert_same_bits(batch: list[Trial]) -> int:
    """In how many ways results lay where operands did."""
    told = [replace(t, source=aliasing(t.source)) for t in batch]
    apart, together = build(batch), build(told)
    count = 0
    for trial, other in zip(batch, told, strict=True):
        wanted = launched(trial, apart[trial.source.entry], {})
        for i, o in pairs(trial):
            got = launched(other, together[other.source.entry], {o: i})
            assert all(np.array_equal(x, y) for x, y in zip(got, wanted, strict=True)), (trial.source.schedule, i, o)
            count += 1
    return count


def updates(seed: int) -> Graph:
    """Several results, each a function of some operands of one shape; now and then of other elements of them, too."""
    rng, b = np.random.default_rng(seed), GraphBuilder()
    shape = [(64,), (48, 32), (4096,), (70_000,), (37, 16), (100_000,)][rng.integers(6)]
    pool = [b.input(TensorType(F32, shape)) for _ in range(int(rng.integers(2, 5)))]
    inputs, results = list(pool), []
    for _ in range(int(rng.integers(2, 9))):
        one, two = (pool[rng.integers(len(pool))] for _ in range(2))
        prim = (Prim.ADD, Prim.MUL, Prim.SUB, Prim.MAX, Prim.TANH, Prim.REDUCE_MAX, Prim.SLICE)[rng.integers(7)]
        if prim is Prim.TANH:
            pool.append(b.apply(prim, one))
        elif prim is Prim.REDUCE_MAX and rng.random() < 0.4:
            most = b.add(prim, one, attrs=a.ReduceAttrs((len(shape) - 1,)))
            pool.append(b.apply(Prim.SUB, two, b.broadcast(most, shape)))
        elif prim is Prim.SLICE and rng.random() < 0.4 and len(shape) == 1:
            half = shape[0] // 2
            low, high = (b.add(prim, one, attrs=a.SliceAttrs((k,), (half,), (1,))) for k in (0, half))
            pool.append(b.add(Prim.CONCAT, high, low, attrs=a.ConcatAttrs(0)))
        elif prim in (Prim.ADD, Prim.MUL, Prim.SUB, Prim.MAX):
            pool.append(b.apply(prim, one, two))
    results = list(dict.fromkeys(n for n in pool if n not in inputs))
    if not results:
        results = [b.apply(Prim.ADD, inputs[0], inputs[1])]
    chosen = rng.permutation(results)[: int(rng.integers(1, 4))]
    return b.build([int(n) for n in chosen])


def test_random_updates() -> None:
    batch: dict[str, Trial] = {}
    some, none = 0, 0
    for seed in range(120):
        graph = updates(seed)
        found = trials(problem_of(graph, f"update {seed}"), random_inputs(graph, seed))
        some += any(pairs(t) for t in found)
        none += not any(pairs(t) for t in found)
        batch |= {t.source.entry: t for t in found if pairs(t)}
    assert some > 40 and none > 10
    assert assert_same_bits(list(batch.values())) > 100


@pytest.mark.parametrize("size", [1 << 16, 3_000_000, 3_000_016])
def test_updates_of_weights(size: int) -> None:
    graph = momentum(size)
    rng = np.random.default_rng(0)
    inputs: list[Array] = [rng.standard_normal(graph.type_of(n).shape).astype(np.float32) for n in graph.inputs]
    batch = trials(problem_of(graph, f"momentum {size}"), inputs)
    assert any({(0, 1), (2, 0)} <= set(pairs(t)) for t in batch)
    if size > 1 << 20:
        assert any("omp parallel" in t.source.text and pairs(t) for t in batch)
    assert assert_same_bits(batch) > 0


def trial_of(graph: Graph) -> list[Trial]:
    return trials(problem_of(graph, str(graph)), [np.zeros(graph.type_of(n).shape, np.float32) for n in graph.inputs])


@pytest.mark.parametrize("size", [10, 1001])
def test_a_last_vector_that_overlaps_the_one_before(size: int) -> None:
    for trial in trial_of(momentum(size)):
        if f"= {size - 8};" in trial.source.text or f"= {size - 16};" in trial.source.text:
            assert not pairs(trial)


def test_what_other_elements_depend_on_stays() -> None:
    b = GraphBuilder()
    x, y = (b.input(TensorType(F32, (64, 64))) for _ in range(2))
    turned = b.build([b.apply(Prim.ADD, b.add(Prim.TRANSPOSE, x, attrs=a.TransposeAttrs((1, 0))), y)])
    b = GraphBuilder()
    x, y = b.input(TensorType(F32, (64,))), b.input(TensorType(F32, (64, 64)))
    wide = b.build([b.apply(Prim.ADD, b.broadcast(b.reshape(x, (1, 64)), (64, 64)), y)])
    b = GraphBuilder()
    x = b.input(TensorType(F32, (64, 64)))
    mean = b.add(Prim.REDUCE_MAX, x, attrs=a.ReduceAttrs((1,)))
    summed = b.build([b.apply(Prim.SUB, x, b.broadcast(mean, (64, 64)))])
    for graph in (turned, wide, summed):
        found = trial_of(graph)
        assert found and all((0, 0) not in pairs(t) for t in found)


def _text(loops: str) -> str:
    head = "static void k_body(int) {\n  const w_f32* in0 = a;\n  w_f32* const out0 = b;\n"
    return head + loops + '\n}\nextern "C" void k() {}'


@pytest.mark.parametrize(
    ("loops", "good"),
    [
        ("for () { x = in0[1]; out0[1] = x; }", True),
        ("for () { x = in0[1]; out0[1] = x; } if () { x = in0[2]; out0[2] = x; }", True),
        ("for () { x = in0[1]; out0[1] = x; y = in0[1]; }", False),
        ("for () { x = in0[1]; out0[1] = x; } for () { y = in0[1]; out1[1] = y; }", False),
        ("x = in0[0]; for () { y = in0[1]; out0[1] = y + x; }", False),
        ("for () { x = in0[1]; out0[1] = x; } out0[0] = 1;", False),
        ("for () { s[1] = in0[1]; } for () { out0[1] = s[1]; }", False),
        ("for () { x = in0[1]; out0[1] = x; }\n      x1 = 2;\n{ x = in0[1]; out0[1] = x; }", False),
        ("for () { x = in0[1]; out0[1] = x; }\n  #pragma omp barrier", False),
        ("", False),
    ],
)
def test_what_a_text_says(loops: str, good: bool) -> None:
    graph = momentum(64)
    trial = trial_of(graph)[0]
    step = step_of(trial)
    w: NodeId = graph.inputs[0]
    kernel = replace(trial.source, text=_text(loops), entry="k")
    changed = replace(step, kernel=kernel, outputs=((graph.outputs[1], ROW),))
    assert overwrites(graph, changed, w, graph.outputs[1]) == good
    assert not overwrites(graph, replace(changed, kernel=replace(kernel, workspace_bytes=4)), w, graph.outputs[1])
