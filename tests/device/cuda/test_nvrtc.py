"""CUDA text to cubins without a GPU: resources, warnings, refusals, the cache, threads; and the resource gate."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.device import files
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc, gate
from weft.device.cuda.record import GpuFacts
from weft.device.cuda.resources import Resources, parse_resources, parse_warnings
from weft.errors import DeviceError, ToolchainError
from weft.ir.declined import Declined
from weft.kernels.source import Launch

pytestmark = pytest.mark.usefixtures("compilers_at_work")

GOOD = """
extern "C" __global__ void __launch_bounds__(256) k0(float* y) {
  __shared__ float s[256];
  s[threadIdx.x] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[255 - threadIdx.x];
}
extern "C" __global__ void k1(float* y) { y[0] = 1.0f; }
"""
SPILLS = """
extern "C" __global__ void __launch_bounds__(256) k0(float* y, const float* x) {
  float a[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) a[i] = x[i * 256 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) y[i * 256 + threadIdx.x] = a[127 - i] * a[(i * 37) & 127];
}
"""
LOG = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
insufficient register resources for the wgmma pipeline in the function 'k1'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k0' for 'sm_90a'
ptxas info    : Function properties for k0
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for helper
ptxas         .     32 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 64 bytes cumulative stack size, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'k1' for 'sm_90a'
ptxas info    : Function properties for k1
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc({})
    if isinstance(found, Declined):
        pytest.skip(found.reason)
    return found


def test_a_log_in_numbers() -> None:
    assert parse_resources(LOG) == (("k0", Resources(168, 12, 12, 64, 1024, 3)), ("k1", Resources(registers=8)))
    (line,) = parse_warnings(LOG)
    assert "(C7510)" in line
    assert parse_resources("") == () and parse_warnings("Used 5 registers\nkernel.cu(3): warning #177-D") == ()


def test_a_text_that_was_compiled_before_has_its_log_again(nvrtc: Nvrtc) -> None:
    """NVRTC's own cache, which there is with a driver, would give the cubin without it."""
    first, second = (nvrtc.compile(GOOD, arch="sm_90") for _ in range(2))
    assert first.resources == second.resources != ()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_compiles_for_every_target(nvrtc: Nvrtc, tmp_path: Path, arch: str) -> None:
    made = nvrtc.compile(GOOD, arch=arch, cache_dir=tmp_path)
    assert made.path.read_bytes()[:4] == b"\x7fELF" and made.seconds > 0
    assert dict(made.resources).keys() == {"k0", "k1"} and made.warnings == ()
    assert made.of("k0").shared_bytes == 1024 and made.of("k0").barriers == 1 and made.of("k1").shared_bytes == 0
    assert 0 < made.of("k0").registers <= 32
    with pytest.raises(KeyError):
        made.of("k2")


def test_a_refused_text_carries_its_log(nvrtc: Nvrtc) -> None:
    with pytest.raises(ToolchainError, match=r"NVRTC 13.* failed with status 6") as caught:
        nvrtc.compile('extern "C" __global__ void k0() { nonsense; }', arch="sm_80")
    assert 'identifier "nonsense" is undefined' in caught.value.log


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"flags": ("--use_fast_math",)}, ValueError, "not in ALLOWED_FLAGS"),
        ({"flags": ("--include-path=/",)}, ValueError, "not in ALLOWED_FLAGS"),
        ({"arch": "sm_90; rm"}, ValueError, "names no architecture"),
        ({"arch": "compute_90"}, ValueError, "names no architecture"),
        ({"arch": "sm_50"}, DeviceError, "cannot compile for sm_50; it knows"),
        ({"max_registers": 8}, ValueError, "outside of 16 to 255"),
        ({"max_registers": 300}, ValueError, "outside of 16 to 255"),
    ],
)
def test_what_may_not_be_asked(nvrtc: Nvrtc, changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        nvrtc.compile(GOOD, **({"arch": "sm_80"} | changes))


def test_a_cap_on_registers_holds_and_spills_show(nvrtc: Nvrtc, tmp_path: Path) -> None:
    free = nvrtc.compile(SPILLS, arch="sm_80", max_registers=40, cache_dir=tmp_path).of("k0")
    made = nvrtc.compile(SPILLS.replace("__launch_bounds__(256)", ""), arch="sm_80", max_registers=40)
    tight = made.of("k0")
    assert free.registers > 100 and free.spill_stores == 0  # launch bounds win over the cap
    assert tight.registers <= 40 and tight.spill_stores > 64
    launch = Launch("k0", (1, 1, 1), (256, 1, 1), ())
    declined = gate(made, launch)
    assert declined is not None and "spilled per thread" in declined.reason


def test_warnings_of_the_assembler_are_real(nvrtc: Nvrtc) -> None:
    text = """
    extern "C" __global__ void k0(float* y) {
      if (threadIdx.x < 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
      else asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
      y[threadIdx.x] = 1;
    }"""
    made = nvrtc.compile(text, arch="sm_90a")
    assert len(made.warnings) == 1 and "(C7508)" in made.warnings[0]
    declined = gate(made, Launch("k0", (1, 1, 1), (256, 1, 1), ()))
    assert declined == Declined("setmaxnreg is ignored (C7508)")


def test_the_cache_is_verified(nvrtc: Nvrtc, tmp_path: Path) -> None:
    first = nvrtc.compile(GOOD, arch="sm_80", cache_dir=tmp_path)
    again = nvrtc.compile(GOOD, arch="sm_80", cache_dir=tmp_path)
    assert again == replace(first, seconds=0.0) and first.path.is_relative_to(tmp_path / "cubins")
    assert nvrtc.compile(GOOD, arch="sm_90", cache_dir=tmp_path).path != first.path
    assert nvrtc.compile(GOOD, arch="sm_80", max_registers=64, cache_dir=tmp_path).path != first.path
    assert nvrtc.compile(GOOD, arch="sm_80", flags=("--fmad=false",), cache_dir=tmp_path).path != first.path
    first.path.write_bytes(first.path.read_bytes()[:-1] + b"x")
    mended = nvrtc.compile(GOOD, arch="sm_80", cache_dir=tmp_path)
    assert mended.seconds > 0 and mended.sha256 == first.sha256
    record = first.path.with_suffix(".json")
    for text in ("", "[]", "{}", json.dumps({"sha256": "0" * 64, "log": ""})):
        record.write_text(text)
        assert nvrtc.compile(GOOD, arch="sm_80", cache_dir=tmp_path).seconds > 0


def test_a_full_disk_costs_only_the_cache(nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(site: str, path: Path) -> None:
        if path.is_relative_to(tmp_path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "fault", full)
    with pytest.warns(UserWarning, match="what is new is not kept: No space left"):
        made = nvrtc.compile(GOOD, arch="sm_80", cache_dir=tmp_path)
    assert made.path.exists() and not made.path.is_relative_to(tmp_path) and not list(tmp_path.iterdir())


def test_many_on_threads_in_order(nvrtc: Nvrtc, tmp_path: Path) -> None:
    texts = [f'extern "C" __global__ void k{i}(float* y) {{ y[{i}] = {i}; }}' for i in range(6)]
    jobs = [CompileJob(t, "sm_80") for t in texts] + [CompileJob("bad", "sm_80"), CompileJob(texts[0], "sm_80")]
    made = nvrtc.compile_many(jobs, threads=3, cache_dir=tmp_path)
    cubins = [m for m in made if isinstance(m, CompiledCubin)]
    assert [m.resources[0][0] for m in cubins] == [*(f"k{i}" for i in range(6)), "k0"]
    assert isinstance(made[6], ToolchainError) and cubins[0].sha256 == cubins[-1].sha256


def test_the_interpreter_runs_on_while_it_compiles(nvrtc: Nvrtc, tmp_path: Path) -> None:
    body = "".join(f"t = sinf(t + {j}.5f) * y[{j}];" for j in range(20))
    text = f'extern "C" __global__ void k0(float* y) {{ float t = y[0]; {body} y[0] = t; }}'
    ticks, done = 0, threading.Event()

    def compiling() -> None:
        nvrtc.compile(text, arch="sm_80", cache_dir=tmp_path)
        done.set()

    thread = threading.Thread(target=compiling)
    thread.start()
    while not done.is_set() and ticks < 100_000:
        time.sleep(0.001)
        ticks += 1
    thread.join()
    assert ticks > 20  # it takes some hundred milliseconds


def test_a_slow_text_is_cancelled(nvrtc: Nvrtc) -> None:
    with pytest.raises(ToolchainError, match="failed with status 16") as caught:
        nvrtc.compile(GOOD, arch="sm_80", timeout_s=-1.0)
    assert caught.value.log.startswith("over -1.0 s")


def test_it_can_be_hidden() -> None:
    assert find_nvrtc({"WEFT_NVRTC": "none"}) == Declined("WEFT_NVRTC=none")


def cubin(resources: Resources, *warnings: str) -> CompiledCubin:
    return CompiledCubin(Path("x"), "", 0.0, "", (("k0", resources), ("k1", Resources(8))), warnings)


SERIAL = "ptxas info : (C7510) Potential Performance Loss: wgmma is serialized in the function '{}'"


@pytest.mark.parametrize(
    ("resources", "launch", "warning", "reason"),
    [
        (Resources(168), {"block": (384, 1, 1), "shared_bytes": 232448}, "", None),
        (Resources(32, 24, 40), {}, "", None),
        (Resources(32, 24, 44), {}, "", "68 bytes of registers spilled"),
        (Resources(32, shared_bytes=1), {"shared_bytes": 232448}, "", "232449 bytes of shared memory"),
        (Resources(65), {"block": (992, 1, 1)}, "", "over the register file"),
        (Resources(64), {"block": (1024, 1, 1)}, "", None),
        (Resources(32), {"block": (32, 33, 1)}, "", "1056 threads"),
        (Resources(32), {"cluster": (4, 4, 1)}, "", "a cluster of 16"),
        (Resources(32), {"cluster": (2, 4, 1)}, "", None),
        (Resources(32), {"entry": "k9"}, "", "no entry k9"),
        (Resources(32), {}, SERIAL.format("k0"), "wgmma is serialised (C7510)"),
        (Resources(32), {}, SERIAL.format("k1"), None),
        (Resources(32), {}, "ptxas info : (C7508) setmaxnreg ignored", "setmaxnreg is ignored"),
    ],
)
def test_the_gate(resources: Resources, launch: dict[str, Any], warning: str, reason: str | None) -> None:
    asked = Launch(**({"entry": "k0", "grid": (8, 8, 1), "block": (256, 1, 1), "arguments": ()} | launch))
    found = gate(cubin(resources, *([warning] if warning else [])), asked)
    assert (found is None) if reason is None else (found is not None and reason in found.reason)


def test_no_clusters_before_hopper() -> None:
    asked = Launch("k0", (8, 1, 1), (256, 1, 1), (), cluster=(2, 1, 1))
    assert gate(cubin(Resources(32)), asked, replace(GpuFacts(), capability=80)) == Declined("a cluster of 2 blocks")
