"""Bounds that are sound and estimates that rank, for problems on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.orchestrate.graphs import Net, residual_net, transformer
from tests.orchestrate.test_estimate import problem_of

from weft.costmodel.roofline import Product, gap_us
from weft.device.cuda.facts import GpuFacts, profile
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, mask_of
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate, Problem
from weft.kernels.formats import Format
from weft.orchestrate.contraction_cuda import product_of
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.estimate import estimate_us, lower_bound_us
from weft.orchestrate.estimate_cuda import gpu_estimate_us, gpu_lower_bound_us
from weft.orchestrate.extract import extract, format_choices

H200 = GpuFacts()


def pointwise(size: int, dtype: DType = DType.F16, steps: int = 1) -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (size,)))
    for _ in range(steps):
        x = b.apply(Prim.MAX, x, 0.0) if steps == 1 else b.apply(Prim.MUL, x, x)
    return problem_of(b.build([x]))


def product(m: int, n: int, k: int, dtype: DType) -> Problem:
    b = GraphBuilder()
    x, w = b.input(TensorType(dtype, (m, k))), b.input(TensorType(dtype, (k, n)))
    return problem_of(b.build([b.add(Prim.MATMUL, x, w)]))


def test_the_bound_counts_only_bytes_beyond_the_cache() -> None:
    assert gpu_lower_bound_us(pointwise(8 << 20), H200) == 0.0  # 32 MiB in all
    bound = gpu_lower_bound_us(pointwise(1 << 28), H200)
    assert bound == pytest.approx((4 * (1 << 28) - 62914560) / 4916.7 / 1e3)
    assert gpu_lower_bound_us(pointwise(1 << 28), replace(H200, peak_bandwidth=0.0)) == 0.0


@pytest.mark.parametrize(
    ("dtype", "peak"), [(DType.F16, 1070.5e12), (DType.BF16, 1070.5e12), (DType.F32, 535.3e12), (DType.F64, 66.9e12)]
)
def test_the_bound_of_products_is_at_the_highest_clock(dtype: DType, peak: float) -> None:
    bound = gpu_lower_bound_us(product(1024, 1024, 1024, dtype), H200)
    assert bound == pytest.approx(2 * 1024**3 / peak * 1e6, rel=1e-3)
    assert gpu_lower_bound_us(product(1024, 1024, 1024, dtype), replace(H200, capability=120)) == 0.0


def test_the_type_of_the_facts_decides() -> None:
    problem = product(512, 512, 512, DType.F16)
    assert estimate_us(problem, H200) == gpu_estimate_us(problem, H200)
    assert lower_bound_us(problem, H200) == gpu_lower_bound_us(problem, H200)


@pytest.mark.parametrize("name", ["h200", "h100", "a100"])
@pytest.mark.parametrize("net", [residual_net, transformer])
def test_no_estimate_is_below_its_bound(net: Callable[..., Any], name: str) -> None:
    graph, facts, seen = net(1), profile(name), 0
    for candidate in enumerate_candidates(graph).candidates[:400]:
        for choice in format_choices(graph, candidate)[:2]:
            problem = extract(graph, candidate, choice.inputs, choice.outputs).problem
            estimate = gpu_estimate_us(problem, facts)
            assert gpu_lower_bound_us(problem, facts) <= estimate < 1e4 and estimate >= gap_us(facts)
            seen += 1
    assert seen >= 20


def test_a_small_kernel_is_all_gap() -> None:
    assert gap_us(H200) < gpu_estimate_us(pointwise(1 << 10), H200) < gap_us(H200) + 0.1
    assert gpu_estimate_us(pointwise(1 << 28), H200) > 200


def test_fused_chains_save_gaps_and_traffic() -> None:
    for size in (1 << 12, 1 << 20, 1 << 27):
        assert gpu_estimate_us(pointwise(size, steps=4), H200) < 0.5 * 4 * gpu_estimate_us(pointwise(size), H200)


def test_an_epilogue_is_nearly_free_and_a_kernel_of_its_own_is_not() -> None:
    net, other = Net(), Net()
    plain = gpu_estimate_us(problem_of(net.build(net.conv(net.input(1, 64, 56, 56), 64, bias=False))), H200)
    y = other.conv(other.input(1, 64, 56, 56), 64, bias=False)
    fused = gpu_estimate_us(problem_of(other.build(other.relu(y))), H200)
    alone = gpu_estimate_us(pointwise(64 * 56 * 56, DType.F32), H200)
    assert plain <= fused < plain + 0.3 * alone


def test_what_a_convolution_computes_on_the_way_is_computed_again() -> None:
    def estimate(function: Prim | None, convolution: bool) -> float:
        b = GraphBuilder()
        x, w = b.input(TensorType(DType.F16, (8, 64, 56, 56))), b.input(TensorType(DType.F16, (256, 64, 3, 3)))
        y = x if function is None else b.apply(function, x)
        same = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1))
        graph = b.build([b.add(Prim.CONV, y, w, attrs=same) if convolution else y])
        kept = [v for v in graph.inputs if convolution or v == x]
        members = mask_of(i for i, n in enumerate(graph.nodes) if n.prim not in FREE)
        candidate = Candidate(members, tuple(kept), graph.outputs)
        row = Format.ROW
        return gpu_estimate_us(extract(graph, candidate, [row] * len(kept), [row]).problem, H200)

    in_front = estimate(Prim.EXP, True) - estimate(None, True)
    assert estimate(None, True) > 10
    assert in_front > estimate(Prim.EXP, False)  # two tiles of columns, nine taps: better a kernel of its own
    assert 0 < estimate(Prim.NEG, True) - estimate(None, True) < in_front  # loads through registers either way


def test_convolutions_in_a_row_pay_for_their_halo() -> None:
    def twice(kernel: int) -> tuple[float, float]:
        net = Net()
        x = net.input(1, 64, 56, 56)
        one = gpu_estimate_us(problem_of(net.build(net.conv(x, 64, kernel, bias=False))), H200)
        net = Net()
        y = net.conv(net.input(1, 64, 56, 56), 64, kernel, bias=False)
        return one, gpu_estimate_us(problem_of(net.build(net.conv(y, 64, kernel, bias=False))), H200)

    one, both = twice(1)
    assert both < 2 * one
    one, both = twice(3)
    assert 2.2 * (one - gap_us(H200)) < both - gap_us(H200) < 2.3 * (one - gap_us(H200))  # 1 + 1.27


def test_channels_side_by_side_are_better() -> None:
    net = Net()
    problem = problem_of(net.build(net.conv(net.input(1, 64, 56, 56), 64)))
    last = replace(problem, input_formats=(Format.LAST,) * len(problem.input_formats), output_formats=(Format.LAST,))
    assert gpu_estimate_us(last, H200) < gpu_estimate_us(problem, H200)


def test_few_long_rows_are_spread_over_blocks() -> None:
    def normalise(rows: int, length: int) -> float:
        b = GraphBuilder()
        x = b.input(TensorType(DType.F32, (rows, length)))
        mean = b.add(Prim.REDUCE_SUM, x, attrs=a.ReduceAttrs((1,)))
        return gpu_estimate_us(problem_of(b.build([b.apply(Prim.SUB, x, mean)])), H200)

    assert normalise(4, 1 << 20) < 3 * normalise(4096, 1 << 10)  # not a thirtieth of the machine
    assert normalise(4, 1 << 20) > normalise(4096, 1 << 10)


def test_convolutions_as_products() -> None:
    def of(shape: tuple[int, ...], weight: tuple[int, ...], attrs: a.ConvAttrs) -> Product:
        b = GraphBuilder()
        x, w = b.input(TensorType(DType.F16, shape)), b.input(TensorType(DType.F16, weight))
        graph = b.build([b.add(Prim.CONV, x, w, attrs=attrs)])
        node = next(n for n in graph.nodes if CATEGORY[n.prim] is Category.LINEAR)
        return product_of(graph, node)

    same = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1))
    assert of((2, 64, 56, 56), (128, 64, 3, 3), same) == Product(2 * 56 * 56, 128, 576)
    assert of((1, 3, 8, 8), (16, 3, 3, 3), same) == Product(64, 16, 72)  # three channels are padded to eight
    assert of((1, 64, 8, 8), (64, 16, 3, 3), replace(same, groups=4)) == Product(64, 16, 144, 4)
    up = a.ConvAttrs((2, 2), (0, 0), (0, 0), (1, 1), transposed=True, output_padding=(0, 0))
    assert of((1, 32, 8, 8), (32, 16, 2, 2), up) == Product(256, 16, 32)


def test_depthwise_is_no_matrix_product() -> None:
    def depthwise(channels: int) -> Problem:
        b = GraphBuilder()
        x, w = (
            b.input(TensorType(DType.F16, (1, channels, 56, 56))),
            b.input(TensorType(DType.F16, (channels, 1, 3, 3))),
        )
        attrs = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), channels)
        return problem_of(b.build([b.add(Prim.CONV, x, w, attrs=attrs)]))

    assert gpu_estimate_us(depthwise(64), H200) < 2.0
    assert gpu_estimate_us(depthwise(1024), H200) < 16 * gpu_estimate_us(depthwise(64), H200)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [((64, 32), Product(512, 32, 64)), ((1, 64, 32), Product(512, 32, 64)), ((4, 64, 32), Product(128, 32, 64, 4))],
)
def test_one_weight_for_a_batch_makes_one_product(weight: tuple[int, ...], expected: Product) -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F16, (4, 128, 64))), b.input(TensorType(DType.F16, weight))
    graph = b.build([b.add(Prim.MATMUL, x, w)])
    assert product_of(graph, next(n for n in graph.nodes if n.prim is Prim.MATMUL)) == expected


def convolved(end: str, *, wide: bool = False) -> Problem:
    """A convolution of channels side by side, and a nonlinearity behind it."""
    b = GraphBuilder()
    x, w = (
        b.input(TensorType(DType.F16, (16, 64, 28, 28))),
        b.input(TensorType(DType.F16, (256, 64, 1, 1)), is_weight=True),
    )
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1))
    y = b.cast(y, DType.F32)
    if end in ("over 6", "over 8"):
        clipped = b.apply(Prim.MIN, b.apply(Prim.MAX, b.apply(Prim.ADD, y, 3.0), 0.0), 6.0)
        y = b.apply(Prim.DIV, b.apply(Prim.MUL, y, clipped), float(end[-1]))
    elif end in ("exp", "exp where"):
        away = b.apply(Prim.EXP, y)
        if end == "exp where":
            away = b.add(Prim.SELECT, b.apply(Prim.GT, y, 20.0), y, away)
        y = b.apply(Prim.DIV, y, b.apply(Prim.ADD, away, 1.0))
    graph = b.build([y if wide else b.cast(y, DType.F16)])
    return Problem(graph, f"{end} {graph}", (Format.LAST, Format.ROW), (Format.LAST,))


def test_exact_divisions_behind_a_product_are_not_hidden() -> None:
    ends = ("none", "over 6", "over 8", "exp", "exp where")
    us = {end: gpu_estimate_us(convolved(end), H200) for end in ends}
    assert max(us.values()) < us["none"] + 2.5  # 16 bits: the machine's own functions, a product by the inverse
    us = {end: gpu_estimate_us(convolved(end, wide=True), H200) for end in ends}
    assert us["over 6"] > us["over 8"] + 3  # a power of two is a product anyway
    assert us["exp"] > us["none"] + 3


def normed(turned: bool, fmt: Format = Format.ROW, length: int = 160) -> Problem:
    """A row less its mean, written as it is or with rows side by side."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (16, 1024, length)))
    mean = b.apply(Prim.MUL, b.add(Prim.REDUCE_SUM, b.cast(x, DType.F32), attrs=a.ReduceAttrs((2,))), 1 / length)
    wide = b.add(Prim.BROADCAST, mean, attrs=a.BroadcastAttrs((16, 1024, length)))
    y = b.cast(b.apply(Prim.SUB, b.cast(x, DType.F32), wide), DType.F16)
    if turned:
        y = b.add(Prim.TRANSPOSE, y, attrs=a.TransposeAttrs((0, 2, 1)))
    return replace(problem_of(b.build([y])), output_formats=(fmt,))


def test_rows_that_are_written_across_are_stored_by_sectors() -> None:
    straight, across = (gpu_estimate_us(normed(t), H200) for t in (False, True))
    assert across > straight + 12  # measured: 20.2 us against 4.1
    short = [gpu_estimate_us(normed(t, length=32), H200) for t in (False, True)]
    assert short[1] - short[0] < (across - straight) / 8  # a warp has several of them, whose elements are neighbours


def test_the_copy_engine_reads_no_reflected_borders() -> None:
    def padded(mode: str | None) -> float:
        b = GraphBuilder()
        x = b.input(TensorType(DType.F16, (16, 128, 56, 56)))
        w = b.input(TensorType(DType.F16, (128, 128, 3, 3)), is_weight=True)
        if mode is not None:
            x = b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), mode))  # type: ignore[arg-type]
        inside = (1, 1) if mode is None else (0, 0)
        y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), inside, inside, (1, 1), 1))
        problem = replace(
            problem_of(b.build([y])), input_formats=(Format.LAST, Format.ROW), output_formats=(Format.LAST,)
        )
        return gpu_estimate_us(problem, H200)

    assert padded("constant") < 1.2 * padded(None)
    assert padded("reflect") > 1.15 * padded(None)  # measured: 42 us against 21


def test_depthwise_pixels_that_become_channels_side_by_side_are_stored_across() -> None:
    b = GraphBuilder()
    x, w = (
        b.input(TensorType(DType.F16, (1, 128, 128, 128))),
        b.input(TensorType(DType.F16, (128, 1, 3, 3)), is_weight=True),
    )
    row = problem_of(b.build([b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 128))]))
    last = replace(row, output_formats=(Format.LAST,))
    assert gpu_estimate_us(last, H200) > 4 * gpu_estimate_us(row, H200)  # measured: 29.8 us against 4.1


def test_what_is_written_in_both_orders_is_stored_by_sectors() -> None:
    def written(*, both: bool) -> float:
        b = GraphBuilder()
        x = b.apply(Prim.NEG, b.input(TensorType(DType.F16, (1, 1024, 160))))
        y = b.add(Prim.TRANSPOSE, x, attrs=a.TransposeAttrs((0, 2, 1)))
        return gpu_estimate_us(problem_of(b.build([y, x] if both else [y])), H200)

    assert written(both=True) > written(both=False) + 1  # measured: 3.5 us against 1.3
