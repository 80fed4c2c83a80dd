"""A module that no one plan holds: what can be in plans is compiled, and the framework runs what is between.

A module that was exported is cut at the calls of its program that no plan holds (`split.py`), without another trace.
Else dynamo cuts it, where Python decides by the values of tensors or an operator gives as many as these ask for, and
each of its graphs is cut so; the module runs once for that, and what that run did not come to, eager runs later.
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
from weft.kernels.record import CompileRecord
from weft.options import Options
from weft.pipeline.compile import compile_imported
from weft.pipeline.framework import captured_later
from weft.pipeline.job import Compilation
from weft.pipeline.reference import example_inputs
from weft.pipeline.refit import difference, refitted
from weft.pipeline.setting import survey
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

MOST_SETS = 64
"""Of weights with which one graph is compiled: layers that are equal but for these."""


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

    def model(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """The framework's own execution of it."""
        return self.eager(tensors)

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
        self._has_run = False
        """Whether the framework ran what was met."""
        self._begin()

    def _begin(self) -> None:
        """Nothing is cut yet."""
        self._late: list[_Late] = []
        self.regions: list[Region] = []
        self.recorded = 0
        """Parts that were not compiled, and are recorded by the device when they are called."""
        self._backend = Backend(self._options, self._engine, self.regions.append, MOST_SETS)

    @property
    def compilations(self) -> list[Compilation]:
        """Of the parts that were compiled, in the order in which they were met."""
        return [x.compilation for x in self._late if x.compilation is not None]

    def _compiled(self, left_s: Callable[[], float]) -> int:
        """Compile the parts in the seconds that are left, large ones first, equal ones once; how many are in plans."""
        with self._lock:
            tunes = self._options.budget_s > 0
            sizes = sum(x.size for x in self._late)

            def budget_s(size: int) -> float:
                left = left_s()
                return max(0.0, min(left, max(LEAST_S, left * size / sizes))) if tunes else 0.0

            for group in sorted(_equal(self._late), key=lambda group: -sum(x.size for x in group)):
                first, *others = group
                size = sum(x.size for x in group)
                self._finish(first, budget_s(size))
                for late in others:
                    if not self._finish_as(late, first, left_s() if tunes else math.inf):
                        self._finish(late, budget_s(late.size))
                sizes -= size
        return sum(c.eager is None for c in self.compilations)

    def _engine(self, imported: Imported, options: Options, eager: Run) -> Run:
        late = _Late(imported, eager, options, eager)
        with self._lock:
            if not self._closed:
                self._late.append(late)
        return late

    def _finish(self, late: _Late, budget_s: float) -> None:
        """Compile a part."""
        try:
            if budget_s >= LEAST_S or self._options.budget_s <= 0:
                options = replace(late.options, budget_s=budget_s)
                found = compile_imported(late.imported, options, eager=late.model, has_run=self._has_run)
                late.compilation, late.run = found, run_of(found)
                return
        except WeftError:
            pass
        own = _recorded(late)
        late.run = lambda tensors: own(*tensors)
        self.recorded += own != late.model

    def _finish_as(self, late: _Late, first: _Late, left_s: float) -> bool:
        """A part as an equal one that was compiled: by its plan with other weights, if that is right, or by eager.

        Whether it is so. Where there is less time than that takes, eager runs it.
        """
        done, graph = first.compilation, late.imported.graph
        if done is None:
            return False
        plan, own = None, None
        if done.eager is None and left_s >= sum(x.seconds for x in done.record.stages if x.name in _REFITS):
            inputs = example_inputs(graph, late.options.seed, late.imported.integers)
            try:
                plan = refitted(done.executable, late.imported, late.options, inputs, late.model)
            except WeftError:  # other values, other kernels
                return False
            graph = plan.graph
        else:
            own = _recorded(late)
        late.compilation = replace(done, graph=graph, plan=plan, eager=own, record=_as(done.record))
        late.run = run_of(late.compilation)
        return True


_REFITS = frozenset({"clean up", "alternatives", "reference", "link"})
"""Stages whose work is done again to take over a plan with other weights."""
AS_ANOTHER = "equal to a part before: nothing is measured"


def _as(record: CompileRecord) -> CompileRecord:
    """Of a part that is like another one: what that took is counted once."""
    return replace(
        record, stages=(), seconds=0.0, problems=0, measured=0, reused=0, unmeasured=0, wanted=0,
        notes=(*record.notes, AS_ANOTHER),
    )  # fmt: skip


def _recorded(late: _Late) -> Callable[..., Sequence[torch.Tensor]]:
    """The framework's own execution, on a GPU in a CUDA graph that its first call records."""
    setting = survey(replace(late.options, budget_s=0.0))
    return captured_later(late.model, late.imported.graph, setting) or late.model


def _equal(parts: Sequence[_Late]) -> list[list[_Late]]:
    """The parts in their order, with each those that differ from it by the values of weights alone."""
    found: list[list[_Late]] = []
    for late in parts:
        for group in found:
            if difference(group[0].imported.graph, late.imported.graph) is None:
                group.append(late)
                break
        else:
            found.append([late])
    return found


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

    def compile(self, left_s: Callable[[], float], *, has_run: bool) -> int:
        """Compile the parts in the seconds that are left; how many are in plans: eager may be faster for some.

        `has_run`: it was called before.
        """
        with self._lock:
            self._has_run = has_run
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
            self._closed = self._has_run = True
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
