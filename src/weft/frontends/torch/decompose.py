"""Which ATen operators torch itself takes apart before the import: those without a handler of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, final

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


@final
class _Whole:
    """Operators that are traced whole for a time, by how many at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._held: list[tuple[Any, dict[Any, Any]]] = []

    def enter(self) -> None:
        """Kernels of Python, which take them apart before autograd sees them, are set aside."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
            for op in _resizes():
                self._held.append((op, {k: op.py_kernels.pop(k) for k in keys if k in op.py_kernels}))
                op._dispatch_cache.clear()

    def leave(self) -> None:
        """The last to leave puts them back."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for op, kernels in self._held:
                op.py_kernels.update(kernels)
                op._dispatch_cache.clear()
            self._held.clear()


@lru_cache(maxsize=1)
def _resizes() -> tuple[Any, ...]:
    names = [name.split(".") for name in TABLE if "upsample_" in name and "backward" not in name]
    packets = [(getattr(torch.ops.aten, name, None), overload) for _, name, overload in names]
    return tuple(getattr(p, overload) for p, overload in packets if p is not None and overload in p.overloads())


_WHOLE = _Whole()


@contextmanager
def whole_resizes() -> Iterator[None]:
    """Resizes of images are traced whole, and so are their gradients.

    torch has kernels of Python for them, which no table of decompositions turns off: a gather by computed positions,
    whose gradient adds up by positions of which nothing is known.
    """
    _WHOLE.enter()
    try:
        yield
    finally:
        _WHOLE.leave()
