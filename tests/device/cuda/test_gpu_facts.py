"""Facts of GPUs: shipped records, what a driver states, what probes add, and what is dropped; occupancy."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tests.device.cuda.conftest import FakeGpu

from weft.device.cuda import facts as module
from weft.device.cuda.api import CudaError
from weft.device.cuda.calibrate import PROBE_TEXT, SIZES, Probes
from weft.device.cuda.facts import PROFILES, GpuFacts, gpu_facts, profile, profile_sources, state
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.cuda.occupancy import occupancy, register_need
from weft.errors import DeviceError
from weft.ir.declined import Declined

SEEN = Probes(
    bandwidth=((1 << 16, 70.0), (1 << 30, 4300.0)),
    read_bandwidth=((1 << 16, 75.0), (1 << 30, 4600.0)),
    l2_bandwidth=5500.0,
    launch_us=1.1,
    dependent_launch_us=0.6,
    flops_f32=6.0e13,
    clock_ghz=1.9,
    products={"bf16": 7.9e14},
)
COMPILER = Nvrtc("13.0 (test)", (80, 90), json)


@pytest.mark.parametrize("name", PROFILES)
def test_shipped_records(name: str) -> None:
    facts = profile(name)
    assert name.upper() in facts.name and GpuFacts.from_json(facts.to_json()) == facts
    chosen = {"tf32", "fast_f8", "sm_budget", "whole_sm"}  # by the caller
    assert set(profile_sources(name)) == {f.name for f in fields(facts)} - chosen
    assert all(profile_sources(name).values()) and facts.provenance == ()
    for dtype, rate in facts.achieved_flops:
        assert rate < dict(facts.flops)[dtype] <= facts.peak_flops(dtype)
    assert facts.bandwidth[-1][1] < facts.peak_bandwidth and facts.read_bandwidth[-1][1] < facts.peak_bandwidth


def test_the_default_is_an_h200() -> None:
    assert profile("h200") == GpuFacts() and GpuFacts().arch == "sm_90a" and profile("a100").arch == "sm_80"
    with pytest.raises(ValueError, match="no profile 'b200': there are h200, h100, a100"):
        profile("b200")


def test_ridges_and_laws() -> None:
    """Vectors of the performance notes, section 11."""
    assert profile("h200").ridge("bf16", 4800.0) == pytest.approx(206, abs=0.5)
    assert profile("h100").ridge("bf16") == pytest.approx(295, abs=0.5)
    assert profile("a100").ridge("bf16") == pytest.approx(153, abs=0.5)
    assert profile("h100").standalone_us(4 << 20) == pytest.approx(6.29, abs=0.005)


def test_peaks_are_at_the_highest_clock() -> None:
    assert profile("h200").peak_flops("bf16") == pytest.approx(1070.5e12, rel=1e-3)
    assert profile("h200").peak_flops("f32") == pytest.approx(66.9e12, rel=1e-3)
    assert profile("a100").peak_flops("f8") == math.inf == replace(GpuFacts(), capability=120).peak_flops("bf16")


@pytest.mark.parametrize(
    ("name", "threads", "shared", "registers", "blocks"),
    [
        ("h200", 128, 49152, 128, 4),
        ("h200", 256, 101376, 128, 2),
        ("h200", 256, 204800, 168, 1),
        ("h200", 384, 232448, 168, 1),
        ("h200", 128, 32768, 255, 2),
        ("h200", 256, 0, 32, 8),
        ("h200", 32, 0, 16, 32),
        ("h200", 1024, 0, 64, 1),
        ("h200", 1024, 0, 72, 0),
        ("h200", 992, 0, 65, 0),
        ("a100", 256, 49152, 128, 2),
        ("a100", 128, 166912, 128, 1),
        ("a100", 128, 166913, 128, 0),
        ("h200", 0, 0, 32, 0),
        ("h200", 1025, 0, 16, 0),
        ("h200", 32, 0, 256, 0),
    ],
)
def test_occupancy(name: str, threads: int, shared: int, registers: int, blocks: int) -> None:
    """Vectors of the performance notes, section 11, and what cannot start."""
    assert occupancy(profile(name), threads, shared, registers) == blocks


def test_registers_are_checked_by_fours_of_warps() -> None:
    assert register_need(992, 65) == 32 * 2304 > 65536 > 31 * 2112
    assert register_need(1024, 64) == 65536


def test_bandwidth_between_the_rows() -> None:
    facts = replace(GpuFacts(), bandwidth=((1 << 10, 10.0), (1 << 20, 30.0)), read_bandwidth=((1, 5.0),))
    assert [facts.bandwidth_at(s) for s in (1, 1 << 10, 1 << 15, 1 << 20, 1 << 40)] == [10.0, 10.0, 20.0, 30.0, 30.0]
    assert facts.bandwidth_at(1 << 15, read_only=True) == 5.0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 2}, "not a record"),
        ({"extra": 1}, "fields of GPU facts differ"),
        ({"sms": 0}, "not a positive integer"),
        ({"sms": True}, "not a positive integer"),
        ({"l2_bytes": 1.5}, "not a positive integer"),
        ({"clock_ghz": -1.0}, "not positive and finite"),
        ({"launch_us": math.nan}, "not positive and finite"),
        ({"clock_ghz": "fast"}, "another type"),
        ({"name": 3}, "no such compute capability or name"),
        ({"capability": 900}, "no such compute capability or name"),
        ({"peak_bandwidth": -1.0}, "negative or not finite"),
        ({"flops": [["f16", math.inf]]}, "not positive and finite"),
        ({"flops": [["f16"]]}, "malformed table"),
        ({"bandwidth": []}, "ascend in size"),
        ({"bandwidth": [[2, 1.0], [1, 1.0]]}, "ascend in size"),
        ({"bandwidth": [[2.5, 1.0]]}, "malformed table"),
        ({"read_bandwidth": [[1, 0.0]]}, "ascend in size"),
        ({"standalone": [1.0]}, "not positive and finite"),
        ({"provenance": [["sms", "guess"]]}, "unknown kind"),
        ({"provenance": [["speed", "default"]]}, "unknown field"),
    ],
)
def test_no_such_gpu(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GpuFacts.from_json(json.dumps(json.loads(GpuFacts().to_json()) | change))


def test_what_the_driver_states(gpu: FakeGpu) -> None:
    facts = gpu_facts(None, calibrate=False)
    base = profile("h200")
    assert (facts.name, facts.capability, facts.sms, facts.driver) == ("NVIDIA H200", 90, 132, "13000")
    assert facts.peak_bandwidth == pytest.approx(4916.7, rel=1e-4) and facts.memory_bytes == 150754820096
    assert facts.source_of("sms") == facts.source_of("flops") == "attribute"
    assert facts.source_of("bandwidth") == facts.source_of("clock_ghz") == "default"
    assert facts.bandwidth == base.bandwidth and dict(facts.flops)["bf16"] == pytest.approx(1070.5e12, rel=1e-3)
    assert gpu.current == 77
    read = {int(c[0]) for c in gpu.of("cuDeviceGetAttribute")}
    assert read == {13, 16, 36, 37, 38, 39, 75, 76, 81, 82, 97, 106, 111}


def test_a_slice_of_a_card_is_scaled() -> None:
    part = state({"name": "NVIDIA H200 MIG 1g.18gb", "capability": 90, "sms": 16, "max_clock_ghz": 1.98})
    assert part.peak_bandwidth == 0.0  # not stated: unknown
    assert dict(part.achieved_flops)["bf16"] == pytest.approx(790e12 * 16 / 132)
    assert dict(part.flops)["f32"] == 256 * 16 * 1.98e9


@pytest.mark.parametrize(("capability", "shipped"), [(80, "a100"), (89, "a100"), (90, "h100"), (120, "h100")])
def test_an_unknown_gpu_is_like_the_nearest(capability: int, shipped: str) -> None:
    known = {"name": "NVIDIA X", "capability": capability, "sms": 50, "max_clock_ghz": 2.0, "peak_bandwidth": 500.0}
    facts = state(known)
    share = 500.0 / profile(shipped).peak_bandwidth
    assert facts.bandwidth[-1][1] == pytest.approx(profile(shipped).bandwidth[-1][1] * share)
    assert facts.step_us == profile(shipped).step_us and facts.arch.startswith(f"sm_{capability}")
    assert GpuFacts.from_json(facts.to_json()) == facts


def test_an_old_gpu_is_refused(gpu: FakeGpu) -> None:
    gpu.attributes |= {75: 7, 76: 5}
    with pytest.raises(DeviceError, match=r"compute capability 7\.5; Weft needs 8\.0"):
        gpu_facts(None, calibrate=False)
    assert gpu.current == 77
    gpu.fails["cuDeviceGet"] = 101
    with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_DEVICE \(101\): device 4"):
        gpu_facts(None, device=4)


def test_measured_once(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def probes(*arguments: Any, **named: Any) -> Any:
        runs.append(arguments)
        return SEEN

    monkeypatch.setattr(module, "run_probes", probes)
    first = gpu_facts(tmp_path, compiler=COMPILER)
    assert first.bandwidth == SEEN.bandwidth and first.launch_us == 1.1 and first.clock_ghz == 1.9
    assert dict(first.achieved_flops) == dict(profile("h200").achieved_flops) | {"bf16": 7.9e14, "f32": 6.0e13}
    measured = {"bandwidth", "read_bandwidth", "l2_bandwidth", "launch_us", "clock_ghz", "achieved_flops"}
    assert {first.source_of(f) for f in measured} == {"measured"} and first.source_of("sms") == "attribute"
    assert gpu_facts(tmp_path, compiler=COMPILER) == first and len(runs) == 1
    (record,) = (tmp_path / "facts").iterdir()
    record.write_text(record.read_text().replace("4300", "9300"))
    assert gpu_facts(tmp_path, compiler=COMPILER) == first and len(runs) == 2
    gpu.name = b"NVIDIA H100"
    assert gpu_facts(tmp_path, compiler=COMPILER) != first and len(runs) == 3


def test_what_cannot_be_is_dropped(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    wild = replace(
        SEEN,
        bandwidth=((1 << 16, 70.0), (1 << 30, 9000.0)),
        read_bandwidth=((1 << 20, 9000.0), (1 << 30, 4000.0)),
        clock_ghz=7.0,
        flops_f32=1e20,
        products={"bf16": 1e20, "f16": 8e14},
    )
    monkeypatch.setattr(module, "run_probes", lambda *a, **k: wild)
    facts, base = gpu_facts(None, compiler=COMPILER), profile("h200")
    assert facts.bandwidth == base.bandwidth and facts.source_of("bandwidth") == "default"
    assert facts.read_bandwidth == wild.read_bandwidth  # small sizes come from the L2 cache
    assert facts.clock_ghz == base.clock_ghz
    assert dict(facts.achieved_flops) == dict(base.achieved_flops) | {"f16": 8e14}


def test_what_was_measured_beside_other_work_is_not_kept(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = profile("h200")
    slow = replace(SEEN, bandwidth=((1 << 16, 70.0), (1 << 30, 900.0)), products={"bf16": 9e13, "f16": 8e14})
    left = [slow, SEEN]
    monkeypatch.setattr(module, "run_probes", lambda *a, **k: left.pop(0))
    busy = gpu_facts(tmp_path, compiler=COMPILER)
    assert busy.bandwidth == base.bandwidth and busy.source_of("bandwidth") == "default"
    assert dict(busy.achieved_flops)["bf16"] == dict(base.achieved_flops)["bf16"]
    assert dict(busy.achieved_flops)["f16"] == 8e14
    assert not (tmp_path / "facts").exists()
    assert gpu_facts(tmp_path, compiler=COMPILER).bandwidth == SEEN.bandwidth and not left
    assert gpu_facts(tmp_path, compiler=COMPILER).bandwidth == SEEN.bandwidth  # kept


def test_without_a_compiler_nothing_is_measured(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_nvrtc", lambda: Declined("none"))
    assert gpu_facts(tmp_path) == gpu_facts(None, calibrate=False) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_probes_compile(arch: str, tmp_path: Path) -> None:
    found = find_nvrtc({})
    if isinstance(found, Declined):
        pytest.skip(found.reason)
    made = found.compile(PROBE_TEXT, arch=arch, cache_dir=tmp_path)
    assert {name for name, _ in made.resources} == {f"probe_{k}" for k in ("copy", "read", "step", "dependent", "fma")}
    assert all(r.spill_stores == r.stack_bytes == 0 for _, r in made.resources) and made.warnings == ()
    assert occupancy(profile("h200"), 512, 0, made.of("probe_fma").registers) >= 2  # one wave of the FMA probe
    assert list(SIZES) == sorted(SIZES)
