"""The clock, power and energy of a GPU, asked of the management library (NVML) that comes with the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

LIBRARY = "libnvidia-ml.so.1"
_SM = 1
"""NVML_CLOCK_SM."""
_INSTANT = 186
"""NVML_FI_DEV_POWER_INSTANT: milliwatts now, not of the last second."""


class _Field(ctypes.Structure):
    """nvmlFieldValue_t, whose value is read as an unsigned integer."""

    _fields_ = (
        ("number", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


def _opened(uuid: str, library: str) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The library and the GPU with this UUID; None where there is none."""
    handle = ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL(library)
        name = uuid_text(uuid).encode()
        found = nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0
    except (OSError, AttributeError):  # no such library, or another one by its name
        return None
    return (nvml, handle) if found else None


def uuid_text(uuid: str) -> str:
    """As the library writes it: frameworks leave the first part out."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def sm_clock_of(uuid: str, library: str = LIBRARY) -> Callable[[], int]:
    """What reads the present clock in MHz of the GPU with this UUID; 0 where the driver does not say."""
    opened = _opened(uuid, library)
    if opened is None:
        return lambda: 0
    nvml, handle = opened

    def read() -> int:
        mhz = ctypes.c_uint()
        return mhz.value if nvml.nvmlDeviceGetClockInfo(handle, _SM, ctypes.byref(mhz)) == 0 else 0

    return read


def joules_of(uuid: str, library: str = LIBRARY) -> Callable[[], float]:
    """What reads the energy in joules that the GPU with this UUID has taken since its driver was loaded.

    0 where the driver does not say.
    """
    opened = _opened(uuid, library)
    if opened is None or not hasattr(opened[0], "nvmlDeviceGetTotalEnergyConsumption"):
        return lambda: 0.0
    nvml, handle = opened

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        known = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) == 0
        return millijoules.value / 1e3 if known else 0.0

    return read


def watts_of(uuid: str, library: str = LIBRARY) -> Callable[[], float]:
    """What reads the power in watts that the GPU with this UUID takes now; 0 where the driver does not say.

    Where it knows no present power, it is that of the last second.
    """
    opened = _opened(uuid, library)
    if opened is None:
        return lambda: 0.0
    nvml, handle = opened

    def read() -> float:
        field = _Field(number=_INSTANT)
        if (
            hasattr(nvml, "nvmlDeviceGetFieldValues")
            and nvml.nvmlDeviceGetFieldValues(handle, 1, ctypes.byref(field)) == 0
            and field.status == 0
        ):
            return float(field.value & 0xFFFFFFFF) / 1e3
        milliwatts = ctypes.c_uint()
        known = hasattr(nvml, "nvmlDeviceGetPowerUsage")
        got = known and nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)) == 0
        return milliwatts.value / 1e3 if got else 0.0

    return read
