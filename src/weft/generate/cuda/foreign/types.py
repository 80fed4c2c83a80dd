"""C types of a kernel's parameters that have a known size, and how a scalar of one becomes bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElementType:
    """A C type whose bytes are known."""

    name: str
    scalar: str
    """NumPy's name of a component: `f4`, `i8`, `u1`, `b1`, ..."""
    components: int = 1

    @property
    def component_bytes(self) -> int:
        """Of one component."""
        return int(self.scalar[1:])

    @property
    def nbytes(self) -> int:
        """Of one element."""
        return self.component_bytes * self.components

    @property
    def is_float(self) -> bool:
        """Whether components are floating point."""
        return self.scalar[0] == "f"

    @property
    def range(self) -> tuple[int, int]:
        """Least and greatest value of an integer component."""
        bits = 8 * self.component_bytes
        if self.scalar[0] == "b":
            return 0, 1
        return (-(1 << bits - 1), (1 << bits - 1) - 1) if self.scalar[0] == "i" else (0, (1 << bits) - 1)

    def packed(self, values: tuple[float | int, ...]) -> bytes:
        """Components in memory order, little-endian.

        Raises:
            OverflowError: an integer that the type does not hold.
        """
        if self.is_float:
            return struct.pack(f"<{len(values)}{'f' if self.component_bytes == 4 else 'd'}", *values)
        signed = self.scalar[0] == "i"
        return b"".join(int(v).to_bytes(self.component_bytes, "little", signed=signed) for v in values)


_SCALARS = {
    "bool": "b1", "char": "i1", "signed char": "i1", "unsigned char": "u1", "short": "i2", "unsigned short": "u2",
    "int": "i4", "unsigned": "u4", "unsigned int": "u4", "long": "i8", "unsigned long": "u8", "long long": "i8",
    "unsigned long long": "u8", "size_t": "u8", "float": "f4", "double": "f8",
    "int8_t": "i1", "uint8_t": "u1", "int16_t": "i2", "uint16_t": "u2", "int32_t": "i4", "uint32_t": "u4",
    "int64_t": "i8", "uint64_t": "u8",
}  # fmt: skip
_VECTORS = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4", "longlong": "i8",
    "ulonglong": "u8", "float": "f4", "double": "f8",
}  # fmt: skip
KNOWN = {name: ElementType(name, scalar) for name, scalar in _SCALARS.items()} | {
    f"{name}{n}": ElementType(f"{name}{n}", scalar, n) for name, scalar in _VECTORS.items() for n in (1, 2, 3, 4)
}
"""By C name."""
