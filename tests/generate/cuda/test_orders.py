"""Kernels of all templates where the first or the last warp is as far ahead of the others as the waits let it be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from tests.generate.cuda.attention import test_attention, test_attention_linear
from tests.generate.cuda.conv import test_pooled, test_separable
from tests.generate.cuda.gemm import test_bytes, test_grouped, test_normed
from tests.generate.cuda.products import convolution, product
from tests.generate.cuda.tensor_emulator import Emulated, run, small_integers
from tests.slow import few

from weft.device.cuda.facts import profile
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource


def first(cases: Mapping[str, object]) -> Problem:
    case = next(iter(cases.values()))
    found = case[0] if isinstance(case, tuple) else case
    assert isinstance(found, Problem)
    return found


PROBLEMS: dict[str, Problem] = {
    "product": product((50, 264), (264, 72)),
    "convolution": convolution(1, 16, 9, 9, 24, 3, 1, 1),
    "attention": first(test_attention.CASES),
    "linear attention": first(test_attention_linear.CASES),
    "bytes": first(test_bytes.CASES),
    "grouped": first(test_grouped.CASES),
    "normed": first(test_normed.NORMED),
    "pooled": first(test_pooled.CASES),
    "separable": first(test_separable.CASES),
}


@pytest.mark.parametrize("name", few(PROBLEMS, 2))
def test_no_warp_is_too_early_or_too_late(name: str) -> None:
    posed = PROBLEMS[name]
    schedules = CudaGenerator().schedules(posed, profile("h200"))
    assert not isinstance(schedules, Declined)
    by_template = {str(dict(s.params).get("template")): s for s in reversed(schedules)}
    sources = [CudaGenerator().emit(posed, s) for s in by_template.values()]
    kernels = [s for s in sources if isinstance(s, CudaSource)]
    assert kernels
    emulated, inputs = Emulated(kernels), small_integers(posed)
    for source in kernels:
        want = run(emulated, posed, source, inputs)
        assert any(np.isfinite(x).any() and x.any() for x in want), source.schedule
        for order in (1, 2):
            got = run(emulated, posed, source, inputs, order=order)
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y, err_msg=f"{source.schedule}, order {order}")
