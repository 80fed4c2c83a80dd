"""Short kernels that measure what no attribute of a GPU states: bandwidth by size, launch gaps, clock, peak of FMA.

Loops are opaque to the compiler (results that are used, loads that it may not drop). One call of `run_probes` takes a
few seconds and up to 1 GiB of device memory of its own.

Source: performance notes, section 7.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from weft.device.cuda.driver import Function, Module
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.cuda.record import GpuFacts
from weft.device.cuda.streams import Stream, device_memory, fill, read_back
from weft.device.stored import Table

Matmul = Callable[[str, int], Callable[[int], None] | None]
"""(operand type, n) → what puts an n×n×n product of random normal operands on the stream of a handle; None: no such."""
Enqueue = Callable[[int], None]

SIZES = tuple(1 << k for k in (16, 18, 20, 22, 24, 26, 28, 30))
"""Bytes read plus written of the bandwidth tables: 64 KiB to 1 GiB."""
_REPLAYS = 7
_CHAIN = 500
"""Kernels in the graph that measures gaps."""
_PRODUCTS = {"f32": 4096, "tf32": 8192, "f16": 8192, "bf16": 8192}

PROBE_TEXT = r"""
#if __CUDA_ARCH__ >= 900
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define TRIGGER asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#else
#define WAIT
#define TRIGGER
#endif
typedef long long i64;
static __device__ float4 through_l2(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
extern "C" __global__ void __launch_bounds__(256)
probe_copy(float4* __restrict__ y, const float4* __restrict__ x, i64 n) {
  const i64 step = (i64)gridDim.x * 256;
  i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const float4 a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];
    y[i] = a; y[i + step] = b; y[i + 2 * step] = c; y[i + 3 * step] = d;
  }
  for (; i < n; i += step) y[i] = x[i];
}
extern "C" __global__ void __launch_bounds__(256) probe_read(float* y, const float4* x, i64 n, i64 rounds) {
  const i64 step = (i64)gridDim.x * 256;
  float s = 0;
  for (i64 r = 0; r < rounds; ++r) {
    i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
      const float4 a = through_l2(x + i), b = through_l2(x + i + step);
      const float4 c = through_l2(x + i + 2 * step), d = through_l2(x + i + 3 * step);
      s += (a.x + a.y + a.z + a.w) + (b.x + b.y + b.z + b.w) + (c.x + c.y + c.z + c.w) + (d.x + d.y + d.z + d.w);
    }
    for (; i < n; i += step) { const float4 a = through_l2(x + i); s += a.x + a.y + a.z + a.w; }
  }
  if (s == 123.456f) y[0] = s;
}
extern "C" __global__ void __launch_bounds__(256) probe_step(float* x) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  x[i] = x[i] * 0.5f + 1.0f;
}
extern "C" __global__ void __launch_bounds__(256) probe_dependent(float* x) {
  TRIGGER;
  WAIT;
  const int i = blockIdx.x * 256 + threadIdx.x;
  x[i] = x[i] * 0.5f + 1.0f;
}
extern "C" __global__ void __launch_bounds__(512) probe_fma(i64* y, i64 n) {
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = threadIdx.x * 0.001f + i;
  i64 t0, t1;
  const i64 c0 = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0) :: "memory");
  for (i64 k = 0; k < n; ++k) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(0.9999f), "f"(0.0001f));
  }
  float s = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) s += x[i];
  const i64 c1 = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t1) :: "memory");
  if (blockIdx.x == 0 && threadIdx.x == 0) { y[0] = c1 - c0; y[1] = t1 - t0; }
  if (s == 123.456f) y[2] = 1;
}
"""


@dataclass(frozen=True, slots=True)
class Probes:
    """What the probes saw; units as in `GpuFacts`."""

    bandwidth: Table
    read_bandwidth: Table
    l2_bandwidth: float
    launch_us: float
    dependent_launch_us: float
    flops_f32: float
    """FLOP/s of multiply-adds outside of the matrix units."""
    clock_ghz: float
    """During those."""
    products: dict[str, float] = field(default_factory=dict)
    """Operand type → FLOP/s of a large product of the framework."""


def run_probes(
    compiler: Nvrtc, facts: GpuFacts, *, cache_dir: Path | None = None, matmul: Matmul | None = None, handle: int = 0
) -> Probes:
    """Measure the GPU of the current context, on the stream of that handle (0: on one of ours).

    Raises:
        DeviceError: the GPU fails, or has too little free memory [W302].
        ToolchainError: the probes cannot be compiled [W311].
    """
    module = Module(compiler.compile(PROBE_TEXT, arch=f"sm_{facts.capability}", cache_dir=cache_dir).path)
    stream = Stream(handle)
    try:
        with device_memory(SIZES[-1]) as memory:
            fill(memory, 0, SIZES[-1])
            bench = _Bench(module, stream, memory, facts)
            gaps = [bench.gap(dependent=d) for d in (False, True)]
            flops, clock = bench.multiply_add()
            return Probes(
                tuple((s, s / bench.copy_us(s) / 1e3) for s in SIZES),
                tuple((s, s / bench.read_us(s) / 1e3) for s in SIZES),
                bench.l2_gb_s(),
                gaps[0],
                gaps[1],
                flops,
                clock,
                {k: rate for k, n in _PRODUCTS.items() if (rate := bench.product(k, n, matmul)) > 0},
            )
    finally:
        stream.close()
        module.unload()


class _Bench:
    """The probes over one piece of memory."""

    def __init__(self, module: Module, stream: Stream, memory: int, facts: GpuFacts) -> None:
        self._functions: dict[str, Function] = {
            name: module.function(f"probe_{name}") for name in ("copy", "read", "step", "dependent", "fma")
        }
        self._stream, self._memory, self._facts = stream, memory, facts

    def _per_launch_us(self, works: list[Enqueue], repeats: int) -> float:
        """Median microseconds per work when all of them, `repeats` times over, are one graph."""

        def all_of_them(stream: int) -> None:
            for _ in range(repeats):
                for work in works:
                    work(stream)

        with self._stream.graph(all_of_them) as graph:
            self._stream.time_us(graph)  # the first launch uploads the graph
            times = [self._stream.time_us(graph) for _ in range(_REPLAYS)]
        return statistics.median(times) / (repeats * len(works))

    def _blocks(self, count: int) -> int:
        """Blocks of 256 threads that move four elements each, no more than are resident at once."""
        return max(1, min(-(-count // 1024), self._facts.sms * 8))

    def copy_us(self, size_bytes: int) -> float:
        """A copy that reads and writes so many bytes in all; every copy depends on the one before."""
        half, count = size_bytes // 2, size_bytes // 32
        grid, first, second = (self._blocks(count), 1, 1), self._memory, self._memory + half
        works: list[Enqueue] = [
            self._functions["copy"].bind(grid, (256, 1, 1), (y, x, count)).launch
            for y, x in ((second, first), (first, second))
        ]
        return self._per_launch_us(works, _repeats(size_bytes))

    def read_us(self, size_bytes: int) -> float:
        """Reading so many bytes once."""
        count = size_bytes // 16
        arguments = (self._memory, self._memory, count, 1)
        bound = self._functions["read"].bind((self._blocks(count), 1, 1), (256, 1, 1), arguments)
        return self._per_launch_us([bound.launch], 2 * _repeats(size_bytes))

    def l2_gb_s(self) -> float:
        """GB/s of reading a quarter of the L2 cache over and over, past the L1 caches."""
        size, rounds = self._facts.l2_bytes // 4 // 16 * 16, 50
        arguments = (self._memory, self._memory, size // 16, rounds)
        bound = self._functions["read"].bind((self._facts.sms * 8, 1, 1), (256, 1, 1), arguments)
        return size * rounds / self._per_launch_us([bound.launch], 2) / 1e3

    def gap(self, *, dependent: bool) -> float:
        """Microseconds per kernel of a chain of kernels that do next to nothing, a block on every multiprocessor."""
        function = self._functions["dependent" if dependent else "step"]
        bound = function.bind((self._facts.sms, 1, 1), (256, 1, 1), (self._memory,), dependent=dependent)
        return self._per_launch_us([bound.launch], _CHAIN)

    def multiply_add(self) -> tuple[float, float]:
        """(FLOP/s of single-precision multiply-adds, clock in GHz meanwhile)."""
        blocks, rounds = self._facts.sms * 2, 20_000
        bound = self._functions["fma"].bind((blocks, 1, 1), (512, 1, 1), (self._memory, rounds))
        time_us = self._per_launch_us([bound.launch], 4)
        cycles, nanoseconds, _ = struct.unpack("<3q", read_back(self._memory, 24))
        return blocks * 512 * rounds * 16 * 2 / time_us * 1e6, cycles / max(1, nanoseconds)

    def product(self, dtype: str, n: int, matmul: Matmul | None) -> float:
        """FLOP/s of the framework's n×n×n product after a tenth of a second of them; 0: there is none."""
        work = matmul(dtype, n) if matmul is not None else None
        if work is None:
            return 0.0

        def ten(stream: int) -> None:
            for _ in range(10):
                work(stream)

        elapsed = 0.0
        while elapsed < 1e5:
            elapsed += self._stream.time_us(ten)
        return 2.0 * n**3 * 10 / statistics.median(self._stream.time_us(ten) for _ in range(5)) * 1e6


def _repeats(size_bytes: int) -> int:
    """So many pairs of launches that a graph of them takes about a millisecond."""
    return max(2, min(200, (1 << 31) // size_bytes))
