"""What makes two measurements comparable: full canonical descriptions, hashed only to find them.

Equality of the *text* is checked on every hit; a hash that agrees proves nothing. A timing belongs to one kernel (by
its content, whatever wrote it), problem, schedule, CPU model, number of threads, versions of torch and of the compiler,
and the sources of what measures. Timings never move between CPU models; they outlive changes of generators, importers
and of the search as long as the kernel's text stays what it was.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import weft
from weft.kernels.codec import Json, schedule_to_json
from weft.kernels.source import Schedule

if TYPE_CHECKING:
    from weft.device.facts import CpuFacts
    from weft.device.toolchain import HostCompiler
    from weft.tune.timing import TimingPolicy

KEY_VERSION = 2
"""Raised when the keys of timings are made in another way; rows with other keys are never found."""
MEASURING_PARTS = (
    "ir/prims.py",
    "ir/types.py",
    "kernels/formats.py",
    "generate/library/execute.py",
    "generate/library/opaque_aten.py",
    "generate/library/opaque_onnx.py",
    "tune/bulk.py",
    "tune/inputs.py",
    "tune/oracle.py",
    "tune/timing.py",
    "tune/tolerance.py",
    "tune/transport.py",
    "tune/verify.py",
    "tune/worker.py",
)
"""Their sources decide how any kernel is verified and timed, and how library calls run."""
HASHED_PARTS = (*MEASURING_PARTS, "device/launch.py", "device/toolchain.py", "tune/site.py")
"""Their sources decide what a verdict or a time on a CPU means."""
PLAN_PARTS = ("ir", "kernels", "fission", "generate", "orchestrate", "tune", "platform", "pipeline")
"""Their sources decide which plan is found."""
GPU_WORDS = frozenset({"cuda", "gpu", "nvrtc"})
"""A file with one of these in its name, or in a folder's above it, cannot matter to a CPU."""


class Described(Protocol):
    """An environment of any kind of device: equal texts, comparable times."""

    @property
    def text(self) -> str:
        """Canonical JSON."""
        ...


@dataclass(frozen=True, slots=True)
class Untimed:
    """An environment in which kernels are verified and not timed: its verdicts have no samples."""

    timed: Described
    """The environment in which they would be timed."""
    finite: bool
    """Whether only finite inputs are looked at."""

    @property
    def text(self) -> str:
        """Canonical JSON."""
        return canonical({"untimed": self.timed.text, "finite": self.finite})


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything outside a problem and a kernel that a timing on a CPU depends on."""

    cpu: str
    cores: int
    threads: int
    simd_bytes: int
    l2_bytes: int
    l3_bytes: int
    torch: str
    compiler: str
    """Version, target and flags; empty without one."""
    sources: str
    """Hash of the sources in `HASHED_PARTS`."""
    protocol: int
    verifier: int
    tolerance: str
    cache: str
    """`rotated` or `warm`."""
    seed: int

    @property
    def text(self) -> str:
        """Canonical JSON."""
        return canonical(asdict(self))


def describe_environment(
    facts: CpuFacts, compiler: HostCompiler | None, *, threads: int, seed: int, policy: TimingPolicy
) -> Environment:
    """The environment that kernels are measured in on this machine."""
    # whoever only looks at a database needs no framework
    import torch

    from weft.tune.inputs import SETS_VERSION
    from weft.tune.timing import PROTOCOL_VERSION
    from weft.tune.tolerance import table_hash
    from weft.tune.verify import VERIFIER_VERSION

    return Environment(
        cpu=facts.name,
        cores=facts.cores,
        threads=threads,
        simd_bytes=facts.simd_bytes,
        l2_bytes=facts.l2_bytes,
        l3_bytes=facts.l3_bytes,
        torch=str(torch.__version__),
        compiler=compiler.identity() if compiler is not None else "",
        sources=source_hash(PACKAGE, HASHED_PARTS),
        protocol=PROTOCOL_VERSION,
        verifier=VERIFIER_VERSION * 1000 + SETS_VERSION,
        tolerance=table_hash(),
        cache=policy.cache,
        seed=seed,
    )


PACKAGE = Path(weft.__file__ or ".").resolve().parent


@cache
def source_hash(package: Path, parts: tuple[str, ...], *, without: frozenset[str] = frozenset()) -> str:
    """SHA-256 over names and bytes of the sources that decide about something.

    Args:
        package: the folder that the others are in.
        parts: folders or files in it.
        without: words; files with one of them in their path (`generate/cuda/x.py`, `tune/cuda_site.py`) do not count.
    """
    state = hashlib.sha256()
    for part in parts:
        place = package / part
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix not in (".py", ".h", ".jinja", ".cu", ".cpp", ".json") or not path.is_file():
                continue  # caches of the interpreter and the like
            name = path.relative_to(package)
            if without & set(re.split(r"[/_.]", name.as_posix())):
                continue  # another kind of device
            state.update(f"{name.as_posix()}\0".encode())
            state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()


def canonical(value: Json) -> str:
    """One text per JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """SHA-256 (hex)."""
    return hashlib.sha256(text.encode()).hexdigest()


def timing_key(problem_key: str, schedule: Schedule, kernel: str, environment: str) -> str:
    """Canonical text of the key of one timing.

    Args:
        problem_key: of the problem that the kernel solves.
        schedule: which one it claims to be.
        kernel: `weft.kernels.codec.kernel_sha256` of what ran.
        environment: the text of the environment that it ran in.
    """
    described: Json = {
        "environment": environment,
        "kernel": kernel,
        "problem": problem_key,
        "schedule": canonical(schedule_to_json(schedule)),
        "version": KEY_VERSION,
    }
    return canonical(described)
