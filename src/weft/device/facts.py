"""What the CPU is and can do: read from the system, measured by short probes, or a stated default.

Every number says where it comes from. A record is made once per machine and set of usable cores, kept as JSON
beside its SHA-256, and made again when either does not fit.

Source: performance notes on the CPU variant of the model (usable cores = min(affinity mask, cgroup quota);
peak = cores x clock x lanes x 2 x FMA units; a probe above cores x clock x lanes x 2 x 2 is discarded).

What was measured beside other work is too low. Probes that saw less than `LEAST` of one FMA unit on every thread are
run once more; the best of both counts. What is still so, or had neighbours, is kept under a name of its own
(`.busy.json`): it stands in as long as the machine is busy, and is measured again when it is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from weft.device.probe import PROBE_TEXT, ProbeResult, run_probes
from weft.device.room import free_bytes
from weft.device.stored import Provenance, Table, dump, interpolate, keep, load, parse
from weft.device.toolchain import HostCompiler, cpu_target, find_compiler
from weft.errors import ToolchainError
from weft.ir.declined import Declined

SCHEMA = 1
LEAST = 0.35
"""Of one FMA unit busy on every thread at the clock that was measured: two threads that share one reach half."""
NEIGHBOURS = 0.1
"""Share of the usable cores that others may have while the probes run."""


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """One CPU as the generators, the estimate and the tuner see it."""

    name: str = "generic CPU"
    cores: int = 1
    """Usable ones: min(affinity mask, cgroup quota), at least 1."""
    threads: int = 1
    """Threads that kernels should use: one per usable physical core."""
    frequency_ghz: float = 2.5
    """Clock of a busy core."""
    simd_bytes: int = 16
    """Width of the widest vectors: 64, 32 or 16."""
    fma_units: int = 1
    """Vector FMAs per core and cycle."""
    l1_bytes: int = 32 * 1024
    """Data cache of one core."""
    l2_bytes: int = 512 * 1024
    """Of one core (or of the cores that share it)."""
    l3_bytes: int = 8 * 1024 * 1024
    """One last-level cache; 0: there is none."""
    line_bytes: int = 64
    peak_flops_f32: float = 2.5e9 * 4 * 2
    """FLOP/s with all threads."""
    bandwidth: Table = ((1 << 16, 60.0), (1 << 20, 40.0), (1 << 24, 20.0), (1 << 29, 10.0))
    """(array bytes, GB/s read plus written) of scaling an array in place with all threads; sizes ascend."""
    read_bandwidth: Table = ((1 << 16, 60.0), (1 << 20, 40.0), (1 << 24, 20.0), (1 << 29, 10.0))
    """The same for reading only."""
    fork_us: float = 5.0
    """Microseconds of an empty parallel region with all threads."""
    provenance: tuple[tuple[str, Provenance], ...] = ()
    """Per field; a field that is not listed is a default."""

    def source_of(self, field: str) -> Provenance:
        """Where a field's value comes from."""
        return dict(self.provenance).get(field, "default")

    @property
    def lanes_f32(self) -> int:
        """f32 lanes of a vector."""
        return self.simd_bytes // 4

    @property
    def ceiling_flops_f32(self) -> float:
        """FLOP/s that no kernel exceeds: every unit busy at the full clock, which the probe for the peak may miss."""
        every = self.threads * self.frequency_ghz * 1e9 * self.lanes_f32 * 2 * self.fma_units
        return max(self.peak_flops_f32, every)

    @property
    def is_plausible(self) -> bool:
        """Whether the peak is what a machine with nothing else to do shows (see `LEAST`)."""
        return self.peak_flops_f32 >= LEAST * self.threads * self.frequency_ghz * 1e9 * self.lanes_f32 * 2

    def bandwidth_at(self, size_bytes: int, *, read_only: bool = False) -> float:
        """GB/s for a working set of this size: the table, interpolated on a logarithmic axis."""
        return interpolate(self.read_bandwidth if read_only else self.bandwidth, size_bytes)

    def to_json(self) -> str:
        """Canonical JSON; `from_json` gives an equal record back."""
        return dump(self, SCHEMA)

    @classmethod
    def from_json(cls, text: str) -> CpuFacts:
        """Inverse of `to_json`.

        Raises:
            ValueError: not such a record, or a value that no CPU has.
        """
        data = parse(cls, text, SCHEMA, "CPU facts")
        try:
            for name in ("bandwidth", "read_bandwidth"):
                data[name] = tuple((int(s), float(b)) for s, b in data[name])
            data["provenance"] = tuple((str(k), cast("Provenance", str(v))) for k, v in data["provenance"])
        except (TypeError, ValueError):
            raise ValueError("malformed table in CPU facts") from None
        facts = cls(**data)
        try:
            facts._check()
        except TypeError:
            raise ValueError("a field of CPU facts has another type") from None
        return facts

    def _check(self) -> None:
        counts = (self.cores, self.threads, self.fma_units, self.l1_bytes, self.l2_bytes, self.line_bytes)
        rates = (self.frequency_ghz, self.peak_flops_f32, self.fork_us)
        if not all(type(x) is int and x > 0 for x in counts) or type(self.l3_bytes) is not int or self.l3_bytes < 0:
            raise ValueError("a count in CPU facts is not a positive integer")
        if not all(math.isfinite(x) and x > 0 for x in rates):
            raise ValueError("a rate in CPU facts is not positive and finite")
        if self.simd_bytes not in (16, 32, 64) or type(self.name) is not str:
            raise ValueError("no such vector width or name")
        for table in (self.bandwidth, self.read_bandwidth):
            sizes = [s for s, _ in table]
            if not table or sizes != sorted(set(sizes)) or not all(math.isfinite(b) and b > 0 for _, b in table):
                raise ValueError("bandwidth tables ascend in size and are positive")


def cpu_facts(
    cache_dir: Path | None,
    *,
    calibrate: bool = True,
    most_s: float = math.inf,
    compiler: HostCompiler | None = None,
    root: Path = Path("/"),
) -> CpuFacts:
    """Facts about this machine: the cached record, or a new one (about 2 s of probes if `calibrate`).

    Probes that take longer than `most_s`, because others have the cores, are given up.

    A record that was made beside other work is taken only while the machine has other work.

    Without a compiler, or with `calibrate=False` and no record, what is not stated by the system is a default, and
    nothing is cached. `root` is where `proc` and `sys` are found (tests use a copy). Never raises for lack of a file.
    """
    stated = _stated(root)
    chosen: HostCompiler | Declined = compiler or find_compiler()
    if isinstance(chosen, Declined):
        return stated
    still = replace(stated, frequency_ghz=1.0, peak_flops_f32=1.0)  # the stated clock changes from read to read
    parts = [still.to_json(), cpu_target(), chosen.identity(), PROBE_TEXT]
    identity = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    home = None if cache_dir is None else cache_dir / "facts" / f"{identity[:32]}.json"
    if (found := _read(home)) is not None and found.is_plausible:
        return found
    if not calibrate:
        return stated
    aside = None if home is None else home.with_suffix(".busy.json")
    if (found := _read(aside)) is not None and _runnable(root) > 1:
        return found
    try:
        facts, quiet = _calibrated(stated, chosen, cache_dir, root, most_s)
    except (ToolchainError, OSError):
        return stated
    keep(home if quiet else aside, facts.to_json())
    if quiet and aside is not None:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    return facts


def _read(path: Path | None) -> CpuFacts | None:
    text = load(path)
    try:
        return None if text is None else CpuFacts.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _calibrated(
    stated: CpuFacts, compiler: HostCompiler, cache_dir: Path | None, root: Path, most_s: float
) -> tuple[CpuFacts, bool]:
    """The stated facts with what the probes saw, and whether nothing speaks against them."""
    seen: ProbeResult | None = None
    facts, quiet = stated, False
    end = time.monotonic() + most_s
    for _ in range(2):
        before = _busy_s(root)
        began, own = time.monotonic(), time.process_time()
        try:
            now = run_probes(
                compiler, stated.threads, cache_dir=cache_dir, free_bytes=free_bytes(root), most_s=end - began
            )
        except TimeoutError:
            if seen is None:
                raise
            break  # what was seen must do
        passed, own = time.monotonic() - began, time.process_time() - own
        others = (_busy_s(root) - before - own) / max(passed * stated.cores, 1e-9)
        seen = now if seen is None else now.best_of(seen)
        facts = _with_probes(stated, seen)
        quiet = others <= NEIGHBOURS and facts.is_plausible
        if facts.is_plausible:
            break
    if not facts.is_plausible:
        one_unit = facts.threads * facts.frequency_ghz * 1e9 * facts.lanes_f32 * 2
        provenance = {**dict(facts.provenance), "fma_units": "default", "peak_flops_f32": "default"}
        facts = replace(facts, fma_units=1, peak_flops_f32=one_unit, provenance=_sorted(provenance))
    return facts, quiet


def _with_probes(stated: CpuFacts, seen: ProbeResult) -> CpuFacts:
    simd = seen.lanes * 4
    ceiling = stated.threads * seen.frequency_ghz * 1e9 * seen.lanes * 2 * 2 * 1.1
    units, peak, source = stated.fma_units, stated.peak_flops_f32, "default"
    if 0 < seen.flops_f32 <= ceiling:
        per_unit = stated.threads * seen.frequency_ghz * 1e9 * seen.lanes * 2
        # wide vectors lower the clock, and neighbours take their share: what one unit cannot do shows a second
        units, peak, source = max(1, math.ceil(seen.flops_f32 / per_unit - 0.1)), seen.flops_f32, "measured"
    measured = ("frequency_ghz", "simd_bytes", "bandwidth", "read_bandwidth", "fork_us")
    provenance = {**dict(stated.provenance), **dict.fromkeys(measured, "measured")}
    provenance |= dict.fromkeys(("fma_units", "peak_flops_f32"), source)
    return replace(
        stated,
        frequency_ghz=seen.frequency_ghz,
        simd_bytes=simd,
        fma_units=units,
        peak_flops_f32=peak,
        bandwidth=seen.scale_gb_s,
        read_bandwidth=seen.read_gb_s,
        fork_us=seen.fork_us,
        provenance=_sorted(provenance),
    )


def _busy_s(root: Path) -> float:
    """Seconds that the usable cores were not idle since the system started; 0 where it does not say."""
    allowed = {f"cpu{n}" for n in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    ticks = 0
    for line in _text(root / "proc/stat").splitlines():
        name, *counts = line.split()
        if name in allowed and len(counts) >= 8 and all(c.isdigit() for c in counts[:8]):
            ticks += sum(int(c) for k, c in enumerate(counts[:8]) if k not in (3, 4))  # without idle and I/O
    return ticks / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)


def _runnable(root: Path) -> int:
    """Threads that run or want to, this one among them; 1 where the system does not say."""
    words = _text(root / "proc/loadavg").split()
    running = words[3].partition("/")[0] if len(words) > 3 else ""
    return int(running) if running.isdigit() else 1


def _sorted(provenance: Mapping[str, str]) -> tuple[tuple[str, Provenance], ...]:
    return cast("tuple[tuple[str, Provenance], ...]", tuple(sorted(provenance.items())))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _stated(root: Path) -> CpuFacts:
    """What the system states without measuring."""
    cpuinfo = _text(root / "proc/cpuinfo")
    lines: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        lines.setdefault(key.strip(), value.strip())
    known: dict[str, object] = {}
    if name := lines.get("model name") or lines.get("Processor"):
        known["name"] = name
    flags = set((lines.get("flags") or lines.get("Features") or "").split())
    if flags:
        known["simd_bytes"] = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
    cores = usable_cores(root)
    known["cores"] = cores
    known["threads"] = max(1, min(cores, _physical_cores(root) or cores))
    for level, size in _caches(root).items():
        known[f"l{level}_bytes"] = size
    if (root / "sys/devices/system/cpu/cpu0/cache").is_dir() and "l3_bytes" not in known:
        known["l3_bytes"] = 0
    if line := _text(root / "sys/devices/system/cpu/cpu0/cache/index0/coherency_line_size").strip():
        known["line_bytes"] = int(line) if line.isdigit() and int(line) > 0 else 64
    if mhz := lines.get("cpu MHz"):
        try:
            known["frequency_ghz"] = float(mhz) / 1e3
        except ValueError:
            known.pop("frequency_ghz", None)
    facts = replace(CpuFacts(), **known, provenance=_sorted(dict.fromkeys(known, "attribute")))  # type: ignore[arg-type]
    peak = facts.threads * facts.frequency_ghz * 1e9 * facts.lanes_f32 * 2 * facts.fma_units
    return replace(facts, peak_flops_f32=peak)


def usable_cores(root: Path = Path("/")) -> int:
    """min(affinity mask, cgroup quota), at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota in _quotas(root):
        cores = min(cores, max(1, math.ceil(quota)))
    return max(1, cores)


def _quotas(root: Path) -> list[float]:
    """CPU quotas in cores of the cgroups (v2 and v1) this process is in, from its own to the root."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base = root / "sys/fs/cgroup"
            bases = [base, base / "unified"]
        elif "cpu" in controllers.split(","):
            bases = [root / "sys/fs/cgroup" / c for c in ("cpu", "cpu,cpuacct")]
        else:
            continue  # a controller that does not limit CPU time
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for folder in bases:
            for depth in range(len(parts) + 1):
                here = folder.joinpath(*parts[:depth])
                found += _quota_of(here)
    return found


def _quota_of(folder: Path) -> list[float]:
    words = _text(folder / "cpu.max").split()
    if len(words) != 2:
        words = [_text(folder / f"cpu.cfs_{k}_us").strip() for k in ("quota", "period")]
    try:
        quota, period = float(words[0]), float(words[1])
    except (ValueError, IndexError):
        return []  # "max", or no such file
    return [quota / period] if quota > 0 and period > 0 else []


def _physical_cores(root: Path) -> int:
    """Distinct cores among the CPUs of the affinity mask; 0 if the system does not say."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    seen = set()
    for cpu in allowed:
        siblings = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip()
        if not siblings:
            return 0
        seen.add(siblings)
    return len(seen)


def _caches(root: Path) -> dict[int, int]:
    """Bytes of the data or unified cache of each level 1 to 3 as CPU 0 sees it."""
    found: dict[int, int] = {}
    folder = root / "sys/devices/system/cpu/cpu0/cache"
    for index in range(8):
        here = folder / f"index{index}"
        level, size = _text(here / "level").strip(), _text(here / "size").strip()
        if level not in ("1", "2", "3") or _text(here / "type").strip() == "Instruction":
            continue  # another level, or no data in it
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
        digits = size.rstrip("KMG")
        if digits.isdigit() and int(digits) > 0:
            found[int(level)] = int(digits) * unit
    return found
