"""Modules, entry points and launches through the CUDA driver API. Imports no framework.

Everything works in the context that is current on the calling thread: the primary context that the framework made
current, or that of `primary_context`. A launch is prepared once (`Function.bind`) and then costs one driver call.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from weft.device.cuda.api import CudaError, call, cuda_error, driver_api
from weft.device.cuda.resources import MAX_CLUSTER
from weft.device.cuda.tensor_map import MAP_BYTES, AlignedBytes, encode_tensor_map
from weft.errors import DeviceError

__all__ = ["Bound", "CudaError", "Function", "FunctionAttributes", "Module", "encode_tensor_map", "primary_context"]

Dim3 = tuple[int, int, int]
_ONE: Dim3 = (1, 1, 1)
_DEFAULT_SHARED = 48 * 1024
"""Dynamic shared memory that needs no opting in."""
_REMEMBERED = 256
"""Bound launches that `Function.launch` keeps."""


@contextlib.contextmanager
def primary_context(device: int = 0) -> Iterator[None]:
    """Make the device's primary context current on this thread; the former one is restored at the end.

    Raises:
        DeviceError: no driver, or no such device [W301, W302].
    """
    api = driver_api()
    handle = call(api.cuDeviceGet, device, detail=f"device {device}")
    former = call(api.cuCtxGetCurrent)
    context = call(api.cuDevicePrimaryCtxRetain, handle)
    try:
        call(api.cuCtxSetCurrent, context)
        yield
    finally:  # statuses are not looked at: an error that is on its way says more than its echo here
        api.cuCtxSetCurrent(former)
        api.cuDevicePrimaryCtxRelease(handle)


@dataclass(frozen=True, slots=True)
class FunctionAttributes:
    """What the driver says about a loaded entry."""

    registers: int
    """Per thread."""
    local_bytes: int
    """Per thread: spills and indexed arrays."""
    shared_bytes: int
    """Static, per block."""
    max_threads: int
    """Of a block, given the registers."""


@final
class Module:
    """A loaded cubin. It stays loaded until `unload`: graphs may hold its kernels."""

    def __init__(self, path: Path | str) -> None:
        """Load into the current context.

        Raises:
            DeviceError: the file cannot be read, no context is current, or the cubin is for another GPU [W301, W302].
        """
        api = driver_api()
        if not int(call(api.cuCtxGetCurrent)):
            raise cuda_error("cuModuleLoadData", 201)
        try:
            image = Path(path).read_bytes()
        except OSError as error:
            raise DeviceError(problem=f"cannot read cubin {path}: {error}") from error
        self._handle = call(api.cuModuleLoadData, image, detail=Path(path).name)

    def function(self, entry: str) -> Function:
        """An entry by name, loaded at once (a lazy load would break a capture).

        Raises:
            CudaError: there is none [W302].
        """
        api = driver_api()
        handle = call(api.cuModuleGetFunction, self._handle, entry.encode(), detail=entry)
        call(api.cuFuncLoad, handle, detail=entry)
        return Function(handle, entry)

    def variable(self, name: str) -> tuple[int, int]:
        """(address, bytes) of a `__constant__` or `__device__` variable.

        Raises:
            CudaError: there is none [W302].
        """
        address, size = call(driver_api().cuModuleGetGlobal, self._handle, name.encode(), detail=name)
        return int(address), int(size)

    def unload(self) -> None:
        """Free the code; no function of this module may be launched afterwards, nor a graph that holds one."""
        call(driver_api().cuModuleUnload, self._handle)


@final
class Function:
    """One entry point. Not for two threads at once."""

    def __init__(self, handle: Any, entry: str) -> None:
        self.entry = entry
        self._handle = handle
        self._api = driver_api()
        self._allowed = _DEFAULT_SHARED
        self._hopper = _device_attribute(self._api, 75) >= 9
        self._bound: dict[tuple[object, ...], Bound] = {}

    @property
    def attributes(self) -> FunctionAttributes:
        """Registers, local and static shared memory, most threads."""
        return FunctionAttributes(*(self._attribute(number) for number in (4, 3, 1, 0)))

    def _attribute(self, number: int) -> int:
        return int(call(self._api.cuFuncGetAttribute, self._api.CUfunction_attribute(number), self._handle))

    def occupancy(self, block: Dim3, shared_bytes: int) -> int:
        """Blocks that fit into one multiprocessor at once."""
        measure = self._api.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(call(measure, self._handle, math.prod(block), shared_bytes))

    def prepare(self, shared_bytes: int, cluster: Dim3 = _ONE) -> None:
        """Allow launches with so much dynamic shared memory and such a cluster.

        Raises:
            DeviceError: this GPU has less, or no clusters; or the cluster is over the portable size [W301, W302].
        """
        api = self._api
        blocks = math.prod(cluster)
        if not 1 <= blocks <= MAX_CLUSTER or min(cluster) < 1:
            raise self._refused(f"a cluster of {cluster} blocks; 1 to {MAX_CLUSTER} are portable")
        if blocks > 1 and not self._hopper:
            raise self._refused("clusters need compute capability 9.0")
        if shared_bytes <= self._allowed:
            return
        limit, static = _device_attribute(api, 97), self._attribute(1)
        if shared_bytes + static > limit:
            raise self._refused(f"{shared_bytes + static} bytes of shared memory; a block of this GPU has {limit}")
        size = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(api.cuFuncSetAttribute, self._handle, size, shared_bytes, detail=self.entry)
        self._allowed = shared_bytes

    def require_co_resident(self, blocks: int, block: Dim3, shared_bytes: int) -> None:
        """Refuse CTAs that spin on each other where they might spin for ever.

        The multiprocessors that this process may use (a part of a GPU, or a share of its services, has fewer) must have
        room for twice as many: clusters leave gaps, and other such kernels may be resident there, too.

        Raises:
            DeviceError: they have not [W301].
        """
        own = _device_attribute(self._api, 16)
        if 2 * blocks > own * self.occupancy(block, shared_bytes):
            raise self._refused(f"{blocks} CTAs must be co-resident on {own} multiprocessors: compile it there")

    def bind(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: Sequence[int | bytes],
        *,
        shared_bytes: int = 0,
        cluster: Dim3 = _ONE,
        dependent: bool = False,
    ) -> Bound:
        """Prepare a launch: `arguments` are device addresses, or tensor maps of 128 bytes that are passed by value.

        `dependent` lets it start while its predecessor on the stream still runs (it must wait for that itself); before
        compute capability 9.0 it makes no difference.

        Raises:
            DeviceError: dimensions out of range, or as for `prepare` [W301, W302].
        """
        if not (min(grid) >= 1 and grid[0] < 1 << 31 and max(grid[1:]) < 1 << 16):
            raise self._refused(f"a grid of {grid}")
        if not (min(block) >= 1 and math.prod(block) <= 1024 and block[2] <= 64):
            raise self._refused(f"a block of {block} threads")
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise self._refused(f"a grid of {grid} in clusters of {cluster}")
        self.prepare(shared_bytes, cluster)
        config = self._api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        attributes = _launch_attributes(self._api, cluster, dependent=dependent and self._hopper)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return Bound(self, self._handle, config, arguments)

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: Sequence[int | bytes],
        *,
        shared_bytes: int = 0,
        cluster: Dim3 = _ONE,
        dependent: bool = False,
        stream: int = 0,
    ) -> None:
        """Put one launch on a stream: `bind(...).launch(stream)`, the last few bound launches being kept.

        Raises:
            DeviceError: as for `bind`, or the driver refuses the launch [W301, W302].
        """
        key = (grid, block, tuple(arguments), shared_bytes, cluster, dependent)
        bound = self._bound.get(key)
        if bound is None:
            bound = self.bind(grid, block, arguments, shared_bytes=shared_bytes, cluster=cluster, dependent=dependent)
            while len(self._bound) >= _REMEMBERED:
                self._bound.pop(next(iter(self._bound)))
            self._bound[key] = bound
        bound.launch(stream)

    def _refused(self, what: str) -> DeviceError:
        return DeviceError(where=f"kernel {self.entry}", problem=f"cannot be launched with {what}")


@final
class Bound:
    """A launch whose configuration and arguments are fixed. Not for two threads at once."""

    def __init__(self, function: Function, handle: Any, config: Any, arguments: Sequence[int | bytes]) -> None:
        self._function = function  # keeps what the arguments were prepared for
        self._handle = handle
        self._config = config
        self._stream = -1
        self._launch = driver_api().cuLaunchKernelEx
        self._kept: list[AlignedBytes | ctypes.c_void_p] = []
        addresses = []
        for argument in arguments:
            if isinstance(argument, bytes):
                if len(argument) != MAP_BYTES:
                    raise DeviceError(
                        where=f"kernel {function.entry}", problem=f"an argument of {len(argument)} bytes by value"
                    )
                aligned = AlignedBytes(argument)
                self._kept.append(aligned)
                addresses.append(aligned.address)
            else:
                word = ctypes.c_void_p(argument)
                self._kept.append(word)
                addresses.append(ctypes.addressof(word))
        self._array = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self._parameters = ctypes.addressof(self._array)

    def launch(self, stream: int = 0) -> None:
        """Put it on a stream (a `CUstream` handle; 0: the default stream).

        Raises:
            CudaError: the driver refuses the launch, or an earlier kernel failed [W302].
        """
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        (status,) = self._launch(self._config, self._handle, self._parameters, 0)
        if int(status) != 0:
            raise cuda_error("cuLaunchKernelEx", int(status), self._function.entry)


def _launch_attributes(api: Any, cluster: Dim3, *, dependent: bool) -> list[Any]:
    found = []
    if cluster != _ONE:
        value = api.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster
        found.append(_attribute(api, api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    if dependent:
        value = api.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        name = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        found.append(_attribute(api, name, value))
    return found


def _attribute(api: Any, name: Any, value: Any) -> Any:
    attribute = api.CUlaunchAttribute()
    attribute.id = name
    attribute.value = value
    return attribute


def _device_attribute(api: Any, number: int) -> int:
    return int(call(api.cuDeviceGetAttribute, api.CUdevice_attribute(number), call(api.cuCtxGetDevice)))
