"""One plan per seen shape: sizes that dynamo leaves open are fixed when they are met."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import fx
from torch._dynamo import convert_frame

from weft.runtime.single_flight import SingleFlightCache

log = logging.getLogger("weft")
Key = tuple[object, ...]


def key_of(arguments: Sequence[object]) -> Key:
    """What a plan is specialised to: types, shapes, strides and devices of tensors, the values of everything else."""
    return tuple(
        (a.dtype, tuple(a.shape), a.stride(), a.device, a.requires_grad)
        if isinstance(a, torch.Tensor)
        else (type(a).__name__, _bits(a) if isinstance(a, bool | int | float | str | None) else id(a))
        for a in arguments
    )


def _bits(value: object) -> object:
    """Tells a zero from its negative, and finds NaN again."""
    return value.hex() if isinstance(value, float) else value


def scalars_of(gm: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """By position the arguments that are numbers of the caller, with the nodes that read their values.

    dynamo passes a float that it leaves open as a tensor, and has its value read in the graph.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    reads = {
        k: [u for u in p.users if u.op == "call_method" and u.target == "item"] for k, p in enumerate(placeholders)
    }
    return {k: found for k, found in reads.items() if found}


def with_scalars(gm: fx.GraphModule, arguments: Sequence[Any], scalars: dict[int, list[fx.Node]]) -> fx.GraphModule:
    """The graph with the values that these arguments have now."""
    if not scalars:
        return gm
    known: dict[fx.Node, Any] = {node: arguments[k].item() for k, nodes in scalars.items() for node in nodes}
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, known))
    return fx.GraphModule(gm, graph)


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
    """Compiles on the first call with each combination of shapes; the `limit` (at least 1) used last are kept.

    Arguments at the positions `scalars` count by their values; where `limit` values were met, eager runs others.
    """

    def __init__(
        self,
        build: Callable[[Sequence[Any]], Callable[..., Any]],
        limit: int,
        scalars: Collection[int] = (),
        eager: Callable[..., Any] | None = None,
    ) -> None:
        self._build = build
        self._limit = max(limit, 1)
        self._scalars = tuple(scalars)
        self._eager = eager
        self._values: set[Key] = set()
        self._told = False
        self._plans: SingleFlightCache[Key, Callable[..., Any]] = SingleFlightCache(limit)
        self._lock = threading.Lock()
        """Of the values that were met."""

    def __len__(self) -> int:
        return len(self._plans)

    def __call__(self, *arguments: Any) -> Any:
        """Run the plan of these shapes."""
        values = tuple(_bits(arguments[k].item()) for k in self._scalars)
        key = (torch.is_grad_enabled(), values, *key_of(arguments))
        plan = self._plans.known(key)
        if plan is None and self._eager is not None and not self._takes(values):
            plan = self._eager
        if plan is None:
            plan = self._plans.get(key, lambda: self._built(arguments))
        return plan(*arguments)

    def _built(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        # torch's tracers share process-wide state: one at a time, and other threads must see a compilation
        with convert_frame.compile_lock, _session():
            return self._build(arguments)

    def _takes(self, values: Key) -> bool:
        """Whether there are plans for these values of the scalars, or may be."""
        with self._lock:
            if values in self._values:
                return True
            if len(self._values) < self._limit:
                self._values.add(values)
                return True
            told, self._told = self._told, True
        if not told:
            log.warning("weft: a number of the caller's had %d values: eager runs the graph for others", self._limit)
        return False
