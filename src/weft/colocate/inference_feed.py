"""The job's side of the process that reads a network's inputs and writes its results.

    feed = InferenceFeed(spec, folder, inputs, outputs, span=lambda files: (0, 0), held=held)
    if feed.is_ready(n):                # never waits
        places = feed.inputs(n)         # stay until `release(n)`
    feed.put(n)                         # the results of n lie in `feed.results(n)`

Nothing here waits but `wait_ready` and `finish`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, final

from weft.colocate.inference_files import TensorSpec, input_files, read_into
from weft.colocate.inference_ring import WRITING, Ring, ring_bytes
from weft.colocate.inference_worker import Task
from weft.colocate.job import JobError
from weft.colocate.told_process import ended, started
from weft.device.nameless import nameless
from weft.errors import ArtifactError, DeviceError
from weft.kernels.scheduling import JobSpec

COMMAND = (sys.executable, "-m", "weft.colocate.inference_worker")
LIMIT_S = 60.0
"""Of what is waited for: an input at the begin, results at the end."""
_LOOK_S = 0.0005


class Feed(Protocol):
    """Inputs and results of inferences by their numbers since the run began, -1: for measuring. Places: addresses."""

    def is_ready(self, number: int) -> bool:
        """Whether its inputs are there, and there is room for its results.

        Raises:
            JobError: inputs cannot be read [W018].
            ArtifactError: results cannot be written [W401].
        """
        ...

    def inputs(self, number: int) -> Sequence[int]:
        """Where they lie."""
        ...

    def results(self, number: int) -> Sequence[int]:
        """Where they are to lie; empty: nobody asks for them."""
        ...

    def release(self, number: int) -> None:
        """Its inputs are not needed any more, nor those before."""
        ...

    def put(self, number: int) -> None:
        """Its results lie there, and those before."""
        ...

    def wait_ready(self, number: int) -> None:
        """Until `is_ready`; raises what that does.

        Raises:
            DeviceError: nothing comes [W301].
        """
        ...

    @property
    def written(self) -> int:
        """Inferences whose results were written, or dropped."""
        ...

    def finish(self) -> None:
        """Until all results that were put are written.

        Raises:
            ArtifactError: one cannot be written [W401].
            DeviceError: nothing goes on [W301].
        """
        ...


@final
class InferenceFeed:
    """A `Feed` of files, by a process of its own."""

    def __init__(
        self, spec: JobSpec, folder: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *,
        span: Callable[[int], tuple[int, int]], held: ExitStack,
        pin: Callable[[int, int], None] = lambda _place, _size: None, command: Sequence[str] = COMMAND,
    ) -> None:  # fmt: skip
        """Start the process.

        Args:
            spec: of kind `network`.
            folder: where its job.toml lies.
            inputs: of the network.
            outputs: likewise.
            span: of the number of files: the inference that comes first, over all passes, and the one behind the last;
                0: there is no last.
            held: ends the process, and gives the memory back.
            pin: is told address and bytes of the memory: for copies that nobody waits for.
            command: of the process.

        Raises:
            JobError: no inputs, or the first cannot be read [W018].
            ArtifactError: the folder of results cannot be made [W401].
            DeviceError: the process cannot be started [W301].
        """
        self.files = tuple(input_files(folder / spec.inputs))
        first, end = span(len(self.files))
        self._name, self._gives = spec.name, bool(spec.outputs)
        results = str(folder / spec.outputs) if spec.outputs else ""
        if results:
            _made(Path(results), folder, folder / spec.inputs)
        kept = tuple(outputs) if results else ()
        fd = nameless(ring_bytes(inputs, kept), "weft-inferences")
        with contextlib.ExitStack() as own:
            own.callback(os.close, fd)
            self._ring = Ring(inputs, kept, fd)
            self.slots = self._ring.slots
            """Inferences on their way at once, at most."""
            pin(*self._ring.place)
            read_into(folder / spec.inputs / self.files[0], inputs, self._ring.inputs(-1))
            task = Task(
                fd, str(folder / spec.inputs), results, self.files, first, end, tuple(inputs), tuple(outputs)
            )  # fmt: skip
            self._process = started(command, task, fd, "the process of a network's files")
        held.callback(self._close)

    def is_ready(self, number: int) -> bool:
        """See `Feed`."""
        ring = self._ring
        if ring.word("failed") == WRITING or (ring.word("failed") and number >= ring.word("filled")):
            self._raise()
        return number < ring.word("filled") and number - ring.word("written") < ring.slots

    def inputs(self, number: int) -> Sequence[int]:
        """See `Feed`."""
        return [int(x.ctypes.data) for x in self._ring.inputs(number)]

    def results(self, number: int) -> Sequence[int]:
        """See `Feed`."""
        return [int(x.ctypes.data) for x in self._ring.outputs(number)] if self._gives else ()

    def release(self, number: int) -> None:
        """See `Feed`."""
        self._ring.say("released", number + 1)

    def put(self, number: int) -> None:
        """See `Feed`."""
        self._ring.say("put", number + 1)

    @property
    def written(self) -> int:
        """See `Feed`."""
        return self._ring.word("written")

    def wait_ready(self, number: int) -> None:
        """See `Feed`."""
        self._wait(lambda: self.is_ready(number), "has read no input")

    def finish(self) -> None:
        """See `Feed`."""

        def over() -> bool:
            if self._ring.word("failed") == WRITING:
                self._raise()
            return self._ring.word("written") >= self._ring.word("put")

        self._wait(over, "has not written all results")

    def _wait(self, over: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not over():
            status = self._process.poll()
            if status is not None and not over():
                raise DeviceError(problem=f"{self._name}: the process of its files ended with {status}, and {what}")
            if time.monotonic() > until:
                raise DeviceError(problem=f"{self._name}: the process of its files {what} in {LIMIT_S:g} s")
            time.sleep(_LOOK_S)

    def _raise(self) -> None:
        text = self._ring.failure
        if self._ring.word("failed") == WRITING:
            raise ArtifactError(where=self._name, problem=text[:400], remedy="choose another place")
        raise JobError(where=self._name, key="inputs", problem=text[:400], remedy="mend the file, or take it away")

    def _close(self) -> None:
        self._ring.say("stop", 1)
        ended(self._process, LIMIT_S if not self._ring.word("failed") else 1)


def _made(results: Path, folder: Path, inputs: Path) -> None:
    """The folder of results, which stays in the job's and is not that of the inputs."""
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the folder of results cannot be made: {error.strerror}"
        raise ArtifactError(where=results.name, problem=problem, remedy="choose another place") from None
    if results.resolve() == inputs.resolve():
        problem = "it is the folder of inputs: results would replace the inputs"
        raise JobError(where=results.name, key="outputs", problem=problem, remedy="choose another folder")
    if not results.resolve().is_relative_to(folder.resolve()):
        problem = "it leads out of the folder"
        raise JobError(where=results.name, key="outputs", problem=problem, remedy="put it beside the job.toml")
