"""The text of traced modules, which torch.fx keeps for tracebacks until the process ends."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import graph_module


@contextmanager
def traced_text_dropped() -> Iterator[None]:
    """What is traced in the block leaves no text behind: one export makes about ten modules, a service makes thousands.

    A module that another thread traces meanwhile may lose its text too: its tracebacks then lack the lines.
    """
    kept: dict[str, str] = getattr(getattr(graph_module, "_loader", None), "eval_cache", {})
    before = set(kept)
    try:
        yield
    finally:
        for name in [name for name in list(kept) if name not in before]:
            kept.pop(name, None)
            linecache.cache.pop(name, None)
