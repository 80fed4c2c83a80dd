"""Vectors of neighbouring channels in memory and as floats in registers."""

from __future__ import annotations

from weft.ir.types import DType

_KINDS = {16: "uint4", 8: "uint2", 4: "u32", 2: "u16"}


def kind_of(dtype: DType, width: int) -> str:
    """C type of a vector of memory."""
    return _KINDS[width * dtype.itemsize]


def unpacked(dtype: DType, width: int, name: str, to: str) -> list[str]:
    """Statements: a vector of memory as floats into the array `to`."""
    kind = kind_of(dtype, width)
    words = [f"{name}.{f}" for f in "xyzw"[: {"uint4": 4, "uint2": 2}[kind]]] if kind in ("uint4", "uint2") else [name]
    if dtype is DType.F32:
        return [f"{to}[{i}] = __uint_as_float({word});" for i, word in enumerate(words)]
    unpack = f"w_unpack_{dtype.value}"
    if width == 1:
        return [f"{to}[0] = {unpack}({name}).x;"]
    return [
        f"{{ const float2 h = {unpack}({w}); {to}[{2 * i}] = h.x; {to}[{2 * i + 1}] = h.y; }}"
        for i, w in enumerate(words)
    ]
