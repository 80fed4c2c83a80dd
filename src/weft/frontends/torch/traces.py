"""What tracing a module leaves with the framework until the process ends, beside the trace.

torch.fx keeps the text of modules for tracebacks: one export makes about ten modules. Fake tensors keep what every
operator gives for operands of some shapes, in one table that nothing bounds (`FakeTensorMode.cache`): some 50 entries,
85 KB, for each new shape of one transformer block. And each export gives the calling thread's context two variables
more, of settings that it changed meanwhile. A service that meets new shapes makes thousands of all three.
"""

from __future__ import annotations

import linecache
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import ParamSpec, TypeVar

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

P = ParamSpec("P")
R = TypeVar("R")
KEPT = 4096
"""Results of fake tensors that stay for the traces to come: some 7 MB, what a network of a hundred layers asks for."""
_kept: deque[object] = deque()
"""Keys of those of ours that may still be there, the oldest first."""


def traced(trace: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What `trace` gives. No text of it is left behind, no variable, and of all calls together `KEPT` results.

    What others leave there stays; of what another thread traces meanwhile some may go: the tracebacks of such a module
    lack its lines, and a result is computed anew. One thread at a time.
    """
    with _bounded():
        return copy_context().run(trace, *args, **kwargs)


@contextmanager
def _bounded() -> Iterator[None]:
    texts: dict[str, object] = getattr(getattr(graph_module, "_loader", None), "eval_cache", {})
    results: dict[object, object] = getattr(FakeTensorMode, "cache", {})
    text_before, result_before = set(texts), results.copy()
    try:
        yield
    finally:
        for name in [name for name in list(texts) if name not in text_before]:
            texts.pop(name, None)
            linecache.cache.pop(name, None)
        _kept.extend(key for key in list(results) if key not in result_before)
        while len(_kept) > KEPT:
            results.pop(_kept.popleft(), None)
