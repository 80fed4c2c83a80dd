"""Comparing large tensors in pieces that stay in a core's cache.

Whole-tensor expressions write every intermediate to memory and fork a thread team for each: a comparison of four
million elements took half a second that way, a hundred times what its loads need. Pieces of `CHUNK` elements are
below the size at which torch goes parallel, and their intermediates are reused at once. Every function here only
*accepts* quickly; a caller that is told "no" goes the long way, which also finds the words for the error.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import numpy as np
import torch

CHUNK = 1 << 14
"""Elements of a piece: 128 KiB of float64."""
DEVICE_CHUNK = 1 << 28
"""The same on a GPU, where a piece costs a launch and a wait."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


def same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Are two contiguous tensors equal byte for byte?"""
    size = x.numel() * x.element_size()
    if size != y.numel() * y.element_size():
        return False
    if not x.is_cpu:
        return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
    return size == 0 or _memcmp(x.data_ptr(), y.data_ptr(), size) == 0


def chunk_of(x: torch.Tensor) -> int:
    """Elements of a piece on the tensor's device."""
    return CHUNK if x.is_cpu else DEVICE_CHUNK


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of their addresses, shape (n,)."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def is_dense(x: torch.Tensor) -> bool:
    """Does every address between the first and the last element belong to exactly one element?"""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 1:
            continue  # its stride is never used
        if stride != expected:
            return False
        expected *= size
    return True


def aligned(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Do equal positions in memory order mean equal positions in the tensors?"""
    strides = ((g, w, n) for g, w, n in zip(got.stride(), want.stride(), got.shape, strict=True) if n > 1)
    return got.shape == want.shape and all(g == w for g, w, _ in strides) and is_dense(got)


def laid_out_like(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values with other strides; `x` itself if it has them."""
    if x.stride() == strides:
        return x
    out = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    return out.copy_(x)


def split(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements of a tensor in row-major pieces; what is no view of it row-major is copied first."""
    flat = x.reshape(-1)
    step = chunk_of(flat)
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    flat = [in_memory_order(t) for t in tensors]
    size, step = flat[0].numel(), chunk_of(flat[0])
    for start in range(0, size, step):
        yield tuple(t[start : start + step] for t in flat)


def equal_values(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Is every element equal? NaN equals nothing, as in torch. The tensors are `aligned`."""
    return all(torch.equal(g, w) for g, w in _pieces(got, want))


def error_norms(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float] | None:
    """RMSE and largest absolute error in float64; None where anything is not finite. The tensors are `aligned`."""
    buffer = torch.empty(min(chunk_of(got), got.numel()), dtype=torch.float64, device=got.device)
    square, largest = 0.0, 0.0
    for g, w in _pieces(got, want):
        error = torch.sub(g, w, out=buffer[: g.numel()]) if w.dtype == torch.float64 else g.double() - w.double()
        part = float(torch.linalg.vector_norm(error))  # a dot product would wake the thread team for every piece
        if not math.isfinite(part):
            return None
        square += part * part
        low, high = torch.aminmax(error)
        largest = max(largest, -float(low), float(high))
    return math.sqrt(square / max(got.numel(), 1)), largest


def classes(x: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 +Inf, 2 -Inf, 3 NaN per element (int8), with the strides of a dense `x`."""
    if not is_dense(x):
        return _classes(x)
    out = torch.empty_strided(x.shape, x.stride(), dtype=torch.int8, device=x.device)
    for piece, target in _pieces(x, out):
        if is_finite(piece):
            target.zero_()
        else:
            target.copy_(_classes(piece))
    return out


def is_finite(x: torch.Tensor) -> bool:
    """Is there neither NaN nor infinity in a piece of floats?"""
    if x.is_cpu and x.dtype in (torch.float32, torch.float64):
        return bool(np.isfinite(x.numpy()).all())  # one pass, where torch makes four
    return bool(torch.isfinite(x).all())


def _same_classes(got: torch.Tensor, want: torch.Tensor) -> bool:
    return not bool(want.any()) if is_finite(got) else torch.equal(_classes(got), want)


def same_classes(got: torch.Tensor, want: torch.Tensor, judged: torch.Tensor | None) -> bool:
    """Is every judged element of `got` of the class in `want` (int8)? All are `aligned`."""
    if judged is None:
        return all(_same_classes(g, w) for g, w in _pieces(got, want))
    return not any(bool(((_classes(g) != w) & j).any()) for g, w, j in _pieces(got, want, judged))


def _classes(x: torch.Tensor) -> torch.Tensor:
    if x.is_cpu and x.dtype in (torch.float32, torch.float64):
        values = x.numpy()
        found = np.zeros(values.shape, np.int8)
        at = np.nonzero(~np.isfinite(values))  # mostly few
        special = values[at]
        found[at] = np.where(np.isnan(special), 3, np.where(special > 0, 1, 2))
        return torch.from_numpy(found)
    out = torch.isnan(x).to(torch.int8) * 3
    inf = torch.isinf(x)
    return out + (inf & (x > 0)).to(torch.int8) + (inf & (x < 0)).to(torch.int8) * 2
