"""Fits find the constants that made the times, and leave the modules as they were."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from benchmarks.data.measured import load_table, problem_of
from benchmarks.model_fit import (
    BLOCKS,
    DEPTHWISE,
    HALO,
    POINTWISE,
    TMA,
    figures,
    fitted,
    network_of,
    pointwise_kernels,
    product_kernels,
    read,
    template_kernels,
    write,
)
from benchmarks.model_quality import LATER, RECORDED

from weft.device.cuda import blocks
from weft.generate.cuda.conv.depthwise import kernel as depthwise
from weft.generate.cuda.conv.halo import choose as halo_choose
from weft.generate.cuda.gemm.tma import cost as tma_cost
from weft.generate.cuda.loops import pointwise
from weft.generate.cuda.predict import predicted_us

SOME = {"END": 500.0, "CHAIN.mma": 100.0, "ITEM": 40.0}


def test_every_constant_is_one_of_its_module() -> None:
    modules = (blocks, BLOCKS), (pointwise, POINTWISE), (tma_cost, TMA), (depthwise, DEPTHWISE), (halo_choose, HALO)
    assert all(x > 0 for module, guesses in modules for x in read(module, guesses))
    with pytest.raises(AttributeError):
        read(blocks, ["NOTHING"])
    with pytest.raises(KeyError):
        read(blocks, ["CHAIN.nothing"])


def test_a_fit_finds_what_made_the_times() -> None:
    table = load_table(RECORDED)
    kernels = product_kernels(replace(table, cases=table.cases[:60]))
    assert len(kernels) > 50
    before = read(blocks, SOME)
    made = [replace(k, us=k.model()) for k in kernels]
    assert fitted(blocks, SOME, made) == pytest.approx(before, rel=0.1)
    assert read(blocks, SOME) == before


def test_constants_are_put_back_after_an_error() -> None:
    table = load_table(RECORDED)
    kernels = pointwise_kernels(replace(table, cases=table.cases[:40]))
    names = {"RESULT": 5.0}
    before = read(pointwise, names)

    def broken() -> float:
        raise OverflowError

    with pytest.raises(OverflowError):
        fitted(pointwise, names, [replace(kernels[0], model=broken)])
    assert read(pointwise, names) == before
    write(pointwise, names, [7.0])
    assert pointwise.RESULT == 7.0
    write(pointwise, names, before)
    assert read(pointwise, names) == before


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
