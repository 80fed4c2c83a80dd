"""What a model should give: in float64, and what stands in where that cannot be had."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from tests.typed import assert_allclose

from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.pipeline import reference


def third() -> Graph:
    b = GraphBuilder()
    return b.build([b.apply(Prim.DIV, b.input(TensorType(DType.F32, (3,))), 3.0)])


def test_float64_and_the_models_own_types() -> None:
    x = torch.tensor([1.0, 2.0, 4.0])
    found = reference.outputs(third(), [x], None)
    assert found.exact[0].dtype == np.float64 and found.plain[0].dtype == np.float32
    assert_allclose(found.exact[0], np.array([1, 2, 4]) / 3, rtol=1e-15)
    np.testing.assert_array_equal(found.plain[0], (x / 3).numpy())


@pytest.mark.parametrize("with_eager", [True, False])
def test_without_memory_for_float64_the_framework_decides(with_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reference, "evaluate", full)
    x = torch.tensor([1.0, 2.0, 4.0])
    found = reference.outputs(third(), [x], (lambda y: [y / 3 + 0]) if with_eager else None)
    np.testing.assert_array_equal(found.exact[0], (x / 3).numpy())
    np.testing.assert_array_equal(found.plain[0], found.exact[0])


def layer() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 8)))
    return b.build([b.apply(Prim.MAX, b.add(Prim.MATMUL, x, b.constant(np.ones((8, 16), np.float32))), 0.0)])


def test_tensors_go_when_nobody_needs_them() -> None:
    """Not when garbage is searched for: on a GPU their memory would come free in the middle of what is placed next."""
    enabled, before = gc.isenabled(), gc.get_debug()
    gc.collect()
    gc.disable()
    try:
        found = reference.outputs(layer(), [torch.ones(4, 8)], None)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [x for x in gc.garbage if isinstance(x, torch.Tensor)]
    finally:
        gc.set_debug(before)
        gc.garbage.clear()
        if enabled:
            gc.enable()
    assert left == []
    np.testing.assert_array_equal(found.plain[0], np.full((4, 16), 8.0, np.float32))
