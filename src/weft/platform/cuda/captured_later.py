"""The framework's own model in a CUDA graph that its first call records, where a budget left no time for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch

from weft.generate.library.execute import TORCH_DTYPE
from weft.ir.declined import Declined
from weft.ir.types import TensorType
from weft.options import Options
from weft.platform.cuda.captured import capture, in_place
from weft.platform.cuda.device import device_of
from weft.runtime.in_place import InPlace
from weft.runtime.streams import Lease

Tensors = Sequence[torch.Tensor]
Model = Callable[..., Tensors]
Sample = Callable[[Callable[[], object], int], float]
CALLS = 3
"""By which the recorded model and the model itself are compared; each is called once before."""


@final
class CapturedLater:
    """Computes a first call by the model itself, and records the model then; what is recorded answers if it is faster.

    A model that cannot be recorded stays as it is. Inside a caller's own capture, too, the model itself is run. From
    several threads one records, and the others wait.
    """

    def __init__(self, model: Model, types: Sequence[TensorType], options: Options, sample_us: Sample) -> None:
        """`sample_us`: microseconds of a call, of so many."""
        self._model, self._types, self._options = model, tuple(types), options
        self._sample_us = sample_us
        self._lock = threading.Lock()
        self._run: Model | None = None

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """As `Captured`."""
        if self._run is None and not torch.cuda.is_current_stream_capturing():
            with self._lock:
                if self._run is None:
                    found = self._model(*inputs)  # what this raises is the caller's, and nothing is recorded
                    self._run = self._faster(inputs)
                    return found
        return (self._run or self._model)(*inputs)

    def _faster(self, inputs: Tensors) -> Model:
        found = capture(self._model, inputs, self._options)
        if isinstance(found, Declined):
            return self._model
        recorded, own = (self._sampled_us(run, inputs) for run in (found, self._model))
        return found if recorded <= own else self._model

    def _sampled_us(self, run: Model, inputs: Tensors) -> float:
        run(*inputs)
        return self._sample_us(partial(run, *inputs), CALLS)

    @property
    def in_place(self) -> InPlace:
        """As that of `Captured`; a model that cannot be recorded is run, and its results are copied at once."""
        device, options = device_of(self._options), self._options
        kinds = [(t.shape, TORCH_DTYPE[t.dtype], device) for t in self._types]
        return in_place(self._model, kinds, Lease(device), allow_tf32=options.allow_tf32)
