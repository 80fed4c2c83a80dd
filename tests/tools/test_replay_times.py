"""Kernels of two commits beside each other: which kernel a row means, and what counts as slower."""

from __future__ import annotations

from typing import Any

import pytest
from tests.generate.cuda.products import product
from tools.record_tables import is_slower
from tools.replay_corpus import named, plain
from tools.replay_times import compared, source_of, with_text

from weft.device.cuda.facts import profile
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource
from weft.tune.wire import problem_to_json


def row() -> tuple[dict[str, Any], CudaSource]:
    problem = product((64, 128), (128, 96), dtype=DType.F16)
    offered = CudaGenerator().schedules(problem, profile("h200"))
    assert not isinstance(offered, Declined)
    schedule = next(iter(offered))
    made = CudaGenerator().emit(problem, schedule)
    assert isinstance(made, CudaSource)
    entries = {f"launches[{k}].entry": f"new_{k}" for k in range(len(made.launches))}
    entries |= {f"pack[{k}].entry": f"pack_{k}" for k in range(len(made.pack))}
    case = {"name": "cases", "problem": problem_to_json(problem), "schedules": []}
    found = {"name": f"cases | h200 | {named(schedule)}", "case": case, "arch": "sm_90a"}
    return {**found, "texts": ["old", plain(made.text)], "entries": [entries, entries]}, made


def test_a_row_means_one_kernel_of_this_tree() -> None:
    told, made = row()
    problem, source = source_of(told)
    assert source == made and problem_to_json(problem) == told["case"]["problem"]
    other = with_text(source, "old", told["entries"][0])
    assert other.text == "old" and [x.entry for x in other.launches] == [f"new_{k}" for k in range(len(made.launches))]
    assert [(x.grid, x.arguments) for x in other.launches] == [(x.grid, x.arguments) for x in made.launches]


def test_another_kernel_is_not_timed() -> None:
    told, made = row()
    for changed in (
        {**told, "texts": ["old", made.text + " "]},
        {**told, "name": "cases | h200 | cuda(template=none)"},
        {**told, "case": {"name": "cases", "training": {}, "schedules": []}},
    ):
        with pytest.raises(ValueError, match=r"another kernel|module of its own"):
            source_of(changed)
    with pytest.raises(ValueError, match="launched otherwise"):
        with_text(made, "old", {"chain.name": "k_chain"})


def test_what_is_slower() -> None:
    assert not is_slower({"ratio": 1.019, "noise": 1.0}) and is_slower({"ratio": 1.03, "noise": 1.0})
    assert not is_slower({"ratio": 1.05, "noise": 0.98}) and not is_slower({"ratio": 0.9, "noise": 1.0})


def test_a_kernel_is_held_against_itself() -> None:
    found = compared([[10.0, 10.0], [11.0, 11.0], [10.2, 10.2], [10.5, 10.5]])
    assert found["old_us"] == 10.1 and found["new_us"] == 10.75 and found["ratio"] == 1.0644
    assert found["noise"] == 0.9545  # the new one, farther from 1 than the old one's 1.02
    assert not is_slower(found)
