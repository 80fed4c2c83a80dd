"""Kernels that are over a budget of an SM: dropped before they are timed, and nothing of that is remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.tune.cuda_fake import Act, FakeCudaTransport, source, trial
from tests.typed import narrow

from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.library import LibraryGenerator
from weft.ir.declined import Declined
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource
from weft.options import Options
from weft.sm_budget import SmBudget
from weft.tune.store import Database
from weft.tune.tuner import Progress, Tuner

TEXT = """extern "C" __global__ void pack(const float* w, float* p) { p[threadIdx.x] = w[threadIdx.x] * 2.0f; }
extern "C" __global__ void run(const float* x, const float* p, float* y, float* work, unsigned* state) {
  y[threadIdx.x] = x[threadIdx.x] * p[threadIdx.x] * 0.5f;
}
"""
WHOLE = profile("h200")
ROOM = WHOLE.within(SmBudget(threads=96))
TIGHT = WHOLE.within(SmBudget(threads=64))


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if isinstance(found, Declined):
        pytest.skip("no NVRTC")
    return found


def kernel(number: int = 0, threads: int = 96) -> CudaSource:
    made = source(Act.OK, number)
    return replace(made, text=f"// {number}\n{TEXT}", launches=(replace(made.launches[0], block=(threads, 1, 1)),))


def measured(
    facts: GpuFacts, kernels: list[CudaSource], database: Database, nvrtc: Nvrtc
) -> tuple[list[Measurement], Progress, int]:
    """The outcomes, the last progress, and how many kernels a worker was asked for."""
    work = replace(trial([]), kernels=[(k.schedule, k, None) for k in kernels])
    seen: list[Progress] = []
    transport = FakeCudaTransport()
    with Tuner(Options(device="cuda"), facts, database, compiler=nvrtc, transport=transport) as tuner:
        found = list(tuner.measure([work], progress=seen.append))
        assert tuner.workers_started == transport.started
    asked = [narrow(list, m["kernels"]) for m in transport.messages if m["op"] == "trial"]
    return found, seen[-1], sum(len(x) for x in asked)


def test_what_is_over_is_dropped_before_it_is_timed_and_says_why(nvrtc: Nvrtc) -> None:
    database = Database.open(None)
    found, progress, asked = measured(TIGHT, [kernel(0), kernel(1, 64)], database, nvrtc)
    assert [m.verdict for m in found] == [Verdict.RESOURCE, Verdict.OK] and asked == 1
    assert found[0].error == "a CTA of run is over sm_budget: 96 threads of 64" and not found[0].samples_us
    assert progress.rejected == {Verdict.RESOURCE: 1}
    assert database.stats().rows == 1, "a refusal by a budget is none of the kernel's own"
    found, _, asked = measured(WHOLE, [kernel(0), kernel(1, 64)], database, nvrtc)
    assert [m.verdict for m in found] == [Verdict.OK] * 2 and asked == 1, "the other one was timed under the budget"


def test_what_was_timed_without_a_budget_is_weighed_and_not_timed_again(nvrtc: Nvrtc) -> None:
    database = Database.open(None)
    (first,), _, asked = measured(WHOLE, [kernel()], database, nvrtc)
    assert first.verdict is Verdict.OK and asked == 1
    (same,), progress, asked = measured(ROOM, [kernel()], database, nvrtc)
    assert same == first and asked == 0 and progress.lookups == 1
    (refused,), progress, asked = measured(TIGHT, [kernel()], database, nvrtc)
    assert refused.verdict is Verdict.RESOURCE and asked == 0 and "96 threads of 64" in refused.error
    assert progress.rejected == {Verdict.RESOURCE: 1}
    (again,), _, asked = measured(WHOLE, [kernel()], database, nvrtc)
    assert again == first and asked == 0 and database.stats().rows == 1


def test_an_environment_of_timings_is_that_without_a_budget() -> None:
    with (
        Tuner(Options(device="cuda"), WHOLE, Database.open(None), transport=FakeCudaTransport()) as one,
        Tuner(Options(device="cuda"), TIGHT, Database.open(None), transport=FakeCudaTransport()) as other,
    ):
        assert one.environment == other.environment
        assert other._site.hello()["shared_bytes"] == WHOLE.shared_per_block, "all of it is filled with NaN"


def test_calls_are_declined_by_name_under_a_budget_alone() -> None:
    posed = trial([]).problem
    assert not isinstance(LibraryGenerator().schedules(posed, WHOLE), Declined)
    found = LibraryGenerator().schedules(posed, TIGHT)
    assert isinstance(found, Declined) and "sm_budget" in found.reason and found.reason.startswith("a call")
