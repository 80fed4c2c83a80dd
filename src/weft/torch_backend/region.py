"""One compiled region of a model: a graph from aot_autograd, its executable, and eager as the way out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import fx
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from weft.errors import UnsupportedError, WeftError
from weft.frontends.torch import Program, Result, import_fx_program
from weft.options import Options
from weft.torch_backend.engine import Engine, Run

log = logging.getLogger("weft")
Compiled = Callable[[list[Any]], list[Any]]


def _summary(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


@final
class Region:
    """Called with a list of arguments, which it empties (the boxed convention of aot_autograd)."""

    def __init__(self, gm: fx.GraphModule, name: str) -> None:
        self.name = name
        self.fallback = ""
        """Why eager runs the region; empty while the executable does."""
        self.program: Program | None = None
        self._gm = gm
        self._run: Run | None = None
        self._lock = threading.Lock()

    def compile(self, example_inputs: Sequence[object], options: Options, engine: Engine) -> None:
        """Import and compile; whatever goes wrong leaves the region to eager, with one warning."""
        try:
            with _disable_current_modes(), torch.no_grad():
                self.program = import_fx_program(self._gm, example_inputs, device=options.device)
                if self.program.imported.graph.outputs:
                    self._run = engine(self.program.imported, options, eager_of(self._gm, self.program))
                else:
                    self._run = _nothing
        except UnsupportedError as error:
            self._fall_back(error, "is run by eager")
        except WeftError as error:
            self._fall_back(error, "could not be compiled and is run by eager")
        except Exception as error:
            # never the user's problem: eager gives the right answer, the log names the bug
            log.debug("weft: %s", self.name, exc_info=True)
            self._fall_back(error, "met a bug in Weft and is run by eager")

    def _fall_back(self, error: BaseException, what: str) -> None:
        with self._lock:
            first, self.fallback, self._run = not self.fallback, _summary(error), None
        if first:
            log.warning("weft: %s %s: %s", self.name, what, _summary(error))

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Results in the order of the graph; arguments that it mutates are written at the end."""
        given = list(arguments)
        arguments.clear()
        run, program = self._run, self.program
        if run is None or program is None:
            return self._eager(given)
        try:
            found = list(run([given[k] for k in program.arguments]))
            results = [_result(r, given, found) for r in program.results]
        except Exception as error:
            # nothing has been written yet, so eager may run the same call
            self._fall_back(error, "failed at run time and is run by eager from now on")
            return self._eager(given)
        for position, value in program.mutations:
            given[position].copy_(found[value])
        return results

    def boxed(self) -> Compiled:
        """The region as a function that dynamo may wrap without losing the mark of the boxed convention."""

        def run(arguments: list[Any]) -> list[Any]:
            return self(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _eager(self, given: list[Any]) -> list[Any]:
        found = self._gm(*given)
        return list(found) if isinstance(found, tuple | list) else [found]


def _nothing(_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return []


def eager_of(gm: fx.GraphModule, program: Program) -> Run:
    """The framework's own execution of what the primitive graph computes: its inputs in, its outputs out."""
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    flat = _pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    wanted = [node for node, result in zip(flat, program.results, strict=True) if result.value >= 0]
    copies = [n for n in gm.graph.nodes if str(n.target) == "aten.copy_.default"]
    graph = fx.Graph()
    found: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, found)
    graph.output(tuple(found[n] for n in (*wanted, *(c.args[1] for c in copies))))
    for copy in copies:
        graph.erase_node(found[copy])
    module = fx.GraphModule(gm, graph)
    template = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    fixed = [None if isinstance(x, torch.Tensor) else x for x in template]

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = list(fixed)
        for position, tensor in zip(program.arguments, tensors, strict=True):
            given[position] = tensor
        with torch.no_grad():
            return list(module(*given))

    return run


def _result(result: Result, given: Sequence[Any], found: Sequence[torch.Tensor]) -> Any:
    if result.argument >= 0:
        return given[result.argument]
    if result.value < 0:
        return result.static
    return with_strides(found[result.value], result.strides)


def with_strides(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The same values with the strides that eager would give; copied only where they differ.

    Later graphs were traced with those strides, and a `view` in them may not exist for others. Dimensions of stride 0
    are expanded from one element; strides that overlap otherwise are given up for contiguous ones.
    """
    shape = tuple(value.shape)
    if value.numel() == 0 or len(strides) != len(shape) or value.stride() == tuple(strides):
        return value
    if all(n == 1 or s == t for n, s, t in zip(shape, strides, value.stride(), strict=True)):
        return value.as_strided(shape, tuple(strides))
    base = value
    for k, (n, s) in enumerate(zip(shape, strides, strict=True)):
        if s == 0 and n > 1:
            base = base.narrow(k, 0, 1)
    order = sorted((s, n) for n, s in zip(base.shape, strides, strict=True) if n > 1)
    reach = 1
    for s, n in order:
        if s < reach:
            return value.contiguous()
        reach = s * (n - 1) + reach
    out = torch.empty_strided(base.shape, tuple(strides), dtype=value.dtype, device=value.device)
    return out.copy_(base).expand(shape)
