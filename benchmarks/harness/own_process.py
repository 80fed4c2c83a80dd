"""A function that gives a row, called in a process of its own that may fail, hang or die."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks.harness.record import Row

TOLD = 300
"""Characters of an error that a row keeps."""
_SHOWN = 4000
Rows = Callable[..., Row]


def asked(context: ForkServerContext, function: Rows, arguments: Sequence[Any], limit_s: float, log: Path) -> Row:
    """What the function gives, and the seconds that took; `failed` says why there is nothing else.

    The process and all that it started are ended with its answer, or after `limit_s`. What it prints goes to `log`,
    whose end is shown if it fails.
    """
    ours, theirs = context.Pipe(duplex=False)
    log.write_text("")
    process = context.Process(target=_answer, args=(function, arguments, theirs, str(log)))
    began = time.perf_counter()
    process.start()
    theirs.close()
    try:
        row: Row = json.loads(ours.recv()) if ours.poll(limit_s) else {"failed": f"no answer in {limit_s:g} s"}
    except EOFError:
        process.join(10.0)
        code = process.exitcode or 0
        how = f"died: {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        row = {"failed": f"the process {how}"}
    with suppress(ProcessLookupError, PermissionError):
        if process.pid is not None and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if "failed" in row:
        print(log.read_text(errors="replace")[-_SHOWN:], file=sys.stderr, flush=True)
    return {**row, "seconds": round(time.perf_counter() - began, 1)}


def _answer(function: Rows, arguments: Sequence[Any], pipe: Connection, log: str) -> None:
    os.setsid()  # it and all that it starts can be ended together
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS adds up in one order then
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(told, 1)
    os.dup2(told, 2)
    warnings.simplefilter("ignore")
    try:
        row = function(*arguments)
    except Exception as error:  # it is the contender's result
        traceback.print_exc()
        row = {"failed": said(error)}
    pipe.send(json.dumps(row))
    pipe.close()


def said(error: Exception) -> str:
    """Its kind and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:TOLD]
