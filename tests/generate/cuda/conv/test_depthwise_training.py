"""Depthwise convolutions with weights that change, and gradients of their images: exact on integers, infinities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cuda.depthwise import Sizes, data_gradient, forward
from tests.generate.cuda.products import BF16, F16, F32, LAST, ROW, convolution
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact, run, small_integers
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc, gate
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.conv.depthwise import kernel as depthwise
from weft.generate.cuda.conv.depthwise.kernel import DepthwiseConfig
from weft.generate.cuda.conv.depthwise.window import window
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.predict import predicted_us
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule

CASES: dict[str, tuple[Problem, DepthwiseConfig]] = {
    "forward": (forward((2, 24, 9, 11), 3, 1, 1, relu=True), DepthwiseConfig(4, 2, 8, 64)),
    "forward, strided": (forward((1, 16, 9, 12), 3, 2, 1, dtype=F16), DepthwiseConfig(2, 4, 4, 128)),
    "forward, odd channels": (forward((2, 9, 7, 8), 3, 1, 1), DepthwiseConfig(2, 2, 1, 64)),
    "forward, 12 channels, 5x5": (forward((1, 12, 8, 7), 5, 1, 2), DepthwiseConfig(1, 4, 2, 64)),
    "forward, dilated f32": (forward((1, 8, 9, 9), 3, 1, 2, 2, dtype=F32), DepthwiseConfig(4, 4, 4, 64)),
    "forward, no padding": (forward((1, 8, 8, 9), 3), DepthwiseConfig(8, 1, 8, 64)),
    "forward, row-major": (forward((1, 5, 9, 10), 3, 1, 1, lies=ROW), DepthwiseConfig(2, 2, 1, 64)),
    "forward, 9x9": (forward((1, 3, 11, 10), 9, 1, 4), DepthwiseConfig(1, 1, 1, 64)),
    "data": (data_gradient((2, 24, 9, 11), 3, 1, 1, relu=True), DepthwiseConfig(4, 2, 8, 64)),
    "data, strided": (data_gradient((2, 16, 10, 12), 3, 2, 1), DepthwiseConfig(4, 4, 4, 64)),
    "data, strided, odd size": (data_gradient((1, 16, 9, 11), 3, 2, 1, dtype=F16), DepthwiseConfig(2, 2, 8, 64)),
    "data, strided 5x5": (data_gradient((1, 12, 11, 10), 5, 2, 2), DepthwiseConfig(2, 4, 2, 64)),
    "data, stride 3, odd channels": (data_gradient((1, 7, 11, 9), 3, 3, 1), DepthwiseConfig(3, 3, 1, 64)),
    "data, a stride over the window": (data_gradient((1, 8, 10, 11), 2, 3), DepthwiseConfig(3, 3, 8, 64)),
    "data, dilated f32": (data_gradient((1, 8, 9, 10), 3, 1, 2, 2, dtype=F32), DepthwiseConfig(2, 4, 4, 64)),
    "data, dilated and strided": (data_gradient((1, 8, 12, 11), 3, 2, 2, 2), DepthwiseConfig(2, 2, 8, 64)),
    "data, row-major": (data_gradient((1, 5, 9, 10), 3, 2, 1, lies=ROW), DepthwiseConfig(2, 2, 1, 64)),
    "data, constant weight": (data_gradient((1, 16, 9, 9), 3, 2, 1, constant=True), DepthwiseConfig(2, 2, 8, 64)),
}
"""Weights that change, and gradients of the image."""


def source_of(problem: Problem, shape: DepthwiseConfig) -> CudaSource:
    made = CudaGenerator().emit(problem, shape.schedule())
    assert isinstance(made, CudaSource), made
    return made


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: source_of(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources, *BESIDE))


@pytest.mark.parametrize("name", few(CASES, 12))
def test_sums_of_integers_are_exact(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name])


BESIDE = ("data", "data, strided", "data, dilated and strided")


@pytest.mark.parametrize("name", BESIDE)
def test_values_that_are_not_finite_stay_where_they_belong(
    name: str, sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    """An infinite weight meets no zeros between the pixels of a gradient, nor such outside."""
    problem = CASES[name][0]
    rng = np.random.default_rng(0)
    inputs = [np.array(x) for x in small_integers(problem)]
    for x in inputs[:2]:
        flat = x.reshape(-1)
        flat[rng.integers(0, flat.size, 1 + flat.size // 60)] = np.inf
        flat[rng.integers(0, flat.size, 1 + flat.size // 60)] = np.nan
    with np.errstate(all="ignore"):
        exact = evaluate(problem.graph, inputs, precise=True)
    got = run(kernels, problem, sources[name], inputs)
    for x, y in zip(got, exact, strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        np.testing.assert_array_equal(np.isinf(x), np.isinf(y))


# ---- what is offered

LAYERS = [(32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2), (192, 28, 1), (192, 28, 2), (384, 14, 1),
          (576, 14, 1), (576, 14, 2), (960, 7, 1)]  # fmt: skip
"""Channels, size and stride of MobileNetV2's depthwise convolutions."""


MAKERS = (forward, data_gradient)


def layers(n: int, dtype: DType = BF16) -> list[Problem]:
    """The convolution and the gradient of its image, of each."""
    return [make((n, c, size, size), 3, stride, 1, dtype=dtype) for c, size, stride in LAYERS for make in MAKERS]


def offered(problem: Problem, facts: GpuFacts = H200) -> Sequence[Schedule]:
    found = CudaGenerator().schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    return found


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
def test_every_layer_of_a_network_is_offered_vectors(facts: GpuFacts) -> None:
    for problem in layers(128):
        found = offered(problem, facts)
        assert {s.param("template") for s in found} == {"depthwise"}
        assert max(int(str(s.param("width"))) for s in found) == 8
        assert all(0 < (predicted_us(problem, s, facts) or 0) < 400 for s in found)


def matched(problem: Problem) -> Product:
    p = product(problem, by_channel=True)
    assert isinstance(p, Product), p
    by_channel = depthwise.normal(p)
    assert isinstance(by_channel, Product), by_channel
    return by_channel


def test_a_strided_gradient_reads_no_more_than_a_pixel_sees() -> None:
    """Of nine taps four pixels have 1, 2, 2 and 4: none meets a zero between the pixels."""
    p = matched(data_gradient((1, 16, 12, 12), 3, 2, 1))
    rows = window(p, 0, 2)
    assert (rows.count, rows.step, rows.before) == (2, 1, 0)
    assert rows.taps == (((0, 1), (1, 2)), ((1, 0),))
    source = source_of(data_gradient((1, 16, 12, 12), 3, 2, 1), DepthwiseConfig(2, 2, 8, 64))
    assert source.text.count("= fmaf(v[e]") == 9


@pytest.mark.parametrize(("of", "stride"), [((1, 16, 13, 11), 3), ((2, 8, 1, 1), 2), ((1, 8, 2, 9), 4)])
def test_tiles_are_whole_steps_of_any_stride(of: Sizes, stride: int) -> None:
    problem = data_gradient(of, 3, stride, 1)
    for s in offered(problem):
        assert int(str(s.param("th"))) % stride == int(str(s.param("tw"))) % stride == 0
    split = CudaGenerator().emit(problem, DepthwiseConfig(stride + 1, stride, 8, 64).schedule())
    assert isinstance(split, Declined)


def test_elements_that_are_always_inside_are_not_tested() -> None:
    wide = matched(data_gradient((1, 16, 12, 12), 3, 1, 1))
    rows = window(wide, 0, 4)
    assert [rows.always(at, 3) for at in range(rows.count)] == [False, True, True, True, True, False]
    assert not any(replace(rows, size=11).always(at, 3) for at in (0, 4, 5))


def test_what_the_templates_leave_to_others() -> None:
    """Products over channels, weights that are parts."""
    generator = CudaGenerator()
    b = GraphBuilder()
    x, w = b.input(TensorType(BF16, (1, 16, 8, 8))), b.input(TensorType(BF16, (16, 16, 3, 3)))
    attrs = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1))
    full = Problem(b.build([b.add(Prim.CONV, x, w, attrs=attrs)]), "full", (LAST, ROW), (LAST,))
    found = generator.schedules(full, H200)
    assert isinstance(found, Declined)
    assert "no constant" in found.reason
    b = GraphBuilder()
    x, w = b.input(TensorType(BF16, (1, 16, 8, 8))), b.input(TensorType(BF16, (16, 16, 3, 3)))
    turned = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 1, True, (0, 0))
    full = Problem(b.build([b.add(Prim.CONV, x, w, attrs=turned)]), "turned", (LAST, ROW), (LAST,))
    found = generator.schedules(full, H200)
    assert isinstance(found, Declined)
    assert "transposed" in found.reason
    b = GraphBuilder()
    x, w = b.input(TensorType(BF16, (1, 8, 8, 8))), b.input(TensorType(BF16, (8, 1, 4, 4)))
    part = b.slice(w, (0, 0, 0, 0), (8, 1, 3, 3), (1, 1, 1, 1))
    attrs = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 8)
    cut = Problem(b.build([b.add(Prim.CONV, x, part, attrs=attrs)]), "part", (LAST, ROW), (LAST,))
    assert isinstance(generator.schedules(cut, H200), Declined)


def test_a_changing_weight_is_read_behind_the_wait_and_a_constant_one_before() -> None:
    changing = source_of(forward((1, 16, 9, 9), 3, 1, 1), DepthwiseConfig(1, 1, 8, 64))
    constant = source_of(convolution(1, 16, 9, 9, 16, 3, 1, 1, 1, 16, dtype=BF16), DepthwiseConfig(1, 1, 8, 64))
    for source, behind in ((changing, True), (constant, False)):
        body = source.text.rpartition("__launch_bounds__(64)")[2]
        assert (body.index("w_read_if(k0") > body.index("role.pdl_wait()")) is behind
    assert not changing.pack
    assert not changing.packed_bytes
    wide = CudaGenerator().emit(forward((1, 16, 9, 9), 5, 1, 2), DepthwiseConfig(1, 1, 8, 64).schedule())
    assert isinstance(wide, Declined)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_of_layers_compile_without_spills(arch: str) -> None:
    facts = H200 if arch == "sm_90a" else A100
    problems = layers(128)[4:8] + [make((8, 96, 28, 28), 5, 2, 2) for make in MAKERS]
    compiled_well([source for p in problems for source in first(p, facts, 1)], arch, facts)


def first(problem: Problem, facts: GpuFacts, most: int) -> list[CudaSource]:
    made = [CudaGenerator().emit(problem, s) for s in list(offered(problem, facts))[:most]]
    return [source for source in made if isinstance(source, CudaSource)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=lambda d: d.value)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_all_that_is_offered_compiles(arch: str, dtype: DType) -> None:
    """The assembler spills a few words here and there, to stay at 128 registers."""
    facts = H200 if arch == "sm_90a" else A100
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    sources = [source for p in layers(128, dtype) for source in first(p, facts, 5)]
    for source, made in zip(sources, nvrtc.compile_many([CompileJob(s.text, arch) for s in sources]), strict=True):
        assert isinstance(made, CompiledCubin), made
        for launch in source.launches:
            assert made.of(launch.entry).spill_stores <= 64, source.schedule
            assert gate(made, launch, facts) is None
