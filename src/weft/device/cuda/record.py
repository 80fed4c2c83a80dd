"""The record of one NVIDIA GPU: what it is and can do, as frozen data with a canonical JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import cast

from weft.device.stored import NOT_STORED, Provenance, Table, dump, interpolate, parse
from weft.sm_budget import NAMES, SmBudget

SCHEMA = 1
FLOPS_PER_CLOCK: Mapping[int, Mapping[str, int]] = {
    80: {"f64": 128, "f32": 128, "tf32": 1024, "f16": 2048, "bf16": 2048, "i8": 4096},
    90: {"f64": 256, "f32": 256, "tf32": 2048, "f16": 4096, "bf16": 4096, "f8": 8192, "i8": 8192},
}
"""Capability → operand type → dense FLOP per clock and multiprocessor (data-sheet peaks over clock); f64 by its matrix
units."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One NVIDIA GPU as the generators, the estimate and the tuner see it. Defaults are those of an H200 SXM."""

    name: str = "NVIDIA H200"
    capability: int = 90
    """Compute capability: major * 10 + minor."""
    sms: int = 132
    clock_ghz: float = 1.755
    """Clock under load."""
    max_clock_ghz: float = 1.98
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    registers_per_sm: int = 65536
    shared_per_sm: int = 233472
    shared_per_block: int = 232448
    """Largest dynamic shared memory of a block that opts in."""
    shared_reserved: int = 1024
    """Shared memory that the system takes of each resident block."""
    l2_bytes: int = 62914560
    memory_bytes: int = 150754820096
    bandwidth: Table = ((1 << 16, 60.0), (1 << 20, 800.0), (1 << 24, 3500.0), (1 << 30, 4200.0))
    """(bytes read plus written, GB/s) of one of many dependent copy kernels inside a graph, the gap between two of them
    included, sizes ascending."""
    read_bandwidth: Table = ((1 << 16, 60.0), (1 << 20, 850.0), (1 << 24, 4000.0), (1 << 30, 4570.0))
    """The same for reading only."""
    peak_bandwidth: float = 4916.7
    """GB/s that the memory interface cannot exceed; 0: unknown."""
    l2_bandwidth: float = 6650.0
    """GB/s from the L2 cache."""
    launch_us: float = 1.0
    """Gap between two dependent kernels in a graph."""
    dependent_launch_us: float = 0.55
    """The same with programmatic dependent launch."""
    grid_barrier_us: float = 1.2
    """A barrier of all blocks of a grid that is resident as a whole."""
    step_us: float = 0.15
    """Latency of one step of a contraction loop whose operands arrive through shared memory."""
    standalone: tuple[float, float] = (6.9, 4190.0)
    """(µs, GB/s) of a copy launched by itself, outside of a graph: its time is the first plus bytes over the second."""
    flops: tuple[tuple[str, float], ...] = (
        ("f64", 33.5e12),
        ("f32", 66.9e12),
        ("tf32", 494.7e12),
        ("f16", 989.4e12),
        ("bf16", 989.4e12),
        ("f8", 1978.9e12),
        ("i8", 1978.9e12),
    )
    """FLOP/s by operand type, dense: tensor cores, except f64 and f32. Upper bounds."""
    achieved_flops: tuple[tuple[str, float], ...] = (
        ("f32", 50e12),
        ("tf32", 400e12),
        ("f16", 780e12),
        ("bf16", 790e12),
    )
    """What a large library product reached."""
    driver: str = ""
    """Version of the driver that measured ones belong to."""
    provenance: tuple[tuple[str, Provenance], ...] = ()
    """Per field; a field that is not listed is a default."""
    tf32: bool = field(default=False, metadata=NOT_STORED)
    """Not of the device but the caller's choice for it: products of f32 may round their operands to TF32."""
    fast_f8: bool = field(default=False, metadata=NOT_STORED)
    """The same: sums of products of 8-bit floats may stay in the tensor cores, which keep some 14 bits."""
    sm_budget: SmBudget | None = field(default=None, metadata=NOT_STORED)
    """The same: what a plan may take of one SM, every number given; the counts of an SM above are then these."""
    whole_sm: tuple[int, ...] = field(default=(), metadata=NOT_STORED)
    """The fields of `_OF_SM` as the GPU has them, where they are a budget's here."""

    @property
    def whole(self) -> GpuFacts:
        """The GPU as it is, without a budget."""
        if self.sm_budget is None:
            return self
        registers, shared, of_a_block, threads, ctas = self.whole_sm
        return replace(
            self,
            registers_per_sm=registers,
            shared_per_sm=shared,
            shared_per_block=of_a_block,
            threads_per_sm=threads,
            blocks_per_sm=ctas,
            sm_budget=None,
            whole_sm=(),
        )

    def within(self, budget: SmBudget | None) -> GpuFacts:
        """The same GPU with SMs as large as the budget, so that whatever asks for room finds no more; None: whole ones.

        Raises:
            ValueError: more than an SM of this GPU has, or less than a CTA takes; the text says of what.
        """
        if budget is None:
            return self.whole
        whole = self.whole
        has = {
            "registers": whole.registers_per_sm,
            "shared": whole.shared_per_sm,
            "threads": whole.threads_per_sm,
            "ctas": whole.blocks_per_sm,
        }
        given = {name: has[name] if (value := budget.of(name)) is None else value for name in NAMES}
        for name, value in given.items():
            if value > has[name]:
                raise ValueError(f"{name} is {value}, and an SM of {self.name} has {has[name]}")
        if given["shared"] <= whole.shared_reserved:
            why = f"{whole.shared_reserved} bytes of them are the system's in each CTA"
            raise ValueError(f"shared is {given['shared']} bytes, and {why}")
        return replace(
            whole,
            registers_per_sm=given["registers"],
            shared_per_sm=given["shared"],
            shared_per_block=min(whole.shared_per_block, given["shared"] - whole.shared_reserved),
            threads_per_sm=given["threads"],
            blocks_per_sm=given["ctas"],
            sm_budget=SmBudget(**{NAMES[name]: value for name, value in given.items()}),
            whole_sm=tuple(getattr(whole, name) for name in _OF_SM),
        )

    def source_of(self, field: str) -> Provenance:
        """Where a field's value comes from."""
        return dict(self.provenance).get(field, "default")

    @property
    def arch(self) -> str:
        """Target of code for exactly this GPU."""
        return f"sm_{self.capability}{'a' if self.capability >= 90 else ''}"

    def bandwidth_at(self, size_bytes: int, *, read_only: bool = False) -> float:
        """GB/s of moving so many bytes: the table, interpolated on a logarithmic axis."""
        return interpolate(self.read_bandwidth if read_only else self.bandwidth, size_bytes)

    def standalone_us(self, size_bytes: int) -> float:
        """Microseconds of a copy launched by itself that reads and writes so many bytes in all."""
        start, rate = self.standalone
        return start + size_bytes / rate / 1e3

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s that no kernel with operands of this type exceeds, at the highest clock; infinite if unknown.

        A data sheet states its peaks at a lower clock (989 TFLOP/s where the clock allows 1,070), so that is no bound.
        """
        per_clock = FLOPS_PER_CLOCK.get(self.capability, {}).get(dtype)
        if per_clock is None:
            return math.inf
        return max(per_clock * self.sms * self.max_clock_ghz * 1e9, dict(self.flops).get(dtype, 0.0))

    def ridge(self, dtype: str, bandwidth_gb_s: float = 0.0) -> float:
        """FLOP per byte at which a kernel stops being bound by memory (of so many GB/s; 0: the peak bandwidth)."""
        return dict(self.flops)[dtype] / ((bandwidth_gb_s or self.peak_bandwidth) * 1e9)

    def to_json(self) -> str:
        """Canonical JSON; `from_json` gives an equal record back, without what the caller chose."""
        return dump(self, SCHEMA)

    @classmethod
    def from_json(cls, text: str) -> GpuFacts:
        """Inverse of `to_json`.

        Raises:
            ValueError: not such a record, or a value that no GPU has.
        """
        data = parse(cls, text, SCHEMA, "GPU facts")
        try:
            for name in ("bandwidth", "read_bandwidth"):
                data[name] = tuple((_integer(s), float(b)) for s, b in data[name])
            for name in ("flops", "achieved_flops"):
                data[name] = tuple((str(k), float(v)) for k, v in data[name])
            data["standalone"] = tuple(float(x) for x in data["standalone"])
            data["provenance"] = tuple((str(k), cast("Provenance", str(v))) for k, v in data["provenance"])
        except (TypeError, ValueError):
            raise ValueError("malformed table in GPU facts") from None
        facts = cls(**data)
        try:
            facts._check()
        except TypeError:
            raise ValueError("a field of GPU facts has another type") from None
        return facts

    def _check(self) -> None:
        counts = [getattr(self, name) for name in _COUNTS]
        if not all(type(x) is int and x > 0 for x in counts) or type(self.shared_reserved) is not int:
            raise ValueError("a count in GPU facts is not a positive integer")
        rates = [getattr(self, name) for name in _RATES] + [v for _, v in self.flops + self.achieved_flops]
        if not all(math.isfinite(x) and x > 0 for x in rates) or len(self.standalone) != 2:
            raise ValueError("a rate in GPU facts is not positive and finite")
        if not all(math.isfinite(x) and x >= 0 for x in (self.peak_bandwidth, *self.standalone)):
            raise ValueError("a bandwidth in GPU facts is negative or not finite")
        if not 50 <= self.capability < 200 or not (type(self.name) is type(self.driver) is str):
            raise ValueError("no such compute capability or name")
        for table in (self.bandwidth, self.read_bandwidth):
            sizes = [s for s, _ in table]
            if not table or sizes != sorted(set(sizes)) or not all(math.isfinite(b) and b > 0 for _, b in table):
                raise ValueError("bandwidth tables ascend in size and are positive")
        known = {f.name for f in fields(self)}
        if not all(k in known and v in ("measured", "attribute", "default") for k, v in self.provenance):
            raise ValueError("provenance of an unknown field, or of an unknown kind")


_OF_SM = ("registers_per_sm", "shared_per_sm", "shared_per_block", "threads_per_sm", "blocks_per_sm")
"""Counts that a budget makes smaller."""
_COUNTS = (
    "capability",
    "sms",
    "threads_per_sm",
    "blocks_per_sm",
    "registers_per_sm",
    "shared_per_sm",
    "shared_per_block",
    "l2_bytes",
    "memory_bytes",
)
_RATES = (
    "clock_ghz",
    "max_clock_ghz",
    "l2_bandwidth",
    "launch_us",
    "dependent_launch_us",
    "grid_barrier_us",
    "step_us",
)


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value
