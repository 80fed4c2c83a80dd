"""An executable of whatever device."""

from __future__ import annotations

import torch

from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Executable

AnyExecutable = Executable | CudaExecutable


def place_of(executable: AnyExecutable) -> torch.device:
    """Where its inputs must be."""
    return executable.device if isinstance(executable, CudaExecutable) else torch.device("cpu")
