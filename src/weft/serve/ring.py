"""Tensors in memory that a front end and a worker both have: slots that are used in turn, one for each batch under way.

A slot has a head, in which the worker writes the number of the job whose outputs lie there: it is compared before they
are believed. A worker that was started again gets another ring: what a dying one still writes reaches nobody.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Self, final

import numpy as np

from weft.device.nameless import nameless
from weft.ir.types import Array
from weft.serve.layout import ALIGNMENT, bytes_of, places
from weft.serve.signature import Signature


@final
class Ring:
    """Job number n lies in slot n modulo the number of slots. Not thread-safe."""

    def __init__(self, signature: Signature, slots: int, fd: int) -> None:
        """`fd`: memory of `slots * slot_bytes(signature)` bytes, which stays the caller's to close."""
        size = slot_bytes(signature)
        self.slots = slots
        self._map = mmap.mmap(fd, slots * size)
        whole = memoryview(self._map)
        self._heads = [np.frombuffer(whole, np.uint64, 1, i * size) for i in range(slots)]
        self._places = [
            [places(signature, rows, whole[i * size + ALIGNMENT : (i + 1) * size]) for rows in signature.sizes]
            for i in range(slots)
        ]
        self._next = self._oldest = 1

    @property
    def place(self) -> tuple[int, int]:
        """Address and bytes of all of it."""
        whole = np.frombuffer(self._map, np.uint8)
        return int(whole.ctypes.data), len(whole)

    @property
    def used(self) -> int:
        """Slots with a job under way."""
        return self._next - self._oldest

    def claim(self) -> int:
        """The number of a new job; IndexError where every slot is used."""
        if self.used >= self.slots:
            raise IndexError("every slot is used")
        self._next += 1
        return self._next - 1

    def release(self, number: int) -> None:
        """The oldest job is done; ValueError for another one."""
        if number != self._oldest or not self.used:
            raise ValueError(f"job {number} is not the oldest one")
        self._oldest += 1

    def inputs(self, number: int, plan: int) -> Sequence[Array]:
        """Where the inputs of a job lie."""
        return self._places[number % self.slots][plan][0]

    def outputs(self, number: int, plan: int) -> Sequence[Array]:
        """Where its outputs lie."""
        return self._places[number % self.slots][plan][1]

    def mark(self, number: int) -> None:
        """The outputs of this job are there."""
        self._heads[number % self.slots][0] = number

    def marked(self, number: int) -> bool:
        """Whether they are."""
        return int(self._heads[number % self.slots][0]) == number

    @classmethod
    def made(cls, signature: Signature, slots: int) -> tuple[Self, int]:
        """A ring in new memory, and its file descriptor for the other process, the caller's to close."""
        fd = nameless(slots * slot_bytes(signature), "weft-ring")
        try:
            return cls(signature, slots, fd), fd
        except BaseException:
            os.close(fd)
            raise


def slot_bytes(signature: Signature) -> int:
    """Of one slot: its head, and the tensors of the largest plan."""
    size = ALIGNMENT + max(bytes_of(signature, rows) for rows in signature.sizes)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
