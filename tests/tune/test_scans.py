"""Kernels around scans pass the gate of the search, and wrong ones do not."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter_ns

import numpy as np
import pytest
import torch
from tests.generate.scans import CASES, S, drawn, plain, selective

from weft.device.facts import CpuFacts
from weft.device.toolchain import find_compiler
from weft.generate.cpp import CppGenerator
from weft.generate.library import LibraryGenerator
from weft.ir.declined import Declined
from weft.ir.reference import evaluate as by_reference
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Verdict
from weft.kernels.source import KernelSource, LibraryCall
from weft.tune.inputs import InputSet, roles
from weft.tune.oracle import Mode, evaluate
from weft.tune.verify import Finding, LibrarySubject, NativeSubject, build_reference, verify

SHAPES = {
    **{name: CASES[name] for name in ("rows", "middle", "reverse exclusive", "bf16", "bytes", "surrounded first")},
    "as in a network": lambda: selective(1, 24, 64, 16),
    "long": lambda: plain((2, 1000), S(1, "linear")),
    "long sums": lambda: plain((3, 5000), S(1, "sum")),
}


def judged(problem: Problem, source: KernelSource | LibraryCall, folder: Path) -> Finding:
    compiler = find_compiler()
    assert not isinstance(compiler, Declined)
    if isinstance(source, LibraryCall):
        subject: NativeSubject | LibrarySubject = LibrarySubject(problem, source)
    else:
        subject = NativeSubject(
            problem, source, str(compiler.compile(source.text, source.flags, cache_dir=folder).path)
        )
    reference = build_reference(problem, seed=0)
    return verify(problem, subject, reference, {}, slow_s=60, clock=perf_counter_ns).finding


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_pass(name: str, tmp_path: Path) -> None:
    problem = SHAPES[name]()
    schedules = CppGenerator().schedules(problem, CpuFacts(simd_bytes=32, threads=2))
    assert not isinstance(schedules, Declined)
    for schedule in schedules[:2]:
        source = CppGenerator().emit(problem, schedule)
        assert isinstance(source, KernelSource)
        found = judged(problem, source, tmp_path)
        assert found.verdict is Verdict.OK, found


@pytest.mark.parametrize("name", ["rows", "middle", "reverse exclusive", "long"])
def test_calls_pass(name: str, tmp_path: Path) -> None:
    problem = SHAPES[name]()
    schedules = LibraryGenerator().schedules(problem, CpuFacts())
    assert not isinstance(schedules, Declined)
    for schedule in schedules:
        call = LibraryGenerator().emit(problem, schedule)
        assert isinstance(call, LibraryCall)
        found = judged(problem, call, tmp_path)
        assert found.verdict is Verdict.OK, found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("w_plus(w_times(", "w_plus(w_times(1.0001f, w_times("),  # a factor that is off
        ("== 0 ?", "== 1 ?"),  # the carried value is lost at the second step
    ],
)
def test_wrong_kernels_do_not(old: str, new: str, tmp_path: Path) -> None:
    problem = plain((6, 100), S(1, "linear"))
    (schedule, *_) = CppGenerator().schedules(problem, CpuFacts(simd_bytes=32, threads=1))  # type: ignore[misc]
    source = CppGenerator().emit(problem, schedule)
    assert isinstance(source, KernelSource)
    head, _, body = source.text.rpartition("static void")
    assert old in body
    if "1.0001f" in new:
        text = head + "static void" + body.replace(old, new).replace("), e", ")), e")
    else:
        text = head + "static void" + body.replace(old, new)
    wrong = KernelSource(source.schedule, text, source.entry)
    assert judged(problem, wrong, tmp_path).verdict is not Verdict.OK


@pytest.mark.parametrize("name", SHAPES)
def test_both_references_agree(name: str) -> None:
    problem = SHAPES[name]()
    given = drawn(problem)
    mine = evaluate(problem.graph, [torch.tensor(x) for x in given], Mode.PRECISE, seed=0)
    assert not isinstance(mine, Declined)
    for found, want in zip(mine.outputs, by_reference(problem.graph, given, precise=True), strict=True):
        np.testing.assert_allclose(found.numpy(), want.astype(np.float64), rtol=1e-9, atol=1e-9)


def test_an_infinite_factor_leaves_the_rest_open() -> None:
    problem = plain((2, 6), S(1, "linear"))
    factor, term = (torch.tensor(x) for x in drawn(problem))
    factor[0, 3] = torch.inf
    found = evaluate(problem.graph, [factor, term], Mode.PRECISE, seed=0)
    assert not isinstance(found, Declined) and found.undefined == (True,)
    factor[0, 3], term[1, 2] = 1.0, -torch.inf
    found = evaluate(problem.graph, [factor, term], Mode.PRECISE, seed=0)
    assert not isinstance(found, Declined) and found.undefined == (True,)
    term[1, 2], factor[1, 0] = 1.0, torch.inf  # the first factor is never read
    found = evaluate(problem.graph, [factor, term], Mode.PRECISE, seed=0)
    assert not isinstance(found, Declined) and found.undefined == (False,)


def test_exponential_factors_stay_near_one() -> None:
    problem = selective(1, 8, 64, 16)
    found = roles(problem.graph)
    decays = [
        problem.graph.type_of(i).shape for i, r in zip(problem.graph.inputs, found, strict=True) if r.decay != 1.0
    ]
    assert decays == [(8, 16)] and found[0].decay == 1.0
    assert all(r.decay == 1.0 for r in roles(plain((2, 9), S(1, "linear")).graph))
    case = build_reference(problem, seed=0).cases[-1]
    assert case.kind is InputSet.NORMAL and bool(case.expected[0].value.isfinite().all())
