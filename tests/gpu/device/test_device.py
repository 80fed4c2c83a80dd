"""The CUDA driver for real: attributes, launches, shared memory, clusters, tensor maps, dependent launch, probes."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from weft.device.cuda.driver import Function, Module, encode_tensor_map
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.cuda.occupancy import occupancy
from weft.device.cuda.streams import Stream, device_memory, fill, read_back, write
from weft.errors import DeviceError

pytestmark = pytest.mark.gpu

TEXT = r"""
#if __CUDA_ARCH__ >= 900
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define TRIGGER asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#else
#define WAIT
#define TRIGGER
#endif
extern "C" __global__ void where(int* y, long long n) {
  const int at = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (threadIdx.x + blockDim.x * threadIdx.y == 0) y[at] = at * 1000 + blockDim.x * blockDim.y + (int)n;
}
extern "C" __global__ void shared(int* y, long long count) {
  extern __shared__ int s[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) s[i] = i * 3;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) y[i] = s[count - 1 - i];
}
extern "C" __global__ void ranks(int* y) {
  unsigned rank = 0, size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  if (threadIdx.x == 0) y[blockIdx.x] = rank * 100 + size;
}
extern "C" __global__ void __launch_bounds__(256) chain(unsigned* x) {
  TRIGGER;
  WAIT;
  const int i = blockIdx.x * 256 + threadIdx.x, n = gridDim.x * 256;
  const unsigned from_far = __ldcg(x + n + (i + n / 2 + 13) % n);  // written by another block of the kernel before
  __nanosleep(i % 7 * 40);
  x[i] = from_far * 3 + 1;
}
extern "C" __global__ void __launch_bounds__(256) back(unsigned* x) {
  TRIGGER;
  WAIT;
  const int i = blockIdx.x * 256 + threadIdx.x, n = gridDim.x * 256;
  x[n + i] = __ldcg(x + i) ^ 0x5bd1e995u;
}
extern "C" __global__ void __launch_bounds__(512) heavy(float* y, long long n) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = y[i * 512 + threadIdx.x];
  for (long long k = 0; k < n; ++k)
#pragma unroll
    for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i + 1) & 63] + 1;
#pragma unroll
  for (int i = 0; i < 64; ++i) y[i * 512 + threadIdx.x] = a[i];
}
extern "C" __global__ void fault(int* y) { y[threadIdx.x] = 1; }
__constant__ int table[4];
extern "C" __global__ void look_up(int* y) { y[threadIdx.x] = table[threadIdx.x]; }
"""
TILE = r"""
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void tile(const __grid_constant__ Map map, unsigned short* y, long long column, long long row) {
  __shared__ alignas(1024) unsigned short s[16 * 64];
  __shared__ alignas(8) unsigned long long bar;
  const unsigned at = (unsigned)__cvta_generic_to_shared(&bar), to = (unsigned)__cvta_generic_to_shared(s);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(2048));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];"
      :: "r"(to), "l"(&map), "r"((int)column), "r"((int)row), "r"(at) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again; }"
    :: "r"(at) : "memory");
  for (int i = threadIdx.x; i < 16 * 64; i += blockDim.x) y[i] = s[i];
}
"""


@pytest.fixture
def module(context: None, nvrtc: Nvrtc, stated: GpuFacts, tmp_path: Path) -> Module:
    return Module(nvrtc.compile(TEXT, arch=f"sm_{stated.capability}", cache_dir=tmp_path).path)


def ints(address: int, count: int) -> list[int]:
    return list(struct.unpack(f"<{count}I", read_back(address, 4 * count)))


def test_attributes(stated: GpuFacts) -> None:
    assert stated.capability >= 80 and stated.sms > 0 and stated.name and int(stated.driver) >= 12000
    assert stated.source_of("sms") == "attribute" and stated.l2_bytes > 1 << 20
    assert GpuFacts.from_json(stated.to_json()) == stated


def test_a_launch_in_three_dimensions(module: Module) -> None:
    with device_memory(4096) as y:
        fill(y, 0xFF, 4096)
        module.function("where").launch((3, 2, 2), (32, 4, 1), [y, 7])
        assert ints(y, 13) == [i * 1000 + 128 + 7 for i in range(12)] + [0xFFFFFFFF]


def test_a_constant_that_the_host_fills(module: Module) -> None:
    address, size = module.variable("table")
    assert size == 16
    write(address, struct.pack("<4i", 5, 7, 11, 13))
    with device_memory(16) as y:
        module.function("look_up").launch((1, 1, 1), (4, 1, 1), [y])
        assert ints(y, 4) == [5, 7, 11, 13]
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_NOT_FOUND \(500\): chair"):
        module.variable("chair")


def test_shared_memory_above_the_default(module: Module, stated: GpuFacts) -> None:
    function, count = module.function("shared"), stated.shared_per_block // 4
    with device_memory(4 * count) as y:
        function.launch((1, 1, 1), (256, 1, 1), [y, count], shared_bytes=4 * count)
        assert ints(y, count) == [3 * (count - 1 - i) for i in range(count)]
    with pytest.raises(DeviceError, match="bytes of shared memory; a block of this GPU has"):
        function.prepare(4 * count + 16)


def test_a_cluster(module: Module, stated: GpuFacts) -> None:
    if stated.capability < 90:
        pytest.skip("clusters need compute capability 9.0")
    with device_memory(64) as y:
        module.function("ranks").launch((8, 1, 1), (32, 1, 1), [y], cluster=(4, 1, 1))
        assert ints(y, 8) == [4, 104, 204, 304] * 2


def test_a_tensor_map(context: None, nvrtc: Nvrtc, stated: GpuFacts, tmp_path: Path) -> None:
    """A 16×64 tile that hangs over the edge of a 20×72 tensor: what is outside reads as zero."""
    if stated.capability < 90:
        pytest.skip("tensor maps need compute capability 9.0")
    function = Module(nvrtc.compile(TILE, arch="sm_90", cache_dir=tmp_path).path).function("tile")
    rows, columns, first_row, first_column = 20, 72, 8, 16
    values = [r * 100 + c for r in range(rows) for c in range(columns)]
    with device_memory(2 * len(values)) as x, device_memory(2048) as y:
        write(x, struct.pack(f"<{len(values)}H", *values))
        tensor = encode_tensor_map(x, "f16", (columns, rows), (2 * columns,), (64, 16), (1, 1), 0)
        function.launch((1, 1, 1), (128, 1, 1), [tensor, y, first_column, first_row])
        seen = struct.unpack("<1024H", read_back(y, 2048))
    expected = [
        (first_row + r) * 100 + first_column + c if first_row + r < rows and first_column + c < columns else 0
        for r in range(16)
        for c in range(64)
    ]
    assert list(seen) == expected


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_chain_sees_what_came_before(module: Module, stated: GpuFacts, dependent: bool, in_graph: bool) -> None:
    """Every kernel reads what other blocks of the one before wrote, however early it was launched."""
    blocks, pairs = stated.sms * 3, 100
    n = blocks * 256
    with device_memory(8 * n) as x:
        write(x, struct.pack(f"<{2 * n}I", *range(2 * n)))
        bound = [
            module.function(name).bind((blocks, 1, 1), (256, 1, 1), [x], dependent=dependent)
            for name in ("chain", "back")
        ]
        stream = Stream()

        def work(handle: int) -> None:
            for _ in range(pairs):
                for b in bound:
                    b.launch(handle)

        if in_graph:
            with stream.graph(work) as graph:
                graph(stream.handle)
        else:
            work(stream.handle)
        stream.synchronise()
        seen = ints(x, 2 * n)
        stream.close()
    low, high = list(range(n)), list(range(n, 2 * n))
    for _ in range(pairs):
        low = [(high[(i + n // 2 + 13) % n] * 3 + 1) & 0xFFFFFFFF for i in range(n)]
        high = [v ^ 0x5BD1E995 for v in low]
    assert seen == low + high


def test_occupancy_is_the_drivers(module: Module, stated: GpuFacts) -> None:
    compared = 0
    for name in ("where", "shared", "chain", "heavy"):
        function: Function = module.function(name)
        own = function.attributes
        for threads in (32, 128, 256, 320, 512):
            for dynamic in (0, 1000, 20_000, 49_152, 100_000):
                if dynamic + own.shared_bytes > 49_152:
                    function.prepare(dynamic)
                ours = occupancy(stated, threads, own.shared_bytes + dynamic, own.registers)
                if threads <= own.max_threads:
                    assert function.occupancy((threads, 1, 1), dynamic) == ours, (name, threads, dynamic, own)
                    compared += 1
    assert compared >= 60


def test_a_fault_is_named_and_sticky() -> None:
    """In a process of its own, which can never use the GPU again."""
    code = f"""
from weft.device.cuda.driver import *
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.cuda.streams import Stream
with primary_context():
    cubin = find_nvrtc().compile({TEXT!r}, arch=f"sm_{{gpu_facts(None, calibrate=False).capability}}")
    stream = Stream()
    Module(cubin.path).function("fault").launch((1, 1, 1), (32, 1, 1), [16], stream=stream.handle)
    try:
        stream.synchronise()
    except CudaError as error:
        print(error.name, error.sticky, flush=True)
    import os
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "CUDA_ERROR_ILLEGAL_ADDRESS True", done.stderr[-2000:]


def test_calibration_is_plausible(stated: GpuFacts, nvrtc: Nvrtc, tmp_path: Path) -> None:
    facts = gpu_facts(tmp_path, compiler=nvrtc)
    for field in ("bandwidth", "read_bandwidth", "l2_bandwidth", "launch_us", "clock_ghz", "achieved_flops"):
        assert facts.source_of(field) == "measured", (field, facts)
    beyond: list[float] = []
    for table in (facts.bandwidth, facts.read_bandwidth):
        beyond = [rate for size, rate in table if size >= 8 * facts.l2_bytes]
        assert beyond
        if facts.peak_bandwidth:
            assert all(0.6 * facts.peak_bandwidth < rate <= facts.peak_bandwidth for rate in beyond), table
        assert table[0][1] < beyond[0]  # a small copy is all gap
    assert facts.l2_bandwidth > beyond[0]
    assert 0.2 < facts.dependent_launch_us <= 1.05 * facts.launch_us < 5.0
    f32 = dict(facts.achieved_flops)["f32"]
    assert 0.7 * facts.sms * 256 * facts.clock_ghz * 1e9 < f32 * (2 if facts.capability < 90 else 1)
    assert f32 <= facts.peak_flops("f32")
    assert 0.4 * facts.max_clock_ghz < facts.clock_ghz <= 1.05 * facts.max_clock_ghz
    assert gpu_facts(tmp_path, compiler=nvrtc) == facts
    assert len(list((tmp_path / "facts").iterdir())) == 1


def test_the_survey_measures_the_frameworks_products_once(tmp_path: Path) -> None:
    from weft.options import Options
    from weft.platform.cuda.platform import survey

    options = Options(device="cuda", cache_dir=tmp_path)
    facts, _, _ = survey(options)
    achieved = dict(facts.achieved_flops)
    assert facts.source_of("achieved_flops") == "measured"
    for dtype in ("f16", "bf16"):
        assert achieved["f32"] < achieved["tf32"] < achieved[dtype], achieved
        assert 0.4 * facts.peak_flops(dtype) < achieved[dtype] <= facts.peak_flops(dtype)
    assert survey(options)[0] == facts
    assert len(list((tmp_path / "facts").iterdir())) == 1
