"""Batches run in the caller's own process, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import final

from weft.errors import RefitError, WeftError
from weft.ir.types import Array
from weft.serve.backend import Job, Keeper
from weft.serve.errors import LostDeviceError
from weft.serve.layout import places
from weft.serve.plans import Plans, Runs
from weft.serve.signature import Signature


@final
class LocalBackend:
    """Plans that this process has loaded or compiled."""

    problem: str = ""
    gone: bool = False
    restarts = 0
    stands_by = False
    exclusive = False
    job = None

    def __init__(self, models: Sequence[Runs]) -> None:
        """ArtifactError where they are not plans of one model [W401]."""
        self._models = models
        self._plans = Plans(models)
        self._keeper: Keeper | None = None
        self._closed = threading.Event()
        made = [places(self.signature, size) for size in self.signature.sizes]
        self._places = [(x, y, self._plans.bind(i, x, y)) for i, (x, y) in enumerate(made)]

    @property
    def signature(self) -> Signature:
        """Of the model."""
        return self._plans.signature

    def start(self, keeper: Keeper) -> None:
        """Run each plan once."""
        self._keeper = keeper
        self._plans.warm_up()
        keeper.changed()

    def acquire(self) -> bool:
        """There is always room: `run` returns when the batch is done."""
        return not self._closed.is_set()

    def release(self) -> None:
        """Nothing was taken."""

    def run(self, job: Job) -> None:
        """Run it, and tell the keeper."""
        assert self._keeper is not None  # started
        inputs, outputs, run = self._places[job.plan]
        job.pack(inputs)
        began = time.perf_counter()
        try:
            run()
        except LostDeviceError as error:
            self.problem, self.gone = str(error.details["problem"]), True
            self._keeper.failed(job, error)
            self._keeper.changed()
        except WeftError as error:
            self._keeper.failed(job, error)
        else:
            self._keeper.finished(job, outputs, time.perf_counter() - began)

    def watch(self, now: float) -> None:
        """What hangs here hangs the process."""

    def refit(self, state: Mapping[str, Array], *, recompile: bool = False) -> None:
        """Other weights for compiled models; calls meanwhile have the old ones.

        Raises:
            RefitError: the weights do not fit, or a model is a saved plan [W012].
        """
        from weft.api import Compiled

        for model in self._models:
            if not isinstance(model, Compiled):
                problem = "a saved plan holds no model that other weights could be folded into"
                raise RefitError(problem=problem, remedy="save the refitted model over the file, and load it again")
            model.refit(state, recompile=recompile)

    def close(self) -> None:
        """Nothing runs afterwards."""
        self._closed.set()
