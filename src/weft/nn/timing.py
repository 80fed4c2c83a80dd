"""Torch's current stream, and how kernels are compared and timed before they are used."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from weft.device.cuda.api import call, driver_api

LAUNCHES = 4
"""That `least` times together."""
_TRIALS = 3
_thread = threading.local()


def make_current(device: torch.device) -> None:
    """A thread on which nothing ran on the device yet, as those of backward passes may be, gets its context."""
    if getattr(_thread, "device", None) == device:
        return
    _thread.device = device
    if not int(call(driver_api().cuCtxGetCurrent)):
        torch.cuda.mem_get_info(device)


class _Replays:
    """How often recorded steps were replayed, which changes tensors without new versions."""

    count = 0


def replays() -> int:
    """How often recorded steps were replayed."""
    return _Replays.count


def replayed() -> None:
    """A step was."""
    _Replays.count += 1


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream() -> int:
    """Handle of torch's current stream."""
    if _raw_stream is not None:  # without an object for it
        return int(_raw_stream(torch.cuda.current_device()))
    return int(torch.cuda.current_stream().cuda_stream)


def on_gpu(x: torch.Tensor) -> bool:
    """Whether kernels could read it."""
    return x.device.type == "cuda"


def normal_like(x: torch.Tensor) -> torch.Tensor:
    """Random numbers that are the same each time and leave torch's own generator alone."""
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float32).to(x.dtype)


def near(found: torch.Tensor, wanted: torch.Tensor, share: float) -> bool:
    """Whether the difference has at most that share of the norm, or there is nothing to compare with."""
    size = float(wanted.float().norm())
    return not math.isfinite(size) or float((found.float() - wanted.float()).norm()) <= share * size + 1e-30


def least(call: Callable[[], object]) -> float:
    """The shortest time of a few rounds."""
    call()
    best = math.inf
    for _ in range(_TRIALS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(LAUNCHES):
            call()
        end.record()
        end.synchronize()
        best = min(best, float(start.elapsed_time(end)))
    return best
