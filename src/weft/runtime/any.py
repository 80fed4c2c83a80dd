"""An executable of whatever device."""

from __future__ import annotations

from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Executable

AnyExecutable = Executable | CudaExecutable
