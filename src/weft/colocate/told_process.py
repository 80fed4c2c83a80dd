"""A process that helps with a job: told what to do by one line of JSON, and ended with the command that started it.

process = started(COMMAND, task, fd, "the process of a network's files")    # in the command
task = task_of(Task)                                                        # in the process
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from weft.errors import DeviceError
from weft.kernels.dataclass_json import from_json, to_json

T = TypeVar("T")


def started(command: Sequence[str], task: Any, fd: int, what: str) -> subprocess.Popen[bytes]:
    """Start a process that imports what this one does, shares the memory `fd`, and is told a task (a dataclass).

    Raises:
        DeviceError: it cannot be started; `what` says which [W301].
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    try:
        process = subprocess.Popen(  # a session of its own: Ctrl-C ends the job, which then tells this to end
            list(command), stdin=subprocess.PIPE, env=environment, pass_fds=(fd,), start_new_session=True
        )
    except OSError as error:
        raise DeviceError(problem=f"{what} cannot be started: {error}") from None
    tell(process, task)
    return process


def tell(process: subprocess.Popen[bytes], task: Any) -> None:
    """A process whose standard input is a pipe its task, and no more."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended: that is told where it is waited for
        process.stdin.write(json.dumps(to_json(task)).encode() + b"\n")
        process.stdin.close()


def task_of(kind: type[T], lines: Sequence[bytes] | None = None) -> T:
    """What this process was told. `lines`: in place of its standard input."""
    return from_json(kind, json.loads(lines[0] if lines else sys.stdin.buffer.readline()))


def ended(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for its end; one that takes longer is killed: False."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True
