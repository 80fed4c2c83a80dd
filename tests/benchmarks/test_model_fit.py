"""Fits find the constants that made the times, and leave the profile as it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from benchmarks.data.measured import load_table, problem_of
from benchmarks.model_fit import (
    DEPTHWISE,
    HALO,
    POINTWISE,
    SIMT,
    TILES,
    TMA,
    changed,
    figures,
    fitted,
    network_of,
    pointwise_kernels,
    product_kernels,
    read,
    template_kernels,
)
from benchmarks.model_quality import LATER, RECORDED

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.predict import predicted_us

H200 = GpuFacts()
SOME = {"end": 500.0, "chain.mma": 100.0, "item": 40.0}


def test_every_constant_is_one_of_its_section() -> None:
    costs = costs_of(H200)
    sections = (
        (costs.tiles, TILES), (costs.tiles, SIMT), (costs.pointwise, POINTWISE), (costs.tma, TMA),
        (costs.depthwise, DEPTHWISE), (costs.halo, HALO),
    )  # fmt: skip
    assert all(x > 0 for section, guesses in sections for x in read(section, guesses))
    with pytest.raises(AttributeError):
        read(costs.tiles, ["nothing"])
    with pytest.raises(KeyError):
        read(costs.tiles, ["chain.nothing"])


def test_a_fit_finds_what_made_the_times() -> None:
    table = load_table(RECORDED)
    kernels = product_kernels(replace(table, cases=table.cases[:60]))
    assert len(kernels) > 50
    before = read(costs_of(H200).tiles, SOME)
    made = [replace(k, us=k.model()) for k in kernels]
    assert fitted("tiles", SOME, made) == pytest.approx(before, rel=0.1)
    assert read(costs_of(H200).tiles, SOME) == before


def test_the_profile_stands_after_an_error() -> None:
    table = load_table(RECORDED)
    kernels = pointwise_kernels(replace(table, cases=table.cases[:40]))
    profile = costs_of(H200)

    def broken() -> float:
        assert read(costs_of(H200).pointwise, ["result"]) == [pytest.approx(5.0)]
        raise OverflowError

    with pytest.raises(OverflowError):
        fitted("pointwise", {"result": 5.0}, [replace(kernels[0], model=broken)])
    assert costs_of(H200) is profile


def test_a_changed_constant_is_the_only_one() -> None:
    profile = costs_of(H200)
    other = changed(profile, "tiles", ["end", "chain.mma"], [7.0, 8.0])
    assert read(other.tiles, ["end", "chain.mma", "chain.group"]) == [7.0, 8.0, profile.tiles.chain["group"]]
    assert replace(other.tiles, end=profile.tiles.end, chain=profile.tiles.chain) == profile.tiles
    assert other.tma is profile.tma and read(profile.tiles, ["end"]) != [7.0]


def test_the_figures_of_a_perfect_model_and_of_its_opposite() -> None:
    table = load_table(RECORDED)
    kernels = pointwise_kernels(replace(table, cases=table.cases[:150]))
    perfect = figures(kernels, [k.us for k in kernels])
    assert perfect.startswith("pairs in order 100.0 %") and "regret of first 0.0 %, median factor off 1.000" in perfect
    opposite = figures(kernels, [math.exp(-k.us) for k in kernels])
    assert opposite.startswith("pairs in order 0.0 %")


@pytest.mark.parametrize("template", ["tma", "depthwise", "halo"])
def test_kernels_of_a_template_have_the_times_that_rank_them(template: str) -> None:
    table = load_table(LATER)
    cases = [c for c in table.cases if any(dict(k.schedule.params).get("template") == template for k in c.kernels)]
    few = replace(table, cases=tuple(cases[:4]), fusions=())
    found = template_kernels(few, template)
    expected = [
        (k.us, predicted_us(problem_of(c.text), k.schedule, table.facts))
        for c in few.cases
        for k in c.kernels
        if dict(k.schedule.params).get("template") == template
    ]
    assert len(expected) >= 4 and [k.us for k in found] == [us for us, _ in expected]
    assert [k.model() for k in found] == pytest.approx([modelled for _, modelled in expected])


def test_both_batch_sizes_are_one_network() -> None:
    cases = {c.network: c for c in load_table(LATER).cases}
    assert network_of(cases["12"]) == network_of(cases["13"]) == "yolov4"
    assert len({network_of(c) for c in cases.values()}) == 10 and len(cases) == 21
    assert network_of(replace(cases["12"], network="mine")) == "mine"
