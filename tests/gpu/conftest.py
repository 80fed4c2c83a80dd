from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc


@pytest.fixture
def context() -> Iterator[None]:
    """The primary context of the first GPU."""
    with primary_context():
        yield


@pytest.fixture(scope="session")
def stated() -> GpuFacts:
    """What the driver states about it."""
    return gpu_facts(None, calibrate=False)


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    found = find_nvrtc({})
    assert isinstance(found, Nvrtc), found.reason
    return found
