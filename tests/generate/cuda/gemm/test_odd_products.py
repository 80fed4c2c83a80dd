"""Products whose rows begin at odd addresses, in every layout: emulated on the host, bit by bit on small integers."""

from __future__ import annotations

import numpy as np
import pytest
from tests.generate.cuda.tensor_emulator import Emulated, run, small_integers
from tests.slow import few

from weft.device.cuda.facts import profile
from weft.gemm.epilogue import epilogue
from weft.gemm.spec import LAYOUTS, Gemm
from weft.generate.cuda import templates
from weft.generate.cuda.space import pruned, space
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.ir.types import DType
from weft.kernels.source import CudaSource

H200 = profile("h200")
SIZES = ((33, 21, 37), (17, 40, 71), (70, 9, 24), (5, 35, 130), (3, 3, 3))
"""Odd pitches, sums that end inside a chunk, in one, and behind one; few rows."""


@pytest.mark.parametrize("layout", few(LAYOUTS, 1))
def test_odd_products_are_right_to_the_last_element(layout: str) -> None:
    made = []
    for number, (m, n, k) in enumerate(SIZES):
        text = "relu(acc + bias)" if number % 2 else "none"
        dtype = DType.BF16 if number == 1 else DType.F16
        problem = Gemm(m, n, k, layout=layout, dtype=dtype, epilogue=epilogue(text)).problem()
        ranked = space(problem, H200)
        assert not isinstance(ranked, Declined)
        seen: set[object] = set()
        for _, schedule in pruned(problem, H200, ranked, 16):
            template = schedule.param("template")
            if template in ("mma", "wgmma", "gemv") and template not in seen:  # `tma` has tests of its own
                seen.add(template)
                source = templates.emit(problem, schedule)
                assert isinstance(source, CudaSource)
                made.append((problem, source))
    kernels = Emulated([source for _, source in made])
    for problem, source in made:
        inputs = small_integers(problem)
        (got,) = run(kernels, problem, source, inputs)
        (wanted,) = evaluate(problem.graph, inputs)
        assert np.array_equal(got, wanted), (source.schedule, problem.key)


def test_words_are_read_only_inside_the_operands() -> None:
    """The last row ends at the end of its memory: behind it there is nothing to read, not even half a word."""
    problem = Gemm(3, 3, 33, layout="nt").problem()
    ranked = space(problem, H200)
    assert not isinstance(ranked, Declined)
    source = templates.emit(problem, ranked[0][1])
    assert isinstance(source, CudaSource)
    assert "w_read8_a(A + at, 33 - k, at + 8 < 99)" in source.text
    assert "w_read8_w(W + at, 33 - k, at + 8 < 99)" in source.text
