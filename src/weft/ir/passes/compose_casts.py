"""Conversions between element types that lose nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId
from weft.ir.passes.protocol import PassResult, needs_any
from weft.ir.prims import Prim
from weft.ir.rewrite import rewrite
from weft.ir.types import DType

_SIGNIFICANT_BITS = {DType.F64: 53, DType.F32: 24, DType.F16: 11, DType.BF16: 8, DType.F8E4M3: 4, DType.F8E5M2: 3}
_VALUE_BITS = {DType.BOOL: 1, DType.U8: 8, DType.I8: 7, DType.I16: 15, DType.I32: 31, DType.I64: 63}
"""Magnitude bits of the integers; the sign stands apart."""
_WIDER_FLOATS = {
    DType.F16: (DType.F32, DType.F64),
    DType.BF16: (DType.F32, DType.F64),
    DType.F8E4M3: (DType.F16, DType.BF16, DType.F32, DType.F64),
    DType.F8E5M2: (DType.F16, DType.BF16, DType.F32, DType.F64),
    DType.F32: (DType.F64,),
    DType.F64: (),
}


def holds_every_value(wide: DType, narrow: DType) -> bool:
    """Whether each value of `narrow` is a value of `wide`."""
    if wide is narrow:
        return True
    if narrow.is_float:
        return wide in _WIDER_FLOATS[narrow]
    if wide is DType.BOOL:
        return False
    if wide.is_float:
        return _VALUE_BITS[narrow] <= _SIGNIFICANT_BITS[wide]  # every float type reaches beyond 2**8, its own bits
    signed_into_unsigned = wide is DType.U8 and narrow not in (DType.BOOL, DType.U8)
    return _VALUE_BITS[narrow] <= _VALUE_BITS[wide] and not signed_into_unsigned


def _visit(b: GraphBuilder, node: Node, inputs: tuple[NodeId, ...]) -> NodeId | None:
    if node.prim is not Prim.CAST:
        return None
    dtype, inner = cast("a.CastAttrs", node.attrs).dtype, b.node(inputs[0])
    if inner.type.dtype is dtype:
        return inputs[0]
    if (given := _turned_input(b, inner)) is not None and dtype.itemsize < inner.type.dtype.itemsize:
        return b.transpose(b.cast(given, dtype), LAST_TO_FIRST)
    if inner.prim is Prim.CAST and holds_every_value(inner.type.dtype, b.type_of(inner.inputs[0]).dtype):
        return b.cast(inner.inputs[0], dtype)
    return None


LAST_TO_FIRST, FIRST_TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
"""Of images, and of weights of convolutions."""


def turns_to_first(node: Node) -> bool:
    """Whether it brings channels that are the last dimension to the front: channels-last nothing moves then."""
    return isinstance(node.attrs, a.TransposeAttrs) and node.attrs.perm == LAST_TO_FIRST


def _turned_input(b: GraphBuilder, node: Node) -> NodeId | None:
    """The input of the graph whose channels this brings to the front."""
    if not turns_to_first(node):
        return None
    return node.inputs[0] if b.node(node.inputs[0]).prim is Prim.INPUT else None


@dataclass(frozen=True, slots=True)
class ComposeCastsPass:
    """cast(cast(x, wide), t) → cast(x, t), where `wide` holds every value of x; cast(x, type of x) → x.

    And cast(transpose(x), narrow) → transpose(cast(x, narrow)) of an input with channels last: what is stored then lies
    as libraries' convolutions read it, and who reads it otherwise turns fewer bytes.
    """

    name: ClassVar[str] = "compose-casts"

    def requires(self, graph: Graph) -> Declined | None:
        """Some cast."""
        return needs_any(graph, Prim.CAST)

    def run(self, graph: Graph) -> PassResult:
        """Exact."""
        return PassResult(*rewrite(graph, _visit))
