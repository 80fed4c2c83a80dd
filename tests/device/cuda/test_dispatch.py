"""Work that is put on streams by a thread: in which order, what is seen of it, and what is said of a failure."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from weft.device.cuda import dispatch
from weft.device.cuda.api import CudaError
from weft.device.cuda.dispatch import EVENTS, Dispatcher, Sender
from weft.errors import DeviceError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
MS = 1_000_000
ONE, TWO = 1, 2
"""Streams."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The dispatcher, and the driver of these tests."""
    stub = tmp_path_factory.mktemp("stub") / "driver.so"
    source = Path(__file__).with_name("queue_stub.cpp")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", source, "-o", stub], check=True, timeout=120)
    found = dispatch.compiled()
    assert found is not None
    return found, stub


class Opened:
    """A dispatcher over a driver of its own."""

    def __init__(self, libraries: tuple[Path, Path], folder: Path, held: ExitStack) -> None:
        own = folder / "driver.so"  # with notes of its own
        shutil.copy(libraries[1], own)
        self.path, self.stub = own, ctypes.CDLL(str(own))
        self.stub.stub_notes.restype, self.stub.stub_context.restype = ctypes.c_char_p, ctypes.c_void_p
        self.queue = Dispatcher(libraries[0], 4711, held, driver=str(own), spin_ns=MS)

    def notes(self) -> list[str]:
        return bytes(self.stub.stub_notes()).decode().splitlines()

    def until(self, event: int) -> None:
        end = time.monotonic() + 20
        while not self.queue.happened(event):
            assert time.monotonic() < end, "it does not happen"
            time.sleep(1e-4)


@pytest.fixture
def opened(libraries: tuple[Path, Path], tmp_path: Path) -> Iterator[Opened]:
    with ExitStack() as held:
        yield Opened(libraries, tmp_path, held)


def test_commands_are_carried_out_in_order_in_the_context(opened: Opened) -> None:
    queue = opened.queue
    first, last = queue.event(), queue.event()
    source, target = ctypes.create_string_buffer(b"0123456789abcdef", 16), ctypes.create_string_buffer(16)
    at = ctypes.addressof
    queue.wait(ONE, first)
    queue.record(first, ONE)
    queue.launch(3000, ONE)
    queue.write(at(source), 0x41424344, TWO)
    queue.copy(at(target), at(source), 16, ONE)
    queue.fill(at(target) + 14, at(source), 2, TWO)
    queue.mark(last, ONE, since=first)
    queue.drain()
    want = ["wait 1 0", "record 1 0", "graph 3000 1", f"write 2 {0x41424344}", "copy 16 1", "fill 2 2", "record 1 0"]
    assert opened.notes() == ["current 0 0", *want]
    assert opened.stub.stub_context() == 4711
    assert target.raw == b"DCBA456789abcdDC"
    opened.until(last)
    assert queue.apart_ns(last) >= 3000


def test_an_event_is_seen_when_it_has_happened(opened: Opened) -> None:
    queue = opened.queue
    begin, end = queue.event(), queue.event()
    for ns in (20 * MS, 3 * MS):  # events are used again
        asked = time.perf_counter_ns()
        queue.record(begin, ONE)
        queue.launch(ns, ONE)
        queue.mark(end, ONE, since=begin)
        assert not queue.happened(end)
        opened.until(end)
        seen = queue.seen_ns(end)
        assert asked <= queue.put_ns(begin) <= queue.put_ns(end) <= seen <= time.perf_counter_ns()
        assert seen - asked >= ns and queue.apart_ns(end) == pytest.approx(ns, rel=0.5)


def test_an_event_that_is_recorded_again_is_the_later_one(opened: Opened) -> None:
    queue = opened.queue
    event = queue.event()
    queue.mark(event, ONE)
    queue.launch(15 * MS, ONE)
    asked = time.perf_counter_ns()
    queue.mark(event, ONE)
    opened.until(event)
    assert queue.seen_ns(event) - asked >= 14 * MS


def test_thousands_of_commands_are_neither_lost_nor_mixed_up(opened: Opened) -> None:
    queue, word = opened.queue, ctypes.c_uint32(0)
    for number in range(30_000):
        queue.write(ctypes.addressof(word), number, ONE)
    queue.drain()
    assert word.value == 29_999
    noted = [int(x.split()[2]) for x in opened.notes()[1:]]
    assert noted == list(range(len(noted))) and len(noted) > 1000


@pytest.mark.parametrize(("fault", "said"), [
    ("graph", "cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED"), ("record", "cuEventRecord failed"),
    ("wait", "cuStreamWaitEvent failed"), ("write", "cuStreamWriteValue32 failed"),
    ("copy", "cuMemcpyDtoHAsync failed"), ("fill", "cuMemcpyHtoDAsync failed"),
    ("query", "cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS"),
])  # fmt: skip
def test_a_failure_is_raised_and_nothing_follows_it(
    fault: str, said: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = opened.queue
    event, word = queue.event(), ctypes.c_uint32(7)
    at = ctypes.addressof(word)
    monkeypatch.setenv("STUB_FAULT", fault)
    queue.wait(ONE, event)
    queue.launch(1, ONE)
    queue.copy(at, at, 4, ONE)
    queue.fill(at, at, 4, ONE)
    queue.write(at, 7, ONE)
    queue.mark(event, ONE)
    with pytest.raises(CudaError, match=said):
        opened.until(event)
    before = opened.notes()
    queue.write(at, 8, ONE)
    with pytest.raises(CudaError, match=said):
        queue.drain()
    assert opened.notes() == before and word.value == 7


def test_arrivals_come_by_themselves(opened: Opened) -> None:
    queue = opened.queue
    begin = time.perf_counter_ns() + 100 * MS
    times = [0, 1, 2 * MS, 2 * MS, 9 * MS]
    queue.send(times, begin)
    early = queue.sent()
    assert early == 0 or time.perf_counter_ns() >= begin, "a busy machine may be late to look"
    time.sleep(0.3)  # nobody looks meanwhile
    _until_sent(queue, 5)
    time.sleep(0.02)
    sent = [queue.sent_ns(i) for i in range(5)]
    assert sent == sorted(sent) and all(s >= begin + t for s, t in zip(sent, times, strict=True))
    assert sent[-1] <= time.perf_counter_ns() - 10 * MS
    queue.send([0, 3_600_000 * MS], time.perf_counter_ns())
    _until_sent(queue, 1)
    time.sleep(0.1)
    assert queue.sent() == 1, "those of before are forgotten"


def _until_sent(queue: Dispatcher, count: int) -> None:
    end = time.monotonic() + 20
    while queue.sent() < count and time.monotonic() < end:
        time.sleep(1e-3)
    assert queue.sent() == count


def test_the_end_does_not_wait_for_arrivals_and_gives_events_back(libraries: tuple[Path, Path], tmp_path: Path) -> None:
    with ExitStack() as held:
        opened = Opened(libraries, tmp_path, held)
        for _ in range(3):
            opened.queue.event()
        opened.queue.send([3_600_000 * MS], time.perf_counter_ns())
        opened.queue.write(ctypes.addressof(word := ctypes.c_uint32(0)), 5, ONE)
        begun = time.monotonic()
    assert time.monotonic() - begun < 10 and word.value == 5
    assert opened.notes()[-3:] == ["destroy 0 0"] * 3
    opened.queue.drain()
    with pytest.raises(DeviceError, match="after the end"):
        opened.queue.launch(1, ONE)


def test_the_clock_is_that_of_the_gpu(opened: Opened) -> None:
    opened.queue.watch_clock("another", str(opened.path))
    assert opened.queue.clock_mhz() == 0
    opened.queue.watch_clock("1-2", str(opened.path))
    end = time.monotonic() + 20
    while opened.queue.clock_mhz() == 0 and time.monotonic() < end:
        time.sleep(1e-3)
    assert opened.queue.clock_mhz() == 1755


def test_events_are_counted(opened: Opened) -> None:
    for number in range(EVENTS):
        assert opened.queue.event() == number
    with pytest.raises(DeviceError, match=f"over {EVENTS} events"):
        opened.queue.event()
    opened.queue.give_back([7, 9])
    assert {opened.queue.event(), opened.queue.event()} == {7, 9}
    with pytest.raises(DeviceError, match=f"over {EVENTS} events"):
        opened.queue.event()


def test_an_event_that_was_given_back_happens_anew(opened: Opened) -> None:
    queue = opened.queue
    first, last = queue.event(), queue.event()
    for _ in range(3):
        queue.record(first, ONE)
        queue.mark(last, ONE, since=first)
        opened.until(last)
        seen = queue.seen_ns(last)
        queue.give_back([first, last])
        last, first = queue.event(), queue.event()
        queue.mark(last, ONE)
        opened.until(last)
        assert queue.seen_ns(last) > seen, "not what happened before"


def test_a_driver_without_its_functions_is_told(libraries: tuple[Path, Path]) -> None:
    with ExitStack() as held, pytest.raises(DeviceError, match=r"libm.so.6 lacks a function"):
        Dispatcher(libraries[0], 0, held, driver="libm.so.6")


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CXX", "none")
    assert dispatch.compiled() is None


def test_arrivals_that_come_when_somebody_looks() -> None:
    sender = Sender()
    assert sender.sent(10) == 0
    sender.send([0, 5, 5, 9], 100)
    assert [sender.sent(t) for t in (99, 100, 104, 107, 200)] == [0, 1, 1, 3, 4]
    assert [sender.sent_ns(i) for i in range(4)] == [100, 107, 107, 200]
