"""Resizes whose threads go along an axis, and joins of few channels, on the emulated machine."""

from __future__ import annotations

import numpy as np
from tests.generate.cpp.test_groups import problem
from tests.generate.cuda.emulate import FACTS, Trial, check, trial

from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.loops.forms import Form
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format


def weighted(b: GraphBuilder, x: NodeId, axis: int, size: int) -> NodeId:
    """A sum of two gathers along an axis, weights and indices being inputs."""
    shape = [*b.type_of(x).shape]
    shape[axis] = size
    parts = []
    for _ in range(2):
        indices = b.input(TensorType(DType.I64, (size,)))
        weights = b.input(TensorType(DType.F32, (size, *(1 for _ in shape[axis + 1 :]))))
        parts.append(
            b.apply(
                Prim.MUL, b.add(Prim.GATHER, x, indices, attrs=a.GatherAttrs(axis)), b.broadcast(weights, tuple(shape))
            )
        )
    return b.apply(Prim.ADD, *parts)


def resize(channels: int, low: tuple[int, int], high: tuple[int, int], *, joined: bool = False) -> Problem:
    b = GraphBuilder()
    x = b.cast(b.input(TensorType(DType.F16, (2, channels, *low))), DType.F32)
    y = weighted(b, weighted(b, x, 2, high[0]), 3, high[1])
    if joined:
        z = b.cast(b.input(TensorType(DType.F16, (2, channels, *high))), DType.F32)
        y = b.add(Prim.CONCAT, z, y, attrs=a.ConcatAttrs(1))
    return problem(b.build([b.cast(y, DType.F16)]), f"resize-{channels}-{high}-{joined}", Format.LAST)


def values(p: Problem, seed: int, *, sorted_indices: bool) -> list[Array]:
    rng, found = np.random.default_rng(seed), []
    sources = {7: 3, 12: 6}  # sizes of indices, and of what they index
    for n in p.graph.inputs:
        t = p.graph.type_of(n)
        if t.dtype is DType.I64:
            x: Array = rng.integers(0, sources.get(t.size, 4), t.shape)
            found.append(np.sort(x) if sorted_indices else x)
        else:
            found.append(rng.standard_normal(t.shape).astype(t.dtype.numpy))
    return found


def test_neighbours_share_columns() -> None:
    batch: list[Trial] = []
    for joined in (False, True):
        for k, items in enumerate((2, 4)):
            p = resize(16, (3, 6), (7, 12), joined=joined)
            form = Form(threads=32, items=items, corners=True)
            batch.append(trial(p, form.schedule(), values(p, 3 + k, sorted_indices=k > 0)))
            assert "held" in batch[-1].source.text
    check(batch)


def test_what_does_not_divide_is_as_before() -> None:
    p = resize(8, (3, 6), (7, 12))
    text = trial(p, Form(threads=32, items=5, corners=True).schedule(), []).source.text
    assert "held" not in text


def focus(channels: int, side: int) -> Problem:
    """Every second pixel of both axes, from four corners."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (2, channels, 2 * side, 2 * side)))
    sizes = (2, channels, side, side)
    parts = [b.slice(x, (0, 0, i, j), sizes, (1, 1, 2, 2)) for j in (0, 1) for i in (0, 1)]
    return problem(
        b.build([b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(1))]), f"focus-{channels}-{side}", Format.LAST
    )


def test_all_channels_of_a_pixel() -> None:
    batch = []
    for channels, side in ((3, 6), (3, 5), (2, 4)):
        p = focus(channels, side)
        x = np.random.default_rng(side).standard_normal(p.graph.type_of(p.graph.inputs[0]).shape).astype(np.float16)
        batch.append(trial(p, Form(threads=32, whole=True).schedule(), [x]))
        body = batch[-1].source.text.split("__launch_bounds__(32)")[1]
        assert "role.block_x() >= " not in body  # no pieces by channels
    check(batch)


def test_they_come_first() -> None:
    for p, name in ((focus(3, 208), "whole"), (resize(256, (64, 64), (128, 128)), "corners")):
        found = CudaGenerator().schedules(p, FACTS)
        assert not isinstance(found, Declined)
        assert dict(found[0].params).get(name) is True
