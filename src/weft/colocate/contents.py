"""What the buffers of a pair hold before a run: what its test program draws, but for the last rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.colocate.side import Buffer
from weft.errors import ArtifactError

POISON = 0x5B
"""Every byte of what nobody fills."""
_AT_ONCE = 1 << 20
"""Numbers that are drawn together."""


def contents(b: Buffer) -> bytes:
    """Bytes of a buffer. A number of each element is drawn from its position and the seed alone (SplitMix64).

    Raises:
        ArtifactError: its file cannot be read, or has another size [W401].
    """
    if b.init in ("poison", "zeros"):
        return bytes([POISON if b.init == "poison" else 0]) * b.nbytes
    if b.init == "file":
        assert b.file is not None  # the reader has looked
        try:
            found = b.file.read_bytes()
        except OSError as error:
            raise ArtifactError(where=b.name, problem=f"its file: {error.strerror}", remedy="put it back") from None
        if len(found) != b.nbytes:
            problem = f"its file has {len(found)} bytes, not {b.nbytes}"
            raise ArtifactError(where=b.name, problem=problem, remedy="put it back")
        return found
    size = 2 if b.scalar == "bf" else int(b.scalar[1:])
    count = b.nbytes // size
    parts = [_numbers(b, first, min(_AT_ONCE, count - first)) for first in range(0, count, _AT_ONCE)]
    return b"".join(parts).ljust(b.nbytes, b"\0")


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    found: NDArray[np.uint64] = x ^ x >> np.uint64(31)
    return found


def uniform(seed: int, at: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers from 0 to below 1 by their positions."""
    start = _mixed(np.array([seed], np.uint64))
    found: NDArray[np.float64] = (_mixed(start + at) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def _numbers(b: Buffer, first: int, count: int) -> bytes:
    at = np.arange(first, first + count, dtype=np.uint64)
    x: NDArray[Any]
    if b.init == "arange":
        x = at.astype(np.float64)
    elif b.init == "uniform":
        x = b.low + (b.high - b.low) * uniform(b.seed, at)
        x = x if b.scalar[0] in "fb" else np.floor(x)
    else:  # Box and Muller
        two = np.uint64(2) * at
        x = np.sqrt(-2.0 * np.log(1.0 - uniform(b.seed, two)))
        x = x * np.cos(6.283185307179586 * uniform(b.seed, two + np.uint64(1)))
    if b.scalar == "bf":
        bits = x.astype("<f4").view("<u4")
        bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return bytes((bits >> np.uint32(16)).astype("<u2").tobytes())
    kind = np.dtype(f"<{b.scalar}")
    if kind.kind == "f":
        return bytes(x.astype(kind).tobytes())
    size = np.abs(x).astype(np.uint64)
    return bytes(np.where(x < 0, ~size + np.uint64(1), size).astype(kind).tobytes())
