"""Calling a compiled kernel: ctypes, pointers bound once, no per-call Python beyond the call itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from weft.errors import DeviceError

Pointers = ctypes.Array[ctypes.c_void_p]

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_PACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def pointer_array(addresses: Sequence[int]) -> Pointers:
    """A C array of addresses (at least one slot, so that it has an address of its own)."""
    return (ctypes.c_void_p * max(len(addresses), 1))(*addresses)


class NativeKernel:
    """One entry point of a shared object (see `KernelSource` for the ABI). The object stays loaded."""

    def __init__(self, path: Path | str, entry: str) -> None:
        """Load.

        Raises:
            DeviceError: the object cannot be loaded, or has no such entry.
        """
        try:
            self._library = ctypes.CDLL(str(path))
            self.address = ctypes.cast(self._library[entry], ctypes.c_void_p).value or 0
        except (OSError, AttributeError) as error:
            raise DeviceError(problem=f"cannot load kernel {entry}: {error}") from error
        self._entry = _ENTRY(self.address)
        try:
            pack = ctypes.cast(self._library[f"{entry}_pack"], ctypes.c_void_p).value or 0
        except AttributeError:
            pack = 0
        self._pack = _PACK(pack) if pack else None

    def pack(self, inputs: Pointers, packed: Pointers) -> None:
        """Repack the weights; a kernel without a pack entry does nothing."""
        if self._pack is not None:
            self._pack(ctypes.addressof(inputs), ctypes.addressof(packed))

    def __call__(self, inputs: Pointers, outputs: Pointers, workspace: int, packed: Pointers) -> None:
        """Run once on the caller's thread (and its OpenMP team)."""
        self._entry(ctypes.addressof(inputs), ctypes.addressof(outputs), workspace, ctypes.addressof(packed))
