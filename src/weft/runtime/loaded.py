"""`weft.load`: a saved plan as something to call. Imports nothing of the compiler, which takes longer than to load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch

from weft.errors import RefitError
from weft.options import Options
from weft.runtime import artifact
from weft.runtime.any import AnyExecutable


@final
class Loaded:
    """A saved plan: callable like `weft.api.Compiled`, for the shapes it was saved with."""

    def __init__(self, executable: AnyExecutable) -> None:
        self.executable = executable

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the model; InputError for tensors of other shapes or types [W011]."""
        outputs = self.executable(*inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def refit(self, state: Mapping[str, torch.Tensor]) -> None:
        """Not of a saved plan, which holds folded and merged weights without the model they came from.

        Raises:
            RefitError: always [W012].
        """
        del state
        problem = "a saved plan holds no model that other weights could be folded into"
        raise RefitError(problem=problem, remedy="refit what `weft.compile` gave, and save that")


def load(path: str | os.PathLike[str], *, trust: str | None = None, options: Options | None = None) -> Loaded:
    """Load a saved plan. Native code in it runs only if this user saved it or `trust` is its digest.

    Raises:
        ArtifactError: damaged, of another version, or not trusted [W401].
    """
    options = options or Options()
    return Loaded(artifact.load(Path(path), trust=trust, cache_dir=options.cache, threads=options.threads))
