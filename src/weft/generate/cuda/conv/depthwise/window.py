"""What a tile of results reads of one spatial axis of a depthwise convolution, plain or transposed."""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.cuda.gemm.common.product import Product


@dataclass(frozen=True, slots=True)
class Window:
    """The field of a tile: elements of the image from the first to the last that some result of it reads.

    Which taps join an element and a result is the same for all tiles, so that no result is a sum over zeros that lie
    between the elements of a transposed convolution: its tiles are whole steps of the stride.
    """

    count: int
    """Elements of the field."""
    step: int
    """From a tile's first element to the next tile's."""
    before: int
    """Elements in front of the image that the first tile's field begins with; negative: it begins within."""
    taps: tuple[tuple[tuple[int, int], ...], ...]
    """By element: (result of the tile, tap)."""
    size: int
    """Of the image; 0: every element of a field is in it, or as far as the last result's."""

    def always(self, at: int, tiles: int) -> bool:
        """Whether element `at` of the field of each of so many tiles is in the image."""
        first = at - self.before
        return first >= 0 and (tiles - 1) * self.step + first < self.size


def fits(p: Product, axis: int, tile: int) -> bool:
    """Whether tiles of so many results are all alike."""
    return p.c.spread is None or tile % p.c.spread.strides[axis] == 0


def window(p: Product, axis: int, tile: int) -> Window:
    """Of the rows (0) or columns (1) of a tile of so many results."""
    c = p.c
    taps, dilation = c.kernel[axis], c.dilations[axis]
    if c.spread is None:
        stride = c.strides[axis]
        read = {(r * stride + t * dilation, r, t) for r in range(tile) for t in range(taps)}
        count = (tile - 1) * stride + (taps - 1) * dilation + 1
        border = p.borders[axis] if p.borders is not None else None
        return Window(count, tile * stride, border.lo if border else 0, _by(read, count), border.size if border else 0)
    stride, pad = c.spread.strides[axis], c.spread.pads[axis]
    met = [(r + pad - t * dilation, r, t) for r in range(tile) for t in range(taps)]
    read = {(place // stride, r, t) for place, r, t in met if place % stride == 0}
    first, last = min(x for x, _, _ in read), max(x for x, _, _ in read)
    count = last - first + 1
    moved = {(x - first, r, t) for x, r, t in read}
    return Window(count, tile // stride, -first, _by(moved, count), c.spread.sizes[axis])


def _by(read: set[tuple[int, int, int]], count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(tuple(sorted((r, t) for x, r, t in read if x == at)) for at in range(count))
