"""Hashing and laying out arrays of hundreds of megabytes: weights, which every compilation looks at.

Both are done in pieces by a few threads; NumPy and hashlib let go of the interpreter's lock while they work.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from weft.ir.types import Array

T = TypeVar("T")
PIECE = 8 << 20
"""Bytes that are hashed, or copied, as one."""
STRIP_BYTES = 1 << 20
"""Bytes of results for which another thread pays."""
_STRIP = 32
"""Elements of a row that a transposing copy writes at once: two cache lines of f32."""
_MAX_THREADS = 8


def hash_bytes(header: bytes, data: Array) -> str:
    """SHA-256 (hex) of a header and an array's row-major bytes.

    Above `PIECE` it is that of the header, a mark and the SHA-256 of each piece in order, so that pieces can be hashed
    side by side.
    """
    raw = row_major(data).reshape(-1).view(np.uint8)
    if raw.nbytes <= PIECE:
        return hashlib.sha256(header + raw.tobytes()).hexdigest()
    pieces = [raw[start : start + PIECE] for start in range(0, raw.nbytes, PIECE)]
    digests = _side_by_side([lambda p=p: hashlib.sha256(p.data).digest() for p in pieces])  # type: ignore[misc]
    return hashlib.sha256(header + b"in pieces:" + b"".join(digests)).hexdigest()


def row_major(x: Array) -> Array:
    """The same values at ascending addresses, last axis fastest; `x` itself if it is like that.

    A transposed array is copied in strips: going along its rows one by one would touch a new cache line per element.
    """
    if x.flags.c_contiguous:
        return x
    if x.nbytes <= PIECE or x.ndim < 2 or abs(x.strides[-1]) <= x.itemsize:
        return np.ascontiguousarray(x).reshape(x.shape)
    out = np.empty(x.shape, x.dtype)
    size = x.shape[-1]
    step = max(_STRIP, -(-size * PIECE // x.nbytes) // _STRIP * _STRIP)

    def copy(start: int) -> None:
        for at in range(start, min(start + step, size), _STRIP):
            out[..., at : at + _STRIP] = x[..., at : at + _STRIP]

    _side_by_side([lambda s=s: copy(s) for s in range(0, size, step)])  # type: ignore[misc]
    return out


def in_strips(rows: int, num_bytes: int, work: Callable[[int, int], None]) -> None:
    """`work(first, end)` for strips of rows that make up all of them; several at once where there is enough to do."""
    count = min(rows, -(-num_bytes // STRIP_BYTES), _MAX_THREADS)
    edges = [rows * k // max(count, 1) for k in range(count + 1)]
    _side_by_side([lambda a=a, b=b: work(a, b) for a, b in itertools.pairwise(edges)])  # type: ignore[misc]


def _side_by_side(jobs: Sequence[Callable[[], T]]) -> list[T]:
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(jobs))
    if threads < 2:
        return [job() for job in jobs]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda job: job(), jobs))
