"""Headers of the generated text, and how one element of memory is read and written."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from weft.generate.cuda.intrinsics.approx import approx_header
from weft.generate.cuda.role.assemble import role_header
from weft.ir.types import DType


@cache
def prelude() -> str:
    """Functions that a kernel's text stands on: the machine's, elementary ones, the role's, the tensor cores'."""
    machine = machine_header() + runtime_header() + role_header()
    return machine + _text("weft_cuda_tensor.h") + approx_header() + _text("weft_cuda_end.h")


@cache
def machine_header() -> str:
    """What names the machine."""
    return _text("weft_cuda_machine.h")


@cache
def runtime_header() -> str:
    """Register types, loads and stores, elementary functions."""
    return _text("weft_cuda.h")


@cache
def float8() -> str:
    """What kernels need besides that read or write floats of 8 bits."""
    return _text("weft_cuda_float8.h")


@cache
def tma_header() -> str:
    """What kernels need besides that copy by TMA or multiply by warpgroups."""
    return _text("weft_cuda_tma.h")


@cache
def multicast_header() -> str:
    """What CTAs of a cluster need besides to share operands by multicast."""
    return _text("weft_cuda_multicast.h")


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


_STORAGE: dict[DType, str] = {
    DType.F64: "double",
    DType.F32: "float",
    DType.F16: "u16",
    DType.BF16: "u16",
    DType.F8E4M3: "unsigned char",
    DType.F8E5M2: "unsigned char",
    DType.I64: "long long",
    DType.I32: "int",
    DType.I16: "short",
    DType.I8: "signed char",
    DType.U8: "unsigned char",
    DType.BOOL: "unsigned char",
}


def storage(dtype: DType) -> str:
    """C type of one element in memory."""
    return _STORAGE[dtype]


def load(dtype: DType, address: str) -> str:
    """Expression: one element in memory as it is in a register."""
    if dtype in (DType.F16, DType.BF16):
        return f"w_unpack_{dtype.value}(*({address})).x"
    if dtype.is_float8:
        return f"w_widen(w_{dtype.value}{{*({address})}})"
    if dtype is DType.BOOL:
        return f"(*({address}) != 0)"
    return f"*({address})"


def store(dtype: DType, address: str, value: str) -> str:
    """Statement: a register's value to memory, rounded once."""
    if dtype in (DType.F16, DType.BF16):
        return f"*({address}) = (u16)w_narrow2_{dtype.value}({value}, 0.0f);"
    if dtype.is_float8:
        return f"*({address}) = (unsigned char)w_narrow_{dtype.value}({value});"
    return f"*({address}) = {value};"
