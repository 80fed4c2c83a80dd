"""Opaque calls: which results belong together, and what is known of some that a framework's operator makes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType

LARGEST_SCORES = 1 << 28
"""Scores of attention up to which a call of it is computed in float64, where kernels are held to it."""


def call_members(graph: Graph, node: NodeId) -> Mask:
    """All results of the call that OPAQUE `node` is a result of, itself included."""
    first = graph.nodes[node]
    call = cast("a.OpaqueAttrs", first.attrs)
    members = 0
    for i, other in enumerate(graph.nodes):
        if other.prim is Prim.OPAQUE and other.inputs == first.inputs:
            attrs = cast("a.OpaqueAttrs", other.attrs)
            if (attrs.framework, attrs.op, attrs.payload) == (call.framework, call.op, call.payload):
                members |= 1 << i
    return members


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """A call of `aten::embedding_dense_backward`."""

    dy: int
    """Which operand of the call is the gradient of what was read; `index`: by which indices."""
    index: int
    rows: int
    padding: int
    """The row that has no gradient; one that the table does not have: none is."""


def embedding_table(attrs: object) -> EmbeddingTable | None:
    """The gradient of an embedding table that a call of ATen is; None: it is another one, or scales by frequency."""
    if not isinstance(attrs, a.OpaqueAttrs) or attrs.framework != "aten":
        return None
    call = json.loads(attrs.payload)
    given = call.get("args", [])
    if call.get("op") != "aten::embedding_dense_backward" or call.get("kwargs") or len(given) != 5:
        return None
    dy, index = (x.get("tensor") if isinstance(x, dict) else None for x in given[:2])
    rows, padding, scaled = given[2:]
    if not isinstance(dy, int) or not isinstance(index, int) or scaled is not False:
        return None
    return EmbeddingTable(dy, index, rows, padding) if type(rows) is type(padding) is int else None


@dataclass(frozen=True, slots=True)
class IndexedSum:
    """A call of `aten::index_put` that adds values at the places that one tensor of indices names along an axis."""

    x: int
    """Which operand of the call is added to; `values`: what is added; `index`: where."""
    index: int
    values: int
    axis: int


def indexed_sum(attrs: object) -> IndexedSum | None:
    """The sum by indices that a call of ATen is; None: it is another one, writes, or has several tensors of indices."""
    if not isinstance(attrs, a.OpaqueAttrs) or attrs.framework != "aten":
        return None
    call = json.loads(attrs.payload)
    given = call.get("args", [])
    if call.get("op") != "aten::index_put" or call.get("kwargs") or len(given) != 4 or given[3] is not True:
        return None
    indices = given[1] if isinstance(given[1], list) else []
    axes = [k for k, i in enumerate(indices) if i is not None]
    if len(axes) != 1:
        return None
    x, index, values = (
        x.get("tensor") if isinstance(x, dict) else None for x in (given[0], indices[axes[0]], given[2])
    )
    if not isinstance(x, int) or not isinstance(index, int) or not isinstance(values, int):
        return None
    return IndexedSum(x, index, values, axes[0])


def embedding_gradient(
    dtype: DType, rows: int, width: int, *, padding: int = -1, scaled: bool = False
) -> a.OpaqueAttrs:
    """`aten::embedding_dense_backward`: rows of `width` are summed into `rows` by i64 indices; see `EmbeddingTable`.

    `scaled`: by how often an index occurs.
    """
    payload = {
        "args": [{"tensor": 0}, {"tensor": 1}, rows, padding, scaled], "inputs": [dtype.value, "i64"], "kwargs": {},
        "op": "aten::embedding_dense_backward", "overload": "",
    }  # fmt: skip
    return a.OpaqueAttrs(
        "aten", "aten.embedding_dense_backward.default", json.dumps(payload), 0, (TensorType(dtype, (rows, width)),),
        "rows are summed by index",
    )  # fmt: skip
