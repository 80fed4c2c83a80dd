"""Contractions on a GPU, checked without one: emulated on the host, and compiled for two architectures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests import goldens
from tests.generate.cuda.products import BF16, F16, F32, LAST, ROW, convolution, heads_joined, heads_parted, product
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact, run, small_integers
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc, gate
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.mma.kernel import MmaConfig
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule

H200 = GpuFacts(name="like an H200")
"""Without a table of measured schedules: the order is that of the models."""
A100 = GpuFacts(capability=80, sms=108, shared_per_sm=167936, shared_per_block=166912)


def split(s: Schedule) -> bool:
    return int(dict(s.params).get("split", 1)) > 1 and dict(s.params).get("cluster") is False  # type: ignore[arg-type]


def clustered(s: Schedule) -> bool:
    return bool(dict(s.params).get("cluster"))


def anything(s: Schedule) -> bool:
    return s.param("template") not in ("halo", "tma")  # which have tests of their own


def tiled(s: Schedule) -> bool:
    return int(s.param("th")) * int(s.param("tw")) > 1  # type: ignore[arg-type]


def group(s: Schedule) -> bool:
    return s.param("template") == "wgmma"


def fragments(s: Schedule) -> bool:
    return s.param("template") == "mma"


def gemv(s: Schedule) -> bool:
    return s.param("template") == "gemv"


CASES: dict[str, tuple[Problem, Callable[[Schedule], bool]]] = {
    "3x3": (convolution(1, 16, 9, 9, 24, 3, 1, 1, residual=True), anything),
    "1x1": (convolution(2, 24, 9, 9, 40, 1), anything),
    "1x1 strided": (convolution(2, 16, 9, 9, 24, 1, 2), anything),
    "row-major": (convolution(2, 16, 8, 9, 24, 3, 2, 1, fin=ROW, fout=ROW), anything),
    "1x1 of a row-major image": (convolution(2, 24, 8, 8, 24, 1, fin=ROW), anything),
    "three channels": (convolution(1, 3, 19, 17, 24, 7, 2, 3, fin=ROW), anything),
    "odd channels": (convolution(1, 5, 7, 9, 11, 3, 1, 1), anything),
    "dilated": (convolution(1, 64, 7, 7, 40, 3, 1, 2, 2), anything),
    "changing weight": (convolution(2, 16, 9, 9, 24, 3, 1, 1, changing=True, residual=True), fragments),
    "changing weight, a warpgroup": (convolution(2, 32, 9, 9, 64, 3, 2, 1, changing=True), group),
    "changing weight, 1x1 strided": (convolution(2, 16, 9, 9, 24, 1, 2, changing=True), anything),
    "changing weight, three channels": (convolution(1, 3, 19, 17, 24, 7, 2, 3, changing=True), anything),
    "changing weight, odd channels, dilated": (convolution(1, 5, 7, 9, 11, (3, 2), 1, 2, 2, changing=True), anything),
    "changing weight, row-major image": (convolution(2, 16, 8, 9, 24, 3, 2, 1, fin=ROW, changing=True), anything),
    "groups": (convolution(1, 32, 9, 9, 48, 3, 1, 1, 1, 4), anything),
    "odd groups": (convolution(1, 12, 9, 9, 9, 3, 1, 1, 1, 3), anything),
    "long kernel": (convolution(1, 16, 9, 9, 32, (1, 7), 1, 3), anything),
    "reflect": (convolution(1, 16, 6, 7, 24, 3, before="reflect"), anything),
    "upsampled": (convolution(1, 16, 6, 7, 24, 3, before="up edge"), anything),
    "upsampled, three channels": (convolution(1, 3, 6, 7, 24, 3, before="up reflect", fin=ROW), anything),
    "split over blocks": (convolution(1, 512, 4, 5, 16, 3, 1, 1), split),
    "split over a cluster": (convolution(1, 512, 4, 5, 16, 3, 1, 1), clustered),
    "bf16": (convolution(1, 16, 9, 9, 24, 3, 1, 1, dtype=BF16), anything),
    "f32": (convolution(1, 12, 9, 9, 24, 3, 1, 1, dtype=F32), anything),
    "depthwise": (convolution(2, 24, 9, 11, 24, 3, 2, 1, groups=24, residual=True), tiled),
    "depthwise, no padding": (convolution(1, 20, 8, 9, 20, 3, groups=20), tiled),
    "depthwise, row-major": (convolution(1, 10, 9, 10, 10, 3, 1, 1, groups=10, fin=ROW, fout=ROW), tiled),
    "depthwise, 5x5 bf16": (convolution(1, 16, 7, 7, 16, 5, 1, 2, groups=16, dtype=BF16), anything),
    "depthwise, dilated f32": (convolution(1, 12, 9, 9, 12, 3, 1, 2, 2, 12, dtype=F32), tiled),
    "warpgroups": (product((70, 264), (40, 264), turn_right=True), group),
    "warpgroups, 3x3 bf16": (convolution(1, 16, 11, 11, 24, 3, 1, 1, dtype=BF16), group),
    "warpgroups, both operands": (product((2, 70, 72), (2, 40, 72), weight=False, turn_right=True), group),
    "heads joined": (heads_joined(2, 3, 20, 16, 24), anything),
    "heads parted": (heads_parted(2, 3, 20, 16, 40), anything),
    "heads parted, no weight": (heads_parted(2, 3, 20, 16, 40, weight=False), anything),
    "few rows": (product((3, 520), (12, 520), turn_right=True), gemv),
    "few rows, repacked": (product((2, 264), (264, 10), dtype=BF16), gemv),
    "few rows, batched f32": (product((2, 1, 64), (2, 10, 64), turn_right=True, weight=False, dtype=F32), gemv),
    "linear": (product((50, 40), (72, 40), turn_right=True), anything),
    "linear, three dimensions": (product((2, 5, 40), (40, 18)), anything),
    "one column": (product((33, 40), (40, 1)), anything),
    "batched": (product((3, 50, 40), (3, 40, 72), weight=False, bias=False), anything),
    "batched, transposed": (product((3, 50, 40), (3, 72, 40), weight=False, bias=False, turn_right=True), anything),
    "left transposed": (product((40, 48), (40, 72), weight=False, turn_left=True), anything),
    "odd": (product((2, 3, 33, 17), (2, 3, 17, 19), weight=False), anything),
    "broadcast batch": (product((2, 3, 33, 16), (3, 16, 24), weight=False), anything),
    "f32 batched": (product((3, 50, 44), (3, 44, 20), weight=False, dtype=F32), anything),
    "f32, left transposed": (product((40, 48), (40, 72), weight=False, turn_left=True, dtype=F32), anything),
    "f32, both transposed": (
        product((2, 41, 36), (2, 72, 41), weight=False, turn_left=True, turn_right=True, dtype=F32),
        anything,
    ),
    "sums of f16 stored in f32": (product((20, 40), (40, 24), out=F32), anything),
}
TF32: dict[str, tuple[Problem, Callable[[Schedule], bool]]] = {
    "3x3": (convolution(1, 12, 9, 9, 24, 3, 1, 1, dtype=F32, residual=True), fragments),
    "reflect": (convolution(1, 16, 6, 7, 24, 3, before="reflect", dtype=F32), fragments),
    "three channels": (convolution(1, 3, 19, 17, 24, 7, 2, 3, fin=ROW, dtype=F32), fragments),
    "linear": (product((50, 40), (72, 40), turn_right=True, dtype=F32), fragments),
    "few rows": (product((16, 520), (24, 520), turn_right=True, dtype=F32), fragments),
    "odd": (product((2, 3, 33, 17), (2, 3, 17, 19), weight=False, dtype=F32), fragments),
    "batched, transposed": (product((3, 50, 40), (3, 72, 40), weight=False, turn_right=True, dtype=F32), fragments),
    "nn": (product((3, 50, 44), (3, 44, 68), weight=False, dtype=F32), fragments),
    "tn": (product((40, 48), (40, 72), weight=False, turn_left=True, dtype=F32), fragments),
    "1x1 of a row-major image": (convolution(2, 12, 8, 8, 24, 1, fin=ROW, dtype=F32), fragments),
    "split over blocks": (convolution(1, 512, 4, 5, 16, 3, 1, 1, dtype=F32), split),
    "split over a cluster": (convolution(1, 512, 4, 5, 16, 3, 1, 1, dtype=F32), clustered),
}
"""The same with products of f32 on tensor cores."""


def choose(problem: Problem, wanted: Callable[[Schedule], bool], *, tf32: bool = False) -> CudaSource:
    found = templates.schedules(problem, replace(A100 if wanted is split else H200, tf32=tf32))
    assert not isinstance(found, Declined), found.reason
    source = templates.emit(problem, next(s for s in found if wanted(s)))
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    found = {name: choose(*case) for name, case in CASES.items()}
    return found | {f"tf32, {name}": choose(*case, tf32=True) for name, case in TF32.items()}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", few([*CASES, *(f"tf32, {name}" for name in TF32)], 10))
def test_sums_of_integers_are_exact(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, (CASES.get(name) or TF32[name.removeprefix("tf32, ")])[0], sources[name], defer=defer)


LINES = {
    "nn": product((2, 50, 44), (2, 44, 68), weight=False, dtype=F32),
    "tn": product((37, 48), (37, 72), weight=False, turn_left=True, dtype=F32),
    "tt": product((32, 128), (256, 32), weight=False, turn_left=True, turn_right=True, dtype=F32),
    "whole": product((128, 64), (64, 256), weight=False, dtype=F32),
}
"""Products whose rows or columns are neighbours in memory: as they lie on the way to CUDA cores."""
LINE_SHAPES = {
    "16x16 by two warps along the sum": MmaConfig(32, 32, 16, 16, 16, 2, 3, 1, False),
    "16x32 by four warps along the sum": MmaConfig(16, 64, 32, 16, 32, 4, 3, 1, False),
    "32x16 by a cluster": MmaConfig(64, 16, 32, 32, 16, 1, 4, 2, True),
    "32x64 by two blocks": MmaConfig(64, 64, 16, 32, 64, 1, 5, 2, False),
    "64x64": MmaConfig(64, 256, 16, 64, 64, 1, 4, 1, False),
}


@pytest.fixture(scope="module")
def of_lines(request: pytest.FixtureRequest) -> tuple[dict[tuple[str, str], CudaSource], Emulated]:
    found: dict[tuple[str, str], CudaSource] = {}
    for name, problem in LINES.items():
        for shape_name, shape in LINE_SHAPES.items():
            source = templates.emit(problem, shape.schedule("simt"))
            assert isinstance(source, CudaSource), source
            found[name, shape_name] = source
    names = asked(request, {name: name for name in LINES})
    return found, Emulated([source for (name, _), source in found.items() if name in names])


@pytest.mark.parametrize("shape", LINE_SHAPES)
@pytest.mark.parametrize("name", few(LINES, 1))
def test_lines_are_multiplied_as_they_lie(
    name: str, shape: str, of_lines: tuple[dict[tuple[str, str], CudaSource], Emulated]
) -> None:
    problem, (found, emulated) = LINES[name], of_lines
    source = found[name, shape]
    assert "w_store16(" not in source.text.rpartition("__launch_bounds__")[2], "nothing passes through registers"
    inputs = small_integers(problem)
    (got,) = run(emulated, problem, source, inputs, defer=True)
    np.testing.assert_array_equal(got, evaluate(problem.graph, inputs, precise=True)[0])


@pytest.mark.parametrize("arch", few(["sm_80", "sm_90a"], 1))
def test_lines_compile_without_spills(arch: str) -> None:
    shapes = [MmaConfig(128, 64, 16, 64, 64, 1, 4, 1, False), MmaConfig(128, 128, 32, 32, 64, 1, 4, 1, False)]
    problem = product((1024, 1024), (1024, 1024), weight=False, dtype=F32)
    sources = [templates.emit(problem, s.schedule("simt")) for s in shapes]
    compiled_well([s for s in sources if isinstance(s, CudaSource)], arch, H200 if arch == "sm_90a" else A100)


def network(n: int) -> list[Problem]:
    """Convolutions and products of ResNet-50, candy and BERT for n images or sentences."""
    shapes = [
        (3, 224, 64, 7, 2, 3), (64, 56, 64, 3, 1, 1), (64, 56, 256, 1, 1, 0), (256, 56, 64, 1, 1, 0),
        (128, 56, 128, 3, 2, 1), (256, 56, 512, 1, 2, 0), (256, 14, 256, 3, 1, 1), (1024, 14, 256, 1, 1, 0),
        (512, 14, 512, 3, 2, 1), (512, 7, 2048, 1, 1, 0), (512, 7, 512, 3, 1, 1), (32, 224, 64, 3, 2, 0),
        (128, 56, 128, 3, 1, 0),
    ]  # fmt: skip
    found = [
        convolution(n, c, h, h, oc, k, s, p, residual=k == 1, fin=ROW if c == 3 else LAST)
        for c, h, oc, k, s, p in shapes
    ]
    found.append(convolution(n, 32, 112, 112, 3, 9, before="reflect", fout=ROW, relu=False))
    found += [product((128 * n, k), (m, k), turn_right=True, gelu=m == 3072) for k, m in ((768, 3072), (3072, 768))]
    found.append(product((12 * n, 128, 64), (12 * n, 128, 64), turn_right=True, weight=False, bias=False))
    found.append(product((n, 2048), (1000, 2048), turn_right=True))
    return found


def compiled(problems: list[Problem], arch: str, most: int, *, tf32: bool = False) -> None:
    facts = replace(H200 if arch == "sm_90a" else A100, tf32=tf32)
    sources = []
    for problem in problems:
        found = templates.schedules(problem, facts)
        assert not isinstance(found, Declined), found.reason
        for schedule in found[:most]:
            source = templates.emit(problem, schedule)
            assert isinstance(source, CudaSource), source
            sources.append(source)
    compiled_well(sources, arch, facts)


def compiled_well(sources: list[CudaSource], arch: str, facts: GpuFacts) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    results = nvrtc.compile_many([CompileJob(s.text, arch, s.flags) for s in sources])
    for source, result in zip(sources, results, strict=True):
        assert isinstance(result, CompiledCubin), result
        assert result.warnings == (), (str(source.schedule), result.warnings)
        for launch in source.launches:
            own = result.of(launch.entry)
            assert own.spill_stores == own.spill_loads == own.stack_bytes == 0, str(source.schedule)
            assert gate(result, launch, facts) is None


def test_a_sample_compiles_without_spills() -> None:
    compiled(network(1)[5:8] + network(16)[2:3], "sm_90a", 1)
    compiled(network(16)[6:7], "sm_80", 1)


@pytest.mark.parametrize("arch", few(["sm_80", "sm_90a"], 1))
def test_a_sample_of_f32_compiles_without_spills(arch: str) -> None:
    large = product((2048, 1024), (2048, 1024), turn_right=True, dtype=F32)
    pixels = convolution(1, 64, 56, 56, 64, 3, 1, 1, dtype=F32, residual=True)
    compiled([large, pixels], arch, 1)
    compiled([large, pixels], arch, 1, tf32=True)


@pytest.mark.parametrize("arch", [80, 90])
def test_tf32_only_where_it_is_allowed(arch: int) -> None:
    problem = product((256, 512), (512, 512), dtype=F32)
    strict, loose = (templates.schedules(problem, GpuFacts(capability=arch, tf32=allowed)) for allowed in (False, True))
    assert not isinstance(strict, Declined)
    assert not isinstance(loose, Declined)
    assert {s.param("template") for s in strict} == {"simt"}
    assert {s.param("template") for s in loose} >= {"mma", *(["tma"] if arch == 90 else [])}
    for schedule in strict:
        source = templates.emit(problem, schedule)
        assert isinstance(source, CudaSource)
        assert "tf32" not in source.text
    sixteen = product((256, 512), (512, 512))
    assert templates.schedules(sixteen, GpuFacts(tf32=True)) == templates.schedules(sixteen, GpuFacts())


def test_warpgroups_that_threads_feed_do_not_take_f32() -> None:
    shape = MmaConfig(64, 64, 32, 64, 64, 1, 4, 1, False, True)
    found = templates.emit(product((256, 512), (512, 512), dtype=F32), shape.schedule("wgmma"))
    assert isinstance(found, Declined)
    assert "rounds" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_of_networks_compile_without_spills(n: int, arch: str) -> None:
    compiled(network(n), arch, 3)


GOLDEN = {
    "conv3x3": (convolution(1, 64, 14, 14, 64, 3, 1, 1, residual=True), anything),
    "linear_cluster": (product((64, 1024), (64, 1024), turn_right=True), clustered),
    "linear_group": (product((2048, 1024), (1024, 1024), turn_right=True), group),
    "depthwise": (convolution(1, 32, 14, 14, 32, 3, 1, 1, groups=32), anything),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_text(name: str) -> None:
    golden(name, choose(*GOLDEN[name]))


def golden(name: str, source: CudaSource) -> None:
    text = source.text.replace(prelude(), "").replace(source.entry, "ENTRY")
    goldens.check(f"cuda/kernels/{name}.cu", f"// {source.schedule}\n{text}")


def test_an_only_column_of_tiles_is_counted_where_there_are_batches() -> None:
    schedule = MmaConfig(16, 32, 32, 16, 16, 2, 4, 1, False, False).schedule("mma")
    for batches, column in (((6,), "role.block_x() % 1"), ((), "0")):
        source = templates.emit(product((*batches, 33, 64), (*batches, 64, 24), weight=False), schedule)
        assert isinstance(source, CudaSource)
        assert f"const int tn = {column}, m0 = role.block_x() * 16, n0 = tn * 32;" in source.text


def test_what_is_declined_says_why() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.I32, (4, 4)))
    graph = b.build([b.add(Prim.MATMUL, x, x)])
    found = templates.schedules(Problem(graph, "i", (ROW,), (ROW,)), H200)
    assert isinstance(found, Declined)
    assert "i32" in found.reason
    old = templates.schedules(convolution(1, 16, 9, 9, 24, 3), GpuFacts(capability=75))
    assert isinstance(old, Declined)
    assert "7.5" in old.reason
    b = GraphBuilder()
    three = b.input(TensorType(F16, (1, 4, 4, 4, 4)))
    weight = b.input(TensorType(F16, (4, 4, 1, 1, 1)), is_weight=True)
    attrs = a.ConvAttrs((1, 1, 1), (0, 0, 0), (0, 0, 0), (1, 1, 1))
    graph = b.build([b.add(Prim.CONV, three, weight, attrs=attrs)])
    found = templates.schedules(Problem(graph, "3", (ROW, ROW), (ROW,)), H200)
    assert isinstance(found, Declined)
    assert "3-d" in found.reason


def test_entries_are_synthetic_and_depend_on_problem_and_schedule() -> None:
    problem = convolution(1, 16, 9, 9, 24, 3)
    found = templates.schedules(problem, H200)
    assert not isinstance(found, Declined)
    entries = [source.entry for s in found if isinstance(source := templates.emit(problem, s), CudaSource)]
    assert len(set(entries)) == len(entries) == len(found)
    assert all(re.fullmatch(r"k[0-9a-f]{16}", e) for e in entries)
