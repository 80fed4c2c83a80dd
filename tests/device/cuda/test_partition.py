"""Green contexts without a GPU: one split for both parts, and who is declined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.device.cuda.conftest import FakeGpu

from weft.device.cuda.api import CudaError
from weft.device.cuda.partition import Partition, Unit, partitioned, unit_of
from weft.ir.declined import Declined

NAMES = ("cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc", "cuGreenCtxCreate",
         "cuGreenCtxStreamCreate", "cuGreenCtxDestroy", "cuStreamDestroy")  # fmt: skip


def sms(count: int, least: int = 8, multiple: int = 8) -> Any:
    own = SimpleNamespace(smCount=count, minSmPartitionSize=least, smCoscheduledAlignment=multiple)
    return SimpleNamespace(sm=own)


class Splits:
    """A driver that divides 132 multiprocessors."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.whole, self.contexts = gpu, sms(132), 0
        self.absent = ""
        self.takes = 0
        """Multiprocessors that a group gets besides those asked for."""

    def __call__(self, name: str, *given: Any) -> tuple[Any, ...]:
        if name == self.absent:
            raise RuntimeError(f'Function "{name}" not found')
        self.gpu.calls.append((name, *given))
        answer: dict[str, Any] = {
            "cuDeviceGetDevResource": lambda *_: (self.whole,),
            "cuDevSmResourceSplitByCount": self.split,
            "cuDevResourceGenerateDesc": lambda resources, _: (("described", resources[0].sm.smCount),),
            "cuGreenCtxCreate": lambda described, *_: (("context", described[1]),),
            "cuGreenCtxStreamCreate": lambda context, *_: (self.gpu.api.CUstream(context[1]),),
        }
        status = self.gpu.api.CUresult(self.gpu.fails.get(name, 0))
        return (status, *answer.get(name, lambda *_: ())(*given))

    def split(self, groups: int, whole: Any, flags: int, least: int) -> tuple[Any, ...]:
        assert (groups, flags) == (1, 0) and whole is self.whole
        own = least + self.takes
        return [sms(own)], 1, sms(132 - own)


@pytest.fixture
def driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Splits:
    found = Splits(gpu)
    for name in NAMES:

        def function(*given: Any, name: str = name) -> Any:
            return found(name, *given)

        function.__name__ = name
        monkeypatch.setattr(gpu.api, name, function)
    return found


def test_sizes_of_a_part_leave_something_for_the_other() -> None:
    assert Unit(132, 8, 8).sizes()[:2] == (8, 16) and Unit(132, 8, 8).sizes()[-1] == 128
    assert Unit(16, 8, 8).sizes() == (8,) and Unit(8, 8, 8).sizes() == ()
    assert Unit(108, 4, 2).sizes()[0] == 4


def test_both_parts_are_of_one_split_and_are_given_back(driver: Splits) -> None:
    with partitioned(96) as found:
        assert isinstance(found, Partition)
        assert (found.first.sms, found.rest.sms) == (96, 36)
        assert found.first.stream(priority=-5) == 96 and found.rest.stream() == 36
        assert [x[1:] for x in driver.gpu.of("cuGreenCtxStreamCreate")] == [(1, -5), (1, 0)]
    assert len(driver.gpu.of("cuDevSmResourceSplitByCount")) == 1
    assert sorted(x[0][1] for x in driver.gpu.of("cuGreenCtxDestroy")) == [36, 96]
    assert len(driver.gpu.of("cuStreamDestroy")) == 2


@pytest.mark.parametrize("size", [0, -8, 4, 12, 132, 136])
def test_a_size_that_cannot_be_is_declined_with_those_that_can(driver: Splits, size: int) -> None:
    with partitioned(size) as found:
        assert isinstance(found, Declined) and "8 to 128 in steps of 8" in found.reason
    assert not driver.gpu.of("cuDevSmResourceSplitByCount")


def test_a_driver_without_green_contexts_is_declined(driver: Splits) -> None:
    driver.absent = "cuDeviceGetDevResource"
    found = unit_of()
    assert isinstance(found, Declined) and 'no green contexts: Function "cuDeviceGetDevResource" not found' in (
        found.reason
    )


@pytest.mark.parametrize("name", ["cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc", "cuGreenCtxCreate"])
def test_what_a_device_does_not_have_is_declined_by_name(driver: Splits, name: str) -> None:
    driver.gpu.fails[name] = 801
    with partitioned(64) as found:
        assert isinstance(found, Declined) and f"{name} gave 801" in found.reason
    assert not driver.gpu.of("cuGreenCtxDestroy")


def test_a_split_of_another_size_is_declined(driver: Splits) -> None:
    driver.takes = 8
    with partitioned(64) as found:
        assert isinstance(found, Declined) and "gave [72] and 60" in found.reason


def test_an_error_of_the_driver_is_one(driver: Splits) -> None:
    driver.gpu.fails["cuDevSmResourceSplitByCount"] = 700
    with pytest.raises(CudaError), partitioned(64):
        pass


def test_a_driver_that_names_no_unit_gets_that_of_hopper(driver: Splits) -> None:
    driver.whole = SimpleNamespace(sm=SimpleNamespace(smCount=132))
    assert unit_of() == Unit(132, 8, 8)
