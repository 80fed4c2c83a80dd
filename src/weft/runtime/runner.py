"""One C call that launches a run of native kernels: no Python between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from weft.device.launch import NativeKernel, Pointers, pointer_array
from weft.device.toolchain import HostCompiler

TEXT = """
#include <omp.h>
#include <pthread.h>
#include <unistd.h>
struct Step {
  void (*entry)(const void* const*, void* const*, void*, const void* const*);
  const void* const* inputs; void* const* outputs; void* workspace; const void* const* packed;
};
// The number of threads is a per-thread setting of OpenMP; the caller's is put back.
static void run(const Step* steps, long count, int threads) {
  int before = omp_get_max_threads();
  if (threads > 0 && threads != before) omp_set_num_threads(threads);
  for (const Step* s = steps; s < steps + count; ++s) s->entry(s->inputs, s->outputs, s->workspace, s->packed);
  if (threads > 0 && threads != before) omp_set_num_threads(before);
}
extern "C" void weft_copy(const void* const* from, void* const* to, void*, const void* const* given) {
  const long* sizes = (const long*)given;
  #pragma omp parallel
  for (long k = 0; k < sizes[0]; ++k) {
    const long n = sizes[k + 1], nt = omp_get_num_threads(), tid = omp_get_thread_num();
    const long begin = n / nt * tid, end = tid + 1 < nt ? n / nt * (tid + 1) : n;
    __builtin_memcpy((char*)to[k] + begin, (const char*)from[k] + begin, end - begin);
  }
}
struct Run { const Step* steps; long count; int threads; };
static void* apart(void* given) {
  const Run* r = (const Run*)given;
  run(r->steps, r->count, r->threads);
  return 0;
}
static pid_t home = 0;
// A process that was forked after a run has the caller's OpenMP team without its threads, and would wait for them
// without end: it runs on a thread that makes a team of its own.
extern "C" void weft_run(const Step* steps, long count, int threads) {
  if (home == 0) home = getpid();
  if (home == getpid()) return run(steps, count, threads);
  Run r = {steps, count, threads};
  pthread_t thread;
  if (pthread_create(&thread, 0, apart, &r) == 0) pthread_join(thread, 0);
  else run(steps, count, 1);
}
"""


class NativeStep(ctypes.Structure):
    """Mirror of `Step` in `TEXT`."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
    ]


class Runner:
    """Compiled once per machine; the loaded object stays, as all plans use the same."""

    def __init__(self, compiler: HostCompiler, cache_dir: Path | None) -> None:
        made = compiler.compile(TEXT, cache_dir=cache_dir)
        try:
            library = ctypes.CDLL(str(made.path))
        except OSError:  # whoever keeps the cache took it away
            library = ctypes.CDLL(str(compiler.compile(TEXT).path))
        self._run = library.weft_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
        self._run.restype = None
        self._copy = ctypes.cast(library.weft_copy, ctypes.c_void_p).value or 0

    def bind(self, steps: Sequence[NativeStep], keep: Sequence[NativeKernel | Pointers], threads: int) -> NativeRun:
        """A callable that launches these steps in order; `keep` are their kernels and the pointer arrays they use."""
        array = (NativeStep * len(steps))(*steps)
        return NativeRun(self._run, array, list(keep), threads)

    def copying(self, copies: Sequence[tuple[int, int, int]]) -> tuple[NativeStep, list[Pointers]]:
        """A step that copies memory: (from, to, bytes) each; and the arrays that it uses."""
        columns = zip(*copies, strict=True) if copies else ((), (), ())
        sources, targets, sizes = (pointer_array(list(x)) for x in columns)
        given = pointer_array([len(copies), *sizes])
        at = [ctypes.addressof(x) for x in (sources, targets, given)]
        return NativeStep(self._copy, at[0], at[1], 0, at[2]), [sources, targets, given]


class NativeRun:
    """Launches a fixed list of kernels."""

    def __init__(
        self,
        run: ctypes._NamedFuncPointer,
        array: ctypes.Array[NativeStep],
        keep: list[NativeKernel | Pointers],
        threads: int,
    ) -> None:
        self._function = run
        self._array = array
        self._keep = keep
        self._address = ctypes.addressof(array)
        self._count = len(array)
        self._threads = threads

    def singly(self) -> list[Callable[[], None]]:
        """The launches one by one, for timing each of them in its place, as long as this lives."""
        size = ctypes.sizeof(NativeStep)
        return [partial(self._function, self._address + k * size, 1, self._threads) for k in range(self._count)]

    @property
    def call(self) -> tuple[Callable[[int, int, int], None], int, int, int]:
        """The function of C and its arguments: between the call and its begin nothing of Python runs."""
        return self._function, self._address, self._count, self._threads

    def __call__(self) -> None:
        """Run all; returns when the last kernel has."""
        self._function(self._address, self._count, self._threads)
