"""The arithmetic of the probes, against a GPU whose times are known."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.typed import approx

from weft.device.cuda import calibrate
from weft.device.cuda.calibrate import SIZES, Probes, run_probes
from weft.device.cuda.record import GpuFacts

GAP, DEPENDENT = 1.0, 0.5
COPY, READ, L2, FMA = 4.0e6, 4.5e6, 6.0e6, 50.0e6
"""Bytes per µs; FLOP per µs."""


@dataclass
class Machine:
    """Adds up what each launch takes."""

    elapsed: float = 0.0
    launches: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def function(self, entry: str) -> SimpleNamespace:
        def bind(grid: Any, block: Any, arguments: Any, *, dependent: bool = False) -> SimpleNamespace:
            name = entry.removeprefix("probe_")
            cost = {
                "copy": lambda: GAP + 32 * arguments[-1] / COPY,
                "read": lambda: GAP + 16 * arguments[2] * arguments[3] / (READ if arguments[3] == 1 else L2),
                "step": lambda: GAP,
                "dependent": lambda: DEPENDENT if dependent else GAP,
                "fma": lambda: grid[0] * block[0] * arguments[1] * 32 / FMA,
            }[name]()

            def launch(stream: int) -> None:
                self.launches.append(name)
                self.elapsed += cost

            return SimpleNamespace(launch=launch)

        return SimpleNamespace(bind=bind)

    def unload(self) -> None:
        self.closed.append("module")

    handle = 7

    def time_us(self, work: Callable[[int], None]) -> float:
        before = self.elapsed
        work(self.handle)
        return self.elapsed - before

    @contextlib.contextmanager
    def graph(self, work: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
        yield work

    def close(self) -> None:
        self.closed.append("stream")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(calibrate, "Module", lambda path: made)
    monkeypatch.setattr(calibrate, "Stream", lambda handle: made)
    monkeypatch.setattr(calibrate, "device_memory", lambda size: contextlib.nullcontext(1 << 20))
    monkeypatch.setattr(calibrate, "fill", lambda *a: None)
    monkeypatch.setattr(calibrate, "read_back", lambda address, size: struct.pack("<3q", 1_755_000, 1_000_000, 0))
    return made


COMPILER: Any = SimpleNamespace(compile=lambda text, *, arch, cache_dir: SimpleNamespace(path=Path(arch)))


def test_known_times_come_out(machine: Machine) -> None:
    seen = run_probes(COMPILER, GpuFacts())
    assert [s for s, _ in seen.bandwidth] == [s for s, _ in seen.read_bandwidth] == list(SIZES)
    for size, rate in seen.bandwidth:
        assert rate == pytest.approx(size / (GAP + size / COPY) / 1e3)
    for size, rate in seen.read_bandwidth:
        assert rate == pytest.approx(size / (GAP + size / READ) / 1e3)
    assert seen.l2_bandwidth == pytest.approx(6000, rel=0.01) and seen.clock_ghz == pytest.approx(1.755)
    assert (seen.launch_us, seen.dependent_launch_us) == (approx(GAP), approx(DEPENDENT))
    assert seen.flops_f32 == pytest.approx(50e12) and seen.products == {}
    assert machine.closed == ["stream", "module"]
    assert machine.elapsed < 1e6  # a second of GPU time


def test_products_of_the_framework(machine: Machine) -> None:
    def matmul(dtype: str, n: int) -> Callable[[int], None] | None:
        def work(stream: int) -> None:
            assert stream == machine.handle
            machine.elapsed += 2 * n**3 / 7.9e8

        return work if dtype == "bf16" else None

    assert run_probes(COMPILER, GpuFacts(), matmul=matmul).products == {"bf16": pytest.approx(7.9e14)}


def test_a_failing_probe_gives_everything_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "time_us", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_probes(COMPILER, GpuFacts())
    assert machine.closed == ["stream", "module"]


def test_what_is_seen_is_a_record(machine: Machine) -> None:
    assert isinstance(run_probes(COMPILER, GpuFacts(capability=80)), Probes)
