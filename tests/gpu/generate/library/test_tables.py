"""Every entry of the tables of framework calls on a GPU, in every type, memory format and poison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter_ns

import pytest
import torch
from tests.generate.library import table_cases as cases

from weft.device.cuda.facts import GpuFacts
from weft.generate.library.covered import CONVERT, GELU, entry_of, is_covered
from weft.generate.library.execute import plain_math
from weft.generate.library.operators import OPERATORS
from weft.ir.prims import FREE, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.tune.cuda_device import CudaGpu
from weft.tune.cuda_subject import CallSubject, Waited
from weft.tune.verify import classify, reference_of, verify

pytestmark = pytest.mark.gpu
PRIMS = [p for p in Prim if p not in FREE and p is not Prim.OPAQUE]


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaGpu]:
    with torch.cuda.stream(torch.cuda.current_stream()), plain_math(), torch.no_grad():
        yield CudaGpu(0)


def checked(problems: Iterable[Iterator[Problem]], stated: GpuFacts, gpu: CudaGpu) -> set[str]:
    met, wrong = set(), []
    for family in problems:
        reference = None
        for problem in family:
            for call in cases.calls_of(problem, stated):
                entry = entry_of(problem, call)
                if not is_covered(problem, call, "cuda"):
                    continue
                met.add(entry)
                reference = reference or reference_of(problem.graph, seed=0, device=gpu.device)
                try:
                    subject = Waited(CallSubject(problem, call, gpu), gpu)
                    laid = reference.laid_out(problem)
                    found = verify(problem, subject, laid, {}, slow_s=1e9, clock=perf_counter_ns).finding
                except torch.AcceleratorError:
                    raise  # the context is gone: nothing after this says anything
                except Exception as error:
                    found = classify(error)
                if not cases.is_right(entry, found, cases.ODD_ON_GPU):
                    formats = [f.value for f in problem.input_formats + problem.output_formats]
                    wrong.append(f"{entry} {problem.graph} {formats}: {found}")
    assert not wrong, f"{len(wrong)} calls are not right, such as {wrong[0]}"
    return met


@pytest.mark.parametrize("prim", PRIMS, ids=lambda p: p.value)
def test_primitives(prim: Prim, stated: GpuFacts, gpu: CudaGpu) -> None:
    assert f"primitives {prim.value}" in checked(map(cases.whole, cases.primitives(prim)), stated, gpu)


@pytest.mark.parametrize("rule", OPERATORS)
def test_operators(rule: str, stated: GpuFacts, gpu: CudaGpu) -> None:
    found = checked((cases.of_operator(g, rule) for g in cases.operators(rule)), stated, gpu)
    assert f"operator {rule}" in found


@pytest.mark.parametrize("prim", [p for p in PRIMS if p not in (Prim.TRANSPOSE, Prim.SLICE)], ids=lambda p: p.value)
def test_primitives_of_views(prim: Prim, stated: GpuFacts, gpu: CudaGpu) -> None:
    kinds = (DType.F32, DType.F16, DType.I64, DType.BOOL)
    graphs = [g for g in cases.primitives(prim) if g.inputs and g.type_of(g.inputs[0]).dtype in kinds]
    found = checked((cases.whole(v) for g in graphs for v in cases.viewed(g)), stated, gpu)
    assert f"primitives {prim.value}" in found


@pytest.mark.parametrize("rule", OPERATORS)
def test_operators_of_views(rule: str, stated: GpuFacts, gpu: CudaGpu) -> None:
    found = checked((cases.of_viewed(g, rule) for g in cases.viewed_operators(rule)), stated, gpu)
    assert f"operator {rule}" in found


def test_what_is_rounded_once(stated: GpuFacts, gpu: CudaGpu) -> None:
    assert checked(map(cases.whole, cases.rounded_once()), stated, gpu) == {"widened"}


def test_fused_forms(stated: GpuFacts, gpu: CudaGpu) -> None:
    assert {"cudnn", "cublaslt", GELU} <= checked(map(cases.whole, cases.products()), stated, gpu)
    assert "cublaslt" in checked(map(cases.whole, cases.counted_rows()), stated, gpu)


def test_conversions(stated: GpuFacts, gpu: CudaGpu) -> None:
    assert checked(map(cases.whole, cases.conversions()), stated, gpu) == {CONVERT}
