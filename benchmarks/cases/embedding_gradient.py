"""Problems that are the gradient of an embedding table: one call of `aten::embedding_dense_backward`.

Also those with what an optimizer makes of it and of the table.
"""

from __future__ import annotations

from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.opaque import embedding_gradient
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
    return _of(b, [_gradient(b, indices, rows, width, padding=padding, scaled=scaled, dtype=dtype)])


def updated_problem(
    indices: tuple[int, ...],
    rows: int,
    width: int,
    *,
    rule: str = "sgd",
    padding: int = -1,
    dtype: DType = DType.F32,
    weights: DType | None = None,
    apart: bool = False,
    tied: bool = False,
) -> Problem:
    """The call with an update of the table behind it; `apart`: the update alone, whose first input is the gradient.

    By SGD with weight decay and momentum (`sgd`), whose outputs are momentum and weights, or by Adam (`adam`): both
    moments and weights. `dtype`: of the gradient; `weights`: of the table and its moments, computed in f32.
    `tied`: another gradient is added, in bf16, as that of the product which has the same weights.
    """
    b = GraphBuilder()
    of = TensorType(weights or dtype, (rows, width))
    if apart:
        gradient = b.input(TensorType(dtype, of.shape))
    else:
        gradient = _gradient(b, indices, rows, width, padding=padding, dtype=dtype)
    weight, *moments = (b.input(of) for _ in range({"sgd": 2, "adam": 3}[rule]))

    def scalar() -> NodeId:
        return b.broadcast(b.input(TensorType(DType.F32, ())), of.shape)

    def wide(x: NodeId) -> NodeId:
        return b.cast(x, DType.F32)

    w, g = wide(weight), wide(gradient)
    if tied:
        g = b.apply(Prim.ADD, wide(b.input(TensorType(DType.BF16, of.shape))), g)
    if rule == "sgd":
        decay, momentum, rate = scalar(), scalar(), scalar()
        g = b.apply(Prim.ADD, g, b.apply(Prim.MUL, decay, w))
        kept = b.apply(Prim.ADD, b.apply(Prim.MUL, momentum, wide(moments[0])), g)
        found = [kept, b.apply(Prim.SUB, w, b.apply(Prim.MUL, rate, kept))]
    else:
        first, second, less, eps, rate = scalar(), scalar(), scalar(), scalar(), scalar()
        mean, square = (wide(x) for x in moments)
        mean = b.apply(Prim.ADD, mean, b.apply(Prim.MUL, first, b.apply(Prim.SUB, g, mean)))
        squared = b.apply(Prim.MUL, less, b.apply(Prim.MUL, g, g))
        square = b.apply(Prim.ADD, b.apply(Prim.MUL, second, square), squared)
        below = b.apply(Prim.ADD, b.apply(Prim.SQRT, square), eps)
        found = [mean, square, b.apply(Prim.SUB, w, b.apply(Prim.MUL, rate, b.apply(Prim.DIV, mean, below)))]
    return _of(b, [b.cast(x, of.dtype) for x in found])


def _gradient(
    b: GraphBuilder,
    indices: tuple[int, ...],
    rows: int,
    width: int,
    *,
    padding: int,
    dtype: DType,
    scaled: bool = False,
) -> NodeId:
    dy, index = b.input(TensorType(dtype, (*indices, width))), b.input(TensorType(DType.I64, indices))
    attrs = embedding_gradient(dtype, rows, width, padding=padding, scaled=scaled)
    return b.add(Prim.OPAQUE, dy, index, attrs=attrs)


def _of(b: GraphBuilder, results: list[NodeId]) -> Problem:
    graph = b.build(results)
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(results))
