"""The `torch.compile` backend."""

from __future__ import annotations

from weft.torch_backend.backend import Backend, register, weft_backend, weft_backend_with
from weft.torch_backend.engine import Engine, Run, compiling_engine, reference_engine
from weft.torch_backend.region import Region

__all__ = [
    "Backend",
    "Engine",
    "Region",
    "Run",
    "compiling_engine",
    "reference_engine",
    "register",
    "weft_backend",
    "weft_backend_with",
]
