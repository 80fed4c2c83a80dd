"""A compiled CUDA kernel bound to device addresses: what the tuner times and what an executable captures.

Binding costs one look at every argument; a launch afterwards costs one driver call per launch of the source. Addresses
are plain integers, so that neither this module nor the driver below it knows a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from weft.device.cuda.budget import Taken
from weft.errors import ArtifactError
from weft.kernels.source import CudaArgument, CudaSource, Inside, Launch, Number, Pointer

Dim3 = tuple[int, int, int]
Argument = int | bytes
"""A device address, or a tensor map by value."""


class CudaLaunch(Protocol):
    """`weft.device.cuda.driver.Bound`."""

    def launch(self, stream: int) -> None:
        """Put it on a stream."""
        ...


class CudaFunction(Protocol):
    """One entry of a loaded module, as `weft.device.cuda.driver.Function` has it."""

    def prepare(self, shared_bytes: int, cluster: Dim3) -> None:
        """Allow so much dynamic shared memory and such a cluster."""
        ...

    def require_co_resident(self, blocks: int, block: Dim3, shared_bytes: int) -> None:
        """DeviceError: there may be no room for so many blocks at once."""
        ...

    def bind(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: Sequence[Argument],
        *,
        shared_bytes: int,
        cluster: Dim3,
        dependent: bool,
    ) -> CudaLaunch:
        """A launch whose configuration and arguments are fixed."""
        ...


class LoadedFunction(CudaFunction, Protocol):
    """A function that says what it takes, as `weft.device.cuda.driver.Function` does."""

    @property
    def attributes(self) -> Taken:
        """At least registers and static shared memory."""
        ...


class CudaModule(Protocol):
    """A loaded cubin."""

    def function(self, entry: str) -> CudaFunction:
        """An entry by name. DeviceError: there is none."""
        ...


class Encode(Protocol):
    """`weft.device.cuda.driver.encode_tensor_map`."""

    def __call__(
        self,
        address: int,
        dtype: str,
        sizes: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int],
        swizzle_bytes: int,
    ) -> bytes:
        """128 bytes."""
        ...


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """The two things that binding needs of a driver; tests give their own."""

    load: Callable[[Path], CudaModule]
    encode: Encode


def real_driver() -> CudaDriver:
    """The CUDA driver of this machine, imported on first use.

    Raises:
        DeviceError: there is none [W301].
    """
    from weft.device.cuda import driver

    return CudaDriver(driver.Module, driver.encode_tensor_map)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Device addresses of one call. 0 stands for a buffer that no launch names; a buffer of no bytes has an address."""

    inputs: Sequence[int]
    outputs: Sequence[int] = ()
    packed: Sequence[int] = ()
    work: int = 0
    state: int = 0


Prepared = Callable[[int], None]
"""Puts all launches on the stream of that handle."""


@final
class BoundCuda:
    """A loaded CUDA source. The module stays loaded while this lives."""

    def __init__(self, source: CudaSource, cubin_path: Path | str, *, driver: CudaDriver | None = None) -> None:
        """Load and prepare every entry; the context of the calling thread must be the device's.

        Raises:
            DeviceError: the cubin cannot be loaded, lacks an entry, or asks for more than the device has [W301].
            ArtifactError: an argument points outside of what the source declares [W401].
        """
        for packing, launches in ((False, source.launches), (True, source.pack)):
            for argument in (x for launch in launches for x in launch.arguments):
                _check(source, argument, packing=packing)
        self.source = source
        self._driver = driver or real_driver()
        self._module = self._driver.load(Path(cubin_path))
        self._functions: dict[str, CudaFunction] = {}
        for entry, shared, cluster in _needs(source):
            self._functions[entry] = self._module.function(entry)
            self._functions[entry].prepare(shared, cluster)
        for launch in source.launches:
            if launch.co_resident > 1:
                self._functions[launch.entry].require_co_resident(launch.co_resident, launch.block, launch.shared_bytes)

    def prepare(self, addresses: Addresses, *, dependent: bool = True, launches: slice = slice(None)) -> Prepared:
        """Resolve the arguments of the run launches, or of some of them, for one set of addresses.

        Without `dependent` the first launch begins only when all before it has ended, even if it could wait itself.

        Raises:
            ArtifactError: an argument without an address [W401].
        """
        return self._resolve(self.source.launches[launches], addresses, dependent=dependent)

    def pack(self, inputs: Sequence[int], packed: Sequence[int], stream: int) -> None:
        """Repack the weights; `inputs` holds 0 for what is no weight. Nothing to do without pack launches.

        Raises:
            ArtifactError: a launch reads an input that is no weight [W401].
        """
        self._resolve(self.source.pack, Addresses(inputs, packed=packed))(stream)

    def _resolve(self, launches: Sequence[Launch], addresses: Addresses, *, dependent: bool = True) -> Prepared:
        bound = [
            self._functions[launch.entry].bind(
                launch.grid,
                launch.block,
                tuple(resolved(x, addresses, self._driver.encode) for x in launch.arguments),
                shared_bytes=launch.shared_bytes,
                cluster=launch.cluster,
                dependent=launch.dependent and (dependent or number > 0),
            )
            for number, launch in enumerate(launches)
        ]

        def run(stream: int) -> None:
            for launch in bound:
                launch.launch(stream)

        return run


def resolved(argument: CudaArgument, addresses: Addresses, encode: Encode) -> Argument:
    """What a launch passes for an argument.

    Raises:
        ArtifactError: a buffer without an address [W401].
    """
    if isinstance(argument, Pointer):
        return _address(argument, addresses)
    if isinstance(argument, Number):
        return argument.value
    if isinstance(argument, Inside):
        return _address(argument.base, addresses) + argument.bytes
    base = _address(argument.base, addresses)
    return encode(
        base,
        argument.dtype,
        argument.sizes,
        argument.strides_bytes,
        argument.box,
        argument.element_strides,
        argument.swizzle_bytes,
    )


def _needs(source: CudaSource) -> list[tuple[str, int, Dim3]]:
    """Per entry the most shared memory and the largest cluster of its launches."""
    found: dict[str, tuple[int, Dim3]] = {}
    for launch in (*source.launches, *source.pack):
        shared, cluster = found.get(launch.entry, (0, (1, 1, 1)))
        larger = launch.cluster if _size(launch.cluster) > _size(cluster) else cluster
        found[launch.entry] = (max(shared, launch.shared_bytes), larger)
    return [(entry, *need) for entry, need in found.items()]


def _size(cluster: Dim3) -> int:
    return cluster[0] * cluster[1] * cluster[2]


def _check(source: CudaSource, argument: CudaArgument, *, packing: bool) -> None:
    if isinstance(argument, Number):
        return
    pointer = argument if isinstance(argument, Pointer) else argument.base
    limits = {
        "in": None,
        "out": None,
        "packed": len(source.packed_bytes),
        "work": source.workspace_bytes,
        "state": source.state_bytes,
    }
    kinds = ("in", "packed") if packing else tuple(limits)
    if pointer.kind not in kinds:
        raise _bad(source, f"{pointer.kind!r} is no argument of a {'pack' if packing else 'run'} launch")
    limit = limits[pointer.kind]
    if pointer.index < 0 or (limit is not None and pointer.index >= limit):
        raise _bad(source, f"{pointer.kind} {pointer.index} is outside of what it declares")


def _address(pointer: Pointer, addresses: Addresses) -> int:
    if pointer.kind in ("work", "state"):
        base = addresses.work if pointer.kind == "work" else addresses.state
        found = base + pointer.index if base else 0
    else:
        table = {"in": addresses.inputs, "out": addresses.outputs, "packed": addresses.packed}[pointer.kind]
        found = table[pointer.index] if pointer.index < len(table) else 0
    if found == 0:
        raise ArtifactError(
            problem=f"a launch reads {pointer.kind} {pointer.index}, which has no address",
            remedy="this is a bug in Weft: please report it with the kernel",
        )
    return found


def _bad(source: CudaSource, what: str) -> ArtifactError:
    return ArtifactError(
        problem=f"kernel {source.entry}: {what}", remedy="make the artifact again with this version of Weft"
    )
