"""A module that no one plan holds: what can be in plans is compiled, and the framework runs what is between.

dynamo cuts the module where Python decides by the values of tensors or an operator gives as many as these ask for, and
each of its graphs is cut at the calls that no plan holds (`split.py`). The module runs once to be cut; then every part
is compiled with its share of the time that is left.
"""

from __future__ import annotations

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
from weft.torch_backend.backend import Backend
from weft.torch_backend.engine import Run, run_of
from weft.torch_backend.region import Region

CUTTING: Mapping[str, Any] = MappingProxyType(
    {
        "capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True,
        "recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16,
    }
)  # fmt: skip
"""Of dynamo, while a module is cut. What depends on values is in graphs, too, which are cut there: a break in a loop
would leave all of it to Python. And what was compiled is counted by a class's text, for all modules and shapes."""
LEAST_S = 0.25
"""Of a budget, for a part that is met later; less is no time to compile anything, and such a part stays with eager."""


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


@final
class InParts:
    """A module as a function, most of it in plans. Thread-safe."""

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        self._options = options
        self._late: list[_Late] = []
        self._cut = False
        self._lock = threading.RLock()
        self.regions: list[Region] = []
        self._backend = Backend(options, self._engine, self.regions.append)
        self._functions: list[Callable[..., Any]] = []
        myself = weakref.ref(self)

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            found = _alive(myself)
            found._functions.append(found._backend(gm, example_inputs))
            position = len(found._functions) - 1

            def run(*arguments: Any) -> Any:
                return _alive(myself)._functions[position](*arguments)

            return run

        self.module: Any = torch.compile(module, backend=backend, dynamic=False)
        """Called as the module is. What dynamo keeps of it for good, under the text of its class, holds no weights."""

    @property
    def compilations(self) -> list[Compilation]:
        """Of the parts that were compiled, in the order in which they were met."""
        return [x.compilation for x in self._late if x.compilation is not None]

    def compile(self, call: Callable[[], object], left_s: Callable[[], float]) -> int:
        """Cut the module by `call`, which runs it, and compile its parts in the seconds that are left.

        How many parts are in plans: eager may be the faster one for some, or for all of them.
        """
        with self._lock:
            with torch._dynamo.config.patch(dict(CUTTING)):
                call()
            self._cut = True
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
            self._late.append(late)
            if self._cut:  # other shapes, or a path that was not taken before
                self._finish(late, options.budget_s / max(1, len(self._late)))
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
