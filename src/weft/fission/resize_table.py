"""Where each output element of a resize reads, and with which weight: constant tables, computed once in f64.

The coordinate formulas are those of the ONNX Resize operator; two more follow PyTorch's f32 arithmetic for nearest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.ir.declined import Declined

COORDINATES = frozenset(
    {
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
        "tf_half_pixel_for_nn", "tf_crop_and_resize", "torch_nearest", "torch_nearest_exact",
    }
)  # fmt: skip
NEAREST = frozenset({"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"})


@dataclass(frozen=True)
class Axis:
    """One resized axis."""

    size: int
    """Elements before."""
    out: int
    """Elements after."""
    scale: float
    """out / size as the source states it; the formulas use this, not the quotient."""
    start: float = 0.0
    """First coordinate of the region of interest, in units of the axis (tf_crop_and_resize)."""
    end: float = 1.0


def coordinates(axis: Axis, mode: str) -> npt.NDArray[np.float64] | Declined:
    """Position in the input, in elements, that each output element stands for."""
    if mode not in COORDINATES:
        return Declined(f"resize with coordinates {mode!r}")
    i = np.arange(axis.out, dtype=np.float64)
    n, out, scale = axis.size, axis.out, axis.scale
    if mode in ("torch_nearest", "torch_nearest_exact"):
        shift = np.float32(0.5 if mode == "torch_nearest_exact" else 0.0)
        return ((i.astype(np.float32) + shift) * np.float32(1.0 / scale)).astype(np.float64)
    if mode == "asymmetric":
        return i / scale
    if mode == "align_corners":
        return i * (n - 1) / (out - 1) if out > 1 else i
    if mode == "tf_half_pixel_for_nn":
        return (i + 0.5) / scale
    if mode == "tf_crop_and_resize":
        if out > 1:
            return axis.start * (n - 1) + i * (axis.end - axis.start) * (n - 1) / (out - 1)
        return i + 0.5 * (axis.start + axis.end) * (n - 1)
    if mode == "pytorch_half_pixel" and out == 1:
        return i
    # symmetric: the middle stays the middle where scale·n is no integer; in this order, as floor sees the last bit
    offset = n / 2 * (1 - out / (scale * n)) if mode == "half_pixel_symmetric" else 0.0
    return offset + (i + 0.5) / scale - 0.5


def nearest(x: npt.NDArray[np.float64], size: int, mode: str) -> npt.NDArray[np.int64] | Declined:
    """Index of the one element that is read."""
    if mode not in NEAREST:
        return Declined(f"resize with nearest mode {mode!r}")
    rounded = {
        "round_prefer_floor": np.ceil(x - 0.5),
        "round_prefer_ceil": np.floor(x + 0.5),
        "floor": np.floor(x),
        "ceil": np.ceil(x),
    }[mode]
    return np.clip(rounded, 0, size - 1).astype(np.int64)


def taps(
    x: npt.NDArray[np.float64], axis: Axis, kind: str, *, cubic: float, antialias: bool, exclude_outside: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Indices and weights, both (out, taps); the weights of each output sum to 1.

    `kind` is "linear" or "cubic". With `antialias` the kernel is stretched by 1/scale when shrinking.
    """
    shrink = min(axis.scale, 1.0) if antialias else 1.0
    reach = 1 if kind == "linear" else 2
    start = math.floor(-reach / shrink) + 1
    offsets = np.arange(start, 2 - start)
    base = np.floor(x)
    at = base[:, None] + offsets[None, :]
    distance = np.abs(at - x[:, None]) * shrink
    weight = np.clip(1 - distance, 0, 1) if kind == "linear" else _cubic(distance, cubic)
    if exclude_outside:
        weight = np.where((at < 0) | (at > axis.size - 1), 0.0, weight)
    if exclude_outside or antialias:
        weight = weight / weight.sum(1, keepdims=True)
    return np.clip(at, 0, axis.size - 1).astype(np.int64), weight


def transposed(
    index: npt.NDArray[np.int64], weight: npt.NDArray[np.float64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """For each of `size` elements the outputs that read it, and their weights; both (size, most readers), then 0."""
    matrix = np.zeros((size, len(index)))
    np.add.at(matrix, (index, np.arange(len(index))[:, None]), weight)
    most = max(int((matrix != 0).sum(1).max()), 1)
    order = np.argsort(matrix == 0, axis=1, kind="stable")[:, :most]
    found = np.take_along_axis(matrix, order, 1)
    return np.where(found == 0, order[:, :1], order).astype(np.int64), found


def _cubic(d: npt.NDArray[np.float64], a: float) -> npt.NDArray[np.float64]:
    """Keys' kernel; R. G. Keys, Cubic convolution interpolation for digital image processing, 1981, equation 15."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))
