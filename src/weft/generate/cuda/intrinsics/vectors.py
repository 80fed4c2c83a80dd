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


def packed(dtype: DType, width: int, name: str, first: int) -> str:
    """Expression: so many floats of the array `name`, from `first` on, as a vector of memory, each rounded once."""
    at = [f"{name}[{first + i}]" for i in range(width)]
    if dtype is DType.F32:
        words = [f"__float_as_uint({x})" for x in at]
    elif width == 1:
        return f"(u16)w_narrow2_{dtype.value}({at[0]}, 0.0f)"
    else:
        words = [f"w_narrow2_{dtype.value}({x}, {y})" for x, y in zip(at[::2], at[1::2], strict=True)]
    kind = kind_of(dtype, width)
    return f"make_{kind}({', '.join(words)})" if len(words) > 1 else words[0]
