"""Records as JSON values and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest

from weft.errors import ArtifactError
from weft.kernels.codec import Json
from weft.kernels.dataclass_json import LEFT_OUT, from_json, to_json


@dataclass(frozen=True)
class Part:
    """A record in a record."""

    name: str
    cost: float


@dataclass(frozen=True)
class Whole:
    """Every kind of field that records have."""

    count: int
    exact: bool
    parts: tuple[Part, ...]
    pair: tuple[str, int]
    maybe: Part | None
    ratio: float


WHOLE = Whole(3, True, (Part("a", 1.5), Part("b", math.inf)), ("x", 2), None, 2.0)


def through_text(record: object) -> Json:
    """What is read after it was written as JSON."""
    found: Json = json.loads(json.dumps(to_json(record), allow_nan=False))
    return found


def test_a_record_comes_back_from_json_text_as_it_was() -> None:
    assert from_json(Whole, through_text(WHOLE)) == WHOLE


@dataclass(frozen=True)
class Grown:
    """A record with a field that came later."""

    name: str
    later: str = field(default="", metadata=LEFT_OUT)


def test_a_field_that_came_later_stands_there_only_where_it_is_told() -> None:
    assert through_text(Grown("a")) == {"name": "a"} and from_json(Grown, {"name": "a"}) == Grown("a")
    assert from_json(Grown, through_text(Grown("a", "b"))) == Grown("a", "b")
    for bad in ({}, {"later": "b"}, {"name": "a", "other": "b"}, {"name": "a", "later": 3}):
        with pytest.raises(ArtifactError, match="malformed Grown"):
            from_json(Grown, bad)  # type: ignore[arg-type]


def test_numbers_that_json_lacks_come_back() -> None:
    found = from_json(Part, through_text(Part("n", math.nan)))
    assert math.isnan(found.cost)
    assert from_json(Part, through_text(Part("m", -math.inf))).cost == -math.inf


def test_a_whole_number_is_taken_for_a_float_and_becomes_one() -> None:
    cost = from_json(Part, {"name": "a", "cost": 2}).cost
    assert isinstance(cost, float)
    assert cost == 2.0


@pytest.mark.parametrize(
    "change",
    [
        {"count": "3"},
        {"exact": None},
        {"parts": {"name": "a", "cost": 1.0}},
        {"parts": [[1.0]]},
        {"parts": [{"name": "a"}]},
        {"parts": [{"name": "a", "cost": 1.0, "more": 1}]},
        {"pair": ["x"]},
        {"pair": ["x", 2, 3]},
        {"maybe": 7},
        {"ratio": "2.0"},
        {"ratio": {"float": "no number"}},
        {"unknown": 1},
    ],
)
def test_what_is_no_such_record_is_refused_by_name(change: dict[str, Json]) -> None:
    data = through_text(WHOLE)
    assert isinstance(data, dict)
    with pytest.raises(ArtifactError, match="malformed Whole"):
        from_json(Whole, {**data, **change})


@pytest.mark.parametrize("data", [None, 3, "text", [], [["count", 3]]])
def test_what_is_no_mapping_is_refused(data: Json) -> None:
    with pytest.raises(ArtifactError, match="malformed Whole"):
        from_json(Whole, data)
