"""The plans of one model, loaded. Imported where they are run, and only there: nothing else of a server needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, final

import torch

from weft.errors import ArtifactError, WeftError
from weft.ir.graph import Graph
from weft.ir.types import Array
from weft.options import Options
from weft.runtime.loaded import Loaded, load
from weft.serve.errors import InferenceFailedError, LostDeviceError
from weft.serve.layout import places
from weft.serve.signature import TensorSpec, signature_of


class Runs(Protocol):
    """A plan, on its inputs in their order."""

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Its outputs in their order."""
        ...


def plan_of(model: object) -> tuple[Graph, torch.device, Runs]:
    """What a model computes, where, and what runs it.

    Raises:
        ArtifactError: it is nothing that Weft has made [W401].
    """
    if isinstance(model, Loaded):
        return model.executable.graph, model.executable.device, model.flat
    from weft.api import Compiled

    if isinstance(model, Compiled):

        def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
            return model.run(*inputs)  # behind a refit another one

        return model.graph, model.executable.device, run
    problem = f"a {type(model).__name__} is neither a saved plan nor a compiled model"
    raise ArtifactError(problem=problem, remedy="give the path of a file, or what `weft.load` or `weft.compile` gave")


def loaded(path: Path, trust: Sequence[str], options: Options) -> Loaded:
    """A saved plan that this user saved, or whose digest is one of those.

    Raises:
        ArtifactError: see `weft.load` [W401].
    """
    try:
        return load(path, options=options)
    except ArtifactError as error:
        for digest in trust:
            try:
                return load(path, trust=digest, options=options)
            except ArtifactError:
                continue  # the digest of another file
        raise error from None


def answers(device: torch.device) -> bool:
    """Whether a device still does what it is asked: behind some failures a GPU does nothing for a process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except Exception:  # whatever the framework raises of it
        return False
    return True


@final
class Plans:
    """Runs batches on arrays in memory of this process; each plan may be for another device."""

    def __init__(self, models: Sequence[object], *, answers: Callable[[torch.device], bool] = answers) -> None:
        """One for each batch size. `answers`: whether a device does, asked behind a failure.

        Raises:
            ArtifactError: they are not plans of one model [W401].
        """
        found = [plan_of(m) for m in models]
        self.signature, order = signature_of([g for g, *_ in found])
        self._models = [found[i][2] for i in order]
        self._devices = [found[i][1] for i in order]
        self._answers = answers
        self._shapes = [[g.type_of(n).shape for n in g.inputs] for g in (found[i][0] for i in order)]

    def bind(self, plan: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> Callable[[], None]:
        """What runs one of the plans from these arrays to those, which have an axis of rows in front.

        Raises (when called):
            WeftError: what the plan says of its inputs, that it failed, or that its device is lost [W304].
        """
        tensors = [
            as_tensor(x, spec).reshape(shape)
            for x, spec, shape in zip(inputs, self.signature.inputs, self._shapes[plan], strict=True)
        ]
        found = [as_tensor(x, spec) for x, spec in zip(outputs, self.signature.outputs, strict=True)]
        return partial(self._run, self._models[plan], self._devices[plan], tensors, found)

    def _run(
        self, model: Runs, device: torch.device, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        try:
            with torch.no_grad():
                found = model(*[x.to(device) for x in inputs])
                for place, tensor in zip(outputs, found, strict=True):
                    place.copy_(tensor.reshape(place.shape))
        except Exception as error:  # whatever a library call of the plan raises
            if not self._answers(device):
                told = f"{device} answers no more: {type(error).__name__}: {str(error).splitlines()[0][:300]}"
                raise LostDeviceError(problem=told) from error
            if isinstance(error, WeftError):
                raise
            told = f"the plan failed: {type(error).__name__}: {str(error)[:300]}"
            raise InferenceFailedError(problem=told) from error

    def warm_up(self) -> None:
        """Run each plan once, on zeros."""
        for i in range(len(self.signature.sizes)):
            inputs, outputs = places(self.signature, self.signature.sizes[i])
            for x in inputs:
                x[...] = 0
            self.bind(i, inputs, outputs)()


def as_tensor(array: Array, spec: TensorSpec) -> torch.Tensor:
    """The same memory; sixteen bits are taken for the BF16 that they are."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if spec.datatype == "BF16" else tensor
