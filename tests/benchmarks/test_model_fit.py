"""Fits find the constants that made the times, and leave the modules as they were."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from benchmarks.measured import load_table
from benchmarks.model_fit import BLOCKS, POINTWISE, figures, fitted, pointwise_kernels, product_kernels, read, write
from benchmarks.model_quality import RECORDED

from weft.device.cuda import blocks
from weft.generate.cuda import pointwise

SOME = {"END": 500.0, "CHAIN.mma": 100.0, "ITEM": 40.0}


def test_every_constant_is_one_of_its_module() -> None:
    assert all(x > 0 for x in read(blocks, BLOCKS)) and all(x > 0 for x in read(pointwise, POINTWISE))
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
