"""A stand-in for CUDA graphs: what torch's operations do is written down, undone, and done again by a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.nn import emulation
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.nn import graphed

WAITS = torch.ops.aten._local_scalar_dense.default


class Graph(TorchDispatchMode):
    """As `torch.cuda.CUDAGraph`: outputs of operations stay where they were when these were recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.does: list[Callable[[], None]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.written: dict[int, torch.Tensor] = {}
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(t, t.clone()) for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
                self.written |= {id(t): t for t in tree_leaves(value) if isinstance(t, torch.Tensor)}
        found = func(*args, **kwargs)
        fresh = all(r.alias_info is None for r in func._schema.returns)
        places = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)] if fresh else []

        def again() -> None:
            results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            for to, result in zip(places, results, strict=False):
                to.copy_(result)

        self.does.append(again)
        return found

    def undo(self) -> None:
        """Recording computes nothing."""
        with torch.no_grad():
            for tensor, values in reversed(self.before):
                tensor.copy_(values)
        self.before.clear()

    def replay(self) -> None:
        """Nobody on the host hears of what is written."""
        self.replays += 1
        versions = _unsafe_preserve_version_counter(tuple(self.written.values()))
        with torch.no_grad(), versions:
            for does in self.does:
                does()


graphs: list[Graph] = []
"""That were recorded."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's tensors are those of a GPU whose graphs these are."""
    recording: list[Graph] = []

    @contextmanager
    def graph(made: Graph) -> Iterator[None]:
        recording.append(made)
        try:
            with made:
                yield
        finally:
            recording.pop()
            made.undo()
        graphs.append(made)

    plain = emulation.Direct.launch

    def launch(self: emulation.Direct, stream: int) -> None:
        if not recording:
            return plain(self, stream)
        words = list(self.words)
        recording[-1].does.append(lambda: emulation.start(self._library, self._launch, words))
        return None

    def new_stream() -> Any:
        return SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)

    for name, value in (
        ("CUDAGraph", Graph), ("graph", graph), ("Stream", new_stream), ("current_stream", new_stream),
        ("stream", lambda s: nullcontext()), ("is_current_stream_capturing", lambda: bool(recording)),
        ("current_device", lambda: torch.zeros(()).get_device()),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graphed, "on_gpu", lambda x: True)
    monkeypatch.setattr(emulation.Direct, "launch", launch)
    graphs.clear()
