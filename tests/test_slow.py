from __future__ import annotations

import pytest
from tests.slow import asked, few


@pytest.mark.parametrize(("number", "count", "quick"), [(10, 3, [0, 3, 6]), (2, 1, [0]), (5, 4, [0, 1, 2, 3])])
def test_some_are_for_the_quick_run_and_none_is_lost(number: int, count: int, quick: list[int]) -> None:
    found = few(range(number), count)
    assert [x for x in found if isinstance(x, int)] == quick
    slow = [x for x in found if not isinstance(x, int)]
    assert all([m.name for m in x.marks] == ["slow"] for x in slow)
    assert sorted(quick + [x.values[0] for x in slow]) == list(range(number))


def test_tuples_are_values_of_several_parameters() -> None:
    kept, left = few([("a", 1), ("b", 2)], 1, unpack=True)
    assert kept == ("a", 1) and left.values == ("b", 2)
    assert few([("a", 1), ("b", 2)], 1)[1].values == (("b", 2),)


@pytest.mark.parametrize("count", [0, 3, 4])
def test_a_count_that_leaves_nothing_out_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} of 3"):
        few("abc", count)


VALUES = {"a": 1, "b": 2, "c": 3, "d": 4}


@pytest.fixture(scope="module")
def held(request: pytest.FixtureRequest) -> list[int]:
    return asked(request, VALUES, "d")


@pytest.mark.parametrize("name", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_what_a_file_shares_holds_what_its_selected_tests_ask_for(
    name: str, held: list[int], request: pytest.FixtureRequest
) -> None:
    assert VALUES[name] in held and VALUES["d"] in held and VALUES["c"] not in held
    here = {x.name.partition("[")[2] for x in request.session.items if x.path == request.path}
    assert (VALUES["b"] in held) is ("b]" in here)
