"""Chains of layers with several inputs in one kernel: near float64 in the emulation; texts compile."""

from __future__ import annotations

import numpy as np
import pytest
from tests.generate.cuda.mlp.test_mlp import FLOWS, GROUP, PAIRS, PIECES, RING, RING_TURNS, SMALL, WARP
from tests.generate.cuda.mlps import ACTIVATIONS, BF16, F16, F32, normal
from tests.generate.cuda.skips import Skips, nerf, random_skips, skips
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few
from tests.typed import numbers

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.mlp import template as mlp_template
from weft.generate.cuda.mlp import wide as mlp_wide
from weft.generate.cuda.mlp.match import Chain, chain
from weft.generate.cuda.mlp.shapes import MlpConfig
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Pointer

CASES: dict[str, tuple[Skips, tuple[MlpConfig | mlp_wide.MlpWideConfig, ...]]] = {
    "beside the last": (Skips(70, (32, 32, 32, 16), (16,), beside=((3, -1),)), (WARP, GROUP, FLOWS)),
    "odd, in front": (Skips(37, (5, 24, 17, 3), (7,), front=((2, -1),), act="silu", dtype=BF16), (PAIRS, GROUP)),
    "beside the first": (Skips(40, (32, 32, 8), (16,), beside=((1, -1),)), (WARP, GROUP, SMALL)),
    "in front of the first": (Skips(40, (33, 32, 8), (5,), front=((1, -1),), dtype=BF16), (WARP, PIECES)),
    "added in the middle": (Skips(50, (16, 32, 32, 8), (32,), added=((2, -1, "add"),)), (WARP, GROUP, FLOWS, PIECES)),
    "added at the end, odd": (Skips(50, (16, 32, 7), (7,), added=((2, -1, "mul"),), act="tanh"), (WARP, GROUP, SMALL)),
    "added at the end, wide": (Skips(70, (16, 32, 64), (64,), added=((2, -1, "add"),), dtype=BF16), (GROUP, PIECES)),
    "a number of each row": (Skips(40, (16, 32, 24, 3), added=((2, 0, "scale"),)), (WARP, GROUP, PIECES)),
    "columns of one": (Skips(66, (24, 32, 32, 4), (9,), beside=((3, -1),), one=True), (WARP, GROUP, SMALL)),
    "columns of one, aligned": (Skips(66, (32, 32, 32), (32,), beside=((2, -1), (2, 0)), one=True), (WARP, GROUP)),
    "f32": (Skips(40, (3, 32, 32, 4), (6, 32), beside=((2, -1),), added=((2, -2, "add"),), given=F32), (WARP, GROUP)),
    "f32, out too": (
        Skips(33, (32, 48, 32, 32), (16,), beside=((2, -1),), added=((3, 0, "add"),), given=F32, out=F32),
        (GROUP, PIECES),
    ),
    "radiance field": (nerf(150, 64, BF16), (PAIRS, GROUP, RING, RING_TURNS)),
    "radiance field, columns of one": (nerf(70, 32, F16, one=True, given=F32), (WARP,)),
    "radiance field, wide": (nerf(17, 272, F16), (PIECES,)),
}  # fmt: skip
CASES |= {
    f"any {seed}": (
        random_skips(seed, most_rows=70, most_work=3e6, widest=96),
        (WARP, SMALL) if seed % 2 else (GROUP, PIECES),
    )
    for seed in range(8)
}


@pytest.fixture(scope="module")
def sources() -> dict[str, tuple[Problem, list[CudaSource]]]:
    found = {}
    for name, (net, shapes) in CASES.items():
        problem = skips(net)
        made = [templates.emit(problem, s.schedule()) for s in shapes]
        assert all(isinstance(s, CudaSource) for s in made), (name, net, made)
        found[name] = problem, [s for s in made if isinstance(s, CudaSource)]
    return found


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, tuple[Problem, list[CudaSource]]]) -> Emulated:
    return Emulated([s for _, made in asked(request, sources) for s in made])


@pytest.mark.parametrize("name", few(CASES, 3))
def test_near_float64(name: str, sources: dict[str, tuple[Problem, list[CudaSource]]], kernels: Emulated) -> None:
    problem, made = sources[name]
    inputs = normal(problem)
    exact = np.asarray(evaluate(problem.graph, inputs, precise=True)[0], dtype=np.float64)
    own = np.asarray(evaluate(problem.graph, inputs)[0], dtype=np.float64)
    eager, size = (float(np.sqrt(np.mean(x**2))) for x in (own - exact, exact))
    unit = 2.0**-8 if CASES[name][0].dtype is BF16 else 2.0**-11
    for source in made:
        got = np.asarray(run(kernels, problem, source, inputs)[0], dtype=np.float64)
        error = float(np.sqrt(np.mean((got - exact) ** 2)))
        assert error <= 1.2 * eager + 0.25 * unit * size, (str(source.schedule), error, eager, size)


def test_a_second_input_is_read_inside() -> None:
    """As many inputs as are given, weights are packed: nothing is joined in memory."""
    net = nerf(4096, 64, BF16)
    problem = skips(net)
    p = chain(problem)
    assert isinstance(p, Chain), p.reason
    assert [p.inputs[v].width for v in p.inputs] == [63, 27]
    assert p.layers[5].widths == (63, 64) and not p.layers[5].beside  # x is still in registers
    assert p.layers[9].widths == (64, 27) and len(p.layers[9].beside) == 1
    source = templates.emit(problem, GROUP.schedule())
    assert isinstance(source, CudaSource)
    assert [x.index for x in source.launches[0].arguments if isinstance(x, Pointer) and x.kind == "in"] == list(
        p.memory
    )


@pytest.mark.parametrize(
    ("net", "part"),
    [
        (Skips(32, (16, 32, 16), (520,), beside=((2, -1),)), "520 columns"),
        (Skips(32, (16, 32, 16), (8, 8, 8, 8), beside=((2, -1), (2, -2), (2, -3), (2, -4))), "of 5 inputs"),
        (Skips(32, (1500, 32, 16), (8,), beside=((1, -1),)), "do not fit into shared memory"),
    ],
)
def test_what_is_declined_says_why(net: Skips, part: str) -> None:
    refused = mlp_template.schedules(skips(net), H200)
    assert isinstance(refused, Declined)
    assert part in refused.reason


def test_rows_of_other_inputs_stay_apart() -> None:
    """Not a number in one row of a second input is seen in that row alone."""
    net, shapes = CASES["beside the last"]
    problem = skips(net)
    inputs = normal(problem)
    inputs[1][5, 3], inputs[1][64, 0] = np.nan, np.inf
    source = templates.emit(problem, shapes[1].schedule())
    assert isinstance(source, CudaSource)
    got = run(Emulated([source]), problem, source, inputs)[0]
    assert not np.isfinite(got[5]).any() and not np.isfinite(got[64]).all()
    assert np.isfinite(np.delete(got, (5, 64), 0)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "facts"), few([("sm_90a", H200), ("sm_80", A100)], 1, unpack=True))
def test_radiance_fields_compile_without_spills(arch: str, facts: GpuFacts) -> None:
    for width in (64, 256) if facts.capability == 90 else (64,):
        problem = skips(nerf(1 << 18, width, BF16))
        found = templates.schedules(problem, facts)
        assert not isinstance(found, Declined), found.reason
        compiled_well([s for x in found[:1] if isinstance(s := templates.emit(problem, x), CudaSource)], arch, facts)


def heads(rows: int, width: int, dtype: DType, *, joined: bool, out: DType | None = None) -> Problem:
    """A density behind the first layers, then a colour from a direction: two results, or one of four columns."""
    b = GraphBuilder()
    x, direction = b.input(TensorType(dtype, (rows, 24))), b.input(TensorType(dtype, (rows, 9)))

    def layer(h: NodeId, cols: int, act: str) -> NodeId:
        w = b.input(TensorType(dtype, (b.type_of(h).shape[1], cols)), is_weight=True)
        y = b.apply(Prim.ADD, b.add(Prim.MATMUL, h, w), b.input(TensorType(dtype, (cols,)), is_weight=True))
        return ACTIVATIONS[act](b, y)

    h = layer(layer(layer(x, width, "relu"), width, "silu"), width, "relu")
    features = b.add(Prim.CONCAT, layer(h, width, "none"), direction, attrs=a.ConcatAttrs(1))
    color = layer(layer(features, max(1, width // 2), "relu"), 3, "sigmoid")
    density = layer(h, 1, "silu")
    if joined:
        results = [b.add(Prim.CONCAT, color, density, attrs=a.ConcatAttrs(1))]
    else:
        results = [b.cast(color, out or dtype), b.cast(density, out or dtype)]
    graph = b.build(results)
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(results))


@pytest.mark.parametrize("joined", few([False, True], 1))
@pytest.mark.parametrize(
    ("rows", "width", "dtype", "out", "shapes"),
    few([
        (37, 24, BF16, F32, (PAIRS, GROUP, RING)), (70, 32, F16, None, (WARP, GROUP, FLOWS)),
        (17, 288, F16, None, (SMALL,)), (66, 48, BF16, None, (RING_TURNS, PIECES)),
    ], 1, unpack=True),
)  # fmt: skip
def test_several_results(
    rows: int, width: int, dtype: DType, out: DType | None, shapes: tuple[MlpConfig, ...], joined: bool
) -> None:
    problem = heads(rows, width, dtype, joined=joined, out=out)
    p = chain(problem)
    assert isinstance(p, Chain), p.reason
    assert [len(x.widths) for x in p.layers] == [1, 1, 1, 1, 1, 2, 1] and p.layers[3].n == 1  # the density comes first
    made = [templates.emit(problem, s.schedule()) for s in shapes]
    assert all(isinstance(s, CudaSource) for s in made), made
    sources = [s for s in made if isinstance(s, CudaSource)]
    kernels = Emulated(sources)
    inputs = normal(problem)
    exact, own = (evaluate(problem.graph, inputs, precise=precise) for precise in (True, False))
    unit = 2.0**-8 if dtype is BF16 else 2.0**-11
    for source in sources:
        for got, want, near in zip(run(kernels, problem, source, inputs), exact, own, strict=True):
            error, eager, size = (
                float(np.sqrt(np.mean(v**2)))
                for v in (numbers(got) - numbers(want), numbers(near) - numbers(want), numbers(want))
            )
            assert error <= 1.2 * eager + 0.25 * unit * size, (str(source.schedule), error, eager, size)
