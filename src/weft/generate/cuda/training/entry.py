"""Kernels of a text whose launches are made by their callers, for any number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from weft.generate.cuda.role.assemble import kernel
from weft.generate.cuda.role.role import DeviceRole, Parameter


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel of a text."""

    name: str
    threads: int
    max_ctas: int
    """Of a launch; fewer do where there is less to do."""
    shared_bytes: int = 0

    @classmethod
    def of(cls, role: DeviceRole, stem: str) -> Self:
        """Of a role in a text whose names begin like this."""
        return cls(f"{stem}_{role.name}", role.threads, role.grid[0], role.shared_bytes)


def kernels(roles: tuple[DeviceRole, ...], stem: str) -> str:
    """The texts of roles, each a kernel of its own."""
    return "".join(kernel(role, f"{stem}_{role.name}") for role in roles)


def read(*names: str) -> tuple[Parameter, ...]:
    """Parameters that are read, or are numbers; others may be the same memory."""
    return tuple(Parameter(name, type="const void*") for name in names)


def written(*names: str) -> tuple[Parameter, ...]:
    """Parameters that are written."""
    return tuple(Parameter(name, type="void*") for name in names)
