"""What tracing a module leaves with the framework until the process ends, beside the trace.

torch.fx keeps the text of modules for tracebacks: one export makes about ten modules. Fake tensors keep what every
operator gives for operands of some shapes, in one table that nothing bounds (`FakeTensorMode.cache`): some 50 entries,
85 KB, for each new shape of one transformer block. And each export gives the calling thread's context two variables
more, of settings that it changed meanwhile. A service that meets new shapes makes thousands of all three.
"""

from __future__ import annotations

import linecache
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from contextvars import copy_context
from threading import get_ident
from typing import Any, ParamSpec, TextIO, TypeVar, final

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

    The graph so far, hundreds of lines, which torch prints where a size depends on values, is not shown. What others
    leave there stays; of what another thread traces meanwhile some may go: the tracebacks of such a module
    lack its lines, and a result is computed anew. One thread at a time.
    """
    with _bounded(), redirect_stderr(_Unprinted(sys.stderr)):
        return copy_context().run(trace, *args, **kwargs)


@final
class _Unprinted:
    """What this thread prints of a graph does not reach the stream; all else does."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread, self._left_out = stream, get_ident(), False

    def write(self, text: str) -> int:
        """As of a stream."""
        if get_ident() != self._thread:
            return self._stream.write(text)
        ends, self._left_out = self._left_out and text == "\n", text.lstrip().startswith("def forward(")
        return len(text) if ends or self._left_out else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
