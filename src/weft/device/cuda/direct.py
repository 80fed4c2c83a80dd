"""Launches of a fixed shape whose arguments change: one call of the driver's C interface, and nothing made for it.

`driver.Bound` is for launches that are replayed or timed; here a call costs the host about a microsecond besides the
driver's own time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import final

from weft.device.cuda.api import call, cuda_error, driver_api
from weft.device.cuda.driver import Dim3, Function
from weft.errors import DeviceError

_ONE: Dim3 = (1, 1, 1)
_LEGACY_STREAM = 1
"""The handle 0 is the default stream that waits for others, as in torch."""
_VERSION = 12000
"""Of CUDA, whose cuLaunchKernelEx is called."""
Call = Callable[[int, int, int, None], int]
"""(configuration, function, addresses of the arguments, nothing) -> CUresult."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


@cache
def launcher() -> Call:
    """The driver's cuLaunchKernelEx; the interpreter's lock is not held meanwhile.

    Raises:
        DeviceError: no driver [W301, W302].
    """
    address, found = call(driver_api().cuGetProcAddress, b"cuLaunchKernelEx", _VERSION, _LEGACY_STREAM)
    if not address:
        raise DeviceError(problem=f"this driver has no extended launches ({found}): CUDA 12.0 or newer is needed")
    pointer = ctypes.c_void_p
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(int(address))


@final
class Direct:
    """A launch of a fixed shape. `words` are its arguments, each 64 bits. Not for two threads at once."""

    def __init__(
        self,
        function: Function,
        grid: Dim3,
        block: Dim3,
        words: Sequence[int],
        *,
        shared_bytes: int = 0,
        cluster: Dim3 = _ONE,
        dependent: bool = False,
    ) -> None:
        """The first arguments are `words`.

        Raises:
            DeviceError: as for `Function.bind` [W301, W302].
        """
        function.bind(grid, block, words, shared_bytes=shared_bytes, cluster=cluster, dependent=dependent)
        api = driver_api()
        self._function = function
        self.words = (ctypes.c_uint64 * max(1, len(words)))(*words)
        start = ctypes.addressof(self.words)
        self._places = (ctypes.c_uint64 * len(self.words))(*(start + 8 * i for i in range(len(self.words))))
        names = api.CUlaunchAttributeID
        wanted: list[tuple[int, Sequence[int]]] = []
        if cluster != _ONE:
            wanted.append((int(names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION), cluster))
        if dependent and function._hopper:
            wanted.append((int(names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION), (1,)))
        self._attributes = (_Attribute * max(1, len(wanted)))()
        for attribute, (name, values) in zip(self._attributes, wanted, strict=False):
            attribute.id = name
            attribute.value[: len(values)] = values
        c = self._config = _Config()
        c.grid[:], c.block[:], c.shared = grid, block, shared_bytes
        c.attributes, c.count = ctypes.addressof(self._attributes), len(wanted)
        self._stream = 0
        self._call = launcher()
        self._arguments = (ctypes.addressof(c), int(function._handle), ctypes.addressof(self._places), None)

    def launch(self, stream: int) -> None:
        """Put it on the stream of that handle.

        Raises:
            CudaError: the driver refuses the launch, or an earlier kernel failed [W302].
        """
        if stream != self._stream:
            self._config.stream = self._stream = stream
        status = self._call(*self._arguments)
        if status != 0:
            raise cuda_error("cuLaunchKernelEx", status, self._function.entry)
