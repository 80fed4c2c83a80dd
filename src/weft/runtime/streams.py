"""Streams that Weft works on: lent to whoever records on them, and lent again when that is gone.

The framework keeps a workspace for products (33 MB on Hopper) per stream that ever ran one, until the process ends,
and a recorded graph writes to the one of the stream that it was recorded on. So all plans of a compilation, which run
one after another, share a few streams; the one that is kept takes them along; and streams that came back go first.
A workspace that is taken where large tensors have just been freed keeps all their memory from the device for good: the
framework's segments go back as a whole. A training step's are taken before it (`take_workspaces`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import final

import torch

_LOCK = threading.Lock()
_FREE: dict[torch.device, list[torch.cuda.Stream]] = {}


@final
class Lease:
    """Streams of one device, given back when nobody holds this any longer.

    Graphs that were recorded on them share a workspace: only one of those at a time may run.
    """

    def __init__(self, device: torch.device, given: Sequence[torch.cuda.Stream] = ()) -> None:
        """`given`: streams of the caller's, such as those of a priority or of a part of the GPU, which go first."""
        self._device = device
        self._given = list(given)
        self._streams: list[torch.cuda.Stream] = []
        weakref.finalize(self, _take_back, device, self._streams).atexit = False

    def streams(self, count: int) -> list[torch.cuda.Stream]:
        """The first `count` of them; the same every time."""
        if count <= len(self._given):
            return self._given[:count]
        count -= len(self._given)
        with _LOCK:
            free = _FREE.setdefault(self._device, [])
            while len(self._streams) < count:
                if free:
                    stream = free.pop()
                    # a graph of the one before may still be running, wherever it was launched
                    torch.cuda.synchronize(self._device)
                else:
                    stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                self._streams.append(stream)
            return [*self._given, *self._streams[:count]]


_TAKEN: set[tuple[int, int]] = set()
"""Devices and streams; the framework has some dozens of streams of a device."""


def take_workspaces(device: torch.device) -> None:
    """Have the framework take its workspaces for products on the current stream, this thread's and autograd's.

    Once for a stream, by a product and its gradients of a few numbers; nothing while a graph is recorded.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    stream = torch.cuda.current_stream(device)
    key = stream.device_index, stream.cuda_stream
    if key in _TAKEN:
        return
    _TAKEN.add(key)
    torch.cuda.empty_cache()  # or they lie in what is free of larger segments
    with torch.inference_mode(mode=False), torch.enable_grad():
        x = torch.zeros((8, 8), device=device, requires_grad=True)
        torch.autograd.grad((x @ x).sum(), x)  # the framework's own thread, which has a workspace of its own


def _take_back(device: torch.device, streams: list[torch.cuda.Stream]) -> None:
    _FREE.setdefault(device, []).extend(reversed(streams))  # no lock: it may be called anywhere, and this is one step
