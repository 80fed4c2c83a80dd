"""Names of C types and exact literals. Values of floats of 16 and 8 bits are f32 in a register."""

from __future__ import annotations

import math

from weft.ir.types import DType

_REGISTER: dict[DType, str] = {
    DType.F64: "f64",
    DType.F32: "f32",
    DType.F16: "f32",
    DType.BF16: "f32",
    DType.F8E4M3: "f32",
    DType.F8E5M2: "f32",
    DType.I64: "i64",
    DType.I32: "i32",
    DType.I16: "i16",
    DType.I8: "i8",
    DType.U8: "u8",
    DType.BOOL: "bool",
}
_STORAGE: dict[DType, str] = {d: f"w_{d.value}" for d in DType}


def register_kind(dtype: DType) -> str:
    """Which of the header's register types holds a value: `f32` for 16- and 8-bit floats, else the type's own name."""
    return _REGISTER[dtype]


def c_type(dtype: DType) -> str:
    """C type of one value in a register, e.g. `w_f32`."""
    return f"w_{_REGISTER[dtype]}"


def vector_type(dtype: DType) -> str:
    """C type of a vector of values in registers, e.g. `w_f32v`; bool is a mask of 0 and -1."""
    return f"w_{_REGISTER[dtype]}v"


def storage_type(dtype: DType) -> str:
    """C type of one element in memory, e.g. `w_bf16`."""
    return _STORAGE[dtype]


def literal(value: float | bool, dtype: DType) -> str:
    """A C literal of exactly this value (already rounded to `dtype`), typed as in a register."""
    if dtype is DType.BOOL:
        return "true" if value else "false"
    if dtype.is_float:
        suffix, f = ("", "") if dtype is DType.F64 else ("f", "f")
        number = float(value)
        if math.isnan(number):
            return f'__builtin_nan{f}("")'
        if math.isinf(number):
            return f"(-__builtin_inf{f}())" if number < 0 else f"__builtin_inf{f}()"
        text = repr(number) if "e" in repr(number) or "." in repr(number) else f"{number!r}.0"
        return f"({text}{suffix})" if math.copysign(1.0, number) < 0 else f"{text}{suffix}"
    whole = int(value)
    if dtype is DType.I64:
        # the least integer has no literal of its own: its absolute value overflows
        return "(-9223372036854775807LL-1)" if whole == -(2**63) else f"((w_i64){whole}LL)"
    if dtype is DType.I32:
        return "(-2147483647-1)" if whole == -(2**31) else f"({whole})" if whole < 0 else f"{whole}"
    return f"(({c_type(dtype)}){whole})"


def splat(name: str, dtype: DType) -> str:
    """A vector with the same value in every lane."""
    return f"w_splat_{_REGISTER[dtype]}({name})"
