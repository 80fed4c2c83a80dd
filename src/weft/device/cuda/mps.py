"""NVIDIA's Multi-Process Service: kernels of several processes on one GPU at the same time.

    with ExitStack() as held:
        found = started(held)            # before this process knows of a GPU
        if isinstance(found, Declined): ...

A control daemon of its own is started with a folder of its own for pipes, and this process and those that it starts are
its clients from then on. A daemon of the machine is neither asked nor ended, and no compute mode is set.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from weft.ir.declined import Declined

PROGRAM = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
LIMIT_S = 10.0
"""Within which the daemon starts, and answers."""
CLIENT_S = 60.0
"""Within which the first client has a context: the daemon starts a server for it."""
QUIT_S = 1.0
"""The daemon ends with its last client, which this process may be."""
_CLIENT = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
for name, arguments in (
    ("cuInit", (0,)), ("cuDeviceGet", (ctypes.byref(device), 0)),
    ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
):
    if status := getattr(cuda, name)(*arguments):
        sys.exit(f"{name} gives {status}")
"""
CLIENT = (sys.executable, "-c", _CLIENT)


def started(
    held: ExitStack, *, program: str = PROGRAM, client: Sequence[str] = CLIENT, limit_s: float = LIMIT_S
) -> Path | Declined:
    """Start a daemon until `held` ends, and be its client; the folder of its pipes, or why this machine has no MPS.

    Args:
        held: ends the daemon, and gives this process its environment back.
        program: that controls the daemon.
        client: a process that makes a context, as which none is declined that cannot.
        limit_s: seconds for each answer of the daemon.
    """
    found = shutil.which(program)
    if found is None:
        return Declined(f"there is no {Path(program).name} here, or it may not be run")
    with ExitStack() as own:
        folder = Path(tempfile.mkdtemp(prefix="weft-mps-"))
        own.callback(shutil.rmtree, folder, ignore_errors=True)
        places = {PIPES: str(folder / "pipes"), LOGS: str(folder / "logs")}
        for place in places.values():
            Path(place).mkdir()
        environment = {**os.environ, **places}
        if why := _failed([found, "-d"], environment, limit_s, what="start"):
            return Declined(why)
        own.callback(_quit, found, environment)
        if why := _failed([found], environment, limit_s, says="get_server_list\n", what="answer"):
            return Declined(why)
        if why := _failed(client, environment, CLIENT_S, what="serve a client"):
            return Declined(why)
        own.enter_context(_environment(places))
        held.push(own.pop_all())
        return folder / "pipes"


def _failed(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float, *, what: str, says: str = ""
) -> str:
    """Run a command to its end; why it did not do what was wanted, empty: it did."""
    with tempfile.TemporaryFile("w+") as said:  # a daemon that goes on holds a pipe, and no end of it would come
        try:
            ran = subprocess.Popen(
                list(command), env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said, text=True,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"its daemon does not {what}: {error.strerror}"
        try:
            ran.communicate(says, limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(ran.pid, signal.SIGKILL)
            ran.wait()
            return f"its daemon does not {what} in {limit_s:g} s"
        if ran.returncode == 0:
            return ""
        said.seek(0)
        text = " ".join(said.read(2000).split())[:300]
        return f"its daemon does not {what}: {text or f'{Path(command[0]).name} ended with {ran.returncode}'}"


def _quit(program: str, environment: Mapping[str, str]) -> None:
    """Tell the daemon to end; where it waits for its last client it does so later."""
    _failed([program], environment, QUIT_S, says="quit\n", what="end")


@contextlib.contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    """Of this process, and of those that it starts."""
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
