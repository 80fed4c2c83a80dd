"""Memory without a name that processes share by its file descriptor."""

from __future__ import annotations

import os
import tempfile

import numpy as np
from numpy.typing import NDArray


def nameless(size: int, title: str) -> int:
    """A file descriptor of zeros without a name: nothing is left where a process is killed. The caller's to close.

    `title`: for people who list a process's files.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(title)  # bounded by no file system, unlike /dev/shm
    else:
        with tempfile.TemporaryFile(prefix=f"{title}-") as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_text(memory: NDArray[np.uint8], at: int, room: int, text: str) -> None:
    """A text for another process, cut to the bytes that there is room for."""
    data = text.encode()[: room - 1]
    memory[at : at + len(data)] = np.frombuffer(data, np.uint8)
    memory[at + len(data)] = 0


def read_text(memory: NDArray[np.uint8], at: int, room: int) -> str:
    """What was written there; empty: nothing was."""
    data: bytes = memory[at : at + room].tobytes()
    return data.split(b"\0", 1)[0].decode("utf-8", "replace")
