"""The search for cyclic garbage is put off, and nothing of that is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from weft.pipeline.collector import put_off


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


class Ring:
    """Garbage that only a search finds."""

    def __init__(self) -> None:
        self.me = self


def searches() -> int:
    """How many there were so far."""
    return sum(generation["collections"] for generation in gc.get_stats())


def test_no_search_inside_and_one_at_the_end() -> None:
    gc.collect()
    with put_off():
        before = searches()
        rings = [weakref.ref(Ring()) for _ in range(5_000)]
        assert searches() == before
        assert all(ring() is not None for ring in rings)
    assert gc.isenabled()
    assert all(ring() is None for ring in rings)


def test_an_error_switches_the_search_on_again() -> None:
    with pytest.raises(KeyError), put_off():
        raise KeyError
    assert gc.isenabled()


def test_who_switched_it_off_finds_it_off() -> None:
    gc.disable()
    before = searches()
    with put_off():
        assert not gc.isenabled()
    assert not gc.isenabled()
    assert searches() == before


def test_nested_it_stays_off_until_the_outer_one_ends() -> None:
    with put_off():
        with put_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
