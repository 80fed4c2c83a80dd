"""Torch's current stream, and whole ways to compute something against each other."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Sequence

import torch

from weft.device.cuda.api import call, driver_api
from weft.tune.cuda_timing import CUDA_POLICY, time_rounds

_LAUNCHES = 4
"""That a sample of a way takes together."""
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


class _Way:
    """A way to compute something, as the rounds of `weft.tune.cuda_timing` sample it."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        run()

    def sample(self) -> float:
        """Microseconds of a call, the host's share of it included."""
        self._start.record()
        for _ in range(_LAUNCHES):
            self._run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3 / _LAUNCHES


def contest(ways: Sequence[Callable[[], object]]) -> list[float]:
    """Median microseconds of a call of each, in the interleaved rounds in which kernels are timed.

    Every kernel of a way was verified in a worker before: here it is told which way is the fastest on the current
    stream, with what the framework does in between.
    """
    found = time_rounds(
        dict(enumerate(map(_Way, ways))),
        policy=CUDA_POLICY,
        always=(),
        seed=0,
        before=lambda number: None,
        spent_us=lambda number, us: us * _LAUNCHES,
    )
    return [statistics.median(found[k]) for k in range(len(ways))]
