"""One plan per seen shape: sizes that dynamo leaves open are fixed when they are met."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch._dynamo import convert_frame

Key = tuple[object, ...]


def key_of(arguments: Sequence[object]) -> Key:
    """What a plan is specialised to: types, shapes, strides and devices of tensors, the values of everything else."""
    return tuple(
        (a.dtype, tuple(a.shape), a.stride(), a.device, a.requires_grad)
        if isinstance(a, torch.Tensor)
        else (type(a).__name__, a if isinstance(a, bool | int | float | str | None) else id(a))
        for a in arguments
    )


def is_symbolic(value: object) -> bool:
    """Whether an example argument has a size that is not fixed."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _session() -> AbstractContextManager[None]:
    """Marks a compilation in progress; torch before 2.13 has no such mark."""
    found = vars(torch.compiler).get("_compile_session_context", nullcontext)
    context: AbstractContextManager[None] = found()
    return context


@final
class Specialised:
    """Compiles on the first call with each combination of shapes; the `limit` (at least 1) used last are kept."""

    def __init__(self, build: Callable[[Sequence[Any]], Callable[..., Any]], limit: int) -> None:
        self._build = build
        self._limit = max(limit, 1)
        self._plans: OrderedDict[Key, Callable[..., Any]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._plans)

    def __call__(self, *arguments: Any) -> Any:
        """Run the plan of these shapes."""
        key = (torch.is_grad_enabled(), *key_of(arguments))
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                # torch's tracers share process-wide state: one at a time, and other threads must see a compilation
                with convert_frame.compile_lock, _session():
                    plan = self._plans[key] = self._build(arguments)
                if len(self._plans) > self._limit:
                    self._plans.popitem(last=False)
            self._plans.move_to_end(key)
        return plan(*arguments)
