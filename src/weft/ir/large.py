"""Hashing and laying out arrays of hundreds of megabytes: weights, which every compilation looks at.

Both are done in pieces by a few threads; NumPy and hashlib let go of the interpreter's lock while they work.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from weft.ir.types import Array

T = TypeVar("T")
PIECE = 8 << 20
"""Bytes that are hashed, or copied, as one."""
STRIP_BYTES = 1 << 20
"""Of results: what one thread does as one."""
_STRIP = 32
"""Elements of a row that a transposing copy writes at once: two cache lines of f32."""
_SMALL = 1 << 16
"""Bytes for which no other thread pays."""
_MAX_THREADS = 8


def hash_bytes(header: bytes, data: Array) -> str:
    """SHA-256 (hex) of a header and an array's row-major bytes.

    Above `PIECE` it is that of the header, a mark and the SHA-256 of each piece in order, so that pieces can be hashed
    side by side.
    """
    return hash_all([(header, data)])[0]


def hash_all(items: Sequence[tuple[bytes, Array]]) -> list[str]:
    """`hash_bytes` of many headers and arrays, those that are not small side by side."""
    found: list[list[bytes]] = [[b""] * max(1, -(-x.nbytes // PIECE)) for _, x in items]
    jobs: list[Callable[[], None]] = []
    for digests, (header, data) in zip(found, items, strict=True):
        raw = row_major(data).reshape(-1).view(np.uint8)
        for k in range(len(digests)):
            piece = raw[k * PIECE : (k + 1) * PIECE]
            job = partial(_hash_piece, digests, k, header if len(digests) == 1 else b"", piece)
            jobs.append(job) if piece.nbytes > _SMALL else job()
    _side_by_side(jobs)
    return [_joined(digests, header) for digests, (header, _) in zip(found, items, strict=True)]


def _joined(digests: Sequence[bytes], header: bytes) -> str:
    if len(digests) == 1:
        return digests[0].hex()
    return hashlib.sha256(header + b"in pieces:" + b"".join(digests)).hexdigest()


def _hash_piece(digests: list[bytes], k: int, header: bytes, piece: Array) -> None:
    state = hashlib.sha256(header)
    state.update(piece.data)
    digests[k] = state.digest()


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


@dataclass(frozen=True, slots=True)
class InStrips:
    """Work over rows that may be done strip by strip."""

    rows: int
    num_bytes: int
    """Of its results."""
    work: Callable[[int, int], None]
    """Of (first, end)."""


def in_strips(parts: Sequence[InStrips]) -> None:
    """All parts, in strips that make up all of their rows; several at once where there is enough to do."""
    jobs: list[Callable[[], None]] = []
    for part in parts:
        count = min(part.rows, -(-part.num_bytes // STRIP_BYTES))
        edges = [part.rows * k // max(count, 1) for k in range(count + 1)]
        jobs += [partial(part.work, a, b) for a, b in itertools.pairwise(edges)]
    _side_by_side(jobs)


def _side_by_side(jobs: Sequence[Callable[[], T]]) -> list[T]:
    # the system is asked only where it matters: every constant of a graph is hashed
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(jobs)) if len(jobs) > 1 else 1
    if threads < 2:
        return [job() for job in jobs]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda job: job(), jobs))
