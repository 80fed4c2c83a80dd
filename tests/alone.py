"""A test depends on nothing that ran before it: its random numbers come from its name, it leaves things as they were.

A hook of `tests/conftest.py` calls these. `--shuffle SEED` runs the tests in another order, to find those that do.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch

SIGNALS = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
LAZY = (
    "PYTEST_",
    "TORCHINDUCTOR_",
    "KINETO_",
    "CUDA_",
    "NCCL_",
    "TRITON_",
    "HF_",
    "XLA_",
    "TF_",
    "KMP_",
    "TOKENIZERS_",
)
"""Beginnings of variables that libraries set for themselves when they are first used."""


def number_of(name: str) -> int:
    """The seed that belongs to a name: the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def seed(name: str) -> None:
    """Seed the generators of the process: Python's, NumPy's and torch's, on every device."""
    number = number_of(name)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - what libraries draw from
    torch.manual_seed(number)


def drawn() -> tuple[object, ...]:
    """The states of these generators, to be compared."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest), bytes(torch.get_rng_state().numpy())


@contextmanager
def aside(name: str) -> Iterator[None]:
    """Seeded by this name inside, as before outside: for what several tests share, whoever of them is first."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    there = torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if there else []
    seed(name)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if there:
            torch.cuda.set_rng_state_all(devices)


def surroundings() -> dict[str, object]:
    """What a test may change for those behind it."""
    found: dict[str, object] = {
        "torch's threads": torch.get_num_threads(),
        "torch's default type": torch.get_default_dtype(),
        "torch's gradients": torch.is_grad_enabled(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "NumPy's errors": np.geterr(),
        "garbage collection": gc.isenabled(),
        "recursion limit": sys.getrecursionlimit(),
        "working directory": Path.cwd(),
        "sys.path": tuple(sys.path),
        "umask": _umask(),
    }
    found |= {f"handler of {s.name}": signal.getsignal(s) for s in SIGNALS}
    return found | {f"${k}": v for k, v in os.environ.items() if not k.startswith(LAZY)}


def _umask() -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(x.split()[1], 8) for x in lines if x.startswith("Umask:")), -1)


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """One line for each thing that is not as it was."""
    names = sorted(before.keys() | after.keys())
    return [f"{n}: {before.get(n)!r} -> {after.get(n)!r}" for n in names if before.get(n) != after.get(n)]


class Placed(Protocol):
    """A test, as far as its order is concerned."""

    @property
    def path(self) -> Path: ...


Item = TypeVar("Item", bound=Placed)


def shuffled(items: list[Item], number: int) -> list[Item]:
    """Another order: tests within their file, each file in two parts, and all parts.

    Two, as what a file's tests share is made anew for each part.
    """
    chance = random.Random(number)
    parts: list[list[Item]] = []
    for _, together in groupby(sorted(items, key=lambda x: str(x.path)), key=lambda x: x.path):
        own = list(together)
        chance.shuffle(own)
        cut = chance.randint(0, len(own))
        parts += [own[:cut], own[cut:]]
    chance.shuffle(parts)
    return [item for part in parts for item in part]
