"""Which ATen operators torch itself takes apart before the import: those without a handler of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions

from weft.frontends.torch.table import KEPT, TABLE

Decompositions = dict[torch._ops.OpOverload, Callable[..., Any]]


@lru_cache(maxsize=1)
def _table() -> Decompositions:
    core: Decompositions = core_aten_decompositions()  # type: ignore[assignment]
    return {op: f for op, f in core.items() if str(op) not in TABLE and str(op) not in KEPT}


def decompositions() -> Decompositions:
    """torch's core table without the operators that a handler takes whole, e.g. silu or attention.

    A whole operator is worth more than its parts: its origin names the library call that does the same work.
    """
    return dict(_table())
