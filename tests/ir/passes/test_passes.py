from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.random_graphs import random_graph, random_inputs
from tests.ir.small_graphs import CONV, GRAPHS, conv_batch_norm, ramp
from tests.typed import assert_allclose

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.passes import clean_up, passes
from weft.ir.passes.compose_casts import holds_every_value
from weft.ir.passes.fold_constants import FoldConstantsPass
from weft.ir.passes.fold_scales import FoldScalesPass
from weft.ir.prims import Prim
from weft.ir.reference import evaluate, round_to
from weft.ir.text import print_graph
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph

F32 = DType.F32
EXACT_STEPS = ("unary", "binary", "select", "broadcast", "reshape", "transpose", "slice", "cast")


def prims(graph: Graph) -> list[str]:
    return [n.prim.value for n in graph.nodes if n.prim not in (Prim.INPUT, Prim.CONSTANT)]


def build(make: Callable[[GraphBuilder, NodeId], NodeId], shape: tuple[int, ...] = (2, 3), dtype: DType = F32) -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(dtype, shape), "x")
    return b.build([make(b, x)], ["y"])


def check(graph: Graph, *, strict: bool = False, rtol: float = 2e-6) -> Graph:
    """Clean up, and compare the meaning before and after."""
    cleaned = clean_up(graph, strict=strict, verify=True).graph
    assert cleaned.input_names == graph.input_names
    assert cleaned.output_names == graph.output_names
    assert [cleaned.type_of(i) for i in cleaned.inputs] == [graph.type_of(i) for i in graph.inputs]
    inputs = random_inputs(graph)
    before, after = (evaluate(g, inputs, precise=True) for g in (graph, cleaned))
    for x, y in zip(before, after, strict=True):
        assert x.dtype == y.dtype
        scale = max(1.0, float(np.max(np.abs(x), initial=0, where=np.isfinite(x))))
        assert_allclose(y, x, rtol=rtol, atol=rtol * scale)
    assert clean_up(cleaned, strict=strict).log == ()
    return cleaned


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "opaque"])
def test_golden(name: str, golden: Callable[[str], None]) -> None:
    golden(print_graph(check(GRAPHS[name]()), origins=True))


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_meaning_is_preserved(seed: int, strict: bool) -> None:
    check(random_graph(seed), strict=strict, rtol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_meaning_is_preserved_to_the_last_bits_in_f64(seed: int) -> None:
    check(random_graph(seed, dtype=DType.F64), rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([DType.F16, DType.BF16]))
def test_meaning_is_preserved_in_sixteen_bits(seed: int, dtype: DType) -> None:
    # folded constants and weights are rounded once more: 2⁻¹¹ and 2⁻⁸, through a few products
    check(random_graph(seed, dtype=dtype), rtol=1e-2 if dtype is DType.F16 else 6e-2)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_strict_is_exact(seed: int) -> None:
    graph = random_graph(
        seed, steps=("unary", "binary", "select", "broadcast", "reshape", "transpose", "slice", "cast")
    )
    cleaned = clean_up(graph, strict=True, verify=True).graph
    inputs = random_inputs(graph, seed)
    for x, y in zip(evaluate(graph, inputs), evaluate(cleaned, inputs), strict=True):
        np.testing.assert_array_equal(x, y)


def test_passes_have_the_names_of_their_files() -> None:
    for step in passes():
        assert type(step).__module__.rsplit(".", 1)[1] == step.name.replace("-", "_")
    assert {s.name for s in passes()} - {s.name for s in passes(strict=True)} == {"fold-scales", "roll-recurrences"}


def test_the_log_says_what_changed() -> None:
    log = clean_up(conv_batch_norm()).log
    assert ("fold-scales", 1) in log
    assert all(count > 0 for _, count in log)


def test_opaque_calls_stay() -> None:
    graph = GRAPHS["opaque"]()
    assert print_graph(clean_up(graph).graph) == print_graph(graph)


# Views.


def perm(*order: int) -> a.TransposeAttrs:
    return a.TransposeAttrs(order)


VIEWS: dict[str, tuple[Callable[[GraphBuilder, NodeId], NodeId], list[str]]] = {
    "double transpose": (lambda b, x: b.transpose(b.transpose(x, (1, 2, 0)), (2, 0, 1)), []),
    "two transposes": (lambda b, x: b.transpose(b.transpose(x, (1, 2, 0)), (1, 2, 0)), ["transpose"]),
    "identity": (lambda b, x: b.add(Prim.TRANSPOSE, x, attrs=perm(0, 1, 2)), []),
    "ones move": (lambda b, x: b.transpose(b.reshape(x, (2, 1, 12)), (1, 0, 2)), ["reshape"]),
    "not only ones": (lambda b, x: b.transpose(b.reshape(x, (2, 1, 12)), (1, 2, 0)), ["reshape", "transpose"]),
    "reshapes": (lambda b, x: b.reshape(b.reshape(x, (24,)), (4, 6)), ["reshape"]),
    "reshape back": (lambda b, x: b.reshape(b.reshape(x, (24,)), (2, 3, 4)), []),
    "ones added": (lambda b, x: b.add(Prim.NEG, b.reshape(x, (1, 2, 3, 4))), ["reshape", "neg"]),
    "broadcasts": (lambda b, x: b.broadcast(b.broadcast(x, (1, 2, 3, 4)), (5, 2, 3, 4)), ["broadcast"]),
    "leading ones": (lambda b, x: b.broadcast(b.reshape(x, (1, 1, 2, 3, 4)), (5, 6, 2, 3, 4)), ["broadcast"]),
    "inner ones": (lambda b, x: b.broadcast(b.reshape(x, (2, 1, 3, 4)), (2, 5, 3, 4)), ["reshape", "broadcast"]),
    "transposed broadcast": (
        lambda b, x: b.transpose(b.broadcast(x, (5, 2, 3, 4)), (3, 0, 1, 2)),
        ["reshape", "transpose", "broadcast"],
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    make, wanted = VIEWS[name]
    assert prims(check(build(make, (2, 3, 4)))) == wanted


def test_a_scalar_is_repeated_last() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(F32, ()), "x")
    y = b.transpose(b.reshape(b.broadcast(x, (2, 6)), (2, 3, 2)), (2, 0, 1))
    assert prims(check(b.build([y]))) == ["broadcast"]


# Slices.


def sliced(b: GraphBuilder, x: NodeId, start: int, size: int, step: int = 1) -> NodeId:
    return b.slice(x, (0, start), (b.type_of(x).shape[0], size), (1, step))


def concat(b: GraphBuilder, *xs: NodeId) -> NodeId:
    return b.add(Prim.CONCAT, *xs, attrs=a.ConcatAttrs(1))


SLICES: dict[str, tuple[Callable[[GraphBuilder, NodeId], NodeId], list[str]]] = {
    "slice of slice": (lambda b, x: sliced(b, sliced(b, x, 1, 4, 2), 3, 2, -2), ["slice"]),
    "whole": (lambda b, x: b.add(Prim.SLICE, x, attrs=a.SliceAttrs((0, 0), (2, 8), (1, 1))), []),
    "backwards twice": (lambda b, x: sliced(b, sliced(b, x, 7, 8, -1), 7, 8, -1), []),
    "exact piece": (lambda b, x: sliced(b, concat(b, b.add(Prim.NEG, x), x), 8, 8), []),
    "within a piece": (lambda b, x: sliced(b, concat(b, b.add(Prim.NEG, x), x), 9, 3, 2), ["slice"]),
    "across pieces": (lambda b, x: sliced(b, concat(b, b.add(Prim.NEG, x), x), 6, 4), ["neg", "concat", "slice"]),
    "one piece": (concat, []),
    "empty piece": (lambda b, x: concat(b, sliced(b, x, 0, 0), x), []),
    "within a pad": (lambda b, x: sliced(b, b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 2), (0, 1))), 3, 5), ["slice"]),
    "into a pad": (
        lambda b, x: sliced(b, b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 2), (0, 1))), 1, 5),
        ["pad", "slice"],
    ),
    "no pad": (lambda b, x: b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0), (0, 0))), []),
    "of a broadcast": (
        lambda b, x: b.slice(b.broadcast(x, (3, 2, 8)), (1, 0, 2), (2, 2, 3), (1, 1, 2)),
        ["slice", "broadcast"],
    ),
    "gather one": (
        lambda b, x: b.add(Prim.GATHER, x, b.constant(np.array(3, np.int64)), attrs=a.GatherAttrs(1)),
        ["slice", "reshape"],
    ),
    "gather spaced": (
        lambda b, x: b.add(Prim.GATHER, x, b.constant(np.array([7, 5, 3], np.int64)), attrs=a.GatherAttrs(1)),
        ["slice"],
    ),
    "gather clamped": (
        lambda b, x: b.add(Prim.GATHER, x, b.constant(np.array([6, 9], np.int64)), attrs=a.GatherAttrs(1)),
        ["slice"],
    ),
    "gather any": (
        lambda b, x: b.add(Prim.GATHER, x, b.constant(np.array([1, 2, 4], np.int64)), attrs=a.GatherAttrs(1)),
        ["gather"],
    ),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices(name: str) -> None:
    make, wanted = SLICES[name]
    assert prims(check(build(make, (2, 8)))) == wanted


# Casts.


@pytest.mark.parametrize(
    ("source", "between", "target", "wanted"),
    [
        (F32, DType.F64, F32, 0),
        (DType.F16, F32, DType.BF16, 1),
        (DType.I8, DType.BF16, DType.I8, 0),
        (DType.U8, DType.I16, DType.U8, 0),
        (F32, DType.F16, F32, 2),
        (DType.F16, DType.BF16, DType.F16, 2),
        (DType.I32, F32, DType.I32, 2),
        (DType.I8, DType.U8, DType.I8, 2),
        (F32, DType.I32, F32, 2),
    ],
)
def test_casts(source: DType, between: DType, target: DType, wanted: int) -> None:
    graph = build(lambda b, x: b.cast(b.cast(x, between), target), dtype=source)
    cleaned = clean_up(graph, verify=True).graph
    assert prims(cleaned) == ["cast"] * wanted
    inputs = random_inputs(graph)
    np.testing.assert_array_equal(evaluate(graph, inputs)[0], evaluate(cleaned, inputs)[0])


def test_what_holds_what_is_true_of_numpy_types() -> None:
    for wide in DType:
        for narrow in DType:
            if not (wide.is_emulated or narrow.is_emulated):
                assert holds_every_value(wide, narrow) == np.can_cast(narrow.numpy, wide.numpy, "safe") or (
                    # NumPy calls i64 -> f64 safe, which loses the last bits
                    (wide, narrow) == (DType.F64, DType.I64)
                )


# Arithmetic.


def with_constant(prim: Prim, value: float, *, left: bool = False) -> Callable[[GraphBuilder, NodeId], NodeId]:
    def make(b: GraphBuilder, x: NodeId) -> NodeId:
        c = b.broadcast(b.scalar(value, b.type_of(x).dtype), b.type_of(x).shape)
        return b.add(prim, c, x) if left else b.add(prim, x, c)

    return make


INF = float("inf")
ARITHMETIC: dict[str, tuple[Callable[[GraphBuilder, NodeId], NodeId], list[str]]] = {
    "x * 1": (with_constant(Prim.MUL, 1.0), []),
    "1 * x": (with_constant(Prim.MUL, 1.0, left=True), []),
    "x * 0": (with_constant(Prim.MUL, 0.0), ["broadcast", "mul"]),
    "x / 1": (with_constant(Prim.DIV, 1.0), []),
    "x / 8": (with_constant(Prim.DIV, 8.0), ["broadcast", "mul"]),
    "x / -0.25": (with_constant(Prim.DIV, -0.25), ["broadcast", "mul"]),
    "x / 3": (with_constant(Prim.DIV, 3.0), ["broadcast", "div"]),
    "x / 2^100": (with_constant(Prim.DIV, 2.0**100), ["broadcast", "div"]),
    "1 / x": (with_constant(Prim.DIV, 1.0, left=True), ["broadcast", "div"]),
    "x + 0": (with_constant(Prim.ADD, 0.0), ["broadcast", "add"]),
    "x + -0": (with_constant(Prim.ADD, -0.0), []),
    "x - 0": (with_constant(Prim.SUB, 0.0), []),
    "x - -0": (with_constant(Prim.SUB, -0.0), ["broadcast", "sub"]),
    "0 - x": (with_constant(Prim.SUB, 0.0, left=True), ["broadcast", "sub"]),
    "exp(x) + 0": (lambda b, x: with_constant(Prim.ADD, 0.0)(b, b.add(Prim.EXP, x)), ["exp"]),
    "x ^ 2": (with_constant(Prim.POW, 2.0), ["mul"]),
    "x ^ 1": (with_constant(Prim.POW, 1.0), []),
    "x ^ -1": (with_constant(Prim.POW, -1.0), ["reciprocal"]),
    "x ^ 0.5": (with_constant(Prim.POW, 0.5), ["broadcast", "pow"]),
    "max(x, -inf)": (with_constant(Prim.MAX, -INF), []),
    "max(x, inf)": (with_constant(Prim.MAX, INF), ["broadcast", "max"]),
    "min(x, inf)": (with_constant(Prim.MIN, INF), []),
    "max(x, x)": (lambda b, x: b.add(Prim.MAX, x, x), []),
    "x + x": (lambda b, x: b.add(Prim.ADD, x, x), ["add"]),
    "-(-x)": (lambda b, x: b.add(Prim.NEG, b.add(Prim.NEG, x)), []),
    "|-x|": (lambda b, x: b.add(Prim.ABS, b.add(Prim.NEG, x)), ["abs"]),
    "floor(floor(x))": (lambda b, x: b.add(Prim.FLOOR, b.add(Prim.FLOOR, x)), ["floor"]),
    "floor(ceil(x))": (lambda b, x: b.add(Prim.FLOOR, b.add(Prim.CEIL, x)), ["ceil", "floor"]),
    "where(x < 0, x, x)": (lambda b, x: b.add(Prim.SELECT, b.apply(Prim.LT, x, 0.0), x, x), []),
    "where(not c, x, -x)": (
        lambda b, x: b.add(Prim.SELECT, b.add(Prim.NOT, b.apply(Prim.LT, x, 0.0)), x, b.add(Prim.NEG, x)),
        ["broadcast", "lt", "neg", "select"],
    ),
    "sum over nothing": (lambda b, x: b.add(Prim.REDUCE_SUM, x, attrs=a.ReduceAttrs(())), []),
    "max over a one": (lambda b, x: b.reduce(Prim.REDUCE_MAX, b.reshape(x, (2, 1, 8)), [1]), ["reshape"]),
    "window of one": (
        lambda b, x: b.add(Prim.WINDOW_SUM, x, attrs=a.WindowAttrs((1,), (1,), (0,), (0,), (2,))),
        [],
    ),
    "window with pad": (
        lambda b, x: b.add(Prim.WINDOW_SUM, x, attrs=a.WindowAttrs((1,), (1,), (1,), (0,), (1,))),
        ["window_sum"],
    ),
}


@pytest.mark.parametrize(
    ("perm", "dtype", "wanted"),
    [
        ((0, 3, 1, 2), DType.BF16, ["cast", "transpose"]),
        ((0, 3, 1, 2), DType.F64, ["transpose", "cast"]),
        ((0, 2, 3, 1), DType.BF16, ["transpose", "cast"]),
    ],
)
def test_inputs_with_channels_last_are_narrowed_as_they_lie(
    perm: tuple[int, ...], dtype: DType, wanted: list[str]
) -> None:
    graph = build(lambda b, x: b.cast(b.transpose(x, perm), dtype), (2, 3, 4, 5))
    assert prims(check(graph)) == wanted


def test_values_inside_are_narrowed_behind_their_turn() -> None:
    graph = build(lambda b, x: b.cast(b.transpose(b.apply(Prim.EXP, x), (0, 3, 1, 2)), DType.BF16), (2, 3, 4, 5))
    assert prims(check(graph)) == ["exp", "transpose", "cast"]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_exact(name: str) -> None:
    make, wanted = ARITHMETIC[name]
    graph = build(make, (2, 8))
    cleaned = clean_up(graph, strict=True, verify=True).graph
    assert prims(cleaned) == wanted
    special = [0.0, -0.0, INF, -INF, float("nan"), 1e-40, -1e38, 0.1]
    x = np.array([special, special[::-1]], np.float32)
    before, after = (evaluate(g, [x])[0] for g in (graph, cleaned))
    np.testing.assert_array_equal(before, after)
    assert np.array_equal(np.signbit(before), np.signbit(after)) or "-(-x)" not in name


def test_integers_have_one_zero() -> None:
    assert prims(check(build(with_constant(Prim.ADD, 0), dtype=DType.I32))) == []
    assert prims(check(build(with_constant(Prim.MUL, 0), dtype=DType.I32))) == ["broadcast"]


def test_zeros_of_both_signs_are_not_uniform() -> None:
    c = np.array([0.0, -0.0, 0.0], np.float32)
    assert prims(check(build(lambda b, x: b.apply(Prim.SUB, x, b.constant(c))))) == ["broadcast", "sub"]


# Constants.


def test_chains_are_rounded_once() -> None:
    b = GraphBuilder()
    c = b.scalar(0.1, F32)
    for _ in range(20):
        c = b.add(Prim.MUL, c, b.add(Prim.EXP, b.add(Prim.SIN, c)))
    graph = b.build([c])
    exact = evaluate(graph, [], precise=True)[0]
    folded = clean_up(graph).graph
    assert prims(folded) == []
    assert folded.constant(folded.outputs[0]) == np.float32(exact)
    strict = clean_up(graph, strict=True).graph
    assert strict.constant(strict.outputs[0]) == evaluate(graph, [])[0]


def test_decisions_see_what_the_network_sees() -> None:
    b = GraphBuilder()
    tenth = b.add(Prim.MUL, b.scalar(0.1, F32), b.scalar(10.0, F32))
    graph = b.build([b.add(Prim.FLOOR, tenth), b.cast(tenth, DType.I32)])
    folded = clean_up(graph).graph
    assert [folded.constant(i) for i in folded.outputs] == evaluate(graph, [])


def test_repeated_constants_are_not_stored_repeated() -> None:
    def make(b: GraphBuilder, x: NodeId) -> NodeId:
        wide = b.broadcast(b.constant(ramp(3, 1)), (100, 3, 400))
        return b.add(
            Prim.ADD, x, b.add(Prim.MUL, b.add(Prim.EXP, wide), b.broadcast(b.scalar(2.0, F32), (100, 3, 400)))
        )

    cleaned = check(build(make, (100, 3, 400)))
    assert prims(cleaned) == ["broadcast", "add"]
    assert [c.shape for c in cleaned.constants.values()] == [(3, 1)]


def test_large_results_are_left_alone() -> None:
    def make(b: GraphBuilder, x: NodeId) -> NodeId:
        row, column = b.constant(np.arange(1200, dtype=np.float32)), b.constant(ramp(600, 1))
        return b.add(Prim.ADD, x, b.apply(Prim.MUL, row, column))

    assert "mul" in prims(check(build(make, (600, 1200))))
    weights = build(lambda b, x: b.add(Prim.MATMUL, x, b.transpose(b.constant(ramp(900, 600)), (1, 0))), (2, 600))
    assert prims(check(weights)) == ["matmul"]  # as large as before


def test_a_large_weight_may_be_widened_on_the_way_to_one_no_larger() -> None:
    """Weight norm in 16 bits: squares are summed in f32, which is larger than the limit and than what it is made of."""

    def normed(b: GraphBuilder, x: NodeId) -> NodeId:
        weight = b.constant(ramp(900, 800).astype(np.float16))
        wide = b.cast(weight, F32)
        squares = b.add(Prim.REDUCE_SUM, b.apply(Prim.MUL, wide, wide), attrs=a.ReduceAttrs((0,)))
        scale = b.cast(b.apply(Prim.RSQRT, squares), DType.F16)
        return b.add(Prim.MATMUL, x, b.apply(Prim.MUL, weight, scale))

    b = GraphBuilder()
    graph = b.build([normed(b, b.input(TensorType(DType.F16, (2, 900))))])
    folded = FoldConstantsPass().run(graph).graph
    assert prims(folded) == ["matmul"]
    assert [c.nbytes for c in folded.constants.values()] == [2 * 900 * 800]
    given = [np.ones((2, 900), np.float16)]
    assert_allclose(evaluate(folded, given)[0], evaluate(graph, given, precise=True)[0], rtol=2e-3)


def test_a_large_weight_that_is_read_wide_stays_narrow() -> None:
    b = GraphBuilder()
    x, weight = b.input(TensorType(F32, (900, 800))), b.constant(ramp(900, 800).astype(np.float16))
    wide = b.cast(weight, F32)
    total = b.apply(Prim.ADD, b.add(Prim.REDUCE_SUM, wide, attrs=a.ReduceAttrs((0, 1))), 0.0)
    graph = b.build([b.apply(Prim.ADD, x, wide), total, wide])
    folded = FoldConstantsPass().run(graph).graph
    assert prims(folded) == ["cast", "add"]
    assert max(c.nbytes for c in folded.constants.values()) == 2 * 900 * 800
    for got, want in zip(*(evaluate(g, [np.ones((900, 800), np.float32)]) for g in (folded, graph)), strict=True):
        assert_allclose(got, want, rtol=1e-5)


def test_masks_stay_index_predicates() -> None:
    def mask(b: GraphBuilder, x: NodeId) -> NodeId:
        row, column = b.iota((8,), 0, DType.I64), b.reshape(b.iota((8,), 0, DType.I64), (8, 1))
        lower = b.apply(Prim.LE, row, column)
        return b.add(Prim.SELECT, lower, x, b.broadcast(b.scalar(-INF, F32), (8, 8)))

    assert "iota" in prims(check(build(mask, (8, 8))))

    def frequencies(b: GraphBuilder, x: NodeId) -> NodeId:
        return b.apply(Prim.MUL, x, b.add(Prim.SIN, b.iota((8,), 0, F32)))

    assert prims(check(build(frequencies, (8, 8)))) == ["broadcast", "mul"]


def test_a_limit_of_zero_still_folds_what_does_not_grow() -> None:
    graph = build(lambda b, x: b.add(Prim.ADD, x, b.add(Prim.EXP, b.constant(ramp(2, 3)))))
    assert prims(FoldConstantsPass(max_bytes=0).run(graph).graph) == ["add"]


# Scales.


@pytest.mark.parametrize("dtype", [DType.F64, F32])
def test_batch_norm_vanishes(dtype: DType) -> None:
    assert prims(check(conv_batch_norm(dtype))) == ["conv", "broadcast", "add", "broadcast", "max"]


def test_strict_keeps_the_batch_norm() -> None:
    assert prims(check(conv_batch_norm(), strict=True)).count("mul") == 1


def test_what_others_read_does_not_change() -> None:
    assert "mul" in prims(check(conv_batch_norm(other_user=True)))


def scaled(scale: np.ndarray, weight: np.ndarray, dtype: DType = F32) -> Graph:
    def make(b: GraphBuilder, x: NodeId) -> NodeId:
        y = b.add(Prim.CONV, x, b.constant(weight.astype(dtype.numpy), dtype), attrs=CONV)
        return b.apply(Prim.MUL, y, b.constant(scale.astype(dtype.numpy), dtype))

    return build(make, (1, 3, 4, 4), dtype)


@pytest.mark.parametrize(
    ("scale", "weight", "dtype", "folds"),
    [
        (ramp(4, 1, 1), ramp(4, 3, 3, 3), F32, True),
        (ramp(1, 1, 1), ramp(4, 3, 3, 3), F32, True),
        (ramp(4, 1, 1), ramp(4, 3, 3, 3), DType.F16, True),
        (ramp(1, 4), ramp(4, 3, 3, 3), F32, False),  # along the width
        (np.full((4, 1, 1), 1e30), ramp(4, 3, 3, 3) * 1e10, F32, False),  # overflows
        (np.full((4, 1, 1), 100.0), ramp(4, 3, 3, 3) * 1e4, DType.F16, False),
        (np.full((4, 1, 1), 1e-6), ramp(4, 3, 3, 3) * 0.01, DType.F16, False),  # loses bits
        (np.array([1, 0, 1, 1]).reshape(4, 1, 1), ramp(4, 3, 3, 3), F32, True),
    ],
)
def test_when_scales_fold(scale: np.ndarray, weight: np.ndarray, dtype: DType, folds: bool) -> None:
    graph = scaled(scale, weight, dtype)
    cleaned = clean_up(graph, verify=True).graph
    assert ("mul" not in prims(cleaned)) == folds
    if dtype is F32 and np.max(np.abs(weight)) < 10:
        check(graph)


def test_transposed_and_grouped_convolutions_and_products() -> None:
    for name in ("transposed_conv", "matmul"):
        cleaned = check(GRAPHS[name]())
        assert "mul" not in prims(cleaned)


def test_depthwise_convolution() -> None:
    def make(b: GraphBuilder, x: NodeId) -> NodeId:
        conv = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), groups=3)
        y = b.add(Prim.CONV, x, b.constant(ramp(6, 1, 3, 3)), attrs=conv)
        y = b.apply(Prim.SUB, b.apply(Prim.DIV, y, b.constant(ramp(6, 1, 1))), b.constant(ramp(6, 1, 1)))
        return b.apply(Prim.ADD, b.constant(ramp(6, 1, 1)), b.apply(Prim.MUL, b.constant(ramp(6, 1, 1)), y))

    assert prims(check(build(make, (1, 3, 4, 4)))) == ["conv", "broadcast", "add"]


def test_a_bias_alone_stays_where_it_is() -> None:
    def make(b: GraphBuilder, x: NodeId) -> NodeId:
        return b.apply(
            Prim.ADD, b.add(Prim.CONV, x, b.constant(ramp(4, 3, 3, 3)), attrs=CONV), b.constant(ramp(4, 1, 1))
        )

    graph = build(make, (1, 3, 4, 4))
    assert FoldScalesPass().run(graph) == (graph, 0)


def test_a_weight_that_is_an_input_stays() -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(F32, (2, 3))), b.input(TensorType(F32, (3, 4)))
    graph = b.build([b.apply(Prim.MUL, b.add(Prim.MATMUL, x, w), b.constant(ramp(4)))])
    assert "mul" in prims(check(graph))


def test_large_networks_are_quick() -> None:
    """1,500 nodes and 250 MB of weights in less than twice the time that the same core takes to make them."""
    start = time.process_time()
    rng = np.random.default_rng(0)
    b = GraphBuilder()
    x = b.input(TensorType(F32, (16, 1024)), "x")
    for k in range(60):
        y = b.add(Prim.MATMUL, x, b.constant(rng.standard_normal((1024, 1024), np.float32)))
        y = b.apply(Prim.ADD, y, b.constant(rng.standard_normal(1024, np.float32)))
        for _ in range(6):
            y = b.add(Prim.TANH, b.apply(Prim.MUL, y, 0.5 + k))
            y = b.reshape(b.reshape(y, (4, 4, 1024)), (16, 1024))
        x = b.apply(Prim.ADD, x, y)
    graph = b.build([x])
    made = time.process_time() - start
    assert len(graph) > 1300
    assert sum(c.nbytes for c in graph.constants.values()) > 250e6
    took, cleaned = [], graph
    for _ in range(3):  # neighbours on the machine slow some of them down
        start = time.process_time()
        cleaned = clean_up(graph).graph
        took.append(time.process_time() - start)
        if took[-1] < 2 * made:
            break
    assert min(took) < 2 * made and cleaned is not graph
    verify_graph(cleaned)


def half_batch_norm(dtype: DType, *, rounds: bool) -> Graph:
    """conv in 16 bits, its batch norm in f32, as frameworks compute it."""

    def make(b: GraphBuilder, x: NodeId) -> NodeId:
        w = b.constant(round_to((ramp(5, 3, 3, 3) / 64).astype(np.float64), dtype), dtype)
        attrs = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1))
        y = b.cast(b.add(Prim.CONV, x, w, attrs=attrs), F32)
        y = b.apply(Prim.MUL, y, b.constant(ramp(5, 1, 1) / 4 + 0.5))
        y = b.apply(Prim.ADD, y, b.constant(ramp(5, 1, 1) - 2))
        return b.add(Prim.TANH, b.cast(y, dtype) if rounds else y)

    return build(make, (1, 3, 4, 4), dtype)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_a_batch_norm_in_f32_folds_into_a_convolution_in_16_bits(dtype: DType) -> None:
    cleaned = clean_up(half_batch_norm(dtype, rounds=True), strict=False, verify=True).graph
    assert "mul" not in prims(cleaned)
    assert "cast" not in prims(cleaned)  # the shift is added in 16 bits, because the sum is rounded to them anyway
    kept = clean_up(half_batch_norm(dtype, rounds=False), strict=False, verify=True).graph
    assert "mul" not in prims(kept)
    assert prims(kept).count("cast") == 1
    assert "mul" in prims(clean_up(half_batch_norm(dtype, rounds=True), strict=True, verify=True).graph)
    x = round_to(np.random.default_rng(0).standard_normal((1, 3, 4, 4)), dtype)
    for rounds in (True, False):
        graph = half_batch_norm(dtype, rounds=rounds)
        folded = clean_up(graph, strict=False).graph
        want, got = (np.asarray(evaluate(g, [x])[0], np.float64) for g in (graph, folded))
        assert np.abs(want - got).max() <= {DType.F16: 4e-3, DType.BF16: 3e-2}[dtype]
