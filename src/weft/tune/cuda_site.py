"""The parent's side of measuring on an NVIDIA GPU: compile through NVRTC, gate by resources, describe, start a worker.

The parent needs no CUDA context for any of it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import torch

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, Nvrtc, gate
from weft.device.cuda.resources import gate as fit
from weft.errors import DeviceError, ToolchainError
from weft.ir.declined import Declined
from weft.kernels.codec import Json
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource, KernelSource
from weft.options import Options
from weft.tune.cuda_shaken import Shaken, shaken
from weft.tune.cuda_subject import LATE_TEXT, SOIL_TEXT
from weft.tune.cuda_timing import CUDA_POLICY, CUDA_PROTOCOL_VERSION
from weft.tune.inputs import SETS_VERSION
from weft.tune.keys import MEASURING_PARTS, PACKAGE, canonical, source_hash
from weft.tune.site import CANARY_ENTRY, Built, Refused
from weft.tune.timing import TimingPolicy
from weft.tune.tolerance import table_hash
from weft.tune.transport import ProcessTransport, Transport
from weft.tune.verify import VERIFIER_VERSION

CANARY_TEXT = """extern "C" __global__ void weft_canary(const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i] * 2.0f + 1.0f;
}
"""
"""Launched with 4096 threads."""
HASHED_PARTS = (
    *MEASURING_PARTS,
    "device/cuda/cublaslt.py",
    "device/cuda/cudnn.py",
    "device/cuda/driver.py",
    "device/cuda/nvrtc.py",
    "device/cuda/resources.py",
    "device/cuda/tensor_map.py",
    "generate/bind.py",
    "generate/library/algorithm.py",
    "generate/library/attention_call.py",
    "generate/library/conv_call.py",
    "generate/library/lt_call.py",
    "tune/cuda_device.py",
    "tune/cuda_shaken.py",
    "tune/cuda_site.py",
    "tune/cuda_subject.py",
    "tune/cuda_timing.py",
    "tune/cuda_trial.py",
    "tune/cuda_worker.py",
)
"""Their sources decide what a verdict or a time on a GPU means."""


@dataclass(frozen=True, slots=True)
class CudaEnvironment:
    """Everything outside a problem and a kernel that a timing on a GPU depends on."""

    gpu: str
    capability: int
    sms: int
    memory_bytes: int
    l2_bytes: int
    driver: str
    cuda: str
    cudnn: str
    torch: str
    compiler: str
    """NVRTC's version and the target; empty without one."""
    allow_tf32: bool
    sources: str
    """Hash of the sources in `HASHED_PARTS`."""
    protocol: int
    verifier: int
    tolerance: str
    cache: str
    """Policy of `weft.tune.cuda_timing`."""
    seed: int

    @property
    def text(self) -> str:
        """Canonical JSON."""
        return canonical(asdict(self))


def describe_gpu(
    facts: GpuFacts, compiler: Nvrtc | None, *, seed: int, policy: TimingPolicy, allow_tf32: bool
) -> CudaEnvironment:
    """The environment that kernels are measured in on this GPU."""
    return CudaEnvironment(
        gpu=facts.name,
        capability=facts.capability,
        sms=facts.sms,
        memory_bytes=facts.memory_bytes,
        l2_bytes=facts.l2_bytes,
        driver=driver_version(),
        cuda=str(torch.version.cuda),
        cudnn=str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        torch=str(torch.__version__),
        compiler=f"{compiler.identity()} {facts.arch}" if compiler is not None else "",
        allow_tf32=allow_tf32,
        sources=source_hash(PACKAGE, HASHED_PARTS),
        protocol=CUDA_PROTOCOL_VERSION,
        verifier=VERIFIER_VERSION * 1000 + SETS_VERSION,
        tolerance=table_hash(),
        cache=policy.cache,
        seed=seed,
    )


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of the kernel module; `unknown` where the system does not say."""
    try:
        found = re.search(r"Kernel Module\S*\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", path.read_text(errors="replace"))
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"


@final
class CudaSite:
    """One GPU of this machine."""

    start_waits_s = (0.0, 1.0, 5.0, 15.0)
    """A GPU on which a kernel was killed may need some time before it runs another."""
    builds_ahead = True

    def __init__(self, options: Options, facts: GpuFacts, compiler: Nvrtc | None, policy: TimingPolicy | None) -> None:
        self._options, self._facts, self._compiler = options, facts, compiler
        self.policy = policy or CUDA_POLICY
        self.jobs = jobs_of(options)
        self.l2_bytes = facts.l2_bytes
        self.environment = describe_gpu(
            facts, compiler, seed=options.seed, policy=self.policy, allow_tf32=options.allow_tf32
        )

    def build(self, kernel: KernelSource | CudaSource, left_s: float = math.inf) -> Built | Refused:
        """Compile for exactly this GPU; a kernel that spills, does not fit or would be serialised is refused."""
        if isinstance(kernel, KernelSource):
            return Refused(Verdict.RESOURCE, "a kernel for the CPU on a GPU")
        if kernel.capability > self._facts.capability:
            need = f"needs compute capability {kernel.capability}, {self._facts.name} has {self._facts.capability}"
            return Refused(Verdict.RESOURCE, need)
        if self._compiler is None:
            return Refused(Verdict.COMPILE, "no NVRTC")
        try:
            made = self._cubin(self._compiler, kernel, left_s)
        except ToolchainError as error:
            return Refused(Verdict.COMPILE, f"{error}\n{error.log}")
        except (DeviceError, OSError, ValueError) as error:
            return Refused(Verdict.COMPILE, f"{type(error).__name__}: {error}")
        for launch in (*kernel.launches, *kernel.pack):
            declined = gate(made, launch, self._facts)
            # packing happens once, so it may be slow, but it must run
            if isinstance(declined, Declined) and not (launch in kernel.pack and "spilled" in declined.reason):
                return Refused(Verdict.RESOURCE, f"{launch.entry}: {declined.reason}")
        return Built(str(made.path), made.seconds)

    def _cubin(self, compiler: Nvrtc, kernel: CudaSource, left_s: float) -> CompiledCubin:
        return compiler.compile(
            kernel.text,
            arch=self._facts.arch,
            flags=kernel.flags,
            max_registers=kernel.max_registers,
            cache_dir=self._options.cache,
            timeout_s=min(self._options.compile_timeout_s, left_s),
        )

    def shaken(self, kernel: KernelSource | CudaSource) -> Shaken | None:
        """See `Site`."""
        return shaken(kernel) if isinstance(kernel, CudaSource) else None

    def build_shaken(self, form: Shaken, left_s: float = math.inf) -> str:
        """See `Site`."""
        if self._compiler is None:
            return ""
        try:
            made = self._cubin(self._compiler, form.source, left_s)
        except (DeviceError, ToolchainError, OSError, ValueError):
            return ""
        fits = [fit(made.resources, (), x, self._facts, max_spill_bytes=1 << 30) for x in form.source.launches]
        return "" if any(isinstance(x, Declined) for x in fits) else str(made.path)

    def transport(self) -> Transport:
        """See `Site`."""
        return cuda_worker(self._options)

    def hello(self) -> Mapping[str, Json]:
        """See `Site`."""
        index = device_index(self._options.device)
        return {
            "op": "hello",
            "device": index,
            "allow_tf32": self._options.allow_tf32,
            "late": self._compiled(LATE_TEXT),
            "soil": self._compiled(SOIL_TEXT),
            "sms": self._facts.sms,
            "shared_bytes": self._facts.shared_per_block,
        }

    def canary(self) -> Mapping[str, Json]:
        """See `Site`."""
        return {"op": "canary", "object": self._compiled(CANARY_TEXT), "entry": CANARY_ENTRY}

    def _compiled(self, text: str) -> str:
        """The cubin of a small kernel of our own; empty where nothing compiles: the worker then does without."""
        if self._compiler is None:
            return ""
        try:
            return str(self._compiler.compile(text, arch=self._facts.arch, cache_dir=self._options.cache).path)
        except (DeviceError, ToolchainError, OSError, ValueError):
            return ""


def jobs_of(options: Options) -> int:
    """Compilations that may run at once: the worker that enqueues what is timed keeps cores of its own."""
    return options.build_jobs or max(1, len(os.sched_getaffinity(0)) - 2)


def cuda_worker(options: Options) -> ProcessTransport:
    """What measures on a GPU, not started yet; its greeting says which."""
    threads = options.threads or min(4, jobs_of(options))
    return ProcessTransport(threads, environ=os.environ, module="weft.tune.cuda_worker")


def device_index(device: str) -> int:
    """Number of the GPU that `cuda` or `cuda:N` names; 0 for anything else."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" and number.isdecimal() else 0
