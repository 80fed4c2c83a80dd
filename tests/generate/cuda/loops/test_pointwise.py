"""The model of elementwise kernels: what must hold for any values, and which forms it puts first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.orchestrate.test_estimate import problem_of

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.generator import CudaGenerator
from weft.generate.cuda.loops import choose
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.pointwise import Work, cycles, work_of
from weft.generate.cuda.loops.profile import profiles_of
from weft.generate.cuda.predict import predicted_us
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule

H200 = GpuFacts()


def chain(shape: tuple[int, ...], transposed: bool = False) -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, shape))
    y = b.apply(Prim.EXP, b.cast(b.apply(Prim.MUL, x, x), DType.F32))
    if transposed:
        y = b.add(Prim.TRANSPOSE, y, attrs=a.TransposeAttrs((0, 2, 1)))
    return problem_of(b.build([b.cast(y, DType.F16)]))


SMALL = work_of(chain((1, 196, 256)))


def turned(shape: tuple[int, ...]) -> Work:
    """Of a mere change of axes."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, shape))
    return work_of(problem_of(b.build([b.add(Prim.TRANSPOSE, x, attrs=a.TransposeAttrs((0, 2, 1)))])))


def test_what_a_problem_asks_for() -> None:
    w = work_of(chain((8, 64, 64)))
    assert (w.special, w.gathers, w.taps) == (1, 0, 0)
    assert w.read == w.written == 2 * 8 * 64 * 64


def test_what_its_loops_are() -> None:
    (profile,) = SMALL.flat
    assert profile.size == profile.along == 196 * 256 and profile.near == 4 and not profile.apart and not profile.tiles
    assert [profile.lanes(v) for v in (2, 8, 16)] == [1, 4, 8]
    assert SMALL.tiled == SMALL.flat and not SMALL.transposes  # nothing to turn
    few = turned((1, 196, 256))
    assert few.transposes and [p.apart for p in few.flat] == [1] and few.flat[0].sectors == 32
    assert few.tiled[0].tiles == 4 * 4 and few.tiled[0].edge == 64
    odd = work_of(chain((1, 7, 9)))
    assert odd.flat[0].lanes(16) == 8 and sum(p.size for p in odd.flat) == 63  # whole vectors and a rest


def test_loops_are_those_of_the_kernel() -> None:
    for problem, tile in ((chain((3, 40, 72)), False), (chain((2, 70, 96), transposed=True), True)):
        for form in (Form(threads=128, tile=tile), Form(threads=64, vector=8, tile=tile)):
            source = CudaGenerator().emit(problem, form.schedule())
            assert isinstance(source, CudaSource)
            profiles = profiles_of(problem, tile=tile)
            blocks = sum(p.tiles or -(-p.size // (p.lanes(form.vector) * form.threads)) for p in profiles)
            assert source.launches[0].grid[0] == blocks


@pytest.mark.parametrize("field", ["special", "gathers", "taps", "read", "written"])
@pytest.mark.parametrize("form", [Form(), Form(threads=64, vector=8), Form(threads=256, tile=True)], ids=str)
def test_more_work_takes_no_less_time(field: str, form: Form) -> None:
    for work in (SMALL, turned((1, 196, 256))):
        more = replace(work, **{field: 4 * getattr(work, field) + 1})
        assert cycles(more, form, H200) >= cycles(work, form, H200) > 0
        larger = [replace(p, size=4 * p.size, tiles=4 * p.tiles) for p in work.tiled if form.tile] or [
            replace(p, size=4 * p.size) for p in work.flat
        ]
        assert cycles(replace(work, flat=tuple(larger), tiled=tuple(larger)), form, H200) > cycles(work, form, H200)


def test_few_results_want_narrow_vectors_and_many_do_not() -> None:
    narrow, wide = Form(threads=128, vector=8), Form(threads=128, vector=16)
    few, many = work_of(chain((1, 49, 256))), work_of(chain((16, 784, 1024)))
    assert cycles(few, narrow, H200) < cycles(few, wide, H200)
    assert cycles(many, wide, H200) < cycles(many, narrow, H200)


def test_many_blocks_cost_their_starts() -> None:
    many = work_of(chain((16, 784, 1024)))
    assert cycles(many, Form(threads=256), H200) < 0.9 * cycles(many, Form(threads=64), H200)


def test_tiles_pay_where_there_are_enough_of_them() -> None:
    tile, plain = Form(threads=256, tile=True), Form(threads=128)
    few, many = turned((1, 49, 64)), turned((1, 1 << 11, 1 << 11))
    assert cycles(few, plain, H200) < cycles(few, tile, H200)
    assert cycles(many, tile, H200) < 0.5 * cycles(many, plain, H200)
    assert cycles(SMALL, replace(tile, threads=128), H200) == cycles(SMALL, plain, H200)  # nothing to turn


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
