"""The table of templates is total: what asks about templates finds every part of each, and nothing falls through."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.generate.cuda.products import product
from tests.generate.cuda.test_goldens import FOLDER
from tests.generate.cuda.test_goldens import table as cases
from tests.typed import noting

from weft.device.cuda.facts import GpuFacts, profile
from weft.generate.cuda import table, templates
from weft.generate.cuda.gemm.pattern import PRODUCT
from weft.generate.cuda.predict import predicted_us
from weft.generate.cuda.shipped import kind_of
from weft.generate.cuda.space import kind, space
from weft.generate.cuda.table import NAMED, PATTERNS, TEMPLATES
from weft.generate.cuda.template import Template
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.codec import schedule_from_json
from weft.kernels.source import CudaSource, Schedule
from weft.orchestrate.idiom import Idiom
from weft.orchestrate.idioms import IDIOMS
from weft.orchestrate.legality import EnumerationLimits

H200 = GpuFacts()
NAMES = sorted(NAMED)
RULED = {"linear_attention", "mlp_pair"}
"""Templates whose few schedules a rule orders, and no model."""


@cache
def posed(case: str) -> Problem:
    """The problem of a case of the tables of these tests, `FILE PLACE`."""
    file, _, place = case.partition(" ")
    found: Problem = cases(file)[place]
    return found


@cache
def example(name: str) -> tuple[Problem, Schedule]:
    """The problem and the schedule of a template's golden text."""
    case, told = (FOLDER / f"{name}.cu").read_text(encoding="utf-8").split("\n")[:2]
    return posed(case.removeprefix("// ")), schedule_from_json(json.loads(told.removeprefix("// ")))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.names[0])
def test_a_template_has_every_part(template: Template[Any]) -> None:
    assert isinstance(template, Template)
    declared = {n for n, x in vars(Template).items() if callable(x) or isinstance(x, property)}
    parts = {n for n in declared if not n.startswith("_")}
    assert parts >= {"names", "pattern", "config", "configurations", "every", "cost", "emit", "kinds", "takes", "near"}
    for part in parts:
        if inspect.isfunction(asked := getattr(Template, part)):
            own = inspect.signature(getattr(type(template), part))
            assert list(own.parameters) == list(inspect.signature(asked).parameters), part
    assert template.pattern in PATTERNS
    assert template.tf32 <= {*template.names}
    assert template.near > 1
    parameters = set(inspect.signature(type(template.config(example(template.names[0])[1]))).parameters)
    told = {*template.kinds.shipped, *template.kinds.later, *template.kinds.search}
    assert told <= parameters or parameters == {"members"}, told - parameters


def test_names_are_of_one_template_each() -> None:
    names = Counter(n for t in TEMPLATES for n in t.names)
    assert set(names.values()) == {1} and set(names) == set(NAMED)
    assert len({p.name for p in PATTERNS}) == len(PATTERNS)
    assert all(table.of_pattern(p) for p in PATTERNS), "a pattern without a template"
    assert PATTERNS[-1] is PRODUCT  # what no other pattern has is a product, or nothing


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_read_back(name: str) -> None:
    _, schedule = example(name)
    assert templates.template_of(schedule) is NAMED[name]
    config: Any = NAMED[name].config(schedule)
    if name == "grouped_tma":
        assert config.schedule() == schedule  # a record for each member
        return
    told = {k: v for k, v in schedule.params if k != "template"}
    assert {k: getattr(config, k) for k in told} == told
    with pytest.raises(KeyError):
        NAMED[name].config(Schedule("cuda", (("template", name),)))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_a_cost_and_a_kind(name: str) -> None:
    problem, schedule = example(name)
    us = predicted_us(problem, schedule, H200)
    assert (us is None) == (name in RULED)
    assert us is None or 0 < us < 1e4
    assert kind_of(schedule).split(" ")[0] == name == kind(schedule)[0]


ELSEWHERE = {
    "attention_tf32": "test_attention CASES f32",
    "grouped_simt": "test_grouped CASES f32",
    "mlp_pair": "test_mlp CASES two blocks, wide",
    "stacked": "test_stacked LARGE 0",
}
"""Cases for which templates are offered whose golden text is of a case for which others are."""


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_offered_with_the_cost_that_its_model_gives(name: str) -> None:
    template, problem = NAMED[name], posed(ELSEWHERE[name]) if name in ELSEWHERE else example(name)[0]
    names = set()
    for gpu in ("h200", "a100"):
        for facts in (profile(gpu), replace(profile(gpu), tf32=True)):
            m = template.pattern.match(problem, tf32=facts.tf32)
            offered = template.configurations(m, facts)
            for cycles, s in () if isinstance(offered, Declined) else offered:
                names.add(s.param("template"))
                rounded = template.pattern.match(problem, tf32=s.param("template") in template.tf32)
                cost = template.cost(rounded, s, facts)
                if cost is None:
                    assert math.isnan(cycles), s
                elif name == "attention_tma":
                    assert cost <= cycles * (1 + 1e-9), s  # ranked later by what it is like
                else:
                    assert cycles == pytest.approx(cost), s
    assert name in names


@pytest.mark.parametrize("name", NAMES)
def test_the_template_that_a_schedule_names_writes_its_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other is asked: a template whose `emit` were gone would be seen here."""
    problem, schedule = example(name)
    asked = []
    for t in TEMPLATES:
        monkeypatch.setattr(type(t), "emit", noting(lambda self, *a: asked.append(self), lambda *a: Declined("told")))
    refused = templates.emit(problem, schedule)
    assert asked == [NAMED[name]] and refused == Declined("told")


def test_a_schedule_of_nobody_is_declined_by_name() -> None:
    problem = product((512, 1024), (1024, 1024))
    for schedule in (Schedule("cuda", (("template", "of the future"),)), Schedule("cuda")):
        refused = templates.emit(problem, schedule)
        assert isinstance(refused, Declined) and "no template is called" in refused.reason
        assert predicted_us(problem, Schedule("cuda", (("template", "of the future"),)), H200) is None
    _, attention = example("attention")
    refused = templates.emit(problem, attention)
    assert isinstance(refused, Declined) and "not two products" not in str(space(problem, H200))


def test_a_search_has_every_template_that_is_offered() -> None:
    problem = product((512, 1024), (1024, 1024), turn_right=True)
    offered, every = templates.schedules(problem, H200), space(problem, H200)
    assert not isinstance(offered, Declined) and not isinstance(every, Declined)
    assert {s.param("template") for s in offered} <= {s.param("template") for _, s in every}
    assert set(offered) <= {s for _, s in every}
    assert isinstance(templates.emit(problem, offered[0]), CudaSource)


def test_nothing_but_the_table_names_templates() -> None:
    """What asks about templates goes through the table: a name in the text of one of these would be a case apart."""
    package = Path(table.__file__).parent
    for file in ("templates.py", "predict.py", "space.py", "shipped/buckets.py", "shipped/table.py", "table.py"):
        text = (package / file).read_text(encoding="utf-8")
        named = [n for n in NAMES if f'"{n}"' in text]
        assert not named or (file, named) == ("space.py", ["tma"]), (file, named)


def test_both_halves_of_an_idiom_name_each_other() -> None:
    """Neither package may import the other: what finds a candidate and what writes its kernel agree by name."""
    finds = {(i.name, p) for i in IDIOMS for p in i.patterns}
    assert finds == {(i, p.name) for p in PATTERNS for i in p.idioms}
    assert len({i.name for i in IDIOMS}) == len(IDIOMS) and all(i.patterns for i in IDIOMS)
    grown = {p.name for p in PATTERNS if not p.idioms}
    # of one contraction, as groups hold it; an operator's own set
    assert grown == {"depthwise", "depthwise_wgrad"}


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda i: i.name)
def test_an_idiom_has_every_part(idiom: Idiom) -> None:
    finder = inspect.unwrap(idiom.find)
    assert list(inspect.signature(finder).parameters) == ["scene"]
    limits = EnumerationLimits()
    assert not idiom.wanted(limits)  # a CPU has no kernels of any
    assert idiom.wanted(replace(limits, attention=True, multiprocessors=132))
    file = Path(inspect.getfile(finder)).stem
    assert file == idiom.name, "a finder stands in the file of its idiom"
