"""What a model should give: in float64, and what stands in where that cannot be had."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
    np.testing.assert_allclose(found.exact[0], np.array([1, 2, 4]) / 3, rtol=1e-15)
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
