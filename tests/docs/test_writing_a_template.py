"""The example of docs/writing-a-template.md: its code is run, its kernels are compiled and emulated."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.generate.cuda.products import BF16, F16, product
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact
from tests.generate.cuda.test_templates import compiled_well

from weft.device.cuda.facts import profile
from weft.generate.cuda import table, templates
from weft.generate.cuda.predict import predicted_us
from weft.generate.cuda.shipped import kind_of
from weft.generate.cuda.space import space
from weft.generate.cuda.template import Template
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-template.md"
CASES: dict[str, Problem] = {
    "ragged": product((37, 80), (27, 80), weight=False, turn_right=True),
    "one row, bf16": product((1, 48), (9, 48), weight=False, turn_right=True, dtype=BF16),
    "whole tiles, gelu": product((32, 64), (64, 64), weight=False, turn_right=True, gelu=True, dtype=F16),
}


@cache
def page() -> dict[str, Any]:
    """The names of the page's code once it ran."""
    space: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), space)  # noqa: S102 - our own page
    return space


def made(problem: Problem) -> list[CudaSource]:
    template, form = page()["WARP_MMA"], page()["PRODUCT"].match(problem, tf32=False)
    offered = template.configurations(form, profile("h200"))
    assert not isinstance(offered, Declined) and len(offered) == 4
    sources = [template.emit(form, s, f"k{[*CASES.values()].index(problem)}_{i}") for i, (_, s) in enumerate(offered)]
    assert all(isinstance(s, CudaSource) for s in sources)
    return sources


def test_the_example_computes_products() -> None:
    sources = {name: made(problem) for name, problem in CASES.items() if "gelu" not in name}
    kernels = Emulated([s for found in sources.values() for s in found])
    for name, found in sources.items():
        for source in found:
            assert_exact(kernels, CASES[name], source)


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_the_example_compiles_without_spills(gpu: str) -> None:
    compiled_well([s for problem in CASES.values() for s in made(problem)], profile(gpu).arch, profile(gpu))


def test_the_example_is_offered_once_the_table_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    template = page()["WARP_MMA"]
    assert isinstance(template, Template)
    problem, facts = CASES["ragged"], profile("h200")
    monkeypatch.setattr(table, "TEMPLATES", (*table.TEMPLATES, template))
    monkeypatch.setitem(table.NAMED, "warp_mma", template)
    offered, every = templates.schedules(problem, facts), space(problem, facts)
    assert not isinstance(offered, Declined) and not isinstance(every, Declined)
    own = [s for s in offered if s.param("template") == "warp_mma"]
    assert own and len([s for _, s in every if s.param("template") == "warp_mma"]) == 4
    for schedule in own:
        source, us = templates.emit(problem, schedule), predicted_us(problem, schedule, facts)
        assert isinstance(source, CudaSource) and "w_mma_f16" in source.text
        assert us is not None and 0 < us < 10
        assert kind_of(schedule).startswith("warp_mma warps=")
