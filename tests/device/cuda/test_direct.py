"""What the driver's C function is given for a launch whose arguments change."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.device.cuda.conftest import FakeGpu

from weft.device.cuda import direct
from weft.device.cuda.api import CudaError
from weft.device.cuda.direct import Direct
from weft.device.cuda.driver import Function, Module
from weft.errors import DeviceError

ATTRIBUTE_BYTES, CLUSTER, OVERLAP = 72, 4, 6


class Launches(list[dict[str, Any]]):
    """Reads memory as the driver would: CUlaunchConfig of 56 bytes, CUlaunchAttribute of 72."""

    status = 0

    def __call__(self, config: int, function: int, places: int, extra: int | None) -> int:
        *dimensions, stream, attributes, count = struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56))
        found = {}
        for i in range(count):
            name, *value = struct.unpack_from("I4x3I", ctypes.string_at(attributes + i * ATTRIBUTE_BYTES, 72))
            found[name] = tuple(value)
        slots = (ctypes.c_uint64 * 3).from_address(places)
        self.append(
            {
                "grid": tuple(dimensions[:3]), "block": tuple(dimensions[3:6]), "shared": dimensions[6],
                "stream": stream, "attributes": found, "function": function, "extra": extra,
                "words": [ctypes.c_uint64.from_address(slots[i]).value for i in range(3)],
            }
        )  # fmt: skip
        return self.status


@pytest.fixture
def launches(gpu: FakeGpu) -> Iterator[Launches]:
    """The driver gives its function by address."""
    seen = Launches()
    word = ctypes.c_void_p
    c_function = ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, word)(seen)
    asked: list[tuple[bytes, int, int]] = []

    def found(symbol: bytes, version: int, flags: int) -> tuple[int, int]:
        asked.append((symbol, version, flags))
        return ctypes.cast(c_function, word).value or 0, 0

    gpu.cuGetProcAddress = found  # type: ignore[method-assign]
    direct.launcher.cache_clear()
    yield seen
    direct.launcher.cache_clear()
    assert asked in ([], [(b"cuLaunchKernelEx", 12000, 1)])


@pytest.fixture
def function(gpu: FakeGpu, tmp_path: Path) -> Function:
    (tmp_path / "k.cubin").write_bytes(b"x")
    return Module(tmp_path / "k.cubin").function("k0")


def test_arguments_change_and_nothing_else_does(launches: Launches, function: Function) -> None:
    made = Direct(function, (7, 2, 1), (128, 1, 1), [0x1000, 0, 2**40], shared_bytes=100_000, dependent=True)
    made.launch(0x55)
    made.words[1] = 2**63
    made.launch(0x55)
    made.launch(0)
    assert [x["words"] for x in launches] == [[0x1000, 0, 2**40], *[[0x1000, 2**63, 2**40]] * 2]
    assert [x["stream"] for x in launches] == [0x55, 0x55, 0]
    for x in launches:
        assert x["grid"] == (7, 2, 1) and x["block"] == (128, 1, 1) and x["shared"] == 100_000
        assert x["attributes"] == {OVERLAP: (1, 0, 0)} and x["function"] == 6 and x["extra"] is None


def test_clusters_are_an_attribute(launches: Launches, function: Function) -> None:
    Direct(function, (8, 2, 1), (128, 1, 1), [1, 2, 3], cluster=(2, 1, 1), dependent=True).launch(1)
    Direct(function, (8, 2, 1), (128, 1, 1), [1, 2, 3]).launch(1)
    assert [x["attributes"] for x in launches] == [{CLUSTER: (2, 1, 1), OVERLAP: (1, 0, 0)}, {}]


def test_before_hopper_nothing_is_dependent(gpu: FakeGpu, launches: Launches, tmp_path: Path) -> None:
    gpu.attributes[75] = 8
    (tmp_path / "k.cubin").write_bytes(b"x")
    function = Module(tmp_path / "k.cubin").function("k0")
    Direct(function, (1, 1, 1), (32, 1, 1), [1, 2, 3], dependent=True).launch(1)
    assert launches[0]["attributes"] == {}


def test_what_the_device_does_not_take_is_refused_before_the_launch(launches: Launches, function: Function) -> None:
    with pytest.raises(DeviceError, match="kernel k0: cannot be launched with a grid of"):
        Direct(function, (0, 1, 1), (32, 1, 1), [1, 2, 3])
    with pytest.raises(DeviceError, match="shared memory; a block of this GPU has"):
        Direct(function, (1, 1, 1), (32, 1, 1), [1, 2, 3], shared_bytes=300_000)
    assert not launches


def test_an_error_names_the_kernel(launches: Launches, function: Function) -> None:
    made = Direct(function, (1, 1, 1), (32, 1, 1), [1, 2, 3])
    launches.status = 719
    with pytest.raises(CudaError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_LAUNCH_FAILED \(719\): k0"):
        made.launch(1)


def test_an_old_driver_is_named(gpu: FakeGpu, function: Function) -> None:
    gpu.cuGetProcAddress = lambda *a: (0, 1)  # type: ignore[method-assign]
    direct.launcher.cache_clear()
    with pytest.raises(DeviceError, match=r"no extended launches .*CUDA 12\.0 or newer is needed"):
        Direct(function, (1, 1, 1), (32, 1, 1), [1, 2, 3])
