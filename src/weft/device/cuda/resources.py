"""What the assembler says about compiled entries (registers, spills, shared memory), and what to refuse for it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

from weft.device.cuda.occupancy import MAX_REGISTERS, MAX_THREADS, register_need
from weft.device.cuda.record import GpuFacts
from weft.ir.declined import Declined


@dataclass(frozen=True, slots=True)
class Resources:
    """What one entry takes, per thread unless said otherwise."""

    registers: int = 0
    spill_stores: int = 0
    """Bytes."""
    spill_loads: int = 0
    """Bytes."""
    stack_bytes: int = 0
    shared_bytes: int = 0
    """Static shared memory of a block."""
    barriers: int = 0


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_SHARED = re.compile(r"(\d+) bytes smem")
_CODED = re.compile(r"\(C7\d{3}\)")


def parse_resources(log: str) -> tuple[tuple[str, Resources], ...]:
    """Resources per entry, in the order of the log of `--ptxas-options=-v`.

    Functions that were not inlined are charged to the entry whose compilation mentions them.
    """
    entries: list[str] = []
    seen: dict[str, dict[str, int]] = {}
    for line in log.splitlines():
        if found := _ENTRY.search(line):
            entries.append(found[1])
            seen[found[1]] = dict.fromkeys(Resources.__slots__, 0)
            continue
        if not entries:
            continue
        entry = seen[entries[-1]]
        if found := _FRAME.search(line):
            entry["stack_bytes"] += int(found[1])
            entry["spill_stores"] += int(found[2])
            entry["spill_loads"] += int(found[3])
        elif found := _USED.search(line):
            entry["registers"] = int(found[1])
            for name, pattern in (("barriers", _BARRIERS), ("shared_bytes", _SHARED)):
                if inner := pattern.search(line):
                    entry[name] = int(inner[1])
            if inner := _STACK.search(line):
                entry["stack_bytes"] = max(entry["stack_bytes"], int(inner[1]))
    return tuple((name, Resources(**seen[name])) for name in dict.fromkeys(entries))


def parse_warnings(log: str) -> tuple[str, ...]:
    """Lines that say that the code will be slow (C7508: setmaxnreg is ignored; C7510: wgmma is serialised)."""
    lines = (line.strip() for line in log.splitlines())
    return tuple(line for line in lines if _CODED.search(line) or line.startswith("ptxas warning"))


class Launched(Protocol):
    """The part of a launch that decides whether it fits; `weft.kernels.source.Launch` has it."""

    @property
    def entry(self) -> str:
        """Name of the entry point."""

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Blocks of a cluster."""


MAX_SPILL_BYTES = 64
"""Bytes of spill stores plus loads per thread that a kernel may have."""
MAX_CLUSTER = 8
"""Larger clusters are not portable."""


def gate(
    resources: tuple[tuple[str, Resources], ...],
    warnings: tuple[str, ...],
    launch: Launched,
    facts: GpuFacts,
    *,
    max_spill_bytes: int = MAX_SPILL_BYTES,
) -> Declined | None:
    """Why this launch is not worth running or cannot run at all; None: it can."""
    own = dict(resources).get(launch.entry)
    if own is None:
        return Declined(f"the object has no entry {launch.entry}")
    threads = math.prod(launch.block)
    shared = own.shared_bytes + launch.shared_bytes
    if not 1 <= threads <= MAX_THREADS:
        return Declined(f"{threads} threads in a block; 1 to 1024 are possible")
    if shared > facts.shared_per_block:
        return Declined(f"{shared} bytes of shared memory; a block of {facts.name} has {facts.shared_per_block}")
    if own.registers > MAX_REGISTERS or register_need(threads, own.registers) > facts.registers_per_sm:
        return Declined(f"{own.registers} registers in {threads} threads are over the register file")
    if math.prod(launch.cluster) > (MAX_CLUSTER if facts.capability >= 90 else 1):
        return Declined(f"a cluster of {math.prod(launch.cluster)} blocks")
    if (spilled := own.spill_stores + own.spill_loads) > max_spill_bytes:
        return Declined(f"{spilled} bytes of registers spilled per thread")
    for code, meaning in (("C7510", "wgmma is serialised"), ("C7508", "setmaxnreg is ignored")):
        for line in warnings:
            if f"({code})" in line and _concerns(line, launch.entry, resources):
                return Declined(f"{meaning} ({code})")
    return None


def _concerns(line: str, entry: str, resources: tuple[tuple[str, Resources], ...]) -> bool:
    """A warning that names an entry is about that one, otherwise about all."""
    named = [name for name, _ in resources if re.search(rf"\b{re.escape(name)}\b", line)]
    return not named or entry in named
