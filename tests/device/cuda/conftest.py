from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.device.cuda import tensor_map
from weft.device.cuda.api import driver_api

FUNCTIONS = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceTotalMem",
    "cuDeviceGetAttribute", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxGetDevice", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease", "cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuFuncLoad",
    "cuFuncGetAttribute", "cuFuncSetAttribute", "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuLaunchKernelEx",
    "cuGetProcAddress", "cuModuleGetGlobal",
)  # fmt: skip


@dataclass
class FakeGpu:
    """A driver that writes down what it is asked; everything succeeds unless `fails` says otherwise."""

    api: Any
    fails: dict[str, int] = field(default_factory=dict)
    """Function -> CUresult."""
    current: int = 77
    """The current context; 0: none."""
    attributes: dict[int, int] = field(
        default_factory=lambda: {
            13: 1_980_000, 16: 132, 36: 3_201_000, 37: 6144, 38: 62914560, 39: 2048, 75: 9, 76: 0,
            81: 233472, 82: 65536, 97: 232448, 106: 32, 111: 1024,
        }
    )  # fmt: skip
    name: bytes = b"NVIDIA H200"
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    encode_status: int = 0
    map_addresses: list[int] = field(default_factory=list)

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, *arguments))
        status = self.api.CUresult(self.fails.get(name, 0))
        answer = getattr(self, name, None)
        results = answer(*arguments) if answer is not None else ()
        return (status, *results)

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [c[1:] for c in self.calls if c[0] == name]

    def cuDriverGetVersion(self) -> Any:
        return (13000,)

    def cuDeviceGet(self, ordinal: Any) -> Any:
        return (self.api.CUdevice(ordinal),)

    def cuDeviceGetCount(self) -> Any:
        return (1,)

    def cuDeviceGetName(self, length: int, device: Any) -> Any:
        return (self.name.ljust(length, b"\0"),)

    def cuDeviceTotalMem(self, device: Any) -> Any:
        return (150754820096,)

    def cuDeviceGetAttribute(self, number: int, device: Any) -> Any:
        return (self.attributes.get(int(number), 0),)

    def cuCtxGetCurrent(self) -> Any:
        return (self.api.CUcontext(self.current),)

    def cuCtxSetCurrent(self, context: Any) -> Any:
        self.current = int(context)
        return ()

    def cuCtxGetDevice(self) -> Any:
        return (self.api.CUdevice(0),)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return (self.api.CUcontext(99),)

    def cuModuleLoadData(self, image: Any) -> Any:
        return (self.api.CUmodule(5),)

    def cuModuleGetFunction(self, module: Any, name: str) -> Any:
        return (self.api.CUfunction(6),)

    def cuModuleGetGlobal(self, module: Any, name: bytes) -> Any:
        return (self.api.CUdeviceptr(0x7000), 64)

    def cuFuncGetAttribute(self, number: int, function: Any) -> Any:
        return ({0: 1024, 1: 512, 3: 8, 4: 40}[int(number)],)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: Any, threads: int, shared: Any) -> Any:
        return (2048 // threads,)

    def cuGetProcAddress(self, symbol: Any, version: Any, flags: Any) -> Any:
        pointer, word = ctypes.c_void_p, ctypes.c_uint32
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, word, word, *[pointer] * 5, *[word] * 4)
        self.encoder = kind(self._encode)
        return (ctypes.cast(self.encoder, ctypes.c_void_p).value, self.api.CUdriverProcAddressQueryResult(0))

    def _encode(
        self,
        place: int,
        dtype: Any,
        rank: Any,
        address: Any,
        sizes: Any,
        strides: Any,
        box: Any,
        steps: Any,
        interleave: Any,
        swizzle: Any,
        promotion: Any,
        fill: Any,
    ) -> Any:
        self.map_addresses.append(place)
        words = [dtype, rank, address, *(ctypes.c_uint64 * rank).from_address(sizes), swizzle]
        words += [*(ctypes.c_uint64 * (rank - 1)).from_address(strides)] if rank > 1 else []
        data = b"".join(w.to_bytes(8, "little") for w in words)
        ctypes.memmove(place, data.ljust(128, b"\xee"), 128)
        return self.encode_status

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> Any:
        attributes = {}
        for attribute in config.attrs:
            value = attribute.value
            cluster = (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z)
            attributes[attribute.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_")] = (
                cluster if "CLUSTER" in attribute.id.name else value.programmaticStreamSerializationAllowed
            )
        self.launches.append(
            {
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "shared": config.sharedMemBytes,
                "stream": int(config.hStream),
                "attributes": attributes,
                "parameters": parameters,
            }
        )
        return ()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """The driver's functions replaced, its enums and structures kept."""
    driver = pytest.importorskip("cuda.bindings.driver")
    fake = FakeGpu(driver)

    def replacement(name: str) -> Any:
        def function(*arguments: Any) -> Any:
            return fake.answer(name, arguments)

        function.__name__ = name
        return function

    for name in FUNCTIONS:
        monkeypatch.setattr(driver, name, replacement(name))
    driver_api.cache_clear()
    tensor_map._encode.cache_clear()
    yield fake
    driver_api.cache_clear()
    tensor_map._encode.cache_clear()
