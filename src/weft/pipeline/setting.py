"""The machine and the choices that one compilation works with."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from weft.device.any import DeviceFacts
from weft.device.cuda.facts import GpuFacts
from weft.device.facts import cpu_facts
from weft.device.room import free_bytes
from weft.device.toolchain import HostCompiler, find_compiler
from weft.ir.declined import Declined
from weft.options import Options
from weft.orchestrate.legality import EnumerationLimits
from weft.pipeline import finish
from weft.pipeline.deadline import Deadline, call_with_timeout
from weft.runtime.streams import Lease
from weft.tune.keys import GPU_WORDS, PACKAGE, PLAN_PARTS, source_hash

if TYPE_CHECKING:
    from weft.device.cuda.nvrtc import Nvrtc
P = ParamSpec("P")
R = TypeVar("R")
Tensors = Sequence[torch.Tensor]
CALIBRATE_FROM_S = 20.0
"""The device is measured, which takes seconds, where the budget is at least so many; else what is known of it does."""
CALIBRATE_SHARE = 0.1
"""Of the budget: what measuring a CPU may take, at least as long as it does where nothing else runs."""


@dataclass(frozen=True)
class Setting:
    """The machine and the choices that one compilation works with."""

    options: Options
    facts: DeviceFacts
    compiler: HostCompiler | Nvrtc | None
    environment: Mapping[str, str]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lease: Lease | None = None
    """On a GPU: the streams that all plans of the compilation are recorded and run on."""

    def with_lease(self) -> Setting:
        """On a GPU with streams that all plans of a compilation share."""
        return replace(self, lease=Lease(self.device)) if self.on_gpu else self

    @property
    def on_gpu(self) -> bool:
        """Whether kernels run on an NVIDIA GPU."""
        return self.device.type == "cuda"

    @property
    def sample(self) -> finish.Sample:
        """How whole plans are timed."""
        if not self.on_gpu:
            return finish.host_sample
        from weft.pipeline import gpu

        return gpu.sample_us

    def is_sound(self) -> bool:
        """Whether the device still computes in this process."""
        if not self.on_gpu:
            return True
        from weft.pipeline import gpu

        return gpu.is_sound(self.device)

    def bounded(self, run: Callable[..., Tensors], clock: Deadline) -> Callable[..., Tensors]:
        """On a CPU, a run that is left to itself when the time is up: OutOfTime is raised then.

        On a GPU a run is only enqueued, on the stream of the thread that asks; what runs there was run by a worker.
        """
        if self.on_gpu or math.isinf(clock.last):
            return run

        def watched(*inputs: torch.Tensor) -> Tensors:
            return call_with_timeout(clock.seconds_to(clock.last), run, *inputs)

        return watched

    def there(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """A call in a thread of its own: libraries are asked for the current GPU, there the first."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        return call(*args, **kwargs)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """What is done inside runs on a stream of the compilation, so that the caller's takes no workspaces."""
        if self.lease is None:
            return contextlib.nullcontext()
        from weft.pipeline import gpu

        return gpu.aside(self.lease)


def survey(options: Options) -> Setting:
    """What this machine has."""
    if options.device != "cpu":
        from weft.pipeline import gpu

        found, nvrtc, around = gpu.survey(options, calibrate=options.budget_s >= CALIBRATE_FROM_S)
        around["weft"] = source_hash(PACKAGE, (*PLAN_PARTS, "device/cuda"))
        device = gpu.device_of(options)
        if device.index:  # who measures is another process, whose current GPU is the first
            options = replace(options, device=str(device))
        return Setting(options, found, nvrtc, around, device)
    most_s = CALIBRATE_SHARE * options.budget_s
    facts = cpu_facts(options.cache, calibrate=options.budget_s >= CALIBRATE_FROM_S, most_s=most_s)
    if options.threads or torch.get_num_threads() != facts.threads:
        facts = replace(facts, threads=options.threads or torch.get_num_threads())
    compiler = find_compiler()
    usable = None if isinstance(compiler, Declined) else compiler
    if isinstance(compiler, Declined) and options.allow_generated:
        text = f"Weft found no C++ compiler ({compiler.reason}): library kernels only, nothing is generated or fused"
        warnings.warn(text, stacklevel=2)
    environment = {
        "cpu": facts.name,
        "threads": str(facts.threads),
        "torch": torch.__version__,
        "compiler": usable.version if usable else "none",
        "weft": source_hash(PACKAGE, PLAN_PARTS, without=GPU_WORDS),
    }
    return Setting(options, facts, usable, environment)


def room_bytes(options: Options) -> int:
    """Memory that compiling may take on the device: what is free of the host's, all of a GPU's.

    Raises:
        DeviceError: there is no such GPU here [W301].
    """
    if options.device == "cpu":
        return free_bytes()
    if not torch.cuda.is_available():
        return 1 << 62  # the survey says what is missing
    from weft.pipeline import gpu

    return torch.cuda.get_device_properties(gpu.device_of(options)).total_memory


def limits_of(options: Options, facts: DeviceFacts | None = None) -> EnumerationLimits:
    """Bounds of the enumeration; what only kernels of one device take is looked for there alone."""
    return EnumerationLimits(
        max_members=options.max_members,
        max_inputs=options.max_inputs,
        max_reductions=options.max_reductions,
        max_candidates=options.max_candidates,
        attention=options.device != "cpu",
        multiprocessors=facts.sms if isinstance(facts, GpuFacts) else 0,
        library_calls=options.device != "cpu",
    )
