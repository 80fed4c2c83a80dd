"""How the tensors of a batch lie in one piece of memory, for both processes. Knows no torch."""

from __future__ import annotations

import math

import numpy as np

from weft.ir.types import Array
from weft.serve.signature import Signature

ALIGNMENT = 64
"""Of each tensor, as kernels read it in place then."""


def places(signature: Signature, rows: int, buffer: memoryview | None = None) -> tuple[list[Array], list[Array]]:
    """Arrays of so many rows for all inputs and all outputs."""
    if buffer is None:
        buffer = memoryview(bytearray(bytes_of(signature, rows)))
    at, found = 0, []
    for spec in (*signature.inputs, *signature.outputs):
        count = rows * math.prod(spec.shape)
        array = np.frombuffer(buffer, dtype=spec.dtype, count=count, offset=at).reshape(rows, *spec.shape)
        found.append(array)
        at = _up(at + rows * spec.row_bytes)
    return found[: len(signature.inputs)], found[len(signature.inputs) :]


def bytes_of(signature: Signature, rows: int) -> int:
    """Of the buffer that `places` needs."""
    return max(ALIGNMENT, sum(_up(rows * s.row_bytes) for s in (*signature.inputs, *signature.outputs)))


def _up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
