"""Operators of the framework by their deterministic forms."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """Operators that have a deterministic form take it; others are errors, or what torch says of them is not heard."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(_WORKSPACE)
    # torch's own function of the name loads the compiler's settings, and changes them
    change = torch._C._set_deterministic_algorithms
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            change(True, warn_only=warn_only)
            memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            os.environ.setdefault(_WORKSPACE, ":4096:8")  # else no product is deterministic to torch
            yield
        finally:
            if workspace is None:
                os.environ.pop(_WORKSPACE, None)
            change(before[0], warn_only=before[1])
            memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
