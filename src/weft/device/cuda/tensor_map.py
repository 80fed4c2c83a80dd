"""Tensor maps (`CUtensorMap`): 128 bytes that tell TMA how a tensor lies in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from weft.device.cuda.api import call, cuda_error, driver_api
from weft.errors import DeviceError

MAP_BYTES = 128
MAP_ALIGNMENT = 64
_TYPES = {
    "u8": (0, 1),
    "i8": (0, 1),
    "bool": (0, 1),
    "u16": (1, 2),
    "i16": (1, 2),
    "i32": (3, 4),
    "i64": (5, 8),
    "f16": (6, 2),
    "f32": (7, 4),
    "f64": (8, 8),
    "bf16": (9, 2),
    "tf32": (11, 4),
}
"""Element type → (CUtensorMapDataType, bytes)."""
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTION_128 = 2
"""Lines of 128 bytes are fetched into the L2 cache."""


class AlignedBytes:
    """Host memory at an address that is a multiple of `alignment`."""

    def __init__(self, data: bytes, alignment: int = MAP_ALIGNMENT) -> None:
        self._memory = ctypes.create_string_buffer(len(data) + alignment)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % alignment
        ctypes.memmove(self.address, data, len(data))
        self._size = len(data)

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.address, self._size)


def encode_tensor_map(
    address: int,
    dtype: str,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    swizzle_bytes: int,
) -> bytes:
    """A tiled tensor map; elements outside of the tensor read as zero.

    Dimensions are innermost first. `strides_bytes` are those of dimensions 1 and up.

    Raises:
        DeviceError: a value that no tensor map can hold; the text says which [W301].
        CudaError: the driver refuses it all the same [W302].
    """
    _check(address, dtype, sizes, strides_bytes, box, element_strides, swizzle_bytes)
    rank = len(sizes)
    # The wrapper of the bindings encodes into memory that need not be aligned, so the function is called directly.
    place = AlignedBytes(bytes(MAP_BYTES))
    status = _encode()(
        place.address,
        _TYPES[dtype][0],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * rank)(*strides_bytes),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*element_strides),
        0,
        _SWIZZLES[swizzle_bytes],
        _PROMOTION_128,
        0,
    )
    if status != 0:
        raise cuda_error("cuTensorMapEncodeTiled", status, f"sizes {tuple(sizes)}, box {tuple(box)}")
    return bytes(place)


def _check(
    address: int,
    dtype: str,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    swizzle_bytes: int,
) -> None:
    rank = len(sizes)
    if dtype not in _TYPES or swizzle_bytes not in _SWIZZLES:
        raise _bad(f"elements {dtype!r} with a swizzle of {swizzle_bytes} bytes")
    if not 1 <= rank <= 5 or (len(strides_bytes), len(box), len(element_strides)) != (rank - 1, rank, rank):
        raise _bad(f"rank {rank}, {len(strides_bytes)} strides, box {tuple(box)}")
    if address <= 0 or address % 16:
        raise _bad(f"address {address:#x} is not a multiple of 16")
    if not all(1 <= n <= 1 << 32 for n in sizes):
        raise _bad(f"sizes {tuple(sizes)} are outside of 1 to 2^32")
    if not all(0 < s < 1 << 40 and s % 16 == 0 for s in strides_bytes):
        raise _bad(f"strides {tuple(strides_bytes)} are no multiples of 16 bytes below 2^40")
    if not all(1 <= b <= 256 for b in box) or not all(1 <= s <= 8 for s in element_strides):
        raise _bad(f"box {tuple(box)} with steps {tuple(element_strides)}: 1 to 256 and 1 to 8 are possible")
    row = box[0] * _TYPES[dtype][1]
    if row % 16 or (swizzle_bytes and row > swizzle_bytes):
        raise _bad(f"a box row of {row} bytes is no multiple of 16, or longer than the swizzle of {swizzle_bytes}")


def _bad(what: str) -> DeviceError:
    return DeviceError(problem=f"no tensor map: {what}; please report the kernel")


@cache
def _encode() -> Any:
    """The function of the driver."""
    api = driver_api()
    address, found = call(api.cuGetProcAddress, b"cuTensorMapEncodeTiled", 12000, 0)
    if not address:
        raise DeviceError(problem=f"this driver has no tensor maps ({found}): CUDA 12.0 or newer is needed")
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    longs, words = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, word, word, pointer, longs, longs, words, words, word, word, word, word
    )
    return kind(int(address))
