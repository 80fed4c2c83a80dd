"""The device and the choices that one compilation works with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from weft.device.any import DeviceFacts
from weft.options import Options
from weft.orchestrate.legality import EnumerationLimits
from weft.pipeline.deadline import Deadline, call_with_timeout
from weft.platform.protocol import Platform
from weft.platform.table import platform_of

Tensors = Sequence[torch.Tensor]
CALIBRATE_FROM_S = 20.0
"""The device is measured, which takes seconds, where the budget is at least so many; else what is known of it does."""
CALIBRATE_SHARE = 0.1
"""Of the budget: what measuring a device may take, a CPU at least as long as it does where nothing else runs."""


@dataclass(frozen=True)
class Setting:
    """The device and the choices that one compilation works with."""

    options: Options
    platform: Platform

    def bounded(self, run: Callable[..., Tensors], clock: Deadline) -> Callable[..., Tensors]:
        """A run that is left to itself when the time is up, where it can be: OutOfTime is raised then.

        Elsewhere it is only enqueued; what runs there was run by a worker.
        """
        if self.platform.asynchronous or math.isinf(clock.last):
            return run

        def watched(*inputs: torch.Tensor) -> Tensors:
            return call_with_timeout(clock.seconds_to(clock.last), partial(run, *inputs))

        return watched


def survey(options: Options) -> Setting:
    """What this machine has.

    Raises:
        DeviceError: there is no such device here [W301].
    """
    calibrate_s = CALIBRATE_SHARE * options.budget_s if options.budget_s >= CALIBRATE_FROM_S else 0.0
    platform = platform_of(options.device).survey(options, calibrate_s=calibrate_s)
    if platform.device.index:  # who measures is another process, whose current device is the first
        options = replace(options, device=str(platform.device))
    return Setting(options, platform)


def limits_of(options: Options, facts: DeviceFacts | None = None) -> EnumerationLimits:
    """Bounds of the enumeration for the device that the options name, see `Platform.limits`."""
    return platform_of(options.device).limits(options, facts)
