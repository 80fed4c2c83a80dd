"""Memory in huge pages, where the system gives them to those who ask.

A network reads its weights once per call, so that every page of them misses the table of address translations; in a
virtual machine a miss walks two tables. With pages of 2 MiB there are 512 times fewer. Linux gives them for the asking
(`transparent_hugepage` is `madvise` on most systems); elsewhere, and where there are none, nothing changes.
"""

from __future__ import annotations

import ctypes
import sys

HUGE = 2 << 20
"""Bytes of a huge page of x86-64 and of Arm with 4 KiB pages."""
_MADV_HUGEPAGE = 14


def ask_for_huge_pages(address: int, size: int) -> bool:
    """Ask that the whole huge pages within some memory, not touched yet, become such when they are; False: refused."""
    start, end = -(-address // HUGE) * HUGE, (address + size) // HUGE * HUGE
    if end <= start or not sys.platform.startswith("linux"):
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    return bool(madvise(start, end - start, _MADV_HUGEPAGE) == 0)
