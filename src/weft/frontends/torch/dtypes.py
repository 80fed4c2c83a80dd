"""Element types and data between torch and the graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from weft.errors import DataDependentError, UnsupportedError
from weft.ir.types import Array, DType, TensorType

FROM_TORCH: Mapping[torch.dtype, DType] = {
    torch.float64: DType.F64,
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float8_e4m3fn: DType.F8E4M3,
    torch.float8_e5m2: DType.F8E5M2,
    torch.int64: DType.I64,
    torch.int32: DType.I32,
    torch.int16: DType.I16,
    torch.int8: DType.I8,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
}
PARTS: Mapping[torch.dtype, DType] = {torch.complex64: DType.F32, torch.complex128: DType.F64}
"""Element type of the parts of complex tensors, which are two real ones here."""
EMULATED = frozenset(t for t, d in FROM_TORCH.items() if d.is_emulated)
"""What NumPy lacks: float32 stands in."""
TO_TORCH: Mapping[DType, torch.dtype] = {d: t for t, d in FROM_TORCH.items()}


DEPENDS = "the size of its result depends on data"


def static_int(value: int | torch.SymInt, op: str = "torch.SymInt") -> int:
    """A size as a number: a symbolic one takes the value it had in the example (the plan is specialised to it).

    Raises:
        DataDependentError: no example has a value of it: the operator `op` makes as much as its operands' values ask
            for [W201].
    """
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        if hint is None:
            raise DataDependentError(op=op, reason=DEPENDS)
        return int(hint)
    return int(value)


def type_of(value: torch.Tensor, op: str) -> TensorType:
    """The type of a (fake) tensor.

    Raises:
        UnsupportedError: not a dense strided tensor of a supported element type with a known shape [W201].
    """
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise UnsupportedError(op=op, reason=f"a {value.layout} tensor is not dense")
    if value.dtype not in FROM_TORCH:
        raise UnsupportedError(op=op, reason=f"element type {value.dtype}")
    return TensorType(FROM_TORCH[value.dtype], tuple(static_int(n, op) for n in value.shape))


def to_numpy(tensor: torch.Tensor) -> tuple[Array, DType]:
    """Data of a tensor, without a copy where it is contiguous on the CPU; types that NumPy lacks as exact float32."""
    dtype = FROM_TORCH[tensor.dtype]
    dense = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return (dense.float() if dtype.is_emulated else dense).numpy(), dtype


def from_numpy(data: Array, dtype: DType) -> torch.Tensor:
    """The inverse of `to_numpy`: a tensor of element type `dtype`, always a copy."""
    return torch.from_numpy(np.array(data, dtype=dtype.numpy, copy=True)).to(TO_TORCH[dtype])
