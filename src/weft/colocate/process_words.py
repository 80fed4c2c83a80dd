"""Words that a job in another process, what starts it and the thread that launches queries share: no lock, no call.

The thread *grants* segments: the process begins one only while fewer have begun than are granted, so that to pause it
is to write a word. Each word is written by one of the three, whole, and read by the others.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import final

import numpy as np

from weft.device.nameless import read_text, write_text

FREE = 1 << 62
"""Granted: as many segments as there are."""
WHOLE = 256
"""Of a duty: all of the time."""
BYTES = 8192
_SAID, _UNSAVED = 2048, 4096
"""Where texts lie."""
_ROOM = 2001
_WORDS = (
    # of the thread that launches queries
    "granted", "part", "duty", "measure", "stop", "kill",
    # of the job's process
    "ready", "begun", "ended", "units", "partial", "saved", "stateless", "unit", "longest", "segments", "raised",
    "unsaved", "over",
    # of what starts it
    "lives", "alive", "pid", "lost", "failed",
)  # fmt: skip
_AT = {name: i for i, name in enumerate(_WORDS)}


@dataclass(frozen=True, slots=True)
class Confinement:
    """Where a job in another process runs, and how much of the time."""

    part: int = 0
    """Multiprocessors of the model's part of the GPU: the job runs on the others; 0: on all."""
    duty: int = WHOLE
    """256ths of the time in which segments run: behind each it rests."""


@final
class Words:
    """One side's view. Times are nanoseconds.

    `granted`: segments that may have begun, over all lives of the process; `part`, `duty`: a `Confinement`; `measure`:
    not 0: segments are timed; `stop`: not 0: end behind the unit under way; `kill`: the life that is to be killed.
    `ready`: the life that can work; `begun`, `ended`: segments; `units`: that are done; `partial`: of the unit under
    way, in its time alone; `saved`: units that its last state is behind; `stateless`: 1: it has none; `unit`,
    `longest`, `segments`: time of a unit and of its longest segment alone, and their number; `raised`: the life that
    raised; `over`: all units are done.
    `lives`: that were started; `alive`: 1: the last one is; `lost`: units that were done and are done again; `failed`:
    not 0: it is not started again.
    """

    def __init__(self, fd: int) -> None:
        """`fd`: memory of `BYTES` bytes, which stays the caller's to close."""
        self._map = mmap.mmap(fd, BYTES)
        self._words = memoryview(self._map)[: 8 * len(_WORDS)].cast("q")
        self._whole = np.frombuffer(self._map, np.uint8)

    def word(self, name: str) -> int:
        """As it stands now."""
        return self._words[_AT[name]]

    def say(self, name: str, value: int) -> None:
        """Write a word of one's own."""
        self._words[_AT[name]] = value

    def kept(self) -> int:
        """Units that the next life need not do.

        Of a job without a state all that are done, in one word: whenever a life is killed, each is counted or not.
        """
        return self.word("units" if self.word("stateless") else "saved")

    def tell(self, text: str, *, unsaved: bool = False) -> None:
        """Why it failed, or could not be saved; cut to what has room."""
        write_text(self._whole, _UNSAVED if unsaved else _SAID, _ROOM, text)

    def told(self, *, unsaved: bool = False) -> str:
        """What was told last; empty: nothing was."""
        return read_text(self._whole, _UNSAVED if unsaved else _SAID, _ROOM)


@dataclass(frozen=True, slots=True)
class ProcessTask:
    """What a job's process is told, and what starts it."""

    fd: int
    """Of the words."""
    file: str
    function: str
    device: str
    """`cuda`, or `cpu`: of tests, and of machines without a GPU."""
    first: int
    """Units that were done before."""
    end: int
    """Units in all; 0: there is no end."""
    job: str
    """Digest of its description."""
    progress: str
    """File that progress is saved to; empty: it is not."""
    states: str
    """Folder of the function's own state."""
    save_s: float
    hang_s: float
    memory_bytes: int
    """Most device memory; 0: what there is."""
    start_s: float
    """A life that is not ready after so long is killed."""
    life: int = 0
    """Number of this life, from 1 on."""


def state_file(folder: str, units: int) -> str:
    """Where the state behind so many units lies."""
    return os.path.join(folder, f"{units}.state")
