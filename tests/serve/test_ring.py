"""Slots of shared memory, used in turn by two processes."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from tests.serve.fakes import signature

from weft.serve.layout import ALIGNMENT, bytes_of, places
from weft.serve.ring import Ring, slot_bytes


def test_both_ends_see_the_same_memory() -> None:
    there = signature()
    ring, fd = Ring.made(there, 3)
    try:
        other = Ring(there, 3, fd)
    finally:
        os.close(fd)
    for number in range(1, 10):
        assert ring.claim() == number
        for plan, rows in enumerate(there.sizes):
            for i, place in enumerate(ring.inputs(number, plan)):
                place[...] = number + i
            for i, place in enumerate(other.inputs(number, plan)):
                assert len(place) == rows and (place == number + i).all()
            other.outputs(number, plan)[0][...] = -number
            assert (ring.outputs(number, plan)[0] == -number).all()
        assert not ring.marked(number)
        other.mark(number)
        assert ring.marked(number)
        ring.release(number)


@pytest.mark.parametrize("seed", range(20))
def test_slots_under_way_are_never_the_same(seed: int) -> None:
    chance = random.Random(seed)
    slots = chance.randint(1, 5)
    ring, fd = Ring.made(signature(), slots)
    os.close(fd)
    under_way: list[int] = []
    for _ in range(200):
        if chance.random() < 0.5:
            if len(under_way) == slots:
                with pytest.raises(IndexError):
                    ring.claim()
                continue
            number = ring.claim()
            ring.inputs(number, 0)[0][...] = number
            under_way.append(number)
        elif under_way:
            if len(under_way) > 1:
                with pytest.raises(ValueError):
                    ring.release(under_way[-1])
            ring.release(under_way.pop(0))
        assert ring.used == len(under_way)
        assert all((ring.inputs(n, 0)[0] == n).all() for n in under_way)


def test_tensors_are_aligned_and_apart() -> None:
    there = signature()
    buffer = bytearray(bytes_of(there, 4))
    inputs, outputs = places(there, 4, memoryview(buffer))
    begins = [x.__array_interface__["data"][0] for x in (*inputs, *outputs)]
    assert all((b - begins[0]) % ALIGNMENT == 0 for b in begins)
    for i, x in enumerate((*inputs, *outputs)):
        x[...] = i
    assert all((x == i).all() for i, x in enumerate((*inputs, *outputs)))
    assert slot_bytes(there) >= bytes_of(there, 8) + ALIGNMENT
    assert np.frombuffer(buffer, np.float32, 1)[0] == 0
