"""`weft.load`: a saved plan as something to call. Imports nothing of the compiler, which takes longer than to load."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

import torch

from weft.errors import ArtifactError, InputError, RefitError
from weft.options import Options
from weft.runtime import artifact
from weft.runtime.any import AnyExecutable
from weft.runtime.call_form import CallForm


@final
class Loaded:
    """A saved plan: callable like `weft.api.Compiled`, for the shapes and the form of the call it was saved with.

    What the module gives as a dataclass or a named tuple is given as `weft.runtime.call_form.Outputs`, with its fields
    by name and by place. `call`: None, where the file says nothing of a form: it takes tensors by place, and gives one
    tensor or a tuple.
    """

    def __init__(self, executable: AnyExecutable, call: CallForm | None = None) -> None:
        self.executable, self.call = executable, call

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run the model, called as the module is, or with the plan's tensors by place.

        Raises:
            InputError: tensors of other shapes or types, or other arguments beside them than were saved [W011].
        """
        outputs = self.flat(*self._tensors(inputs, named))
        if self.call is not None:
            return self.call.made(outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def flat(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the plan on its inputs, in their order; its outputs in theirs.

        Raises:
            InputError: tensors of other shapes or types, or no tensors [W011].
        """
        for position, given in enumerate(tensors):
            if not isinstance(given, torch.Tensor):
                raise InputError(position=position, problem=f"a {type(given).__name__} is no tensor")
            if given.is_nested or given.layout is not torch.strided:
                raise InputError(position=position, problem="it is no dense tensor")
        return tuple(self.executable(*tensors))

    def _tensors(self, inputs: Sequence[object], named: Mapping[str, object]) -> Sequence[Any]:
        if self.call is not None:
            return self.call.tensors(inputs, named, len(self.executable.graph.inputs))
        if named:
            problem = "a plan that says nothing of names is called with tensors by place"
            raise InputError(position=next(iter(named)), problem=problem)
        return inputs

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """A plan is kept in its file, not pickled.

        Raises:
            ArtifactError: always [W401].
        """
        raise_uncopied()

    def refit(self, state: Mapping[str, torch.Tensor]) -> None:
        """Not of a saved plan, which holds folded and merged weights without the model they came from.

        Raises:
            RefitError: always [W012].
        """
        del state
        problem = "a saved plan holds no model that other weights could be folded into"
        raise RefitError(problem=problem, remedy="refit what `weft.compile` gave, and save that")


def raise_uncopied() -> NoReturn:
    """Of whatever runs a plan: its kernels are loaded, and its calls bound to memory of this process.

    Raises:
        ArtifactError: always [W401].
    """
    raise ArtifactError(
        problem="a compiled model can be neither copied nor pickled: its kernels are bound to memory of this process",
        remedy="`compiled.save(path)` writes it to a file, `weft.load(path)` gives another one, in any process",
    )


def load(path: str | os.PathLike[str], *, trust: str | None = None, options: Options | None = None) -> Loaded:
    """Load a saved plan. Native code in it runs only if this user saved it or `trust` is its digest.

    Raises:
        ArtifactError: damaged, of another version, or not trusted [W401].
    """
    options = options or Options()
    return Loaded(*artifact.load_called(Path(path), trust=trust, cache_dir=options.cache, threads=options.threads))
