from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from benchmarks.co_runner.steps import GUESTS, SPINS, residents
from benchmarks.co_runner.units import co_runner, plain, unit_of

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.cuda.role.persistent import needs
from weft.kernels.source import LibraryCall
from weft.sm_budget import SmBudget


def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    assert isinstance(found, Nvrtc)
    return found


def test_a_step_is_told_with_what_is_resident_alone_and_beside() -> None:
    facts, unit = GpuFacts(), unit_of("histogram", 256, 1)
    source = plain(unit, 100)
    path = nvrtc().compile(source.text, arch="sm_90a", flags=source.flags).path
    call = SimpleNamespace(kernel=SimpleNamespace(spec=LibraryCall))
    executable = SimpleNamespace(
        plan=SimpleNamespace(steps=[call, SimpleNamespace(kernel=source)]),
        linked=SimpleNamespace(objects={source.sha256: path}),
    )
    takes = [SmBudget(8192, 2176, 256, 1), SmBudget(65536, 2176, 2048, 1)]
    (found,) = residents(cast("Any", executable), facts, takes[:1])
    assert found["step"] == 1 and found["grid"] == [100, 1, 1] and found["block"] == [256, 1, 1]
    assert found["resident"] == [8, 7], "eight fill the threads of an SM; one of them is the co-runner's"


def test_guests_compile_and_are_named_apart() -> None:
    made = nvrtc().compile(SPINS, arch="sm_90a")
    assert {x.entry for x in GUESTS} == {"draws", "spins", "naps"}
    for entry in ("spins", "naps"):
        assert made.of(entry).registers <= 32 and made.of(entry).spill_stores == 0
    assert len({x.name for x in GUESTS}) == len(GUESTS)


def test_a_co_runner_takes_what_the_assembler_says() -> None:
    facts = GpuFacts()
    source = co_runner(unit_of("ffma", 128, 1), facts.sms, facts)
    own = nvrtc().compile(source.text, arch="sm_90a", flags=source.flags).of(source.entry)
    takes = needs(source, own.registers, own.shared_bytes, 1, facts)
    assert takes.threads == 128 and takes.ctas == 1 and takes.registers == 128 * -(-own.registers // 8) * 8
