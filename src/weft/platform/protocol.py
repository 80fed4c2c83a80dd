"""The questions that compiling asks of a kind of device."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol, Self

import torch

from weft.device.any import DeviceFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.toolchain import HostCompiler
from weft.ir.graph import Graph
from weft.ir.types import TensorType
from weft.kernels.plan import Plan
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.legality import EnumerationLimits
from weft.platform.policy import SearchPolicy
from weft.runtime.any import AnyExecutable

Tensors = Sequence[torch.Tensor]


class Platform(Protocol):
    """A kind of device as a class, and one of them, as it was surveyed, as an object.

    What is asked before there is a survey, or without one, is a class variable or a class method.
    """

    kind: ClassVar[str]
    """What `Options.device` begins with."""
    policy: ClassVar[SearchPolicy]
    """Of searches on any such device, see `policy_with`."""
    asynchronous: ClassVar[bool]
    """Whether a run is only enqueued, on the stream of the thread that asks, and what is called again is a recording:
    then it cannot be left to itself in another thread, and the first run says nothing of the next."""
    judges_in_float64: ClassVar[bool]
    """Whether plans are judged by float64 whatever memory that takes; else it is done without where there is none."""

    @property
    def facts(self) -> DeviceFacts:
        """The device in numbers."""
        ...

    @property
    def compiler(self) -> HostCompiler | Nvrtc | None:
        """What compiles generated kernels; None: nothing is generated."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """What a plan depends on, beside the model and the options."""
        ...

    @property
    def device(self) -> torch.device:
        """Where inputs and outputs are."""
        ...

    @classmethod
    def device_of(cls, options: Options) -> torch.device:
        """The device that the options name.

        Raises:
            DeviceError: there is no such device here [W301].
        """
        ...

    @classmethod
    def room_bytes(cls, options: Options) -> int:
        """Memory that compiling may take on the device.

        Raises:
            DeviceError: there is no such device here [W301].
        """
        ...

    @classmethod
    def survey(cls, options: Options, *, calibrate_s: float) -> Self:
        """What this machine has; measuring what is not known of it may take so many seconds, about. 0: it is not.

        Raises:
            DeviceError: there is no such device here [W301].
        """
        ...

    @classmethod
    def find_alternatives(cls, graph: Graph, *, strict: bool = False) -> Alternatives:
        """Further ways to compute the values of a graph, those among them that only such a device gains by."""
        ...

    @classmethod
    def limits(cls, options: Options, facts: DeviceFacts | None = None) -> EnumerationLimits:
        """Bounds of the enumeration; what only kernels of one device take is looked for there alone."""
        ...

    @classmethod
    def policy_with(cls, facts: DeviceFacts) -> SearchPolicy:
        """The policy with what is known of the device that has these facts, such as the costs of its libraries."""
        ...

    def lending(self) -> Self:
        """For one compilation, whose plans run one after another: they share what each would take for itself."""
        ...

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """What is done inside takes no workspaces of the caller's."""
        ...

    def thread(self, run: Callable[[], None], name: str, /) -> threading.Thread:
        """A daemon thread, not started, in which libraries that are asked for the current device answer with this."""
        ...

    def is_sound(self) -> bool:
        """Whether the device still computes in this process."""
        ...

    @classmethod
    def free_memory(cls, *, garbage: bool = False) -> None:
        """Give back the device's memory that nobody holds; with `garbage` also what only cycles hold."""
        ...

    def variants(self, graph: Graph, plans: Sequence[Plan], *, timed: bool) -> Sequence[Plan]:
        """The plans, and those of them again that may be faster run in another way, which only timing tells."""
        ...

    def link(self, graph: Graph, plan: Plan, options: Options, *, left_s: float = math.inf) -> AnyExecutable:
        """Compile (or find) the plan's kernels, in the seconds that are left, and make it runnable.

        Raises:
            ToolchainError: nothing compiles here, or a kernel does not compile [W311].
        """
        ...

    def again(self, executable: AnyExecutable, inputs: Tensors) -> Callable[[], Tensors]:
        """What runs a plan once more on inputs that it ran on before, as a caller's next call would."""
        ...

    def capture(
        self, model: Callable[..., Tensors], inputs: Tensors, options: Options, *, alone: bool
    ) -> Callable[..., Tensors]:
        """The framework's own model as fast as this device can call it for these shapes.

        `alone`: it may run beside a plan.
        """
        ...

    def capture_later(
        self, model: Callable[..., Tensors], types: Sequence[TensorType], options: Options
    ) -> Callable[..., Tensors]:
        """As `capture` and `alone`, without a run of the model: it becomes so fast at its first call.

        `types`: of its inputs.
        """
        ...

    def sample_us(self, run: Callable[[], object], repeats: int) -> float:
        """Microseconds per call of a whole plan."""
        ...

    def step_times(self, executable: AnyExecutable, inputs: Tensors, *, plan_us: float) -> Sequence[float]:
        """Microseconds of each step between its neighbours; empty where a plan runs as a whole alone.

        `plan_us`: what a run of the plan takes, by which it is run a few times.
        """
        ...
