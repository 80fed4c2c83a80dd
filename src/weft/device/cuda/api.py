"""The CUDA driver API: loaded on first use, its status codes turned into errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, cast

from weft.errors import DeviceError


class CudaError(DeviceError):
    """A call of the CUDA driver failed; made by `cuda_error`."""

    code = "W302"
    template = "{problem}"
    todo = "{remedy}"

    @property
    def number(self) -> int:
        """The CUresult."""
        return cast("int", self.details.get("number", 999))

    @property
    def name(self) -> str:
        """Its name, such as CUDA_ERROR_OUT_OF_MEMORY."""
        return _KNOWN.get(self.number, _UNKNOWN)[0]

    @property
    def sticky(self) -> bool:
        """True when this process can never use the GPU again."""
        return self.number in STICKY


def cuda_error(function: str, number: int, detail: str = "") -> CudaError:
    """What to raise when a driver function gives that CUresult; `detail` says what it was called with."""
    name, remedy = _KNOWN.get(number, _UNKNOWN)
    problem = f"{function} failed: {name} ({number})" + (f": {detail}" if detail else "")
    return CudaError(problem=problem, remedy=remedy, number=number)


_UNKNOWN = ("CUDA error", "look the number up among the CUresult values of CUDA")
_REPLACE = "a kernel misbehaved and this process can no longer use the GPU: start a new one; please report the kernel"
_KNOWN: dict[int, tuple[str, str]] = {
    1: ("CUDA_ERROR_INVALID_VALUE", "an argument or launch dimension is out of range; please report the kernel"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "free memory of the GPU, or use a smaller batch"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "call weft.device.cuda.driver.primary_context first"),
    46: ("CUDA_ERROR_DEVICE_UNAVAILABLE", "another process holds the GPU exclusively, or it needs a reset"),
    100: ("CUDA_ERROR_NO_DEVICE", "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
    101: ("CUDA_ERROR_INVALID_DEVICE", "there is no GPU of that number: look at CUDA_VISIBLE_DEVICES"),
    200: ("CUDA_ERROR_INVALID_IMAGE", "the cached cubin is damaged: remove the cubins folder of the cache"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "make the device's primary context current first"),
    209: ("CUDA_ERROR_NO_BINARY_FOR_GPU", "the cubin is for another architecture: compile for this GPU"),
    214: ("CUDA_ERROR_ECC_UNCORRECTABLE", "the GPU's memory is failing: take it out of service"),
    222: ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "update the NVIDIA driver"),
    500: ("CUDA_ERROR_NOT_FOUND", "the cubin has no such entry; please report the kernel"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", _REPLACE),
    701: ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "the launch needs more registers or shared memory than a block has"),
    702: ("CUDA_ERROR_LAUNCH_TIMEOUT", _REPLACE),
    710: ("CUDA_ERROR_ASSERT", _REPLACE),
    714: ("CUDA_ERROR_HARDWARE_STACK_ERROR", _REPLACE),
    715: ("CUDA_ERROR_ILLEGAL_INSTRUCTION", _REPLACE),
    716: ("CUDA_ERROR_MISALIGNED_ADDRESS", _REPLACE),
    717: ("CUDA_ERROR_INVALID_ADDRESS_SPACE", _REPLACE),
    718: ("CUDA_ERROR_INVALID_PC", _REPLACE),
    719: ("CUDA_ERROR_LAUNCH_FAILED", _REPLACE),
    802: ("CUDA_ERROR_SYSTEM_NOT_READY", "the fabric manager or another service of the machine is not running"),
    803: (
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "kernel module and user library of the driver differ: restart the machine",
    ),
    804: ("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "update the NVIDIA driver"),
    900: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "this call cannot be captured: make it before the capture"),
    901: ("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "an earlier call of the capture failed: its error says what to do"),
    912: ("CUDA_ERROR_INVALID_CLUSTER_SIZE", "a smaller cluster of thread blocks is needed"),
}
STICKY = frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719})
"""After these every further call of the process fails."""


@cache
def driver_api() -> ModuleType:
    """`cuda.bindings.driver`, initialised.

    Raises:
        DeviceError: no bindings, no driver or no GPU [W301, W302].
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DeviceError(problem="cuda-bindings is not installed (pip install weft[cuda])") from None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # no libcuda.so.1
        raise DeviceError(problem=f"no NVIDIA driver: {str(error).splitlines()[0]}") from None
    if int(status) != 0:
        raise cuda_error("cuInit", int(status))
    module: ModuleType = driver
    return module


def call(function: Callable[..., Sequence[Any]], *arguments: object, detail: str = "") -> Any:
    """Result of a driver call: nothing, one value, or a tuple of several.

    Raises:
        CudaError: its status is not success [W302].
    """
    status, *results = function(*arguments)
    if int(status) != 0:
        raise cuda_error(getattr(function, "__name__", "a driver call"), int(status), detail)
    return results[0] if len(results) == 1 else tuple(results) if results else None
