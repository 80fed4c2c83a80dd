"""What the pipeline does otherwise on an NVIDIA GPU: survey, link, baselines in CUDA graphs, timing by events."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, final

import torch

from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import DeviceError, ToolchainError
from weft.generate.library.execute import plain_math
from weft.generate.library.lt_call import library
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.kernels.plan import Plan
from weft.kernels.source import CudaSource
from weft.options import Options
from weft.runtime.cuda_executable import CudaExecutable, Turns
from weft.runtime.executable import InputError, Linked
from weft.runtime.streams import Lease
from weft.tune.thread_pool import DaemonThreadPool

Tensors = Sequence[torch.Tensor]


def survey(options: Options, *, calibrate: bool = True) -> tuple[GpuFacts, Nvrtc | None, dict[str, str]]:
    """Facts about the GPU that `options.device` names, the run-time compiler, and what a plan depends on.

    `calibrate`: what is not known of the GPU may be measured, which takes seconds.

    Raises:
        DeviceError: torch sees no such GPU [W301].
    """
    device = device_of(options)
    products = Products(device)
    lease = Lease(device)
    stream = lease.streams(1)[0].cuda_stream
    measured = gpu_facts(options.cache, device=device.index or 0, calibrate=calibrate, matmul=products, stream=stream)
    facts = replace(measured, tf32=options.allow_tf32, fast_f8=options.allow_fast_f8)
    products.close()
    found = find_nvrtc()
    compiler = None if isinstance(found, Declined) else found
    if isinstance(found, Declined) and options.allow_generated:
        text = f"Weft found no NVRTC ({found.reason}): library kernels only, nothing is generated or fused"
        warnings.warn(text, stacklevel=2)
    products_by = library(device)
    environment = {
        "cublaslt": "none" if isinstance(products_by, Declined) else products_by.lt.version,
        "gpu": facts.name,
        "capability": str(facts.capability),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "compiler": compiler.identity(()) if compiler else "none",
        "allow_tf32": str(options.allow_tf32),
        "allow_fast_f8": str(options.allow_fast_f8),
    }
    return facts, compiler, environment


@final
class Products:
    """The framework's large products, from which `device.cuda.calibrate` learns what FLOP/s are achieved."""

    _TYPES: ClassVar[Mapping[str, torch.dtype]] = {
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "f32": torch.float32,
        "tf32": torch.float32,
    }

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made = False

    def __call__(self, dtype: str, n: int) -> Callable[[int], None] | None:
        """What puts an n x n x n product on a stream; None: no such type, or not enough memory."""
        if dtype not in self._TYPES:
            return None
        self._made = True
        try:
            chance = torch.Generator(self._device).manual_seed(0)
            x, y = (
                torch.randn(n, n, dtype=self._TYPES[dtype], device=self._device, generator=chance) for _ in range(2)
            )
            out = torch.empty_like(x)
        except torch.OutOfMemoryError:
            return None
        torch.cuda.synchronize(self._device)  # the product runs on a stream that does not wait for this one

        def enqueue(stream: int) -> None:
            theirs = torch.cuda.ExternalStream(stream, self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(theirs), plain_math(allow_tf32=dtype == "tf32"):
                torch.mm(x, y, out=out)

        return enqueue

    def close(self) -> None:
        """Give back the memory, if any was taken."""
        if self._made:
            torch.cuda.empty_cache()


def device_of(options: Options) -> torch.device:
    """The device that the options name.

    Raises:
        DeviceError: there is no such GPU here [W301].
    """
    if not torch.cuda.is_available():
        raise DeviceError(problem="device='cuda', but this torch sees no NVIDIA GPU")
    named = options.device.partition(":")[2]
    index = int(named) if named.isdigit() else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise DeviceError(problem=f"device={options.device!r}, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def link(
    graph: Graph,
    plan: Plan,
    facts: GpuFacts,
    compiler: Nvrtc | None,
    options: Options,
    environment: Mapping[str, str],
    lease: Lease | None = None,
    *,
    left_s: float = math.inf,
) -> CudaExecutable:
    """Compile (or find) the plan's kernels, all at once, and record its graphs on those streams (None: of its own).

    A compiler that takes more seconds than are left is ended.
    """
    sources = {s.kernel.sha256: s.kernel for s in plan.steps if isinstance(s.kernel, CudaSource)}
    if sources and compiler is None:
        raise ToolchainError(tool="none", status=-1, log="a plan with generated kernels needs NVRTC")

    def build(source: CudaSource) -> Path:
        assert compiler is not None
        made = compiler.compile(
            source.text,
            arch=facts.arch,
            flags=source.flags,
            max_registers=source.max_registers,
            cache_dir=options.cache,
            timeout_s=min(options.compile_timeout_s, left_s),
        )
        return made.path

    with DaemonThreadPool(
        options.build_jobs or len(os.sched_getaffinity(0)), lambda: min(left_s, threading.TIMEOUT_MAX)
    ) as pool:
        made = {sha256: pool.submit(build, source) for sha256, source in sources.items()}
        objects = {sha256: future.result(None if math.isinf(left_s) else left_s) for sha256, future in made.items()}
    linked = Linked(graph, plan, objects, None, options.cache, 0, environment)
    # what stays shall not lie in segments that libraries took for a moment: those could not be given back
    torch.cuda.empty_cache()
    return CudaExecutable(linked, device=device_of(options), lease=lease)


@final
class Captured:
    """The framework's own model recorded into a CUDA graph for one set of shapes: a baseline, and a plan to return.

    Calling it copies the inputs in, replays, and copies the outputs out; from several threads and streams, too. Inside
    a caller's own capture the model itself is run, by the numeric policy of the process.
    """

    def __init__(self, model: Callable[..., Tensors], inputs: Tensors, lease: Lease | None = None) -> None:
        """Run it and record it on a stream of `lease`; None: as the framework's manual does it, on two of its own."""
        self._model = model  # owns the weights whose addresses the graph holds
        with torch.inference_mode(mode=False), torch.no_grad():  # what that mode makes cannot be written outside of it
            self._inputs = [x.clone() for x in inputs]
        self._lease = lease
        mine = lease.streams(1)[0] if lease is not None else None
        stream = mine or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if stream != torch.cuda.current_stream():
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):
                model(*self._inputs)
        if stream != torch.cuda.current_stream():
            torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # only this thread is kept from what cannot be recorded
        with torch.no_grad(), torch.cuda.graph(self.graph, stream=mine, capture_error_mode="thread_local"):
            self._outputs = list(model(*self._inputs))
        self._lock, self._turns = threading.Lock(), Turns(self._inputs)

    def replay(self) -> Tensors:
        """Run on the inputs it holds."""
        self.graph.replay()
        return self._outputs

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Run on these inputs; fresh outputs.

        Raises:
            InputError: a tensor on another device [W011].
        """
        for position, (mine, given) in enumerate(zip(self._inputs, inputs, strict=True)):
            if given.device != mine.device:
                problem = f"expected a tensor on {mine.device}, got {given.device}"
                raise InputError(position=position, problem=problem)
        device = self._inputs[0].device if self._inputs else None
        with torch.cuda.device(device), torch.no_grad():
            return self._run(inputs)

    def _run(self, inputs: Tensors) -> Tensors:
        if torch.cuda.is_current_stream_capturing():
            return self._model(*inputs)
        with self._lock:
            self._turns.take()
            for mine, given in zip(self._inputs, inputs, strict=True):
                mine.copy_(given)
            self.graph.replay()
            return [x.clone() for x in self._outputs]


def capture(
    model: Callable[..., Tensors], inputs: Tensors, options: Options, lease: Lease | None = None
) -> Captured | Declined:
    """The model in a CUDA graph, by the numeric policy of the options; or why it cannot be recorded.

    `lease`: as for `CudaExecutable`.
    """
    try:
        with plain_math(allow_tf32=options.allow_tf32):
            return Captured(model, inputs, lease or Lease(device_of(options)))
    except RuntimeError as error:
        torch.cuda.synchronize()
        return Declined(str(error).splitlines()[0][:200])


@contextlib.contextmanager
def aside(lease: Lease) -> Iterator[None]:
    """What is done inside runs on a stream of `lease`, after what the caller's stream had, and before what follows."""
    (mine,), theirs = lease.streams(1), torch.cuda.current_stream()
    mine.wait_stream(theirs)
    try:
        with torch.cuda.stream(mine):
            yield
    finally:
        theirs.wait_stream(mine)


def is_sound(device: torch.device) -> bool:
    """Whether this process's context still computes: after an illegal access nothing in it ever does again."""
    try:
        return float(torch.ones(64, device=device).sum()) == 64.0
    except RuntimeError:
        return False


def sample_us(run: Callable[[], object], repeats: int) -> float:
    """Microseconds per call, by events around `repeats` calls on the current stream."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / repeats
