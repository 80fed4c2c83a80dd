"""The clock of a GPU's multiprocessors, asked of the management library (NVML) that comes with the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

LIBRARY = "libnvidia-ml.so.1"
_SM = 1
"""NVML_CLOCK_SM."""


def sm_clock_of(uuid: str, library: str = LIBRARY) -> Callable[[], int]:
    """What reads the present clock in MHz of the GPU with this UUID; 0 where the driver does not say."""
    handle = ctypes.c_void_p()
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    try:
        nvml = ctypes.CDLL(library)
        found = nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) == 0
    except (OSError, AttributeError):  # no such library, or another one by its name
        found = False
    if not found:
        return lambda: 0

    def read() -> int:
        mhz = ctypes.c_uint()
        return mhz.value if nvml.nvmlDeviceGetClockInfo(handle, _SM, ctypes.byref(mhz)) == 0 else 0

    return read
