"""One NVIDIA GPU."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self, cast, final

import torch

from weft.costmodel.profile import costs_of
from weft.device.any import DeviceFacts
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import OptionError, ToolchainError
from weft.generate.library.lt_call import library
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.types import TensorType
from weft.kernels.plan import Plan
from weft.kernels.source import CudaSource
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.legality import EnumerationLimits
from weft.platform.cpu import Cpu
from weft.platform.cuda.captured import capture
from weft.platform.cuda.captured_later import CapturedLater
from weft.platform.cuda.device import device_of
from weft.platform.cuda.products import Products
from weft.platform.policy import SearchPolicy
from weft.runtime.any import AnyExecutable
from weft.runtime.budgeted import SM_BUDGET, Budgeted
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked
from weft.runtime.lanes import order_of
from weft.runtime.streams import Lease
from weft.runtime.values import survey as survey_values
from weft.tune.keys import PACKAGE, PLAN_PARTS, source_hash
from weft.tune.thread_pool import DaemonThreadPool, daemon

Tensors = Sequence[torch.Tensor]
BRANCHES = (2, 4)
"""Chains of kernels that may run side by side; which is best is measured."""
SOLVED = ("solution", "verified")
"""How the names of plans begin that an integer program found."""


def survey(options: Options, *, calibrate: bool = True) -> tuple[GpuFacts, Nvrtc | None, dict[str, str]]:
    """Facts about the GPU that `options.device` names, the run-time compiler, and what a plan depends on.

    `calibrate`: what is not known of the GPU may be measured, which takes seconds.

    Raises:
        DeviceError: torch sees no such GPU [W301].
        OptionError: its multiprocessors have less than the budget of the options [W001].
    """
    device = device_of(options)
    products = Products(device)
    lease = Lease(device)
    stream = lease.streams(1)[0].cuda_stream
    measured = gpu_facts(options.cache, device=device.index or 0, calibrate=calibrate, matmul=products, stream=stream)
    facts = within(replace(measured, tf32=options.allow_tf32, fast_f8=options.allow_fast_f8), options)
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
    if facts.sm_budget is not None:
        environment[SM_BUDGET] = str(facts.sm_budget)
    return facts, compiler, environment


def within(facts: GpuFacts, options: Options) -> GpuFacts:
    """The GPU as plans of these options may take it.

    Raises:
        OptionError: its multiprocessors have less than the budget [W001].
    """
    try:
        return facts.within(options.sm_budget)
    except ValueError as error:
        raise OptionError(option="sm_budget", problem=str(error)) from None


@final
@dataclass(frozen=True)
class Cuda:
    """See `Platform`."""

    facts: GpuFacts
    compiler: Nvrtc | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    lease: Lease | None = None
    """The streams that all plans of a compilation are recorded and run on; None: each has its own."""

    kind: ClassVar[str] = "cuda"
    policy: ClassVar[SearchPolicy] = SearchPolicy(
        batch=24,
        late=0.8,
        overlaps=True,
        uses_at_once=4000,  # 0.2 ms each
        first=2,
        spares_calls=True,
        heuristic_within=1.05,
        large_programs=True,
        counts_launches=True,
    )
    asynchronous: ClassVar[bool] = True
    judges_in_float64: ClassVar[bool] = False

    @classmethod
    def device_of(cls, options: Options) -> torch.device:
        """See `Platform`."""
        return device_of(options)

    @classmethod
    def room_bytes(cls, options: Options) -> int:
        """All of the GPU's memory."""
        if not torch.cuda.is_available():
            return 1 << 62  # the survey says what is missing
        return torch.cuda.get_device_properties(device_of(options)).total_memory

    @classmethod
    def survey(cls, options: Options, *, calibrate_s: float) -> Self:
        """See `Platform`; without NVRTC, which is warned of, nothing is generated."""
        facts, compiler, environment = survey(options, calibrate=calibrate_s > 0)
        environment["weft"] = source_hash(PACKAGE, (*PLAN_PARTS, "device/cuda", "costmodel"))
        return cls(facts, compiler, environment, device_of(options))

    @classmethod
    def find_alternatives(cls, graph: Graph, *, strict: bool = False) -> Alternatives:
        """See `Platform`."""
        return find_alternatives(graph, strict=strict, on_gpu=True)

    @classmethod
    def limits(cls, options: Options, facts: DeviceFacts | None = None) -> EnumerationLimits:
        """See `Platform`: attention, products in one launch where the number of multiprocessors is known, calls.

        No calls under a budget of an SM: see `generate.library`.
        """
        sms, calls = facts.sms if isinstance(facts, GpuFacts) else 0, options.sm_budget is None
        return replace(
            Cpu.limits(options), attention=True, multiprocessors=sms, unions=True, library_calls=calls,
            changing_weights=False,
        )  # fmt: skip

    @classmethod
    def policy_with(cls, facts: DeviceFacts) -> SearchPolicy:
        """With the constants of the GPU's cost model."""
        assert isinstance(facts, GpuFacts)
        costs = costs_of(facts).library
        return replace(cls.policy, unmeasured_call_us=costs.unmeasured_us, library_near=costs.near)

    def lending(self) -> Self:
        """With streams that all plans share: the framework keeps a workspace for each."""
        return replace(self, lease=Lease(self.device))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On a stream of the compilation, after what the caller's stream had, and before what follows."""
        if self.lease is None:
            yield
            return
        (mine,), theirs = self.lease.streams(1), torch.cuda.current_stream()
        mine.wait_stream(theirs)
        try:
            with torch.cuda.stream(mine):
                yield
        finally:
            theirs.wait_stream(mine)

    def thread(self, run: Callable[[], None], name: str, /) -> threading.Thread:
        """See `Platform`: a thread's current GPU is the first, whatever its parent's is."""

        def there() -> None:
            if self.device.index:
                torch.cuda.set_device(self.device)
            run()

        return daemon(there, name)

    def is_sound(self) -> bool:
        """After an illegal access nothing in this process's context ever computes again."""
        return is_sound(self.device)

    @classmethod
    def free_memory(cls, *, garbage: bool = False) -> None:
        """See `Platform`."""
        if garbage:  # plans hold themselves by their launches
            gc.collect()
        torch.cuda.empty_cache()

    def variants(self, graph: Graph, plans: Sequence[Plan], *, timed: bool) -> Sequence[Plan]:  # noqa: ARG002
        """What the program found also with kernels side by side, in as many chains as that makes sense for.

        The first plan's come right behind it: where the time ends early they are worth more than other solutions. Of
        training steps of BERT, GPT-2 and ViT they took 3 to 7 % on an H200, the solutions differed by half of one.
        """
        solved = [p for p in plans if p.name.startswith(SOLVED)]
        found: list[Plan] = []
        for plan in plans:
            found.append(plan)
            if solved and plan is solved[0]:
                found += _side_by_side(graph, plan)
        return [*found, *(beside for plan in solved[1:] for beside in _side_by_side(graph, plan))]

    def link(self, graph: Graph, plan: Plan, options: Options, *, left_s: float = math.inf) -> CudaExecutable:
        """Kernels are compiled all at once, and recorded on the streams of the compilation.

        A compiler that takes more seconds than are left is ended.
        """
        sources = {s.kernel.sha256: s.kernel for s in plan.steps if isinstance(s.kernel, CudaSource)}
        compiler = self.compiler
        if sources and compiler is None:
            raise ToolchainError(tool="none", status=-1, log="a plan with generated kernels needs NVRTC")

        def build(source: CudaSource) -> Path:
            assert compiler is not None
            made = compiler.compile(
                source.text,
                arch=self.facts.arch,
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
        linked = Linked(graph, plan, objects, None, options.cache, 0, self.environment)
        # what stays shall not lie in segments that libraries took for a moment: those could not be given back
        torch.cuda.empty_cache()
        budgeted = None if self.facts.sm_budget is None else Budgeted(self.facts)
        return CudaExecutable(linked, device=self.device, lease=self.lease, budgeted=budgeted)

    def again(self, executable: AnyExecutable, inputs: Tensors) -> Callable[[], Tensors]:  # noqa: ARG002
        """A replay: it runs on what the first run has put in place."""
        return cast("CudaExecutable", executable).replay

    def capture(
        self, model: Callable[..., Tensors], inputs: Tensors, options: Options, *, alone: bool
    ) -> Callable[..., Tensors]:
        """Recorded into a CUDA graph, where that is possible: on the streams of the compilation unless `alone`."""
        lease = None if alone else self.lease
        captured = capture(model, inputs, options, lease or Lease(self.device))
        return model if isinstance(captured, Declined) else captured

    def capture_later(
        self, model: Callable[..., Tensors], types: Sequence[TensorType], options: Options
    ) -> Callable[..., Tensors]:
        """See `Platform`."""
        return CapturedLater(model, types, options, sample_us)

    def sample_us(self, run: Callable[[], object], repeats: int) -> float:
        """By events around the calls."""
        return sample_us(run, repeats)

    def step_times(self, executable: AnyExecutable, inputs: Tensors, *, plan_us: float) -> Sequence[float]:  # noqa: ARG002
        """See `Platform`: a plan is one CUDA graph."""
        return ()


def _side_by_side(graph: Graph, plan: Plan) -> list[Plan]:
    """The plan in several lanes, in each number of them that it makes use of."""
    values, made = survey_values(graph, plan), dict[int, Plan]()
    for most in BRANCHES:
        width = order_of(plan, values, most).width
        if width > 1 and width not in made:
            made[width] = replace(plan, name=f"{plan.name}/{width}", branches=most)
    return list(made.values())


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
