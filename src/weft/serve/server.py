"""`weft.serve.Server`: models by name and version, loaded, answered, replaced and unloaded. No protocol and no port.

    with Server("mlp.weft") as server:
        y = server.submit(x).result()

Each model runs in a process of its own, unless `ServeOptions.isolated` is false or it is an object of this process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np

from weft.colocate.bundle import is_bundle
from weft.errors import OptionError, RefitError, WeftError
from weft.ir.types import Array
from weft.serve.backend import Backend
from weft.serve.errors import RequestError, UnavailableError, UnknownModelError
from weft.serve.process import ProcessBackend, Settings
from weft.serve.query import Outputs
from weft.serve.served import Served
from weft.serve.settings import ServeOptions, Source, checked_name, found_in, newest, sources

WATCH_S = 0.02
Models = str | PathLike[str] | Sequence[object] | Mapping[str, object] | object
"""One model, or several by name: paths (several: plans for several batch sizes), or what `weft.load` or `weft.compile`
gave."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of the index."""

    name: str
    version: str
    state: str
    reason: str


@final
class Server:
    """Thread-safe. `submit` gives a future; `close`, or leaving the block, ends all."""

    def __init__(
        self, models: Models = (), options: ServeOptions | None = None, *, directory: Path | None = None,
        start: bool = True,
    ) -> None:  # fmt: skip
        """Loads every model, one after the other. `directory`: more of them, looked through again at each load.

        Raises:
            ArtifactError: a file cannot be loaded, or files of one model do not belong together [W401].
            OptionError: a name that is none, or a directory that cannot be read [W001].
        """
        self.options = options or ServeOptions()
        self.began = time.time()
        self._directory = directory
        self._sources, self._objects = _read(models)
        self._lock = threading.RLock()
        self._loading = threading.Lock()
        self._models: dict[str, dict[str, Served]] = {}
        self._failed: dict[tuple[str, str], str] = {}
        self._leaving: list[threading.Thread] = []
        self._draining = self._loaded = False
        self.unloaded: set[str] = set()
        """Models that somebody unloaded, and nobody loaded again."""
        self.on_change: Callable[[], None] | None = None
        """Called before a model that was loaded, or unloaded, is what queries find."""
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="weft-serve-watch", daemon=True)
        self._watcher.start()
        if start:
            try:
                self.load_all()
            except BaseException:
                self.close()
                raise

    def load_all(self, without: Iterable[str] = ()) -> None:
        """Every model that there is, but those, which count as unloaded."""
        self.unloaded |= set(without)
        for name in dict.fromkeys([*(s.name for s in self._known()), *self._objects]):
            if name not in self.unloaded:
                self.load(name)
        self._loaded = True

    def _changes(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def submit(
        self, inputs: Array | Sequence[Array] | Mapping[str, Array], *, model: str = "", version: str = "",
        timeout_s: float | None = None,
    ) -> Future[Outputs]:  # fmt: skip
        """One query; the result is a tuple of arrays, one for each output.

        `inputs`: by name, or in the model's order. `model` may be left out where there is one. The future may be
        cancelled as long as the query waits.

        Raises:
            RequestError: tensors that the model does not take, or no such model [W019].
            ServeError: the queue is full, the model is not there, or it ends [W304].
        """
        served = self.model(model or self._only(), version)
        seconds = self.options.timeout_s if timeout_s is None else timeout_s
        if not seconds > 0:
            raise RequestError(problem=f"a timeout of {seconds} s")
        return served.submit(_named(inputs, served), timeout_s=seconds)

    def _only(self) -> str:
        with self._lock:
            names = list(self._models)
        if len(names) != 1:
            raise RequestError(problem=f"the server has {len(names)} models: name one")
        return names[0]

    def model(self, name: str, version: str = "") -> Served:
        """A model that is loaded; without a version the newest.

        Raises:
            UnknownModelError: there is none [W019].
            UnavailableError: it is not loaded, or the server ends [W304].
        """
        with self._lock:
            if self._draining:
                raise UnavailableError(problem="the server is shutting down")
            found = self._models.get(name)
            if found:
                served = found.get(version or newest(list(found)))
                if served is not None:
                    return served
        listed = [x for x in self.index() if x.name == name]
        if not listed:
            raise UnknownModelError(problem=f"there is no model {name[:80]!r}")
        if version and version not in [x.version for x in listed]:
            raise UnknownModelError(problem=f"model {name!r} has no version {version[:20]!r}")
        reasons = "; ".join(x.reason for x in listed if x.reason)
        raise UnavailableError(problem=f"model {name!r} is not loaded{': ' + reasons if reasons else ''}")

    def models(self) -> list[Served]:
        """All that are loaded."""
        with self._lock:
            return [s for versions in self._models.values() for s in versions.values()]

    def versions(self, name: str) -> list[str]:
        """Of a model that is loaded, ascending."""
        with self._lock:
            return sorted(self._models.get(name, {}), key=int)

    @property
    def ready(self) -> bool:
        """Whether all models were loaded, and every one that is loaded answers."""
        with self._lock:
            gone = any(not self._models.get(name) and name not in self.unloaded for name, _ in self._failed)
        return self._loaded and not self._draining and not gone and all(s.state == "READY" for s in self.models())

    @property
    def draining(self) -> bool:
        """Whether it takes no more queries."""
        return self._draining

    def index(self) -> list[Listed]:
        """Every version of every model that is there, loaded or not."""
        try:
            known = {(s.name, s.version) for s in self._known()}
        except OptionError:
            known = set()  # the directory is away: what is loaded is told
        known |= {(name, "1") for name in self._objects}
        with self._lock:
            loaded = {(n, v): s for n, versions in self._models.items() for v, s in versions.items()}
            failed = dict(self._failed)
        found = []
        for name, version in sorted(known | loaded.keys() | failed.keys(), key=lambda k: (k[0], int(k[1]))):
            served = loaded.get((name, version))
            if served is not None:
                found.append(Listed(name, version, served.state, served.problem))
            else:
                found.append(Listed(name, version, "UNAVAILABLE", failed.get((name, version), "not loaded")))
        return found

    def _known(self) -> list[Source]:
        found = {(s.name, s.version): s for s in (found_in(self._directory) if self._directory else [])}
        return list((found | {(s.name, s.version): s for s in self._sources}).values())

    def load(self, name: str) -> None:
        """Load a model, or its files as they are now; who is served by the one before is answered by it.

        Every version is ready before any takes its place, but for one with a job beside it, which ends first: queries
        are refused meanwhile. One load at a time.

        Raises:
            UnknownModelError: there is no such model [W019].
            WeftError: it cannot be loaded; what was there stays, but for one with a job beside it.
        """
        with self._loading:
            wanted = [s for s in self._known() if s.name == name]
            if not wanted and name not in self._objects:
                raise UnknownModelError(problem=f"there is no model {name[:80]!r}")
            self._end_exclusive(name, wanted)
            fresh: dict[str, Served] = {}
            try:
                if name in self._objects:
                    fresh["1"] = self._started(Source(name, "1", ()))
                for source in wanted:
                    fresh[source.version] = self._started(source)
            except BaseException:
                for served in fresh.values():
                    served.close()
                raise
            self.unloaded.discard(name)
            self._changes()
            with self._lock:
                refused = self._draining
                old = fresh if refused else self._models.get(name, {})
                if not refused:
                    self._models[name] = fresh
            self._let_go(list(old.values()))
            if refused:
                raise UnavailableError(problem="the server is shutting down")

    def _end_exclusive(self, name: str, wanted: Sequence[Source]) -> None:
        """Versions that cannot be there twice answer what they have, and end; those that do so already are awaited."""
        with self._lock:
            current = self._models.get(name, {})
            ending = [current.pop(v) for v, s in list(current.items()) if s.backend.exclusive]
        self._let_go(ending)
        if ending or any(is_bundle(file) for source in wanted for file in source.files):
            with self._lock:
                leaving = list(self._leaving)
            for thread in leaving:  # each ends: draining has a limit, and who does not end is killed
                thread.join()

    def _started(self, source: Source) -> Served:
        o = self.options
        try:
            served = Served(
                source.name, source.version, self._backend(source), max_delay_s=o.max_delay_s,
                max_queries=o.max_queries, max_batch=o.max_batch,
            )  # fmt: skip
            try:
                served.start()
            except BaseException:
                served.close()
                raise
        except WeftError as error:
            with self._lock:
                self._failed[source.name, source.version] = str(error.details.get("problem", error))
            raise
        with self._lock:
            self._failed.pop((source.name, source.version), None)
        return served

    def _backend(self, source: Source) -> Backend:
        o = self.options
        if source.files and o.isolated:
            settings = Settings(o.threads, o.cache, o.trust)
            return ProcessBackend(source.files, settings, timeout_s=o.worker_timeout_s, standby=o.standby)
        from weft.options import Options
        from weft.serve.local import LocalBackend
        from weft.serve.plans import Runs, loaded

        if source.files:
            for path in source.files:
                if is_bundle(path):
                    problem = "a best-effort job runs beside a model in a process of its own alone"
                    raise OptionError(option="isolated", problem=f"{path.name}: {problem}: leave isolated=True")
            options = Options(cache_dir=o.cache, threads=o.threads)
            return LocalBackend([loaded(p, o.trust, options) for p in source.files])
        objects: Sequence[Runs] = self._objects[source.name]  # type: ignore[assignment]  # `Plans` looks at them
        return LocalBackend(objects)

    def unload(self, name: str) -> None:
        """Take no more queries for a model, answer those that it has, and free it; returns at once.

        Raises:
            UnknownModelError: there is no such model [W019].
        """
        with self._loading:
            if name not in {x.name for x in self.index()}:
                raise UnknownModelError(problem=f"there is no model {name[:80]!r}")
            self.unloaded.add(name)
            self._changes()
            with self._lock:
                old = self._models.pop(name, None)
        self._let_go(list((old or {}).values()))

    def _let_go(self, models: Sequence[Served]) -> None:
        """Drain and close, in a thread of their own."""

        def leave() -> None:
            for served in models:
                served.drain(self.options.drain_s)
                served.close()

        if not models:
            return
        thread = threading.Thread(target=leave, name="weft-serve-unload", daemon=True)
        with self._lock:
            self._leaving = [t for t in self._leaving if t.is_alive()] + [thread]
            thread.start()

    def refit(self, name: str, state: Mapping[str, Array], *, recompile: bool = False) -> None:
        """Other weights for a model that `weft.compile` made in this process, while it is served (`Compiled.refit`).

        A saved plan is refitted by saving the refitted model over its file, and `load`.

        Raises:
            RefitError: the weights do not fit, or the model is a saved plan [W012].
        """
        from weft.serve.local import LocalBackend

        backend = self.model(name).backend
        if not isinstance(backend, LocalBackend):
            problem = f"{name!r} is a saved plan, which holds no model that other weights could be folded into"
            raise RefitError(problem=problem, remedy="save the refitted model over the file, and load it again")
        backend.refit(state, recompile=recompile)

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            for served in self.models():
                served.watch()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more queries; whether all that there were have their answer within that time."""
        with self._lock:
            self._draining = True
        end = time.monotonic() + (self.options.drain_s if timeout_s is None else timeout_s)
        done = [served.drain(max(0.0, end - time.monotonic())) for served in self.models()]
        return all(done)

    def close(self) -> None:
        """End at once; queries that have no answer get an error. Idempotent."""
        with self._lock:
            self._draining = True
            models = self.models()
            self._models = {}
            leaving = list(self._leaving)
        for served in models:
            served.close()
        for thread in leaving:
            thread.join(self.options.drain_s + 60.0)
        self._ended.set()
        if self._watcher is not threading.current_thread():
            self._watcher.join(60.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(models: Models) -> tuple[list[Source], dict[str, Sequence[object]]]:
    """Which of the models are files, and which are objects."""
    if isinstance(models, Sequence) and not isinstance(models, str) and all(isinstance(m, Source) for m in models):
        return [m for m in models if isinstance(m, Source)], {}
    if not isinstance(models, Mapping):
        first = models[0] if isinstance(models, Sequence) and not isinstance(models, str) and models else models
        models = {_name_of(first): models}
    found: list[Source] = []
    objects: dict[str, Sequence[object]] = {}
    for key, value in models.items():
        name, _, version = str(key).partition(":")
        checked_name(name, version or "1")
        several: Iterable[object] = value if isinstance(value, list | tuple) else [value]
        given = list(several)
        if given and all(isinstance(x, str | PathLike) for x in given):
            found.append(Source(name, version or "1", tuple(Path(x) for x in given)))  # type: ignore[arg-type]
        elif given and not version:
            objects[name] = given
        else:
            raise OptionError(option="models", problem=f"{str(key)[:80]!r} has no model, or a version of an object")
    return found, objects


def _name_of(model: object) -> str:
    return sources([str(model)])[0].name if isinstance(model, str | PathLike) else "model"


def _named(inputs: Array | Sequence[Array] | Mapping[str, Array], served: Served) -> Mapping[str, Array]:
    """Arrays by name; RequestError where there are too many or too few [W019]."""
    if isinstance(inputs, Mapping):
        return {str(k): np.asarray(v) for k, v in inputs.items()}
    specs = served.signature.inputs
    given = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if len(given) != len(specs):
        raise RequestError(problem=f"the model takes {len(specs)} tensors, {len(given)} were given")
    return {s.name: np.asarray(x) for s, x in zip(specs, given, strict=True)}
