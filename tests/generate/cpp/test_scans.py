from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.generate.cpp.run_kernels import FACTS, build, check, run, trials
from tests.generate.scans import CASES, S, drawn, plain, posed, selective

from weft.generate.cpp import CppGenerator
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import KernelSource


def test_every_case_in_every_schedule() -> None:
    check([t for make in CASES.values() for t in trials(make(), drawn(make()))])


def test_lanes_of_other_sizes() -> None:
    facts = type(FACTS)(simd_bytes=32, threads=2)
    check(
        [
            t
            for name in ("columns", "selective", "selective wide")
            for t in trials(CASES[name](), drawn(CASES[name]()), facts)
        ]
    )


def test_the_first_factor_is_never_used() -> None:
    problem = plain((3, 5), S(1, "linear"))
    factor, term = drawn(problem)
    factor[:, 0] = [np.nan, np.inf, -np.inf]
    batch = trials(problem, [factor, term])
    for one in batch:
        (found,) = run(one, build([one])[one.source.entry])
        assert np.isfinite(found).all()


def test_an_infinity_reaches_nothing_before_it() -> None:
    problem = plain((2, 40), S(1, "sum"))
    (x,) = drawn(problem)
    x[0, 17], x[1, 20], x[1, 30] = np.inf, np.inf, -np.inf
    for one in trials(problem, [x]):
        (found,) = run(one, build([one])[one.source.entry])
        assert np.isfinite(found[0, :17]).all() and (found[0, 17:] == np.inf).all()
        assert (found[1, 20:30] == np.inf).all() and np.isnan(found[1, 30:]).all()


def _two_scans() -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 8)))
    y = b.add(Prim.SCAN, x, attrs=S(1, "sum"))
    return posed(b.build([b.add(Prim.SCAN, y, attrs=S(0, "sum"))]), "two")


def _softmax_before() -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 8)))
    top = b.reduce(Prim.REDUCE_MAX, x, (1,))
    return posed(b.build([b.add(Prim.SCAN, b.apply(Prim.SUB, x, top), attrs=S(1, "sum"))]), "reduced before")


def _summed_along_the_scan() -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 8)))
    return posed(b.build([b.reduce(Prim.REDUCE_SUM, b.add(Prim.SCAN, x, attrs=S(1, "sum")), (1,))]), "along")


def _last_alone() -> Problem:
    b = GraphBuilder()
    y = b.add(Prim.SCAN, b.input(TensorType(DType.F32, (4, 8))), attrs=S(1, "sum"))
    return posed(b.build([b.slice(y, (0, 7), (4, 1), (1, 1))]), "last")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_two_scans, "2 scans"),
        (_softmax_before, "not of the scan's values"),
        (_summed_along_the_scan, "not of the scan's values"),
        (_last_alone, "other loops than the scan"),
        (lambda: plain((4, 1), S(1, "sum")), "carries nothing"),
        (lambda: selective(1, 2, 3, 65), "65 states"),
    ],
)
def test_what_is_declined(make: Callable[[], Problem], why: str) -> None:
    found = CppGenerator().schedules(make(), FACTS)
    assert isinstance(found, Declined) and why in found.reason


@pytest.mark.parametrize("case", ["rows", "middle", "selective"])
def test_texts(case: str, golden: Callable[[str, str], None]) -> None:
    problem = CASES[case]()
    schedules = CppGenerator().schedules(problem, FACTS)
    assert not isinstance(schedules, Declined)
    source = CppGenerator().emit(problem, schedules[0])
    assert isinstance(source, KernelSource)
    golden(f"scan {case}", source.text[source.text.index("static void") :])


def test_shapes_are_refused_by_name() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.I32, (4, 8)))
    with pytest.raises(Exception, match="linear scan of i32"):
        b.add(Prim.SCAN, x, x, attrs=a.ScanAttrs(1, "linear"))
    with pytest.raises(Exception, match="takes 2 operands, got 1"):
        b.add(Prim.SCAN, x, attrs=a.ScanAttrs(1, "linear"))
    with pytest.raises(Exception, match="axis 2 of rank 2"):
        b.add(Prim.SCAN, x, attrs=a.ScanAttrs(2, "sum"))
