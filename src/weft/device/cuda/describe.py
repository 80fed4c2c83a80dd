"""One line per GPU and one for the compiler, for people."""

from __future__ import annotations

from weft.device.cuda.api import call, driver_api
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import DeviceError


def describe() -> dict[str, str]:
    """`gpu` (or `gpu 0`, `gpu 1`, …) and `nvrtc`: what there is, or why there is none. Measures nothing."""
    found = {}
    try:
        count = int(call(driver_api().cuDeviceGetCount))
        for index in range(count):
            found["gpu" if count == 1 else f"gpu {index}"] = _gpu(index)
    except DeviceError as error:
        found["gpu"] = f"none ({str(error).splitlines()[0]})"
    compiler = find_nvrtc()
    found["nvrtc"] = (
        compiler.version if isinstance(compiler, Nvrtc) else f"none ({compiler.reason}): library plans only on a GPU"
    )
    return found


def _gpu(index: int) -> str:
    try:
        facts = gpu_facts(None, device=index, calibrate=False)
    except DeviceError as error:
        return f"not usable ({str(error).splitlines()[0]})"
    version = int(facts.driver)
    return (
        f"{facts.name}, compute capability {facts.capability / 10:.1f}, {facts.sms} multiprocessors, "
        f"{facts.memory_bytes / 2**30:.0f} GiB, driver for CUDA {version // 1000}.{version % 1000 // 10}"
    )
