"""A GPU in two parts that share no multiprocessor: green contexts of one split.

Each part has streams of its own; what is launched on them, or captured from them into a graph, runs on the part's
multiprocessors alone. Modules and memory are those of the primary context. Caches and the memory interface are not
divided. Both parts come of one split: two splits of one device may overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from weft.device.cuda.api import call, cuda_error, driver_api
from weft.errors import DeviceError
from weft.ir.declined import Declined

LEAST = 8
"""Multiprocessors of a part on compute capability 9.0, and what their number is a multiple of."""
_NON_BLOCKING = 1
_SM = 1
"""CU_DEV_RESOURCE_TYPE_SM."""
_DEFAULT_STREAM = 1
"""CU_GREEN_CTX_DEFAULT_STREAM, without which no green context is made."""
_ABSENT = frozenset({801, 914, 915})
"""Not supported; no such resource; a configuration that this GPU does not have."""


@dataclass(frozen=True, slots=True)
class Unit:
    """In which numbers multiprocessors are divided."""

    sms: int
    """Of the device."""
    least: int
    """Of a part."""
    multiple: int

    def sizes(self) -> tuple[int, ...]:
        """All sizes of the first part that leave something for the second, ascending."""
        first = -(-self.least // self.multiple) * self.multiple
        return tuple(range(first, self.sms, self.multiple))


@final
class Part:
    """Some multiprocessors of the device, with streams that run on them alone."""

    def __init__(self, sms: int, context: Any) -> None:
        self.sms = sms
        self._context = context
        self._streams: list[Any] = []

    def stream(self, *, priority: int = 0) -> int:
        """The handle of a new stream, which lives as long as the partition. Lower numbers go first.

        Raises:
            CudaError: the driver refuses it [W302].
        """
        self._streams.append(call(driver_api().cuGreenCtxStreamCreate, self._context, _NON_BLOCKING, priority))
        return int(self._streams[-1])

    def close(self) -> None:
        """Give streams and context back; nothing of them may run or be launched."""
        api = driver_api()
        for stream in self._streams:
            call(api.cuStreamDestroy, stream)
        self._streams.clear()
        call(api.cuGreenCtxDestroy, self._context)


@dataclass(frozen=True, slots=True)
class Partition:
    """Two parts of one split."""

    first: Part
    """Of the size asked for, and with all that kernels in clusters need."""
    rest: Part
    """All others; kernels in clusters may find no room there."""


def unit_of(device: int = 0) -> Unit | Declined:
    """How the multiprocessors of a device can be divided; declined where the driver or the device cannot.

    Raises:
        DeviceError: no driver, no such device, or it does not work [W301, W302].
    """
    found = _resource(device)
    return found if isinstance(found, Declined) else _unit(found)


@contextlib.contextmanager
def partitioned(sms: int, device: int = 0) -> Iterator[Partition | Declined]:
    """The device with `sms` multiprocessors in the first part; declined where that cannot be, with the sizes that can.

    The primary context must be current, and nothing may run on the parts when the block ends.

    Raises:
        DeviceError: no driver, no such device, or it does not work [W301, W302].
    """
    with contextlib.ExitStack() as held:
        yield _made(sms, device, held)


def _made(sms: int, device: int, held: contextlib.ExitStack) -> Partition | Declined:
    whole = _resource(device)
    if isinstance(whole, Declined):
        return whole
    unit = _unit(whole)
    if sms not in unit.sizes():
        sizes = unit.sizes()
        said = f"{sizes[0]} to {sizes[-1]} in steps of {unit.multiple}" if sizes else "none"
        return Declined(f"{sms} of {unit.sms} multiprocessors are no part of this GPU: {said} can be")
    api = driver_api()
    found = _asked(api.cuDevSmResourceSplitByCount, 1, whole, 0, sms)
    if isinstance(found, Declined):
        return found
    groups, count, rest = found
    if int(count) != 1 or int(rest.sm.smCount) < 1 or int(groups[0].sm.smCount) != sms:
        got = [int(g.sm.smCount) for g in groups[: int(count)]]
        return Declined(f"a split at {sms} of {unit.sms} multiprocessors gave {got} and {int(rest.sm.smCount)}")
    parts: list[Part] = []
    for resource in (groups[0], rest):
        made = _part(resource, device)
        if isinstance(made, Declined):
            return made
        held.callback(made.close)
        parts.append(made)
    return Partition(*parts)


def _resource(device: int) -> Any | Declined:
    api = driver_api()
    handle = call(api.cuDeviceGet, device, detail=f"device {device}")
    return _asked(api.cuDeviceGetDevResource, handle, api.CUdevResourceType(_SM))


def _unit(resource: Any) -> Unit:
    """Drivers before 13.0 do not say in which numbers; a part then is what compute capability 9.0 wants."""
    sm = resource.sm
    least, multiple = (int(getattr(sm, name, 0)) for name in ("minSmPartitionSize", "smCoscheduledAlignment"))
    return Unit(int(sm.smCount), least or LEAST, multiple or LEAST)


def _part(resource: Any, device: int) -> Part | Declined:
    api = driver_api()
    described = _asked(api.cuDevResourceGenerateDesc, [resource], 1)
    if isinstance(described, Declined):
        return described
    context = _asked(api.cuGreenCtxCreate, described, call(api.cuDeviceGet, device), _DEFAULT_STREAM)
    return context if isinstance(context, Declined) else Part(int(resource.sm.smCount), context)


def _asked(function: Callable[..., Sequence[Any]], *arguments: object) -> Any | Declined:
    """As `call`, but what a driver or a device does not have is a decline.

    Raises:
        DeviceError: any other error [W302].
    """
    name = getattr(function, "__name__", "a driver call")
    try:
        status, *results = function(*arguments)
    except RuntimeError as error:  # the bindings know a function that the driver lacks
        if isinstance(error, DeviceError):
            raise
        return Declined(f"this driver has no green contexts: {str(error).splitlines()[0]}")
    if int(status) in _ABSENT:
        return Declined(f"no parts of this GPU can be made: {name} gave {int(status)}")
    if int(status) != 0:
        raise cuda_error(name, int(status))
    return results[0] if len(results) == 1 else tuple(results)
