"""What the kernels of a plan may take of one streaming multiprocessor (SM) of a GPU.

A persistent grid of another job (a co-runner) stays resident beside a plan only if each kernel of the plan finds room
in what the co-runner leaves: registers, shared memory, threads and CTAs. Imports nothing, so that the options, the
facts about a GPU and the contracts of co-location speak of one type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

NAMES: Mapping[str, str] = MappingProxyType(
    {"registers": "registers", "shared": "shared_bytes", "threads": "threads", "ctas": "ctas"}
)
"""As text has them -> fields, in order."""
UNITS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "registers": (256, "the unit in which a warp is given registers"),
        "shared": (128, "the unit in bytes in which a CTA is given shared memory"),
        "threads": (32, "the threads of a warp"),
        "ctas": (1, ""),
    }
)
"""What each number is a multiple of, and why (see `weft.device.cuda.occupancy`)."""


@dataclass(frozen=True, slots=True)
class SmBudget:
    """What all resident CTAs of a plan's kernels may take of one SM together; None: all that the SM has."""

    registers: int | None = None
    """32-bit registers."""
    shared_bytes: int | None = None
    """Shared memory, what the system takes of each CTA (1 KiB) included."""
    threads: int | None = None
    ctas: int | None = None

    def __post_init__(self) -> None:
        if any(type(v) is int and v < 0 for v in (self.registers, self.shared_bytes, self.threads, self.ctas)):
            raise ValueError(f"a budget of less than nothing: {self}")

    def __str__(self) -> str:
        """As an option has it: `registers=49152,shared=200KiB,threads=1792,ctas=24`; what is None is left out."""
        given = {name: value for name in NAMES if (value := self.of(name)) is not None}
        return ",".join(
            f"{name}={value >> 10}KiB" if name == "shared" and value and value % 1024 == 0 else f"{name}={value}"
            for name, value in given.items()
        )

    def of(self, name: str) -> int | None:
        """A number by its name in `NAMES`."""
        value: int | None = getattr(self, NAMES[name])
        return value

    def problem(self) -> str:
        """Why no SM has such a budget to give; empty: some may."""
        given = {name: self.of(name) for name in NAMES}
        for name, value in given.items():
            if value is None:
                continue
            if type(value) is not int:
                return f"{name} is {value!r}, no whole number"
            unit, why = UNITS[name]
            if value < 1:
                return f"{name} is {value}: a kernel takes some; leave {name} out where it shall have no limit"
            if value % unit:
                return f"{name} is {value}, no multiple of {unit}, {why}"
        return "" if any(v is not None for v in given.values()) else "it limits nothing"
