"""The kinds of devices there are, and where each package has its part of one: a new kind is a line here.

Parts are named, `MODULE:NAME`, and loaded when they are first asked for: this package stands below all that have them,
and who compiles for a CPU loads nothing of a GPU's. A test holds every part to what its package asks of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind; each field names what a package has of it."""

    facts: str
    """In `device`: the class of its facts (`device.any.DeviceFacts`), frozen."""
    platform: str
    """In `platform`: the class that answers what compiling asks (`platform.protocol.Platform`)."""
    generator: str
    """In `generate`: the class whose kernels it runs (`generate.protocol.Generator`); libraries are asked besides."""
    estimate: str
    bound: str
    """In `orchestrate`: (problem, facts) -> the microseconds that a good kernel may take, and that none can beat."""
    site: str
    """In `tune`: (options, facts, compiler or None, policy or None) -> what builds and measures (`tune.site.Site`)."""
    worker: str
    """In `tune`: (options, threads) -> the process that measures, not started (`tune.transport.ProcessTransport`)."""
    saved: str
    """In `runtime`: `runtime.artifact.Read` -> the executable of a saved plan that was read and is trusted."""


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "cpu": Kind(
            facts="weft.device.facts:CpuFacts",
            platform="weft.platform.cpu:Cpu",
            generator="weft.generate.cpp:CppGenerator",
            estimate="weft.orchestrate.estimate:host_estimate_us",
            bound="weft.orchestrate.estimate:host_lower_bound_us",
            site="weft.tune.sites:host_site",
            worker="weft.tune.sites:host_process",
            saved="weft.runtime.artifact:host_saved",
        ),
        "cuda": Kind(
            facts="weft.device.cuda.record:GpuFacts",
            platform="weft.platform.cuda.platform:Cuda",
            generator="weft.generate.cuda:CudaGenerator",
            estimate="weft.orchestrate.estimate_cuda:gpu_estimate_us",
            bound="weft.orchestrate.estimate_cuda:gpu_lower_bound_us",
            site="weft.tune.sites:cuda_site",
            worker="weft.tune.sites:cuda_process",
            saved="weft.runtime.cuda_artifact:saved",
        ),
    }
)
"""By what `Options.device` begins with."""


def kind_of(device: str) -> Kind:
    """The kind of a device by its name, with or without a number.

    Raises:
        KeyError: there is no such kind.
    """
    return KINDS[device.partition(":")[0]]


def kind_with(facts: object) -> Kind:
    """The kind whose facts these are.

    Raises:
        TypeError: facts of no kind that there is.
    """
    place = f"{type(facts).__module__}:{type(facts).__qualname__}"
    for kind in KINDS.values():
        if kind.facts == place:
            return kind
    raise TypeError(f"{place} are the facts of no kind of device in weft.device.kinds")


@cache
def part(place: str) -> Any:
    """What a field of a kind names.

    Raises:
        ImportError: there is no such module, or it does not have that name.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ImportError(f"weft.device.kinds names {place}, but {module} has no {name}", name=module) from None
