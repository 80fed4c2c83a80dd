"""Kernels that a GPU worker verifies and times: generated sources and library calls, bound to guarded buffers.

Binding for verification makes a call that waits for the device and checks the state that the kernel must leave zero;
binding for timing makes one that only enqueues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, final

import torch

from weft.errors import DeviceError
from weft.generate.bind import Addresses, BoundCuda, CudaDriver, real_driver
from weft.generate.library.execute import TORCH_DTYPE, BoundCall, is_capturable
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource, Kernel, KernelSource, Left, LibraryCall
from weft.tune.cuda_device import Gpu
from weft.tune.verify import Arena, Binding, Buffer, Finding, weight_positions

_GUARD = 0x5C
LATE_TEXT = """extern "C" __global__ void weft_late(const long long* table, unsigned long long rows) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  unsigned long long now, end;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
  end += 40000ull;
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now < end);
  const long long i0 = (long long)blockIdx.x * blockDim.x + threadIdx.x, step = (long long)gridDim.x * blockDim.x;
  for (unsigned long long r = 0; r < rows; ++r) {
    const char* from = (const char*)table[3 * r];
    char* to = (char*)table[3 * r + 1];
    const long long n = table[3 * r + 2], whole = n / 16;
    for (long long i = i0; i < whole; i += step) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (long long i = 16 * whole + i0; i < n; i += step) to[i] = from[i];
  }
}
"""
"""Lets its successor start at once, and only after 40 us copies what that one is to read: (from, to, bytes) by row."""
LATE_ENTRY = "weft_late"
SOIL_WORDS = 200
SOIL_TEXT = f"""extern "C" __global__ void __launch_bounds__(256, 1) weft_soil(const unsigned* ones, unsigned bytes) {{
  extern __shared__ unsigned soiled[];
  unsigned held[{SOIL_WORDS}];
#pragma unroll
  for (int k = 0; k < {SOIL_WORDS}; ++k) held[k] = ((const volatile unsigned*)ones)[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < {SOIL_WORDS}; ++k) ((volatile unsigned*)soiled)[threadIdx.x] = held[k];
  for (unsigned i = threadIdx.x; i < bytes / 4; i += 256) soiled[i] = 0xFFFFFFFFu;
}}
"""
"""Leaves NaN in the registers and the shared memory of a multiprocessor, for whoever reads what it did not write."""
SOIL_ENTRY = "weft_soil"
_LATE_BLOCKS, _LATE_THREADS = 32, 256
"""Few enough for room beside the successor."""
_UNREAD = 0xFF


class MisbehavedError(Exception):
    """A call broke a promise that only the binding can see."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.error)
        self.finding = finding


class GpuSubject(Protocol):
    """A kernel that can be enqueued; see `weft.tune.verify.Subject` for the two properties."""

    deterministic: bool
    transforms: bool
    recordable: bool
    """It may become part of a CUDA graph."""
    packed_bytes: int
    """What a copy of the weights takes besides."""
    reads: frozenset[int]
    """Weights that a call reads as they are."""

    def enqueue(self, arena: Arena, poison: int) -> Binding:
        """Scratch filled with `poison`, weights packed; the call of the binding enqueues one run and returns."""
        ...

    def rotate(self, arenas: Sequence[Arena], base: Binding) -> list[Binding]:
        """Further calls on the weights of these arenas, each with packed weights of its own; the rest is `base`'s."""
        ...

    def misbehaviour(self) -> Finding | None:
        """What the last finished run did that no output shows."""
        ...


@final
class CudaSubject:
    """A compiled CUDA source."""

    deterministic = True
    recordable = True

    def __init__(
        self, problem: Problem, source: CudaSource, path: str, gpu: Gpu, *, driver: CudaDriver | None = None
    ) -> None:
        """Load. DeviceError: the cubin cannot be loaded or launched here."""
        self._source, self._gpu = source, gpu
        self.transforms = source.transforms
        self.packed_bytes = sum(source.packed_bytes)
        self._bound = BoundCuda(source, path, driver=driver)
        self._weights = weight_positions(problem.graph)
        self.reads = self._weights - set(source.replaces_weights)
        self._states: list[Buffer] = []

    def enqueue(self, arena: Arena, poison: int) -> Binding:
        """See `GpuSubject`. Inputs that the launches must not read have no address."""
        s, device = self._source, self._gpu.device
        packed = [Buffer(n, _GUARD, device) for n in s.packed_bytes]
        workspace = Buffer(s.workspace_bytes, _GUARD, device)
        state = Buffer(s.state_bytes, _GUARD, device)
        for buffer in (*packed, workspace):
            buffer.fill(poison)
        state.fill(0)
        places = [b.address for b in packed]
        if s.pack:
            only_weights = [b.address if k in self._weights else 0 for k, b in enumerate(arena.inputs)]
            self._bound.pack(only_weights, places, self._gpu.stream)
        if s.state_bytes:
            self._states.append(state)
        return Binding(self._call(arena, places, workspace, state), (*packed, workspace, state), (self, arena))

    def _call(self, arena: Arena, packed: Sequence[int], workspace: Buffer, state: Buffer) -> Callable[[], None]:
        hidden = self._weights - self.reads
        inputs = [0 if k in hidden else b.address for k, b in enumerate(arena.inputs)]
        outputs = [b.address for b in arena.outputs]
        prepared = self._bound.prepare(Addresses(inputs, outputs, packed, workspace.address, state.address))
        run = partial(prepared, self._gpu.stream)
        if not self._source.left:
            return run
        pairs = [(arena.output_tensors[x.output], _view(workspace, x, arena)) for x in self._source.left]

        def call() -> None:
            run()
            for to, view in pairs:
                torch.sum(view, 0, out=to) if len(view) > 1 else to.copy_(view[0])

        return call

    def rotate(self, arenas: Sequence[Arena], base: Binding) -> list[Binding]:
        """See `GpuSubject`. All copies of one packed weight lie in one allocation and are made in one go."""
        *packed, workspace, state = base.scratch
        slabs = [_copies(b, len(arenas)) for b in packed]
        found = []
        for k, arena in enumerate(arenas):
            places = [slab.data_ptr() + k * slab.stride(0) for slab in slabs]
            found.append(Binding(self._call(arena, places, workspace, state), (), (self, arena, slabs)))
        return found

    def misbehaviour(self) -> Finding | None:
        """See `GpuSubject`."""
        if any(bool(state.bytes.any()) for state in self._states):
            return Finding(Verdict.UNSTABLE, "left its state other than zero, so the next run would start from that")
        return None


def _view(workspace: Buffer, left: Left, arena: Arena) -> torch.Tensor:
    """What the launches leave of an output: the terms of a sum, in front."""
    t = arena.output_types[left.output]
    typed = workspace.bytes.view(TORCH_DTYPE[t.dtype])
    start = typed.storage_offset() + left.offset // t.dtype.itemsize
    return typed.as_strided((left.terms, *t.shape), (left.step, *left.strides), start)


def _copies(buffer: Buffer, count: int) -> torch.Tensor:
    """(count, padded bytes) of uint8: rows that begin at multiples of 256 bytes, as the buffer does."""
    n = buffer.bytes.numel()
    slab = torch.empty((count, -(-max(n, 1) // 256) * 256), dtype=torch.uint8, device=buffer.bytes.device)
    slab[:, :n].copy_(buffer.bytes.expand(count, n))
    return slab


@final
class CallSubject:
    """A library call, run as a plan on a GPU runs it."""

    deterministic = False
    transforms = False
    packed_bytes = 0

    def __init__(self, problem: Problem, call: LibraryCall, gpu: Gpu) -> None:
        self._call, self._gpu = call, gpu
        self._weights = self.reads = weight_positions(problem.graph)
        self.recordable = is_capturable(call)

    def enqueue(self, arena: Arena, poison: int) -> Binding:  # noqa: ARG002 - nothing here to poison
        """See `GpuSubject`; the framework allocates its own scratch."""
        weights = {k: arena.input_tensors[k] for k in sorted(self._weights)}
        bound = BoundCall(self._call, weights, device=self._gpu.device)
        # the framework may give an `out` tensor other strides, and then fill it in another order than was asked for
        outputs = [t.as_strided(t.shape, t.stride(), t.storage_offset()) for t in arena.output_tensors]
        return Binding(bound.launcher(arena.input_tensors, outputs), (), (bound, arena))

    def rotate(self, arenas: Sequence[Arena], base: Binding) -> list[Binding]:  # noqa: ARG002 - it has no scratch
        """See `GpuSubject`."""
        return [self.enqueue(arena, 0) for arena in arenas]

    def misbehaviour(self) -> Finding | None:
        """See `GpuSubject`."""
        return None


def make_gpu_subject(problem: Problem, kernel: Kernel, path: str, gpu: Gpu) -> GpuSubject:
    """A kernel that can be enqueued.

    Raises:
        DeviceError: a kernel for the CPU, or a cubin that cannot be loaded here.
    """
    if isinstance(kernel, CudaSource):
        return CudaSubject(problem, kernel, path, gpu)
    if isinstance(kernel, KernelSource):
        raise DeviceError(problem="a kernel for the CPU was sent to a worker for a GPU")
    return CallSubject(problem, kernel, gpu)


class Predecessor(Protocol):
    """A step in front of the kernel that is judged, which writes the kernel's inputs as late as it can."""

    def __call__(self, arena: Arena, positions: Sequence[int]) -> None:
        """Enqueue it for these inputs of an arena; until it writes them they are NaN."""
        ...


@final
class Soil:
    """Fills registers and shared memory of every multiprocessor with NaN: their content outlives a kernel."""

    def __init__(self, path: str, gpu: Gpu, *, sms: int, shared_bytes: int, driver: CudaDriver | None = None) -> None:
        """Load what `SOIL_TEXT` was compiled to. DeviceError: it cannot be loaded."""
        self._gpu = gpu
        self._module = (driver or real_driver()).load(Path(path))
        self._ones = torch.full((SOIL_WORDS,), -1, dtype=torch.int32, device=gpu.device)
        self._bound = self._module.function(SOIL_ENTRY).bind(
            (sms, 1, 1),
            (256, 1, 1),
            (self._ones.data_ptr(), shared_bytes),
            shared_bytes=shared_bytes,  # all of it, so that each multiprocessor gets one block
            cluster=(1, 1, 1),
            dependent=False,
        )

    def __call__(self) -> None:
        """Enqueue it."""
        self._bound.launch(self._gpu.stream)


@final
class LateWriter:
    """The predecessor on a real GPU: a kernel that waits for nothing reads what is not there yet."""

    def __init__(
        self, path: str, gpu: Gpu, *, soil: Callable[[], None] | None = None, driver: CudaDriver | None = None
    ) -> None:
        """Load what `LATE_TEXT` was compiled to. DeviceError: it cannot be loaded."""
        self._gpu, self._soil = gpu, soil
        self._module = (driver or real_driver()).load(Path(path))
        self._function = self._module.function(LATE_ENTRY)
        self._kept: tuple[object, ...] = ()

    def __call__(self, arena: Arena, positions: Sequence[int]) -> None:
        """See `Predecessor`."""
        moved = [k for k in positions if arena.inputs[k].bytes.numel()]
        if not moved:
            return
        rows = [[arena.copies[k].data_ptr(), arena.inputs[k].address, arena.inputs[k].bytes.numel()] for k in moved]
        table = torch.tensor(rows, dtype=torch.int64).to(self._gpu.device)
        for k in moved:
            arena.inputs[k].fill(_UNREAD)
        bound = self._function.bind(
            (_LATE_BLOCKS, 1, 1),
            (_LATE_THREADS, 1, 1),
            (table.data_ptr(), len(moved)),
            shared_bytes=0,
            cluster=(1, 1, 1),
            dependent=False,
        )
        self._kept = (table, bound)
        if self._soil is not None:
            self._soil()
        bound.launch(self._gpu.stream)


MakeSubject = Callable[[Problem, Kernel, str, Gpu], GpuSubject]


@final
@dataclass(slots=True)
class Waited:
    """A subject for `weft.tune.verify.verify`: each call waits for the device and looks at what was left behind.

    `before`, if there is one, stands in front of each call, as another step of a plan does.
    """

    subject: GpuSubject
    gpu: Gpu
    before: Callable[[Arena], None] | None = None
    deterministic: bool = False
    transforms: bool = False

    def __post_init__(self) -> None:
        self.deterministic, self.transforms = self.subject.deterministic, self.subject.transforms

    def bind(self, arena: Arena, poison: int) -> Binding:
        """See `weft.tune.verify.Subject`."""
        binding = self.subject.enqueue(arena, poison)
        self.gpu.wait()

        def call() -> None:
            if self.before is not None:
                self.before(arena)
            binding.call()
            self.gpu.wait()
            if (finding := self.subject.misbehaviour()) is not None:
                raise MisbehavedError(finding)

        return replace(binding, call=call)
