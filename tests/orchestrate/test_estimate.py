"""Bounds that are sound, estimates that rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.orchestrate.graphs import Net, residual_net, transformer

from weft.device.facts import CpuFacts
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, mask_of
from weft.ir.prims import FREE, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate, Kind, Problem
from weft.kernels.formats import Format
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.estimate import compulsory_work, estimate_us, lower_bound_us
from weft.orchestrate.extract import extract, format_choices
from weft.orchestrate.select import Priced

TABLE = ((1 << 16, 300.0), (1 << 20, 200.0), (1 << 24, 100.0), (1 << 29, 40.0))
FACTS = CpuFacts(
    threads=2,
    frequency_ghz=3.0,
    simd_bytes=64,
    fma_units=2,
    l2_bytes=1 << 20,
    l3_bytes=32 << 20,
    peak_flops_f32=3.84e11,
    bandwidth=TABLE,
    read_bandwidth=TABLE,
    fork_us=1.0,
    provenance=(("bandwidth", "measured"), ("peak_flops_f32", "measured"), ("read_bandwidth", "measured")),
)


def problem_of(graph: Graph, candidate: Candidate | None = None) -> Problem:
    if candidate is None:
        members = mask_of(i for i, n in enumerate(graph.nodes) if n.prim not in FREE)
        weights = tuple(i for i, n in enumerate(graph.nodes) if n.prim is Prim.CONSTANT and n.type.size > 16)
        inputs = tuple(sorted((*graph.inputs, *weights)))
        candidate = Candidate(members, inputs, tuple(sorted(set(graph.outputs))))
    row = Format.ROW
    return extract(graph, candidate, [row] * len(candidate.inputs), [row] * len(candidate.outputs)).problem


def image(c: int = 64, size: int = 56) -> tuple[Net, int]:
    net = Net()
    return net, net.input(1, c, size, size)


def test_pointwise_counts_every_byte_once() -> None:
    net, x = image()
    work = compulsory_work(problem_of(net.build(net.b.apply(Prim.MUL, x, net.relu(x)))))
    assert work.read_bytes == work.written_bytes == 64 * 56 * 56 * 4
    assert work.contraction_flops == 0


def test_matmul_counts_its_products() -> None:
    net = Net()
    x = net.input(128, 64)
    work = compulsory_work(problem_of(net.build(net.b.add(Prim.MATMUL, x, net.weight(64, 32)))))
    assert work.contraction_flops == 2 * 128 * 64 * 32
    assert work.read_bytes == 4 * (128 * 64 + 64 * 32)


def test_convolutions_may_be_winograd_and_skip_padding() -> None:
    net, x = image(8, 6)
    y = net.b.add(Prim.CONV, x, net.weight(8, 8, 3, 3), attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1)))
    work = compulsory_work(problem_of(net.build(y)))
    inside = 8 * 8 * (3 * 6 - 2) ** 2  # products with the image: 16 of 18 taps per row
    assert work.contraction_flops == int(2 * inside / 6)


@pytest.mark.parametrize("kind", ["slice", "gather", "select", "stride", "slice after exp"])
def test_what_may_be_skipped_is_not_counted(kind: str) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 4, 32, 32)))
    if kind == "slice":
        y = b.slice(x, (0, 0, 0, 0), (1, 1, 4, 4), (1, 1, 1, 1))
    elif kind == "slice after exp":
        y = b.slice(b.apply(Prim.EXP, x), (0, 0, 0, 0), (1, 1, 4, 4), (1, 1, 1, 1))
    elif kind == "gather":
        y = b.add(Prim.GATHER, x, b.iota((2,), 0, DType.I64), attrs=a.GatherAttrs(2))
    elif kind == "select":
        c = b.input(TensorType(DType.BOOL, (1, 4, 32, 32)))
        y = b.apply(Prim.SELECT, c, x, 0.0)
    else:
        y = b.add(Prim.WINDOW_MAX, x, attrs=a.WindowAttrs((1, 1), (2, 2), (0, 0), (0, 0), (1, 1)))
    expected = 4 * 32 * 32 if kind == "select" else 0
    assert compulsory_work(problem_of(b.build([y]))).read_bytes == expected


@pytest.mark.parametrize(("kernel", "stride", "size", "needed"), [(3, 2, 7, True), (3, 2, 8, False), (2, 2, 8, True)])
def test_windows_that_cover_their_input(kernel: int, stride: int, size: int, needed: bool) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 1, size)))
    y = b.add(Prim.WINDOW_MAX, x, attrs=a.WindowAttrs((kernel,), (stride,), (0,), (0,), (1,)))
    assert compulsory_work(problem_of(b.build([y]))).read_bytes == (4 * size if needed else 0)


def test_bound_follows_the_roofs() -> None:
    net = Net()
    x = net.input(1, 1 << 26)  # 256 MiB in, 256 MiB out; 34 MiB of caches
    bound = lower_bound_us(problem_of(net.build(net.relu(x))), FACTS)
    beyond = 2 * (1 << 28) - (34 << 20)
    assert bound == pytest.approx(beyond / (40.0 * 1.1) / 1e3)
    net = Net()
    x = net.input(1024, 1024)
    bound = lower_bound_us(problem_of(net.build(net.b.add(Prim.MATMUL, x, net.weight(1024, 1024)))), FACTS)
    assert bound == pytest.approx(2 * 1024**3 / 3.84e11 / 1.1 * 1e6)


def test_cached_bytes_cost_only_the_best_bandwidth() -> None:
    net = Net()
    x = net.input(1, 1 << 20)
    assert lower_bound_us(problem_of(net.build(net.relu(x))), FACTS) == pytest.approx(2 * (1 << 22) / 330.0 / 1e3)


@pytest.mark.parametrize("guessed", ["bandwidth", "read_bandwidth", "peak_flops_f32"])
def test_what_was_not_probed_bounds_nothing(guessed: str) -> None:
    """Defaults are below what machines do: right kernels would be called impossible, library calls too."""
    facts = replace(FACTS, provenance=tuple(p for p in FACTS.provenance if p[0] != guessed))
    net = Net()
    x = net.input(1024, 1024)
    product = problem_of(net.build(net.b.add(Prim.MATMUL, x, net.weight(1024, 1024))))
    assert lower_bound_us(product, facts) == lower_bound_us(product, CpuFacts()) == 0.0 < lower_bound_us(product, FACTS)


def test_narrow_products_have_no_bound() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (512, 512)))
    y = b.input(TensorType(DType.BF16, (512, 512)))
    bound = lower_bound_us(problem_of(b.build([b.add(Prim.MATMUL, x, y)])), FACTS)
    assert bound == pytest.approx(3 * 2 * 512**2 / 330.0 / 1e3)


@pytest.mark.parametrize("graph", [transformer(1, s=64, c=128), residual_net(2, 32, 28)], ids=["attention", "conv"])
def test_estimates_respect_their_bounds(graph: Graph) -> None:
    for c in enumerate_candidates(graph).candidates:
        for f in format_choices(graph, c):
            problem = extract(graph, c, f.inputs, f.outputs).problem
            assert 0 <= lower_bound_us(problem, FACTS) <= estimate_us(problem, FACTS)


def test_estimate_ranks_fusion_before_parts() -> None:
    net = Net()
    x = net.input(512, 1024)
    graph = net.build(net.layer_norm(net.relu(x)))
    found = enumerate_candidates(graph).candidates
    cost = {c.members: estimate_us(problem_of(graph, c), FACTS) for c in found if len(c.outputs) == 1}
    everything = max(cost, key=int.bit_count)
    singles = sum(v for m, v in cost.items() if m.bit_count() == 1)
    assert cost[everything] < singles / 3


def test_estimate_charges_changes_of_order() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 64, 56, 56)))
    graph = b.build([b.apply(Prim.EXP, x)])
    convert = Candidate(0, (x,), (x,), Kind.CONVERT)
    problem = extract(graph, convert, (Format.ROW,), (Format.LAST,)).problem
    copy = extract(graph, convert, (Format.ROW,), (Format.ROW,)).problem
    assert estimate_us(problem, FACTS) > 1.5 * estimate_us(copy, FACTS)


def estimated(graph: Graph) -> list[Priced]:
    found = []
    for c in enumerate_candidates(graph).candidates:
        for f in format_choices(graph, c):
            problem = extract(graph, c, f.inputs, f.outputs).problem
            found.append(Priced(c, f.inputs, f.outputs, estimate_us(problem, FACTS)))
    return found
