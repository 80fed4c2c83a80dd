"""One compiled region of a model: a graph from aot_autograd, its executable, and eager as the way out."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

import torch
from torch import fx
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from weft.errors import UnsupportedError, WeftError
from weft.frontends.torch import Program, Result, import_fx_program
from weft.options import Options
from weft.runtime.indices import IndexOutsideError
from weft.torch_backend.engine import Engine, Run
from weft.torch_backend.weights import MAX_RENEWALS, Weights, can_watch

log = logging.getLogger("weft")
Compiled = Callable[[list[Any]], list[Any]]
_NO_WEIGHTS: Mapping[int, torch.Tensor] = MappingProxyType({})


def _summary(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


@dataclass(frozen=True)
class Linked:
    """What runs a region, and the weights that it holds as constants."""

    program: Program
    run: Run
    weights: Weights


@final
class Region:
    """Called with a list of arguments, which it empties (the boxed convention of aot_autograd).

    Compiled with the values of `weights`, by position; a call that brings others compiles again, and a tensor that
    keeps changing becomes an argument. Of other tensors in their places, as equal layers have that share a graph, up to
    `sets` are compiled beside each other. Plans are judged on the values of `integers`, by position, where they are
    known.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        name: str,
        weights: Mapping[int, torch.Tensor] = _NO_WEIGHTS,
        integers: Mapping[int, torch.Tensor] = _NO_WEIGHTS,
        sets: int = 1,
    ) -> None:
        self.name = name
        self.fallback = ""
        """Why eager runs the region; empty while the executable does."""
        self.compilations = 0
        self._gm = gm
        self._constants = dict(weights)
        with _disable_current_modes():  # aot_autograd's are for tensors without values
            self._integers = {k: x.detach().cpu().numpy().copy() for k, x in integers.items()}
        self._changes: Counter[int] = Counter()
        self._linked: Linked | None = None
        self._sets = sets
        self._known: dict[tuple[int, ...], Linked] = {}
        """By the weights that each holds; empty where one is all that is kept."""
        self._build: Callable[[], Linked] | None = None
        self._lock = threading.RLock()

    @property
    def program(self) -> Program | None:
        """What was imported; None while eager runs the region."""
        return self._linked.program if self._linked is not None else None

    def compile(self, example_inputs: Sequence[object], options: Options, engine: Engine) -> None:
        """Import and compile; whatever goes wrong leaves the region to eager, with one warning."""

        def build() -> Linked:
            with _disable_current_modes(), torch.no_grad():
                weights = Weights(self._constants)  # first: a change from here on is noticed
                constants = weights.tensors
                program = import_fx_program(self._gm, example_inputs, device=options.device, constants=constants)
                if not program.imported.graph.outputs:
                    return Linked(program, _nothing, weights)
                eager = eager_of(self._gm, program, constants)
                places = enumerate(program.arguments)
                integers = {n: self._integers[k] for n, k in places if k in self._integers}
                imported = replace(program.imported, integers=integers)
                return Linked(program, engine(imported, options, eager), weights)

        self._build = build
        self._link()

    def _link(self) -> None:
        assert self._build is not None
        try:
            self.compilations += 1
            self._linked = self._build()
            if self._sets > 1:
                self._known[self._key(self._linked.weights.tensors)] = self._linked
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
            first, self.fallback, self._linked = not self.fallback, _summary(error), None
        if first:
            log.warning("weft: %s %s: %s", self.name, what, _summary(error))

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Results in the order of the graph; arguments that it mutates are written at the end."""
        given = list(arguments)
        arguments.clear()
        linked = self._current(given)
        if linked is None:
            return self._eager(given)
        program = linked.program
        try:
            found = list(linked.run([given[k] for k in program.arguments]))
            results = [_result(r, given, found) for r in program.results]
        except IndexOutsideError:
            raise  # asked for by `check_indices`: eager would raise too, or end this process's use of a GPU
        except Exception as error:
            # nothing has been written yet, so eager may run the same call
            self._fall_back(error, "failed at run time and is run by eager from now on")
            return self._eager(given)
        for position, value in program.mutations:
            given[position].copy_(found[value])
        return results

    def _current(self, given: Sequence[Any]) -> Linked | None:
        """What was compiled with the weights of this call, compiled again if need be; None: eager."""
        linked = self._of(given)
        if linked is None or not linked.weights.changed(given):
            return linked
        with self._lock:
            while (linked := self._of(given)) is not None and (changed := linked.weights.changed(given)):
                if self._key(given) in self._known or max(len(self._known), 1) >= self._sets:
                    self._changes.update(changed)
                odd = {k for k in changed if self._changes[k] > MAX_RENEWALS or not can_watch(given[k])}
                if odd:
                    self._known.clear()
                self._constants = {k: given[k] for k in self._constants if k not in odd}
                log.debug("weft: %s: %d weights changed and are compiled in again", self.name, len(changed))
                self._link()
            return linked

    def _of(self, given: Sequence[Any]) -> Linked | None:
        """What may have been compiled with the weights of this call."""
        linked = self._linked
        return linked if linked is None else self._known.get(self._key(given), linked)

    def _key(self, given: Sequence[Any] | Mapping[int, Any]) -> tuple[int, ...]:
        return tuple(id(given[k]) for k in self._constants) if self._sets > 1 else ()

    def boxed(self) -> Compiled:
        """The region as a function that dynamo may wrap without losing the mark of the boxed convention."""
        return _marked(self)

    def _eager(self, given: list[Any]) -> list[Any]:
        found = self._gm(*given)
        return list(found) if isinstance(found, tuple | list) else [found]


def _marked(run: Compiled) -> Compiled:
    def marked(arguments: list[Any]) -> list[Any]:
        return run(arguments)

    marked._boxed_call = True  # type: ignore[attr-defined]
    return marked


def boxed(function: Callable[..., Any]) -> Compiled:
    """A function of single arguments in the boxed convention: it is called with a list, which it empties."""

    def run(arguments: list[Any]) -> list[Any]:
        given = list(arguments)
        arguments.clear()
        found = function(*given)
        return list(found) if isinstance(found, tuple | list) else [found]

    return _marked(run)


def _nothing(_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return []


def eager_of(gm: fx.GraphModule, program: Program, constants: Mapping[int, torch.Tensor] = _NO_WEIGHTS) -> Run:
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
    fixed = [constants.get(k, None if isinstance(x, torch.Tensor) else x) for k, x in enumerate(template)]

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
