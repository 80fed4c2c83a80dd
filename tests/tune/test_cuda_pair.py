"""Pairs on a machine of the test's own: right forms pass, every kind of wrong one is named, times are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from weft.generate.bind import Prepared
from weft.kernels.colocation import BYTES, WorkCounter
from weft.tune.cuda_pair import (
    SPLITS,
    Machine,
    Memory,
    Pair,
    PairTimes,
    Side,
    Wanted,
    alone,
    forms,
    launches_for,
    measure,
    moment,
    rate,
    verify,
    verify_drain,
)

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

    def keep(self, memory: Memory) -> bytes:
        return self.read(memory.address, memory.size)

    def restore(self, memory: Memory, kept: object) -> None:
        assert isinstance(kept, bytes)
        self.write(memory.address, kept)

    def differs(self, memory: Memory, kept: object) -> int:
        assert isinstance(kept, bytes)
        return next((i for i, (a, b) in enumerate(zip(self.keep(memory), kept, strict=True)) if a != b), -1)

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
    def memory(address: int, contents: bytes) -> Memory:
        return Memory(address, len(contents) + len(GUARD), contents + GUARD)

    lc = Side((m.lc,), (memory(LC_IN, bytes(range(64))), memory(LC_OUT, b"\xa5" * 64)))
    be = Side((m.be,), (memory(BE_IN, bytes(240)), memory(BE_OUT, bytes(240))))
    return Pair(lc, be, m.fused, m.drain, COUNTER, FRESH, STAGES, exact)


def judged(m: Simulated, pair: Pair) -> str:
    """What is wrong with any form."""
    want = alone(m, pair)
    if isinstance(want, str):
        return want
    return verify_drain(m, pair, want) or verify(m, pair, want, SPLITS)


def test_the_simulation_is_a_machine() -> None:
    machine: Machine = Simulated()
    machine.write(COUNTER + WorkCounter.offset("limit"), (77).to_bytes(4, "little"))
    assert WorkCounter.unpack(machine.read(COUNTER, BYTES)).limit == 77


@pytest.mark.parametrize("capacity", [0, 1, 40, 240])
def test_right_forms_pass(capacity: int) -> None:
    m = Simulated(capacity=capacity)
    assert judged(m, pair_of(m)) == ""


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
    assert said in judged(m, pair_of(m))


def test_results_without_an_order_of_sums_are_counted_only() -> None:
    m = Simulated(fault="twice", capacity=240)
    assert judged(m, pair_of(m, exact=False)) == ""
    m = Simulated(fault="uncounted", capacity=240)
    assert "the counter has" in judged(m, pair_of(m, exact=False))


def test_kernels_that_do_nothing_are_no_proof() -> None:
    m = Simulated()
    pair = pair_of(m)
    idle = replace(pair, lc=Side((lambda stream: None,), pair.lc.memory))
    assert "nothing to compare" in judged(m, idle)


def test_times_are_put_together() -> None:
    m = Simulated(capacity=40)
    found = measure(m, pair_of(m), launches=4, rounds=3)
    assert (found.lc_us, found.be_us) == (40.0, 120.0) and found.peers == {"serial": 160.0, "streams": 160.0}
    assert found.inside_us == 44.0 == found.idle_us and found.inside_blocks == 160 and found.drained
    assert found.fused_us == 44.0 + (240 - 160) * 0.5
    assert found.ratio == pytest.approx(160 / 84) and found.slowdown == pytest.approx(0.1)


def test_each_form_runs_by_itself_as_often_as_one_likes() -> None:
    m = Simulated(capacity=40)
    works = forms(m, pair_of(m), launches=4)
    assert list(works) == ["lc", "be", "fused"]
    for _ in range(2):
        for name, us in (("lc", 40.0), ("be", 120.0), ("fused", 44.0)):
            assert m.samples_us([works[name]], 2)[0][1] == us, name
        assert m.counter().finished == 160, "each run begins the job anew"


def test_a_job_that_does_not_end_is_said() -> None:
    m = Simulated(capacity=40, fault="undrained")
    assert not measure(m, pair_of(m), launches=1, rounds=2).drained


def test_the_best_peer_counts() -> None:
    times = PairTimes(1, 10, 10, {"serial": 20, "parts": 15}, 12, 11, 11, 5, drained=True)
    assert times.ratio == 15 / 12
    m = Simulated()
    assert measure(m, pair_of(m), 4, 3, {"both": m.lc}).peers == {"serial": 160.0, "streams": 160.0, "both": 10.0}


def test_launches_that_run_a_job() -> None:
    assert launches_for(240, 40.0) == 6 and launches_for(241, 40.0) == 7 and launches_for(3, 40.0) == 1
    assert launches_for(10**6, 1.0) == 256 == launches_for(10**6, 1e-9) and launches_for(10, 1.0, most=4) == 4


def test_blocks_of_a_launch() -> None:
    m = Simulated(capacity=40)
    found = rate(m, pair_of(m), 3, 5)
    assert (found.inside_us, found.blocks) == (11.0, 40.0)
    assert rate(m, pair_of(m), 8, 5).blocks == 30.0, "the job has 240 blocks"


def test_a_drain_that_is_wrong_is_told_by_itself() -> None:
    m = Simulated(fault="undrained")
    want = alone(m, pair_of(m))
    assert isinstance(want, Wanted) and "persistent" in verify_drain(m, pair_of(m), want)


def test_a_moment_is_of_a_job_without_end() -> None:
    m = Simulated(capacity=30)
    drawn = list[WorkCounter]()

    def draw(most: int) -> None:
        found = m.counter()
        drawn.append(found)
        end = min(found.limit, found.finished + most)
        m.time_us += 0.1 * (end - found.finished)
        m.write(COUNTER, replace(found, finished=end).pack())

    m.draw = draw  # type: ignore[method-assign]

    def fused(stream: int) -> None:
        m.lc(stream)
        m.time_us += 1.0
        m.draw(m.capacity)

    found = moment(m, replace(pair_of(m), fused=fused), 20, 3)
    assert found.lc_us == pytest.approx(10.0) and found.idle_us == pytest.approx(11.0)
    assert found.fused_us == pytest.approx(14.0) and found.blocks == 30.0, "600 blocks of a job of 240"
    assert max(c.limit for c in drawn) == (1 << 31) - 1 and min(c.limit for c in drawn) == 0
