from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.ir.random_graphs import random_graph
from tests.slow import few
from tests.tune.cases import single_graphs

from weft.frontends.torch.dtypes import EMULATED
from weft.generate.library.execute import TORCH_DTYPE
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate as reference
from weft.ir.types import Array, DType, TensorType
from weft.kernels.measurement import Verdict
from weft.tune import oracle, verify
from weft.tune.inputs import Domain, InputSet, draw
from weft.tune.oracle import TABLE, Evaluation, Mode, decisions, evaluate, truncated_to_tf32
from weft.tune.tolerance import ULPS

NO_MEANING = {Prim.INPUT, Prim.CONSTANT, Prim.OPAQUE}


def as_array(x: torch.Tensor) -> Array:
    return (x.float() if x.dtype in EMULATED else x).numpy()


def run(graph: Graph, inputs: list[torch.Tensor], mode: Mode, *, padded: bool = True) -> Evaluation:
    found = evaluate(graph, inputs, mode, seed=0, padded=padded)
    assert isinstance(found, Evaluation)
    return found


def close(found: torch.Tensor, wanted: Array, u: float, slack: float) -> bool:
    got, want = found.double().numpy(), wanted.astype(np.float64)
    if got.shape != want.shape or not np.array_equal(np.isnan(got), np.isnan(want)):
        return False
    infinite = np.isinf(want) | np.isinf(got)
    if not np.array_equal(np.where(infinite, got, 0), np.where(infinite, want, 0), equal_nan=True):
        return False
    finite = np.isfinite(want)
    scale = np.abs(want[finite]).max() if finite.any() else 0.0
    return bool(np.all(np.abs(got[finite] - want[finite]) <= slack * u * (np.abs(want[finite]) + 0.1 * scale)))


def test_the_table_is_total() -> None:
    assert set(TABLE) == set(Prim)


@pytest.mark.parametrize("prim", few([p for p in Prim if p not in NO_MEANING], 24), ids=lambda p: p.value)
def test_agrees_with_the_other_reading_of_the_semantics(prim: Prim) -> None:
    compared = 0
    for graph in single_graphs(prim):
        for kind in InputSet:
            for domain in (Domain.ZERO_MEAN, Domain.UNIT):
                inputs = draw(graph, kind, domain, seed=5)
                precise = run(graph, inputs, Mode.PRECISE)
                if precise.undefined[0]:
                    continue  # any value is right
                arrays = [as_array(x) for x in inputs]
                with np.errstate(all="ignore"):
                    (want,) = reference(graph, arrays, precise=True)
                    (native,) = reference(graph, arrays)
                dtype = graph.type_of(graph.outputs[0]).dtype
                exact = not dtype.is_float
                assert close(precise.outputs[0], want, 0.0 if exact else 2.0**-52, 64.0), (str(graph), kind, domain)
                u = (
                    0.0
                    if exact
                    else {
                        DType.F16: 2.0**-10,
                        DType.BF16: 2.0**-7,
                        DType.F8E4M3: 2.0**-3,
                        DType.F8E5M2: 2.0**-2,
                        DType.F64: 2.0**-52,
                    }.get(dtype, 2.0**-23)
                )
                assert close(run(graph, inputs, Mode.NATIVE).outputs[0], native, u, 8.0), (str(graph), kind, domain)
                compared += 1
    assert compared >= 3


@pytest.mark.parametrize("seed", range(60))
def test_agrees_on_random_graphs(seed: int) -> None:
    graph = random_graph(seed)
    inputs = draw(graph, InputSet.NORMAL, Domain.ZERO_MEAN, seed=seed)
    wanted = reference(graph, [as_array(x) for x in inputs], precise=True)
    for found, want in zip(run(graph, inputs, Mode.PRECISE).outputs, wanted, strict=True):
        assert np.allclose(found.numpy(), want, rtol=1e-9, atol=1e-9 * max(1.0, float(np.abs(want).max(initial=0))))


def matmul(k: int, dtype: DType = DType.F32) -> Graph:
    b = GraphBuilder()
    x, y = b.input(TensorType(dtype, (48, k))), b.input(TensorType(dtype, (k, 48)))
    return b.build([b.add(Prim.MATMUL, x, y)])


@pytest.mark.parametrize("k", [64, 1024, 4096])
def test_plain_error_of_a_product_is_that_of_left_to_right(k: int) -> None:
    graph = matmul(k)
    inputs = draw(graph, InputSet.NORMAL, Domain.ZERO_MEAN, seed=1)
    precise, plain = run(graph, inputs, Mode.PRECISE).outputs[0], run(graph, inputs, Mode.PLAIN).outputs[0]
    total = torch.zeros(48, 48)
    for i in range(k):  # the honest sequential loop that the formula stands for
        total = total + inputs[0][:, i : i + 1] * inputs[1][i : i + 1]
    honest = float((total.double() - precise).square().mean().sqrt())
    assumed = float((plain.double() - precise).square().mean().sqrt())
    assert 0.7 < assumed / honest < 1.4


def test_plain_error_of_a_sum_is_that_of_left_to_right() -> None:
    b = GraphBuilder()
    graph = b.build([b.reduce(Prim.REDUCE_SUM, b.input(TensorType(DType.F32, (2000, 512))), [1])])
    inputs = draw(graph, InputSet.NORMAL, Domain.ZERO_MEAN, seed=1)
    precise, plain = run(graph, inputs, Mode.PRECISE).outputs[0], run(graph, inputs, Mode.PLAIN).outputs[0]
    total = torch.zeros(2000, 1)
    for i in range(512):
        total = total + inputs[0][:, i : i + 1]
    honest = float((total.double() - precise).square().mean().sqrt())
    assumed = float((plain.double() - precise).square().mean().sqrt())
    assert 0.7 < assumed / honest < 2.0


def test_small_integers_are_exact_in_any_order() -> None:
    graph = matmul(1024)
    inputs = draw(graph, InputSet.INTEGERS, Domain.ZERO_MEAN, seed=1)
    assert run(graph, inputs, Mode.PRECISE).exact == (True,)
    noisy = draw(graph, InputSet.NORMAL, Domain.ZERO_MEAN, seed=1)
    assert run(graph, noisy, Mode.PRECISE).exact == (False,)


def test_sums_beyond_the_mantissa_are_not_exact() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 100)))
    scaled = b.apply(Prim.MUL, x, float(2**20))
    graph = b.build([b.reduce(Prim.REDUCE_SUM, scaled, [1])])
    inputs = [torch.full((2, 100), 1.0)]
    assert run(graph, inputs, Mode.PRECISE).exact == (False,)


def test_operands_of_tf32_lose_what_tensor_cores_do_not_read() -> None:
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(-30.0, 20.0)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-126, torch.finfo(torch.float32).max])
    y = truncated_to_tf32(x.t())  # of any strides
    assert y.shape == (50, 40) and int((y.contiguous().view(torch.int32) & 0x1FFF).abs().max()) == 0
    lost = (x.t() - y) / x.t()
    assert float(lost.min()) >= 0 and 0.9 * 2.0**-10 < float(lost.max()) < 2.0**-10
    kept = x.half().float()
    assert torch.equal(truncated_to_tf32(kept), kept)  # 16-bit floats are exact
    got = truncated_to_tf32(special)
    assert torch.equal(got[:4], special[:4]) and bool(got[4].isnan()) and bool(got[5:].isfinite().all())


@pytest.mark.parametrize("dtype", [DType.F64, DType.F32])
def test_what_may_be_nan_is_not_exact(dtype: DType) -> None:
    b = GraphBuilder()
    graph = b.build([b.add(Prim.SQRT, b.input(TensorType(dtype, (2,))))])
    held = torch.float64 if dtype is DType.F64 else torch.float32
    assert run(graph, [torch.tensor([4.0, 9.0], dtype=held)], Mode.PRECISE).exact == (True,)
    assert run(graph, [torch.tensor([4.0, -9.0], dtype=held)], Mode.PRECISE).exact == (False,)


def test_functions_are_never_exact() -> None:
    for prim in ULPS:
        if prim in (Prim.POW, Prim.ATAN2, Prim.MOD):
            continue  # two operands
        b = GraphBuilder()
        graph = b.build([b.add(prim, b.input(TensorType(DType.F32, (4,))))])
        assert run(graph, [torch.ones(4)], Mode.PRECISE).exact == (False,)


def test_decisions() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4,)))
    doubled = b.apply(Prim.MUL, x, 1.5)
    moved = b.add(Prim.MAX, x, b.add(Prim.NEG, x))
    outputs = [
        moved,
        doubled,
        b.apply(Prim.GT, doubled, 0.5),
        b.apply(Prim.GT, moved, 0.5),
        b.add(Prim.FLOOR, doubled),
        b.add(Prim.ARGMAX, doubled, attrs=a.ArgAttrs(0)),
    ]
    found = decisions(b.build(outputs))
    assert [free for free, _ in found] == [True, False, True, True, False, True]
    assert [share > 0 for _, share in found] == [False, False, True, False, True, True]


def test_undefined_cases_are_marked() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (3,)))
    y = b.input(TensorType(DType.I32, (3,)))
    graph = b.build([b.cast(x, DType.I32), b.add(Prim.DIV, y, y), x, b.add(Prim.SHL, y, y)])
    inputs = [torch.tensor([1.0, math.nan, 2.0]), torch.tensor([1, 0, 40], dtype=torch.int32)]
    assert run(graph, inputs, Mode.PRECISE).undefined == (True, True, False, True)


def test_the_least_integer_over_minus_one_does_not_trap() -> None:
    b = GraphBuilder()
    x, y = b.input(TensorType(DType.I32, (2,))), b.input(TensorType(DType.I32, (2,)))
    graph = b.build([b.add(Prim.DIV, x, y)])
    least = torch.iinfo(torch.int32).min
    found = run(
        graph, [torch.tensor([least, 7], dtype=torch.int32), torch.tensor([-1, -2], dtype=torch.int32)], Mode.PRECISE
    )
    assert found.outputs[0].tolist() == [least, -3]


def test_opaque_is_declined() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (3,)))
    attrs = a.OpaqueAttrs("aten", "aten.sort", "{}", 0, (TensorType(DType.F32, (3,)),))
    found = evaluate(b.build([b.add(Prim.OPAQUE, x, attrs=attrs)]), [torch.ones(3)], Mode.PRECISE, seed=0)
    assert isinstance(found, Declined)


def test_inputs_repeat_and_keep_their_roles() -> None:
    b = GraphBuilder()
    data = b.input(TensorType(DType.F32, (7, 3)))
    index = b.input(TensorType(DType.I64, (50,)))
    divisor = b.input(TensorType(DType.I32, (50,)))
    shift = b.input(TensorType(DType.I8, (50,)))
    shifted = b.apply(Prim.ADD, index, b.constant(np.array(0, dtype=np.int64)))
    graph = b.build(
        [
            b.add(Prim.GATHER, data, shifted, attrs=a.GatherAttrs(0)),
            b.add(Prim.DIV, divisor, b.reshape(b.reshape(divisor, (5, 10)), (50,))),
            b.add(Prim.SHL, shift, shift),
        ]
    )
    for kind in InputSet:
        first, second = (draw(graph, kind, Domain.ZERO_MEAN, seed=3) for _ in range(2))
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(first, second, strict=True))
        other = draw(graph, kind, Domain.ZERO_MEAN, seed=4)
        assert not torch.equal(first[0], other[0])
        assert int(first[1].min()) >= 0 and int(first[1].max()) < 7
        assert int((first[2] == 0).sum()) == 0
        assert int(first[3].min()) >= 0 and int(first[3].max()) < 8
        assert [x.dtype for x in first] == [TORCH_DTYPE[graph.type_of(i).dtype] for i in graph.inputs]


def test_adversarial_inputs_have_every_class() -> None:
    b = GraphBuilder()
    for dtype in (DType.F32, DType.F16, DType.BF16, DType.F64):
        graph = b.build([b.input(TensorType(dtype, (64, 64)))])
        x = draw(graph, InputSet.ADVERSARIAL, Domain.ZERO_MEAN, seed=0)[-1].double()
        tiny = torch.finfo(TORCH_DTYPE[dtype]).tiny
        assert bool(torch.isnan(x).any()) and bool((x == math.inf).any()) and bool((x == -math.inf).any())
        assert bool(((x.abs() < tiny) & (x != 0)).any()) and bool((x == 0).any())
        assert float(torch.isfinite(x).double().mean()) > 0.9
        b = GraphBuilder()


@pytest.mark.parametrize(("k", "n"), [(1024, 512), (512, 1024), (700, 1000)])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_a_large_matrix_is_taken_to_float64_in_parts(
    k: int, n: int, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same products and rows of a table, without a copy of it in float64: by columns or rows, the last fewer."""
    b = GraphBuilder()
    x, w = b.input(TensorType(dtype, (3, k))), b.input(TensorType(dtype, (k, n)), is_weight=True)
    rows, table = b.input(TensorType(DType.I64, (5,))), b.input(TensorType(DType.F32, (1024, 512)), is_weight=True)
    product, looked_up = b.add(Prim.MATMUL, x, w), b.add(Prim.GATHER, table, rows, attrs=a.GatherAttrs(0))
    graph = b.build([product, looked_up])
    inputs = draw(graph, InputSet.INTEGERS, Domain.ZERO_MEAN, seed=2)
    whole = run(graph, inputs, Mode.PRECISE)
    monkeypatch.setattr(oracle, "LATE", 1 << 19)
    assert oracle._read_late(graph) == {graph.inputs[1], graph.inputs[3]}
    parts = run(graph, inputs, Mode.PRECISE)
    assert [x.dtype for x in parts.outputs] == [torch.float64] * 2 and parts.exact == whole.exact == (True, True)
    assert all(torch.equal(p, q) for p, q in zip(parts.outputs, whole.outputs, strict=True))
    inputs = draw(graph, InputSet.NORMAL, Domain.ZERO_MEAN, seed=2)
    in_parts = run(graph, inputs, Mode.PRECISE).outputs[0]
    monkeypatch.undo()
    torch.testing.assert_close(in_parts, run(graph, inputs, Mode.PRECISE).outputs[0], rtol=1e-13, atol=1e-13)


def test_what_is_read_elsewhere_is_not_read_in_parts() -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (3, 4096))), b.input(TensorType(DType.F32, (4096, 4096)))
    product = b.add(Prim.MATMUL, x, w)
    assert oracle._read_late(b.build([product])) == {w}
    assert oracle._read_late(b.build([product, b.apply(Prim.NEG, w)])) == frozenset()


@pytest.mark.parametrize(
    ("values", "whole"),
    [([1.0, -3.0], 0), ([0.5, 2.0], 4), ([2.0**-9], None), ([math.inf, 1.0], None), ([math.nan], None), ([2.0**40], 0)],
)
def test_multiples_are_found(values: list[float], whole: int | None) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    largest = oracle._largest(x)
    found = next((q for q in (0, 4, 8) if math.isfinite(largest) and oracle._integral(x, q, largest)), None)
    assert found == whole


@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("dilations", [(1, 1), (2, 1)])
@pytest.mark.parametrize("pads", [((0, 0), (0, 0)), ((1, 2), (3, 0))])
def test_strips_make_the_whole_convolution(
    strides: tuple[int, int], dilations: tuple[int, int], pads: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    g = torch.Generator().manual_seed(4)
    data = torch.randn(1, 3, 37, 23, dtype=torch.float64, generator=g)
    weight = torch.randn(5, 3, 3, 2, dtype=torch.float64, generator=g)
    (top, left), (bottom, right) = pads
    padded = torch.nn.functional.pad(data, (left, right, top, bottom))
    want = torch.nn.functional.conv2d(padded, weight, None, strides, 0, dilations)
    c = a.ConvAttrs(strides=strides, pads_lo=(top, left), pads_hi=(bottom, right), dilations=dilations, groups=1)
    for rows in (1, 4, 7):
        got = oracle._in_strips(c, data, weight, tuple(want.shape), rows)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_large_windows_alone_are_taken_in_strips() -> None:
    c = a.ConvAttrs(strides=(1, 1), pads_lo=(0, 0), pads_hi=(0, 0), dilations=(1, 1), groups=1)
    data, weight = torch.empty(1, 32, 232, 232, device="meta"), torch.empty(3, 32, 9, 9, device="meta")
    assert oracle._strip(c, data, weight, (1, 3, 224, 224)) == 1
    deep = torch.empty(512, 512, 3, 3, device="meta")
    assert oracle._strip(c, torch.empty(1, 512, 16, 16, device="meta"), deep, (1, 512, 14, 14)) == 0


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("strides", [(1, 1), (3, 2)])
@pytest.mark.parametrize("dilations", [(1, 1), (2, 1)])
@pytest.mark.parametrize("pads", [((0, 0), (0, 0)), ((1, 2), (3, 0)), ((0, 4), (0, 4))])
def test_taps_one_by_one_make_the_whole_convolution(
    strides: tuple[int, int], dilations: tuple[int, int], pads: tuple[tuple[int, int], tuple[int, int]], groups: int
) -> None:
    g = torch.Generator().manual_seed(5)
    data = torch.randn(2, 4, 11, 9, dtype=torch.float64, generator=g)
    weight = torch.randn(6, 4 // groups, 3, 2, dtype=torch.float64, generator=g)
    (top, left), (bottom, right) = pads
    padded = torch.nn.functional.pad(data, (left, right, top, bottom))
    want = torch.nn.functional.conv2d(padded, weight, None, strides, 0, dilations, groups)
    c = a.ConvAttrs(strides=strides, pads_lo=(top, left), pads_hi=(bottom, right), dilations=dilations, groups=groups)
    got = oracle._without_padding(c, data, weight, tuple(want.shape))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32, DType.F64])
@pytest.mark.parametrize("groups", [1, 3])
def test_an_infinite_weight_meets_padding_or_not(groups: int, dtype: DType) -> None:
    """torch's own convolutions multiply both or do not, by type, number of groups and device."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (1, 6, 5, 5)))
    w = b.input(TensorType(dtype, (6, 6 // groups, 3, 3)))
    attrs = a.ConvAttrs(strides=(1, 1), pads_lo=(1, 1), pads_hi=(1, 1), dilations=(1, 1), groups=groups)
    graph = b.build([b.add(Prim.CONV, x, w, attrs=attrs)])
    data = torch.ones(1, 6, 5, 5, dtype=TORCH_DTYPE[dtype])
    weight = torch.ones(6, 6 // groups, 3, 3, dtype=TORCH_DTYPE[dtype])
    weight[4, 1, 0, 0] = math.inf
    for mode in (Mode.PRECISE, Mode.NATIVE):
        for padded in (True, False):
            (y,) = run(graph, [data, weight], mode, padded=padded).outputs
            assert int(y.isnan().sum()) == (9 if padded else 0)
            assert int(y.isinf().sum()) == 16
            assert torch.equal(y[0, 4].isnan()[1:, 1:], torch.zeros(4, 4, dtype=torch.bool))


def test_a_kernel_may_multiply_padding_with_infinite_weights_or_not() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 28, 7, 7)))
    w = b.input(TensorType(DType.F32, (28, 2, 3, 3)), is_weight=True)
    attrs = a.ConvAttrs(strides=(1, 1), pads_lo=(1, 1), pads_hi=(1, 1), dilations=(1, 1), groups=14)
    graph = b.build([b.add(Prim.CONV, x, w, attrs=attrs)])
    inputs = draw(graph, InputSet.ADVERSARIAL, Domain.ZERO_MEAN, seed=0)
    inputs[1][:, 0, 0, 0] = math.inf
    (want,) = verify._case(graph, InputSet.ADVERSARIAL, inputs, 0, torch.device("cpu"), lambda: None).expected
    for padded in (True, False):
        (y,) = run(graph, inputs, Mode.NATIVE, padded=padded).outputs
        assert verify.compare(y, want, "").verdict is Verdict.OK
    assert want.judged is not None
    assert want.judged[..., 1:-1, 1:-1].all()
    assert not want.judged[..., 0, :].all()
