"""Fully connected networks in one kernel: near float64 in the emulation; texts compile; what is declined, and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cuda.mlps import ACTIVATIONS, BF16, F16, F32, Net, mlp, normal, random_net
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.generate.cuda.test_templates import A100, H200, compiled_well, golden
from tests.slow import asked, few
from tests.typed import assert_allclose, numbers

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.intrinsics.prelude import tma_header
from weft.generate.cuda.mlp import pair as mlp_pair
from weft.generate.cuda.mlp import template as mlp_template
from weft.generate.cuda.mlp import wide as mlp_wide
from weft.generate.cuda.mlp.image import Image
from weft.generate.cuda.mlp.match import Chain, chain
from weft.generate.cuda.mlp.shapes import MlpConfig, shared_bytes
from weft.generate.cuda.mlp.text import mlp_header
from weft.generate.cuda.mlp.wide_text import SharedValues
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import TensorType, round_bf16
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Pointer, Schedule

WARP = MlpConfig(False, 1, 1, 0, 0, 1, 2)
PAIRS = MlpConfig(False, 2, 2, 0, 0, 1, 1)
GROUP = MlpConfig(True, 1, 4, 0, 0, 1, 2)
RING = MlpConfig(True, 1, 8, 6, 0, 1, 1)
PART = MlpConfig(True, 1, 8, 5, 2, 1, 1)
FLOW = MlpConfig(True, 1, 8, 0, 0, 1, 1, flow=1)
NEAR = MlpConfig(True, 1, 4, 0, 0, 1, 1, near=True)
FLOWS = MlpConfig(True, 1, 4, 0, 0, 1, 2, flow=2, pace=1)
TURNS = MlpConfig(True, 1, 12, 0, 0, 1, 1, pingpong=True)
RING_TURNS = replace(RING, pingpong=True)
RING_ONE = replace(RING, warps=4)
RING_FLOW = replace(RING, flow=1, pace=1)
PART_FLOW = replace(PART, flow=2)
PART_TURNS = replace(PART, pingpong=True, flow=1, pace=2)
PIECES = mlp_wide.MlpWideConfig(False, 1, 4, 64, 2)
FEW = mlp_wide.MlpWideConfig(False, 2, 3, 32, 1)
GROUPS = mlp_wide.MlpWideConfig(True, 4, 6, 128, 1)
SMALL = mlp_wide.MlpWideConfig(True, 8, 4, 32, 2)
OTHER = mlp_wide.MlpWideConfig(True, 4, 5, 64, 2)
TWO = mlp_pair.MlpPairConfig(4, 2)
TWOS = mlp_pair.MlpPairConfig(9, 4)

CASES: dict[str, tuple[Net, tuple[MlpConfig | mlp_pair.MlpPairConfig | mlp_wide.MlpWideConfig, ...]]] = {
    "vectors of 8": (Net(67, (32, 32, 64)), (WARP, GROUP, FLOW, TURNS)),
    "the tile after next": (Net(333, (64, 32, 32)), (NEAR, replace(NEAR, warps=8, flow=1, pace=1))),
    "vectors of 4": (Net(40, (16, 48, 16), dtype=BF16), (PAIRS, GROUP)),
    "three to one": (Net(33, (3, 24, 17, 1)), (WARP, PAIRS, GROUP, FLOWS)),
    "one wide": (Net(150, (1, 1, 16, 2), "silu"), (WARP,)),
    "f32 in and out": (Net(35, (32, 16, 32), "gelu", given=F32), (WARP, GROUP, FLOW)),
    "f32, odd": (Net(18, (5, 16, 3), "tanh", given=F32), (WARP,)),
    "residual": (Net(70, (32, 32, 32, 32), "tanh", residual=True), (PAIRS, GROUP, FLOWS, TURNS)),
    "no bias": (Net(17, (16, 32, 8), bias=False, turned=True), (WARP, GROUP)),
    "each its own": (Net(16, (16, 24, 24, 24, 24), ("sin", "cos", "sigmoid", "user"), dtype=BF16), (WARP,)),
    "infinite where there is nothing": (Net(16, (16, 20, 12, 16), "reciprocal"), (WARP, GROUP)),
    "batch": (Net(24, (8, 16, 40), "gelu tanh", batch=3, last=False), (WARP,)),
    "panels": (Net(200, (96, 64, 80), "relu"), (GROUP, RING, FLOW, RING_TURNS, RING_FLOW)),
    "layers alike": (Net(30, (16, *(24,) * 6, 16), "silu", residual=True), (WARP, GROUP, FLOW, TURNS)),
    "layers alike but one": (Net(30, (24,) * 9, ("relu",) * 4 + ("tanh",) + ("relu",) * 3), (WARP,)),
    "layers alike in a ring": (
        Net(200, (80,) * 6, "relu", dtype=BF16),
        (RING, PART, RING_TURNS, PART_TURNS, RING_FLOW, PART_FLOW),
    ),
    "layers alike stay or come": (Net(200, (32,) * 11, "relu"), (replace(PART, fixed=5), PART)),
    "vectors of layers alike": (Net(18, (144,) * 6, "tanh", dtype=BF16), (WARP,)),
    "one tanh": (Net(60, (32,) * 5, "silu", dtype=BF16), (WARP, GROUP, FLOW, TURNS)),
    "one tanh for erf": (Net(60, (32,) * 4, "gelu", dtype=BF16), (WARP, GROUP, FLOWS)),
    "pre-scaled layers alike": (Net(40, (32,) * 9, "gelu", dtype=BF16), (WARP, GROUP, TURNS)),
    "pre-scaled between others": (
        Net(70, (48, *(32,) * 8, 24), ("tanh", *("gelu",) * 3, "silu", *("gelu",) * 3, "none"), dtype=BF16),
        (GROUP, FLOWS),
    ),
    "not pre-scaled beside": (Net(40, (24,) * 6, "gelu", dtype=BF16, residual=True), (GROUP,)),
    "sums begin with the bias": (
        Net(140, (128, 160, 192, 136), "gelu", dtype=BF16),
        (replace(RING_TURNS, early=True), replace(PART, early=True)),
    ),
    "sums of layers alike begin with it": (Net(70, (144,) * 6, "tanh", dtype=BF16), (replace(RING_TURNS, early=True),)),
    "the last of three asks": (Net(700, (72, 80, 16, 16), "silu", dtype=BF16), (replace(RING_TURNS, warps=12),)),
    "results stay": (Net(140, (64,) * 3, dtype=BF16), (replace(GROUP, keep=True), replace(FLOWS, keep=True))),
    "one tanh, and the sum": (Net(60, (32,) * 4, "silu and itself", dtype=BF16), (WARP, FLOW)),
    "one tanh for tanh": (Net(60, (32,) * 4, "gelu tanh", dtype=BF16), (WARP,)),
    "input beside": (Net(40, (13, 24, 24, 24, 5), "relu", skip=(2, 3)), (WARP, GROUP, FLOW)),
    "input beside in a ring": (
        Net(90, (56, 40, 56, 16), "silu", skip=(1, 2), batch=3),
        (RING, PART, RING_TURNS, PART_TURNS),
    ),
    "ring, many turns": (Net(300, (72, 32, 16, 16), "silu", dtype=BF16), (RING, RING_TURNS, RING_FLOW, RING_ONE)),
    "wide": (Net(70, (48, 320, 300, 17), "relu"), (PIECES, GROUPS)),
    "wide, residual": (Net(40, (320,) * 6, "silu", BF16, residual=True), (PIECES, GROUPS, OTHER)),
    "wide, input beside": (Net(150, (40, 288, 288, 288, 5), "gelu", skip=(2,), last=False), (PIECES, SMALL)),
    "wider input": (Net(37, (784, 96, 10), "relu", given=F32, last=False), (PIECES, GROUPS)),
    "wider input, odd": (Net(70, (1001, 64, 257), "tanh", BF16), (FEW, OTHER)),
    "two blocks": (Net(200, (128,) * 5, "gelu", BF16), (TWO, TWOS)),
    "two blocks, wide": (Net(130, (40, 256, 256, 128), "relu"), (TWO, TWOS)),
    "two blocks, two layers": (Net(64, (3, 128, 256), "silu", given=F32), (TWO,)),
    "two blocks, odd": (Net(65, (257 - 1, *(128,) * 4), ("tanh", "sin", "none", "relu"), BF16, bias=False), (TWO,)),
    "widest": (Net(20, (512, 512, 512), "relu"), (PIECES, GROUPS)),
    "in pieces though small": (Net(33, (3, 24, 17, 1), "sigmoid"), (FEW, SMALL)),
    "infinite, in pieces": (Net(16, (16, 20, 12, 16), "reciprocal"), (FEW, SMALL)),
}


CASES |= {f"any {seed}": (random_net(seed, most_rows=70, most_work=4e6, widest=300), ()) for seed in range(10)}
for _name in [n for n in CASES if n.startswith("any ")]:
    _net = CASES[_name][0]
    CASES[_name] = _net, ((PIECES, SMALL) if max(_net.widths) > 256 else (WARP, FEW))


@pytest.fixture(scope="module")
def sources() -> dict[str, tuple[Problem, list[CudaSource]]]:
    found = {}
    for name, (net, shapes) in CASES.items():
        problem = mlp(net)
        made = [templates.emit(problem, s.schedule()) for s in shapes]
        assert all(isinstance(s, CudaSource) for s in made), (name, made)
        found[name] = problem, [s for s in made if isinstance(s, CudaSource)]
    return found


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, tuple[Problem, list[CudaSource]]]) -> Emulated:
    return Emulated([s for _, made in asked(request, sources, "vectors of 8") for s in made])


@pytest.mark.parametrize("name", few(CASES, 8))
def test_near_float64(name: str, sources: dict[str, tuple[Problem, list[CudaSource]]], kernels: Emulated) -> None:
    problem, made = sources[name]
    inputs = normal(problem)
    exact = numbers(evaluate(problem.graph, inputs, precise=True)[0])
    own = numbers(evaluate(problem.graph, inputs)[0])
    assert np.isfinite(exact).all()
    eager = float(np.sqrt(np.mean((own - exact) ** 2)))
    size = float(np.sqrt(np.mean(exact**2)))
    unit = 2.0**-8 if CASES[name][0].dtype is BF16 else 2.0**-11
    for source in made:
        got = np.asarray(run(kernels, problem, source, inputs)[0], dtype=np.float64)
        error = float(np.sqrt(np.mean((got - exact) ** 2)))
        assert error <= 1.2 * eager + 0.25 * unit * size, (str(source.schedule), error, eager, size)


def test_nan_and_infinity_stay_in_their_rows(
    sources: dict[str, tuple[Problem, list[CudaSource]]], kernels: Emulated
) -> None:
    problem, made = sources["vectors of 8"]
    inputs = normal(problem)
    inputs[0][5, 3], inputs[0][64, 0] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        exact = evaluate(problem.graph, inputs, precise=True)[0]
    for source in made:
        got = run(kernels, problem, source, inputs)[0]
        np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
        assert np.isfinite(np.delete(got, (5, 64), 0)).all()


def test_two_blocks_share_few_rows() -> None:
    def pairs(net: Net, facts: GpuFacts = H200) -> list[Schedule]:
        found = templates.schedules(mlp(net), facts)
        assert not isinstance(found, Declined)
        return [s for s in found if s.param("template") == "mlp_pair"]

    wide = Net(4096, (256,) * 5, dtype=BF16)
    (schedule,) = pairs(wide)
    source = templates.emit(mlp(wide), schedule)
    assert isinstance(source, CudaSource)
    compiled_well([source], "sm_90a", H200)
    (launch,) = source.launches
    assert (launch.grid[0], launch.cluster) == (128, (2, 1, 1))
    assert 2 * (launch.shared_bytes + H200.shared_reserved) <= H200.shared_per_sm
    assert not pairs(wide, A100)
    assert not pairs(replace(wide, rows=8192))  # every multiprocessor has a tile
    assert not pairs(Net(4096, (64,) * 5))
    assert not pairs(Net(4096, (128,) * 5))
    assert not pairs(Net(4096, (256,) * 3, residual=True))
    assert isinstance(templates.emit(mlp(Net(64, (64,) * 3)), TWO.schedule()), Declined)


def test_layers_alike_are_a_loop() -> None:
    many, few = (templates.emit(mlp(Net(64, (32,) * n)), GROUP.schedule()) for n in (21, 6))
    assert isinstance(many, CudaSource) and isinstance(few, CudaSource)
    at = [s.text.index(f"{s.entry}(const void") for s in (many, few)]
    assert len(many.text) - at[0] < 1.2 * (len(few.text) - at[1])


@pytest.mark.parametrize(
    ("net", "form"),
    [
        (Net(64, (32,) * 4, "silu", BF16), "silu_of_half"),
        (Net(64, (32,) * 4, "gelu", BF16, bias=False), "gelu_stretched"),
        (Net(64, (32,) * 3, "gelu", BF16), "gelu_of_half"),  # nothing would be gained
        (Net(64, (32,) * 4, "gelu", BF16, residual=True), "gelu_of_half"),
        (Net(64, (32,) * 4, "gelu", F16), ""),
        (Net(64, (32,) * 4, "silu", BF16, residual=True), "silu_of_half"),
        (Net(64, (192,) * 4, "gelu", BF16), "gelu_stretched"),
        (Net(64, (32,) * 4, "silu", F16), ""),  # a half of a weight may be none of f16
        (Net(64, (32,) * 4, "silu and itself", BF16), ""),
        (Net(64, (32,) * 4, "tanh", BF16), ""),
        (Net(64, (32,) * 4, "silu", BF16, given=F32, last=False), "silu_of_half"),
    ],
    ids=str,
)
def test_sums_that_one_activation_reads_are_halves(net: Net, form: str) -> None:
    source = templates.emit(mlp(net), GROUP.schedule() if max(net.widths) < 100 else RING.schedule())
    assert isinstance(source, CudaSource)
    body = source.text[source.text.index(f"{source.entry}(const void") :]
    uses = {name: body.count(f"w_mlp_{name}(") for name in ("silu_of_half", "gelu_of_half", "gelu_stretched")}
    assert all((count > 0) == (name == form) for name, count in uses.items())
    assert ("0.5f * w_unpack_bf16" in source.text) == bool(form)


@pytest.mark.parametrize(
    ("net", "ways"),
    [
        (Net(1 << 18, (256,) * 5, "gelu", BF16), {"early"}),
        (Net(1 << 18, (192,) * 5, "tanh", BF16), {"early"}),
        (Net(1 << 18, (128,) * 5, "silu", BF16), set()),
        (Net(1 << 18, (256,) * 5, "relu", BF16), set()),
        (Net(1 << 18, (256,) * 5, "silu", F16), set()),
        (Net(1 << 18, (64,) * 3, "relu", BF16), {"keep"}),
        (Net(1 << 20, (64,) * 3, "relu", BF16), set()),  # results do not fit into the L2 cache
        (Net(1 << 16, (64,) * 3, "relu", BF16), set()),  # all of it does
    ],
    ids=str,
)
def test_other_ways_are_offered_where_they_may_gain(net: Net, ways: set[str]) -> None:
    found = templates.schedules(mlp(net), H200)
    assert not isinstance(found, Declined), found.reason
    shapes = [MlpConfig.of(s) for s in found]
    assert {name for name in ("early", "keep") if any(getattr(s, name) for s in shapes)} == ways


def test_the_last_warpgroup_asks_where_turns_are_taken() -> None:
    """It has read what all others have; at first a layer and more is asked for."""
    problem = mlp(Net(1 << 14, (256,) * 5, "silu", BF16))
    for shape, asking in ((RING_TURNS, 128), (replace(RING_TURNS, warps=12), 256), (RING, 0), (PART_TURNS, 0)):
        source = templates.emit(problem, shape.schedule())
        assert isinstance(source, CudaSource)
        assert f"if (t == {asking}) ask();" in source.text
        first = 4 if asking else 2
        assert f"if (t == {asking}) for (int i = 0; i < {first}; ++i) ask();" in source.text


def test_schedules_are_few_and_fit() -> None:
    for widths in ((64,) * 5, (3, *(128,) * 4, 1), (256,) * 9, (16,) * 20):
        problem = mlp(Net(1 << 18, widths, dtype=BF16))
        p = chain(problem)
        assert isinstance(p, Chain)
        for facts in (H200, A100):
            found = templates.schedules(problem, facts)
            assert not isinstance(found, Declined), found.reason
            assert 1 <= len(found) <= 5
            for schedule in found:
                if schedule.param("template") == "mlp_wide":
                    assert facts is A100 and max(widths) == 256
                    source = templates.emit(problem, schedule)
                    assert isinstance(source, CudaSource)
                    assert source.launches[0].shared_bytes <= facts.shared_per_block
                    continue
                shape = MlpConfig.of(schedule)
                assert facts.capability == 90 or not shape.group
                assert shared_bytes(Image.of(p, group=shape.group), shape) <= facts.shared_per_block


@pytest.mark.parametrize(
    ("net", "ways"),
    [
        (Net(1 << 18, (256,) * 5, "silu", BF16), "pingpong plain"),  # streamed; two layers' sums do not fit
        (Net(1 << 18, (192,) * 5, "silu", BF16), "pingpong plain"),
        (Net(1 << 18, (192,) * 5, "relu", BF16), "pingpong plain flow"),
        (Net(1 << 18, (128,) * 5, "relu", BF16), "plain"),
        (Net(1 << 18, (64,) * 9, "relu", BF16), "plain flow"),
        (Net(1 << 18, (64,) * 21, "relu", BF16), "plain"),  # too many layers to write out
    ],
    ids=str,
)
def test_ways_of_overlap_that_are_offered(net: Net, ways: str) -> None:
    found = templates.schedules(mlp(net), H200)
    assert not isinstance(found, Declined), found.reason
    shapes = [MlpConfig.of(s) for s in found]
    assert {"pingpong" if s.pingpong else "flow" if s.flow else "plain" for s in shapes if s.group} == set(ways.split())


def test_four_warpgroups_where_special_functions_lie_between_products() -> None:
    for act, expected in (("gelu", True), ("relu", False)):
        found = templates.schedules(mlp(Net(1 << 18, (128,) * 5, act, BF16)), H200)
        assert not isinstance(found, Declined), found.reason
        assert any(MlpConfig.of(s).group and MlpConfig.of(s).warps == 16 for s in found) == expected


def test_turns_need_a_ring_that_holds_a_layer() -> None:
    """A warpgroup that waits for its turn must not hold back the panels of the one that multiplies."""
    for widths in ((256,) * 5, (192,) * 9, (128,) * 13, (240, 256, 250, 256)):
        found = templates.schedules(mlp(Net(1 << 18, widths, "silu", BF16)), H200)
        assert not isinstance(found, Declined), found.reason
        taking = [s for s in map(MlpConfig.of, found) if s.pingpong]
        assert taking
        assert all(s.stages - 2 >= -(-max(widths) // 64) and s.owners > 1 for s in taking)


def test_all_weights_are_replaced() -> None:
    problem = mlp(Net(64, (32, 32, 32)))
    source = templates.emit(problem, WARP.schedule())
    assert isinstance(source, CudaSource)
    assert source.replaces_weights == (1, 2, 3, 4)
    assert [p.index for p in source.launches[0].arguments if isinstance(p, Pointer) and p.kind == "in"] == [0]


@pytest.mark.parametrize("shape", few([WARP, GROUP, PIECES, GROUPS], 1), ids=str)
def test_weights_in_float32_are_rounded_while_they_are_packed(shape: MlpConfig | mlp_wide.MlpWideConfig) -> None:
    problem = mlp(Net(20, (8, 48, 33), "silu", BF16))
    short, wide = (mlp_template.emit(problem, shape.schedule(), masters) for masters in (None, F32))
    assert isinstance(short, CudaSource) and isinstance(wide, CudaSource)
    rng = np.random.default_rng(3)
    x, *held = (v.astype(np.float32) for v in normal(problem))
    held = [(v + 1e-3 * rng.standard_normal(v.shape)).astype(np.float32) for v in held]
    types = [problem.graph.type_of(i) for i in problem.graph.inputs]
    b = GraphBuilder()
    for t in types:
        b.input(TensorType(BF16 if t is types[0] else F32, t.shape))
    memory = b.build([b.input(problem.graph.type_of(problem.graph.outputs[0]))])
    given = Problem(memory, "memory", (Format.ROW,) * len(memory.inputs), (Format.ROW,))
    kernels = [Emulated([s]) for s in (short, wide)]
    rounded = [round_bf16(v) for v in held]
    wanted = run(kernels[0], problem, short, [x, *rounded])[0]
    got = run(kernels[1], given, wide, [x, *held, np.zeros_like(wanted)])[0]
    np.testing.assert_array_equal(got, wanted)


def _branches() -> Problem:
    """Two layers, and a result that is none: the input's positive part."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (32, 16)))
    one, two = (b.add(Prim.MATMUL, x, b.input(TensorType(F16, (16, 32)), is_weight=True)) for _ in range(2))
    graph = b.build([b.apply(Prim.MUL, one, two), b.apply(Prim.MAX, x, 0.0)])
    return Problem(graph, str(graph), (Format.ROW,) * 3, (Format.ROW,) * 2)


def _computed() -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(F16, (32, 16)))
    w = b.input(TensorType(F16, (16, 16)))
    graph = b.build([b.add(Prim.MATMUL, b.add(Prim.MATMUL, x, w), w)])
    return Problem(graph, str(graph), (Format.ROW,) * 2, (Format.ROW,))


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (mlp(Net(32, (16, 32, 16), dtype=F32)), "products in f32"),
        (mlp(Net(32, (16, 513, 16))), "513 columns"),
        (mlp(Net(32, (16, 32))), "fewer than two"),
        (_branches(), "not those of layers"),
        (_computed(), "weights are computed"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str) -> None:
    refused = chain(problem)
    assert isinstance(refused, Declined)
    assert part in refused.reason


def test_two_branches_that_meet_are_one_kernel() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(F16, (32, 16)))
    one, two = (b.add(Prim.MATMUL, x, b.input(TensorType(F16, (16, 32)), is_weight=True)) for _ in range(2))
    graph = b.build([b.apply(Prim.MUL, one, ACTIVATIONS["silu"](b, two))])
    problem = Problem(graph, str(graph), (Format.ROW,) * 3, (Format.ROW,))
    source = templates.emit(problem, WARP.schedule())
    assert isinstance(source, CudaSource), source
    inputs = normal(problem)
    exact = evaluate(graph, inputs, precise=True)[0]
    got = run(Emulated([source]), problem, source, inputs)[0]
    assert_allclose(got.astype(np.float64), exact, rtol=4e-3, atol=2e-3)


def test_a_sample_compiles_without_spills() -> None:
    problem = mlp(Net(1 << 18, (64,) * 4, "silu", dtype=BF16))
    for arch, facts in (("sm_90a", H200), ("sm_80", A100)):
        found = templates.schedules(problem, facts)
        assert not isinstance(found, Declined), found.reason
        compiled_well([s for x in found[:1] if isinstance(s := templates.emit(problem, x), CudaSource)], arch, facts)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "facts"), few([("sm_90a", H200), ("sm_80", A100)], 1, unpack=True))
def test_wide_samples_compile_without_spills(arch: str, facts: GpuFacts) -> None:
    nets = (Net(1 << 18, (512,) * 4, "gelu", BF16, residual=True), Net(60_000, (784, 512, 256, 10), given=F32))
    for net in nets:
        found = templates.schedules(mlp(net), facts)
        assert not isinstance(found, Declined), found.reason
        assert all(x.param("template") == "mlp_wide" for x in found)
        compiled_well([s for x in found[:1] if isinstance(s := templates.emit(mlp(net), x), CudaSource)], arch, facts)


def test_values_in_shared_memory_take_the_place_of_those_that_nobody_reads() -> None:
    p = chain(mlp(Net(64, (512,) * 9, "relu")))
    beside = chain(mlp(Net(64, (512,) * 9, "relu", residual=True)))
    skip = chain(mlp(Net(64, (64, *(512,) * 4), "relu", skip=(3,))))
    assert isinstance(p, Chain) and isinstance(beside, Chain) and isinstance(skip, Chain)
    assert [SharedValues.of(x, 128).count for x in (p, beside, skip)] == [32, 32, 36]


@pytest.mark.slow
@pytest.mark.parametrize(
    "width", [8, 16, 32, 64, 96, 128, *(pytest.param(n, marks=pytest.mark.whole) for n in (192, 256, 320, 512))]
)
def test_schedules_compile_without_spills(width: int) -> None:
    for act in ("relu", "gelu"):
        problem = mlp(Net(1 << 18, (width,) * 5, act, dtype=BF16))
        for arch, facts in (("sm_90a", H200), ("sm_80", A100)):
            found = templates.schedules(problem, facts)
            if not isinstance(found, Declined):
                made = [s for x in found if isinstance(s := templates.emit(problem, x), CudaSource)]
                compiled_well(made, arch, facts)


@pytest.mark.parametrize(("name", "shape"), [("mlp_wide", GROUPS), ("mlp_wide_fragments", FEW)])
def test_the_text_is_the_golden_one(name: str, shape: mlp_wide.MlpWideConfig) -> None:
    source = templates.emit(
        mlp(Net(300, (40, 288, 288, 5), ("relu", "silu", "none"), BF16, residual=True)), shape.schedule()
    )
    assert isinstance(source, CudaSource), source
    golden(name, replace(source, text=source.text.replace(mlp_header(), "").replace(tma_header(), "")))
