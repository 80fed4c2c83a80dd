"""The process that reads a network's inputs and writes its results, so that the thread that launches never waits.

Started as `python -m weft.colocate.inference_worker`, with one line of JSON on its standard input. It ends when it is
told to and all results are written, when an inference cannot be read or written, or with the process that started it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weft.colocate.inference_files import InputReader, TensorSpec, write_results
from weft.colocate.inference_ring import READING, WRITING, Ring
from weft.colocate.job import JobError
from weft.colocate.told_process import task_of
from weft.errors import WeftError

MOST_READERS = 6
"""Threads: a core checks and copies about a gigabyte a second."""
NAP_S = 0.0005
"""Where there is nothing to read or write."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is read and written."""

    fd: int
    """Of the memory."""
    folder: str
    """Of the inputs."""
    results: str
    """Folder of the results; empty: they are dropped."""
    files: tuple[str, ...]
    """Names of the inputs, in order."""
    first: int
    """Number of the inference that comes first, over all passes."""
    end: int
    """Behind the last; 0: there is none."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def work(task: Task, ring: Ring, *, nap: Callable[[], bool], readers: int = 1) -> None:
    """Until all is done. `nap`: called where there is nothing to do; False: nobody is there any more.

    Behind inputs that cannot be read nothing is read, but what was put is still written. `readers`: threads.

    Raises:
        ArtifactError: results cannot be written [W401].
    """
    asked, read, written, count = 0, 0, 0, len(task.files)
    reader, reading = InputReader(Path(task.folder), task.inputs), deque[Future[None]]()
    with ThreadPoolExecutor(readers) as pool:
        while True:
            idle = True
            more = not ring.word("stop") and not ring.word("failed")
            while more and (not task.end or task.first + asked < task.end):
                if asked - ring.word("released") >= ring.slots:
                    break
                file = task.files[(task.first + asked) % count]
                reading.append(pool.submit(reader.read, file, ring.inputs(asked)))
                asked += 1
            while reading and reading[0].done():
                idle = False
                try:
                    reading.popleft().result()
                except JobError as error:
                    if not ring.word("failed"):
                        ring.fail(READING, str(error))
                if not ring.word("failed"):
                    read += 1
                    ring.say("filled", read)
            if written < ring.word("put"):
                if task.results:
                    file = task.files[(task.first + written) % count]
                    write_results(Path(task.results) / file, task.outputs, ring.outputs(written))
                written += 1
                ring.say("written", written)
                idle = False
            if idle and ring.word("stop") and written >= ring.word("put"):
                return
            if idle and not nap():
                return


def main(lines: Sequence[bytes] | None = None) -> None:
    """Read the task, and work."""
    task = task_of(Task, lines)
    parent = os.getppid()
    ring = Ring(task.inputs, task.outputs if task.results else (), task.fd)

    def nap() -> bool:
        time.sleep(NAP_S)
        return os.getppid() == parent

    try:
        work(task, ring, nap=nap, readers=max(1, min(MOST_READERS, (os.cpu_count() or 1) - 2)))
    except Exception as error:  # the job tells of it
        ring.fail(WRITING, f"{'' if isinstance(error, WeftError) else type(error).__name__ + ': '}{error}")


if __name__ == "__main__":
    main()
