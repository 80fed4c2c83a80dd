"""A compiled kernel of roles that share CTAs, or a persistent co-runner, bound to device addresses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast, final

from weft.errors import ArtifactError, DeviceError
from weft.generate.bind import (
    Addresses,
    Argument,
    BoundCuda,
    CudaDriver,
    LoadedFunction,
    Prepared,
    real_driver,
    resolved,
)
from weft.kernels.colocation import BYTES, JOB, FusedSource

_ALIGNED = 16
"""Of a work counter's address."""


@final
class BoundFused:
    """A loaded fused kernel. The module stays loaded while this lives."""

    def __init__(self, source: FusedSource, cubin_path: Path | str, *, driver: CudaDriver | None = None) -> None:
        """Load the entry, and prove once more that its warpgroups get the registers that they ask for.

        Raises:
            DeviceError: the cubin cannot be loaded, lacks the entry, asks for more than the device has, or has fewer
                registers at launch than its warpgroups wait for; or CTAs that spin on each other find no room at once
                [W301, W302].
        """
        self.source = source
        self._driver = driver or real_driver()
        self._module = self._driver.load(Path(cubin_path))
        self._function = cast("LoadedFunction", self._module.function(source.entry))
        at_launch = self._function.attributes.registers * source.threads
        if source.registers_asked > at_launch:
            raise DeviceError(
                where=f"kernel {source.entry}",
                problem=f"its warpgroups ask for {source.registers_asked} registers, the launch has {at_launch}:"
                " it would never end",
            )
        self._function.prepare(source.shared_bytes, source.cluster)
        if source.co_resident > 1:
            self._function.require_co_resident(source.co_resident, source.block, source.shared_bytes)

    def prepare(self, addresses: Sequence[Addresses], counter: int, *, dependent: bool = True) -> Prepared:
        """Resolve the arguments: `addresses[0]` are LC's, `addresses[k]` those of BE source k - 1.

        `counter`: device memory of a work counter.
        A persistent co-runner has no LC role: `addresses[0]` is not looked at. Without `dependent` the launch begins
        only when all before it has ended.

        Raises:
            ArtifactError: an argument without an address, or a counter that is not aligned to 16 bytes [W401].
        """
        if counter == 0 or counter % _ALIGNED:
            raise ArtifactError(
                problem=f"kernel {self.source.entry}: a work counter of {BYTES} bytes at {counter:#x}",
                remedy=f"give device memory aligned to {_ALIGNED} bytes",
            )
        arguments: list[Argument] = []
        for p in self.source.parameters:
            if p.role == JOB:
                arguments.append(counter)
                continue
            assert p.argument is not None  # only the counter has none
            if p.role >= len(addresses):
                raise ArtifactError(
                    problem=f"kernel {self.source.entry}: no addresses of best-effort source {p.role}",
                    remedy="give those of every source of the job",
                )
            arguments.append(resolved(p.argument, addresses[p.role], self._driver.encode))
        launch = self._function.bind(
            self.source.grid,
            self.source.block,
            arguments,
            shared_bytes=self.source.shared_bytes,
            cluster=self.source.cluster,
            dependent=dependent and self.source.dependent,
        )
        return launch.launch


def among(alone: BoundCuda, number: int, fused: Prepared, addresses: Addresses, *, dependent: bool = True) -> Prepared:
    """A source of several launches with a fused kernel in place of launch `number`: those before it, it, those behind.

    `fused`: bound to the same addresses. One stream has them in this order; a launch behind it waits for best-effort
    blocks, too. `dependent`: as of `BoundCuda.prepare`, where a launch stands before it.

    Raises:
        ValueError: the source has no such launch.
    """
    if not 0 <= number < len(alone.source.launches):
        raise ValueError(f"launch {number} of {len(alone.source.launches)}")
    before = alone.prepare(addresses, dependent=dependent, launches=slice(0, number))
    behind = alone.prepare(addresses, launches=slice(number + 1, None))

    def run(stream: int) -> None:
        before(stream)
        fused(stream)
        behind(stream)

    return run
