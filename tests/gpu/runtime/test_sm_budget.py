"""Plans under a budget of an SM on a real GPU: they run beside a persistent grid, and give what they give alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.gpu.small_networks import DTYPES, network

import weft
from weft.device.cuda.cubin import usage
from weft.device.cuda.driver import Function, Module
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.cuda.resident import prefer_shared
from weft.kernels.source import CudaSource
from weft.runtime.cuda_executable import CudaExecutable
from weft.sm_budget import SmBudget

pytestmark = pytest.mark.gpu

GUEST_SHARED, GUEST_THREADS = 24 << 10, 256
MOST_CYCLES = 6_000_000_000
"""After which the co-runner ends by itself: some three seconds."""
GUEST = r"""
extern "C" __global__ void __launch_bounds__(256) guest(volatile unsigned* stop, long long* ran, float* out,
                                                        long long most) {
  extern __shared__ float held[];
  held[threadIdx.x] = threadIdx.x;
  __syncthreads();
  float v = held[threadIdx.x];
  const long long begin = clock64();
  long long now = begin;
  while (*stop == 0 && (now = clock64()) - begin < most)
    for (int i = 0; i < 64; ++i) v = v * 0.999f + 0.5f;
  out[blockIdx.x * blockDim.x + threadIdx.x] = v;
  if (threadIdx.x == 0) ran[blockIdx.x] = now - begin;
}
extern "C" __global__ void whole(float* out) {
  extern __shared__ float every[];
  every[threadIdx.x] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = every[31];
}
"""


def budget_beside(facts: GpuFacts) -> SmBudget:
    """What the co-runner leaves: 64 registers of each of its threads, its shared memory, threads and CTA."""
    return SmBudget(
        facts.registers_per_sm - 64 * GUEST_THREADS,
        (facts.shared_per_sm - GUEST_SHARED - facts.shared_reserved) // 128 * 128,
        facts.threads_per_sm - GUEST_THREADS,
        facts.blocks_per_sm - 1,
    )


@pytest.fixture(scope="module")
def beside(stated: GpuFacts, shared_cache: Path) -> tuple[CudaExecutable, list[torch.Tensor]]:
    """A small network under the budget, and its inputs."""
    module, inputs = network("cnn", DTYPES["f16"])
    options = weft.Options(
        device="cuda", budget_s=60.0, cache_dir=shared_cache, sm_budget=budget_beside(stated), keep_worker=False
    )
    found = weft.compile(module, inputs, options=options).executable
    assert isinstance(found, CudaExecutable)
    return found, list(inputs)


class CoRunner:
    """A persistent grid, one CTA on each SM, until it is told to stop or has run for three seconds."""

    def __init__(self, nvrtc: Nvrtc, facts: GpuFacts) -> None:
        made = nvrtc.compile(GUEST, arch=facts.arch)
        assert dict(made.resources)["guest"].registers <= 64
        self._module, self.sms = Module(made.path), facts.sms
        self.function, self.whole = self._module.function("guest"), self._module.function("whole")
        for function in (self.function, self.whole):
            prefer_shared(function)
        self._stop = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.ran = torch.zeros(self.sms, dtype=torch.int64, device="cuda")
        self._out = torch.zeros(self.sms * GUEST_THREADS, device="cuda")
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        self.stream, self._copies = torch.cuda.Stream(), torch.cuda.Stream()
        self.ended = torch.cuda.Event()

    def start(self) -> None:
        """Put it on its stream, and give it time to be on all SMs."""
        torch.cuda.synchronize()
        addresses = (self._stop.data_ptr(), self.ran.data_ptr(), self._out.data_ptr(), MOST_CYCLES)
        bound = self.function.bind(
            (self.sms, 1, 1), (GUEST_THREADS, 1, 1), addresses, shared_bytes=GUEST_SHARED, dependent=False
        )
        bound.launch(self.stream.cuda_stream)
        self.ended.record(self.stream)
        time.sleep(0.05)
        assert not self.ended.query(), "it runs"

    def stop(self) -> None:
        """Tell it by a copy engine, which needs no SM, and wait."""
        with torch.cuda.stream(self._copies):
            self._stop.copy_(self._one, non_blocking=True)
        torch.cuda.synchronize()


@pytest.fixture
def co_runner(nvrtc: Nvrtc, stated: GpuFacts, beside: object) -> Iterator[CoRunner]:
    assert beside is not None  # compiled before
    found = CoRunner(nvrtc, stated)
    yield found
    found.stop()


def ends(event: torch.cuda.Event, limit_s: float) -> bool:
    """Whether what was recorded ends within so many seconds."""
    until = time.monotonic() + limit_s
    while not event.query():
        if time.monotonic() > until:
            return False
        time.sleep(1e-4)
    return True


def test_every_step_fits_and_prefers_the_carve_out(beside: tuple[CudaExecutable, list[torch.Tensor]]) -> None:
    exe, _ = beside
    assert all(isinstance(s.kernel, CudaSource) for s in exe.plan.steps), "no call"
    assert len(exe.sm_shares) == len(exe.plan.steps) and all("CTA" in x for x in exe.sm_shares)
    for identity, bound in exe._loaded.items():
        stated = usage(exe.linked.objects[identity].read_bytes())
        for entry, function in bound._functions.items():
            assert isinstance(function, Function)
            assert function._attribute(9) == 100, "the preferred carve-out"
            assert function.attributes.registers == stated[entry].registers
            assert function.attributes.shared_bytes - stated[entry].shared_bytes in (0, 1024)


def test_a_plan_ends_while_a_co_runner_stays(
    beside: tuple[CudaExecutable, list[torch.Tensor]], co_runner: CoRunner
) -> None:
    exe, inputs = beside
    alone = [x.clone() for x in exe(*inputs)]
    co_runner.start()
    ended = torch.cuda.Event()
    found = [exe(*inputs) for _ in range(20)]
    ended.record()
    assert ends(ended, 1.0), "a kernel waits for the co-runner"
    assert not co_runner.ended.query(), "which has not ended"
    co_runner.stop()
    assert int(co_runner.ran.min()) > 0
    for outputs in found:
        for got, wanted in zip(outputs, alone, strict=True):
            assert torch.equal(got, wanted), "bit by bit as alone"


def test_a_kernel_that_wants_the_whole_sm_waits(co_runner: CoRunner, stated: GpuFacts) -> None:
    """What the budget is for: this one does not end before the co-runner does."""
    out = torch.zeros(stated.sms, device="cuda")
    co_runner.start()
    bound = co_runner.whole.bind(
        (stated.sms, 1, 1), (256, 1, 1), (out.data_ptr(),), shared_bytes=stated.shared_per_block, dependent=False
    )
    stream, ended = torch.cuda.Stream(), torch.cuda.Event()
    bound.launch(stream.cuda_stream)
    ended.record(stream)
    assert not ends(ended, 0.3) and not co_runner.ended.query()
    co_runner.stop()
    assert ended.query() and bool((out == 1).all())


def test_a_saved_plan_is_checked_and_runs(
    beside: tuple[CudaExecutable, list[torch.Tensor]], tmp_path: Path, shared_cache: Path
) -> None:
    from weft.runtime import artifact

    exe, inputs = beside
    artifact.save(exe.linked, tmp_path / "p.weft", trust_dir=shared_cache)
    loaded = artifact.load(tmp_path / "p.weft", cache_dir=shared_cache)
    assert isinstance(loaded, CudaExecutable) and loaded.linked.facts["sm_budget"] == exe.linked.facts["sm_budget"]
    assert loaded.sm_shares == exe.sm_shares
    for got, wanted in zip(loaded(*inputs), exe(*inputs), strict=True):
        assert torch.equal(got, wanted)
