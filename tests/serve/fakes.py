"""Stand-ins: a signature, a model without a plan, workers that are threads and die when they are told to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weft.errors import WeftError
from weft.ir.types import Array
from weft.serve import worker
from weft.serve.channel import Channel
from weft.serve.errors import InferenceFailedError, LostDeviceError, RequestError
from weft.serve.process import Process
from weft.serve.signature import Signature, TensorSpec

SIZES = (1, 4, 8)


def signature(sizes: Sequence[int] = SIZES, *, packs: bool = True) -> Signature:
    inputs = (TensorSpec("x", "FP32", (2,)), TensorSpec("n", "INT64", ()))
    return Signature(inputs, (TensorSpec("y", "FP32", (2,)),), tuple(sizes), packs=packs)


def answer(x: Array, n: Array) -> Array:
    """What the fake model gives for rows."""
    return np.add(np.multiply(x, 2), n[:, None]).astype(np.float32)


def query(rows: int, seed: int) -> dict[str, Array]:
    chance = np.random.default_rng(seed)
    return {"x": chance.standard_normal((rows, 2)).astype(np.float32), "n": chance.integers(0, 99, (rows,))}


class FakeModel:
    """Row by row; n == -1 is an error of the caller, -2 one of the plan, -3 kills the worker, -4 hangs,
    -5 loses its GPU."""

    def __init__(self, sizes: Sequence[int] = SIZES, die: Callable[[], None] = lambda: None) -> None:
        self.signature = signature(sizes)
        self._die = die

    def bind(self, plan: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> Callable[[], None]:
        def run() -> None:
            x, n = inputs
            if (n == -1).any():
                raise RequestError(problem="n is -1")
            if (n == -2).any():
                raise InferenceFailedError(problem="n is -2")
            if (n == -3).any():
                self._die()
            if (n == -5).any():
                raise LostDeviceError(problem="cuda:0 answers no more")
            if (n == -4).any():
                time.sleep(0.4)
            outputs[0][...] = answer(x, n)

        return run

    def warm_up(self) -> None:
        pass


class ThreadWorker:
    """A worker that is a thread; to kill it is to cut its socket."""

    pid = 1

    def __init__(
        self, end: socket.socket, refuse: WeftError | None, sizes: Sequence[int], digest: str, die_at_once: bool
    ) -> None:
        self._end = socket.socket(fileno=socket.dup(end.fileno()))
        self._refuse, self._sizes, self._digest, self._die_at_once = refuse, sizes, digest, die_at_once
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._end:
            try:
                worker.serve(Channel(self._end), self._load)
            except (OSError, LostDeviceError):
                return  # killed while it answered; or it can run nothing more

    def _load(self, settings: Mapping[str, object], fds: Sequence[int]) -> tuple[worker.Model, str]:
        if self._refuse is not None:
            raise self._refuse
        if self._die_at_once:
            self.kill()
        return FakeModel(self._sizes, self.kill), self._digest

    def kill(self) -> None:
        Channel(self._end).hang_up()

    def wait(self, seconds: float | None = None) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(30 if seconds is None else seconds)


class Launcher:
    """Starts such workers; the next ones refuse, or die while they load."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self.sizes = sizes
        self.started: list[ThreadWorker] = []
        self.refusals: list[WeftError | None] = []
        self.stillborn = 0
        self.digest = "digest"

    def __call__(self, end: socket.socket) -> Process:
        refuse = self.refusals.pop(0) if self.refusals else None
        self.stillborn -= 1
        made = ThreadWorker(end, refuse, self.sizes, self.digest, self.stillborn >= 0)
        self.started.append(made)
        return made
