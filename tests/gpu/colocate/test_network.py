"""A network beside a latency-critical plan on a real GPU: bits of both, exact counts, bounded stops, limited CTAs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.gpu.small_networks import DTYPES, network

import weft
from weft.colocate.budgets import Budgets, budgets, limited
from weft.colocate.feeder import Throttle
from weft.colocate.network import co_runner, digest
from weft.device.cuda.cubin import usage
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.occupancy import occupancy
from weft.errors import InputError, OptionError
from weft.kernels.source import CudaSource
from weft.runtime.cuda_executable import CudaExecutable
from weft.sm_budget import SmBudget

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Both:
    """A plan, and a network that runs beside it."""

    shares: Budgets
    lc: weft.Compiled
    be: weft.Compiled
    lc_inputs: tuple[torch.Tensor, ...]
    be_inputs: tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def both(stated: GpuFacts, shared_cache: Path) -> Both:
    shares = budgets(stated)

    def compiled(name: str, budget: SmBudget) -> tuple[weft.Compiled, tuple[torch.Tensor, ...]]:
        module, inputs = network(name, DTYPES["f16"])
        options = weft.Options(
            device="cuda", budget_s=40.0, cache_dir=shared_cache, sm_budget=budget, keep_worker=False
        )
        return weft.compile(module, inputs, options=options), inputs

    lc, x = compiled("cnn", shares.latency_critical)
    be, y = compiled("transformer", shares.best_effort)
    return Both(shares, lc, be, x, y)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, "nothing goes on"
        time.sleep(0.001)


@pytest.mark.parametrize("ctas", [0, 1])
@pytest.mark.parametrize("kernels", [1, 4])
def test_bits_are_those_alone_and_so_are_the_plans(both: Both, ctas: int, kernels: int) -> None:
    plan = both.be.executable
    batches = [torch.randn_like(both.be_inputs[0]) for _ in range(8)]
    wanted = [digest(plan(x)) for x in batches]
    lc_alone = digest(both.lc.executable(*both.lc_inputs))
    found: list[str] = []
    high = torch.cuda.Stream(priority=-1)
    torch.cuda.synchronize()
    numbers = iter(range(400))

    def given() -> tuple[torch.Tensor, ...] | None:
        number = next(numbers, None)
        return None if number is None else (batches[number % 8],)

    with co_runner(
        both.be,
        given,
        beside=both.lc,
        ctas_per_sm=ctas,
        stage_kernels=kernels,
        deliver=lambda _, outputs: found.append(digest(outputs)),
    ) as beside:
        beside.start()
        until(lambda: beside.counts.inferences > 5)
        with torch.cuda.stream(high):
            answers = [both.lc.executable(*both.lc_inputs) for _ in range(100)]
            high.synchronize()
        beside.wait(60)
        counts = beside.counts
    assert counts.inferences == 400 and counts.queued_kernels == 0
    assert counts.most_queued_kernels <= beside.most_queued
    assert found == [wanted[k % 8] for k in range(400)] and len(set(wanted)) == 8
    assert {digest(x) for x in answers} == {lc_alone}


def test_a_stop_is_bounded_and_what_was_begun_goes_on(both: Both) -> None:
    x = both.be_inputs
    wanted, found = digest(both.be.executable(*x)), []
    with co_runner(
        both.be, x, beside=both.lc, stage_kernels=1, most_queued=4, deliver=lambda _, y: found.append(digest(y))
    ) as beside:
        counts = beside.counts
        for _ in range(50):
            done = beside.counts.stages
            beside.start()
            until(lambda done=done: beside.counts.stages > done + 3)  # type: ignore[misc]
            assert beside.stop() < 0.25, "four kernels of some microseconds, and a thread that wakes"
            counts = beside.counts
            assert counts.queued_kernels == 0 and counts.stages == counts.launched
            assert counts.most_queued_kernels <= 4
        stages = len(both.be.executable.plan.steps)
        assert counts.inferences == len(found) >= 50 * 3 // stages
        assert set(found) == {wanted}


def test_a_throttle_holds(both: Both) -> None:
    with co_runner(both.be, both.be_inputs, beside=both.lc) as beside:
        beside.throttle = Throttle(inferences_per_s=100)
        beside.start()
        before = time.monotonic()
        until(lambda: beside.counts.inferences >= 20)
        assert time.monotonic() - before > 0.18
        beside.throttle = Throttle(duty=0)
        until(lambda: beside.counts.queued_kernels == 0)
        paused = beside.counts.launched
        time.sleep(0.05)
        assert beside.counts.launched == paused


def test_one_more_cta_than_the_limit_has_no_room(both: Both, stated: GpuFacts) -> None:
    plan = both.be.executable
    assert isinstance(plan, CudaExecutable)
    for step in limited(plan.linked, stated, 1).plan.steps:
        assert isinstance(step.kernel, CudaSource)
        own = limited(plan.linked, stated, 1).objects[step.kernel.sha256]
        for launch in step.kernel.launches:
            taken = usage(own.read_bytes())[launch.entry]
            threads = launch.block[0] * launch.block[1] * launch.block[2]
            shared = launch.shared_bytes + taken.shared_bytes
            assert occupancy(stated.whole, threads, shared, taken.registers) == 1


def test_what_cannot_be_is_refused(both: Both, shared_cache: Path) -> None:
    with pytest.raises(OptionError, match="do not fit an SM of"):
        co_runner(both.lc, both.lc_inputs, beside=both.lc)
    module, inputs = network("transformer", DTYPES["f16"])
    options = weft.Options(device="cuda", budget_s=0.0, cache_dir=shared_cache, keep_worker=False)
    bare = weft.compile(module, inputs, options=options)
    with pytest.raises(OptionError, match="without sm_budget"):
        co_runner(both.be, both.be_inputs, beside=bare)
    with co_runner(both.be, iter([(both.be_inputs[0][:1],)]), beside=both.lc) as beside:
        beside.start()
        with pytest.raises(InputError, match="expected"):
            beside.wait(10)
