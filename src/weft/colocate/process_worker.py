"""The process of a best-effort job: a user's Python function that does one unit of work after another, as granted.

Started as `python -m weft.colocate.process_worker` by `process_supervisor`, with one line of JSON. The file has

    def unit(number): ...            # does a unit; or a generator: it may be paused at each `yield`
    def save(path): ...              # both or neither: what a unit needs of those before it
    def load(path): ...

What a unit put on the GPU has ended when its segment counts. A unit counts once it is done. Where the process is killed
the next one goes on behind the last unit that was saved; without `save` that is the last one that counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast, final

from weft.colocate.job import JobError, save_progress
from weft.colocate.process_words import WHOLE, ProcessTask, Words, state_file
from weft.colocate.told_process import task_of
from weft.errors import ArtifactError, DeviceError, WeftError
from weft.kernels.scheduling import JobProgress

NAP_S, LONG_NAP_S = 20e-6, 1e-3
"""Where it may not work: a while short ones, then longer ones."""
SHORT_NS = 2_000_000_000
RAISED = 3
"""Exit status where the function raised."""
NICE = 10
_DEATH_SIGNAL, _KILL = 1, 9
_WARM_UP = 2
"""Units that are not timed."""


class Place(Protocol):
    """Where segments run."""

    def inside(self, part: int) -> AbstractContextManager[object]:
        """What is launched meanwhile runs beside a model's part of so many multiprocessors; 0: on all of them."""
        ...

    def finish(self) -> None:
        """Until all that was launched has ended."""
        ...


@final
class HostPlace:
    """The host itself: what runs has ended when it returns."""

    def inside(self, part: int) -> AbstractContextManager[object]:  # noqa: ARG002 - a host has no parts
        """See `Place`."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """See `Place`."""


@final
class GpuPlace:
    """Streams of the lowest priority, on the whole GPU or on what a partition leaves, made when they are asked for."""

    def __init__(self, memory_bytes: int, held: ExitStack) -> None:
        """`memory_bytes`: at most; 0: what there is. `held` gives streams and partitions back.

        Raises:
            DeviceError: there is no GPU [W301].
        """
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(problem="the job's process sees no NVIDIA GPU")
        self._torch, self._held = torch, held
        torch.zeros(1, device="cuda")
        if memory_bytes:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total))
        self._streams: dict[int, Any] = {}

    def inside(self, part: int) -> AbstractContextManager[object]:
        """See `Place`.

        Raises:
            DeviceError: the GPU has no such part [W301, W302].
        """
        if part not in self._streams:
            self._streams[part] = self._torch.cuda.ExternalStream(self._handle(part))  # type: ignore[no-untyped-call]
        return cast("AbstractContextManager[object]", self._torch.cuda.stream(self._streams[part]))

    def finish(self) -> None:
        """See `Place`."""
        self._torch.cuda.synchronize()

    def _handle(self, part: int) -> int:
        from weft.device.cuda import streams
        from weft.device.cuda.partition import Partition, partitioned

        least, _ = streams.priorities()
        if not part:
            own = streams.Stream(priority=least)
            self._held.callback(own.close)
            return own.handle
        parts = self._held.enter_context(partitioned(part))
        if not isinstance(parts, Partition):
            raise DeviceError(problem=f"no part of {part} multiprocessors: {parts.reason}")
        return parts.rest.stream(priority=least)


@final
class Function:
    """The user's function, and what saves and loads its state."""

    def __init__(self, module: ModuleType, name: str) -> None:
        """Raises JobError: the file has no such function, or only one of `save` and `load` [W018]."""
        found = getattr(module, name, None)
        if not callable(found):
            raise _bad("function", f"{module.__name__} has no function {name!r}", f"define {name}(number)")
        self._call: Callable[[int], object] = found
        self._in_segments = inspect.isgeneratorfunction(found)
        self.save: Callable[[str], object] | None = getattr(module, "save", None)
        self.load: Callable[[str], object] | None = getattr(module, "load", None)
        if (self.save is None) != (self.load is None):
            raise _bad("file", "it has only one of `save` and `load`", "define both, or neither")

    def segments(self, number: int) -> Iterator[None]:
        """A unit; it may be paused at each step. At least one."""
        if self._in_segments:
            yield from cast("Iterator[None]", self._call(number))
        else:
            self._call(number)


@final
class Work:
    """Units one after another, as the words grant them."""

    def __init__(self, task: ProcessTask, words: Words, function: Function, place: Place, done: int) -> None:
        """`done`: units that count."""
        self._task, self._words, self._function, self._place = task, words, function, place
        self._units = done
        self._began = self._ended = words.word("ended")
        self._times: list[list[int]] = []
        """Nanoseconds of the segments of units that were measured."""
        self._alone: list[int] = []
        """Of each segment of a unit, once they were."""
        self._rest_until = 0
        self._last = time.monotonic_ns()
        self._parent = os.getppid()
        self._save_at = time.monotonic() + task.save_s

    def run(self) -> None:
        """Until all units are done, or it is told to stop and has saved.

        Raises:
            BaseException: what the function raises.
        """
        end = self._task.end
        while not (end and self._units >= end):
            if not self._unit():
                break
            if time.monotonic() >= self._save_at:
                self.save()
        self.save()
        self._words.say("over", int(bool(end and self._units >= end)))

    def save(self) -> None:
        """The state, then how far it has come: what is there already stays where either cannot be written."""
        task, words, units = self._task, self._words, self._units
        self._save_at = time.monotonic() + task.save_s
        try:
            if self._function.save is not None:
                self._save_state(units)
            if task.progress:
                save_progress(Path(task.progress), JobProgress(task.job, units, 0, 0))
        except (OSError, ArtifactError) as error:
            words.tell(f"state and progress of {units} units cannot be saved: {_told(error)}", unsaved=True)
            words.say("unsaved", 1)
            return
        words.say("unsaved", 0)
        words.say("saved", units)
        for other in Path(task.states).iterdir() if self._function.save is not None else ():
            # also what a life that was killed meanwhile had not written to its end
            if other.name != f"{units}.state" and other.name.endswith((".state", ".state.new")):
                _remove(other)

    def _save_state(self, units: int) -> None:
        assert self._function.save is not None
        path = Path(state_file(self._task.states, units))
        beside = path.with_name(f".{path.name}.new")
        _remove(beside)
        try:
            self._function.save(str(beside))
            if beside.is_file():
                with beside.open("rb") as file:
                    os.fsync(file.fileno())
            _remove(path)
            beside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(beside)
            raise

    def _unit(self) -> bool:
        """The next one; False: it was told to stop before it began."""
        words = self._words
        segments = self._function.segments(self._units)
        times: list[int] = []
        over = False
        while not over:
            if not self._granted(begun=bool(times)):
                return False
            part = words.word("part")
            at = time.monotonic_ns()
            with self._place.inside(part):
                over = next(segments, self) is self
                self._place.finish()
            self._last = time.monotonic_ns()
            times.append(self._last - at)
            self._rest(times[-1])
            words.say("partial", self._so_far(len(times)))
            self._ended += 1
            words.say("ended", self._ended)
        self._units += 1
        words.say("units", self._units)  # one word: the unit counts from here on
        words.say("partial", 0)
        if words.word("measure"):
            self._measured(times)
        return True

    def _granted(self, *, begun: bool) -> bool:
        """Wait until a segment may begin, and say that it does; False: it was told to stop, and no unit has begun."""
        words = self._words
        while True:
            if words.word("stop"):
                if not begun:
                    return False
                break  # to the end of the unit, whatever is granted
            if self._began < words.word("granted") and time.monotonic_ns() >= self._rest_until:
                words.say("begun", self._began + 1)
                if self._began < words.word("granted"):  # else it was paused meanwhile
                    break
                words.say("begun", self._began)
            self._nap()
        self._began += 1
        words.say("begun", self._began)
        return True

    def _nap(self) -> None:
        now = time.monotonic_ns()
        time.sleep(NAP_S if now - self._last < SHORT_NS else LONG_NAP_S)
        if os.getppid() != self._parent:  # nobody is there any more
            sys.exit(0)

    def _rest(self, took_ns: int) -> None:
        duty = self._words.word("duty")
        self._rest_until = self._last + took_ns * (WHOLE - duty) // duty if 0 < duty < WHOLE else 0

    def _so_far(self, segments: int) -> int:
        """Of the unit under way, in its time alone."""
        unit = self._words.word("unit")
        if self._alone:
            return min(unit, sum(self._alone[:segments]))
        return unit * min(segments, self._words.word("segments")) // max(1, self._words.word("segments"))

    def _measured(self, times: Sequence[int]) -> None:
        self._times.append(list(times))
        if len(self._times) <= _WARM_UP and self._words.word("unit"):
            return
        kept = self._times[_WARM_UP:] or self._times
        count = max(map(len, kept))
        self._alone = [round(statistics.median(t[k] for t in kept if k < len(t))) for k in range(count)]
        words = self._words
        words.say("segments", count)
        words.say("longest", max(1, *self._alone))
        words.say("unit", max(1, sum(self._alone)))


def loaded(task: ProcessTask) -> Function:
    """The user's file, imported by itself, with its folder in front of where modules are looked for.

    Raises:
        JobError: it cannot be imported, or lacks the function [W018].
    """
    path = Path(task.file)
    sys.dont_write_bytecode = True  # the folder stays as it is: a co-location bundle is held against its digests
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise _bad("file", f"{path.name} is no Python file", "name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _bad("file", f"{path.name} cannot be imported: {_told(error)}", "mend it") from error
    return Function(module, task.function)


def work(task: ProcessTask, words: Words) -> None:
    """A life of the process.

    Raises:
        WeftError: the file, its state or the device cannot be taken.
        BaseException: what the function raises.
    """
    done = words.kept() if task.life > 1 else task.first
    with ExitStack() as held:
        place = GpuPlace(task.memory_bytes, held) if task.device == "cuda" else HostPlace()
        with place.inside(0):
            function = loaded(task)
            state = Path(state_file(task.states, done))
            if function.load is not None and done:
                if not state.exists():
                    raise _bad("progress", f"the state behind {done} units is missing", "remove the file to begin anew")
                function.load(str(state))
            place.finish()
        words.say("units", done)
        words.say("saved", done)
        words.say("stateless", int(function.save is None))
        words.say("partial", 0)
        words.say("begun", words.word("ended"))
        made = Work(task, words, function, place, done)
        words.say("ready", task.life)
        made.run()


def main(lines: Sequence[bytes] | None = None) -> int:
    """Read the task, and work; the exit status."""
    task = task_of(ProcessTask, lines)
    words = Words(task.fd)
    os.dup2(2, 1)  # what the function prints is no output of the command
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, _KILL, 0, 0, 0)  # with what started it, inside of a unit too
        os.nice(NICE)
    try:
        work(task, words)
    except Exception as error:
        words.tell(_told(error))
        words.say("raised", task.life)
        return RAISED
    return 0


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"


def _bad(key: str, problem: str, remedy: str) -> JobError:
    return JobError(where="job.toml", key=key, problem=problem, remedy=remedy)


if __name__ == "__main__":
    sys.exit(main())
