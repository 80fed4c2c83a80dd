"""Streams that Weft works on: lent to whoever records on them, and lent again when that is gone.

The framework keeps a workspace for products (33 MB on Hopper) per stream that ever ran one, until the process ends,
and a recorded graph writes to the one of the stream that it was recorded on. So all plans of a compilation, which run
one after another, share a few streams; the one that is kept takes them along; and streams that came back go first.
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


def _take_back(device: torch.device, streams: list[torch.cuda.Stream]) -> None:
    _FREE.setdefault(device, []).extend(reversed(streams))  # no lock: it may be called anywhere, and this is one step
