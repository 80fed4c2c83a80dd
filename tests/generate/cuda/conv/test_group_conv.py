"""Convolutions in groups by mma.sync: exact on integers in the emulation, no value beside its group; the ranking."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cuda.products import BF16, F32, ROW, convolution, product
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact, run, small_integers
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.conv.groups import choose
from weft.generate.cuda.conv.groups import kernel as groups
from weft.generate.cuda.conv.groups.kernel import GroupConfig
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as product_of
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource


def positional(n: int, rows: int, channels: int, of: int, window: int, dtype: DType = BF16) -> Problem:
    """A convolution over positions, (n, rows, channels) in memory, as wav2vec2 embeds them: gelu left out."""
    b = GraphBuilder()
    x = b.transpose(b.input(TensorType(dtype, (n, rows, channels))), (0, 2, 1))
    weight = b.input(TensorType(dtype, (channels, channels // of, window)), is_weight=True)
    attrs = a.ConvAttrs((1,), (window // 2,), (window // 2 - 1,), (1,), of)
    y = b.add(Prim.CONV, x, weight, attrs=attrs)
    y = b.apply(Prim.ADD, y, b.reshape(b.input(TensorType(dtype, (channels,)), is_weight=True), (channels, 1)))
    graph = b.build([b.transpose(y, (0, 2, 1))])
    return Problem(graph, f"{graph}", (ROW, ROW, ROW), (ROW,))


PLAIN = GroupConfig(4, 5, 1, 16, 24, 1, 9, 1, 1, False)
CASES: dict[str, tuple[Problem, GroupConfig]] = {
    "24 channels": (convolution(1, 72, 9, 9, 72, 3, 1, 1, 1, 3, residual=True), PLAIN),
    "two groups of three": (convolution(2, 72, 9, 7, 72, 3, 1, 1, 1, 3), replace(PLAIN, gs=2, wm=32)),
    "warps split K": (convolution(1, 72, 7, 7, 72, 3, 1, 1, 1, 3), replace(PLAIN, th=2, tw=7, gs=3, wk=2)),
    "strided": (convolution(2, 96, 11, 9, 96, 3, 2, 1, 1, 4), replace(PLAIN, gs=2, wn=8)),
    "8 channels": (convolution(1, 64, 9, 9, 64, 3, 1, 1, 1, 8), replace(PLAIN, gs=4, wn=8, wm=32)),
    "16 channels, dilated": (convolution(1, 48, 9, 9, 48, 3, 1, 2, 2, 3, dtype=BF16), replace(PLAIN, wn=16)),
    "32 channels": (convolution(1, 64, 6, 6, 64, 3, 1, 1, 1, 2), replace(PLAIN, th=3, tw=6, wn=16, wm=32)),
    "64 channels, cluster by rows": (
        convolution(1, 128, 7, 7, 128, 3, 1, 1, 1, 2),
        GroupConfig(7, 7, 1, 64, 32, 2, 3, 2, 2, True),
    ),
    "64 channels, workspace": (
        convolution(1, 128, 7, 7, 128, 3, 2, 1, 1, 2, dtype=BF16),
        GroupConfig(4, 4, 1, 16, 64, 1, 3, 1, 3, False),
    ),
    "4 channels": (convolution(1, 32, 9, 9, 32, 3, 1, 1, 1, 8), replace(PLAIN, gs=4, wn=8, wm=32)),
    "4 channels, strided": (convolution(1, 32, 9, 10, 32, 3, 2, 1, 1, 8), replace(PLAIN, gs=2, wn=8, wk=3)),
    "8 channels to 12": (convolution(1, 32, 7, 7, 48, 3, 1, 1, 1, 4), replace(PLAIN, gs=2, wn=16)),
    "16 channels to 2": (convolution(1, 64, 7, 7, 8, 3, 1, 1, 1, 4), replace(PLAIN, gs=3, wn=8)),
    "no padding": (convolution(1, 48, 8, 9, 48, 3, groups=2), PLAIN),
    "reflected": (convolution(1, 48, 6, 7, 48, 3, groups=2, before="reflect"), PLAIN),
    "upsampled": (convolution(1, 48, 6, 7, 48, 3, groups=2, before="up edge"), PLAIN),
    "row-major results": (convolution(1, 48, 6, 7, 48, 3, 1, 1, 1, 2, fout=ROW), PLAIN),
    "a ring of rows of taps": (
        convolution(1, 48, 8, 8, 48, 5, 1, 2, 1, 2),
        GroupConfig(4, 8, 2, 32, 24, 1, 5, 3, 1, False),
    ),
    "a ring, split": (
        convolution(1, 32, 6, 8, 32, (9, 3), 1, 3, 1, 2),
        GroupConfig(2, 6, 1, 16, 16, 1, 3, 3, 2, False),
    ),
    "window of 32 positions": (positional(2, 19, 96, 2, 32), GroupConfig(1, 19, 1, 32, 24, 2, 4, 3, 2, False)),
    "window of 16 positions, one ring": (positional(1, 33, 48, 6, 16), GroupConfig(1, 17, 3, 32, 8, 1, 2, 4, 1, False)),
}


def matched(problem: Problem, *, tf32: bool = False) -> Product:
    p = product_of(problem, tf32=tf32)
    assert isinstance(p, Product), p
    return p


def written(problem: Problem, shape: GroupConfig, entry: str) -> CudaSource:
    source = groups.emit(matched(problem), shape.schedule(), entry)
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: written(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources, "24 channels", "4 channels"))


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", few(CASES, 6))
def test_sums_of_integers_are_exact(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name], defer=defer)


@pytest.mark.parametrize("name", ["24 channels", "4 channels"])
def test_an_infinity_stays_in_its_group_and_window(
    name: str, sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    """What fills up a step or a tile reads no value of the image, and no group's channels meet another's weights."""
    problem = CASES[name][0]
    inputs = small_integers(problem)
    inputs[0][0, 0, 0, 0] = np.inf
    inputs[1][:] = 1
    got = run(kernels, problem, sources[name], inputs)[0]
    own = problem.graph.type_of(problem.graph.inputs[1]).shape[1]
    assert np.isposinf(got[0, :own, :2, :2]).all()
    assert np.isfinite(got[0, own:]).all()
    assert np.isfinite(got[0, :, 2:, :]).all() and np.isfinite(got[0, :, :, 2:]).all()


LAYERS: dict[str, Problem] = {
    "regnet at 28": convolution(1, 120, 28, 28, 120, 3, 1, 1, 1, 5),
    "regnet at 14": convolution(1, 336, 14, 14, 336, 3, 1, 1, 1, 14),
    "regnet at 7": convolution(1, 888, 7, 7, 888, 3, 1, 1, 1, 37),
    "regnet, strided": convolution(1, 336, 28, 28, 336, 3, 2, 1, 1, 14),
    "resnext at 56": convolution(1, 128, 56, 56, 128, 3, 1, 1, 1, 32),
    "resnext at 7": convolution(1, 1024, 7, 7, 1024, 3, 1, 1, 1, 32, dtype=BF16),
    "64 channels": convolution(2, 256, 14, 14, 256, 3, 1, 1, 1, 4),
    "wav2vec2": positional(1, 49, 768, 16, 128),
}


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_template_is_among_the_first_that_are_measured(name: str, facts: GpuFacts) -> None:
    found = templates.schedules(LAYERS[name], facts)
    assert not isinstance(found, Declined)
    assert "group_conv" in [s.param("template") for s in found[:3]]
    shapes = [GroupConfig.of(s) for s in found if s.param("template") == "group_conv"]
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        g = groups.Geometry(groups.window(matched(LAYERS[name])), shape)  # type: ignore[arg-type]
        assert groups.refuse(g) is None
        assert g.shared <= facts.shared_per_block
        assert 32 <= g.threads <= 512
        assert facts.capability >= 90 or not shape.cluster


def test_24_channels_are_not_filled_up_to_32() -> None:
    g = groups.Geometry(groups.window(matched(LAYERS["regnet at 14"])), PLAIN)  # type: ignore[arg-type]
    assert (g.steps * 16, g.eights * 8) == (224, 24)  # of 216 and 24


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (convolution(1, 48, 9, 9, 48, 3, 1, 1), "no convolution in groups"),
        (convolution(1, 48, 9, 9, 48, 1, groups=2), "no convolution of a window"),
        (convolution(1, 48, 9, 9, 48, 3, groups=4), "groups of 12 channels"),
        (convolution(1, 48, 9, 9, 6, 3, groups=2), "an even number of results"),
        (convolution(1, 512, 9, 9, 512, 3, groups=2), "at most 128"),
        (convolution(1, 48, 9, 9, 48, 3, groups=2, fin=ROW), "side by side"),
        (convolution(1, 48, 9, 9, 48, 3, groups=2, dtype=F32), "mma.sync of f32"),
        (product((16, 32), (32, 16)), "no convolution in groups"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str) -> None:
    refused = groups.window(matched(problem))
    assert isinstance(refused, Declined)
    assert part in refused.reason
    assert choose.shapes(matched(problem), H200) == []
    assert choose.modelled(matched(problem), PLAIN, H200) is None
    emitted = groups.emit(matched(problem), PLAIN.schedule(), "k")
    assert emitted == refused


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (replace(PLAIN, taps=4), "k-blocks of 4 of 3 x 3 taps"),
        (replace(PLAIN, gs=4), "4 groups of 24 channels"),
        (replace(PLAIN, wn=16), "warp tiles"),
        (replace(PLAIN, wm=8), "warp tiles"),
        (replace(PLAIN, wk=15), "14 steps of a k-block for 15 warps"),
        (replace(PLAIN, split=2), "split-K of 1 k-blocks"),
        (replace(PLAIN, taps=3, stages=2), "a ring of 2 stages"),
    ],
)
def test_configurations_that_do_not_fit_are_declined(shape: GroupConfig, part: str) -> None:
    refused = groups.emit(matched(CASES["24 channels"][0]), shape.schedule(), "k")
    assert isinstance(refused, Declined)
    assert part in refused.reason


def test_long_kernels_are_declined_where_no_k_block_is_short_enough() -> None:
    p = matched(positional(1, 300, 128, 1 + 1, 127))
    g = groups.Geometry(groups.window(p), GroupConfig(1, 16, 1, 16, 64, 1, 127, 1, 1, False))  # type: ignore[arg-type]
    refused = groups.refuse(g)
    assert isinstance(refused, Declined) and "steps of a k-block" in refused.reason
    assert all(groups.refuse(replace(g, s=s)) is None for _, s in choose.shapes(p, H200))


@pytest.mark.parametrize(("arch", "facts"), [("sm_90a", H200), ("sm_80", A100)])
def test_a_sample_compiles_without_spills(arch: str, facts: GpuFacts) -> None:
    problems = [LAYERS[x] for x in ("regnet at 14", "resnext at 56", "wav2vec2")]
    shapes = [(x, choose.shapes(matched(x), facts)[0][1]) for x in problems]
    compiled_well([written(x, s, f"k{i}") for i, (x, s) in enumerate(shapes)], arch, facts)
