"""Calling a compiled kernel: ctypes, pointers bound once, no per-call Python beyond the call itself."""

from __future__ import annotations

import _ctypes
import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

from weft.errors import DeviceError

Pointers = ctypes.Array[ctypes.c_void_p]

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_PACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_OPENMP: dict[int, ctypes.CDLL] = {}
"""By where an OpenMP runtime lies: the first object that was loaded with it, which stays. Between parallel regions the
threads of a runtime wait in its code, which would go with the last object that needs it."""


def pointer_array(addresses: Sequence[int]) -> Pointers:
    """A C array of addresses (at least one slot, so that it has an address of its own)."""
    return (ctypes.c_void_p * max(len(addresses), 1))(*addresses)


class NativeKernel:
    """One entry point of a shared object (see `KernelSource` for the ABI).

    The object is unloaded with the last kernel of it: whoever calls `address` holds the kernel meanwhile. No thread is
    in its code then, as a parallel region ends when all threads have left it; it has no thread-local variables and no
    destructors. When the interpreter ends, what is loaded stays: a daemon thread may be in a call.
    """

    def __init__(self, path: Path | str, entry: str) -> None:
        """Load.

        Raises:
            DeviceError: the object cannot be loaded, or has no such entry.
        """
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise DeviceError(problem=f"cannot load kernel {entry}: {error}") from error
        runtime = _address(library, "omp_get_max_threads")
        if not runtime or _OPENMP.setdefault(runtime, library) is not library:
            weakref.finalize(self, _ctypes.dlclose, library._handle).atexit = False
        self.address = _address(library, entry)
        if not self.address:
            raise DeviceError(problem=f"cannot load kernel {entry}: {Path(path).name} has no such entry")
        self._entry = _ENTRY(self.address)
        pack = _address(library, f"{entry}_pack")
        self._pack = _PACK(pack) if pack else None

    def pack(self, inputs: Pointers, packed: Pointers) -> None:
        """Repack the weights; a kernel without a pack entry does nothing."""
        if self._pack is not None:
            self._pack(ctypes.addressof(inputs), ctypes.addressof(packed))

    def __call__(self, inputs: Pointers, outputs: Pointers, workspace: int, packed: Pointers) -> None:
        """Run once on the caller's thread (and its OpenMP team)."""
        self._entry(ctypes.addressof(inputs), ctypes.addressof(outputs), workspace, ctypes.addressof(packed))


def _address(library: ctypes.CDLL, name: str) -> int:
    """Where a symbol of an object, or of one that it needs, lies; 0: there is none."""
    try:
        return ctypes.cast(library[name], ctypes.c_void_p).value or 0
    except AttributeError:
        return 0
