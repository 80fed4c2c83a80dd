"""Fused steps of a plan: compiled for an H200, bound to the step's and the job's own memory, launched in its place."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from tests.colocate import test_kernel_job as jobs
from tests.colocate.cuda_plans import H200, cuda_plan, products
from tests.colocate.test_kernel_job import COPIES, LOW, Bound, Gpu, Made, compiler

from weft.colocate import fused_plan
from weft.colocate.fuse import LOOP_REGISTERS
from weft.colocate.fused_plan import ENTRY, FusedPlan, FusedStep, compiled, is_for_plans, shapes_for
from weft.colocate.kernel_job import ENTRY as CO_RUNNER
from weft.colocate.kernel_job import KEPT_AT, PASSES_AT, KernelJob
from weft.colocate.plan_roles import StepRole
from weft.colocate.whole_kernels import TEXT, drain_of
from weft.device.cuda.confined import ConfinedJob, ConfinedResult
from weft.errors import DeviceError
from weft.generate.bind import Addresses, BoundCuda, CudaDriver, Encode
from weft.generate.bind_fused import BoundFused
from weft.ir.declined import Declined
from weft.kernels.colocation import FusionShape, Place, RoleRegisters, WorkCounter
from weft.kernels.source import CudaSource

folder, made = jobs.folder, jobs.made
AT = Addresses([0x10_0000, 0x20_0000], [0x30_0000], [0x40_0000])
STREAM = 3


def plan_of(job: KernelJob, lanes: int = 1) -> FusedPlan:
    return FusedPlan(products(), cuda_plan(), job, H200, lanes=lanes)


def product_of(fused: FusedPlan) -> StepRole:
    return next(s for s in fused.steps.values() if s.name.startswith("tma"))


def first_shape(fused: FusedPlan) -> FusionShape:
    return shapes_for(product_of(fused), fused.job, H200)[0]


def alone_of(gpu: Gpu, source: CudaSource) -> BoundCuda:
    """A step by itself, on the same device."""
    driver = CudaDriver(lambda path: jobs.Loaded(gpu, "step"), cast("Encode", gpu.encode))
    return BoundCuda(source, Path("/nowhere/step.cubin"), driver=driver)


def put(gpu: Gpu, run: Any) -> list[Bound]:
    """What is launched, in order."""
    ran: list[Bound] = []
    gpu.kernel = ran.append
    run(STREAM)
    gpu.run(STREAM)
    return ran


def test_the_fused_kernel_takes_the_steps_and_the_jobs_memory_and_the_jobs_counter(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    fused = plan_of(job)
    step = product_of(fused)
    rebound = fused.rebound({step.name: first_shape(fused)})
    assert not isinstance(rebound, Declined) and sorted(rebound) == [0, 2] == sorted(step.steps)
    alone = alone_of(gpu, step.source)
    files = set()
    for number, dependent in ((0, True), (2, False)):
        (one,) = put(gpu, rebound[number](alone, AT, dependent))
        files.add(one.file)
        assert one.entry == ENTRY and one.given["dependent"] is dependent
        *own, counter = one.given["arguments"]
        lc, be = own[: len(step.role.roles[0].parameters)], own[len(step.role.roles[0].parameters) :]
        assert counter == job.counter
        assert AT.outputs[0] in lc or any(isinstance(x, bytes) for x in lc)
        assert {job.addresses[0].inputs[0], job.addresses[1].outputs[0]} <= {x for x in be if isinstance(x, int)}
        assert one.given["grid"] == step.role.roles[0].grid
    fused_modules = [m for m in gpu.modules if m.file in files]
    assert len(fused_modules) == 1, "steps with one text are compiled and loaded once"
    (table,) = fused_modules[0].variables.values()
    (plain,) = next(m for m in gpu.modules if m.variables and m is not fused_modules[0]).variables.values()
    assert gpu.read(table, 16) == gpu.read(plain, 16), "its constants are the job's"


def test_a_kernel_is_compiled_and_loaded_once_whatever_variants_have_it(made: Made, folder: Path) -> None:
    asked: list[ConfinedJob] = []

    def noting(given: Sequence[ConfinedJob]) -> list[ConfinedResult | Declined]:
        asked.extend(given)
        return compiler(given)

    gpu = Gpu()
    fused = plan_of(made(folder, gpu, compiler=noting))
    step, shape = product_of(fused), first_shape(fused)
    before, loaded = len(asked), len(gpu.modules)
    for _ in range(3):
        assert not isinstance(fused.rebound({step.name: shape}), Declined)
    assert len([a for a in asked[before:] if ENTRY in a.names]) == 1 and len(gpu.modules) == loaded + 1


def test_whole_kernels_stand_around_every_fused_step(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    fused = plan_of(job)
    step = product_of(fused)
    rebound = fused.rebound({step.name: first_shape(fused)}, whole=True)
    assert not isinstance(rebound, Declined)
    alone = alone_of(gpu, step.source)
    first, last = (put(gpu, rebound[n](alone, AT, True)) for n in (0, 2))
    assert [x.entry for x in first] == ["w_keep", "w_grant", ENTRY, CO_RUNNER]
    assert [x.entry for x in last] == ["w_grant", ENTRY, CO_RUNNER, "w_give_back"]
    assert not any(x.given["dependent"] for x in (*first, *last)), "each waits for all before it"
    limit, finished = (job.counter + WorkCounter.offset(x) for x in ("limit", "finished"))
    kept = job.counter + KEPT_AT
    assert first[0].given["arguments"] == (limit, kept) == last[-1].given["arguments"]
    assert first[1].given["arguments"] == (limit, finished, kept, job.pass_blocks)
    assert KEPT_AT >= PASSES_AT + 4


def test_whole_kernels_need_one_stream(made: Made, folder: Path) -> None:
    fused = plan_of(made(folder, Gpu()), lanes=3)
    found = fused.rebound({product_of(fused).name: first_shape(fused)}, whole=True)
    assert isinstance(found, Declined) and "runs in 3 streams" in found.reason


def test_of_several_launches_one_is_fused_and_the_first_waits_as_the_step_does(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    fused = plan_of(job)
    step = product_of(fused)
    made_ = compiled(step, job, first_shape(fused), H200)
    assert not isinstance(made_, Declined)
    loaded = fused.load(made_)
    assert isinstance(loaded, FusedStep)
    (launch,) = step.source.launches
    several = replace(step.source, launches=tuple(replace(launch, entry=f"k{n}") for n in range(3)))
    alone = alone_of(gpu, several)
    for number in range(3):
        one = replace(loaded, step=replace(step, source=several, launch=number))
        ran = put(gpu, one.prepare(job, alone, AT, False))
        names = ["k0", "k1", "k2"]
        names[number] = ENTRY
        assert [x.entry for x in ran] == names
        assert [x.given["dependent"] for x in ran] == [False, True, True], "behind the first each may begin early"


def test_what_cannot_be_is_declined_by_name(made: Made, folder: Path) -> None:
    fused = plan_of(made(folder, Gpu()))
    step, shape = product_of(fused), first_shape(fused)
    for given, said in (
        ({"gone 0123": shape}, "gone 0123: the plan has no such step"),
        ({step.name: replace(shape, fill_grid=True)}, "cannot share a work counter"),
        ({step.name: replace(shape, in_time=True)}, "cannot share a work counter"),
        ({step.name: replace(shape, threads=33)}, "whole warps are needed"),
        ({step.name: replace(shape, barrier=0)}, "barriers from 0 on"),
    ):
        found = fused.rebound(given)
        assert isinstance(found, Declined) and said in found.reason


def test_a_kernel_that_spills_or_does_not_compile_is_declined(made: Made, folder: Path) -> None:
    def spilling(given: Sequence[ConfinedJob]) -> list[ConfinedResult | Declined]:
        found = []
        for job, one in zip(given, compiler(given), strict=True):
            if ENTRY in job.text and isinstance(one, ConfinedResult):
                one = replace(one, resources=tuple((n, replace(r, spill_stores=400)) for n, r in one.resources))
            found.append(one)
        return found

    def failing(given: Sequence[ConfinedJob]) -> list[ConfinedResult | Declined]:
        return [Declined("x.cu(3): error: no") if ENTRY in j.names else compiler([j])[0] for j in given]

    for broken, said in ((spilling, "spills 400 bytes"), (failing, "does not compile for sm_90a: x.cu(3): error: no")):
        fused = plan_of(made(folder, Gpu(), compiler=broken))
        found = fused.rebound({product_of(fused).name: first_shape(fused)})
        assert isinstance(found, Declined) and said in found.reason


def test_what_the_gpu_refuses_is_declined(made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = plan_of(made(folder, Gpu()))

    def refused(*_: object, **__: object) -> BoundFused:
        raise DeviceError(problem="CTAs that spin on each other find no room")

    monkeypatch.setattr(KernelJob, "with_roles", refused)
    found = fused.rebound({product_of(fused).name: first_shape(fused)})
    assert isinstance(found, Declined) and "find no room" in found.reason


def test_shapes_are_those_that_share_a_counter_with_others(made: Made, folder: Path) -> None:
    fused = plan_of(made(folder, Gpu()))
    for step in fused.steps.values():
        found = shapes_for(step, fused.job, H200)
        assert all(map(is_for_plans, found)) and len(set(found)) == len(found)


def test_shapes_of_each_place_come_in_turn(made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose threads have few registers last, alike ones once, and none too small or of another counter."""
    fused = plan_of(made(folder, Gpu()))
    few, enough = (RoleRegisters(24, 200, fused.job.registers + LOOP_REGISTERS + n) for n in (-8, 0))
    extra, idle = (FusionShape(place, 128, 4, 1024, registers=few) for place in get_args(Place))
    every = [extra, replace(extra, registers=enough), replace(extra, barrier=5), idle, replace(idle, registers=enough)]
    every += [replace(extra, threads=64), replace(extra, fill_grid=True), replace(idle, threads=32, replicas=4)]
    monkeypatch.setattr(fused_plan, "shapes", lambda lc, be, facts: every)
    found = shapes_for(product_of(fused), fused.job, H200)
    assert found == [replace(extra, registers=enough), replace(idle, registers=enough), extra, idle]


def test_another_counter_leaves_the_jobs_own_alone(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    own, other = job.co_runner(4), job.co_runner(4, counter=0x7700)
    assert not isinstance(own, Declined) and not isinstance(other, Declined) and own is job.co_runner(4)
    (one,) = put(gpu, other.launch)
    assert one.given["arguments"][-1] == 0x7700
    (one,) = put(gpu, own.launch)
    assert one.given["arguments"][-1] == job.counter


def test_a_drain_has_as_many_ctas_as_stay_at_once(made: Made, folder: Path) -> None:
    job = made(folder, Gpu())
    few = replace(H200, threads_per_sm=128)  # two of its CTAs
    for facts, of_an_sm in ((H200, 8), (few, 2)):
        own = made(folder, Gpu(), facts=facts)
        found = drain_of(own, facts)
        assert not isinstance(found, Declined) and found.ctas == of_an_sm * H200.sms
    assert drain_of(job, H200) is job.co_runner(8 * H200.sms)
    none = replace(H200, threads_per_sm=32)
    declined = drain_of(made(folder, Gpu(), facts=none), none)
    assert isinstance(declined, Declined) and "0 stay at once" in declined.reason


def test_memory_of_a_job_is_told_with_its_guards(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    assert {len(gpu.read(a, n)) for a, n in job.memory} == {1024 + 512, 768 + 512} and job.exact


# -- what the device does with the limit


@cache
def limits(folder: Path) -> ctypes.CDLL:
    source, library = folder / "whole.cpp", folder / "whole.so"
    source.write_text(f"#define __global__\n{TEXT}")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("begin", [0, 17, (1 << 31) - 4, (1 << 32) - 3])
@pytest.mark.parametrize(("ahead", "blocks"), [(1 << 20, 10), (7, 10), (0, 10), (10, 10)])
def test_a_step_is_granted_a_pass_and_no_more_than_the_host_allows(
    begin: int, ahead: int, blocks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lib = limits(tmp_path_factory.getbasetemp())
    mask = (1 << 32) - 1
    limit, finished, kept = (ctypes.c_uint32(x & mask) for x in (begin + ahead, begin, 0))
    lib.w_keep(ctypes.byref(limit), ctypes.byref(kept))
    done = 0
    for _ in range(3):
        lib.w_grant(ctypes.byref(limit), ctypes.byref(finished), ctypes.byref(kept), ctypes.c_ulonglong(blocks))
        done = min(done + blocks, ahead)
        assert limit.value == begin + done & mask
        finished.value = limit.value  # the drain runs up to it
    lib.w_give_back(ctypes.byref(limit), ctypes.byref(kept))
    assert limit.value == begin + ahead & mask


def test_a_job_with_a_lowered_limit_is_counted_as_ever(made: Made, folder: Path) -> None:
    """What the device does to the limit is put back: then the host sees the job stand."""
    gpu = Gpu()
    job = made(folder, gpu)
    job.begin(LOW)
    job.stop(LOW)
    job.snapshot(COPIES)
    gpu.run(LOW)
    ran = replace(gpu.counter(job), end=10, ticket=10, open=14, finished=10)
    gpu.write(job.counter, replace(ran, limit=10).pack())
    gpu.run(COPIES)
    job.read()
    before = job.ended_blocks, job.stands
    gpu.write(job.counter, ran.pack())
    job.snapshot(COPIES)
    gpu.run(COPIES)
    job.read()
    assert before == (10, False) and (job.ended_blocks, job.stands) == (10, True) and job.check() == ""
