"""C++ that a test compiles for this machine; what compilers made is kept where `WEFT_TESTS_COMPILED` names a folder.

For the second run of the same tests, and for many in other orders: compiling is more than half of what they take, and
what g++ or NVRTC makes of a text depends on nothing else (`make clean` forgets it). Kept by all that decides about the
bytes: the compiler (its file, its version), the options, the text. Nothing is kept of a text that was refused. Other
processes that a test starts compile for themselves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from weft.device.cuda.nvrtc import Nvrtc
from weft.device.toolchain import HostCompiler, cpu_target

VARIABLE = "WEFT_TESTS_COMPILED"


def library(text: str, *flags: str, head: str = "") -> ctypes.CDLL:
    """A C++ text as a shared object that is loaded: one of its own, with its own globals, in every call.

    `head`: what it begins with, the same for many texts; g++ reads it once in a process.
    """

    def make() -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory(prefix="weft-test-") as home:
            begin = ("-include", str(_precompiled(head, flags))) if head else ()
            return _made(Path(home), text, "k.cpp", "k.so", *flags, "-shared", *begin), ""

    home = os.environ.get(VARIABLE)
    data, _ = kept(Path(home).resolve(), ("test", cpu_target(), *flags, head, text), make) if home else make()
    with tempfile.NamedTemporaryFile(prefix="weft-test-", suffix=".so") as file:
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


@cache
def _precompiled(head: str, flags: tuple[str, ...]) -> Path:
    """A header that g++ has read already, which is half of what it does for a small kernel."""
    folder = Path(tempfile.mkdtemp(dir=_HEADS.name))
    _made(folder, head, "head.h", "head.h.gch", *flags, "-x", "c++-header")
    return folder / "head.h"


_HEADS = tempfile.TemporaryDirectory(prefix="weft-test-heads-")


def _made(folder: Path, text: str, name: str, out: str, *flags: str) -> bytes:
    (folder / name).write_text(text, encoding="utf-8")
    command = ["g++", "-w", "-fPIC", *flags, name, "-o", out]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return (folder / out).read_bytes()


def keep(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """From here on both compilers look into the folder first, and put there what they make.

    Not where a test has taken the variable away (the fixture `compilers_at_work`).
    """
    host, nvrtc = HostCompiler._run, Nvrtc._run

    def by_host(self: HostCompiler, text: str, flags: tuple[str, ...], timeout_s: float) -> tuple[bytes, str]:
        if VARIABLE not in os.environ:
            return host(self, text, flags, timeout_s)
        try:
            changed = os.stat(self.path).st_mtime_ns
        except OSError:
            changed = 0
        names = ("g++", self.path, str(changed), self.identity(flags), text)
        return kept(folder, names, lambda: host(self, text, flags, timeout_s))

    def by_nvrtc(self: Nvrtc, text: str, options: Sequence[str], timeout_s: float) -> tuple[bytes, str]:
        if VARIABLE not in os.environ:
            return nvrtc(self, text, options, timeout_s)
        return kept(folder, ("nvrtc", self.version, *options, text), lambda: nvrtc(self, text, options, timeout_s))

    patch.setattr(HostCompiler, "_run", by_host)
    patch.setattr(Nvrtc, "_run", by_nvrtc)


def kept(folder: Path, names: Sequence[str], make: Callable[[], tuple[bytes, str]]) -> tuple[bytes, str]:
    """(object, log) of what has these names, made where it is not there yet. Safe from several processes."""
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()
    path = folder / digest[:2] / digest
    try:
        log, _, data = path.read_bytes().partition(b"\0")
        return data, log.decode()
    except FileNotFoundError:
        data, text = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{digest}.{os.getpid()}.{id(data):x}")
    part.write_bytes(text.replace("\0", "").encode() + b"\0" + data)
    part.replace(path)
    return data, text
