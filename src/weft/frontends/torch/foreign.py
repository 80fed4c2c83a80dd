"""Operators of other libraries that ATen has under another name: a plan runs ATen's, and needs no such library.

Each entry says what ATen's operator is given for the call's own arguments, and what the call gives of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from weft.frontends.torch.call import Call, Ref
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

_STRIDE_BYTES = 16
"""Rows of operands of ATen's grouped product begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """One operator of another library."""

    target: torch._ops.OpOverload
    """ATen's, which returns one tensor of the same shape and type."""
    arguments: Callable[[Call], tuple[object, ...]]
    """What it is given, in the order of its schema. NotTakenError: it does not take such operands."""
    result: Callable[[Call, NodeId], NodeId]
    """What the call gives, of ATen's result."""
    reason: str
    """Why no rule takes it."""


def _grouped_arguments(c: Call) -> tuple[object, ...]:
    """Rows, a matrix for each group of them, and where the groups end."""
    x, weight, ends = c.ref("input"), c.ref("weight"), c.ref("offs")
    dtype = c.type(x).dtype
    if dtype not in (DType.F32, DType.F16, DType.BF16) or c.type(weight).dtype is not dtype:
        c.decline(f"a grouped product of {dtype.value} and {c.type(weight).dtype.value}")
    if 0 in (*c.shape(x), *c.shape(weight)):
        c.decline("a grouped product of nothing")
    odd = [n for n in c.shape(weight)[1:] if n * dtype.itemsize % _STRIDE_BYTES]
    if odd:
        c.decline(f"a grouped product with rows of {odd[0]} elements, which begin at no multiples of {_STRIDE_BYTES} B")
    return Ref(x), Ref(weight), Ref(c.b.cast(ends, DType.I32))


def _grouped_result(c: Call, found: NodeId) -> NodeId:
    """Rows behind the last group are zero; ATen leaves them as they were in memory."""
    b, ends = c.b, c.b.cast(c.ref("offs"), DType.I64)
    rows, groups = c.out.shape[0], c.type(ends).size
    last = b.slice(ends, [groups - 1], [1], [1])
    within = b.reshape(b.apply(Prim.LT, b.iota((rows,), 0, DType.I64), last), (rows, 1))
    return b.apply(Prim.SELECT, within, found, b.scalar(0, c.out.dtype))


FOREIGN: Mapping[str, Foreign] = MappingProxyType(
    {
        "transformers.grouped_mm_fallback.default": Foreign(
            torch.ops.aten._grouped_mm.default, _grouped_arguments, _grouped_result,
            "rows are grouped by the values of tensors",
        ),
    }
)  # fmt: skip
"""By overload; on the CPU alone, as on a GPU the framework looks at the ends of the groups on the host."""
