"""What a GPU is and can do: driver attributes, micro-benchmarks, or a shipped profile; every number says which.

A record is made once per GPU model, driver and text of the probes, kept as JSON beside its SHA-256, and made again when
either does not fit. Attributes are read by number: fields of the device-properties structure come and go with versions.

Source: performance notes, section 6 (device record) and 7 (attributes by number, calibration).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from weft.device.cuda.api import call, driver_api
from weft.device.cuda.calibrate import PROBE_TEXT, Matmul, run_probes
from weft.device.cuda.driver import primary_context
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.cuda.record import FLOPS_PER_CLOCK, GpuFacts
from weft.device.stored import Provenance, Table, keep, load
from weft.errors import DeviceError, ToolchainError
from weft.ir.declined import Declined

__all__ = ["PROFILES", "GpuFacts", "Provenance", "Table", "gpu_facts", "profile", "profile_sources"]

PROFILES = ("h200", "h100", "a100")
ATTRIBUTES: Mapping[str, int] = {
    "sms": 16,
    "threads_per_sm": 39,
    "blocks_per_sm": 106,
    "registers_per_sm": 82,
    "shared_per_sm": 81,
    "shared_per_block": 97,
    "shared_reserved": 111,
    "l2_bytes": 38,
}
"""Field → number of the device attribute (CUdevice_attribute)."""
LEAST = 0.25
"""Of the peak: a copy or a large product that reaches less ran beside something else."""
_CLOCK_KHZ, _MEMORY_CLOCK_KHZ, _BUS_BITS, _MAJOR, _MINOR = 13, 36, 37, 75, 76


def profile(name: str) -> GpuFacts:
    """A shipped record by name: `h200`, `h100` or `a100`, so that estimates need no GPU.

    Raises:
        ValueError: there is no such profile.
    """
    return GpuFacts.from_json(json.dumps(_shipped(name)["facts"]))


def profile_sources(name: str) -> dict[str, str]:
    """Field → where the value of a shipped record comes from.

    Raises:
        ValueError: there is no such profile.
    """
    return {str(k): str(v) for k, v in _shipped(name)["sources"].items()}


def _shipped(name: str) -> dict[str, Any]:
    if name not in PROFILES:
        raise ValueError(f"no profile {name!r}: there are {', '.join(PROFILES)}")
    text = resources.files("weft.device.cuda").joinpath("profiles", f"{name}.json").read_text()
    return cast("dict[str, Any]", json.loads(text))


def gpu_facts(
    cache_dir: Path | None,
    *,
    device: int = 0,
    calibrate: bool = True,
    compiler: Nvrtc | None = None,
    matmul: Matmul | None = None,
    stream: int = 0,
) -> GpuFacts:
    """Facts about GPU number `device`: the cached record, or a new one (some seconds of probes if `calibrate`).

    Without NVRTC, or with `calibrate=False` and no record, what the driver does not state is that of the nearest
    shipped profile, and nothing is cached. `matmul` lets a framework's products be measured (see `calibrate.Matmul`),
    on the stream of that handle (0: on one of ours). Works in the device's primary context and leaves the current
    context as it was.

    Raises:
        DeviceError: no driver, no such GPU, or a GPU that does not work [W301, W302].
    """
    with primary_context(device):
        stated = _stated()
        chosen: Nvrtc | Declined = compiler or find_nvrtc()
        if isinstance(chosen, Declined):
            return stated
        identity = "\0".join([stated.to_json(), chosen.version, PROBE_TEXT, str(matmul is not None)])
        digest = hashlib.sha256(identity.encode()).hexdigest()
        home = cache_dir / "facts" / f"gpu-{digest[:32]}.json" if cache_dir is not None else None
        if (found := _read(home)) is not None:
            return found
        if not calibrate:
            return stated
        try:
            facts, alone = _calibrated(stated, chosen, cache_dir, matmul, stream)
        except (ToolchainError, OSError):
            return stated
    if alone:  # else the next process measures again
        keep(home, facts.to_json())
    return facts


def _read(path: Path | None) -> GpuFacts | None:
    text = load(path)
    try:
        return None if text is None else GpuFacts.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _stated() -> GpuFacts:
    """What the driver states about the device of the current context, on top of the nearest profile."""
    api = driver_api()
    device = call(api.cuCtxGetDevice)

    def attribute(number: int) -> int:
        return int(call(api.cuDeviceGetAttribute, api.CUdevice_attribute(number), device))

    name = call(api.cuDeviceGetName, 256, device).split(b"\0")[0].decode(errors="replace")
    known: dict[str, Any] = {
        "name": name,
        "capability": attribute(_MAJOR) * 10 + attribute(_MINOR),
        "memory_bytes": int(call(api.cuDeviceTotalMem, device)),
        "driver": str(call(api.cuDriverGetVersion)),
    }
    if known["capability"] < 80:
        raise DeviceError(problem=f"{name} has compute capability {known['capability'] / 10}; Weft needs 8.0 or newer")
    known |= {field: value for field, number in ATTRIBUTES.items() if (value := attribute(number)) > 0}
    if khz := attribute(_CLOCK_KHZ):
        known["max_clock_ghz"] = khz / 1e6
    if (khz := attribute(_MEMORY_CLOCK_KHZ)) and (bits := attribute(_BUS_BITS)):
        known["peak_bandwidth"] = 2 * khz * bits / 8 / 1e6
    return state(known)


def state(known: Mapping[str, Any]) -> GpuFacts:
    """The nearest profile with the stated fields in place of its own; the rest is scaled to multiprocessors and clock.

    A GPU that states no memory clock has unknown (0) peak bandwidth.
    """
    base = _nearest(str(known["name"]), int(known["capability"]))
    facts = replace(base, **{"peak_bandwidth": 0.0, **known})
    scale = facts.sms * facts.max_clock_ghz / (base.sms * base.max_clock_ghz)
    clocks = FLOPS_PER_CLOCK.get(facts.capability)
    derived: dict[str, Any] = {"achieved_flops": tuple((k, v * scale) for k, v in base.achieved_flops)}
    derived["clock_ghz"] = min(base.clock_ghz, facts.max_clock_ghz)
    if clocks is not None:
        derived["flops"] = tuple((k, n * facts.sms * facts.max_clock_ghz * 1e9) for k, n in clocks.items())
    else:
        derived["flops"] = tuple((k, v * scale) for k, v in base.flops)
    if facts.peak_bandwidth and base.peak_bandwidth:
        share = min(1.0, facts.peak_bandwidth / base.peak_bandwidth)
        for table in ("bandwidth", "read_bandwidth"):
            derived[table] = tuple((size, rate * share) for size, rate in getattr(base, table))
    sources: dict[str, Provenance] = dict.fromkeys(known, "attribute")
    if clocks is not None and {"sms", "max_clock_ghz"} <= set(known):
        sources["flops"] = "attribute"
    return replace(facts, **derived, provenance=tuple(sorted(sources.items())))


def _nearest(name: str, capability: int) -> GpuFacts:
    """The profile of this model, else of the newest generation that is not newer."""
    for shipped in PROFILES:
        if shipped in name.lower():
            return profile(shipped)
    return profile("h100" if capability >= 90 else "a100")


def _calibrated(
    stated: GpuFacts, compiler: Nvrtc, cache_dir: Path | None, matmul: Matmul | None, stream: int
) -> tuple[GpuFacts, bool]:
    """The stated facts with what the probes measured, and whether the GPU had nothing else to do.

    A measurement above what is possible is dropped, and so is one under `LEAST` of it: others had the GPU.
    """
    seen = run_probes(compiler, stated, cache_dir=cache_dir, matmul=matmul, handle=stream)
    found: dict[str, Any] = {}
    alone = True
    for field in ("bandwidth", "read_bandwidth"):
        table: Table = getattr(seen, field)
        beyond = [rate for size, rate in table if size >= 8 * stated.l2_bytes]
        shared = max(beyond, default=math.inf) < LEAST * stated.peak_bandwidth
        if not shared and (not stated.peak_bandwidth or all(rate <= stated.peak_bandwidth for rate in beyond)):
            found[field] = table
        alone = alone and not shared
    for field in ("l2_bandwidth", "launch_us", "dependent_launch_us"):
        found[field] = getattr(seen, field)
    if 0 < seen.clock_ghz <= stated.max_clock_ghz * 1.05:
        found["clock_ghz"] = seen.clock_ghz
    rates = {"f32": seen.flops_f32, **seen.products}
    slow = {k for k, v in rates.items() if 0 < v < LEAST * stated.peak_flops(k)}
    products = {k: v for k, v in rates.items() if 0 < v <= stated.peak_flops(k) and k not in slow}
    alone = alone and not slow
    if products:
        found["achieved_flops"] = tuple(sorted((dict(stated.achieved_flops) | products).items()))
    sources: dict[str, Provenance] = {**dict(stated.provenance), **dict.fromkeys(found, "measured")}
    names = {f.name for f in fields(stated)}
    facts = replace(stated, **found, provenance=tuple(sorted((k, v) for k, v in sources.items() if k in names)))
    return facts, alone
