"""What `import weft` offers: compile a model, load a saved one, ask why.

exe = weft.compile(model, example_inputs)        # torch.nn.Module, torch.export program, ONNX path or bytes
y = exe(x)
exe.save("m.weft"); exe = weft.load("m.weft"); exe.report("m.html")
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from weft.errors import ArtifactError, OptionError, UserError
from weft.frontends.imported import Imported
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.kernels.record import CompileRecord
from weft.options import Options
from weft.pipeline import Compilation, compile_imported
from weft.pipeline.collector import put_off
from weft.pipeline.finish import as_array
from weft.pipeline.stages import Say, silent
from weft.runtime import artifact
from weft.runtime.any import AnyExecutable
from weft.runtime.executable import InputError, check_count, without_autocast
from weft.runtime.keyed import Keyed
from weft.runtime.loaded import Loaded, load

if TYPE_CHECKING:
    from weft.frontends.onnx import Limits

Model = torch.nn.Module | torch.export.ExportedProgram | str | os.PathLike[str] | bytes
Output = torch.Tensor | tuple[torch.Tensor, ...]


@final
class Compiled:
    """A compiled model: callable on tensors of the shapes it was compiled for, and of others within `max_plans`.

    A call with new shapes, or with other values where a guard holds the old ones, compiles another plan while its
    caller waits, with others of these shapes; callers of plans that are there do not. Plans are made one at a time,
    for each disturbs the times that another measures. Beyond `options.max_plans` (at least 1) the least recently used
    one is dropped. The plan of the example inputs is what `save` and `record` speak of, and stays. An exported program,
    whose shapes are fixed, refuses others. A model with one output gives a tensor, with several a tuple. Thread-safe.
    """

    def __init__(
        self, first: Compilation, imported: Imported,
        again: Callable[[Sequence[torch.Tensor]], tuple[Compilation, Imported]] | None,
        *, options: Options,
    ) -> None:  # fmt: skip
        self._first = first
        self._again = again
        self._options = options
        self._plans: Keyed[tuple[object, ...], tuple[Compilation, Imported]] = Keyed(options.max_plans)
        self._plans.put(_shapes_of(first.graph), (first, imported))

    def __call__(self, *inputs: torch.Tensor) -> Output:
        """Run the model.

        Raises:
            InputError: tensors of another number, type or device, or new shapes where the model cannot be
                compiled again [W011].
        """
        outputs = self._plan_for(inputs)(*inputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _plan_for(self, inputs: Sequence[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
        for position, given in enumerate(inputs):
            if not isinstance(given, torch.Tensor):
                raise InputError(position=position, problem=f"a {type(given).__name__} is no tensor")
        key = tuple((tuple(t.shape), t.dtype) for t in inputs)
        again = self._again
        if again is None or len(inputs) != len(self.graph.inputs):
            known = self._plans.known(key)
            if known is None or not _guards_hold(known[1], inputs):
                if self._first.eager is not None:
                    _check(self.graph, inputs)
                return self.run
            found = known
        else:
            found = self._plans.get(key, lambda: again(inputs), lambda plan: _guards_hold(plan[1], inputs))
        return found[0].run

    @property
    def executable(self) -> AnyExecutable:
        """The plan of the example inputs, whether or not calls run it: where the framework is faster, they run that.

        Raises:
            ArtifactError: none is left; the framework's own execution answers calls [W401].
        """
        return self._first.executable

    @property
    def run(self) -> Callable[..., Sequence[torch.Tensor]]:
        """What answers calls with the shapes of the example inputs: their plan, or the framework's own execution."""
        return self._first.run

    @property
    def graph(self) -> Graph:
        """What is computed of inputs like the example inputs."""
        return self._first.graph

    @property
    def record(self) -> CompileRecord:
        """How the plan of the example inputs came about."""
        return self._first.record

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the plan, its weights and kernels to one file; give back the digest that `load` may ask for.

        Raises:
            ArtifactError: it cannot be written, or there is no plan [W401].
        """
        return artifact.save(self.executable.linked, Path(path), trust_dir=self._options.cache)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one offline HTML file that shows what was chosen and why.

        Raises:
            ArtifactError: it cannot be written [W401].
        """
        from weft.report import render

        try:
            Path(path).write_text(render(self.record), encoding="utf-8")
        except OSError as error:
            raise ArtifactError(problem=f"{path}: {error.strerror}", remedy="choose another place") from None


def _check(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """InputError where tensors are not of the graph's shapes and types [W011]."""
    types = [graph.type_of(n) for n in graph.inputs]
    check_count(inputs, types)
    for position, (given, wanted, mine) in enumerate(zip(inputs, _shapes_of(graph), types, strict=True)):
        if (tuple(given.shape), given.dtype) != wanted:
            problem = f"expected {mine}, got {tuple(given.shape)} {given.dtype}"
            raise InputError(position=position, problem=problem)


def _shapes_of(graph: Graph) -> tuple[object, ...]:
    from weft.generate.library.execute import TORCH_DTYPE

    types = [graph.type_of(n) for n in graph.inputs]
    return tuple((t.shape, TORCH_DTYPE[t.dtype]) for t in types)


def _guards_hold(imported: Imported, inputs: Sequence[torch.Tensor]) -> bool:
    return all(g.holds(as_array(inputs[g.input_index])) for g in imported.guards)


def compile(
    model: Model,
    example_inputs: Sequence[torch.Tensor] | torch.Tensor | None = None,
    *,
    device: str | torch.device | None = None,
    options: Options | None = None,
    dims: Mapping[str, int] | None = None,
    limits: Limits | None = None,
    name: str = "model",
    say: Say = silent,
) -> Compiled:
    """Compile a model for the shapes of `example_inputs`.

    A torch module needs example inputs; an ONNX file needs them (or `dims`, sizes by name) only where its
    inputs have symbolic dimensions; `limits` bound what is read of it. The module is compiled for inference as it
    stands, under the autocast that is on: call `.eval()` first. What is done to it or its weights later changes
    nothing; on a GPU, where plans for further shapes are made of the module itself, that holds for each plan from when
    it is made.

    Raises:
        ModelError: the model is refused [W1xx].
        UnsupportedError: an operator that nothing here can run [W201].
        OptionError: a device that this build does not know, or an argument of another type [W001].
    """
    given: object = options
    if not isinstance(given, Options | None):
        raise OptionError(option="options", problem=f"a {type(given).__name__} is no weft.Options")
    options = options or Options()
    if device is not None:
        options = replace(options, device=str(device))
    if options.device.split(":")[0] not in ("cpu", "cuda"):
        raise OptionError(option="device", problem=f"{options.device!r}: 'cpu', 'cuda' or 'cuda:N'")
    inputs = _as_tensors(example_inputs)
    kind = options.device.partition(":")[0]
    if kind == "cpu":
        options = replace(options, device=kind)  # torch calls it cpu:0, too
    automatic = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with without_autocast(kind):
        if isinstance(model, str | os.PathLike | bytes):
            return _compile_onnx(model, inputs, options, dict(dims or {}), limits, name, say)
        return _compile_torch(model, inputs, options, name, say, automatic)


def _as_tensors(inputs: Sequence[torch.Tensor] | torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    if inputs is None:
        return None
    given: object = inputs
    if not isinstance(given, torch.Tensor | Iterable):
        raise OptionError(option="example_inputs", problem=f"a {type(given).__name__} is no tensor, nor several")
    found = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    for position, tensor in enumerate(found):
        if not isinstance(tensor, torch.Tensor):
            raise OptionError(
                option="example_inputs", problem=f"item {position} is a {type(tensor).__name__}, no tensor"
            )
    return found


def _compile_onnx(
    model: str | os.PathLike[str] | bytes, inputs: tuple[torch.Tensor, ...] | None, options: Options,
    dims: dict[str, int], limits: Limits | None, name: str, say: Say,
) -> Compiled:  # fmt: skip
    from weft.frontends.onnx import Limits, import_onnx

    source = model if isinstance(model, bytes) else Path(model)
    bounds = limits or Limits()
    runtime = _Runtime(source, bounds, options)

    def build(examples: Sequence[torch.Tensor] | None) -> tuple[Compilation, Imported]:
        arrays = None if examples is None else [np.asarray(as_array(t)) for t in examples]
        say("import", "")
        with put_off():
            imported = import_onnx(source, limits=bounds, dims=dims, example_inputs=arrays)
        label = name if isinstance(source, bytes) else source.stem
        start = partial(runtime.start, imported) if options.device == "cpu" else None
        made = compile_imported(
            imported, options, example_inputs=examples, start=start, framework="onnxruntime", model=label, say=say
        )
        runtime.keep_if(made.eager is not None)
        return made, imported

    first, imported = build(inputs)
    return Compiled(first, imported, build, options=options)


@final
class _Runtime:
    """An ONNX file by ONNX Runtime: one session for all shapes, held as long as it answers calls."""

    def __init__(self, source: Path | bytes, limits: Limits, options: Options) -> None:
        self._source, self._limits, self._options = source, limits, options
        self._made: Callable[..., Sequence[torch.Tensor]] | None = None
        self._wanted = False

    def start(self, imported: Imported, seconds: float) -> Callable[..., Sequence[torch.Tensor]] | None:
        """The session, tried in a process of its own before it was made; None where it does not run the model."""
        from weft.frontends.onnx.whole import onnxruntime_model

        if self._made is None:
            graph = imported.graph
            made = onnxruntime_model(
                self._source,
                [graph.type_of(n) for n in graph.inputs],
                len(graph.outputs),
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
    model: torch.nn.Module | torch.export.ExportedProgram, inputs: tuple[torch.Tensor, ...] | None,
    options: Options, name: str, say: Say, automatic: torch.dtype | None,
) -> Compiled:  # fmt: skip
    from weft.frontends.torch import import_exported

    module = None if isinstance(model, torch.export.ExportedProgram) else model
    if module is not None and inputs is None:
        raise OptionError(option="example_inputs", problem="a torch module needs them")
    given: object = model
    if not isinstance(given, torch.nn.Module | torch.export.ExportedProgram):
        problem = f"a {type(given).__name__} is no torch module, exported program or ONNX file"
        raise OptionError(option="model", problem=problem)
    device = options.device
    if device.startswith("cuda"):
        from weft.pipeline.gpu import device_of

        device_of(options)  # told before the weights go there
    placed, owned = _placed(model, device)
    if module is not None and not owned and device == "cpu":
        placed, owned = _copied(placed)
    kind = device.partition(":")[0]
    if automatic is not None and module is not None:
        placed = _Autocast(placed, kind, automatic)
    eager = _Eager(placed, kind, owned=owned)

    def build(examples: Sequence[torch.Tensor]) -> tuple[Compilation, Imported]:
        say("import", "")
        with put_off(), without_autocast(kind):
            if isinstance(model, torch.export.ExportedProgram):
                program = model
            else:
                # tensors of their own: what is given twice, or is a weight too, would be traced as one value
                traced = tuple(x.to(device).detach() for x in examples)
                with torch.no_grad():
                    program = torch.export.export(placed, traced, strict=False)
            imported = import_exported(program, device=device)
        if device == "cpu" and (not owned or program is model):
            imported = _with_own_constants(imported)
        label = name if name != "model" or module is None else type(module).__name__
        with without_autocast(kind):
            made = compile_imported(
                imported, options, example_inputs=examples, eager=eager, settle=eager.settle, model=label, say=say
            )
        return made, imported

    if inputs is None:
        inputs = _program_inputs(model)
    first, imported = build(inputs)
    again = build if module is not None else None
    return Compiled(first, imported, again, options=options)


def _placed(model: torch.nn.Module | torch.export.ExportedProgram, device: str) -> tuple[torch.nn.Module, bool]:
    """The model as a module for tensors of the device; whether it is a copy, as it is where weights lie elsewhere."""
    module: torch.nn.Module = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    if all(x.device == place for x in (*module.parameters(), *module.buffers())):
        return module, False
    return copy.deepcopy(module).to(place), True


def _copied(module: torch.nn.Module, *, share: bool = False) -> tuple[torch.nn.Module, bool]:
    """The module as it stands: what its owner does with it later changes no plan. Itself where it cannot be copied.

    `share`: the copy has the same parameters and buffers.
    """
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())} if share else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch at its own exported programs
            return copy.deepcopy(module, shared), True
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
class _Autocast(torch.nn.Module):
    """A module under the autocast that it is compiled under, whatever its caller's is."""

    def __init__(self, module: torch.nn.Module, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self._kind, self._dtype = module, kind, dtype

    def forward(self, *tensors: torch.Tensor) -> object:
        """What the module gives."""
        # what a caller's autocast around this one would keep of the weights outlives changes of them, and dies with it:
        # a CUDA graph would read it after that
        with torch.autocast(self._kind, self._dtype, cache_enabled=False):
            return self.module(*tensors)


@final
class _Eager:
    """The model by the framework's own operators."""

    def __init__(self, module: torch.nn.Module, kind: str, *, owned: bool) -> None:
        self._module, self._kind, self._owned = module, kind, owned
        self._held: frozenset[int] | None = None
        """Where weights lie, once it has settled."""

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        with torch.no_grad(), without_autocast(self._kind):
            found = flat(self._module(*tensors))
            if self._held is None:
                return found
            held = self._held | {_place(t) for t in tensors}
            return [t.clone() if _place(t) in held else t for t in found]

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


def _program_inputs(model: object) -> tuple[torch.Tensor, ...]:
    found = getattr(model, "example_inputs", None)
    if not found or found[1]:
        raise OptionError(option="example_inputs", problem="the exported program has none of its own")
    return tuple(found[0])


def flat(result: object) -> list[torch.Tensor]:
    """The tensors in what a module returned, in the framework's order."""
    from torch.utils import _pytree

    leaves = _pytree.tree_leaves(result)
    return [x for x in leaves if isinstance(x, torch.Tensor)]


__all__ = ["Compiled", "Loaded", "UserError", "compile", "load"]
