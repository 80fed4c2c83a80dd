"""Equal kernels and layers: what is shown once stands for what it says, and nothing is lost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.records import make_record

from weft.kernels.record import CompileRecord
from weft.report.data import page_data
from weft.report.folding import LONGEST, Repeat, equal, key_of, repeats, shown_once


def test_layers_are_found_with_what_stands_around_them() -> None:
    assert repeats("s" + "abcab" * 5 + "x") == [Repeat(1, 5, 5)]
    assert repeats("aab" * 4) == [Repeat(0, 3, 4)], "the whole layer, not the two equal kernels in it"
    assert repeats("aaaa") == [Repeat(0, 1, 4)], "of equal cover the shorter period"
    assert repeats("abcd") == [] == repeats("")
    assert repeats("xyxyabab") == [Repeat(0, 2, 2), Repeat(4, 2, 2)]
    long = [str(i) for i in range(LONGEST + 1)]
    assert repeats(long * 2) == [] and repeats(long[1:] * 2) == [Repeat(0, LONGEST, 2)]


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_what_stands_for_a_kernel_is_equal_to_it_and_stands_for_itself(keys: list[str]) -> None:
    stands = shown_once(keys)
    assert all(keys[i] == keys[k] and k <= i and stands[k] == k for i, k in enumerate(stands))
    found = repeats(keys)
    assert all(a.end <= b.start for a, b in itertools.pairwise(found))
    for r in found:
        one = keys[r.start : r.start + r.period]
        assert r.count >= 2 and keys[r.start : r.end] == one * r.count
        assert keys[r.end : r.end + r.period] != one, "none of the run is left out"
    first = equal(keys)
    assert all(keys[i] == keys[k] and keys.index(keys[i]) == k for i, k in enumerate(first))


def layered(stem: int, layer: int, count: int, head: int) -> CompileRecord:
    """A record in whose middle a layer of kernels repeats."""
    record = make_record(stem + layer * count + head)
    steps = [
        replace(s, schedule=f"tma({(s.position - stem) % layer})", runner_up="", runner_up_us=0.0)
        if stem <= s.position < stem + layer * count
        else s
        for s in record.steps
    ]
    return replace(record, steps=tuple(steps))


def test_a_key_holds_what_a_kernel_does_and_not_where() -> None:
    one, other, *_ = layered(0, 1, 3, 0).steps
    assert key_of(one) == key_of(other)
    assert key_of(one) != key_of(replace(other, outputs=("%9 1x8x16x16xf16 last",)))
    assert key_of(one) != key_of(replace(other, primitives=("mul",)))


def test_the_drawing_has_a_layer_once_and_all_its_kernels() -> None:
    data = page_data(layered(2, 3, 4, 1), 10_000)
    views = data["views"]
    assert isinstance(views, dict)
    folded = views["folded"]
    assert folded["ids"] == [0, 1, 2, 3, 4, 14]
    assert folded["members"] == [[0], [1], [2, 5, 8, 11], [3, 6, 9, 12], [4, 7, 10, 13], [14]]
    assert folded["in"][5] == [4, 3] or sorted(folded["in"][5]) == [3, 4], "the head reads the last layer"
    assert all(s < i for i, sources in enumerate(folded["in"]) for s in sources)
    assert data["equal"] == [0, 1, *([2, 3, 4] * 4), 14]


@pytest.mark.parametrize("kernels", [0, 1, 5])
def test_without_layers_there_is_no_such_drawing(kernels: int) -> None:
    views = page_data(make_record(kernels), 10_000)["views"]
    assert isinstance(views, dict) and "folded" not in views and "kernels" in views
