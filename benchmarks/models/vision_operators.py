"""The operators of torchvision in Python, where its library was built for another torch than the one that is there.

PyPI has torchvision's library for torch's CUDA builds alone; beside a CPU build it does not load, and without its
operators `import torchvision` fails. Models that call none of them run all the same; detectors call `nms` and
`roi_align`, which are slower here than torchvision's own, for whoever runs them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_NMS = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_ALIGN = (
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
    " int sampling_ratio, bool aligned) -> Tensor"
)
_QUANTISED = "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[torch.library.Library] = []


def provide() -> str:
    """Make torchvision importable; says what stands in for its library: empty where that loads.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision is not installed")
    if _kept:
        return "nms and roi_align in Python"
    library = Path(spec.origin).parent / "_C.so"
    try:
        torch.ops.load_library(str(library))
    except OSError:
        pass
    else:
        return ""
    own = torch.library.Library("torchvision", "DEF")
    for schema in (_NMS, _QUANTISED, _ALIGN):
        own.define(schema)
    own.impl("nms", nms, "CPU")
    _kept.append(own)
    import torchvision
    from torchvision.ops.roi_align import _roi_align

    extension: Any = torchvision.extension
    extension._has_ops = lambda: True
    align: Callable[..., torch.Tensor] = _roi_align
    own.impl("roi_align", align, "CPU")
    torch.library.register_fake("torchvision::roi_align", _aligned, lib=own)
    return "nms and roi_align in Python"


def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Positions of the boxes that are kept, best first: none overlaps a better one that is kept by more than that.

    Shapes: `dets` (n, 4) as corners x1, y1, x2, y2, `scores` (n); the result is int64 (m), m <= n.
    """
    order = scores.argsort(stable=True, descending=True)
    boxes = dets[order]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    over = shared / (areas[:, None] + areas[None] - shared) > iou_threshold
    gone = torch.zeros(len(boxes), dtype=torch.bool)
    for i in range(len(boxes)):
        if not gone[i]:
            gone[i + 1 :] |= over[i, i + 1 :]
    return order[~gone]


def _aligned(
    input: torch.Tensor, rois: torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int,
    sampling_ratio: int, aligned: bool,
) -> torch.Tensor:  # fmt: skip
    """The shape of `roi_align`."""
    del spatial_scale, sampling_ratio, aligned
    return input.new_empty((rois.size(0), input.size(1), pooled_height, pooled_width))
