"""Under a budget of an SM templates offer nothing that cannot find room in it, or decline; nothing is compiled."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tools import replay_corpus
from weft.device.cuda.facts import profile
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.gemm.tma.cost import fits_budget
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.sm_budget import SmBudget
from weft.tune.wire import problem_from_json

ROOT = Path(__file__).parents[3]
FEW = 3
"""Kernels of a problem that are looked at."""


@cache
def problems() -> dict[str, Problem]:
    """One of each table of cases."""
    cases = replay_corpus.collect(ROOT, 1)
    return {c["name"]: problem_from_json(c["problem"]) for c in cases if "problem" in c}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize(
    "budget",
    [SmBudget(32768, 100 << 10, 768, 8), SmBudget(8192, 16 << 10, 256, 2), SmBudget(256, 2 << 10, 32, 1)],
    ids=["half", "little", "a warp"],
)
def test_what_is_offered_may_find_room(gpu: str, budget: SmBudget) -> None:
    facts, maker, counts = profile(gpu).within(budget), CudaGenerator(), {"offered": 0, "declined": 0}
    assert budget.threads and budget.shared_bytes
    for name, problem in problems().items():
        found = maker.schedules(problem, facts)
        if isinstance(found, Declined):
            counts["declined"] += 1
            assert found.reason
            continue
        for schedule in itertools.islice(found, FEW):
            source = maker.emit(problem, schedule)
            if isinstance(source, Declined):
                continue
            counts["offered"] += 1
            for launch in source.launches:
                assert math.prod(launch.block) <= budget.threads, (name, schedule)
                assert launch.shared_bytes + facts.shared_reserved <= budget.shared_bytes, (name, schedule)
    assert counts["declined"] > 0 and (counts["offered"] > 50 or budget.threads < 256), counts


def test_a_loop_declines_where_not_even_a_warp_has_room() -> None:
    posed = next(p for name, p in problems().items() if name.startswith("test_text"))
    maker, whole = CudaGenerator(), profile("h200")
    assert not isinstance(maker.schedules(posed, whole), Declined)
    found = maker.schedules(posed, whole.within(SmBudget(registers=256)))  # a launch is checked for four warps
    assert isinstance(found, Declined) and "kernels finds room in sm_budget" in found.reason


def test_tiles_of_which_an_sm_shall_hold_several_need_room_for_all() -> None:
    whole = profile("h200")
    facts = whole.within(SmBudget(registers=49152))
    wide = TmaConfig(128, 256, 64, 4, 2, False, 1, (1, 1, 128), 0, 1)  # 384 threads that are launched with 168
    one = TmaConfig(128, 128, 64, 4, 2, False, 1, (1, 1, 128), 0, 1)  # 9 warps whose threads have 64 sums
    assert wide.moves_registers and not one.moves_registers
    assert not fits_budget(wide, facts) and fits_budget(one, facts) and not fits_budget(replace(one, min_ctas=2), facts)
    assert all(fits_budget(s, whole) for s in (wide, one, replace(one, min_ctas=2)))
