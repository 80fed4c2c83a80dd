"""A backend that tells what became of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.options import Options
from weft.torch_backend import Backend, Region, reference_engine


class Seen:
    """A backend on the reference engine that remembers its regions."""

    def __init__(self, engine: Any = reference_engine, **options: Any) -> None:
        self.regions: list[Region] = []
        self.backend = Backend(Options(**options), engine, self.regions.append)

    def compile(self, model: Callable[..., Any], **kwargs: Any) -> Any:
        return torch.compile(model, backend=self.backend, **kwargs)

    def fallbacks(self) -> Any:
        return [r.fallback for r in self.regions if r.fallback]
