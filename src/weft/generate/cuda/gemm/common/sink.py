"""Where the results of an epilogue go: the epilogue asks, and no text of it is changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToGlobal:
    """To their place in global memory."""


@dataclass(frozen=True, slots=True)
class ToShared:
    """To shared memory, from where TMA stores them."""

    address: str
    """C text of the address of the first of a thread's neighbours."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """To their place in global memory, from registers that hold them rounded already, two halves in each."""

    words: tuple[str, ...]
    """C text of the registers, of neighbouring pairs in order."""


Sink = ToGlobal | ToShared | Rounded
