"""A child process that may hang, read line by line: what measures on a device runs apart from what watches it."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self


class Silence(Exception):
    """The child said nothing for so long."""


class Child:
    """Within the block the process runs; afterwards it does not, whatever it was doing."""

    def __init__(self, command: Sequence[str]) -> None:
        """Standard error is passed through."""
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._pump = threading.Thread(target=self._read, daemon=True)
        self._pump.start()

    def _read(self) -> None:
        for text in self._process.stdout or ():
            self._lines.put(text)
        self._lines.put(None)

    def line(self, seconds: float) -> str | None:
        """The next line; None when the child has ended.

        Raises:
            Silence: there was none for so many seconds.
        """
        try:
            return self._lines.get(timeout=max(0.1, seconds))
        except queue.Empty:
            raise Silence from None

    @property
    def status(self) -> int:
        """Of a child that has ended."""
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._pump.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
