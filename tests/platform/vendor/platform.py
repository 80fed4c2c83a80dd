"""What `platform` has of it; it knows nothing of the CPU's that the protocol does not say."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from tests.platform.vendor.executable import XpuExecutable
from tests.platform.vendor.facts import XpuFacts

from weft.device.any import DeviceFacts
from weft.device.facts import CpuFacts
from weft.device.toolchain import HostCompiler, find_compiler
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.types import TensorType
from weft.kernels.plan import Plan
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.legality import EnumerationLimits
from weft.platform.cpu import Cpu
from weft.platform.policy import SearchPolicy
from weft.runtime.any import AnyExecutable
from weft.runtime.executable import Executable

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Xpu:
    """See `Platform`."""

    facts: XpuFacts
    compiler: HostCompiler | None
    environment: Mapping[str, str] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    kind: ClassVar[str] = "xpu"
    policy: ClassVar[SearchPolicy] = Cpu.policy
    asynchronous: ClassVar[bool] = False
    judges_in_float64: ClassVar[bool] = True

    @property
    def _cpu(self) -> Cpu:
        return Cpu(CpuFacts(), self.compiler, self.environment)

    @classmethod
    def device_of(cls, options: Options) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def room_bytes(cls, options: Options) -> int:
        return Cpu.room_bytes(options)

    @classmethod
    def survey(cls, options: Options, *, calibrate_s: float) -> Self:
        found = find_compiler()
        facts = XpuFacts()
        return cls(facts, None if isinstance(found, Declined) else found, {"xpu": facts.name, "target": "xpu-1"})

    @classmethod
    def find_alternatives(cls, graph: Graph, *, strict: bool = False) -> Alternatives:
        return Cpu.find_alternatives(graph, strict=strict)

    @classmethod
    def limits(cls, options: Options, facts: DeviceFacts | None = None) -> EnumerationLimits:
        return Cpu.limits(options, facts)

    @classmethod
    def policy_with(cls, facts: DeviceFacts) -> SearchPolicy:
        return cls.policy

    def lending(self) -> Self:
        return self

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def thread(self, run: Callable[[], None], name: str, /) -> threading.Thread:
        return self._cpu.thread(run, name)

    def is_sound(self) -> bool:
        return True

    @classmethod
    def free_memory(cls, *, garbage: bool = False) -> None:
        Cpu.free_memory(garbage=garbage)

    def variants(self, graph: Graph, plans: Sequence[Plan], *, timed: bool) -> Sequence[Plan]:
        return plans

    def link(self, graph: Graph, plan: Plan, options: Options, *, left_s: float = math.inf) -> XpuExecutable:
        made = self._cpu.link(graph, plan, options, left_s=left_s)
        return XpuExecutable(Executable(replace(made.linked, made_for=self.kind)))

    def again(self, executable: AnyExecutable, inputs: Tensors) -> Callable[[], Tensors]:
        return lambda: executable(*inputs)

    def capture(
        self,
        model: Callable[..., Tensors],
        inputs: Tensors,
        options: Options,
        *,
        alone: bool,
    ) -> Callable[..., Tensors]:
        return model

    def capture_later(
        self, model: Callable[..., Tensors], types: Sequence[TensorType], options: Options
    ) -> Callable[..., Tensors]:
        del types, options
        return model

    def sample_us(self, run: Callable[[], object], repeats: int) -> float:
        return self._cpu.sample_us(run, repeats)

    def step_times(self, executable: AnyExecutable, inputs: Tensors, *, plan_us: float) -> Sequence[float]:
        return ()
