"""Inputs and results of a network in memory that two processes share: slots used in turn, and counts of each side.

The worker fills slots of inputs and writes results to files; the job takes inputs, and puts results into slots of
theirs. Inference n, counted from where the run began, lies in slot n modulo the number of slots on both sides. One
process writes each word, in whole words, and reads those of the other: no lock, so neither ever waits for the other.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from weft.colocate.inference_files import Array, TensorSpec
from weft.device.nameless import read_text, write_text

LEAST_SLOTS, MOST_SLOTS, MOST_BYTES = 3, 16, 128 << 20
"""Inferences whose inputs are read ahead, and whose results wait to be written: as many as these bytes hold."""
READING, WRITING = 1, 2
"""What failed."""
HEAD = 8192
_SAID = 4096
"""Where the text of a failure lies."""
_WORDS = ("filled", "released", "put", "written", "failed", "stop")


@final
class Ring:
    """Both sides' view. `released`, `put` and `stop` are the job's words, the others the worker's."""

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], fd: int) -> None:
        """`fd`: memory of `ring_bytes` bytes, which stays the caller's to close. `outputs`: empty: they are dropped."""
        self.slots = slots = slots_of(inputs, outputs)
        self._map = mmap.mmap(fd, ring_bytes(inputs, outputs))
        whole = memoryview(self._map)
        self._words = np.frombuffer(whole, np.int64, len(_WORDS), 0)
        self._whole = np.frombuffer(whole, np.uint8)
        self._inputs = [_views(whole, inputs, HEAD + i * _slot(inputs)) for i in range(slots + 1)]
        behind = HEAD + (slots + 1) * _slot(inputs)
        self._outputs = [_views(whole, outputs, behind + i * _slot(outputs)) for i in range(slots + 1)]

    @property
    def place(self) -> tuple[int, int]:
        """Address and bytes of all of it."""
        return int(self._whole.ctypes.data), len(self._whole)

    def word(self, name: str) -> int:
        """As it stands now."""
        return int(self._words[_WORDS.index(name)])

    def say(self, name: str, value: int) -> None:
        """Write a word of one's own."""
        self._words[_WORDS.index(name)] = value

    def inputs(self, number: int) -> Sequence[Array]:
        """Of an inference; -1: the place that no inference has, for measuring."""
        return self._inputs[number % self.slots if number >= 0 else self.slots]

    def outputs(self, number: int) -> Sequence[Array]:
        """See `inputs`."""
        return self._outputs[number % self.slots if number >= 0 else self.slots]

    def fail(self, kind: int, text: str) -> None:
        """The worker tells that inputs cannot be read (`READING`), or results not be written (`WRITING`)."""
        write_text(self._whole, _SAID, HEAD - _SAID, text)
        self.say("failed", kind)

    @property
    def failure(self) -> str:
        """What it was; empty: nothing failed."""
        if not self.word("failed"):
            return ""
        return read_text(self._whole, _SAID, HEAD - _SAID)


def slots_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    """How many inferences are on their way at once."""
    return max(LEAST_SLOTS, min(MOST_SLOTS, MOST_BYTES // (_slot(inputs) + _slot(outputs))))


def ring_bytes(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    """Of all slots, one more for measuring, and the words in front of them."""
    return HEAD + (slots_of(inputs, outputs) + 1) * (_slot(inputs) + _slot(outputs))


def _aligned(size: int) -> int:
    return -(-max(size, 1) // 256) * 256


def _slot(tensors: Sequence[TensorSpec]) -> int:
    return max(1, -(-sum(_aligned(x.nbytes) for x in tensors) // mmap.PAGESIZE)) * mmap.PAGESIZE


def _views(whole: memoryview, tensors: Sequence[TensorSpec], begin: int) -> list[Array]:
    found: list[Array] = []
    for x in tensors:
        count = x.nbytes // np.dtype(x.dtype).itemsize
        view: np.ndarray[Any, Any] = np.frombuffer(whole, x.dtype, count, begin)
        found.append(view.reshape(x.shape))
        begin += _aligned(x.nbytes)
    return found
