from __future__ import annotations

import ctypes
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.typed import noting

from weft.device import facts as module
from weft.device.facts import CpuFacts, cpu_facts, usable_cores
from weft.device.probe import PROBE_TEXT, ProbeResult, run_probes
from weft.device.stored import keep
from weft.device.toolchain import HostCompiler, find_compiler
from weft.errors import ToolchainError
from weft.ir.declined import Declined

SEEN = ProbeResult(
    8, 3.0, 3.0e9 * 8 * 2 * 2, 1.5, ((1 << 16, 200.0), (1 << 24, 50.0)), ((1 << 16, 300.0), (1 << 24, 60.0))
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A copy of what a system states."""
    root = tmp_path / "root"
    write(root / "proc/cpuinfo", "model name\t: Test <CPU> @ 3\ncpu MHz\t: 2500.5\nflags\t: fpu sse2 avx2 fma\n")
    write(root / "proc/meminfo", "MemTotal: 8 kB\nMemAvailable:    4194304 kB\n")
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M"), ("3", "Unified", "1G")]
    ):
        for name, text in (("level", level), ("type", kind), ("size", size), ("coherency_line_size", "128")):
            write(root / f"sys/devices/system/cpu/cpu0/cache/index{index}/{name}", text + "\n")
    return root


def test_what_the_system_states(machine: Path) -> None:
    facts = cpu_facts(None, calibrate=False, root=machine)
    assert facts.name == "Test <CPU> @ 3" and facts.simd_bytes == 32 and facts.frequency_ghz == 2.5005
    assert (facts.l1_bytes, facts.l2_bytes, facts.l3_bytes, facts.line_bytes) == (48 << 10, 2 << 20, 1 << 30, 128)
    assert facts.source_of("l2_bytes") == "attribute" and facts.source_of("bandwidth") == "default"
    assert facts.cores == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("flags", "width"), [("avx512f avx2", 64), ("avx2", 32), ("sse2", 16), ("asimd", 16)])
def test_vector_width(machine: Path, flags: str, width: int) -> None:
    write(machine / "proc/cpuinfo", f"flags : {flags}\n")
    assert cpu_facts(None, calibrate=False, root=machine).simd_bytes == width


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "cores"),
    [
        ("0::/a/b", "sys/fs/cgroup/a/b/cpu.max", "100000 100000", 1),
        ("0::/a/b", "sys/fs/cgroup/a/cpu.max", "50000 100000", 1),
        ("0::/a/b", "sys/fs/cgroup/a/cpu.max", "max 100000", None),
        ("0::/../../a", "sys/fs/cgroup/a/cpu.max", "100000 100000", 1),
        ("3:cpu,cpuacct:/x", "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "-1", None),
        ("3:memory:/x", "sys/fs/cgroup/cpu/x/cpu.max", "100000 100000", None),
        ("0::/a", "sys/fs/cgroup/a/cpu.max", "nonsense", None),
    ],
)
def test_quotas(machine: Path, cgroup: str, file: str, text: str, cores: int | None) -> None:
    write(machine / "proc/self/cgroup", cgroup + "\n")
    write(machine / file, text + "\n")
    assert usable_cores(machine) == (cores or len(os.sched_getaffinity(0)))


def test_an_old_quota_needs_its_period(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "3:cpu:/x\n")
    write(machine / "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "50000\n")
    write(machine / "sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n")
    assert usable_cores(machine) == 1


def test_siblings_share_a_core(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu in range(4):
        write(machine / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}\n")
    facts = cpu_facts(None, calibrate=False, root=machine)
    assert facts.cores == 4 and facts.threads == 2


def test_an_empty_system_gives_the_default_record(tmp_path: Path) -> None:
    facts = cpu_facts(tmp_path / "cache", calibrate=False, root=tmp_path / "nothing")
    cores = len(os.sched_getaffinity(0))
    assert replace(facts, provenance=(), peak_flops_f32=1.0) == replace(
        CpuFacts(), cores=cores, threads=cores, peak_flops_f32=1.0
    )
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def compiler() -> HostCompiler:
    return HostCompiler("/none", "test 1.0", "t")


def test_probes_are_kept_and_read_back(
    machine: Path, tmp_path: Path, compiler: HostCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    note = noting(lambda *_, free_bytes, **__: calls.append(free_bytes), lambda *_, **__: SEEN)
    monkeypatch.setattr(module, "run_probes", note)
    first = cpu_facts(tmp_path, compiler=compiler, root=machine)
    assert first.frequency_ghz == 3.0 and first.simd_bytes == 32 and first.bandwidth == SEEN.scale_gb_s
    assert first.source_of("fork_us") == "measured" and first.source_of("l1_bytes") == "attribute"
    write(machine / "proc/cpuinfo", (machine / "proc/cpuinfo").read_text().replace("2500.5", "1800.0"))
    assert cpu_facts(tmp_path, compiler=compiler, root=machine) == first
    assert calls == [4194304 * 1024]
    (path,) = (tmp_path / "facts").glob("*.json")
    path.write_text(path.read_text().replace("3.0", "9.0"))
    assert cpu_facts(tmp_path, compiler=compiler, root=machine) == first
    assert len(calls) == 2
    path.write_text("[")
    assert cpu_facts(tmp_path, compiler=compiler, root=machine) == first
    assert len(calls) == 3
    cpu_facts(tmp_path, compiler=replace(compiler, version="test 2.0"), root=machine)
    assert len(calls) == 4


@pytest.mark.parametrize("error", [ToolchainError(tool="c", status=1, log=""), OSError("no")])
def test_failing_probes_leave_what_is_stated(
    machine: Path, tmp_path: Path, compiler: HostCompiler, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object, **kw: object) -> ProbeResult:
        raise error

    monkeypatch.setattr(module, "run_probes", fail)
    facts = cpu_facts(tmp_path, compiler=compiler, root=machine)
    assert facts == cpu_facts(None, calibrate=False, root=machine)


def test_probes_end_with_their_time(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: HostCompiler
) -> None:
    """On a busy machine they took 12 s of a budget of 40."""
    found = find_compiler()
    if isinstance(found, Declined):
        pytest.skip(found.reason)
    with pytest.raises(TimeoutError, match="the probes took longer than 0 s"):
        run_probes(found, 1, cache_dir=tmp_path, free_bytes=1 << 30, most_s=0.0)
    facts = cpu_facts(tmp_path, compiler=found, root=machine, most_s=0.0)
    assert facts == cpu_facts(None, calibrate=False, root=machine) and not (tmp_path / "facts").exists()
    given = []

    def once(*_: object, most_s: float, **__: object) -> ProbeResult:
        given.append(most_s)
        if len(given) > 1:
            raise TimeoutError
        return SLOW

    monkeypatch.setattr(module, "run_probes", once)
    facts = cpu_facts(None, compiler=compiler, root=machine, most_s=50.0)
    assert facts.source_of("fork_us") == "measured" and facts.fork_us == SLOW.fork_us, "what was seen counts"
    assert given[1] <= given[0] <= 50.0


def test_an_impossible_peak_is_discarded(
    machine: Path, compiler: HostCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_probes", lambda *a, **k: replace(SEEN, flops_f32=1.6e15))
    facts = cpu_facts(None, compiler=compiler, root=machine)
    assert facts.peak_flops_f32 < 1e13 and facts.source_of("peak_flops_f32") == "default"


SLOW = replace(SEEN, flops_f32=SEEN.flops_f32 / 20, fork_us=900.0)
"""What probes see beside other work."""


def scripted(monkeypatch: pytest.MonkeyPatch, *seen: ProbeResult) -> list[ProbeResult]:
    """The probes give these results, one after another; what is left of them."""
    left = list(seen)
    monkeypatch.setattr(module, "run_probes", lambda *a, **k: left.pop(0))
    return left


def others_run(machine: Path, runnable: int) -> None:
    write(machine / "proc/loadavg", f"0.1 0.1 0.1 {runnable}/99 1234\n")


def test_a_peak_under_what_a_machine_has_is_measured_twice_and_not_kept_for_good(
    machine: Path, tmp_path: Path, compiler: HostCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = scripted(monkeypatch, SLOW, SLOW, SEEN)
    others_run(machine, 5)
    busy = cpu_facts(tmp_path, compiler=compiler, root=machine)
    assert len(left) == 1 and busy.source_of("peak_flops_f32") == "default"
    assert busy.peak_flops_f32 == pytest.approx(busy.threads * 3.0e9 * 8 * 2)  # one unit on every thread
    assert cpu_facts(tmp_path, compiler=compiler, root=machine) == busy and len(left) == 1  # while others run
    others_run(machine, 1)
    idle = cpu_facts(tmp_path, compiler=compiler, root=machine)
    assert not left and idle.peak_flops_f32 == SEEN.flops_f32
    others_run(machine, 5)
    assert cpu_facts(tmp_path, compiler=compiler, root=machine) == idle
    assert len(list((tmp_path / "facts").iterdir())) == 1


def test_the_best_of_two_runs_counts(
    machine: Path, tmp_path: Path, compiler: HostCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = scripted(monkeypatch, replace(SLOW, frequency_ghz=3.1, scale_gb_s=((1 << 16, 250.0), (1 << 24, 20.0))), SEEN)
    facts = cpu_facts(tmp_path, compiler=compiler, root=machine)
    assert not left and facts.peak_flops_f32 == SEEN.flops_f32 and facts.frequency_ghz == 3.1
    assert facts.fork_us == 1.5 and facts.bandwidth == ((1 << 16, 250.0), (1 << 24, 50.0))


def test_what_had_neighbours_is_measured_again(
    machine: Path, tmp_path: Path, compiler: HostCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plausible, but the system says that others had the cores meanwhile."""
    cores = sorted(os.sched_getaffinity(0))

    def seconds(busy: int) -> None:
        ticks = busy * os.sysconf("SC_CLK_TCK")
        write(machine / "proc/stat", "".join(f"cpu{n} {ticks} 0 0 5 5 0 0 0 0 0\n" for n in cores))

    def probes(*args: object, **kw: object) -> ProbeResult:
        seconds(1000)
        return SEEN

    seconds(0)
    monkeypatch.setattr(module, "run_probes", probes)
    facts = cpu_facts(tmp_path, compiler=compiler, root=machine)
    assert facts.peak_flops_f32 == SEEN.flops_f32
    assert [p.name.endswith(".busy.json") for p in (tmp_path / "facts").iterdir()] == [True]
    cpu_facts(tmp_path, compiler=compiler, root=machine)  # nobody else runs any more, by `loadavg` and by `stat`
    assert [p.name.endswith(".busy.json") for p in (tmp_path / "facts").iterdir()] == [False]


def test_a_kept_peak_that_no_such_machine_has_is_measured_again(
    machine: Path, tmp_path: Path, compiler: HostCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = scripted(monkeypatch, SEEN, SEEN)
    first = cpu_facts(tmp_path, compiler=compiler, root=machine)
    (path,) = (tmp_path / "facts").iterdir()
    keep(path, replace(first, peak_flops_f32=7e9).to_json())
    assert cpu_facts(tmp_path, compiler=compiler, root=machine) == first and not left


def test_a_cache_that_cannot_be_written_only_costs_the_cache(
    machine: Path, tmp_path: Path, compiler: HostCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_probes", lambda *a, **k: SEEN)
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="without its cache"):
        assert cpu_facts(tmp_path / "file", compiler=compiler, root=machine).frequency_ghz == 3.0


def test_json_round_trip() -> None:
    facts = CpuFacts(name='a "b" <c>', provenance=(("name", "attribute"),))
    assert CpuFacts.from_json(facts.to_json()) == facts


@pytest.mark.parametrize(
    "change",
    [
        {"cores": 0}, {"cores": True}, {"cores": "2"}, {"simd_bytes": 7}, {"bandwidth": []},
        {"bandwidth": [[1, 2], [1, 3]]}, {"bandwidth": [[64, -1.0]]}, {"bandwidth": 5}, {"frequency_ghz": 0},
        {"frequency_ghz": float("inf")}, {"schema": 2},
        {"extra": 1}, {"name": 3}, {"l3_bytes": -1}, {"fork_us": "x"}, {"provenance": 3},
    ],
    ids=str,
)  # fmt: skip
def test_records_that_no_cpu_has_are_refused(change: dict[str, object]) -> None:
    record = json.loads(CpuFacts().to_json()) | change
    with pytest.raises(ValueError):
        CpuFacts.from_json(json.dumps(record))


def test_bandwidth_is_interpolated_and_clamped() -> None:
    facts = CpuFacts(bandwidth=((1024, 100.0), (4096, 50.0)), read_bandwidth=((1, 7.0),))
    assert [facts.bandwidth_at(n) for n in (1, 1024, 2048, 4096, 1 << 40)] == [100.0, 100.0, 75.0, 50.0, 50.0]
    assert facts.bandwidth_at(5, read_only=True) == 7.0


def test_real_probes(tmp_path: Path) -> None:
    found = find_compiler()
    if not isinstance(found, HostCompiler):
        pytest.skip("no compiler")
    facts = cpu_facts(tmp_path, compiler=found)
    assert 0.3 < facts.frequency_ghz < 8 and 0.01 < facts.fork_us < 1e5
    assert 1e9 < facts.peak_flops_f32 <= facts.threads * facts.frequency_ghz * 1e9 * facts.lanes_f32 * 4 * 1.1
    assert len(facts.bandwidth) >= 4 and all(0.1 < b < 1e5 for _, b in facts.bandwidth + facts.read_bandwidth)
    assert cpu_facts(tmp_path, compiler=found) == facts


def test_the_cost_of_a_fork_is_known_in_time_on_a_busy_machine() -> None:
    """With far more threads than cores each region takes a time slice: 10,000 of them took minutes."""
    compiler = find_compiler()
    assert not isinstance(compiler, Declined)
    library = ctypes.CDLL(str(compiler.compile(PROBE_TEXT, cache_dir=None).path))
    library.weft_fork_seconds.restype = ctypes.c_double
    began = time.monotonic()
    assert library.weft_fork_seconds(64) > 0
    assert time.monotonic() - began < 3.0
