"""Transposed convolutions as convolutions: the same numbers, no tap more, and templates for them."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from tests.typed import assert_allclose

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, bits
from weft.ir.prims import FREE, Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph
from weft.ir.work import node_flops
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits

ROW, LAST = Format.ROW, Format.LAST
Dims = tuple[int, ...]


def transposed(
    size: Dims,
    kernel: Dims,
    stride: Dims,
    *,
    lo: Dims = (),
    hi: Dims = (),
    dilation: Dims = (),
    extra: Dims = (),
    channels: tuple[int, int] = (6, 4),
    groups: int = 1,
    dtype: DType = DType.F32,
    weight: bool = True,
) -> Graph:
    """relu(transposed conv(x, w) + bias)."""
    none, ones = (0,) * len(size), (1,) * len(size)
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (2, channels[0], *size)))
    shape = (channels[0], channels[1] // groups, *kernel)
    rng = np.random.default_rng(1)
    w = b.constant(rng.normal(size=shape).astype(dtype.numpy)) if weight else b.input(TensorType(dtype, shape))
    attrs = a.ConvAttrs(stride, lo or none, hi or lo or none, dilation or ones, groups, True, extra or none)
    y = b.add(Prim.CONV, x, w, attrs=attrs)
    bias = b.constant(rng.normal(size=(channels[1], *ones)).astype(dtype.numpy))
    return b.build([b.apply(Prim.MAX, b.apply(Prim.ADD, y, bias), 0.0)])


CASES = {
    "2x2 / 2": transposed((5, 7), (2, 2), (2, 2)),
    "4x4 / 2": transposed((5, 7), (4, 4), (2, 2), lo=(1, 1)),
    "3x3 / 2": transposed((5, 7), (3, 3), (2, 2), lo=(1, 1), extra=(1, 1)),
    "3x3 / 2, odd size": transposed((5, 7), (3, 3), (2, 2), lo=(1, 1)),
    "3x3 / 1": transposed((5, 7), (3, 3), (1, 1), lo=(1, 1)),
    "3x4 / 1x2": transposed((5, 7), (3, 4), (1, 2), lo=(2, 1), hi=(0, 1)),
    "5x5 / 3": transposed((4, 3), (5, 5), (3, 3), lo=(2, 1)),
    "groups": transposed((5, 7), (4, 4), (2, 2), lo=(1, 1), groups=2),
    "depthwise": transposed((5, 7), (3, 3), (2, 2), channels=(6, 6), groups=6),
    "dilated": transposed((5, 7), (3, 3), (1, 1), lo=(1, 1), dilation=(2, 3)),
    "dilated and strided": transposed((5, 7), (3, 2), (2, 2), dilation=(3, 3)),
    "one dimension": transposed((9,), (16,), (8,), lo=(4,)),
    "long, of phases apart": transposed((9,), (7,), (3,), lo=(2,), hi=(1,)),
}


def replaced(graph: Graph) -> Alternatives:
    found = find_alternatives(graph)
    verify_graph(found.graph)
    return found


def whole(found: Alternatives) -> Graph:
    return Graph(found.graph.nodes, found.graph.inputs, tuple(range(len(found.graph))), found.graph.constants)


def convolutions(found: Alternatives) -> list[int]:
    return [i for i in bits(found.extra) if found.graph.nodes[i].prim is Prim.CONV]


@pytest.mark.parametrize("name", list(CASES))
def test_the_same_numbers_by_as_many_products(name: str) -> None:
    found = replaced(CASES[name])
    ((extra, original),) = found.classes.items()
    x = np.random.default_rng(2).normal(size=found.graph.type_of(0).shape).astype(np.float32)
    values = evaluate(whole(found), [x], precise=True)
    assert_allclose(values[extra], values[original], rtol=1e-12, atol=1e-12)
    made = [found.graph.nodes[i] for i in convolutions(found)]
    assert all(isinstance(n.attrs, a.ConvAttrs) and not n.attrs.transposed for n in made)
    weights = sum(found.graph.type_of(n.inputs[1]).size for n in made)
    old = found.graph.type_of(found.graph.nodes[original].inputs[1]).size
    assert weights == old


def cannot(size: int, kernel: int, stride: int, low: int, dilation: int, results: int) -> bool:
    """Whether results of some phase have no tap, or all of them pass by an end of the input."""
    for r in range(stride):
        firsts = [(r + low - t * dilation) // stride for t in range(kernel) if (r + low - t * dilation) % stride == 0]
        places = [q + first for first in firsts for q in range(-(-results // stride))]
        if not places or min(places) > 0 or max(places) < size - 1:
            return True
    return False


@pytest.mark.parametrize("seed", range(60))
def test_any_attributes(seed: int) -> None:
    chance = random.Random(seed)
    spatial = chance.choice((1, 2))

    def some(*values: int) -> Dims:
        return tuple(chance.choice(values) for _ in range(spatial))

    groups = chance.choice((1, 1, 2))
    size, kernel, stride = some(3, 4, 6), some(1, 2, 3, 4, 5), some(1, 2, 3)
    dilation, lo, hi = some(1, 1, 2), some(0, 0, 1), some(0, 0, 1)
    extra = tuple(chance.randrange(s) for s in stride)
    graph = transposed(size, kernel, stride, lo=lo, hi=hi, dilation=dilation, extra=extra, groups=groups)
    found = replaced(graph)
    results = graph.type_of(graph.outputs[0]).shape[2:]
    if not found.classes:
        assert any(map(cannot, size, kernel, stride, lo, dilation, results))
        return
    ((new, original),) = found.classes.items()
    x = np.random.default_rng(seed).normal(size=graph.type_of(0).shape).astype(np.float32)
    values = evaluate(whole(found), [x], precise=True)
    assert_allclose(values[new], values[original], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["4x4 / 2", "3x3 / 2", "5x5 / 3"])
def test_what_is_not_finite_goes_where_it_went(name: str) -> None:
    found = replaced(CASES[name])
    ((extra, original),) = found.classes.items()
    x = np.ones(found.graph.type_of(0).shape, np.float32)
    x[0, 1, 2, 1], x[1, 3, 0, 0] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        values = evaluate(whole(found), [x], precise=True)
    assert not np.isfinite(values[original]).all()
    np.testing.assert_array_equal(np.isfinite(values[extra]), np.isfinite(values[original]))


@pytest.mark.parametrize(
    ("name", "count"), [("2x2 / 2", 1), ("4x4 / 2", 1), ("3x3 / 1", 1), ("groups", 1), ("3x3 / 2", 4)]
)
def test_phases_are_channels_where_they_read_the_same(name: str, count: int) -> None:
    found = replaced(CASES[name])
    assert len(convolutions(found)) == count
    if name == "3x3 / 1":
        assert Prim.TRANSPOSE not in {found.graph.nodes[i].prim for i in bits(found.extra)}


@pytest.mark.parametrize(
    "graph",
    [
        transposed((5, 7), (2, 2), (2, 2), weight=False),
        transposed((5, 7), (2, 2), (1, 1), weight=False, groups=2),
        transposed((5, 7), (1, 1), (2, 2)),
        transposed((5, 7), (1, 1), (1, 1), lo=(1, 1)),
        transposed((2, 3, 4), (2, 2, 2), (2, 2, 2)),
        transposed((9,), (17,), (17,)),
    ],
    ids=[
        "no constant",
        "groups without one",
        "phases without a tap",
        "input cut off",
        "three dimensions",
        "many phases",
    ],
)
def test_where_there_is_none(graph: Graph) -> None:
    assert not replaced(graph).classes
    assert not find_alternatives(graph, on_gpu=True).classes


CHANGING = {
    "3x3": transposed((5, 7), (3, 3), (1, 1), lo=(1, 1), weight=False),
    "3x4": transposed((5, 7), (3, 4), (1, 1), lo=(2, 1), hi=(0, 1), weight=False),
    "dilated": transposed((9, 9), (3, 3), (1, 1), lo=(2, 2), dilation=(2, 2), weight=False),
    "one dimension": transposed((9,), (5,), (1,), lo=(2,), weight=False),
    "3x3 / 2": transposed((5, 6), (3, 3), (2, 2), lo=(1, 1), hi=(1, 1), weight=False),
    "7x5 / 2x1": transposed((9, 8), (7, 5), (2, 1), lo=(3, 2), hi=(3, 2), weight=False),
    "8x4 / 2, as many taps in each phase": transposed((5, 6), (8, 4), (2, 2), lo=(3, 1), hi=(3, 1), weight=False),
    "7x6 / 3x2": transposed((5, 6), (7, 6), (3, 2), lo=(2, 2), hi=(2, 1), weight=False),
}


@pytest.mark.parametrize("name", list(CHANGING))
def test_a_weight_that_is_no_constant_is_turned_on_gpus(name: str) -> None:
    graph = CHANGING[name]
    assert not replaced(graph).classes
    found = find_alternatives(graph, on_gpu=True)
    verify_graph(found.graph)
    ((extra, original),) = found.classes.items()
    rng = np.random.default_rng(2)
    given = [rng.normal(size=found.graph.type_of(i).shape).astype(np.float32) for i in found.graph.inputs]
    values = evaluate(whole(found), given, precise=True)
    assert_allclose(values[extra], values[original], rtol=1e-12, atol=1e-12)
    instead = graph.nodes[original].attrs
    assert isinstance(instead, a.ConvAttrs)
    made = [found.graph.nodes[i] for i in convolutions(found)]
    assert len(made) == math.prod(instead.strides)
    for conv in made:
        assert isinstance(conv.attrs, a.ConvAttrs) and not conv.attrs.transposed
        weight = found.graph.nodes[conv.inputs[1]]
        assert isinstance(weight.attrs, a.TransposeAttrs) and weight.attrs.perm[1] == len(weight.type.shape) - 1


def test_with_strides_a_weight_of_few_taps_is_left_to_libraries() -> None:
    few = transposed((9, 9), (2, 3), (2, 2), lo=(0, 1), hi=(0, 1), weight=False)
    assert not find_alternatives(few, on_gpu=True).classes


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("taps", [(3, 3), (2, 5)])
def test_a_weight_that_changes_lies_channels_last_for_products(dtype: DType, taps: tuple[int, int]) -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(dtype, (2, 16, 9, 9))), b.input(TensorType(dtype, (8, 16, *taps)))
    graph = b.build([b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((2, 1), (1, 1), (1, 1), (1, 1)))])
    assert not find_alternatives(graph).classes
    found = find_alternatives(graph, on_gpu=True)
    ((extra, original),) = found.classes.items()
    rng = np.random.default_rng(5)
    given = [rng.integers(-2, 3, graph.type_of(i).shape).astype(dtype.numpy) for i in graph.inputs]
    values = evaluate(whole(found), given, precise=True)
    np.testing.assert_array_equal(values[extra], values[original])
    limits, offered = EnumerationLimits(changing_weights=False), set()
    for c in enumerate_candidates(found.graph, limits, found).candidates:
        if c.members == 1 << extra | 1 << found.graph.nodes[extra].inputs[1]:
            formats = [LAST if found.graph.type_of(i).shape[2:] == (9, 9) else ROW for i in c.inputs]
            offers = templates.schedules(extract(found.graph, c, formats, [LAST], found).problem, GpuFacts())
            assert not isinstance(offers, Declined), offers
            offered |= {s.param("template") for s in offers}
    assert "tma" in offered


def test_weights_that_lie_so_or_are_left_to_others_stay() -> None:
    def conv(weight: str, channels: int = 16, dtype: DType = DType.F16, taps: int = 3) -> Graph:
        b = GraphBuilder()
        x = b.input(TensorType(dtype, (2, channels, 9, 9)))
        if weight == "constant":
            w = b.constant(np.ones((8, channels, taps, taps), dtype.numpy))
        elif weight == "last":
            w = b.transpose(b.input(TensorType(dtype, (8, taps, taps, channels))), (0, 3, 1, 2))
        else:
            w = b.input(TensorType(dtype, (8, channels, taps, taps)))
        return b.build([b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1)))])

    for graph in (conv("constant"), conv("last"), conv("row", 12), conv("row", 16, DType.F32), conv("row", taps=1)):
        found = find_alternatives(graph, on_gpu=True)
        kinds = [found.graph.nodes[i].prim for i in found.classes]
        assert Prim.CONV not in kinds


def test_products_templates_take_the_gradient_with_a_weight_that_was_turned() -> None:
    graph = transposed((8, 8), (3, 3), (1, 1), lo=(1, 1), channels=(64, 64), dtype=DType.F16, weight=False)
    found = find_alternatives(graph, on_gpu=True)
    (conv,) = convolutions(found)
    limits, offered = EnumerationLimits(changing_weights=False), set()
    for c in enumerate_candidates(found.graph, limits, found).candidates:
        if c.members == 1 << conv | 1 << found.graph.nodes[conv].inputs[1]:
            formats = [LAST if found.graph.type_of(i).shape[2:] == (8, 8) else ROW for i in c.inputs]
            offers = templates.schedules(extract(found.graph, c, formats, [LAST], found).problem, GpuFacts())
            assert not isinstance(offers, Declined), offers
            offered |= {s.param("template") for s in offers}
    assert "tma" in offered


def test_strict_has_none() -> None:
    assert not find_alternatives(CASES["4x4 / 2"], strict=True).classes


@pytest.mark.parametrize("name", list(CASES))
def test_the_plan_may_take_it(name: str) -> None:
    """Every piece is a candidate: the convolutions alone, and one that ends in what was a transposed convolution."""
    found = replaced(CASES[name])
    ((extra, _),) = found.classes.items()
    assert found.graph.nodes[extra].prim not in FREE
    candidates = enumerate_candidates(found.graph, alternatives=found).candidates
    assert {i for i in convolutions(found) for c in candidates if c.members == 1 << i} == set(convolutions(found))
    assert any(c.outputs == (extra,) or c.members >> extra & 1 for c in candidates)


@pytest.mark.parametrize(("name", "behind"), [("4x4 / 2", 0), ("3x3 / 1", 2)])
def test_templates_for_gpus_take_them(name: str, behind: int) -> None:
    """Of stride 1 with what follows; of larger ones the convolution, and one kernel for all behind it."""
    size = {"4x4 / 2": ((8, 8), (4, 4), (2, 2)), "3x3 / 1": ((8, 8), (3, 3), (1, 1))}[name]
    found = replaced(transposed(*size, lo=(1, 1), channels=(32, 16), dtype=DType.F16))
    best, shuffled = -1, False
    for c in enumerate_candidates(found.graph, alternatives=found).candidates:
        kinds = Counter(found.graph.nodes[m].prim for m in bits(c.members))
        if not c.members & found.extra:
            continue
        shuffled |= {Prim.TRANSPOSE, Prim.ADD, Prim.MAX} <= set(kinds) and Prim.CONV not in kinds
        if Prim.CONV in kinds:
            formats = [ROW if found.graph.nodes[i].prim is Prim.CONSTANT else LAST for i in c.inputs]
            p = extract(found.graph, c, formats, [LAST], found).problem
            if not isinstance(templates.schedules(p, GpuFacts()), Declined):
                best = max(best, c.members.bit_count() - 1)
    assert best == behind
    assert shuffled == (behind == 0)


def test_flops_are_counted_alike() -> None:
    graph = replaced(CASES["2x2 / 2"]).graph
    made, original = (
        next(n for n in graph.nodes if isinstance(n.attrs, a.ConvAttrs) and n.attrs.transposed is turned)
        for turned in (False, True)
    )
    assert node_flops(made, graph) == node_flops(original, graph) > 0
