"""Constants of the cost models by device: what is shipped can be, and what cannot be is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from weft.costmodel.profile import CostProfile, choose, costs_of, from_json, instead, load, profiles
from weft.costmodel.tiles import Sizes, TileCost, TileShape
from weft.device.cuda.facts import PROFILES, GpuFacts, profile
from weft.errors import ArtifactError
from weft.ir.types import DType

FILE = Path(__file__).parents[2] / "src/weft/costmodel/profiles/nvidia-h200.json"
SECTIONS = [f.name for f in fields(CostProfile) if f.name not in ("device", "names", "capability", "sources")]


def numbers(value: Any) -> Iterator[float]:
    """All constants of a section."""
    if is_dataclass(value):
        value = [getattr(value, f.name) for f in fields(value)]
    elif isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for x in value:
            yield from numbers(x)
    else:
        yield value


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", sorted(profiles()))
def test_what_is_shipped_is_positive_and_says_what_it_was_fitted_to(name: str, section: str) -> None:
    """Tables of costs may hold zeros; of what stands alone much is divided by."""
    costs = profiles()[name]
    value = getattr(costs, section)
    assert costs.sources[section] and list(numbers(value))
    alone = [getattr(value, f.name) for f in fields(value)]
    assert all(x > 0 for x in alone if isinstance(x, int | float))


@pytest.mark.parametrize("name", PROFILES)
def test_every_gpu_of_a_profile_has_constants(name: str) -> None:
    assert costs_of(profile(name)) is profiles()["nvidia-h200"]


def test_constants_are_those_of_the_model_then_of_the_newest_generation_that_is_not_newer() -> None:
    h200 = profiles()["nvidia-h200"]
    ampere = replace(h200, device="NVIDIA A100", names=("a100",), capability=80)
    blackwell = replace(h200, device="NVIDIA B200", names=("b200", "gb200"), capability=100)
    known = {"nvidia-b200": blackwell, "nvidia-a100": ampere, "nvidia-h200": h200}
    for name, capability, expected in (
        ("NVIDIA H200", 90, h200), ("NVIDIA H100 80GB HBM3", 90, h200), ("NVIDIA A100-SXM4-80GB", 80, ampere),
        ("NVIDIA GeForce RTX 4090", 89, ampere), ("NVIDIA GB200", 100, blackwell), ("Tomorrow", 130, blackwell),
        ("Tesla V100", 70, ampere),
    ):  # fmt: skip
        assert choose(known, name, capability) is expected, name


def test_a_model_asks_the_profile_each_time() -> None:
    facts, tile = GpuFacts(), TileShape(64, 64, 64, 64, 64, group=True)
    product = Sizes(DType.F16, 784, 256, 1152, 1, "taps", "packed", 0, 8, 1, 2, 0, 2)
    now = costs_of(facts)
    before = TileCost(product, tile, facts, 1).cycles(1, cluster=False)
    with instead(replace(now, tiles=replace(now.tiles, end=now.tiles.end + 1000.0))):
        assert TileCost(product, tile, facts, 1).cycles(1, cluster=False) == pytest.approx(before + 1000.0)
    assert costs_of(facts) is now and TileCost(product, tile, facts, 1).cycles(1, cluster=False) == before


def missing(data: dict[str, Any]) -> None:
    del data["tiles"]["start"]


def unknown(data: dict[str, Any]) -> None:
    data["halo"]["colour"] = 1.0


def no_section(data: dict[str, Any]) -> None:
    del data["tma"]


def text(data: dict[str, Any]) -> None:
    data["tiles"]["start"] = "90"


def negative(data: dict[str, Any]) -> None:
    data["tma"]["port"] = -1.0


def truth(data: dict[str, Any]) -> None:
    data["tma"]["port"] = True


def fraction(data: dict[str, Any]) -> None:
    data["tma"]["cluster_registers"] = 1.5


def other_kind(data: dict[str, Any]) -> None:
    del data["tiles"]["rate"]["simt"]


def no_number(data: dict[str, Any]) -> None:
    data["tma"]["clustered"]["two"] = 1.0


def no_table(data: dict[str, Any]) -> None:
    data["tma"]["multicast"] = 1.0


def no_names(data: dict[str, Any]) -> None:
    data["names"] = []


def no_source(data: dict[str, Any]) -> None:
    del data["sources"]["halo"]


def newer(data: dict[str, Any]) -> None:
    data["schema"] = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing, r"tiles: start is missing"), (unknown, r"halo: colour is not known"),
        (no_section, r"the file: tma is missing"), (text, r"tiles\.start: '90' is no number"),
        (negative, r"tma\.port: -1\.0 is no number of at least 0"), (truth, r"tma\.port: True is no number"),
        (fraction, r"tma\.cluster_registers: 1\.5 is no whole number"), (other_kind, r"tiles\.rate: wanted are group"),
        (no_number, r"tma\.clustered: 'two' is no whole number"), (no_table, r"tma\.multicast: 1\.0 is no table"),
        (no_names, r"names: \[\] is no list"), (no_source, r"sources of other sections"), (newer, r"schema 2, not 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = copy.deepcopy(json.loads(FILE.read_text()))
    change(data)
    with pytest.raises(ArtifactError, match=message) as error:
        from_json(json.dumps(data), "mine.json")
    assert str(error.value).startswith("mine.json: ") and "install Weft again" in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"schema": 1}', "NaN", "[" * 10000])
def test_what_is_no_profile_is_refused(content: str) -> None:
    with pytest.raises(ArtifactError, match="malformed profile"):
        from_json(content, "mine.json")


def test_numbers_that_are_not_finite_are_refused() -> None:
    data = json.loads(FILE.read_text())
    data["tma"]["port"] = float("inf")
    with pytest.raises(ArtifactError, match=r"tma\.port: inf"):
        from_json(json.dumps(data), "mine.json")


def test_a_folder_without_profiles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(ArtifactError, match="no profile"):
        load(tmp_path)
    (tmp_path / "nvidia-h200.json").write_text(FILE.read_text())
    assert list(load(tmp_path)) == ["nvidia-h200"]
