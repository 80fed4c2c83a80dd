"""Problems that are the gradient of an embedding table: one call of `aten::embedding_dense_backward`."""

from __future__ import annotations

import json

from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format


def embedding_problem(
    indices: tuple[int, ...],
    rows: int,
    width: int,
    *,
    padding: int = -1,
    scaled: bool = False,
    dtype: DType = DType.F32,
) -> Problem:
    """As a plan cuts the call out of a training step; `indices`: the shape of what is read by."""
    b = GraphBuilder()
    of = TensorType(dtype, (rows, width))
    dy, index = b.input(TensorType(dtype, (*indices, width))), b.input(TensorType(DType.I64, indices))
    payload = json.dumps({
        "args": [{"tensor": 0}, {"tensor": 1}, rows, padding, scaled], "inputs": [dtype.value, "i64"], "kwargs": {},
        "op": "aten::embedding_dense_backward", "overload": "",
    }, sort_keys=True)  # fmt: skip
    attrs = a.OpaqueAttrs("aten", "aten.embedding_dense_backward.default", payload, 0, (of,))
    graph = b.build([b.add(Prim.OPAQUE, dy, index, attrs=attrs)])
    return Problem(graph, str(graph), (Format.ROW, Format.ROW), (Format.ROW,))
