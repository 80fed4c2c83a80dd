"""What compilers made in earlier runs of the tests, kept where `WEFT_TESTS_COMPILED` names a folder.

For runs of the same tests many times (`make test-random`): compiling is a third of what they take, and what g++ or
NVRTC makes of a text does not depend on the order of the tests. Kept by all that decides about the bytes: the compiler
(its file, its version), the options, the text. Nothing is kept of a text that was refused. Other processes that a test
starts compile for themselves.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from weft.device.cuda.nvrtc import Nvrtc
from weft.device.toolchain import HostCompiler

VARIABLE = "WEFT_TESTS_COMPILED"


def keep(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """From here on both compilers look into the folder first, and put there what they make."""
    host, nvrtc = HostCompiler._run, Nvrtc._run

    def by_host(self: HostCompiler, text: str, flags: tuple[str, ...], timeout_s: float) -> tuple[bytes, str]:
        try:
            changed = os.stat(self.path).st_mtime_ns
        except OSError:
            changed = 0
        names = ("g++", self.path, str(changed), self.identity(flags), text)
        return kept(folder, names, lambda: host(self, text, flags, timeout_s))

    def by_nvrtc(self: Nvrtc, text: str, options: Sequence[str], timeout_s: float) -> tuple[bytes, str]:
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
