"""Strided views: how a value that is renamed, repeated or cut lies in the memory of its source."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.kernels.formats import Format


@dataclass(frozen=True, slots=True)
class View:
    """Element x of the value stands at `offset + sum(x[i] * strides[i])` (elements, not bytes)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def dense(shape: tuple[int, ...], format: Format = Format.ROW) -> View:
        """The whole of a dense tensor."""
        return View(shape, format.strides(shape))

    def transpose(self, perm: tuple[int, ...]) -> View:
        """out dimension i is dimension perm[i]."""
        return View(tuple(self.shape[p] for p in perm), tuple(self.strides[p] for p in perm), self.offset)

    def broadcast(self, shape: tuple[int, ...]) -> View:
        """Repeat to `shape` (aligned right): stride 0 along what repeats."""
        lead = len(shape) - len(self.shape)
        strides = [0] * lead
        for old, new, step in zip(self.shape, shape[lead:], self.strides, strict=True):
            strides.append(step if old == new else 0)
        return View(shape, tuple(strides), self.offset)

    def slice(self, starts: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...]) -> View:
        """out[i] = in[starts + i * steps]."""
        offset = self.offset + sum(a * b for a, b in zip(starts, self.strides, strict=True))
        return View(sizes, tuple(a * b for a, b in zip(self.strides, steps, strict=True)), offset)

    def reshape(self, shape: tuple[int, ...]) -> View | None:
        """Row-major reshape, or None where the elements have no constant strides in the new shape."""
        if math.prod(shape) != math.prod(self.shape):
            return None
        if 0 in shape:
            return View(shape, (0,) * len(shape), self.offset)
        # Runs of old dimensions that act as one: (size, stride of the fastest).
        runs: list[tuple[int, int]] = []
        for size, step in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if runs and runs[-1][1] == step * size:
                runs[-1] = (runs[-1][0] * size, step)
            else:
                runs.append((size, step))
        strides = [0] * len(shape)
        dim = len(shape) - 1
        for size, step in reversed(runs):
            covered = 1
            while covered < size:
                if dim < 0:
                    return None
                if shape[dim] != 1:
                    if size % (covered * shape[dim]):
                        return None
                    strides[dim] = step * covered
                    covered *= shape[dim]
                dim -= 1
        return View(shape, tuple(strides), self.offset)

    def is_identity(self) -> bool:
        """True for the row-major view of a whole tensor (dimensions of size 1 do not count)."""
        dense = Format.ROW.strides(self.shape)
        same = all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, dense, strict=True))
        return self.offset == 0 and same
