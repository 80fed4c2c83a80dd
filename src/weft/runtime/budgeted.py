"""Kernels of a plan under a budget of an SM: each is checked when it is loaded, and prefers the same carve-out.

What a function takes is asked of the loaded function, and of the cubin that it was loaded from. A plan that does not
fit here (another GPU, another compiler) is refused: it would wait for the co-runner's end, which may never come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, final

from weft.device.cuda.budget import first_over_budget, share
from weft.device.cuda.cubin import Usage, usage
from weft.device.cuda.record import GpuFacts
from weft.errors import DeviceError
from weft.generate.bind import BoundCuda, CudaDriver, CudaFunction, CudaModule, LoadedFunction, real_driver
from weft.kernels.source import CudaSource, LibraryCall

SM_BUDGET = "sm_budget"
"""Under which the facts of a linked plan have its budget, as text."""


@dataclass(frozen=True, slots=True)
class Residence:
    """The two things that a plan beside a co-runner needs of a driver, besides loading; tests give their own."""

    prefer_shared: Callable[[CudaFunction], None]
    """Sets the carve-out of a loaded function."""
    upload: Callable[[int, int], None]
    """Brings a graph to the GPU: the handle of the graph, that of a stream."""


def real_residence() -> Residence:
    """That of the CUDA driver of this machine, imported on first use.

    Raises:
        DeviceError: there is none [W301].
    """
    from weft.device.cuda import resident

    return Residence(cast("Callable[[CudaFunction], None]", resident.prefer_shared), resident.upload)


@final
class Budgeted:
    """Loads the kernels of one plan under the budget of `facts`."""

    def __init__(
        self, facts: GpuFacts, *, driver: CudaDriver | None = None, residence: Residence | None = None
    ) -> None:
        assert facts.sm_budget is not None
        self.facts = facts
        self._driver, self._residence = driver, residence
        self._taken: dict[str, dict[str, Usage]] = {}
        """By SHA-256 of a source that was loaded, and by entry."""

    @property
    def residence(self) -> Residence:
        """See `Residence`."""
        return self._residence or real_residence()

    def load(self, source: CudaSource, cubin_path: Path | str) -> BoundCuda:
        """A source whose launches all fit, its functions with the carve-out of all.

        Raises:
            DeviceError: a launch does not fit; and as for `BoundCuda` [W301].
        """
        loaded: dict[str, Usage] = {}
        driver = self._driver or real_driver()
        prefers = self.residence.prefer_shared
        modules = CudaDriver(lambda path: _Module(driver.load(path), loaded, prefers), driver.encode)
        bound = BoundCuda(source, cubin_path, driver=modules)
        try:
            stated = usage(Path(cubin_path).read_bytes())
        except (OSError, ValueError) as error:
            raise DeviceError(problem=f"what {source.entry} takes of an SM cannot be read: {error}") from None
        # the driver's static shared memory may hold what the system takes of a CTA, which is counted apart
        taken = {x: Usage(max(stated[x].registers, loaded[x].registers), stated[x].shared_bytes) for x in loaded}
        self._taken[source.sha256] = taken
        declined = first_over_budget(source.launches, taken, self.facts)
        if declined is not None:
            raise DeviceError(problem=declined.reason)
        return bound

    def share(self, source: CudaSource) -> str:
        """What the launches of a loaded source take of an SM, for people; alike ones once."""
        taken = self._taken[source.sha256]
        texts = [share(x, taken[x.entry], self.facts).text(self.facts) for x in source.launches]
        return "; ".join(dict.fromkeys(texts))

    def refuse(self, call: LibraryCall) -> None:
        """Whatever a plan calls of a library.

        Raises:
            DeviceError: always [W301].
        """
        said = f"{call.schedule} is a call, of which nobody knows what its kernels take of an SM"
        raise DeviceError(problem=f"{said}: it may not stand in a plan under sm_budget {self.facts.sm_budget}")


@final
class _Module:
    """A loaded cubin whose functions prefer the carve-out, and are noted with what they take."""

    def __init__(self, module: CudaModule, loaded: dict[str, Usage], prefers: Callable[[CudaFunction], None]) -> None:
        self._module, self._loaded, self._prefers = module, loaded, prefers

    def function(self, entry: str) -> CudaFunction:
        """See `CudaModule`."""
        function = self._module.function(entry)
        self._prefers(function)
        attributes = cast("LoadedFunction", function).attributes
        self._loaded[entry] = Usage(attributes.registers, attributes.shared_bytes)
        return function
