"""Convolutions from a tile of the image in shared memory: exact on integers in the emulation; how they are ranked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cuda.products import BF16, F32, ROW, convolution, product
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact, run, small_integers
from tests.generate.cuda.test_templates import A100, H200, compiled_well, golden
from tests.slow import asked, few

from weft.generate.cuda import templates
from weft.generate.cuda.conv.halo import choose as halo_choose
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.halo.kernel import HaloConfig
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as product_of
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

PLAIN = HaloConfig(3, 5, 16, 16, 16, 16, 1, 1, 1, False, False)
CASES: dict[str, tuple[Problem, HaloConfig]] = {
    "3x3": (convolution(1, 16, 9, 9, 24, 3, 1, 1, residual=True), replace(PLAIN, bn=32)),
    "warps share a sum": (
        convolution(2, 64, 9, 9, 40, 3, 1, 1),
        HaloConfig(4, 4, 32, 32, 16, 32, 2, 2, 1, False, False),
    ),
    "ring": (convolution(1, 80, 9, 9, 40, 3, 1, 1), HaloConfig(4, 4, 64, 16, 16, 32, 1, 2, 1, False, False)),
    "strided": (convolution(2, 48, 11, 9, 40, 3, 2, 1), HaloConfig(4, 4, 64, 32, 16, 32, 1, 2, 1, False, False)),
    "no padding": (convolution(1, 16, 8, 9, 16, 3), PLAIN),
    "cluster": (convolution(1, 128, 7, 7, 32, 3, 1, 1), HaloConfig(7, 7, 32, 32, 64, 16, 2, 1, 4, True, False)),
    "workspace": (convolution(1, 128, 7, 7, 32, 3, 1, 1), HaloConfig(7, 7, 32, 32, 32, 16, 1, 1, 4, False, False)),
    "stem": (convolution(1, 3, 19, 17, 24, 7, 2, 3, fin=ROW), HaloConfig(4, 8, 32, 4, 16, 32, 1, 1, 1, False, False)),
    "stem, channels last": (
        convolution(1, 3, 19, 17, 24, 7, 2, 3),
        HaloConfig(4, 4, 32, 4, 16, 16, 2, 1, 1, False, False),
    ),
    "first of candy": (
        convolution(1, 3, 12, 13, 24, 9, before="reflect"),
        HaloConfig(4, 4, 32, 4, 16, 16, 1, 1, 1, False, False),
    ),
    "last of candy": (
        convolution(1, 32, 12, 13, 3, 9, before="reflect", fout=ROW, relu=False),
        HaloConfig(2, 5, 32, 32, 16, 32, 2, 1, 1, False, True),
    ),
    "upsampled": (convolution(1, 16, 6, 7, 24, 3, before="up edge"), PLAIN),
    "groups": (convolution(1, 64, 9, 9, 48, 3, 1, 1, 1, 4), PLAIN),
    "odd channels": (convolution(1, 5, 7, 9, 11, 3, 1, 1), PLAIN),
    "twelve channels": (convolution(1, 12, 7, 9, 11, 3, 1, 1), PLAIN),
    "two channels": (convolution(1, 2, 7, 9, 11, 3, 1, 1), HaloConfig(3, 5, 16, 4, 16, 16, 1, 1, 1, False, False)),
    "dilated bf16": (convolution(1, 64, 7, 7, 40, 3, 1, 2, 2, dtype=BF16), replace(PLAIN, bc=64, wk=4)),
    "long kernel": (convolution(1, 16, 9, 9, 32, (1, 7), 1, 3), PLAIN),
    "row-major": (convolution(2, 16, 8, 9, 24, 3, 2, 1, fin=ROW, fout=ROW), PLAIN),
    "row-major, several blocks": (
        convolution(1, 72, 6, 7, 16, 3, 1, 1, fin=ROW),
        HaloConfig(3, 4, 16, 32, 16, 16, 2, 3, 1, False, False),
    ),
    "a loop over rows of taps": (
        convolution(1, 64, 6, 6, 16, 5, 1, 2),
        HaloConfig(6, 6, 16, 64, 16, 16, 1, 1, 1, False, False),
    ),
    "tf32": (convolution(1, 16, 9, 9, 24, 3, 1, 1, residual=True, dtype=F32), replace(PLAIN, bn=32, bc=32)),
    "tf32, ring": (
        convolution(1, 40, 9, 9, 40, 3, 1, 1, dtype=F32),
        HaloConfig(4, 4, 64, 16, 16, 32, 1, 2, 1, False, False),
    ),
    "tf32, warps share a sum": (
        convolution(2, 64, 9, 9, 40, 3, 2, 1, dtype=F32),
        HaloConfig(4, 4, 32, 64, 16, 32, 2, 2, 1, False, False),
    ),
    "tf32, cluster": (
        convolution(1, 64, 7, 7, 32, 3, 1, 1, dtype=F32),
        HaloConfig(7, 7, 32, 32, 64, 16, 2, 1, 4, True, False),
    ),
    "tf32, stem": (
        convolution(1, 3, 19, 17, 24, 7, 2, 3, fin=ROW, dtype=F32),
        HaloConfig(4, 8, 32, 4, 16, 32, 1, 1, 1, False, False),
    ),
    "tf32, stem, channels last": (
        convolution(1, 3, 19, 17, 24, 7, 2, 3, dtype=F32),
        HaloConfig(4, 4, 32, 4, 16, 16, 2, 1, 1, False, False),
    ),
    "tf32, four channels": (
        convolution(1, 4, 9, 9, 24, 3, 1, 1, dtype=F32),
        HaloConfig(3, 5, 16, 4, 16, 16, 1, 1, 1, False, False),
    ),
    "tf32, last of candy": (
        convolution(1, 32, 12, 13, 3, 9, before="reflect", fout=ROW, relu=False, dtype=F32),
        HaloConfig(2, 5, 32, 32, 16, 32, 2, 2, 1, False, True),
    ),
    "tf32, odd channels": (convolution(1, 5, 7, 9, 11, 3, 1, 1, dtype=F32), PLAIN),
    "tf32, row-major": (convolution(2, 10, 8, 9, 24, 3, 2, 1, fin=ROW, fout=ROW, dtype=F32), replace(PLAIN, bc=32)),
}


def matched(problem: Problem, *, tf32: bool = True) -> Product:
    p = product_of(problem, tf32=tf32)
    assert isinstance(p, Product), p
    return p


def written(problem: Problem, shape: HaloConfig, entry: str) -> CudaSource:
    source = halo.emit(matched(problem), shape.schedule(), entry)
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: written(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources, "stem"))


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", few(CASES, 4))
def test_sums_of_integers_are_exact(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name], defer=defer)


def test_nothing_beside_the_window_reaches_a_sum(sources: dict[str, CudaSource], kernels: Emulated) -> None:
    """Taps and channels that fill up a step read no value of the image: one infinity spoils the windows that see it."""
    problem = CASES["stem"][0]
    inputs = small_integers(problem)
    inputs[0][0, 0, 0, 0] = np.inf
    inputs[1][:] = 1
    got = run(kernels, problem, sources["stem"], inputs)[0]
    assert np.isposinf(got[0, :, :2, :2]).all()
    assert np.isfinite(got[0, :, 2:, :]).all()
    assert np.isfinite(got[0, :, :, 2:]).all()


def test_schedules_hold_the_template_where_it_applies() -> None:
    found = templates.schedules(convolution(1, 256, 14, 14, 256, 3, 1, 1), H200)
    assert not isinstance(found, Declined)
    assert "halo" in [s.param("template") for s in found[:3]]
    shapes = [HaloConfig.of(s) for s in found if s.param("template") == "halo"]
    assert len(set(shapes)) == len(shapes)
    plain = templates.schedules(convolution(1, 256, 14, 14, 256, 1), H200)
    assert not isinstance(plain, Declined)
    assert all(s.param("template") != "halo" for s in plain)


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (convolution(1, 16, 9, 9, 16, 1), "no convolution that reads a halo"),
        (product((16, 32), (32, 16)), "no convolution that reads a halo"),
        (convolution(1, 520, 9, 9, 16, 3, fin=ROW), "many channels"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str) -> None:
    refused = halo.window(matched(problem))
    assert isinstance(refused, Declined)
    assert part in refused.reason
    assert halo_choose.shapes(matched(problem), H200) == []


def test_f32_is_declined_where_it_may_not_be_rounded() -> None:
    exact = matched(convolution(1, 16, 9, 9, 16, 3, dtype=F32), tf32=False)
    refused = halo.window(exact)
    assert isinstance(refused, Declined)
    assert "f32" in refused.reason
    assert halo_choose.shapes(exact, H200) == []


def test_shapes_that_do_not_fit_are_declined() -> None:
    p = matched(convolution(1, 16, 9, 9, 24, 3, 1, 1))
    for shape, part in (
        (replace(PLAIN, bc=4), "16 channels"),
        (replace(PLAIN, wide=True), "kernel columns as output channels"),
        (replace(PLAIN, wk=2), "split K"),
    ):
        refused = halo.emit(p, shape.schedule(), "k")
        assert isinstance(refused, Declined)
        assert part in refused.reason


def test_blocks_fit_the_device() -> None:
    for facts in (H200, A100):
        for c, h, oc, k, s in ((3, 224, 64, 7, 2), (64, 56, 64, 3, 1), (512, 7, 512, 3, 1), (32, 224, 3, 9, 1)):
            p = matched(convolution(1, c, h, h, oc, k, s, k // 2))
            found = halo_choose.shapes(p, facts)
            assert found
            for _, shape in found:
                g = halo.Geometry(halo.window(p), shape)  # type: ignore[arg-type]
                assert g.shared <= facts.shared_per_block
                assert 32 <= g.threads <= 512
                assert facts.capability >= 90 or not shape.cluster


def test_text() -> None:
    shape = HaloConfig(7, 7, 32, 32, 32, 32, 2, 2, 1, False, False)
    golden("halo", written(convolution(1, 64, 14, 14, 64, 3, 1, 1), shape, "k00"))


def test_a_sample_compiles_without_spills() -> None:
    stem = convolution(1, 3, 224, 224, 64, 7, 2, 3, fin=ROW)
    last = convolution(1, 32, 112, 112, 3, 9, before="reflect", fout=ROW, relu=False)
    for arch, facts, problems in (("sm_90a", H200, [stem, last]), ("sm_80", A100, [CASES["strided"][0]])):
        shapes = [(x, halo_choose.shapes(matched(x), facts)[0][1]) for x in problems]
        compiled_well([written(x, s, f"k{i}") for i, (x, s) in enumerate(shapes)], arch, facts)
