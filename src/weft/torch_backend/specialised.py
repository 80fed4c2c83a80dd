"""One plan per seen shape: sizes that dynamo leaves open are fixed when they are met."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

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


@final
class Specialised:
    """Compiles on the first call with each combination of shapes and keeps the last `limit` of them."""

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
                plan = self._plans[key] = self._build(arguments)
                if len(self._plans) > self._limit:
                    self._plans.popitem(last=False)
            self._plans.move_to_end(key)
        return plan(*arguments)
