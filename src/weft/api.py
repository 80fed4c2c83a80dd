"""What `import weft` offers: compile a model, load a saved one, ask why.

exe = weft.compile(model, example_inputs)        # torch.nn.Module, torch.export program, ONNX path or bytes
y = exe(x)
exe.save("m.weft"); exe = weft.load("m.weft"); exe.report("m.html")
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import inspect
import math
import os
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar, cast, final

import numpy as np
import torch

from weft.device.heap import heap_trimmed
from weft.device.kinds import KINDS
from weft.device.room import free_bytes
from weft.errors import (
    ArtifactError,
    ExampleInputsError,
    ModelError,
    ModelRaisesError,
    NotTracedError,
    OptionError,
    RefitError,
    UnsupportedError,
    UserError,
)
from weft.frontends.imported import Imported
from weft.frontends.torch.copies import deep_copy
from weft.frontends.torch.refusal import check_module, first_line, odd_tensor, short
from weft.frontends.torch.structure import (
    Layout,
    OddValueError,
    OfTensors,
    Results,
    argument_names,
    bound,
    holds,
    is_plain,
    program_results,
    signature_of,
    state_of,
    taken,
    taken_arguments,
    tensors_in,
    with_names,
)
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.types import Array, TensorType
from weft.kernels import call_tree
from weft.kernels.codec import Json
from weft.kernels.record import CompileRecord
from weft.options import Options
from weft.pipeline.collector import put_off
from weft.pipeline.compile import compile_imported
from weft.pipeline.deadline import Deadline, OutOfTime
from weft.pipeline.finish import as_array
from weft.pipeline.framework import FIRST_RUN_S, captured, run_once
from weft.pipeline.job import Compilation
from weft.pipeline.parts import NAME as PARTS
from weft.pipeline.parts import TIMED_SHARE, joined
from weft.pipeline.setting import survey
from weft.pipeline.stages import Say, Stages, silent
from weft.platform.table import platform_of
from weft.runtime import artifact
from weft.runtime.any import AnyExecutable
from weft.runtime.call_form import CallForm
from weft.runtime.executable import InputError, check_count, without_autocast
from weft.runtime.loaded import Loaded, load, raise_uncopied
from weft.runtime.single_flight import SingleFlightCache
from weft.tune.kept import preloaded_worker

if TYPE_CHECKING:
    from weft.frontends.onnx import Limits
    from weft.frontends.torch import Functional
    from weft.pipeline.layers import Layer
    from weft.torch_backend.parts import ProgramInParts

Read = TypeVar("Read")
Model = torch.nn.Module | torch.export.ExportedProgram | str | os.PathLike[str] | bytes
ByName = Mapping[str, torch.Tensor | None]
"""Example inputs of an ONNX file by their names; None, and those that are not named: drawn."""
Arguments = Sequence[object] | Mapping[str, object]
"""What a module is called with: by place, or by name."""


class Made(NamedTuple):
    """A plan, and what it was made of."""

    compilation: Compilation
    imported: Imported
    layout: Layout | None = None
    """Where the plan's inputs stand in the arguments of a call; None: they are the arguments."""
    results: Results | None = None
    """Where its outputs stand in what the model gives; None: one is a tensor, several are a tuple."""
    whole: Callable[..., Any] | None = None
    """Of a model in parts: what it gives for these tensors, in its own form, which may be another one in each call."""


SETTLE_COPIES, SETTLE_SHARE = 2.0, 0.1
"""Where the framework's own execution answers, the module is copied once more: so many times what that took before, but
no more than a share of the budget, as its weights are not copied then."""
TRIAL_S = 60.0
"""For the first run of an ONNX file's partition by ONNX Runtime, in a process of its own."""
REFITTED = "weights were taken over by refit: the times are those of the weights before"


@final
class Run:
    """A compilation that begins now: its stages and its clock."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.clock = Deadline.of(stages.options.budget_s)


class Source(Protocol):
    """What plans are made of, for whatever shapes."""

    @property
    def grows(self) -> bool:
        """Whether it can be compiled for further shapes."""
        ...

    @property
    def eager(self) -> _Eager | None:
        """The framework's own execution, where there is one."""
        ...

    def imported(self, examples: Sequence[torch.Tensor]) -> Imported:
        """As primitives, for the shapes of these inputs."""
        ...

    def build(self, examples: Sequence[torch.Tensor], run: Run | None = None) -> Made:
        """Compiled for the shapes of these inputs, by what began before; None: it begins now."""
        ...

    def taking(self, layout: Layout | None) -> Source:
        """The same, called with arguments of this layout."""
        ...

    def bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Sequence[object], dict[str, object]]:
        """A call in its one form; InputError where it is none of the model [W011]."""
        ...

    def arguments(self) -> tuple[tuple[str, ...], dict[str, Json]]:
        """Names of arguments that can be given by place, and defaults that are numbers, texts or None."""
        ...

    def renewed(self, state: Mapping[str, torch.Tensor | Array]) -> Source:
        """The same with other weights; RefitError where it has no such [W012]."""
        ...

    def tell_changes(self) -> None:
        """Warn where the model is no longer what was compiled."""
        ...


MOST_FORMS = 64


class _CallForm(NamedTuple):
    """How tensors that are given by place and by name, in this order, are the arguments of a module."""

    tensors: tuple[int, ...]
    """Which of them each tensor of the plan is."""
    placed: tuple[int, ...]
    named: tuple[tuple[str, int], ...]
    key: tuple[object, ...]
    """What a plan's key begins with."""

    def of(self, given: Sequence[object]) -> tuple[Sequence[object], Mapping[str, object]]:
        """The arguments."""
        return [given[k] for k in self.placed], {name: given[k] for name, k in self.named}


BY_PLACE = _CallForm((), (), (), ())
"""All by place, as many as there are."""


def _form_of(
    given: Sequence[object],
    tensors: Sequence[torch.Tensor],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    key: tuple[object, ...],
) -> _CallForm | None:
    """Of a call whose arguments are tensors, no two the same; None where others are among them."""
    at = {id(t): k for k, t in enumerate(given)}
    alone = len(at) == len(given) == len(tensors) == len(args) + len(kwargs)
    if not alone or not all(id(t) in at for t in (*tensors, *args, *kwargs.values())):
        return None
    placed, named = [at[id(t)] for t in args], [(name, at[id(t)]) for name, t in kwargs.items()]
    return _CallForm(tuple(at[id(t)] for t in tensors), tuple(placed), tuple(named), key)


@final
class Compiled:
    """A compiled model: callable on tensors of the shapes it was compiled for, and of others within `max_plans`.

    A call with new shapes, or with other values where a guard holds the old ones, compiles another plan while its
    caller waits, with others of these shapes; callers of plans that are there do not. Plans are made one at a time,
    for each disturbs the times that another measures. Beyond `options.max_plans` (at least 1) the least recently used
    one is dropped. The plan of the example inputs is what `save` and `record` speak of, and stays. An exported program,
    whose shapes are fixed, refuses others. Thread-safe.

    It is called as the module is, and gives what the module gives: tensors may stand in tuples, lists, dictionaries and
    dataclasses, be given by name, and be left out where `forward` has defaults. Numbers, texts and None among the
    arguments are part of a plan: a call with others compiles another one. An ONNX file takes tensors by place; with one
    output it gives a tensor, with several a tuple. It can be neither copied nor pickled: `save` it, and `load` that.
    """

    def __init__(self, first: Made, source: Source, *, options: Options) -> None:
        self._first = first
        self._source = source
        self._options = options
        self._kind = options.device.partition(":")[0]
        self._again: Callable[[Sequence[torch.Tensor], Layout | None], Made] = self._build
        self._plans: SingleFlightCache[tuple[object, ...], Made] = SingleFlightCache(options.max_plans)
        self._plans.put(_key_of(first), first)
        self._forms: dict[tuple[object, ...], _CallForm] = {}
        """By the number of arguments by place and the names of the others, at most `MOST_FORMS`."""

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run the model.

        Raises:
            InputError: arguments that are none of the model; tensors of another number, type or device, or new shapes
                where the model cannot be compiled again [W011].
        """
        made, tensors, (args, kwargs) = self._plan_for(inputs, named)
        if made.whole is not None:
            return made.whole(*tensors)
        if isinstance(own := made.compilation.eager, _Eager):
            return own.called(args, kwargs, tensors)
        outputs = made.compilation.run(*tensors)
        layout = made.results.layout if made.results is not None else None
        if layout is None:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        return outputs[0] if layout.is_tensor else layout.made(outputs)

    def _plan_for(
        self, inputs: Sequence[Any], named: Mapping[str, object]
    ) -> tuple[Made, Sequence[torch.Tensor], tuple[Sequence[object], Mapping[str, object]]]:
        """The plan, the tensors of the call, and its arguments as the module takes them."""
        form = self._forms.get((len(inputs), *named)) if named else BY_PLACE
        given = (*inputs, *named.values())
        if form and not [t for t in given if not isinstance(t, torch.Tensor) or t.is_nested or t.is_sparse]:
            tensors = inputs if form is BY_PLACE else [given[k] for k in form.tensors]
            # a shape equals, and hashes as, the tuple of its sizes
            key: tuple[object, ...] = (*form.key, *[(t.shape, t.dtype) for t in tensors])
            made = self._plans.known(key)
            if made is not None and (not made.imported.guards or _guards_hold(made.imported, tensors)):
                if made.compilation.eager is not None:
                    _check_places(tensors, self._kind)
                return made, tensors, (inputs, named) if form is BY_PLACE else form.of(given)
        args, kwargs = self._source.bound(inputs, named)
        try:
            tensors, layout = taken_arguments(args, kwargs)
        except OddValueError as odd:
            problem = f"{odd}: neither a tensor, a number or a text, nor one of them in a container"
            raise InputError(position=_position(args, odd), problem=problem) from None
        _check_places(tensors, self._kind)
        plain = is_plain(args, kwargs)
        if not self._source.grows:
            mine = self._first.layout
            if (mine and mine.key) != (None if plain else layout.key):
                problem = (
                    "the exported program was made with arguments of another structure, or other numbers and texts"
                )
                raise InputError(position=0, problem=problem)
            _check(self.graph, tensors)
            return self._first, tensors, (args, kwargs)
        shapes = tuple([(t.shape, t.dtype) for t in tensors])
        key = shapes if plain else (layout.key, *shapes)
        if named and len(self._forms) < MOST_FORMS:
            form = _form_of((*inputs, *named.values()), tensors, args, kwargs, () if plain else (layout.key,))
            if form is not None:
                self._forms[len(inputs), *named] = form
        make = partial(self._made, tensors, None if plain else layout)
        found = self._plans.get(key, make, lambda plan: _guards_hold(plan.imported, tensors))
        return found, tensors, (args, kwargs)

    def _made(self, inputs: Sequence[torch.Tensor], layout: Layout | None) -> Made:
        """A plan for these shapes, of the model as it is when its turn comes."""
        self._source.tell_changes()
        with heap_trimmed():
            try:
                return self._again(inputs, layout)
            except (ModelRaisesError, NotTracedError, UnsupportedError) as error:
                raise self._misfit(inputs, error) from error

    def _build(self, inputs: Sequence[torch.Tensor], layout: Layout | None) -> Made:
        return self._source.taking(layout).build(inputs)

    def _misfit(self, inputs: Sequence[torch.Tensor], error: UserError) -> InputError:
        """Of tensors that the model cannot be compiled for, which it could for its example inputs."""
        types = [self.graph.type_of(n) for n in self.graph.inputs]
        pairs = enumerate(zip(inputs, _shapes_of(self.graph), types, strict=False))
        odd = [(k, x, t) for k, (x, known, t) in pairs if (tuple(x.shape), x.dtype) != known]
        position, told = 0, "the model cannot be compiled for these arguments"
        if odd:
            position, given, wanted = odd[0]
            told = f"the model cannot be compiled for {given.dtype} of {tuple(given.shape)}, as it was for {wanted}"
        return InputError(position=position, problem=f"{told}: {str(error).splitlines()[0]}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """A compiled model is kept in a file, not pickled.

        Raises:
            ArtifactError: always [W401].
        """
        raise_uncopied()

    def refit(self, state: Mapping[str, torch.Tensor | Array], *, recompile: bool = False) -> None:
        """Take over other weights: the same plans, without tuning, for all shapes together.

        `state` has tensors by the names of the module's parameters and buffers (`module.state_dict()`), of an ONNX
        file by those of its initializers; what it leaves out stays as it is. Weights are copied, packed and folded
        anew, and every plan is verified with them against a float64 evaluation before any takes the place of the old
        one. Calls meanwhile run the old plans, calls afterwards the new ones, none a mixture. A saved plan stays as it
        was saved. Weights whose values decide what is computed (a scale that was 1 everywhere and no longer is, a
        number that stands in the text of a kernel) are refused, unless `recompile`: then those plans are compiled with
        them like a new shape, by the same options. Where ONNX Runtime, which holds the file's own weights, has answered
        calls, the plans do from then on.

        Raises:
            RefitError: a name, shape or type that the model does not have, or weights that need other plans; the old
                ones stay [W012].
        """
        source = self._source.renewed(state)
        kind = self._options.device.partition(":")[0]
        with heap_trimmed(), without_autocast(kind), self._plans.renewal() as plans:
            renewed: dict[int, Made] = {}
            fresh = source
            for old in (*plans.values(), self._first):
                if id(old.compilation) not in renewed:
                    fresh = source.taking(old.layout)
                    renewed[id(old.compilation)] = _refitted(old, fresh, self._options, recompile=recompile)
            for key, old in plans.items():
                plans[key] = renewed[id(old.compilation)]
            self._first = renewed[id(self._first.compilation)]
            self._source = source
            del old, renewed, plans, fresh
            if gc.isenabled():
                gc.collect()  # what was traced holds the weights before, in cycles

    @property
    def executable(self) -> AnyExecutable:
        """The plan of the example inputs, whether or not calls run it: where the framework is faster, they run that.

        Raises:
            ArtifactError: none is left; the framework's own execution answers calls [W401].
        """
        return self._first.compilation.executable

    @property
    def run(self) -> Callable[..., Sequence[torch.Tensor]]:
        """What answers calls with the shapes of the example inputs: their plan, or the framework's own execution."""
        return self._first.compilation.run

    @property
    def parts(self) -> tuple[Compilation, ...]:
        """Of a module that no plan holds whole: what each part came to, in the order in which they run first."""
        return self._first.compilation.parts

    @property
    def graph(self) -> Graph:
        """What is computed of inputs like the example inputs."""
        return self._first.compilation.graph

    @property
    def record(self) -> CompileRecord:
        """How the plan of the example inputs came about."""
        return self._first.compilation.record

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the plan, its weights and kernels to one file; give back the digest that `load` may ask for.

        The file says how the module is called and what it gives (`weft.runtime.call_form`), as far as that is tensors,
        numbers, texts and None in tuples, lists, dictionaries and dataclasses; else the plan takes tensors by place.

        Warns where the module's weights are others than those that were compiled.

        Raises:
            ArtifactError: it cannot be written, or there is no plan [W401].
        """
        self._source.tell_changes()
        linked = self.executable.linked
        return artifact.save(linked, Path(path), trust_dir=self._options.cache, call=self._call_form())

    def _call_form(self) -> CallForm | None:
        """How the plan of the example inputs is called, as a file keeps it; None: with tensors by place."""
        layout, results = self._first.layout, self._first.results
        names, defaults = self._source.arguments()
        arguments = None if layout is None else layout.to_json()
        if layout is not None and arguments is None:
            return None
        found = None if results is None or results.layout is None else results.layout.to_json()
        plain = found is None or (results is not None and results.layout is not None and results.layout.is_tensor)
        tree = None if arguments is None else arguments[1]  # type: ignore[index]
        made = CallForm(names, defaults, cast("Json", tree), None if plain else found)
        return made if names or tree is not None or not plain else None

    def diff(self, *inputs: torch.Tensor, plan: Loaded | None = None) -> list[Layer]:
        """What each kernel of the example inputs' plan stores, against the model's values in float64, in order.

        `inputs` have the example inputs' shapes; none: drawn. Each layer also has how far single calls are off. `plan`:
        a saved one stands in the place of this model's, which says what is right and how its operators are called.

        Raises:
            ArtifactError: the saved plan is not of this model [W401].
        """
        from weft.pipeline.layers import compare
        from weft.pipeline.reference import example_inputs
        from weft.pipeline.refit import graph_of

        with without_autocast(self._options.device.partition(":")[0]):
            executable = self.executable if plan is None else plan.executable
            named = None
            if plan is not None:
                found = graph_of(executable, self._first.imported)
                if isinstance(found, Declined):
                    raise ArtifactError(problem=found.reason, remedy="give the model that was compiled, for its shapes")
                named, _ = found
            given = inputs or example_inputs(executable.graph, self._options.seed, self._first.imported.integers)
            return compare(executable, list(given), named=named)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one offline HTML file that shows what was chosen and why.

        It also shows the pairs of latency-critical and best-effort kernels that the tuning database has of the plan's
        GPU.

        Raises:
            ArtifactError: it cannot be written [W401].
        """
        from weft.report import render
        from weft.tune.pairs import of_record
        from weft.tune.store import Database

        with Database.open(self._options.cache) as database:
            page = render(self.record, *of_record(database, self.record))
        try:
            Path(path).write_text(page, encoding="utf-8")
        except OSError as error:
            raise ArtifactError(problem=f"{path}: {error.strerror}", remedy="choose another place") from None


def _key_of(made: Made) -> tuple[object, ...]:
    """What plans are told apart by."""
    shapes = _shapes_of(made.compilation.graph)
    return shapes if made.layout is None else (made.layout.key, *shapes)


def _position(args: Sequence[object], odd: OddValueError) -> int | str:
    """Of an argument that can be none: its number, or its name."""
    path = str(odd).split(" ", 1)[0].split(".")[0]
    return int(path) if path.isdigit() and int(path) < len(args) else path


def _check_places(inputs: Sequence[torch.Tensor], kind: str) -> None:
    """InputError where tensors are not dense, or do not lie on a device of this kind [W011]."""
    for position, given in enumerate(inputs):
        if (problem := odd_tensor(given)) or given.device.type != kind:
            problem = problem or f"it lies on {given.device}, the model was compiled for {kind}"
            raise InputError(position=position, problem=problem)


def _check(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """InputError where tensors are not of the graph's shapes and types [W011]."""
    types = [graph.type_of(n) for n in graph.inputs]
    check_count(inputs, types)
    for position, (given, wanted, mine) in enumerate(zip(inputs, _shapes_of(graph), types, strict=True)):
        if (tuple(given.shape), given.dtype) != wanted:
            problem = f"expected {mine}, got {tuple(given.shape)} {given.dtype}"
            raise InputError(position=position, problem=problem)


def _refitted(old: Made, source: Source, options: Options, *, recompile: bool) -> Made:
    """A plan and its import with the weights of another source.

    Raises:
        RefitError: the plan cannot take them over [W012].
    """
    from weft.pipeline.reference import example_inputs
    from weft.pipeline.refit import RECOMPILE, refitted

    before, imported = old.compilation, old.imported
    inputs = example_inputs(before.graph, options.seed, imported.integers)
    if before.parts or before.record.chosen == PARTS or old.whole is not None:
        return source.build(inputs)
    for guard in imported.guards:
        held = inputs[guard.input_index]
        inputs[guard.input_index] = torch.tensor(guard.value).to(held.dtype).reshape(held.shape)
    try:
        fresh = replace(_imported(source, inputs), integers=imported.integers)
        if before.plan is None and source.eager is None:
            raise RefitError(problem="there is no plan that could take the weights over", remedy=RECOMPILE)
        plan = None if before.plan is None else refitted(before.plan, fresh, options, inputs, source.eager)
    except RefitError:
        if not recompile:
            raise
        return source.build(inputs)
    eager = source.eager if before.eager is not None else None
    if eager is not None:
        eager.settle()
        setting = survey(options)
        answer = captured(eager, [x.to(setting.platform.device) for x in inputs], setting, alone=True)
    else:
        answer = None
    record = replace(before.record, notes=tuple(dict.fromkeys((*before.record.notes, REFITTED))))
    renewed = replace(before, graph=plan.graph if plan else fresh.graph, plan=plan, record=record, eager=answer)
    return Made(renewed, fresh, old.layout, old.results)


def _imported(source: Source, inputs: Sequence[torch.Tensor]) -> Imported:
    try:
        return source.imported(inputs)
    except ModelError as error:
        remedy = str(error.details.get("remedy", "compile the model again"))
        raise RefitError(where=error.where, problem=str(error.details.get("problem", error)), remedy=remedy) from error


def _shapes_of(graph: Graph) -> tuple[object, ...]:
    from weft.generate.library.execute import TORCH_DTYPE

    types = [graph.type_of(n) for n in graph.inputs]
    return tuple((t.shape, TORCH_DTYPE[t.dtype]) for t in types)


def _guards_hold(imported: Imported, inputs: Sequence[torch.Tensor]) -> bool:
    return all(g.holds(as_array(inputs[g.input_index])) for g in imported.guards)


def compile(
    model: Model,
    example_inputs: Arguments | torch.Tensor | None = None,
    *,
    example_kwargs: Mapping[str, object] | None = None,
    device: str | torch.device | None = None,
    options: Options | None = None,
    dims: Mapping[str, int] | None = None,
    limits: Limits | None = None,
    name: str = "model",
    say: Say = silent,
) -> Compiled:
    """Compile a model for the shapes of `example_inputs`.

    A torch module needs example inputs: a tensor, or a sequence of the arguments of its `forward`, which may be tensors
    in tuples, lists, dictionaries and dataclasses, numbers, texts and None; arguments by name as `example_kwargs`, or
    all of them as one mapping in place of the sequence. An ONNX file needs them (or `dims`, sizes by name, of
    dimensions without one by `INPUT:AXIS`) only where its inputs have symbolic dimensions, and takes them by name too,
    where None or what is left out is drawn. `limits` bound what is read of it.
    The module is compiled for inference as it stands, under the autocast that is on: call `.eval()` first. Weights are
    constants of the plans, folded and packed: **what is done to the module or its weights later changes nothing**,
    until `Compiled.refit` is called with the new ones (on a GPU, where plans for further shapes are made of the module
    itself, that holds for each plan from when it is made). A module whose weights changed is told of in a warning when
    a plan is saved or a new one made.

    Raises:
        ModelError: the model is refused [W1xx], or itself raises on the example inputs [W116].
        UnsupportedError: an operator that nothing here can run [W201].
        NotTracedError: `torch.export` cannot trace the model; its exception is the cause [W207].
        OptionError: a device that this build does not know, or an argument of another type [W001].
    """
    given: object = options
    if not isinstance(given, Options | None):
        raise OptionError(option="options", problem=f"a {type(given).__name__} is no weft.Options")
    options = options or Options()
    if device is not None:
        options = replace(options, device=str(device))
    if not re.fullmatch(rf"({'|'.join(KINDS)})(:[0-9]+)?", options.device):
        raise OptionError(option="device", problem=f"{options.device!r}: {_devices()}")
    is_file = isinstance(model, str | os.PathLike | bytes)
    if is_file and example_kwargs:
        raise OptionError(option="example_kwargs", problem="an ONNX file takes inputs by name as `example_inputs`")
    given_inputs = _tensors(example_inputs) if is_file else None
    call = None if is_file else _arguments(example_inputs, example_kwargs)
    kind = options.device.partition(":")[0]
    if kind == "cpu":
        options = replace(options, device=kind)  # torch calls it cpu:0, too
    automatic = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    stages = Stages(options, say)
    threads = options.threads or torch.get_num_threads()
    with heap_trimmed(), preloaded_worker(options, threads), without_autocast(kind):
        with stages.timed("imports"):
            for module in (*_READERS["onnx" if is_file else "torch"], *(_SOLVER if options.budget_s > 0 else ())):
                with contextlib.suppress(ImportError):  # who needs it says what is missing
                    importlib.import_module(module)
        run = Run(stages)
        if isinstance(model, str | os.PathLike | bytes):
            return _compile_onnx(model, given_inputs, run, dict(dims or {}), limits, name)
        return _compile_torch(model, call, run, name, automatic)


def _devices() -> str:
    """What `device` may be, for errors."""
    return ", ".join(f"{kind!r}" if kind == "cpu" else f"{kind!r} or '{kind}:N'" for kind in KINDS)


_READERS = {"onnx": ("weft.frontends.onnx",), "torch": ("weft.frontends.torch", "torch.export._trace")}
_SOLVER = ("scipy.optimize",)
"""What Python imports once per process, for seconds, before a budget begins to be spent."""


def _tensors(inputs: object) -> Sequence[torch.Tensor] | ByName | None:
    """Inputs of an ONNX file, by place or by name."""
    if inputs is None:
        return None
    if isinstance(inputs, Mapping):
        named = dict(inputs)
        found = tuple(x for x in named.values() if x is not None)
    else:
        named, found = None, _by_place(inputs)
    for position, tensor in enumerate(found):
        if not isinstance(tensor, torch.Tensor):
            problem = f"item {position} is a {type(tensor).__name__}, no tensor"
            raise OptionError(option="example_inputs", problem=problem)
        _check_example(tensor, f"item {position}")
    return found if named is None else named


def _by_place(inputs: object) -> tuple[Any, ...]:
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable):
        raise ExampleInputsError(
            option="example_inputs", problem=f"a {type(inputs).__name__} is no tensor, nor several"
        )
    return tuple(inputs)


def _check_example(tensor: torch.Tensor, what: str) -> None:
    if odd := odd_tensor(tensor):
        raise ExampleInputsError(option="example_inputs", problem=f"{what} is {odd}")


def _arguments(inputs: object, named: object) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a module is called with, by place and by name; None: nothing is said."""
    if not isinstance(named, Mapping | None):
        raise OptionError(
            option="example_kwargs", problem=f"a {type(named).__name__} is no mapping of names to arguments"
        )
    if isinstance(inputs, Mapping):
        if named:
            problem = "a mapping is all arguments by name, and `example_kwargs` are given too"
            raise ExampleInputsError(option="example_inputs", problem=problem)
        return (), dict(inputs)
    if inputs is None:
        return None if named is None else ((), dict(named))
    return _by_place(inputs), dict(named or {})


def _compile_onnx(
    model: str | os.PathLike[str] | bytes, inputs: Sequence[torch.Tensor] | ByName | None, run: Run,
    dims: dict[str, int], limits: Limits | None, name: str,
) -> Compiled:  # fmt: skip
    from weft.frontends.onnx import Limits

    options = run.stages.options
    bounds = limits or Limits()
    most = max(bounds.primitives, options.max_primitives)  # whoever raised it
    # a file may be all holes: what would not fit is refused before it is read
    room = min(bounds.external_bytes, options.compile_memory_bytes or free_bytes())
    bounds = replace(bounds, primitives=most, external_bytes=room)
    options = replace(options, max_primitives=most)
    source = _OnnxModel(model if isinstance(model, bytes) else Path(model), options, dims, bounds, name, run.stages.say)
    return Compiled(source.build(inputs, run), source, options=options)


@final
class _Runtime:
    """An ONNX file by ONNX Runtime: one session for all shapes, held as long as it answers calls."""

    def __init__(self, source: Path | bytes, limits: Limits, options: Options) -> None:
        self._source, self._limits, self._options = source, limits, options
        self._made: Callable[..., Sequence[torch.Tensor]] | None = None
        self._wanted = False

    def start(
        self, types: Sequence[TensorType], results: int, seconds: float
    ) -> Callable[..., Sequence[torch.Tensor]] | None:
        """The session, tried in a process of its own before it was made; None where it does not run the model."""
        from weft.frontends.onnx.whole import onnxruntime_model

        if self._made is None:
            made = onnxruntime_model(
                self._source,
                types,
                results,
                limits=self._limits,
                threads=self._options.threads or torch.get_num_threads(),
                seconds=seconds,
            )
            self._made = None if isinstance(made, Declined) else made
        return self._made

    def keep_if(self, wanted: bool) -> None:
        """Let go of the session and its weights unless some shape's calls are answered by it."""
        self._wanted = self._wanted or wanted
        if not self._wanted:
            self._made = None


def _compile_torch(
    model: torch.nn.Module | torch.export.ExportedProgram, call: tuple[tuple[Any, ...], dict[str, Any]] | None,
    run: Run, name: str, automatic: torch.dtype | None,
) -> Compiled:  # fmt: skip
    options = run.stages.options
    given: object = model
    if not isinstance(given, torch.nn.Module | torch.export.ExportedProgram):
        problem = f"a {type(given).__name__} is no torch module, exported program or ONNX file"
        raise OptionError(option="model", problem=problem)
    if isinstance(model, torch.nn.Module):
        if call is None:
            raise OptionError(option="example_inputs", problem="a torch module needs them")
        check_module(model, name if name != "model" else type(model).__name__)
    args, kwargs = _program_inputs(model) if call is None else call
    label = name if name != "model" or isinstance(model, torch.export.ExportedProgram) else type(model).__name__
    form = _Form(model, label)
    args, kwargs = form.of_example(args, kwargs)
    try:
        inputs, layout = taken_arguments(args, kwargs)
    except OddValueError as odd:
        problem = f"{odd}: neither a tensor, a number or a text, nor one of them in a container"
        raise ExampleInputsError(option="example_inputs", problem=problem) from None
    for path, tensor in zip(layout.names, inputs, strict=True):
        _check_example(tensor, f"item {path}")
    place = platform_of(options.device).device_of(options)  # what is not there is told before the weights go there
    watch = _Watch(model) if isinstance(model, torch.nn.Module) else None
    program = model if isinstance(model, torch.export.ExportedProgram) else None
    placed, owned = run.stages.run("copy", _own, model, place)
    taking = None if is_plain(args, kwargs) else layout
    source = _TorchModel(
        program, placed, owned, options, label, run.stages.say, automatic, watch, form, taking
    )  # fmt: skip
    return Compiled(source.build(inputs, run), source, options=options)


@final
class _Form:
    """How a module, or an exported program, is called."""

    def __init__(self, model: torch.nn.Module | torch.export.ExportedProgram, label: str) -> None:
        self._label = label
        self._signature = signature_of(model) if isinstance(model, torch.nn.Module) else None
        self._names = () if isinstance(model, torch.nn.Module) else _program_names(model)

    def of_example(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The example in its one form.

        Raises:
            ExampleInputsError: they do not fit `forward` [W001].
        """
        try:
            return self._one(args, kwargs)
        except TypeError as error:
            text = f"they do not fit forward{short(self._signature)}: {error}"
            if not args and kwargs:
                text += "; a dictionary that is one argument stands in a tuple: `(inputs,)`"
            raise ExampleInputsError(where=self._label, option="example_inputs", problem=text) from None

    def of_call(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """A call in its one form.

        Raises:
            InputError: the arguments do not fit `forward` [W011].
        """
        try:
            return self._one(args, kwargs)
        except TypeError as error:
            problem = f"the arguments do not fit forward{short(self._signature)}: {error}"
            raise InputError(position=len(args), problem=problem) from None

    def _one(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if kwargs and self._names and set(kwargs) == set(self._names):
            kwargs = {name: kwargs[name] for name in self._names}  # as the program has them
        return bound(self._signature, args, kwargs)

    def arguments(self) -> tuple[tuple[str, ...], dict[str, Json]]:
        """Names of arguments that can be given by place, and defaults that are numbers, texts or None."""
        kind = inspect.Parameter
        parameters = {} if self._signature is None else self._signature.parameters
        names = [n for n, p in parameters.items() if p.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)]
        defaults = {n: p.default for n, p in parameters.items() if call_tree.is_plain(p.default)}
        return tuple(names), defaults

    def names(self, count: int, layout: Layout | None) -> list[str]:
        """Of tensors that are the arguments, or stand in them."""
        by_place = argument_names(self._signature, count)
        if layout is None:
            return by_place
        most = 1 + max((int(n.partition("_")[0]) for n in layout.names if n.partition("_")[0].isdigit()), default=0)
        by_place = argument_names(self._signature, most)
        found = []
        for name in layout.names:
            first, _, rest = name.partition("_")
            found.append("_".join(filter(None, (by_place[int(first)] if first.isdigit() else first, rest))))
        return found


def _program_names(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The arguments by name of an exported program, in its order."""
    spec = program.call_spec.in_spec
    return tuple(str(name) for name in spec.child(1).context) if spec is not None else ()


def _own(model: torch.nn.Module | torch.export.ExportedProgram, place: torch.device) -> tuple[torch.nn.Module, bool]:
    """The model as a module on the device, on the CPU as it stands now; whether that is a copy."""
    placed, owned = _placed(model, place)
    if isinstance(model, torch.nn.Module) and not owned and place.type == "cpu":
        return _copied(placed)
    return placed, owned


def _placed(model: torch.nn.Module | torch.export.ExportedProgram, place: torch.device) -> tuple[torch.nn.Module, bool]:
    """The model as a module for tensors of the device; whether it is a copy, as it is where weights lie elsewhere."""
    module: torch.nn.Module = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    if all(x.device == place for x in (*module.parameters(), *module.buffers())):
        return module, False
    try:
        return deep_copy(module, {}).to(place), True
    except Exception as error:  # whatever its owner's own `__deepcopy__` raises
        problem = f"it cannot be copied to {place}: {type(error).__name__}: {first_line(error)}"
        raise ModelError(
            where=type(module).__name__, problem=problem, remedy=f"call `model.to({str(place)!r})`"
        ) from error


def _copied(module: torch.nn.Module, *, share: bool = False) -> tuple[torch.nn.Module, bool]:
    """The module as it stands: what its owner does with it later changes no plan. Itself where it cannot be copied.

    `share`: the copy has the same parameters and buffers.
    """
    try:
        with warnings.catch_warnings(), _TRACING:
            shared = {id(t): t for t in (*module.parameters(), *module.buffers())} if share else {}
            warnings.simplefilter("ignore", FutureWarning)  # of torch at its own exported programs
            return deep_copy(module, shared), True
    except Exception:  # whatever its owner's own `__deepcopy__` raises
        return module, False


def _with_own_constants(imported: Imported) -> Imported:
    """Constants in memory of their own, at boundaries of cache lines."""
    owned = {}
    for digest, data in imported.graph.constants.items():
        mine = torch.empty(data.nbytes, dtype=torch.uint8, device="cpu").numpy().view(data.dtype).reshape(data.shape)
        mine[...] = data
        mine.flags.writeable = False
        owned[digest] = mine
    return replace(imported, graph=replace(imported.graph, constants=owned))


@final
class _OnnxModel:
    """An ONNX file or its bytes."""

    grows = True
    eager = None

    def __init__(
        self, model: bytes | Path, options: Options, dims: Mapping[str, int], limits: Limits, name: str, say: Say,
        data: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._model, self._options, self._dims, self._limits = model, options, dims, limits
        self._name, self._say = name, say
        self._data = dict(data)
        """What stands for the data of initializers."""
        self._file = _file_of(model)
        self._runtime = _Runtime(model, limits, options)

    def imported(self, examples: Sequence[torch.Tensor] | ByName | None) -> Imported:
        """As primitives, for the shapes of these inputs."""
        from weft.frontends.onnx import import_onnx

        return self._read(import_onnx, examples)

    def _read(self, how: Callable[..., Read], examples: Sequence[torch.Tensor] | ByName | None) -> Read:
        arrays: list[Array] | dict[str, Array | None] | None = None
        if isinstance(examples, Mapping):
            arrays = {name: None if t is None else np.asarray(as_array(t)) for name, t in examples.items()}
        elif examples is not None:
            arrays = [np.asarray(as_array(t)) for t in examples]
        with put_off():
            return how(
                self._model, limits=self._limits, dims=self._dims, example_inputs=arrays, initializers=self._data
            )

    def build(self, examples: Sequence[torch.Tensor] | ByName | None, run: Run | None = None) -> Made:
        """Compiled for the shapes of these inputs."""
        from weft.frontends.onnx import import_onnx

        options = self._options
        run = run or Run(Stages(options, self._say))
        whole = not options.in_parts or options.bounds_plans or options.check_indices
        try:
            imported = run.stages.run("import", self._read, partial(import_onnx, on_data=whole), examples)
        except UnsupportedError as error:
            if whole:
                raise
            try:
                return self._in_parts(examples, run, error)
            except UnsupportedError:  # a plan for these values alone is better than none
                imported = run.stages.run("import again", self._read, import_onnx, examples)
        for note in imported.notes:
            warnings.warn(f"Weft: {note}", stacklevel=2)
        # ONNX Runtime has the file's own weights
        timed = options.device == "cpu" and not self._data
        start = partial(self._runtime.start, _input_types(imported.graph), len(imported.graph.outputs))
        made = compile_imported(
            imported, options, example_inputs=self._all(examples, imported), model=self._label, framework="onnxruntime",
            start=start if timed else None, stages=run.stages, clock=run.clock,
        )  # fmt: skip
        self._runtime.keep_if(made.eager is not None)
        return Made(made, imported)

    @property
    def _label(self) -> str:
        return self._name if isinstance(self._model, bytes) else self._model.stem

    def _in_parts(self, examples: Sequence[torch.Tensor] | ByName | None, run: Run, error: UnsupportedError) -> Made:
        """The file as two partitions, as no plan holds it whole, for the reason that `error` gives.

        Raises:
            UnsupportedError: `error`, where values of inputs are wanted, or ONNX Runtime does not run what is left.
        """
        from weft.frontends.onnx import import_partitioned
        from weft.frontends.onnx.errors import wants_values
        from weft.frontends.onnx.whole import onnxruntime_model
        from weft.pipeline.reference import example_inputs

        options = self._options
        if wants_values(error, examples):
            raise error
        try:
            cut = run.stages.run("partition", self._read, import_partitioned, examples)
        except UserError:
            raise error from None
        graph, threads = cut.compiled.graph, options.threads or torch.get_num_threads()
        fed = [graph.type_of(n) for n in cut.feed(graph.inputs, graph.outputs)]
        left = sum(k >= 0 for k in cut.results)
        rest = onnxruntime_model(cut.rest, fed, left, limits=self._limits, threads=threads, seconds=TRIAL_S)
        if isinstance(rest, Declined):
            raise error
        for note in cut.compiled.notes:
            warnings.warn(f"Weft: {note}", stacklevel=3)
        place = platform_of(options.device).device_of(options)
        values = self._all(examples, cut.compiled) or example_inputs(graph, options.seed)
        inputs = [x.detach().to(place, copy=True) for x in values]
        own = None
        if options.device == "cpu" and not self._data and options.budget_s > 0 and graph.outputs:
            own = self._runtime.start(_input_types(graph), len(cut.results), TRIAL_S)
        part = None
        if graph.outputs:
            part = compile_imported(
                cut.compiled, options, example_inputs=inputs, model=f"{self._label}, compiled partition",
                stages=Stages(options, self._say), clock=run.clock.leaving(TIMED_SHARE * options.budget_s),
            )  # fmt: skip

        def answer(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            ours = () if part is None else part.run(*tensors)
            theirs = rest(*(x.cpu() for x in cut.feed(tensors, ours)))
            return cut.gather(ours, [y.to(place) for y in theirs])

        def whole(*tensors: torch.Tensor) -> Any:
            outputs = answer(*tensors)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        told = ", ".join(f"{n} {op}" for op, n in sorted(cut.operators.items(), key=lambda x: (-x[1], x[0]))[:8])
        mine = f"{cut.compiled.operators} operators of {self._label}" if part else f"nothing of {self._label}"
        text = f"Weft compiles {mine}, and ONNX Runtime runs the rest ({told}): {str(error).splitlines()[0]}"
        warnings.warn(f"{text}; there is no one plan to be saved, see `Compiled.parts`", stacklevel=3)
        imported = replace(
            _taking(zip(_input_types(graph), graph.input_names, strict=True)), guards=cut.compiled.guards
        )
        found = joined(
            imported, options, [] if part is None else [part], answer, own, inputs, model=self._label, note=text,
            stages=run.stages, clock=run.clock,
        )  # fmt: skip
        beaten = own is not None and found.eager is own
        self._runtime.keep_if(beaten)
        return Made(found, imported, whole=None if beaten else whole)

    def taking(self, layout: Layout | None) -> _OnnxModel:
        """A file takes tensors by place."""
        del layout
        return self

    def bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Sequence[object], dict[str, object]]:
        """InputError where a call is more than tensors by place [W011]."""
        if kwargs:
            problem = "a compiled ONNX file is called with tensors by place, in the order of its inputs"
            raise InputError(position=next(iter(kwargs)), problem=problem)
        for position, given in enumerate(args):
            if not isinstance(given, torch.Tensor):
                raise InputError(position=position, problem=f"a {type(given).__name__} is no tensor")
        return args, {}

    def arguments(self) -> tuple[tuple[str, ...], dict[str, Json]]:
        """A file's inputs are given by place."""
        return (), {}

    def _all(
        self, examples: Sequence[torch.Tensor] | ByName | None, imported: Imported
    ) -> Sequence[torch.Tensor] | None:
        """One for each input: what is not given by name is drawn."""
        if not isinstance(examples, Mapping):
            return examples
        from weft.frontends.onnx.names import kept
        from weft.pipeline.reference import example_inputs

        given = {kept(name, self._limits.name_bytes): x for name, x in examples.items() if x is not None}
        drawn = example_inputs(imported.graph, self._options.seed)
        return [given.get(name, x) for name, x in zip(imported.graph.input_names, drawn, strict=True)]

    def renewed(self, state: Mapping[str, torch.Tensor | Array]) -> _OnnxModel:
        """The same model with other data of initializers.

        Raises:
            RefitError: what cannot be data, or a file that changed [W012].
        """
        if _file_of(self._model) != self._file:
            problem = f"the file {Path(os.fsdecode(self._model)).name} has changed since it was compiled"
            raise RefitError(problem=problem, remedy="compile it again")
        given = {str(name): _array_of(name, value) for name, value in _mapping(state).items()}
        return _OnnxModel(
            self._model, self._options, self._dims, self._limits, self._name, self._say, {**self._data, **given}
        )

    def tell_changes(self) -> None:
        """Warn where the file is another one."""
        if _file_of(self._model) != self._file:
            self._file = _file_of(self._model)
            text = f"the file {Path(os.fsdecode(self._model)).name} has changed since Weft compiled it"
            warnings.warn(f"{text}: what is compiled of it from now on may differ", stacklevel=4)


def _file_of(model: bytes | Path) -> tuple[int, int, int] | None:
    """Tells whether a file was written since."""
    if isinstance(model, bytes):
        return None
    try:
        status = model.stat()
    except (OSError, ValueError):  # what is no path is told by who reads it
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _array_of(name: str, value: torch.Tensor | Array) -> Array:
    from weft.frontends.torch.dtypes import to_numpy

    given: object = value
    if isinstance(given, torch.Tensor):
        return to_numpy(given.detach().cpu())[0]
    if not isinstance(given, np.ndarray):
        problem = f"{name!r} is a {type(given).__name__}, neither a tensor nor an array"
        raise RefitError(problem=problem, remedy="give tensors by name")
    return given


def _mapping(state: object) -> Mapping[str, torch.Tensor | Array]:
    if not isinstance(state, Mapping):
        problem = f"a {type(state).__name__} is no mapping of names to tensors"
        raise RefitError(problem=problem, remedy="give `module.state_dict()`, or initializers by name")
    return state


class _Cut(NamedTuple):
    """A model that no plan holds whole, in parts."""

    parts: Sequence[Compilation]
    """Those that were compiled, in the order in which they run first."""
    answer: Callable[..., Sequence[torch.Tensor]]
    """The whole model: its tensors in, its tensors out."""
    recorded: int
    """How many others the framework runs as its device records them, without what each launch costs."""
    whole: Callable[..., Any] | None = None
    """As `Made.whole`."""


_TRACING = threading.RLock()
"""Held while a module is traced, which puts other tensors into it, and by whoever copies one."""


@final
class _TorchModel:
    """A module, or an exported program, on the device that it is compiled for."""

    def __init__(
        self, program: torch.export.ExportedProgram | None, module: torch.nn.Module, owned: bool, options: Options,
        label: str, say: Say, automatic: torch.dtype | None, watch: _Watch | None, form: _Form, layout: Layout | None,
    ) -> None:  # fmt: skip
        self._program, self._module, self._owned = program, module, owned
        self._options, self._label, self._say, self._automatic = options, label, say, automatic
        self._watch, self._form, self._layout = watch, form, layout
        self._kind = options.device.partition(":")[0]
        whole = program is None and automatic is not None
        self._called = OfTensors(_Autocast(module, self._kind, automatic) if whole and automatic else module, layout)
        self.eager = _Eager(self._called, self._kind, owned=owned)
        self.grows = program is None

    def taking(self, layout: Layout | None) -> _TorchModel:
        """The same module, called with arguments of this layout."""
        if (layout and layout.key) == (self._layout and self._layout.key):
            return self
        return _TorchModel(
            self._program, self._module, self._owned, self._options, self._label, self._say, self._automatic,
            self._watch, self._form, layout,
        )  # fmt: skip

    def bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Sequence[object], dict[str, object]]:
        """A call in its one form; InputError where it does not fit `forward` [W011]."""
        return self._form.of_call(args, kwargs)

    def arguments(self) -> tuple[tuple[str, ...], dict[str, Json]]:
        """Those of `forward`."""
        return self._form.arguments()

    def imported(self, examples: Sequence[torch.Tensor]) -> Imported:
        """As primitives, for the shapes of these inputs."""
        return self._taken_in(self._exported(examples), [])

    def _exported(
        self, examples: Sequence[torch.Tensor], check: Callable[[], None] | None = None
    ) -> torch.export.ExportedProgram:
        """The framework's own program for the shapes of these inputs. What `check` raises ends making it."""
        if self._program is not None:
            return self._program
        from weft.frontends.torch.refusal import refused
        from weft.frontends.torch.traces import traced
        from weft.frontends.torch.until import Until

        # tensors of their own: what is given twice, or is a weight too, would be traced as one value
        tensors = tuple(x.to(self._options.device).detach() for x in examples)
        bounded = Until(check) if check is not None else contextlib.nullcontext()
        with put_off(), without_autocast(self._kind), torch.no_grad(), _TRACING, bounded:
            try:
                named = with_names(self._called, self._form.names(len(tensors), self._layout))
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The tensor attribute")  # told below
                    program = traced(torch.export.export, named, tensors, strict=False)
                self._tell_attributes()
                return program
            except OutOfTime:
                raise
            except Exception as error:  # whatever torch, or the model, raises
                failed = error
        # outside of the modes and of the bound on time that the export is under: the model itself is run
        args, kwargs = (tensors, {}) if self._layout is None else cast("Any", self._layout.made(tensors))
        with without_autocast(self._kind), _TRACING:
            found = refused(failed, self._module, args, kwargs, self._label)
        raise found from (failed if found is not failed else None)

    def _tell_attributes(self) -> None:
        """Warn where calls of the module change what a plan will not."""
        if names := self._called.results.changed:
            shown = ", ".join(repr(name) for name in names[:5])
            text = f"Weft: forward changes the module's attribute {shown}: plans keep what it was, and do not change it"
            warnings.warn(text, stacklevel=2)

    def _taken_in(self, program: torch.export.ExportedProgram, read: list[Functional]) -> Imported:
        """As primitives; `read` gets what they are read from."""
        from weft.frontends.torch import functional_program, import_functional_program
        from weft.frontends.torch.refusal import advised
        from weft.frontends.torch.traces import traced

        device = self._options.device
        # taking operators apart traces, too, and the framework's stack of modes belongs to the process
        with put_off(), without_autocast(self._kind), _TRACING:
            try:
                read.append(traced(functional_program, program))
                imported = traced(import_functional_program, read[0], device=device).imported
            except UnsupportedError as error:
                if type(error) is not UnsupportedError:
                    raise
                raise advised(error, self._module, self._label, wrapped=self._program is None) from error
            if not imported.graph.outputs:
                problem = "the model returns no tensor"
                raise ModelError(where=self._label, problem=problem, remedy="return what it computes")
        if device == "cpu" and (not self._owned or self._program is not None):
            imported = _with_own_constants(imported)
        return imported

    def build(self, examples: Sequence[torch.Tensor], run: Run | None = None) -> Made:
        """Compiled for the shapes of these inputs."""
        run = run or Run(Stages(self._options, self._say))
        began = time.monotonic()
        clock = run.clock
        try:
            reserved_s = min(SETTLE_COPIES * run.stages.seconds("copy"), SETTLE_SHARE * self._options.budget_s)
            program = run.stages.run("export", self._exported, examples, self._check(clock, reserved_s))
        except OutOfTime:
            return self._framework_alone(examples, run)
        except NotTracedError as error:
            return self._in_parts(examples, run, error)
        if self._options.budget_s <= 0:  # it cannot be taken off anything
            clock = clock.later(time.monotonic() - began)
        read: list[Functional] = []
        try:
            imported = run.stages.run("import", self._taken_in, program, read)
        except UnsupportedError as error:
            return self._in_parts(examples, run, error, read)
        return self._planned(imported, examples, run, clock)

    def _planned(self, imported: Imported, examples: Sequence[torch.Tensor], run: Run, clock: Deadline) -> Made:
        """The model as one plan, or as the framework's own execution where that answers."""
        with without_autocast(self._kind):
            made = compile_imported(
                imported, self._options, example_inputs=examples, eager=self.eager, settle=self.eager.settle,
                model=self._label, stages=run.stages, clock=clock,
            )  # fmt: skip
        if self._watch is not None and not self._owned:
            self._watch.renew()  # who times a module in training mode changes its buffers
        return Made(made, imported, self._layout, self._results())

    def _framework_alone(self, examples: Sequence[torch.Tensor], run: Run) -> Made:
        """What answers where the budget ended before anything was known of the model but what it takes."""
        return self._planned(_inputs_alone(examples), examples, run, Deadline(-math.inf, self._options.budget_s))

    def _in_parts(
        self, examples: Sequence[torch.Tensor], run: Run, error: UserError, program: Sequence[Functional] = ()
    ) -> Made:
        """The model cut at what no plan holds, for the reason that `error` gives; `program`: as it was read, if it was.

        Raises:
            UserError: `error`, where that is not asked for, nothing is left to be compiled, or it cannot be run so.
        """
        options = self._options
        bounded = options.bounds_plans or options.check_indices
        if not options.in_parts or bounded or self._program is not None or self._module.training:
            raise error
        from weft.torch_backend.parts import LEAST_S

        clock = run.clock.leaving(TIMED_SHARE * options.budget_s)  # parts answer only where there was time to time them
        inputs = [x.detach().to(options.device, copy=True) for x in examples]  # who writes into them, writes into ours

        def is_late() -> bool:
            return options.budget_s > 0 and clock.left_s < LEAST_S

        try:
            cut = self._program_cut(program, inputs, run, clock) or self._module_cut(inputs, run, clock)
        except Exception as failed:  # whatever torch raises
            if is_late():
                return self._framework_alone(examples, run)
            raise error from failed
        if cut is None:
            raise error
        if not cut.parts:
            if not is_late():
                raise error
            if not cut.recorded:
                return self._framework_alone(examples, run)
        told = str(error).splitlines()[0]
        count = sum(p.eager is None for p in cut.parts)
        text = f"Weft compiles {self._label} in parts ({count} plans), and torch runs what no plan holds: {told}"
        warnings.warn(f"{text}; there is no one plan to be saved, see `Compiled.parts`", stacklevel=2)
        integers = {k: as_array(x) for k, x in enumerate(inputs) if not x.is_floating_point()}
        imported = replace(_inputs_alone(examples), integers=integers)
        own = self.eager
        found = joined(
            imported, options, cut.parts, cut.answer, own, inputs,
            model=self._label, note=text, stages=run.stages, clock=run.clock,
        )  # fmt: skip
        beaten = found.eager is own
        if beaten:
            own.settle()
            return Made(found, imported, self._layout, self._results())
        return Made(found, imported, self._layout, None if cut.whole else self._results(), whole=cut.whole)

    def _program_cut(
        self, program: Sequence[Functional], inputs: Sequence[torch.Tensor], run: Run, clock: Deadline
    ) -> _Cut | None:
        """The exported program in parts; None: there is none, it does more than give tensors, or nothing is won so."""
        parts = run.stages.run("cut", self._program_in_parts, program[0], inputs) if program else None
        if parts is None:
            return None

        def answer(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            with without_autocast(self._kind):
                return parts(*tensors)

        setting = survey(replace(self._options, budget_s=0.0))
        runs = setting.platform.asynchronous and clock.left_s > FIRST_RUN_S  # what that loads, every part has then
        if runs:
            run.stages.run("first run", run_once, answer, inputs, setting)
        run.stages.run("parts", parts.compile, lambda: clock.left_s, has_run=runs)
        return _Cut(parts.compilations, answer, parts.recorded)

    def _program_in_parts(self, program: Functional, inputs: Sequence[torch.Tensor]) -> ProgramInParts | None:
        from weft.frontends.torch import as_function
        from weft.frontends.torch.traces import traced
        from weft.torch_backend.parts import ProgramInParts

        with put_off(), without_autocast(self._kind), _TRACING:
            try:
                function = traced(as_function, program)
            except NotTracedError:  # what writes is not written as functions
                return None
            parts = None if function is None else ProgramInParts(*function, self._options)
            return parts if parts is not None and parts.cut(inputs) else None

    def _module_cut(self, inputs: Sequence[torch.Tensor], run: Run, clock: Deadline) -> _Cut | None:
        """The module in parts, by dynamo; None: it changes itself, and would depend on how often it was called."""
        from weft.torch_backend.parts import InParts

        module = self._module if self._automatic is None else _Autocast(self._module, self._kind, self._automatic)
        parts = InParts(module, self._options)
        layout, before = self._layout, state_of(self._module)

        def whole(*tensors: torch.Tensor) -> Any:
            with torch.no_grad(), without_autocast(self._kind):
                args, kwargs = (tensors, {}) if layout is None else cast("Any", layout.made(tensors))
                return parts.module(*args, **kwargs)

        def call() -> None:
            with _TRACING:
                whole(*inputs)

        run.stages.run("parts", parts.compile, call, lambda: clock.left_s)
        if state_of(self._module) != before:
            return None
        return _Cut(parts.compilations, lambda *xs: flat(whole(*xs)), parts.recorded, whole)

    def _results(self) -> Results:
        """Where outputs stand in what the model gives."""
        if self._program is not None and self._called.results.layout is None:
            self._called.results.layout = program_results(self._program)
        return self._called.results

    def _check(self, clock: Deadline, reserved_s: float = 0.0) -> Callable[[], None] | None:
        """What ends an export with the budget, or so much earlier, where the framework's own execution may answer."""
        options = self._options
        if options.budget_s <= 0 or options.bounds_plans or options.check_indices:
            return None

        def check() -> None:
            if clock.passed(clock.end - reserved_s):
                raise OutOfTime

        return check

    def renewed(self, state: Mapping[str, torch.Tensor | Array]) -> _TorchModel:
        """The same model with other parameters and buffers; those that are not given are shared.

        Raises:
            RefitError: names, shapes or types that it does not have, or a module that cannot be copied [W012].
        """
        with _TRACING:
            mine = _tensors_of(self._program or self._module)
        fresh = _replacements(mine, _mapping(state))
        if self._program is not None:
            program = copy.copy(self._program)
            of = {name: fresh[id(t)] for name, t in mine.items() if id(t) in fresh}
            program._state_dict = {k: of.get(k, v) for k, v in program.state_dict.items()}
            program._constants = {k: of.get(k, v) for k, v in program.constants.items()}
            placed, owned = _placed(program, platform_of(self._options.device).device_of(self._options))
        else:
            program, owned = None, self._owned
            try:
                with _TRACING:
                    placed = deep_copy(self._module, {id(t): fresh.get(id(t), t) for t in mine.values()})
            except Exception as error:  # whatever its owner's own `__deepcopy__` raises
                problem = f"the module cannot be copied ({type(error).__name__})"
                raise RefitError(problem=problem, remedy="compile it again") from error
        if self._watch is not None:
            self._watch.renew()
        return _TorchModel(
            program, placed, owned, self._options, self._label, self._say, self._automatic, self._watch, self._form,
            self._layout,
        )  # fmt: skip

    def tell_changes(self) -> None:
        """Warn, once per change, where the module has other weights than those that were compiled."""
        name = self._watch.changed() if self._watch is not None else None
        if name is not None:
            text = f"the weights of the module changed after Weft compiled it ({name!r}): its plans have those of then"
            warnings.warn(f"{text}; compiled.refit(module.state_dict()) takes over the new ones", stacklevel=4)


def _inputs_alone(examples: Sequence[torch.Tensor]) -> Imported:
    """A model of which nothing is known but what it takes: there was no time to look."""
    from weft.frontends.torch.dtypes import FROM_TORCH

    return _taking([(TensorType(FROM_TORCH[x.dtype], tuple(x.shape)), "") for x in examples])


def _taking(inputs: Iterable[tuple[TensorType, str]]) -> Imported:
    """A model of which no plan holds the whole: its inputs, by type and name."""
    b = GraphBuilder()
    return Imported(b.build([b.input(t, name) for t, name in inputs]), operators=0)


def _input_types(graph: Graph) -> list[TensorType]:
    return [graph.type_of(n) for n in graph.inputs]


def _tensors_of(model: torch.nn.Module | torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names."""
    if isinstance(model, torch.export.ExportedProgram):
        constants = {k: v for k, v in model.constants.items() if isinstance(v, torch.Tensor)}
        return {**constants, **model.state_dict}
    return {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}


def _replacements(
    mine: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor | Array]
) -> dict[int, torch.Tensor]:
    """Copies of what is given, like the tensors they stand for, by the identity of these.

    Raises:
        RefitError: see `Compiled.refit` [W012].
    """
    remedy = "give tensors by the names of the module's parameters and buffers, as `module.state_dict()` does"
    unknown = [name for name in state if name not in mine]
    if unknown:
        shown = ", ".join(repr(str(name)[:80]) for name in unknown[:5])
        raise RefitError(problem=f"the model has no {shown}" + " ..." * (len(unknown) > 5), remedy=remedy)
    fresh: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        old, given = mine[name], torch.as_tensor(value).detach() if isinstance(value, np.ndarray) else value
        if not isinstance(given, torch.Tensor):
            raise RefitError(problem=f"{name!r} is a {type(given).__name__}, no tensor", remedy=remedy)
        if given.shape != old.shape or not torch.can_cast(given.dtype, old.dtype):
            problem = f"{name!r} is {old.dtype} of {tuple(old.shape)}, given is {given.dtype} of {tuple(given.shape)}"
            raise RefitError(problem=problem, remedy=remedy)
        with torch.no_grad(), torch.inference_mode(mode=False):
            new = torch.empty_like(old, requires_grad=False).copy_(given)
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
        before = fresh.setdefault(id(old), new)
        if before is not new and not torch.equal(before, new):
            problem = f"{name!r} is one tensor with another name of the model, and two different ones were given"
            raise RefitError(problem=problem, remedy=remedy)
    return fresh


@final
class _Watch:
    """Tells whether a module's weights are the tensors, with the contents, that they were."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._was: dict[str, tuple[int, int, int]] = {}
        self.renew()

    def renew(self) -> None:
        """From now on changes count from how the weights are now."""
        self._was = self._now()

    def changed(self) -> str | None:
        """The name of a tensor that changed since this was last asked; None: none."""
        now = self._now()
        before, self._was = self._was, now
        return next((name for name in (*now, *before) if now and now.get(name) != before.get(name)), None)

    def _now(self) -> dict[str, tuple[int, int, int]]:
        module = self._module()
        return {} if module is None else {name: _mark(t) for name, t in _tensors_of(module).items()}


def _mark(tensor: torch.Tensor) -> tuple[int, int, int]:
    version = -1 if tensor.is_inference() else tensor._version  # those have no counter
    return id(tensor), version, _place(tensor)


@final
class _Autocast(torch.nn.Module):
    """A module under the autocast that it is compiled under, whatever its caller's is."""

    def __init__(self, module: torch.nn.Module, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self._kind, self._dtype = module, kind, dtype

    def forward(self, *args: object, **kwargs: object) -> object:
        """What the module gives."""
        # what a caller's autocast around this one would keep of the weights outlives changes of them, and dies with it:
        # a CUDA graph would read it after that
        with torch.autocast(self._kind, self._dtype, cache_enabled=False):
            return self.module(*args, **kwargs)


@final
class _Eager:
    """The model by the framework's own operators."""

    def __init__(self, module: OfTensors, kind: str, *, owned: bool) -> None:
        self._module: torch.nn.Module
        self._module, self._kind, self._owned = module, kind, owned
        self._held: frozenset[int] | None = None
        """Where weights lie, once it has settled."""
        self._apart = False
        """Whether objects among its results held no weights and no arguments when they were looked through."""

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        with torch.no_grad(), without_autocast(self._kind):
            found: Sequence[torch.Tensor] = self._module(*tensors)
            if self._held is None:
                return found
            held = self._held | {_place(t) for t in tensors}
            return [t.clone() if _place(t) in held else t for t in found]

    def called(self, args: Sequence[object], kwargs: Mapping[str, object], tensors: Sequence[torch.Tensor]) -> Any:
        """What the module gives, in its own form; `tensors`: those of the arguments."""
        with torch.no_grad(), without_autocast(self._kind):
            found = cast("OfTensors", self._module).module(*args, **kwargs)
        if self._held is None:
            return found
        results, whole = tensors_in(found)
        held = self._held | {_place(t) for t in tensors}
        if any(_place(t) in held for t in results) or not (whole or self._apart):
            results, layout = taken(found)  # copies objects that nobody can look through
            shared = [_place(t) in held for t in results]
            own = (*self._module.parameters(), *self._module.buffers(), *tensors)
            self._apart = not any(shared) and (whole or not holds(found, {id(t) for t in own}))
            if not self._apart:
                apart = [t.detach().clone() if mine else t for t, mine in zip(results, shared, strict=True)]
                return layout.made(apart)
        return found

    def settle(self) -> None:
        """From here on it is the module as it stands now, whoever holds that one, and results are nobody else's."""
        if self._held is not None:
            return
        # another copy than the one that is exported for further shapes, whose parameters are others meanwhile
        self._module, _ = _copied(self._module, share=self._owned)
        self._held = frozenset(_place(t) for t in (*self._module.parameters(), *self._module.buffers()))


def _place(tensor: torch.Tensor) -> int:
    """Of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _program_inputs(model: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = getattr(model, "example_inputs", None)
    if not found:
        raise OptionError(option="example_inputs", problem="the exported program has none of its own")
    return tuple(found[0]), dict(found[1])


def flat(result: object) -> list[torch.Tensor]:
    """The tensors in what a module returned, in the framework's order."""
    from torch.utils import _pytree

    leaves = _pytree.tree_leaves(result)
    return [x for x in leaves if isinstance(x, torch.Tensor)]


__all__ = ["Compiled", "Loaded", "UserError", "compile", "load"]
