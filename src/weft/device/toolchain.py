"""The host C++ compiler: source text and flags in, a shared object in a content-addressed cache out.

Flags come from a closed list. `-ffast-math` is not in it: linking with it would set flush-to-zero for the
whole process (gcc 12's crtfastmath.o), and it breaks NaN and infinities.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from weft.device.files import doing_without, find_private, publish
from weft.errors import ToolchainError
from weft.ir.declined import Declined

BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fno-rtti",
    "-w",
)
"""IEEE semantics for values; only errno, traps and the contraction of a*b+c are given up."""
LINKED = ("-nostdlib", "-lgomp", "-lm", "-lgcc", "-lc", "-Wl,-z,defs")
"""What GCC links, last on its command line. A kernel has no use for C++'s library or code at its start and end: without
them linking takes 10 ms of some 250 a kernel, and 40 with them. What is not found here is an error of the linker."""
_FOLDER = "weft-cc-"
_ORPHANED_S = 3600.0
"""A compilation takes a minute at most: after this time nobody waits for what lies in its folder."""
ALLOWED_FLAGS = frozenset(
    {
        "-O2",
        "-mprefer-vector-width=512",
        "-mprefer-vector-width=256",
        "-funroll-loops",
        "-fno-tree-vectorize",
        "-fno-unroll-loops",
        "-ffp-contract=off",
    }
)
"""What `KernelSource.flags` may add."""


@dataclass(frozen=True, slots=True)
class CompiledObject:
    """A shared object whose bytes were checked against `sha256` when it was found or made."""

    path: Path
    sha256: str
    seconds: float
    """0 when it came from the cache."""
    log: str


@dataclass(frozen=True)
class HostCompiler:
    """One C++ compiler and the machine it compiles for."""

    path: str
    version: str
    """First line of `--version`."""
    target: str
    """What `-march=native` means here: a hash of the CPU's feature flags."""
    _scratch: list[Path] = field(default_factory=list, compare=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    def identity(self, flags: tuple[str, ...] = ()) -> str:
        """Everything but the text that decides about the code that comes out."""
        return "\0".join([self.version, self.target, *BASE_FLAGS, *flags])

    @property
    def _linked(self) -> tuple[str, ...]:
        return () if "clang" in self.version else LINKED

    def compile(
        self, text: str, flags: tuple[str, ...] = (), *, cache_dir: Path | None = None, timeout_s: float = 60.0
    ) -> CompiledObject:
        """Compile one translation unit, or find it in the cache. Safe to call from several threads.

        A cache that cannot be written is passed over: the object then lives in a private temporary directory.

        Raises:
            ToolchainError: the compiler refused the text, or ran over `timeout_s` (the whole process group is
                killed); carries the log.
            ValueError: a flag outside `ALLOWED_FLAGS`.
        """
        if unknown := set(flags) - ALLOWED_FLAGS:
            raise ValueError(f"flags {sorted(unknown)} are not in ALLOWED_FLAGS")
        key = hashlib.sha256((self.identity(flags) + "\0" + text).encode()).hexdigest()
        home = cache_dir / "objects" / key[:2] / f"{key}.so" if cache_dir else None
        if home and (found := _read_back(home)):
            return found
        start = time.perf_counter()
        data, log = self._run(text, flags, timeout_s)
        seconds = time.perf_counter() - start
        digest = hashlib.sha256(data).hexdigest()
        if home:
            with doing_without(home):
                publish(home, data)
                publish(home.with_suffix(".json"), json.dumps({"sha256": digest, "log": log}).encode())
                return CompiledObject(home, digest, seconds, log)
        try:
            private = self._private() / f"{key}.so"
            publish(private, data, private=False)  # never in place: this process may have loaded it before
        except OSError as error:
            raise _no_room(self.path, error) from error
        return CompiledObject(private, digest, seconds, log)

    def _private(self) -> Path:
        with self._lock:
            if not self._scratch:
                self._scratch.append(Path(tempfile.mkdtemp(prefix="weft-")))
                atexit.register(shutil.rmtree, self._scratch[0], ignore_errors=True)
            return self._scratch[0]

    def _run(self, text: str, flags: tuple[str, ...], timeout_s: float) -> tuple[bytes, str]:
        _sweep(tempfile.gettempdir())
        try:
            around = tempfile.TemporaryDirectory(prefix=_FOLDER)
        except OSError as error:
            raise _no_room(self.path, error) from error
        with around as folder:
            out = Path(folder) / "k.so"
            command = [self.path, *BASE_FLAGS, *flags, "-x", "c++", "-", "-o", str(out), *self._linked]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,
                env={**os.environ, "LC_ALL": "C", "TMPDIR": folder},
            )
            try:
                _, stderr = process.communicate(text.encode(), timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                raise ToolchainError(tool=self.path, status=-9, log=f"over {timeout_s} s") from None
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
            log = stderr.decode(errors="replace")[:65536]
            if process.returncode != 0:
                raise ToolchainError(tool=self.path, status=process.returncode, log=log)
            return out.read_bytes(), log


def _no_room(tool: str, error: OSError) -> ToolchainError:
    """The folder for temporary files is full or cannot be written."""
    return ToolchainError(tool=tool, status=-1, log=f"no room in {tempfile.gettempdir()}: {error.strerror}")


@cache
def _sweep(parent: str) -> None:
    """Remove folders that compilers of killed processes left behind, once per process: old ones of this user only."""
    before = time.time() - _ORPHANED_S
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.startswith(_FOLDER):
                continue  # somebody else's
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and status.st_mtime < before:
                    shutil.rmtree(entry.path, ignore_errors=True)


def _read_back(path: Path) -> CompiledObject | None:
    """A cached object whose bytes still have the digest that was recorded; anything else is a miss."""
    about, data = find_private(path.with_suffix(".json")), find_private(path)
    if about is None or data is None:
        return None
    with contextlib.suppress(ValueError):
        record = json.loads(about)
        digest = hashlib.sha256(data).hexdigest()
        if isinstance(record, dict) and record.get("sha256") == digest:
            return CompiledObject(path, digest, 0.0, str(record.get("log", "")))
    return None


@cache
def cpu_target() -> str:
    """Hash of the CPU's feature flags: two machines with equal hashes run each other's `-march=native` code."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return hashlib.sha256(line.encode()).hexdigest()[:16]
    return "unknown"


def find_compiler(environ: Mapping[str, str] | None = None) -> HostCompiler | Declined:
    """The compiler named by `WEFT_CXX`, else `g++`, else `clang++`, if it answers; `WEFT_CXX=none` hides all."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("WEFT_CXX", "")
    if chosen == "none":
        return Declined("WEFT_CXX=none")
    for name in [chosen] if chosen else ["g++", "clang++"]:
        path = shutil.which(name)
        if path is not None and (version := _version(path)):
            return HostCompiler(path, version, cpu_target())
    return Declined(f"no C++ compiler: looked for {chosen or 'g++, clang++'}")


@cache
def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    first = done.stdout.decode(errors="replace").splitlines()[:1]
    return first[0] if done.returncode == 0 and first else ""
