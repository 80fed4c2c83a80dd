"""Where kernels are built and measured: what the tuner asks of a kind of device, and the CPU's answers.

A `Site` belongs to the parent process: it compiles sources, knows how to start a worker and what the worker must be
told, and describes everything outside a kernel that its time depends on. `weft.tune.cuda_site` is the one for GPUs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final

from weft.device.facts import CpuFacts
from weft.device.room import free_bytes
from weft.device.toolchain import HostCompiler
from weft.errors import ToolchainError
from weft.kernels.codec import Json
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource, KernelSource
from weft.options import Options
from weft.tune.cuda_shaken import Shaken
from weft.tune.keys import Described, describe_environment
from weft.tune.timing import TimingPolicy
from weft.tune.transport import ProcessTransport, Transport

CANARY_TEXT = """extern "C" void weft_canary(const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i) y[i] = x[i] * 2 + 1;
}
"""
CANARY_ENTRY = "weft_canary"


@dataclass(frozen=True, slots=True)
class Built:
    """A source that compiled."""

    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A source that is not worth a worker's time."""

    verdict: Verdict
    error: str


class Site(Protocol):
    """One device, seen from the parent process."""

    @property
    def policy(self) -> TimingPolicy:
        """The numbers of the timing protocol."""
        ...

    @property
    def environment(self) -> Described:
        """Everything outside a problem and a schedule that a timing depends on."""
        ...

    @property
    def jobs(self) -> int:
        """Compilations that may run at once."""
        ...

    @property
    def builds_ahead(self) -> bool:
        """Compiling does not disturb measuring."""
        ...

    @property
    def l2_bytes(self) -> int:
        """The cache that buffers are rotated through: all of it."""
        ...

    @property
    def start_waits_s(self) -> tuple[float, ...]:
        """Seconds to wait before each attempt at starting a worker that proves itself."""
        ...

    def build(self, kernel: KernelSource | CudaSource, left_s: float = math.inf) -> Built | Refused:
        """Compile a source, or find it in the cache, in the seconds that are left. Safe on many threads."""
        ...

    def shaken(self, kernel: KernelSource | CudaSource) -> Shaken | None:
        """The form of a kernel that is verified besides; None: there is none."""
        ...

    def build_shaken(self, form: Shaken, left_s: float = math.inf) -> str:
        """Compile it, however slow it will be; empty: it does not compile in time, or would not fit."""
        ...

    def transport(self) -> Transport:
        """A worker, not started yet."""
        ...

    def hello(self) -> Mapping[str, Json]:
        """What a worker is told first."""
        ...

    def canary(self) -> Mapping[str, Json]:
        """The request for a kernel with a known answer; its object is empty where nothing compiles."""
        ...


@final
class HostSite:
    """This machine's CPU."""

    start_waits_s = (0.0, 0.0)
    builds_ahead = False

    def __init__(
        self, options: Options, facts: CpuFacts, compiler: HostCompiler | None, policy: TimingPolicy | None
    ) -> None:
        self._options, self._compiler = options, compiler
        self._threads = options.threads or facts.threads
        self.policy = policy or TimingPolicy()
        self.jobs = options.build_jobs or facts.cores
        self.l2_bytes = facts.l2_bytes * self._threads
        self.environment = describe_environment(
            facts, compiler, threads=self._threads, seed=options.seed, policy=self.policy
        )

    def build(self, kernel: KernelSource | CudaSource, left_s: float = math.inf) -> Built | Refused:
        """See `Site`."""
        if isinstance(kernel, CudaSource):
            return Refused(Verdict.RESOURCE, "a CUDA kernel on a CPU")
        if self._compiler is None:
            return Refused(Verdict.COMPILE, "no C++ compiler")
        limit_s = min(self._options.compile_timeout_s, left_s)
        try:
            built = self._compiler.compile(kernel.text, kernel.flags, cache_dir=self._options.cache, timeout_s=limit_s)
        except ToolchainError as error:
            return Refused(Verdict.COMPILE, f"{error}\n{error.log}")
        except (OSError, ValueError) as error:
            return Refused(Verdict.COMPILE, f"{type(error).__name__}: {error}")
        return Built(str(built.path), built.seconds)

    def shaken(self, kernel: KernelSource | CudaSource) -> Shaken | None:  # noqa: ARG002 - threads take turns instead
        """See `Site`."""
        return None

    def build_shaken(self, form: Shaken, left_s: float = math.inf) -> str:  # noqa: ARG002 - there is none
        """See `Site`."""
        return ""

    def transport(self) -> Transport:
        """See `Site`."""
        return host_worker(self._threads)

    def hello(self) -> Mapping[str, Json]:
        """See `Site`."""
        return {"op": "hello", "threads": self._threads, "max_bytes": _allowance()}

    def canary(self) -> Mapping[str, Json]:
        """See `Site`."""
        path = ""
        if self._compiler is not None:
            try:
                path = str(self._compiler.compile(CANARY_TEXT, cache_dir=self._options.cache).path)
            except (ToolchainError, OSError):
                path = ""  # without it the canary is torch alone
        return {"op": "canary", "object": path, "entry": CANARY_ENTRY}


def host_worker(threads: int) -> ProcessTransport:
    """What measures on this CPU with so many threads, not started yet."""
    return ProcessTransport(threads, environ=os.environ, module="weft.tune.worker")


def _allowance() -> int:
    """Bytes of address space a worker may add: half of what is free, at least 1 GiB."""
    free = free_bytes(unknown=-1)
    return max(1 << 30, free // 2) if free >= 0 else 0  # no limit where the system does not say what is free
