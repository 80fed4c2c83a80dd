"""Short programs that measure what no file on the machine states: clock, vector peak, bandwidth, cost of a fork.

The loops are opaque to the compiler (asm barriers, results that are used), because a naive peak probe is
folded away and then "shows" terabytes and teraflops. One call of `run_probes` takes about two seconds.
"""

from __future__ import annotations

import ctypes
import math
import time
from dataclasses import dataclass
from pathlib import Path

from weft.device.toolchain import HostCompiler

SIZES = tuple(1 << k for k in (16, 18, 20, 22, 24, 26, 29))
"""Array sizes of the bandwidth table in bytes: 64 KiB to 512 MiB."""

PROBE_TEXT = r"""
#include <time.h>
#include <cstddef>
#include <cstdint>
#include <omp.h>
static double now() {
  timespec t;  // of the C library: C++'s is not linked
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#ifndef WEFT_LANES
#if defined(__AVX512F__)
#define WEFT_LANES 16
#elif defined(__AVX__)
#define WEFT_LANES 8
#else
#define WEFT_LANES 4
#endif
#endif
typedef float vec __attribute__((vector_size(WEFT_LANES * 4), aligned(4)));
extern "C" int weft_lanes() { return WEFT_LANES; }

// A chain of dependent additions of two registers takes one cycle each. (Of constants it may take none: some
// cores fold those while renaming registers.)
extern "C" double weft_cycles_per_second() {
  double best = 0;
  for (int trial = 0; trial < 5; ++trial) {
    uint64_t x = 1, step = 3;
    asm volatile("" : "+r"(step));
    double start = now();
    for (int i = 0; i < 100000; ++i) {
#define WEFT_STEP x += step; asm volatile("" : "+r"(x), "+r"(step));
#define WEFT_STEP8 WEFT_STEP WEFT_STEP WEFT_STEP WEFT_STEP WEFT_STEP WEFT_STEP WEFT_STEP WEFT_STEP
      WEFT_STEP8 WEFT_STEP8 WEFT_STEP8 WEFT_STEP8
    }
    double rate = 3200000.0 / (now() - start);
    if (rate > best) best = rate;
  }
  return best;
}

// Twelve independent accumulators hide the latency of any FMA unit. Many short trials, the best of each thread, all
// threads at once: the clock rises only after a while under wide vectors, and a trial must fall between the moments at
// which a neighbour has that core. (A barrier around the trials would wait for a thread that has none: a tenth of the
// peak on a busy machine.) What is measured too low here makes the fastest kernels look impossible.
extern "C" double weft_flops(int threads, long rounds) {
  double all = 0;
#pragma omp parallel num_threads(threads) reduction(+ : all)
  {
    vec m, c;
    for (int k = 0; k < WEFT_LANES; ++k) { m[k] = 0.999f; c[k] = 0.001f; }
    vec a0 = c, a1 = c, a2 = c, a3 = c, a4 = c, a5 = c, a6 = c, a7 = c, a8 = c, a9 = c, a10 = c, a11 = c;
#if defined(__x86_64__)
#define WEFT_KEEP(v) asm volatile("" : "+x"(v));
#else
#define WEFT_KEEP(v) asm volatile("" : "+w"(v));
#endif
#define WEFT_FMA(j) a##j = a##j * m + c; WEFT_KEEP(a##j)
    double best = 0;
#pragma omp barrier
    const double first = now();
    for (int trial = 0; trial < 8 || now() - first < 0.3; ++trial) {
      const double start = now();
      for (long i = 0; i < rounds; ++i) {
        WEFT_FMA(0) WEFT_FMA(1) WEFT_FMA(2) WEFT_FMA(3) WEFT_FMA(4) WEFT_FMA(5)
        WEFT_FMA(6) WEFT_FMA(7) WEFT_FMA(8) WEFT_FMA(9) WEFT_FMA(10) WEFT_FMA(11)
      }
      const double rate = 24.0 * WEFT_LANES * rounds / (now() - start);
      if (rate > best) best = rate;
    }
    all += best;
  }
  return all;
}

// Touched first by the threads that use it.
extern "C" void weft_touch(float* x, size_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t i = 0; i < n; ++i) x[i] = 1.0f;
}

// Bytes read and written per second: x <- x * s. Each thread sweeps its own part, so no fork is in the time.
extern "C" double weft_scale(float* x, size_t n, int threads, long repeats) {
  double best = 0, first = now();
  for (int trial = 0; trial < 2 || (trial < 64 && now() - first < 0.06); ++trial) {
    double seconds = 0;
#pragma omp parallel num_threads(threads)
    {
      size_t part = n / threads, lo = part * omp_get_thread_num(), hi = lo + part;
#pragma omp barrier
      double start = now();
      for (long r = 0; r < repeats; ++r) {
        float s = (r & 1) ? 0.5f : 2.0f;
#pragma omp simd
        for (size_t i = lo; i < hi; ++i) x[i] *= s;
        asm volatile("" ::: "memory");
      }
#pragma omp barrier
#pragma omp master
      seconds = now() - start;
    }
    double rate = 8.0 * n * repeats / seconds;
    if (rate > best) best = rate;
  }
  return best;
}

// Bytes read per second.
extern "C" double weft_read(const float* x, size_t n, int threads, long repeats) {
  double best = 0, first = now();
  volatile float sink = 0;
  for (int trial = 0; trial < 2 || (trial < 64 && now() - first < 0.06); ++trial) {
    double seconds = 0;
    float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
      vec a0 = {}, a1 = {}, a2 = {}, a3 = {};
      size_t part = n / threads, lo = part * omp_get_thread_num(), hi = lo + part;
#pragma omp barrier
      double start = now();
      for (long r = 0; r < repeats; ++r) {
        for (size_t i = lo; i + 4 * WEFT_LANES <= hi; i += 4 * WEFT_LANES) {
          a0 += *(const vec*)(x + i);
          a1 += *(const vec*)(x + i + WEFT_LANES);
          a2 += *(const vec*)(x + i + 2 * WEFT_LANES);
          a3 += *(const vec*)(x + i + 3 * WEFT_LANES);
        }
        asm volatile("" ::: "memory");
      }
      a0 += a1 + a2 + a3;
      total += a0[0];
#pragma omp barrier
#pragma omp master
      seconds = now() - start;
    }
    sink = sink + total;
    double rate = 4.0 * n * repeats / seconds;
    if (rate > best) best = rate;
  }
  return best;
}

extern "C" double weft_fork_seconds(int threads) {
  double best = 1, first = now();
  // beside other work a region may take a time slice, and far fewer of them tell what it costs
  for (int trial = 0; trial < 5 && (trial == 0 || now() - first < 0.25); ++trial) {
    double start = now();
    int done = 0;
    for (; done < 2000 && (done % 16 || now() - start < 0.1); ++done) {
#pragma omp parallel num_threads(threads)
      asm volatile("" ::: "memory");
    }
    double each = (now() - start) / done;
    if (each < best) best = each;
  }
  return best;
}
"""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the probes saw, with all threads unless said otherwise."""

    lanes: int
    """f32 lanes of the widest vector the compiler uses."""
    frequency_ghz: float
    """Clock of one busy core."""
    flops_f32: float
    """FLOP/s of independent FMAs on all threads."""
    fork_us: float
    scale_gb_s: tuple[tuple[int, float], ...]
    """(array bytes, GB/s read plus written) of x <- s * x."""
    read_gb_s: tuple[tuple[int, float], ...]

    def best_of(self, other: ProbeResult) -> ProbeResult:
        """Of two runs on one machine: what disturbs a probe makes it slower, never faster."""
        pairs = (
            zip(mine, theirs, strict=False)
            for mine, theirs in ((self.scale_gb_s, other.scale_gb_s), (self.read_gb_s, other.read_gb_s))
        )
        scale, read = (tuple((size, max(x, y)) for (size, x), (_, y) in pair) for pair in pairs)
        return ProbeResult(
            self.lanes,
            max(self.frequency_ghz, other.frequency_ghz),
            max(self.flops_f32, other.flops_f32),
            min(self.fork_us, other.fork_us),
            scale,
            read,
        )


def run_probes(
    compiler: HostCompiler, threads: int, *, cache_dir: Path | None, free_bytes: int, most_s: float = math.inf
) -> ProbeResult:
    """Compile the probes and run them in this process.

    Arrays over an eighth of `free_bytes` are left out of the tables. No probe is begun after `most_s` seconds.

    Raises:
        ToolchainError: the compiler refused the probes, or took longer.
        TimeoutError: the time was up.
        OSError: the object cannot be loaded.
    """
    end = time.monotonic() + most_s

    def check() -> None:
        if time.monotonic() >= end:
            raise TimeoutError(f"the probes took longer than {most_s:.3g} s")

    check()
    built = compiler.compile(PROBE_TEXT, cache_dir=cache_dir, timeout_s=min(60.0, most_s))
    lib = ctypes.CDLL(str(built.path))
    for name in ("weft_cycles_per_second", "weft_flops", "weft_scale", "weft_read", "weft_fork_seconds"):
        getattr(lib, name).restype = ctypes.c_double
    sizes = [s for s in SIZES if s <= max(free_bytes // 8, SIZES[0])]
    hz = float(lib.weft_cycles_per_second())
    check()
    flops = float(lib.weft_flops(threads, ctypes.c_long(200_000)))
    check()
    fork = float(lib.weft_fork_seconds(threads))
    buffer = (ctypes.c_char * (sizes[-1] + 64))()
    address = (ctypes.addressof(buffer) + 63) & ~63
    pointer = ctypes.c_void_p(address)
    lib.weft_touch(pointer, ctypes.c_size_t(sizes[-1] // 4), threads)
    scale, read = [], []
    for size in sizes:
        check()
        repeats = ctypes.c_long(max(1, (1 << 28) // size // (1 if size <= 1 << 22 else 2)))
        count = ctypes.c_size_t(size // 4)
        scale.append((size, float(lib.weft_scale(pointer, count, threads, repeats)) / 1e9))
        read.append((size, float(lib.weft_read(pointer, count, threads, repeats)) / 1e9))
    return ProbeResult(int(lib.weft_lanes()), hz / 1e9, flops, fork * 1e6, tuple(scale), tuple(read))
