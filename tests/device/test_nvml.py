"""The clock that kernels are timed at and the power, by a library that stands in for the driver's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from weft.device.cuda.nvml import joules_of, sm_clock_of, watts_of
from weft.pipeline.search.measure import at_clocks

STAND_IN = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  *handle = (void*)7;
  return strcmp(uuid, "GPU-1-2") ? 6 : 0;
}
int nvmlDeviceGetClockInfo(void* handle, int type, unsigned* mhz) {
  static unsigned asked = 0;
  if (handle != (void*)7 || type != 1) return 2;
  *mhz = 1980 - 15 * asked++;
  return asked > 2 ? 999 : 0;
}
int nvmlDeviceGetPowerUsage(void* handle, unsigned* milliwatts) {
  *milliwatts = 123500;
  return handle != (void*)7;
}
int nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* millijoules) {
  static unsigned asked = 0;
  *millijoules = 5000000000ull + 1500 * asked++;
  return handle != (void*)7 || asked > 2;
}
struct field { unsigned number, scope; long long timestamp, latency; int type, status; unsigned value; };
int nvmlDeviceGetFieldValues(void* handle, int count, struct field* asked) {
  if (handle != (void*)7 || count != 1) return 2;
  asked->status = asked->number == 186 ? STATUS : 2;
  asked->value = 456250;
  return 0;
}
"""


def built(folder: Path, status: int) -> str:
    """`status`: of the power now."""
    source = folder / "nvml.c"
    source.write_text(STAND_IN)
    made = folder / "libnvml.so"
    options = ["-shared", "-fPIC", f"-DSTATUS={status}"]
    subprocess.run(["cc", *options, "-o", str(made), str(source)], check=True, timeout=600)
    return str(made)


@pytest.fixture
def driver(tmp_path: Path) -> str:
    return built(tmp_path, 0)


@pytest.mark.parametrize("uuid", ["GPU-1-2", "1-2"])
def test_the_clock_is_that_of_the_gpu_that_was_named(driver: str, uuid: str) -> None:
    clock = sm_clock_of(uuid, driver)
    assert [clock() for _ in range(3)] == [1980, 1965, 0]  # at last the driver refuses


def test_where_nobody_knows_it_is_zero(driver: str, tmp_path: Path) -> None:
    assert sm_clock_of("GPU-another", driver)() == 0
    assert sm_clock_of("GPU-1-2", str(tmp_path / "nothing.so"))() == 0
    assert sm_clock_of("GPU-1-2", "libc.so.6")() == 0


def test_clocks_stand_in_the_line_of_the_stage() -> None:
    assert at_clocks([]) == ""
    assert at_clocks([1980, 1755, 1965]) == " at 1755 to 1980 MHz, half of the times above 1965"


def test_watts_are_those_of_now(driver: str) -> None:
    assert watts_of("GPU-1-2", driver)() == 456.25


def test_without_those_of_now_they_are_of_the_last_second(tmp_path: Path) -> None:
    assert watts_of("1-2", built(tmp_path, 3))() == 123.5


def test_joules_are_counted_by_the_driver(driver: str) -> None:
    joules = joules_of("1-2", driver)
    assert [joules() for _ in range(3)] == [5000000.0, 5000001.5, 0.0]  # at last the driver refuses
    assert joules_of("GPU-another", driver)() == 0.0 and joules_of("GPU-1-2", "libc.so.6")() == 0.0


def test_nobody_knows_the_power_of_another_gpu(driver: str) -> None:
    assert watts_of("GPU-another", driver)() == 0.0 and watts_of("GPU-1-2", "libc.so.6")() == 0.0
