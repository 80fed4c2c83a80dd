"""Networks trained a layer at a time: near float64 in the emulation; texts compile for sm_80 and sm_90a."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.generate.cuda.gradients import (
    assert_as_finite,
    by_torch,
    error_of,
    exact,
    infinite,
    network,
    normal,
    rounded,
)
from tests.generate.cuda.layers import Net, Runner
from tests.generate.cuda.tensor_emulator import Emulated, Text, run
from tests.generate.cuda.test_templates import A100, H200
from tests.slow import asked, few
from tests.typed import assert_allclose

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc
from weft.generate.cuda.gemm.common.product import product
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.training import KINDS, Activation, Network
from weft.generate.cuda.training import layered as text
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

RELU, SILU, TANH = (Activation(x) for x in ("relu", "silu", "tanh"))
NUMBERS = {"leaky_relu": (0.1,), "elu": (1.0,), "softplus": (1.0, 20.0), "sin": (1.5,)}


def _mixed(seed: int, dtype: DType) -> Network:
    kinds = sorted(KINDS)[seed::3]
    acts = tuple(Activation(k, NUMBERS.get(k, ())) for k in kinds)
    widths = (5, 24, 17, 40, 8, 33)[: len(acts) + 1]
    return Network(widths, acts[: len(widths) - 1], (True,) * (len(widths) - 1), dtype, DType.F32, DType.F32)


CASES: dict[str, tuple[Network, int, GpuFacts, int]] = {
    "relu": (network((24, 40, 16), RELU), 70, H200, 0),
    "ragged": (network((5, 37, 21, 3), SILU, DType.F16, given=DType.F32), 33, H200, 1),
    "one row": (network((16, 24, 8), TANH), 1, H200, 0),
    "end": (network((16, 24, 9), RELU, last=Activation("sigmoid")), 19, H200, 2),
    "end that keeps sums": (network((16, 24, 16), RELU, last=SILU, bias=False), 40, A100, 0),
    "wide": (network((8, 257, 24), RELU), 20, A100, 0),
    **{f"mixed {i}": (_mixed(i, (DType.F16, DType.BF16)[i % 2]), 50, (A100, H200)[i % 2], i) for i in range(3)},
}


@pytest.fixture(scope="module")
def nets() -> dict[str, Net]:
    return {name: Net(*case) for name, case in CASES.items()}


def texts(made: Iterable[Net]) -> list[Text]:
    return [*(n.beside for n in made), *(x for n in made for x in n.sources.values())]


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest, nets: dict[str, Net]) -> Emulated:
    return Emulated(texts(asked(request, nets, "ragged", "relu")))


@pytest.mark.parametrize("name", few(CASES, 2))
def test_near_float64(name: str, nets: dict[str, Net], emulated: Emulated) -> None:
    net, rows, _, _ = CASES[name]
    x, dy, parameters = normal(net, rows)
    y, dx, others = Runner(emulated, nets[name]).run(x, dy, parameters)
    short = torch.bfloat16 if net.dtype is DType.BF16 else torch.float16
    wanted, eager = (exact(net, x, dy, parameters, dtype) for dtype in (torch.float64, short))
    unit = 2.0**-8 if net.dtype is DType.BF16 else 2.0**-11
    assert y.shape == dy.shape
    error, own = (np.mean([error_of(a, b) for a, b in zip(g, wanted, strict=True)]) for g in ([dx, *others], eager))
    assert error <= 1.2 * own + 0.5 * unit, (error, own)


def test_infinities_stay_in_their_columns() -> None:
    """What lies behind the columns of a layer has zero weights: an infinity in another column must not make it NaN."""
    cases = [(network((24, 37, 33, 9), RELU), H200, 0), (network((24, 37, 265, 9), RELU, DType.F16), A100, 1)]
    made = [Net(net, 40, facts, choice) for net, facts, choice in cases]
    emulated = Emulated(texts(made))
    for n in made:
        x, dy, parameters = infinite(n.net, 40)
        y, dx, others = Runner(emulated, n).run(x, dy, parameters)
        assert np.isfinite(y).all()
        assert_as_finite([dx, *others], exact(n.net, x, dy, parameters))


SUMMED = {
    f"{rows} rows, {net.widths} {net.acts[0].kind} {number}": (net, rows, number)
    for net, rows in (
        (network((16, 136, 72), RELU), 300), (network((16, 264, 64), SILU, DType.F16), 130),
        (network((16, 64, 200), Activation()), 700),
    )
    for number in range(3)
}  # fmt: skip


def _summed(net: Network, rows: int, number: int) -> tuple[Problem, CudaSource]:
    """The product of the second layer with sums over rows, which the problem has as one more output."""
    below = next(p for p in text.backward(net, rows, inputs=False, parameters=False, dtype=DType.F32))
    facts = replace(H200, sms=8)
    case = product(below.problem)
    assert not isinstance(case, Declined)
    found = [text.with_column_sums(below, s.schedule()) for _, s in tma_choose.shapes(case, facts, 12)]
    made = [x for x in found if not isinstance(x, Declined)]
    assert made
    source, count = made[number % len(made)]
    g = below.problem.graph
    extra = GraphBuilder()
    held = [extra.input(g.type_of(i)) for i in g.inputs]
    columns = g.type_of(g.outputs[0]).shape[1]
    first = extra.broadcast(extra.scalar(0.0, net.dtype), (rows, columns))
    second = extra.broadcast(extra.scalar(0.0, DType.F32), (count, columns))
    graph = extra.build([first, second])
    assert len(held) == len(graph.inputs)
    return Problem(graph, source.sha256, (Format.ROW,) * len(held), (Format.ROW,) * 2), source


@pytest.mark.slow
def test_columns_are_summed_behind_a_product() -> None:
    made = {name: _summed(*case) for name, case in SUMMED.items()}
    emulated = Emulated([source for _, source in made.values()])
    seen = set()
    for name, (problem, source) in made.items():
        net, rows, _ = SUMMED[name]
        below = next(p for p in text.backward(net, rows, inputs=False, parameters=False, dtype=DType.F32))
        rng = np.random.default_rng(1)
        types = [problem.graph.type_of(i) for i in problem.graph.inputs]
        inputs = [rounded(rng.standard_normal(t.shape) / (t.shape[1] if i == 1 else 1) ** 0.5, t.dtype)
                  for i, t in enumerate(types)]  # fmt: skip
        found, sums = run(emulated, problem, source, inputs)
        (wanted,) = evaluate(below.problem.graph, [x.astype(t.dtype.numpy) for x, t in zip(inputs, types, strict=True)])
        np.testing.assert_allclose(found, wanted.astype(np.float32), rtol=2e-2, atol=2e-2, err_msg=name)
        # what is summed was not rounded
        unit = 2.0 ** (-9 if net.dtype is DType.BF16 else -12)
        far = 5 * unit * np.sqrt((found.astype(np.float64) ** 2).sum(0))
        assert (np.abs(sums.sum(0) - found.sum(0, dtype=np.float64)) <= far + 1e-6).all(), name
        seen.add((source.schedule.param("pingpong"), source.schedule.params))
    assert {turns for turns, _ in seen} == {True, False}


def test_equal_bits_in_two_runs(nets: dict[str, Net], emulated: Emulated) -> None:
    net, rows, _, _ = CASES["ragged"]
    inputs = normal(net, rows, seed=3)
    one, two = (Runner(emulated, nets["ragged"]).run(*inputs) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip((*one[:2], *one[2]), (*two[:2], *two[2]), strict=True))


def test_infinity_arrives(nets: dict[str, Net], emulated: Emulated) -> None:
    net, rows, _, _ = CASES["relu"]
    x, dy, parameters = normal(net, rows)
    dy[3, 2] = np.inf
    _, dx, others = Runner(emulated, nets["relu"]).run(x, dy, parameters)
    assert not np.isfinite(dx[3]).all() and np.isfinite(np.delete(dx, 3, 0)).all()
    assert not np.isfinite(others[2][2]).all() and np.isfinite(np.delete(others[2], 2, 0)).all()
    assert not np.isfinite(others[3][2]) and np.isfinite(np.delete(others[3], 2)).all()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_slopes_are_those_of_torch(kind: str) -> None:
    act = Activation(kind, NUMBERS.get(kind, ()))
    z = np.linspace(-12, 12, 97).astype(np.float32)
    point = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    y = by_torch(act, point)
    (wanted,) = torch.autograd.grad(y.sum(), point)
    b = GraphBuilder()
    g, kept = (b.input(TensorType(DType.F32, z.shape)) for _ in range(2))
    graph = b.build([act.slope(b, g, kept)])
    held = y.detach().numpy().astype(np.float32) if act.keeps == 1 else z
    (found,) = evaluate(graph, [np.full_like(z, 2.0), held])
    assert_allclose(found, 2 * wanted.numpy(), rtol=2e-4, atol=2e-5)


def test_what_is_refused_says_why() -> None:
    net = network((16, 512, 16), RELU)
    assert text.refused(net) is None
    for other, rows, part in (
        (replace(net, widths=(16, 513, 16)), 1, "513 columns"),
        (replace(net, widths=(5000, 512, 16)), 1, "input of 5000 columns"),
        (net, 1 << 23, "too many to be trained at once"),
    ):
        found = text.refused(other, rows)
        assert isinstance(found, Declined) and part in found.reason


@pytest.mark.slow
@pytest.mark.parametrize("facts", [H200, A100], ids=["sm_90a", "sm_80"])
def test_texts_compile_without_spills(facts: GpuFacts) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    made = [
        Net(network((48, 512, 384, 5), SILU, given=DType.F32), 3001, facts),
        Net(network((300, 257, 512), Activation("gelu"), DType.F16), 1 << 18, facts),
        Net(network((512, 512, 512), RELU), 1 << 18, facts, 1),
    ]
    texts = {s.text: s.flags for n in made for s in n.sources.values()} | {n.beside.text: () for n in made}
    found = nvrtc.compile_many([CompileJob(t, facts.arch, f) for t, f in texts.items()])
    for result in found:
        assert isinstance(result, CompiledCubin), result
        assert not result.warnings
        assert all(r.spill_stores == r.spill_loads == r.stack_bytes == 0 for _, r in result.resources), result.resources
