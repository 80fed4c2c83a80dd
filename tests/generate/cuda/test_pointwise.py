"""The model of elementwise kernels: what must hold for any values, and which forms it puts first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.orchestrate.test_estimate import problem_of

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import choose
from weft.generate.cuda.forms import Form
from weft.generate.cuda.pointwise import Work, cycles, work_of
from weft.generate.cuda.predict import predicted_us
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule

H200 = GpuFacts()
SMALL = Work(size=50_176, itemsize=2, plain=4, special=1, gathers=0, read=100_352, written=100_352)


def chain(shape: tuple[int, ...], transposed: bool = False) -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, shape))
    y = b.apply(Prim.EXP, b.cast(b.apply(Prim.MUL, x, x), DType.F32))
    if transposed:
        y = b.add(Prim.TRANSPOSE, y, attrs=a.TransposeAttrs((0, 2, 1)))
    return problem_of(b.build([b.cast(y, DType.F16)]))


def test_what_a_problem_asks_for() -> None:
    w = work_of(chain((8, 64, 64)))
    assert (w.size, w.itemsize, w.plain, w.special, w.gathers) == (8 * 64 * 64, 2, 3, 1, 0)
    assert w.read == w.written == 2 * w.size


@pytest.mark.parametrize("field", ["size", "plain", "special", "gathers", "read", "written"])
@pytest.mark.parametrize("form", [Form(), Form(threads=64, vector=8), Form(threads=256, tile=True)], ids=str)
def test_more_work_takes_no_less_time(field: str, form: Form) -> None:
    for turns in (False, True):
        more = replace(SMALL, **{field: 4 * getattr(SMALL, field) + 1})
        assert cycles(more, form, turns, H200) >= cycles(SMALL, form, turns, H200) > 0


def test_few_results_want_narrow_vectors_and_many_do_not() -> None:
    narrow, wide = Form(threads=128, vector=8), Form(threads=128, vector=16)
    assert cycles(SMALL, narrow, False, H200) < cycles(SMALL, wide, False, H200)
    large = replace(SMALL, size=1 << 26, read=1 << 27, written=1 << 27)
    assert cycles(large, wide, False, H200) <= cycles(large, narrow, False, H200) * 1.01


def test_tiles_pay_where_there_are_enough_of_them() -> None:
    tile, plain = Form(threads=256, tile=True), Form(threads=128)
    few = replace(SMALL, plain=0, special=0)
    assert cycles(few, plain, True, H200) < cycles(few, tile, True, H200)
    many = replace(few, size=1 << 22, read=1 << 23, written=1 << 23)
    assert cycles(many, tile, True, H200) < cycles(many, plain, True, H200)
    assert cycles(few, tile, False, H200) == cycles(few, replace(tile, tile=False), False, H200)  # nothing to turn


def test_the_first_forms_are_unlike_each_other() -> None:
    found = choose.forms(chain((1, 196, 256)), H200)
    assert len({(f.vector, f.tile) for f in found[:3]}) == 3 and len(set(found)) == len(found) <= 8
    turned = choose.forms(chain((1, 1 << 11, 1 << 11), transposed=True), H200)
    assert any(f.tile for f in turned[:2])


def test_predictions_of_schedules() -> None:
    problem = chain((1, 196, 256))
    forms = choose.forms(problem, H200)
    times = [predicted_us(problem, f.schedule(), H200) for f in forms]
    assert all(t is not None and 0.5 < t < 5 for t in times)
    assert predicted_us(problem, Schedule("library", (("form", "primitives"),)), H200) is None
    assert predicted_us(problem, Schedule("cuda", (("template", "unheard of"),)), H200) is None
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (64, 64)))
    rows = problem_of(b.build([b.add(Prim.REDUCE_SUM, x, attrs=a.ReduceAttrs((1,)))]))
    assert predicted_us(rows, Form().schedule(), H200) is None  # rows have rules, no model
