"""Headers of the generated text, and how one element of memory is read and written."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from weft.generate.cuda.role.assemble import role_header
from weft.generate.cuda.rough import rough_header
from weft.ir.types import DType


@cache
def prelude() -> str:
    """Functions that a kernel's text stands on: the machine's, elementary ones, the role's, the tensor cores'."""
    here = Path(__file__).parent

    def text(folder: Path, name: str) -> str:
        return (folder / f"weft_cuda{name}.h").read_text(encoding="utf-8")

    machine = text(here.parent, "_machine") + text(here.parent, "") + role_header()
    return machine + text(here, "_tensor") + rough_header() + text(here, "_end")


@cache
def float8() -> str:
    """What kernels need besides that read or write floats of 8 bits."""
    return (Path(__file__).parent.parent / "weft_cuda_float8.h").read_text(encoding="utf-8")


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
