"""Which GPU is meant."""

from __future__ import annotations

import torch

from weft.errors import DeviceError
from weft.options import Options


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
