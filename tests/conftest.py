"""What holds for every test: those that need a GPU are skipped, not failed, where there is none."""

from __future__ import annotations

from functools import cache

import pytest

from weft.device.cuda.api import call, driver_api
from weft.errors import DeviceError


@cache
def gpus() -> tuple[int, str]:
    """How many GPUs there are, and why there is none."""
    try:
        count = int(call(driver_api().cuDeviceGetCount))
    except DeviceError as error:
        return 0, str(error).splitlines()[0]
    return count, "no GPU is visible"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed > (count := gpus()[0] if needed else 0):
            why = gpus()[1] if count == 0 else f"there is one GPU, {needed} are needed"
            item.add_marker(pytest.mark.skip(reason=why))
