"""This machine's CPU."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self, cast, final

import torch

from weft.device.any import DeviceFacts
from weft.device.facts import CpuFacts, cpu_facts
from weft.device.room import free_bytes
from weft.device.toolchain import HostCompiler, find_compiler
from weft.errors import OptionError, ToolchainError
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.types import TensorType
from weft.kernels.plan import Plan
from weft.kernels.source import KernelSource
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.legality import EnumerationLimits
from weft.platform.policy import SearchPolicy
from weft.runtime.any import AnyExecutable
from weft.runtime.executable import Executable, Linked
from weft.tune.keys import GPU_WORDS, PACKAGE, PLAN_PARTS, source_hash
from weft.tune.thread_pool import daemon

Tensors = Sequence[torch.Tensor]
ALONE_US = 2000.0
"""Plans that are predicted to take at most so long are also timed on one thread."""
STEP_TIMES_S, STEP_ROUNDS = 0.5, 15
"""What timing the steps of a plan may take, and how often each is run at most."""


@final
@dataclass(frozen=True)
class Cpu:
    """See `Platform`."""

    facts: CpuFacts
    compiler: HostCompiler | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    kind: ClassVar[str] = "cpu"
    policy: ClassVar[SearchPolicy] = SearchPolicy(batch=12, late=0.4, last=0.75, calls_in_time=True)
    """A CPU measures some three problems a second, and large networks have hundreds in their plans."""
    asynchronous: ClassVar[bool] = False
    judges_in_float64: ClassVar[bool] = True
    device: ClassVar[torch.device] = torch.device("cpu")

    @classmethod
    def device_of(cls, options: Options) -> torch.device:  # noqa: ARG003 - there is one
        """See `Platform`."""
        return cls.device

    @classmethod
    def room_bytes(cls, options: Options) -> int:  # noqa: ARG003 - there is one memory
        """What is free of the host's memory."""
        return free_bytes()

    @classmethod
    def survey(cls, options: Options, *, calibrate_s: float) -> Self:
        """See `Platform`; without a compiler, which is warned of, nothing is generated.

        Raises:
            OptionError: a budget of what a CPU does not have [W001].
        """
        if options.sm_budget is not None:
            problem = f"{options.sm_budget} are of one SM of a GPU, and the device is {options.device!r}"
            raise OptionError(option="sm_budget", problem=problem)
        facts = cpu_facts(options.cache, calibrate=calibrate_s > 0, most_s=calibrate_s)
        if options.threads or torch.get_num_threads() != facts.threads:
            facts = replace(facts, threads=options.threads or torch.get_num_threads())
        compiler = find_compiler()
        usable = None if isinstance(compiler, Declined) else compiler
        if isinstance(compiler, Declined) and options.allow_generated:
            why = f"Weft found no C++ compiler ({compiler.reason})"
            warnings.warn(f"{why}: library kernels only, nothing is generated or fused", stacklevel=2)
        environment = {
            "cpu": facts.name,
            "threads": str(facts.threads),
            "torch": torch.__version__,
            "compiler": usable.version if usable else "none",
            "weft": source_hash(PACKAGE, PLAN_PARTS, without=GPU_WORDS),
        }
        return cls(facts, usable, environment)

    @classmethod
    def find_alternatives(cls, graph: Graph, *, strict: bool = False) -> Alternatives:
        """See `Platform`."""
        return find_alternatives(graph, strict=strict)

    @classmethod
    def limits(cls, options: Options, facts: DeviceFacts | None = None) -> EnumerationLimits:  # noqa: ARG003
        """See `Platform`."""
        return EnumerationLimits(
            max_members=options.max_members,
            max_inputs=options.max_inputs,
            max_reductions=options.max_reductions,
            max_candidates=options.max_candidates,
            attention=False,
            multiprocessors=0,
            library_calls=False,
        )

    @classmethod
    def policy_with(cls, facts: DeviceFacts) -> SearchPolicy:  # noqa: ARG003 - one for all CPUs
        """See `Platform`."""
        return cls.policy

    def lending(self) -> Self:
        """See `Platform`."""
        return self

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """See `Platform`."""
        return contextlib.nullcontext()

    def thread(self, run: Callable[[], None], name: str, /) -> threading.Thread:
        """See `Platform`."""
        return daemon(run, name)

    def is_sound(self) -> bool:
        """See `Platform`: what a kernel here destroys is the process."""
        return True

    @classmethod
    def free_memory(cls, *, garbage: bool = False) -> None:
        """See `Platform`: the host's allocator gives back by itself."""

    def variants(self, graph: Graph, plans: Sequence[Plan], *, timed: bool) -> Sequence[Plan]:  # noqa: ARG002
        """Those of small networks also on one thread: waking a team may take longer than they do.

        On a machine where others run it takes much longer: the team waits for a thread that does not run.
        """
        if not timed or self.facts.threads <= 1:
            return plans
        small = [p for p in plans if p.predicted_us <= ALONE_US]
        return [*plans, *(replace(p, name=f"{p.name}/1 thread", threads=1) for p in small)]

    def link(self, graph: Graph, plan: Plan, options: Options, *, left_s: float = math.inf) -> Executable:
        """See `Platform`: kernels are compiled one after another."""
        objects: dict[str, Path] = {}
        for step in plan.steps:
            if isinstance(step.kernel, KernelSource) and step.kernel.sha256 not in objects:
                if self.compiler is None:
                    raise ToolchainError(tool="none", status=-1, log="a plan with generated kernels needs a compiler")
                kernel = step.kernel
                limit_s = min(options.compile_timeout_s, left_s)
                made = self.compiler.compile(kernel.text, kernel.flags, cache_dir=options.cache, timeout_s=limit_s)
                objects[kernel.sha256] = made.path
        linked = Linked(graph, plan, objects, self.compiler, options.cache, self.facts.threads, self.environment)
        return Executable(linked)

    def again(self, executable: AnyExecutable, inputs: Tensors) -> Callable[[], Tensors]:
        """See `Platform`."""
        return lambda: executable(*inputs)

    def capture(
        self,
        model: Callable[..., Tensors],
        inputs: Tensors,  # noqa: ARG002
        options: Options,  # noqa: ARG002
        *,
        alone: bool,  # noqa: ARG002
    ) -> Callable[..., Tensors]:
        """See `Platform`: the model as it is."""
        return model

    def capture_later(
        self,
        model: Callable[..., Tensors],
        types: Sequence[TensorType],  # noqa: ARG002
        options: Options,  # noqa: ARG002
    ) -> Callable[..., Tensors]:
        """See `Platform`: the model as it is."""
        return model

    def sample_us(self, run: Callable[[], object], repeats: int) -> float:
        """By the host's clock."""
        return host_sample(run, repeats)

    def step_times(self, executable: AnyExecutable, inputs: Tensors, *, plan_us: float) -> Sequence[float]:
        """See `Platform`: medians over as many runs as `STEP_TIMES_S` allows."""
        rounds = int(STEP_TIMES_S * 1e6 / max(plan_us, 1.0))
        return cast("Executable", executable).time_steps(*inputs, rounds=max(1, min(STEP_ROUNDS, rounds)))


def host_sample(run: Callable[[], object], repeats: int) -> float:
    """Microseconds per call by the host's clock."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats * 1e6
