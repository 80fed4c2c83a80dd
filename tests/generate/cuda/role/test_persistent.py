"""A best-effort job as a kernel of its own: every block once, whatever the limits, orders and throttles."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.generate.cuda import fusing
from tests.generate.cuda.fused_emulator import Counter, FusedKernels, Memory
from tests.generate.cuda.fusing import fma, meet
from tests.generate.cuda.tensor_emulator import Buffer
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import BARRIERS
from weft.generate.cuda.role.persistent import needs, persistent
from weft.generate.cuda.role.role import Parameter, RoleSource
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedSource, WorkCounter, left_beside
from weft.kernels.source import CudaSource, Pointer
from weft.sm_budget import SmBudget

CTAS = 3
RANGES = (0, 1, 131, 132, 133, 1009)
MANY = 100_003
JOBS: dict[str, RoleSource] = {
    **{f"{n} of arithmetic": fma(n, 32) for n in (*RANGES, MANY)},
    **{f"{n} that meet and leave": meet(n, 40) for n in RANGES},
    "in two dimensions": fma(7 * 19, 32, (7, 19, 1)),
}


def made(be: list[RoleSource], **fields: object) -> FusedSource:
    source = persistent(be, **{"ctas": CTAS, **fields})  # type: ignore[arg-type]
    assert isinstance(source, FusedSource), source
    return source


@cache
def forms() -> dict[str, tuple[FusedSource, CudaSource]]:
    """Each job as a persistent kernel and as the kernel that it was."""
    found = {}
    for number, (name, be) in enumerate(JOBS.items()):
        alone = solo(be, f"alone{number}")
        assert isinstance(alone, CudaSource)
        found[name] = made([be], entry=f"p{number}"), alone
    return found


CHAIN = "const unsigned i = role.block_x() * 32u + role.thread();\n"
"""Three stages: the second reads what blocks of other CTAs wrote in the first, the third adds to it."""


@cache
def chain() -> list[RoleSource]:
    x, y, z = (
        Parameter(name, Pointer("in", k), "const float* __restrict__" if name == "x" else "float* __restrict__")
        for k, name in enumerate(("x", "y", "z"))
    )
    stages = (
        (9, "y[i] += 2.0f * x[i];", (x, y)),
        (5, "z[i] += y[(i * 7u + 11u) % 288u];", (y, z)),
        (1, "y[i] += 1.0f;", (y,)),
    )
    return [
        replace(fma(n, 32), roles=(replace(fma(n, 32).roles[0], body=CHAIN + text, parameters=of),))
        for n, text, of in stages
    ]


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> FusedKernels:
    always = ("131 of arithmetic", "133 of arithmetic")
    both = [x for pair in asked(request, forms(), *always) for x in pair]
    staying = made([fma(133, 32)], entry="staying", stays=True)
    folded = made([fma(50, 96)], entry="folded", threads=32)
    return FusedKernels([*both, made(chain(), entry="chain"), staying, folded])


def reference(be: RoleSource) -> np.ndarray:
    return fusing.meet_alone(be) if be.roles[0].early_return else fusing.fma_alone(be)


@pytest.mark.parametrize("seed", few([1, 2, 3], 1))
@pytest.mark.parametrize("name", few([n for n in JOBS if not n.startswith(str(MANY))], 5))
def test_every_form_gives_the_same_bits(name: str, seed: int, kernels: FusedKernels) -> None:
    be, (source, alone) = JOBS[name], forms()[name]
    (blocks,) = source.stages
    counter, memory = Counter(WorkCounter.start(source.stages, blocks)), fusing.of(be)
    error = kernels.run(source, {1: memory}, counter, gang=CTAS, seed=seed)
    assert not error, error
    assert counter.now.finished == counter.now.limit == blocks
    assert all(b.intact() for b in memory.buffers) and counter.buffer.intact()
    if blocks == 0:
        assert not memory["out"][0].data.any()
        return
    np.testing.assert_array_equal(fusing.result(memory), reference(be))
    by_itself = fusing.of(be)
    error = kernels.run_alone(alone, by_itself)
    assert not error, error
    np.testing.assert_array_equal(fusing.result(memory), fusing.result(by_itself))


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{MANY} of arithmetic"])
def test_a_hundred_thousand_blocks(name: str, kernels: FusedKernels) -> None:
    be, (source, _) = JOBS[name], forms()[name]
    counter, memory = Counter(WorkCounter.start(source.stages, MANY)), fusing.of(be)
    assert kernels.run(source, {1: memory}, counter, gang=CTAS, order=0) == ""
    np.testing.assert_array_equal(fusing.result(memory), fusing.fma_alone(be))
    assert counter.now.finished == MANY


@pytest.mark.parametrize("name", ["1009 of arithmetic", "133 that meet and leave"])
def test_ranges_add_up(name: str, kernels: FusedKernels) -> None:
    """Kernel split: a limit below the grid runs that many blocks, each higher one the following."""
    be, (source, _) = JOBS[name], forms()[name]
    (blocks,) = source.stages
    threads = be.roles[0].threads
    counter, memory = Counter(WorkCounter.start(source.stages, 0)), fusing.of(be)
    wanted = reference(be)
    for number, limit in enumerate((0, 1, 14, 15, 100, blocks - 1, blocks)):
        counter.set("limit", limit)
        assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=number + 5) == ""
        assert counter.now.finished == limit
        got = fusing.result(memory)
        np.testing.assert_array_equal(got[: limit * threads], wanted[: limit * threads])
        assert not got[limit * threads :].any(), "a block behind the limit"


def test_a_limit_that_is_raised_while_it_runs_refills(kernels: FusedKernels) -> None:
    source, be = made([fma(133, 32)], entry="staying", stays=True), fma(133, 32)
    for seed in range(1, 6):
        counter, memory = Counter(WorkCounter.start(source.stages, 3)), fusing.of(be)

        def host(counter: Counter = counter) -> None:
            now = counter.now
            if now.finished == now.limit and now.limit < 133:
                counter.set("limit", min(133, now.limit + 17))
            elif now.finished == 133:
                counter.set("stop", 1)

        assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=seed, host=host) == ""
        np.testing.assert_array_equal(fusing.result(memory), fusing.fma_alone(be))
        assert counter.now.finished == 133


@pytest.mark.parametrize("after", [0, 1, 40, 120])
def test_a_job_that_is_told_to_stop_ends_at_block_ends(after: int, kernels: FusedKernels) -> None:
    be, (source, _) = JOBS["133 of arithmetic"], forms()["133 of arithmetic"]
    counter, memory = Counter(WorkCounter.start(source.stages, 133)), fusing.of(be)
    at_stop: list[int] = []

    def host() -> None:
        if min(counter.now.ticket, counter.now.end) >= after and not at_stop:
            counter.set("stop", 1)
            at_stop.append(counter.now.ticket)

    assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=9, host=host) == ""
    assert at_stop and counter.now.finished <= at_stop[0] + CTAS, "at most what was drawn or about to be"
    finished = counter.now.finished
    blocks = fusing.result(memory).reshape(133, 32)
    wanted = fusing.fma_alone(be).reshape(133, 32)
    ran = (blocks == wanted).all(axis=1) & wanted.any(axis=1)
    assert ran.sum() == finished == min(counter.now.ticket, counter.now.end), "drawn blocks are run to their end"
    counter.set("stop", 0)
    assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=10) == ""
    np.testing.assert_array_equal(fusing.result(memory), fusing.fma_alone(be))


@pytest.mark.parametrize("seed", few(range(1, 9), 3))
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_stage_begins_when_all_of_the_one_before_is_written(rounds: int, seed: int, kernels: FusedKernels) -> None:
    source = made(chain(), entry="chain")
    assert source.stages == (9, 5, 1) and "__restrict__ be" not in source.text
    memory = Memory()
    for n in (288, 288, 160):
        memory["in"].append(Buffer(4 * n, 0))
    x = np.arange(288, dtype=np.float32)
    memory["in"][0].data.view(np.float32)[:] = x
    y, z = np.zeros(288, np.float32), np.zeros(160, np.float32)
    for _ in range(rounds):
        y += 2 * x
        z += y[(np.arange(160) * 7 + 11) % 288]
        y[:32] += 1
    counter = Counter(WorkCounter.start(source.stages, 15 * rounds))
    assert kernels.run(source, {1: memory, 2: memory, 3: memory}, counter, gang=CTAS, seed=seed) == ""
    # each stage names its buffers from 0 on by their own positions
    np.testing.assert_array_equal(memory["in"][1].data.view(np.float32), y)
    np.testing.assert_array_equal(memory["in"][2].data.view(np.float32), z)
    assert counter.now.finished == 15 * rounds and counter.now.stage == 0


@pytest.mark.parametrize(("field", "value"), [("sms", 1), ("ctas", 1), ("duty", 64), ("duty", 1)])
def test_a_throttle_slows_and_loses_nothing(field: str, value: int, kernels: FusedKernels) -> None:
    be, (source, _) = JOBS["131 of arithmetic"], forms()["131 of arithmetic"]
    counter, memory = Counter(WorkCounter.start(source.stages, 131)), fusing.of(be)
    counter.set(field, value)
    assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=4, host=lambda: None) == ""
    np.testing.assert_array_equal(fusing.result(memory), fusing.fma_alone(be))
    assert counter.now.finished == 131


def test_all_work_in_the_same_part_of_a_period(kernels: FusedKernels) -> None:
    """Of every 4096 ns the first 64; a CTA looks again each 512 ns, and the clock of the emulation is that of all."""
    be, (source, _) = JOBS["131 of arithmetic"], forms()["131 of arithmetic"]

    def looks(duty: int) -> int:
        counter, memory = Counter(WorkCounter.start(source.stages, 131)), fusing.of(be)
        counter.set("period", 4096)
        counter.set("duty", duty)
        naps: list[int] = []
        assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=4, host=lambda: naps.append(1)) == ""
        np.testing.assert_array_equal(fusing.result(memory), fusing.fma_alone(be))
        assert counter.now.finished == 131
        return len(naps)

    assert looks(4) > 131 + looks(256)


@pytest.mark.parametrize("period", [0, 4096])
def test_a_job_at_rest_can_be_stopped(period: int, kernels: FusedKernels) -> None:
    be, (source, _) = JOBS["131 of arithmetic"], forms()["131 of arithmetic"]
    counter, memory = Counter(WorkCounter.start(source.stages, 131)), fusing.of(be)
    counter.set("duty", 0)
    counter.set("period", period)
    calls = []

    def host() -> None:
        calls.append(1)
        if len(calls) == 50:
            counter.set("stop", 1)

    assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=4, host=host) == ""
    assert counter.now.finished == 0 and len(calls) >= 50 and not memory["out"][0].data.any()


def test_blocks_whose_threads_do_not_meet_run_in_fewer_threads(kernels: FusedKernels) -> None:
    be = fma(50, 96)
    source = made([be], entry="folded", threads=32)
    assert source.threads == 32
    counter, memory = Counter(WorkCounter.start(source.stages, 50)), fusing.of(be)
    assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=3) == ""
    np.testing.assert_array_equal(fusing.result(memory), fusing.fma_alone(be))


@pytest.mark.parametrize(
    ("be", "fields", "reason"),
    [
        ([], {}, "without stages"),
        ([fma(3)], {"ctas": 0}, "whole warps"),
        ([fma(3)], {"threads": 48}, "whole warps"),
        ([meet(3)], {"threads": 64}, "blocks of 96 threads that meet"),
        ([fma(3, 1056)], {}, "block of 1056 threads"),
    ],
)
def test_what_is_declined(be: list[RoleSource], fields: dict[str, int], reason: str) -> None:
    source = persistent(be, **{"ctas": 3, **fields})  # type: ignore[arg-type]
    assert isinstance(source, Declined) and reason in source.reason


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_compiles_without_spills_and_waits_for_no_kernel(arch: str) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    waits = replace(fma(9), roles=(replace(fma(9).roles[0], body="role.pdl_wait(); role.pdl_trigger();"),))
    source = made([fma(1009), meet(133), waits], ctas=132, min_ctas_per_sm=8)
    found = nvrtc.compile(source.text, arch=arch).of("co_runner")
    assert found.spill_stores == found.spill_loads == 0
    # for sm_80 the assembler reserves all numbers where lanes of a warp meet at different places
    assert found.barriers == (2 if arch == "sm_90a" else BARRIERS)
    assert found.registers <= 65536 // (128 * 8)
    budget = needs(source, found.registers, found.shared_bytes, 1, GpuFacts())
    assert isinstance(left_beside(SmBudget(65536, 233472, 2048, 32), budget), SmBudget)
    body = source.text[source.text.index("struct w_virtual") : source.text.index("struct w_folded")]
    assert "static W_FN void pdl_wait() {}" in body and "static W_FN void pdl_trigger() {}" in body


def ptx(text: str) -> str:
    """What the compiler makes of a text before the assembler has it."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    api = nvrtc._api
    _, program = api.nvrtcCreateProgram(text.encode(), b"k.cu", 0, None, None)
    options = [b"--std=c++17", b"-default-device", b"--gpu-architecture=compute_80"]
    (status,) = api.nvrtcCompileProgram(program, len(options), options)
    assert int(status) == 0
    _, size = api.nvrtcGetPTXSize(program)
    data = bytes(size)
    api.nvrtcGetPTX(program, data)
    return data.decode()


def test_stages_read_what_others_wrote_through_coherent_caches() -> None:
    """Also where a text says that nobody writes there."""
    reads = "W_FN float read(const float* __restrict__ p, unsigned i) { return p[i] + __ldg(p + i + 1); }\n"
    says = replace(chain()[1].roles[0], globals=reads, body=CHAIN + "z[i] += read(y, i);")
    stages = [chain()[0], replace(chain()[1], roles=(says,)), chain()[2]]
    assert "ld.global.nc" not in ptx(made(stages).text)
    assert "ld.global.nc" not in ptx(made(chain()).text)
    assert "ld.global.nc" in ptx(made([fma(9)]).text), "one stage may"
    asks = replace(says, body='float v; asm("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(y)); z[0] = v;')
    wrong = persistent([chain()[0], replace(chain()[1], roles=(asks,))], ctas=3)
    assert isinstance(wrong, Declined) and "past the coherent caches" in wrong.reason


def test_no_wait_for_kernels_before() -> None:
    waits = replace(fma(9), roles=(replace(fma(9).roles[0], body="role.pdl_wait(); role.pdl_trigger();"),))
    assert "griddepcontrol" not in ptx(made([waits]).text.replace("__CUDA_ARCH__ >= 900", "true"))


def test_what_it_takes_of_a_multiprocessor() -> None:
    source = made([meet(9)])
    taken = needs(source, 33, 0, 2, GpuFacts())
    assert taken == SmBudget(registers=2 * 4 * 1280, shared_bytes=2 * (512 + 1024), threads=2 * 96, ctas=2)
