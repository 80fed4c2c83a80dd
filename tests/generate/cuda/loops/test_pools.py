"""Several maximum pools of one image in one kernel, on the emulated machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.generate.cpp.test_groups import problem
from tests.generate.cuda.emulate import FACTS, check, trial

from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.loops.pools import pools, schedules
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import Schedule


def window(b: GraphBuilder, x: NodeId, k: int, *, stride: int = 1) -> NodeId:
    pads = (k // 2, k // 2)
    return b.add(Prim.WINDOW_MAX, x, attrs=a.WindowAttrs((k, k), (stride, stride), pads, pads, (1, 1)))


def pyramid(
    dtype: DType, shape: tuple[int, ...], sizes: Sequence[int], order: Sequence[int] | None, fmt: Format = Format.LAST
) -> Problem:
    """Pools of one image, joined in an order (-1: the image); no order: each a result of its own."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, shape))
    found = [window(b, x, k) for k in sizes]
    if order is None:
        return problem(b.build(found), f"pools-{dtype}-{shape}", fmt)
    parts = [x if k < 0 else found[k] for k in order]
    return problem(b.build([b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(1))]), f"spp-{dtype}-{shape}-{order}", fmt)


def data(p: Problem, seed: int) -> np.ndarray:
    t = p.graph.type_of(p.graph.inputs[0])
    x = np.random.default_rng(seed).standard_normal(t.shape).astype(np.float32)
    x.reshape(-1)[[3, -1]] = np.nan, -np.inf
    return x.astype(np.float16) if t.dtype is DType.F16 else x


CASES = [
    (pyramid(DType.F16, (1, 16, 13, 13), (5, 9, 13), (-1, 0, 1, 2)), 3),
    (pyramid(DType.F16, (2, 8, 7, 5), (5, 9, 13), (2, 1, 0, -1)), 7),
    (pyramid(DType.BF16, (1, 24, 6, 11), (3, 5), (0, 1)), 1),
    (pyramid(DType.F32, (1, 8, 9, 4), (5, 3), None), 2),
]


def test_pools_in_one_kernel() -> None:
    batch = []
    for seed, (p, rows) in enumerate(CASES):
        schedule = Schedule("cuda", (("rows", rows), ("template", "pools")))
        batch.append(trial(p, schedule, [data(p, seed)]))
        assert len(batch[-1].source.launches) == 1
    check(batch)


def test_the_template_comes_first_and_fills_the_machine() -> None:
    p = pyramid(DType.F16, (1, 512, 13, 13), (5, 9, 13), (-1, 0, 1, 2))
    found = CudaGenerator().schedules(p, FACTS)
    assert not isinstance(found, Declined)
    own = [s for s in found if dict(s.params).get("template") == "pools"]
    assert own and found[0] == own[0] and len(found) > len(own)
    blocks = trial(p, own[0], []).source.launches[0].grid[0]
    assert FACTS.sms // 2 <= blocks <= 2 * FACTS.sms


def with_stride() -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (1, 8, 9, 9)))
    return problem(b.build([window(b, x, 3), window(b, x, 3, stride=2)]), "strided", Format.LAST)


@pytest.mark.parametrize(
    "p",
    [
        pyramid(DType.F16, (1, 8, 9, 9), (5,), None),  # one pool
        pyramid(DType.F16, (1, 8, 9, 9), (3, 5), None, Format.ROW),
        pyramid(DType.F16, (1, 12, 9, 9), (3, 5), None),  # 24 bytes of channels
        pyramid(DType.F16, (1, 8, 9, 9), (3, 25), None),  # too wide
        pyramid(DType.F16, (1, 8, 128, 128), (3, 5), None),  # a plane of 256 KB
        with_stride(),
    ],
    ids=["one", "row", "odd", "wide", "large", "strided"],
)
def test_what_the_template_declines(p: Problem) -> None:
    assert isinstance(pools(p), Declined)
    assert not schedules(p, FACTS)
