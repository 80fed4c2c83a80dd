"""Products by themselves on a real GPU: every layout, type, kind of size and epilogue against float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.gpu_gemm_lt import build, kernels_of
from benchmarks.harness.race import Race
from tests.gemm.crossed import KINDS, crossed

from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, Nvrtc, find_nvrtc
from weft.gemm.epilogue import epilogue
from weft.gemm.spec import LAYOUTS, Gemm
from weft.ir.types import DType
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu
SIZES = (
    (256, 192, 320),
    (200, 136, 328),
    (77, 33, 45),
    (129, 255, 1001),
    (1, 256, 512),
    (8, 1000, 264),
    (64, 64, 4096),
)
"""Aligned, ends of tiles, odd, odd and long, few rows, a long sum."""
EPILOGUES = ("none", "bias", "bias_gelu", "bias_gate", "silu(acc * 0.5 + row) + residual", "bias_residual_relu")


@pytest.fixture(scope="module")
def tools() -> tuple[GpuFacts, Nvrtc]:
    import torch

    torch.zeros(1, device="cuda")
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc), nvrtc
    return gpu_facts(None, calibrate=False), nvrtc


def wrong(
    problems: Sequence[Gemm], facts: GpuFacts, nvrtc: Nvrtc, cache: Path, most: int = 6, *, library: bool = False
) -> list[tuple[str, str, str]]:
    """What every contender of every product got wrong; kernels that the gate refuses are left out."""
    from weft.device.cuda.cublaslt import CublasLt, find_cublaslt

    kernels = [kernels_of(g, facts, most) for g in problems]
    with ThreadPoolExecutor() as pool:
        built = list(pool.map(lambda ks: [build(k, facts, nvrtc, cache) for _, _, k in ks], kernels))
    found = []
    for g, own, cubins in zip(problems, kernels, built, strict=True):
        race = Race(g, 1, tf32=facts.tf32)
        for (_, schedule, source), made in zip(own, cubins, strict=True):
            if isinstance(made, CompiledCubin):
                race.add_kernel(str(schedule), source, str(made.path))
        assert race.contenders, g.name
        if library:
            lt = find_cublaslt()
            assert isinstance(lt, CublasLt), lt
            assert race.add_library(lt, tf32=facts.tf32), g.name
        for x in race.contenders:
            race._verify(x)
        found += [(g.name, x.name, x.refused) for x in race.contenders if x.refused]
    return found


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_type_and_kind_of_size(
    layout: str, dtype: str, tools: tuple[GpuFacts, Nvrtc], tmp_path: Path
) -> None:
    problems = [Gemm(m, n, k, layout=layout, dtype=DType(dtype)) for m, n, k in SIZES]
    assert not wrong(problems, *tools, tmp_path)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_every_epilogue(dtype: str, tools: tuple[GpuFacts, Nvrtc], tmp_path: Path) -> None:
    problems = [
        Gemm(m, n, k, layout="nt", dtype=DType(dtype), epilogue=epilogue(text))
        for m, n, k in SIZES[:4]
        for text in EPILOGUES
    ]
    assert not wrong(problems, *tools, tmp_path, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_epilogue_and_odd_size(kind: str, tools: tuple[GpuFacts, Nvrtc], tmp_path: Path) -> None:
    """With `KINDS` every combination; kernels of two templates each."""
    facts, nvrtc = tools
    cases = [x for x in crossed() if x.kind == kind]
    assert len(cases) >= 48
    facts = cases[0].facts(facts)
    kernels = [x.kernels(facts, 2) for x in cases]
    with ThreadPoolExecutor() as pool:
        built = list(pool.map(lambda ks: [build(k, facts, nvrtc, tmp_path) for k in ks], kernels))
    refused = []
    for x, own, cubins in zip(cases, kernels, built, strict=True):
        race = Race(x.gemm, 1, tf32=facts.tf32)
        for source, made in zip(own, cubins, strict=True):
            assert isinstance(made, CompiledCubin), (x, source.schedule, made)
            race._verify(race.add_kernel(str(source.schedule), source, str(made.path)))
        refused += [(x, c.name, c.refused) for c in race.contenders if c.refused]
    assert not refused


def test_a_constant_operand_is_packed(tools: tuple[GpuFacts, Nvrtc], tmp_path: Path) -> None:
    problems = [Gemm(200, 136, 328, layout=layout, constant=True) for layout in LAYOUTS]
    assert not wrong(problems, *tools, tmp_path, 4)


def test_tf32(tools: tuple[GpuFacts, Nvrtc], tmp_path: Path) -> None:
    facts = replace(tools[0], tf32=True)
    problems = [Gemm(m, n, k, layout=layout, dtype=DType.F32) for m, n, k in SIZES[:4] for layout in LAYOUTS]
    assert not wrong(problems, facts, tools[1], tmp_path, 4)


def test_the_library_computes_the_same(tools: tuple[GpuFacts, Nvrtc], tmp_path: Path) -> None:
    """All layouts, fused and not; a wrong order of operands or of the bias would show."""
    texts = ("none", "bias", "bias_relu", "bias_gelu_tanh", "bias_residual", "bias_residual_relu", "bias_silu")
    problems = [
        Gemm(264, 136, 328, layout=layout, dtype=dtype, epilogue=epilogue(text))
        for layout in LAYOUTS
        for text in texts
        for dtype in (DType.F16, DType.BF16, DType.F32)
    ]
    assert not wrong(problems, *tools, tmp_path, 1, library=True)


def test_a_race_has_times_of_both_sides_and_a_wrong_kernel_is_refused(
    tools: tuple[GpuFacts, Nvrtc], tmp_path: Path
) -> None:
    from weft.gemm.again import against_cublas, library_alone
    from weft.generate.cuda.templates import emit

    facts, nvrtc = tools
    g = Gemm(512, 512, 512, layout="nt")
    (_, schedule, source), *_ = kernels_of(g, facts, 1)
    told = against_cublas(g, source, facts, nvrtc, tmp_path)
    assert json.dumps(told)
    assert 0.1 < float(told["ratio"]) < 10  # type: ignore[arg-type]
    alone = library_alone(g, facts)
    assert alone.best is not None
    assert 0.5 < alone.best.median_us / told["library"]["median_us"] < 2  # type: ignore[index]
    other = emit(replace(g, m=256).problem(), schedule)  # computes half of the rows
    assert isinstance(other, CudaSource)
    refused = against_cublas(g, other, facts, nvrtc, tmp_path)["refused"]
    assert any(why.startswith(("unwritten", "wrong")) for why in refused.values())  # type: ignore[attr-defined]


def test_a_search_finds_verified_kernels_and_knows_them_again(tools: tuple[GpuFacts, Nvrtc], tmp_path: Path) -> None:
    from weft.gemm.folder import read, write
    from weft.gemm.search import search
    from weft.options import Options
    from weft.tune.store import Database
    from weft.tune.tuner import Tuner

    facts, nvrtc = tools
    g = Gemm(512, 384, 256, layout="nt", most=6)
    with (
        Database.open(tmp_path / "cache") as database,
        Tuner(Options(device="cuda", cache_dir=tmp_path / "cache"), facts, database, compiler=nvrtc) as tuner,
    ):
        first = search(g, facts, tuner.measure, limit=8)
        assert first.best is not None
        assert first.best.state == "ok"
        assert first.seconds < 60
        second = search(g, facts, tuner.measure, limit=8)
    assert [o.median_us for o in second.outcomes] == [o.median_us for o in first.outcomes]
    folder = write(tmp_path, first)
    assert read(folder)[0] == g
