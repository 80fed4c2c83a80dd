"""Chains of 255, 35 and 3 channels in the padded form: every kernel of the plan, emulated, one behind the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from tests.generate.cuda import emulate
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.orchestrate.test_padded import Net, random_inputs
from tests.slow import few

from weft.device.cuda.facts import profile
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId, bits
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.reference import evaluate, round_to
from weft.ir.types import Array, DType
from weft.kernels.candidate import Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource
from weft.orchestrate.alternatives import Alternatives, find_alternatives, padded
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import Extracted, extract, format_choices
from weft.orchestrate.select import Priced, select
from weft.orchestrate.stored import stored_root

H200 = profile("h200")
TEMPLATES = ("mma", "tma", "halo", "simt")


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "LEAST_FLOPS", 0)


def images(dtype: DType) -> Graph:
    """3x3 and 1x1 convolutions between 35, 255 and 3 channels, and a residual."""
    net = Net(dtype)
    x = net.relu(net.conv(net.input(1, 16, 9, 9), 35))
    x = net.relu(net.b.apply(Prim.ADD, x, net.conv(x, 35)))
    x = net.relu(net.conv(x, 255, 1))
    return net.b.build([net.conv(net.exp(net.conv(x, 3)), 16)])


def layers(dtype: DType) -> Graph:
    """Rows of 255, 35 and 3 columns, the results in 255 of the caller's."""
    net = Net(dtype)
    x = net.linear(net.relu(net.linear(net.input(80, 24), 255)), 35)
    return net.b.build([net.linear(net.relu(net.linear(net.exp(x), 3)), 255)])


def norms(dtype: DType) -> Graph:
    """Rows of 100 that are normalised in front of a product and behind one."""
    net = Net(dtype)
    b = net.b

    def norm(x: NodeId) -> NodeId:
        mean = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, x, (1,)), 0.01)
        x = b.apply(Prim.SUB, x, mean)
        spread = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, x, x), (1,)), 0.01)
        scaled = b.apply(Prim.MUL, x, b.apply(Prim.RSQRT, b.apply(Prim.ADD, spread, 1e-3)))
        return b.apply(Prim.ADD, b.apply(Prim.MUL, scaled, net.weight(100)), net.weight(100))

    x = net.input(80, 100)
    x = b.apply(Prim.ADD, x, net.linear(net.relu(net.linear(norm(x), 64)), 100))
    return b.build([net.linear(norm(x), 48)])


GRAPHS = {"images": images, "layers": layers, "norms": norms}


def plan_of(found: Alternatives) -> list[Extracted]:
    """The padded plan of few kernels that hold one contraction each, images channels-last."""
    offers = []
    for c in enumerate_candidates(found.graph, alternatives=found).candidates:
        for f in format_choices(found.graph, c):
            kinds = [found.graph.nodes[i] for i in bits(c.members)]
            plain = any(n.prim in (Prim.MATMUL, Prim.CONV) and odd(found.graph, n.inputs[1]) for n in kinds)
            price = 0.5 if c.kind is Kind.CONVERT else 1.0 + 9.0 * plain + (Format.LAST not in f.inputs) * 0.1
            offers.append(Priced(c, f.inputs, f.outputs, price))
    chosen = select(found.graph, offers, alternatives=found, gap=0.0, plans=1)[0].chosen
    picked = [offers[k] for k in chosen]
    return [extract(found.graph, p.candidate, p.input_formats, p.output_formats, found) for p in picked]


def odd(graph: Graph, weight: NodeId) -> bool:
    shape = graph.type_of(weight).shape
    return bool(shape[0 if len(shape) == 2 else 1] % 4)


Sources = Sequence[CudaSource]


def sources_of(problem: Problem) -> Sources:
    """A kernel of every template that takes the product of a problem, f32 also as TF32; none for other problems."""
    if all(CATEGORY[n.prim] is not Category.LINEAR for n in problem.graph.nodes):
        return ()
    schedules = templates.schedules(problem, replace(H200, tf32=True))
    assert not isinstance(schedules, Declined), schedules.reason
    first = {s.param("template"): s for s in reversed(schedules)}
    made = [templates.emit(problem, s) for name, s in first.items() if name in TEMPLATES]
    assert made
    assert all(isinstance(x, CudaSource) for x in made)
    return cast("Sources", made)


def run_step(problem: Problem, sources: Sources, kernels: Emulated, operands: list[Array]) -> Sequence[Array]:
    """A step of the plan by every kernel that it has: all are right, the last one's results are handed on."""
    if not sources:
        if not any(CATEGORY[n.prim] is not Category.SOURCE for n in problem.graph.nodes):
            return operands  # another order in memory
        trial = emulate.trials(problem, operands)[0]
        return emulate.run(trial, emulate.build([trial]))
    wanted = evaluate(problem.graph, operands, precise=True)
    got: list[Array] = []
    for source in sources:
        got = run(kernels, problem, source, operands, defer=False)
        for x, y, o in zip(got, wanted, problem.graph.outputs, strict=True):
            assert near(x, y, problem.graph.type_of(o).dtype), (source.schedule, problem.key)
    return got


def near(x: np.ndarray, y: np.ndarray, dtype: DType) -> bool:
    scale = float(np.abs(y).max()) or 1.0
    limit = {DType.F16: 2e-3, DType.BF16: 1.6e-2, DType.F32: 2e-3}[dtype]  # f32 may be multiplied as TF32
    return bool(np.abs(np.asarray(x, np.float64) - y).max() <= limit * scale)


@pytest.mark.parametrize(
    ("name", "dtype"),
    few([("layers", DType.BF16), ("images", DType.F16), ("layers", DType.F32), ("norms", DType.F16)], 1, unpack=True),
    ids=lambda x: getattr(x, "value", x),
)
def test_a_chain_of_padded_tensors_is_right(name: str, dtype: DType) -> None:
    graph = GRAPHS[name](dtype)
    found = find_alternatives(graph, on_gpu=True)
    plan = plan_of(found)
    made = [sources_of(e.problem) for e in plan]
    kernels = Emulated([x for sources in made for x in sources])
    memory = {i: round_to(x, dtype) for i, x in zip(graph.inputs, random_inputs(graph), strict=True)}
    expected = evaluate(graph, list(memory.values()), precise=True)
    for e, sources in zip(plan, made, strict=True):
        operands = [graph_value(found, i, memory) for i in e.inputs]
        for o, value in zip(e.outputs, run_step(e.problem, sources, kernels, operands), strict=True):
            memory[found.classes.get(o, o)] = value
    between = [found.graph.type_of(v).shape for v in memory if found.extra >> v & 1]
    assert len(between) >= (2 if name == "norms" else 3), "255, 35 and 3 channels"
    assert all(shape[1] % (16 // dtype.itemsize) == 0 for shape in between)
    for o, wanted in zip(graph.outputs, expected, strict=True):
        assert near(memory[stored_root(graph, o)].reshape(wanted.shape), wanted, dtype)
    assert {s.schedule.param("template") for sources in made for s in sources} >= {"mma"}


def graph_value(found: Alternatives, i: NodeId, memory: Mapping[NodeId, Array]) -> Array:
    """A weight, or what a step before has written."""
    return found.graph.constant(i) if found.graph.nodes[i].prim is Prim.CONSTANT else memory[i]


def test_vectors_of_lanes_are_read_at_once() -> None:
    """The select behind a product reads eight bytes of its lanes, not eight times one."""
    graph = layers(DType.F16)
    found = find_alternatives(graph, on_gpu=True)
    step = next(e for e in plan_of(found) if any(n.prim is Prim.SELECT for n in e.problem.graph.nodes))
    schedules = templates.schedules(step.problem, H200)
    assert not isinstance(schedules, Declined)
    schedule = next(s for s in schedules if s.param("template") == "mma")
    source = templates.emit(step.problem, schedule)
    assert isinstance(source, CudaSource)
    assert ">> 24 & 1u) != 0u;" in source.text
