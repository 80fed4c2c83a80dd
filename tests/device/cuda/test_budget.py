"""A budget of an SM: what may be asked for, what a GPU has, and which compiled kernels keep to it. No GPU is needed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from weft.device.cuda.budget import first_over_budget, over_budget, share
from weft.device.cuda.cubin import Usage, usage
from weft.device.cuda.facts import PROFILES, GpuFacts, profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.cuda.occupancy import occupancy, warp_registers
from weft.errors import OptionError
from weft.ir.declined import Declined
from weft.kernels.dataclass_json import from_json, to_json
from weft.options import Options, parse_text
from weft.platform.cpu import Cpu
from weft.platform.cuda.platform import within
from weft.sm_budget import SmBudget

TEXT = "registers=49152,shared=200KiB,threads=1792,ctas=24"
BUDGET = SmBudget(49152, 200 << 10, 1792, 24)
OF_SM = ("registers_per_sm", "shared_per_sm", "shared_per_block", "threads_per_sm", "blocks_per_sm")


@dataclass(frozen=True)
class Launched:
    block: tuple[int, int, int] = (256, 1, 1)
    shared_bytes: int = 0
    grid: tuple[int, int, int] = (1000, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    co_resident: int = 1
    entry: str = "k"


# ---- the option


def test_an_object_and_its_text_are_one_budget(tmp_path: Path) -> None:
    assert Options(sm_budget=BUDGET).sm_budget == BUDGET == parse_text("x", "SmBudget", TEXT) and str(BUDGET) == TEXT
    assert Options.from_environment({"WEFT_SM_BUDGET": " ctas = 24, registers=49_152 ,threads=1792,shared=204800"}) == (
        Options(sm_budget=BUDGET)
    )
    file = tmp_path / "weft.toml"
    file.write_text(f'sm_budget = "{TEXT}"\n')
    assert Options.from_environment({"WEFT_CONFIG": str(file)}).sm_budget == BUDGET
    assert Options.from_environment({"WEFT_CONFIG": str(file), "WEFT_SM_BUDGET": "threads=64"}).sm_budget == SmBudget(
        threads=64
    )
    assert str(SmBudget(shared_bytes=128)) == "shared=128" and Options().sm_budget is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("registers=1000", "no multiple of 256, the unit in which a warp is given registers"),
        ("shared=200KB", "shared='200KB' is not a whole number, or a size such as 200KiB"),
        ("shared=100", "no multiple of 128, the unit in bytes in which a CTA is given shared memory"),
        ("threads=100", "no multiple of 32, the threads of a warp"),
        ("threads=0", "leave threads out where it shall have no limit"),
        ("ctas=-1", "less than nothing"),
        ("ctas=1.5", "ctas='1.5' is not a whole number"),
        ("warps=4", "'warps=4' is none of its parts: registers=N, shared=N, threads=N, ctas=N"),
        ("ctas=1,ctas=1", "'ctas' stands there twice"),
        ("49152", "'49152' is none of its parts"),
    ],
)
def test_what_is_no_budget_is_said(text: str, said: str) -> None:
    with pytest.raises(OptionError, match="W001") as error:
        Options.from_environment({"WEFT_SM_BUDGET": text})
    assert said in str(error.value) and "WEFT_SM_BUDGET" in str(error.value)


@pytest.mark.parametrize("given", [SmBudget(), SmBudget(registers=100), SmBudget(threads=True), 49152, ("a",)])
def test_objects_are_checked_too(given: object) -> None:
    with pytest.raises(OptionError, match=r"sm_budget.*\[W001\]"):
        Options(sm_budget=given)  # type: ignore[arg-type]


def test_a_file_has_it_as_text(tmp_path: Path) -> None:
    file = tmp_path / "weft.toml"
    file.write_text("sm_budget = 49152\n")
    with pytest.raises(OptionError, match=r"sm_budget in .*weft.toml.*a text such as registers=49152"):
        Options.from_environment({"WEFT_CONFIG": str(file)})


def test_a_cpu_refuses_it_by_name() -> None:
    with pytest.raises(OptionError, match=r"'sm_budget': registers=49152.*the device is 'cpu'.*W001"):
        Cpu.survey(Options(sm_budget=BUDGET), calibrate_s=0.0)


def test_only_a_budget_keeps_the_framework_from_answering() -> None:
    assert not Options().bounds_plans and Options(memory_limit_bytes=1).bounds_plans
    assert Options(device="cuda", sm_budget=BUDGET).bounds_plans


# ---- facts


@pytest.mark.parametrize("name", PROFILES)
def test_a_budget_changes_the_counts_of_an_sm_and_nothing_else(name: str) -> None:
    whole = profile(name)
    small = whole.within(SmBudget(32768, 96 << 10, 1024, 16))
    assert [getattr(small, f) for f in OF_SM] == [32768, 96 << 10, (96 << 10) - 1024, 1024, 16]
    others = {f.name for f in fields(GpuFacts)} - {*OF_SM, "sm_budget", "whole_sm"}
    assert all(getattr(small, f) == getattr(whole, f) for f in others)
    assert small.whole == whole == whole.whole == small.within(None) == whole.within(None)
    assert small.within(SmBudget(threads=2048)).registers_per_sm == 65536, "a budget is of the whole SM"
    assert small.to_json() != whole.to_json() and from_json(GpuFacts, to_json(small)) == small  # how processes get it


def test_what_is_left_out_is_what_the_sm_has() -> None:
    small = profile("h200").within(SmBudget(registers=49152))
    assert small.sm_budget == SmBudget(49152, 233472, 2048, 32)
    assert small.shared_per_block == 232448 == profile("h200").shared_per_block


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (SmBudget(registers=65792), "registers is 65792, and an SM of NVIDIA A100-SXM4-80GB has 65536"),
        (SmBudget(shared_bytes=200 << 10), "shared is 204800, and an SM of"),
        (SmBudget(threads=2080), "threads is 2080, and an SM of"),
        (SmBudget(ctas=33), "ctas is 33, and an SM of"),
        (SmBudget(shared_bytes=1024), "1024 bytes of them are the system's in each CTA"),
    ],
)
def test_no_more_than_the_sm_has(budget: SmBudget, said: str) -> None:
    with pytest.raises(OptionError, match=r"option 'sm_budget'.*W001") as error:
        within(replace(profile("a100"), name="NVIDIA A100-SXM4-80GB"), Options(device="cuda", sm_budget=budget))
    assert said in str(error.value)


# ---- the rule


def fits_by_counting(facts: GpuFacts, threads: int, shared: int, registers: int) -> bool:
    """Warps put into the four parts of an SM one by one, with what the budget has of each."""
    budget = facts.sm_budget
    assert budget is not None and budget.registers and budget.shared_bytes and budget.threads
    warps = -(-threads // 32)
    parts = [budget.registers // 4] * 4
    for warp in range(-(-warps // 4) * 4):  # checked at launch as a multiple of four
        parts[warp % 4] -= warp_registers(registers)
    used = -(-shared // 128) * 128 + 1024
    return min(parts) >= 0 and used <= budget.shared_bytes and warps * 32 <= budget.threads and threads <= 1024


def test_the_rule_is_what_counting_says() -> None:
    facts = profile("h200").within(BUDGET)
    seen = set()
    for threads, shared, registers in itertools.product(
        (32, 96, 128, 160, 256, 384, 512, 992, 1024), (0, 100, 48 << 10, 203_776, 203_777, 227 << 10),
        (16, 32, 48, 64, 96, 120, 128, 168, 192, 255),
    ):  # fmt: skip
        launch = Launched((threads, 1, 1), shared - 100 if shared >= 100 else 0)
        taken = Usage(registers, min(shared, 100))
        refused = over_budget(launch, taken, facts)
        assert (refused is None) is fits_by_counting(facts, threads, shared, registers), (threads, shared, registers)
        assert (refused is None) is (share(launch, taken, facts).resident > 0)
        assert over_budget(launch, taken, facts.whole) is None, "without a budget there is no rule"
        seen.add(refused is None)
    assert seen == {True, False}


def test_the_reason_names_what_is_short() -> None:
    facts = profile("h200").within(BUDGET)
    found = over_budget(Launched((384, 1, 1), 210_000), Usage(168, 0), facts)
    assert found is not None and "a CTA of k is over sm_budget" in found.reason
    assert "64512 registers of 49152" in found.reason and "211072 shared of 204800" in found.reason
    assert "threads" not in found.reason
    found = over_budget(Launched((1024, 1, 1)), Usage(32, 0), profile("h200").within(SmBudget(threads=512)))
    assert found is not None and found.reason.endswith("1024 threads of 512")
    # 5 warps count as 8: 8 * 192 * 32 registers
    found = over_budget(Launched((160, 1, 1)), Usage(192, 0), profile("h200").within(SmBudget(registers=48896)))
    assert found is not None and "49152 registers of 48896" in found.reason


def test_ctas_that_spin_on_each_other_need_room_for_twice_as_many() -> None:
    facts = profile("h200").within(SmBudget(threads=256))  # one CTA on each of 132 SMs
    assert over_budget(Launched(co_resident=66), Usage(32, 0), facts) is None
    found = over_budget(Launched(co_resident=67), Usage(32, 0), facts)
    assert found is not None and "67 CTAs of k must be co-resident" in found.reason and "hold 132 CTAs" in found.reason


def test_an_entry_that_is_not_there_does_not_fit() -> None:
    facts = profile("h200").within(BUDGET)
    taken = {"k": Usage(32, 0)}
    assert first_over_budget([Launched(), Launched()], taken, facts) is None
    found = first_over_budget([Launched(), Launched(entry="other"), Launched(co_resident=10**6)], taken, facts)
    assert found is not None and found.reason == "the object has no entry other"


def test_the_share_of_an_sm() -> None:
    facts = profile("h200").within(BUDGET)
    found = share(Launched((256, 1, 1), 40_000), Usage(64, 0), facts)
    assert found.of_a_cta == SmBudget(256 * 64, 40_064 + 1024, 256, 1)
    assert found.resident == 3 == occupancy(facts, 256, 40_000, 64)
    assert found.text(facts) == "3 CTAs: registers 75 %, shared 53 %, threads 38 %"
    alone = share(Launched((256, 1, 1), 40_000, grid=(11, 12, 1)), Usage(64, 0), facts)
    assert alone.resident == 1 and alone.text(facts).startswith("1 CTA: registers 25 %")


# ---- what a cubin says


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if isinstance(found, Declined):
        pytest.skip("no NVRTC")
    return found


KERNELS = """extern "C" __global__ void __launch_bounds__(384, 1) wide(const float* x, float* y) {
  __shared__ float kept[300];
  float v[48];
  for (int i = 0; i < 48; ++i) v[i] = x[i * 384 + threadIdx.x];
  kept[threadIdx.x % 300] = v[7];
  __syncthreads();
  for (int k = 0; k < 64; ++k)
    for (int i = 0; i < 48; ++i) v[i] = v[i] * v[(i + 1) % 48] + kept[k];
  for (int i = 0; i < 48; ++i) y[i * 384 + threadIdx.x] = v[i];
}
extern "C" __global__ void small(float* y) { y[threadIdx.x] = 1.0f; }
__device__ __noinline__ float called(float x) { return sinf(x) * cosf(x); }
extern "C" __global__ void calling(float* y) { y[threadIdx.x] = called(y[threadIdx.x]); }
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_cubin_says_what_the_assembler_reports(nvrtc: Nvrtc, arch: str) -> None:
    made = nvrtc.compile(KERNELS, arch=arch)
    reported = {entry: Usage(own.registers, own.shared_bytes) for entry, own in made.resources}
    assert usage(made.path.read_bytes()) == reported and set(reported) == {"wide", "small", "calling"}
    assert reported["wide"].shared_bytes == 1200 and reported["wide"].registers >= 48 > reported["small"].registers


def test_a_damaged_cubin_says_nothing() -> None:
    for bad in (b"", b"text", b"\x7fELF\x02\x01" + bytes(80)):
        with pytest.raises(ValueError, match="not a cubin"):
            usage(bad)


def test_occupancy_of_a_budget_is_never_that_of_more() -> None:
    facts, small = profile("h200"), profile("h200").within(BUDGET)
    for threads, shared, registers in itertools.product((64, 128, 384), (0, 60_000, 120_000), (32, 80, 128)):
        assert occupancy(small, threads, shared, registers) <= occupancy(facts, threads, shared, registers)
