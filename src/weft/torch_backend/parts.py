"""A module that no one plan holds: what can be in plans is compiled, and the framework runs what is between.

A module that was exported is cut at the calls of its program that no plan holds (`split.py`), without another trace.
Else dynamo cuts it, where Python decides by the values of tensors or an operator gives as many as these ask for, and
each of its graphs is cut so; the module runs once for that, and what that run did not come to, eager runs when it is met.
Then every part is compiled with its share of the time that is left.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

import torch
from torch import fx

from weft.errors import WeftError
from weft.frontends.imported import Imported
from weft.options import Options
from weft.pipeline.compile import compile_imported
from weft.pipeline.job import Compilation
from weft.torch_backend.backend import Backend, parts_of
from weft.torch_backend.engine import Run, run_of
from weft.torch_backend.region import Region
from weft.torch_backend.weights import can_watch, given_integers

_WITHOUT_LIMIT: Mapping[str, Any] = MappingProxyType(
    {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}
)
WAYS: tuple[Mapping[str, Any], ...] = (
    {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True},
    {"capture_dynamic_output_shape_ops": True},
    {},
)
"""Of dynamo, to cut a module; the first that works. What depends on values is in graphs, too, which are cut there: a
break in a loop would leave all of it to Python."""
LEAST_S = 0.25
"""Of a budget, for one part; less is no time to compile anything, and the part stays with eager."""


@dataclass
class _Late:
    """What runs a part: the framework, until there is something better."""

    imported: Imported
    eager: Run
    options: Options
    run: Run
    compilation: Compilation | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.run(tensors)

    @property
    def size(self) -> int:
        """Nodes that compute something, about."""
        return 1 + self.imported.operators


def _alive(reference: weakref.ref[InParts]) -> InParts:
    found = reference()
    assert found is not None, "who calls its module holds it"
    return found


class _Cut:
    """What was met of a model while it was cut: the framework runs it until it is compiled. Thread-safe."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.RLock()
        self._closed = False
        """Whether parts are met no more."""
        self._begin()

    def _begin(self) -> None:
        """Nothing is cut yet."""
        self._late: list[_Late] = []
        self.regions: list[Region] = []
        self._backend = Backend(self._options, self._engine, self.regions.append)

    @property
    def compilations(self) -> list[Compilation]:
        """Of the parts that were compiled, in the order in which they were met."""
        return [x.compilation for x in self._late if x.compilation is not None]

    def _compiled(self, left_s: Callable[[], float]) -> int:
        """Compile the parts in the seconds that are left; how many are in plans."""
        with self._lock:
            sizes = sum(x.size for x in self._late)
            for late in list(self._late):
                share = late.size / sizes
                sizes -= late.size
                budget_s = max(0.0, left_s() * share) if self._options.budget_s > 0 else 0.0
                self._finish(late, budget_s)
        return sum(c.eager is None for c in self.compilations)

    def _engine(self, imported: Imported, options: Options, eager: Run) -> Run:
        late = _Late(imported, eager, options, eager)
        with self._lock:
            if not self._closed:
                self._late.append(late)
        return late

    def _finish(self, late: _Late, budget_s: float) -> None:
        if budget_s < LEAST_S and self._options.budget_s > 0:
            return
        options = replace(late.options, budget_s=budget_s)
        try:
            found = compile_imported(late.imported, options, eager=lambda *tensors: late.eager(tensors))
        except WeftError:
            return  # the framework runs it
        late.compilation, late.run = found, run_of(found, late.eager)


@final
class ProgramInParts(_Cut):
    """An exported program as a function of its inputs, most of it in plans: its graph is cut without another trace."""

    def __init__(self, graph: fx.GraphModule, held: Sequence[torch.Tensor], options: Options) -> None:
        """`graph` takes the tensors `held` and then the program's inputs, see `frontends.torch.as_function`."""
        super().__init__(options)
        self._graph, self._held = graph, tuple(held)
        self._places = {_place(x) for x in held}
        self._run: Callable[[list[Any]], Sequence[Any]] | None = None

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The program's outputs; what lies in an input or a weight is copied."""
        assert self._run is not None, "it is cut"
        with torch.no_grad():
            found = self._run([*self._held, *inputs])
        theirs = {_place(x) for x in inputs}
        return [x.clone() if (place := _place(x)) in theirs or place in self._places else x for x in found]

    def cut(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Cut the graph, if something is won by parts: from then on it can be called. `inputs`: parts are judged on."""
        with self._lock:
            parts = parts_of(self._graph, (), _PROGRAM, self._options.device)
            if parts is not None:
                weights = {k: x for k, x in enumerate(self._held) if self._options.freeze_weights and can_watch(x)}
                integers = given_integers((*(None for _ in self._held), *inputs))
                self._run = self._backend.in_parts(parts, _PROGRAM, self._options, weights, integers)
            self._closed = True
            return bool(self._late)

    def compile(self, left_s: Callable[[], float]) -> int:
        """Compile the parts in the seconds that are left; how many are in plans: eager may be faster for some."""
        return self._compiled(left_s)


_PROGRAM = "the exported program"


def _place(tensor: torch.Tensor) -> int:
    """Of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


@final
class InParts(_Cut):
    """A module as a function, most of it in plans."""

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        self._module = module
        self._left_s: Callable[[], float] = lambda: math.inf
        super().__init__(options)

    def _begin(self) -> None:
        """Nothing is cut yet."""
        super()._begin()
        self._functions: list[Callable[..., Any]] = []
        myself = weakref.ref(self)

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            found = _alive(myself)
            if found._closed:  # a path not taken before, or a size that depends on values: no call waits for a search
                return gm.forward
            if found._left_s() <= 0:  # eager keeps what there was no time to cut
                return gm.forward
            found._functions.append(found._backend(gm, example_inputs))
            position = len(found._functions) - 1

            def run(*arguments: Any) -> Any:
                return _alive(myself)._functions[position](*arguments)

            return run

        self.module: Any = torch.compile(self._module, backend=backend, dynamic=False)
        """Called as the module is. What dynamo keeps of it for good, under the text of its class, holds no weights."""

    def compile(self, call: Callable[[], object], left_s: Callable[[], float]) -> int:
        """Cut the module by `call`, which runs it, and compile its parts in the seconds that are left.

        How many parts are in plans: eager may be the faster one for some, or for all of them. What there is no time to
        cut stays with eager.
        """
        with self._lock:
            if self._options.budget_s > 0:
                self._left_s = left_s
            self._cut_by(call)
            self._closed = True
            return self._compiled(left_s)

    def _cut_by(self, call: Callable[[], object]) -> None:
        """Run the module so that dynamo makes graphs of it.

        What was compiled is counted by a class's text, for all modules and shapes together: there is no limit here.
        """
        for way in WAYS:
            with torch._dynamo.config.patch({**_WITHOUT_LIMIT, **way}):
                try:
                    call()
                    return
                except Exception:  # whatever torch raises of what it was asked to keep in graphs
                    if way is WAYS[-1] or self._left_s() <= 0:
                        raise
                    self._begin()
