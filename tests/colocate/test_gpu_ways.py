"""Ways of sharing a GPU by their names."""

from __future__ import annotations

import pytest

from weft.colocate.gpu import MODES, MPS_MODES, PROCESS_MODES, Way, way_of
from weft.colocate.gpu_machine import WHOLE
from weft.errors import OptionError


@pytest.mark.parametrize("name", dict.fromkeys((*MODES, *PROCESS_MODES, *MPS_MODES)))
def test_a_way_has_the_name_that_it_was_found_by(name: str) -> None:
    assert way_of(name).name == name


def test_what_names_say() -> None:
    assert way_of("co-runner 128") == Way("co-runner 128", "co-runner", 128, WHOLE)
    assert way_of("co-runner 256-duty90") == Way("co-runner 256-duty90", "co-runner", 256, 90)
    assert way_of("green36") == Way("green36", "partition", 36)
    assert way_of("green36-duty9") == Way("green36-duty9", "partition", 36, 9)
    assert way_of("priority-duty64") == Way("priority-duty64", "priority", 0, 64)
    assert way_of("priority").sharing == "priority" and way_of("streams").sharing == "streams"


@pytest.mark.parametrize(
    "name",
    ["", "co-runner", "co-runner 100", "co-runner 512", "co-runner 128-duty256", "co-runner 128-duty0", "green",
     "green0", "green36-duty0", "green36-duty256", "priority2", "streams-duty300",
     "mps100", "co-runner  128", "green99999"],
)  # fmt: skip
def test_what_is_no_way(name: str) -> None:
    with pytest.raises(OptionError, match="neither like"):
        way_of(name)
