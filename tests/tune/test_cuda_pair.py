"""Pairs on a machine of the test's own: right forms pass, every kind of wrong one is named, times are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from weft.generate.bind import Prepared
from weft.kernels.colocation import BYTES, WorkCounter
from weft.tune.cuda_pair import LIMIT_OFFSET, Machine, Memory, Pair, PairTimes, Side, launches_for, measure, verify

LC_IN, LC_OUT, BE_IN, BE_OUT, COUNTER, FRESH = 0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000
STAGES = (150, 90)
GUARD = b"\x77" * 8


@dataclass
class Simulated:
    """Memory by address, kernels that are Python, and a clock that counts what each work costs."""

    bytes_at: dict[int, bytearray] = field(default_factory=dict)
    time_us: float = 0.0
    capacity: int = 40
    """Blocks of the job that a fused launch runs."""
    fault: str = ""

    def __post_init__(self) -> None:
        for address in (LC_IN, LC_OUT, BE_IN, BE_OUT, COUNTER, FRESH):
            self.bytes_at[address] = bytearray(512)

    def write(self, address: int, data: bytes) -> None:
        base = max(a for a in self.bytes_at if a <= address)
        self.bytes_at[base][address - base : address - base + len(data)] = data

    def read(self, address: int, size: int) -> bytes:
        return bytes(self.bytes_at[address][:size])

    def run(self, work: Sequence[Prepared]) -> None:
        for one in work:
            one(0)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self.write(to, self.read(source, size))

    def beside(self, first: Sequence[Prepared], second: Sequence[Prepared], stream: int) -> None:
        self.run([*first, *second])

    def samples_us(self, works: Sequence[Callable[[int], None]], rounds: int) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in works]
        for number in range(rounds):
            for samples, work in zip(found, works, strict=True):
                self.time_us = 0.0
                work(0)
                samples.append(self.time_us + (100.0 if number == 0 else 0.0))
        return found

    # kernels
    def lc(self, stream: int) -> None:
        self.time_us += 10.0
        self.bytes_at[LC_OUT][:64] = bytes((x * 3 + 1) % 256 for x in self.bytes_at[LC_IN][:64])

    def block(self, number: int) -> None:
        self.time_us += 0.5
        out = self.bytes_at[BE_OUT]
        stage, at = (0, number) if number < STAGES[0] else (1, number - STAGES[0])
        out[at] = (out[at] + self.bytes_at[BE_IN][at] + 1) % 256 if stage == 0 else (out[at] * 5 + 2) % 256

    def be(self, stream: int) -> None:
        for number in range(sum(STAGES)):
            self.block(number)

    def counter(self) -> WorkCounter:
        return WorkCounter.unpack(self.read(COUNTER, BYTES))

    def draw(self, most: int) -> None:
        found = self.counter()
        limit = sum(STAGES) if self.fault == "limit" else found.limit
        if found.stop and self.fault != "stop":
            return
        end = min(limit, found.finished + most)
        for number in range(found.finished, end):
            if self.fault == "lost" and number == 131:
                continue
            self.block(number)
            if self.fault == "twice" and number == 7:
                self.block(number)
        ran = end - (1 if self.fault == "uncounted" and end > found.finished else 0)
        self.write(COUNTER, replace(found, finished=ran, ticket=end, end=end).pack())

    def fused(self, stream: int) -> None:
        self.lc(stream)
        self.time_us += 1.0
        if self.fault == "lc":
            self.bytes_at[LC_OUT][5] ^= 1
        if self.fault == "guard":
            self.bytes_at[BE_OUT][240] ^= 1
        before = self.time_us
        self.draw(self.capacity)
        self.time_us = before  # beside the tensor cores

    def drain(self, stream: int) -> None:
        if self.fault == "undrained":
            return
        if self.fault == "drain writes lc":
            self.bytes_at[LC_OUT][0] ^= 1
        self.draw(sum(STAGES))


def pair_of(m: Simulated, *, exact: bool = True) -> Pair:
    lc = Side((m.lc,), (Memory(LC_IN, bytes(range(64)) + GUARD), Memory(LC_OUT, b"\xa5" * 64 + GUARD)))
    contents = bytes(240)
    be = Side((m.be,), (Memory(BE_IN, contents + GUARD), Memory(BE_OUT, contents + GUARD)))
    return Pair(lc, be, m.fused, m.drain, COUNTER, FRESH, STAGES, exact)


def test_the_simulation_is_a_machine() -> None:
    machine: Machine = Simulated()
    machine.write(COUNTER + LIMIT_OFFSET, (77).to_bytes(4, "little"))
    assert WorkCounter.unpack(machine.read(COUNTER, BYTES)).limit == 77


@pytest.mark.parametrize("capacity", [0, 1, 40, 240])
def test_right_forms_pass(capacity: int) -> None:
    m = Simulated(capacity=capacity)
    assert verify(m, pair_of(m)) == ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("lc", "latency-critical memory 1 differs from byte 5"),
        ("guard", "best-effort memory 1 differs from byte 240"),
        ("twice", "best-effort memory 1 differs from byte 7"),
        ("lost", "best-effort memory 1 differs from byte 131"),
        ("uncounted", "the counter has"),
        ("limit", "fused without blocks: best-effort memory 1"),
        ("stop", "fused and stopped: best-effort memory 1"),
        ("undrained", "persistent: best-effort memory 1"),
        ("drain writes lc", "persistent: latency-critical memory 1 differs from byte 0"),
    ],
)
def test_what_is_wrong_is_named(fault: str, said: str) -> None:
    m = Simulated(fault=fault, capacity=240)
    assert said in verify(m, pair_of(m))


def test_results_without_an_order_of_sums_are_counted_only() -> None:
    m = Simulated(fault="twice", capacity=240)
    assert verify(m, pair_of(m, exact=False)) == ""
    m = Simulated(fault="uncounted", capacity=240)
    assert "the counter has" in verify(m, pair_of(m, exact=False))


def test_kernels_that_do_nothing_are_no_proof() -> None:
    m = Simulated()
    pair = pair_of(m)
    idle = replace(pair, lc=Side((lambda stream: None,), pair.lc.memory))
    assert "nothing to compare" in verify(m, idle)


def test_times_are_put_together() -> None:
    m = Simulated(capacity=40)
    found = measure(m, pair_of(m), launches=4, rounds=3)
    assert (found.lc_us, found.be_us, found.serial_us, found.streams_us) == (40.0, 120.0, 160.0, 160.0)
    assert found.inside_us == 44.0 and found.inside_blocks == 160 and found.drained
    assert found.fused_us == 44.0 + (240 - 160) * 0.5
    assert found.ratio == pytest.approx(160 / 84) and found.slowdown == pytest.approx(0.1)


def test_a_job_that_does_not_end_is_said() -> None:
    m = Simulated(capacity=40, fault="undrained")
    assert not measure(m, pair_of(m), launches=1, rounds=2).drained


def test_the_best_peer_counts() -> None:
    times = PairTimes(1, 10, 10, 20, 15, 12, 11, 5, drained=True)
    assert times.ratio == 15 / 12


def test_launches_beside_a_job() -> None:
    assert list(launches_for(10.0, 100.0, [0.1, 1.0, 2.0, 1e9])) == [1, 5, 10, 100]
    assert list(launches_for(0.001, 1e9, [0.5])) == [256]
