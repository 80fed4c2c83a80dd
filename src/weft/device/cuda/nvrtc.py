"""NVRTC, the CUDA compiler as a library: source text and flags in, a cubin in a content-addressed cache out.

It needs no GPU. It runs in this process, on as many threads as one likes (it releases the interpreter lock and was seen
to compile in parallel). A text that takes too long is cancelled through NVRTC's own callback, which it asks between
stages; one stage may take many seconds, and a text that crashes the compiler takes the process along. So whoever
compiles text that may be bad does it in a worker process (`weft.tune`), as for every other step of a candidate kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import SupportsInt

from weft.device.cuda.record import GpuFacts
from weft.device.cuda.resources import Launched, Resources, parse_resources, parse_warnings
from weft.device.cuda.resources import gate as _gate
from weft.device.files import doing_without, find_private, publish
from weft.errors import DeviceError, ToolchainError
from weft.ir.declined import Declined

BASE_FLAGS = ("--std=c++17", "-default-device", "--no-cache", "--ptxas-options=-v")
"""IEEE semantics throughout: no fast-math option is among these.

Where there is a driver, NVRTC keeps what it compiled in the user's compute cache, and what it finds there comes without
the assembler's log, so without resources: hence `--no-cache`, Weft has a cache of its own.
"""
ALLOWED_FLAGS = frozenset(
    {
        "--extra-device-vectorization",
        "--fmad=false",
        "--ptxas-options=-O1",
        "--ptxas-options=-O2",
    }
)
"""What `CudaSource.flags` may add."""
TIMEOUT_S = 60.0
_LOG_LIMIT = 1 << 18
_CANCELLED = 16
"""NVRTC_ERROR_CANCELLED."""
_ARCH = re.compile(r"sm_(\d{2,3})[af]?")


@dataclass(frozen=True, slots=True)
class CompiledCubin:
    """A cubin whose bytes were checked against `sha256` when it was found or made."""

    path: Path
    sha256: str
    seconds: float
    """0 when it came from the cache."""
    log: str
    resources: tuple[tuple[str, Resources], ...]
    """Per entry."""
    warnings: tuple[str, ...] = ()
    """Lines in which the assembler says that code will be slow."""

    def of(self, entry: str) -> Resources:
        """Resources of one entry; KeyError if there is none."""
        return dict(self.resources)[entry]


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One text to compile, as for `Nvrtc.compile`."""

    text: str
    arch: str
    flags: tuple[str, ...] = ()
    max_registers: int = 0


@dataclass(frozen=True)
class Nvrtc:
    """One NVRTC library."""

    version: str
    """Version and size of the library, which tells builds of one version apart."""
    capabilities: tuple[int, ...]
    """Compute capabilities that it compiles for."""
    _api: ModuleType = field(compare=False, repr=False)

    def identity(self, flags: tuple[str, ...] = (), *, arch: str = "", max_registers: int = 0) -> str:
        """Everything but the text that decides about the bytes that come out."""
        return "\0".join([self.version, arch, str(max_registers), *BASE_FLAGS, *flags])

    def compile(
        self,
        text: str,
        *,
        arch: str,
        flags: Sequence[str] = (),
        max_registers: int = 0,
        cache_dir: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> CompiledCubin:
        """Compile one translation unit for `arch` (`sm_80`, `sm_90a`), or find it in the cache. Safe on many threads.

        A cache that cannot be written is passed over: the cubin then lives in a private temporary directory. The cap
        holds for entries without `__launch_bounds__` only: the assembler lets those win.

        Raises:
            ToolchainError: the compiler refused the text, or ran over `timeout_s`; carries the log.
            DeviceError: this NVRTC does not know the architecture.
            ValueError: a flag outside `ALLOWED_FLAGS`, no such name of an architecture, or a cap out of range.
        """
        self._check(arch, flags, max_registers)
        identity = self.identity(tuple(flags), arch=arch, max_registers=max_registers)
        key = hashlib.sha256((identity + "\0" + text).encode()).hexdigest()
        home = cache_dir / "cubins" / key[:2] / f"{key}.cubin" if cache_dir else None
        if home and (found := _read_back(home)):
            return found
        options = [*BASE_FLAGS, f"--gpu-architecture={arch}", *flags]
        if max_registers:
            options.append(f"--maxrregcount={max_registers}")
        start = time.perf_counter()
        data, log = self._run(text, options, timeout_s)
        seconds = time.perf_counter() - start
        digest = hashlib.sha256(data).hexdigest()
        path = _keep(home, key, data, json.dumps({"sha256": digest, "log": log}).encode())
        return CompiledCubin(path, digest, seconds, log, parse_resources(log), parse_warnings(log))

    def compile_many(
        self,
        jobs: Sequence[CompileJob],
        *,
        threads: int = 0,
        cache_dir: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> list[CompiledCubin | ToolchainError]:
        """Compile all jobs on so many threads (0: one per usable core), in the order of the jobs.

        A text that is refused gives its error instead of a cubin; errors of the machine are raised as in `compile`.
        """

        def one(job: CompileJob) -> CompiledCubin | ToolchainError:
            try:
                return self.compile(
                    job.text,
                    arch=job.arch,
                    flags=job.flags,
                    max_registers=job.max_registers,
                    cache_dir=cache_dir,
                    timeout_s=timeout_s,
                )
            except ToolchainError as error:
                return error

        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(one, jobs))

    def _check(self, arch: str, flags: Sequence[str], max_registers: int) -> None:
        if unknown := set(flags) - ALLOWED_FLAGS:
            raise ValueError(f"flags {sorted(unknown)} are not in ALLOWED_FLAGS")
        if max_registers and not 16 <= max_registers <= 255:
            raise ValueError(f"a cap of {max_registers} registers is outside of 16 to 255")
        if not (found := _ARCH.fullmatch(arch)):
            raise ValueError(f"{arch!r} names no architecture such as sm_80 or sm_90a")
        if int(found[1]) not in self.capabilities:
            known = ", ".join(f"sm_{c}" for c in self.capabilities)
            raise DeviceError(problem=f"NVRTC {self.version} cannot compile for {arch}; it knows {known}")

    def _run(self, text: str, options: Sequence[str], timeout_s: float) -> tuple[bytes, str]:
        api = self._api
        status, program = api.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, None, None)
        self._expect(status, "nvrtcCreateProgram")
        try:
            end = time.monotonic() + timeout_s
            cancel = _CALLBACK(lambda _payload, _reserved: int(time.monotonic() > end))
            address = ctypes.cast(cancel, ctypes.c_void_p).value
            self._expect(api.nvrtcSetFlowCallback(program, address, 0)[0], "nvrtcSetFlowCallback")
            (status,) = api.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")[:_LOG_LIMIT]
            if int(status) == _CANCELLED:
                raise ToolchainError(tool=f"NVRTC {self.version}", status=_CANCELLED, log=f"over {timeout_s} s\n{log}")
            if int(status) != 0:
                raise ToolchainError(tool=f"NVRTC {self.version}", status=int(status), log=log or status.name)
            return self._bytes(program, "CUBIN"), log
        finally:
            api.nvrtcDestroyProgram(program)

    def _bytes(self, program: object, what: str) -> bytes:
        """The log or the cubin of a program."""
        status, size = getattr(self._api, f"nvrtcGet{what}Size")(program)
        self._expect(status, f"nvrtcGet{what}Size")
        data = bytes(size)  # its own memory, which the library fills in
        self._expect(getattr(self._api, f"nvrtcGet{what}")(program, data)[0], f"nvrtcGet{what}")
        return data

    def _expect(self, status: SupportsInt, call: str) -> None:
        if int(status) != 0:
            raise ToolchainError(tool=f"{call} of NVRTC {self.version}", status=int(status), log="")


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def gate(compiled: CompiledCubin, launch: Launched, facts: GpuFacts | None = None) -> Declined | None:
    """Why a compiled launch cannot run on this GPU or is not worth running: see `weft.device.cuda.resources.gate`."""
    return _gate(compiled.resources, compiled.warnings, launch, facts or GpuFacts())


_scratch: list[Path] = []
_lock = threading.Lock()


def _private() -> Path:
    """A directory of this process alone, removed when it ends."""
    with _lock:
        if not _scratch:
            _scratch.append(Path(tempfile.mkdtemp(prefix="weft-")))
            atexit.register(shutil.rmtree, _scratch[0], ignore_errors=True)
        return _scratch[0]


def _keep(home: Path | None, key: str, data: bytes, record: bytes) -> Path:
    """Publish a cubin and its record; a full or read-only disk only costs the cache."""
    if home:
        with doing_without(home):
            publish(home, data)
            publish(home.with_suffix(".json"), record)
            return home
    path = _private() / f"{key}.cubin"
    publish(path, data, private=False)
    return path


def _read_back(path: Path) -> CompiledCubin | None:
    """A cached cubin whose bytes still have the digest that was recorded; anything else is a miss."""
    about, data = find_private(path.with_suffix(".json")), find_private(path)
    if about is None or data is None:
        return None
    with contextlib.suppress(ValueError):
        record = json.loads(about)
        digest = hashlib.sha256(data).hexdigest()
        if isinstance(record, dict) and record.get("sha256") == digest:
            log = str(record.get("log", ""))
            return CompiledCubin(path, digest, 0.0, log, parse_resources(log), parse_warnings(log))
    return None


def find_nvrtc(environ: Mapping[str, str] | None = None) -> Nvrtc | Declined:
    """The NVRTC that cuda-bindings finds, or why there is none; `WEFT_NVRTC=none` hides it."""
    environ = os.environ if environ is None else environ
    if environ.get("WEFT_NVRTC", "") == "none":
        return Declined("WEFT_NVRTC=none")
    try:
        from cuda.bindings import nvrtc as api
        from cuda.pathfinder import load_nvidia_dynamic_lib

        status, major, minor = api.nvrtcVersion()
        known, capabilities = api.nvrtcGetSupportedArchs()
        place = load_nvidia_dynamic_lib("nvrtc").abs_path
        size = Path(place).stat().st_size if place else 0
    except ImportError:
        return Declined("cuda-bindings is not installed: pip install weft[cuda]")
    except (RuntimeError, OSError) as error:  # the library is missing, or a file of it
        return Declined(
            f"NVRTC cannot be loaded: {str(error).splitlines()[0][:200] if str(error) else 'no reason given'}"
        )
    if int(status) != 0 or int(known) != 0:
        return Declined(f"NVRTC does not answer: {status.name}")
    if major < 13:
        return Declined(f"NVRTC {major}.{minor} is older than 13.0")
    return Nvrtc(f"{major}.{minor} ({size} bytes)", tuple(int(c) for c in capabilities), api)
