"""A measuring worker that outlives its tuner: loading one takes seconds, and the next compilation may want the same.

A worker is kept only where it was asked for nothing any more and nothing went wrong with it, and is taken only by who
would start the very same: same program, environment, directory, greeting and cache. It proves that it still computes
before it is used, else another is started. It ends when nobody wanted it for `IDLE_S`, after `MOST_TRIALS` (it holds
what it loaded), and with this process; a forked child has none of its parent's.

One may also begin to load before it is known what it will be told (`preloaded_worker`): while a model is taken in, say.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

from weft.kernels.codec import Json
from weft.options import Options
from weft.tune.messages import Message
from weft.tune.sites import worker_of
from weft.tune.transport import Fault, ProcessTransport, Transport, WorkerFault

IDLE_S = 180.0
MOST = 2
"""Workers that are kept at once: of a CPU and of a GPU."""
MOST_TRIALS = 2000
PROOF_S = 2.0
"""How long an idle worker may take for a sum."""
PROOF: Mapping[str, Json] = {"op": "canary", "object": "", "entry": ""}
MEMORY = 2.0
"""What a worker may take was a share of what was free then: by how much that may differ now."""
PRELOAD_BUDGET_S = 60.0
"""With budgets of up to so many seconds, what a worker takes to load is a part of them that counts."""


@dataclass(eq=False, slots=True)
class _Kept:
    key: str
    transport: ProcessTransport
    max_bytes: int
    trials: int
    is_loading: bool
    """It was greeted and has not answered."""
    timer: threading.Timer | None = None
    about: str = ""
    """All that it depends on but its greeting."""


@final
class Keeper:
    """The workers that are kept. Safe on many threads."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        self._theirs: list[_Kept] = []
        """Of the process that this one was forked from: never touched, never reaped."""
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forked)

    def take(self, key: str, max_bytes: int) -> _Kept | None:
        """One that was greeted like this; None: there is none."""
        with self._lock:
            for kept in self._kept:
                if kept.key == key and max_bytes / MEMORY <= kept.max_bytes <= max_bytes * MEMORY:
                    self._kept.remove(kept)
                    break
            else:
                return None
        if kept.timer is not None:
            kept.timer.cancel()
        return kept

    def put(self, kept: _Kept) -> None:
        """Keep one for a while, instead of one like it, or of the oldest."""
        kept.timer = threading.Timer(self._idle_s, self.drop, (kept,))
        kept.timer.daemon = True
        with self._lock:
            same = [k for k in self._kept if k.key == kept.key]
            self._kept = [k for k in self._kept if k.key != kept.key]
            old = [*same, *self._kept[: max(0, len(self._kept) + 1 - MOST)]]
            self._kept = [*(k for k in self._kept if k not in old), kept]
            kept.timer.start()
        for k in old:
            _end(k)

    def drop(self, kept: _Kept) -> None:
        """End one, unless it was taken meanwhile."""
        with self._lock:
            if kept not in self._kept:
                return
            self._kept.remove(kept)
        _end(kept)

    def has(self, about: str) -> bool:
        """Whether there is one that differs from such a worker in its greeting at most."""
        with self._lock:
            return any(kept.about == about for kept in self._kept)

    def close(self) -> None:
        """End all."""
        with self._lock:
            old, self._kept = self._kept, []
        for kept in old:
            _end(kept)

    def _forked(self) -> None:
        self._lock = threading.Lock()  # whoever held it does not exist here
        self._theirs, self._kept = [*self._theirs, *self._kept], []
        for kept in self._theirs:
            kept.transport.disown()

    def __len__(self) -> int:
        return len(self._kept)


def _end(kept: _Kept) -> None:
    if kept.timer is not None:
        kept.timer.cancel()
    kept.transport.kill()


KEEPER = Keeper()


@final
class KeptTransport:
    """A worker that is taken from those kept where there is one, and may be given back.

    It starts when it is greeted.
    """

    def __init__(self, make: Callable[[], Transport], about: str) -> None:
        """`make` makes a worker that is not started; `about` is all that it depends on but its greeting."""
        self._make, self._about, self._keeper = make, about, KEEPER
        self._inner: Transport | None = None
        self._key, self._max_bytes, self._trials = "", 0, 0
        self._ready: Message | None = None
        """The answer to its greeting, of one that gave it long ago."""
        self._is_loading = False

    def start(self) -> None:
        """See `Transport`."""
        self.kill()

    def send(self, message: Message, timeout_s: float) -> None:
        """See `Transport`."""
        if message.get("op") == "hello":
            self._greet(message, timeout_s)
            return
        self._trials += message.get("op") == "trial"
        self._there().send(message, timeout_s)

    def _greet(self, message: Message, timeout_s: float) -> None:
        greeting = {k: v for k, v in message.items() if k != "max_bytes"}
        self._key = json.dumps([self._about, greeting], sort_keys=True)
        self._max_bytes = int(str(message.get("max_bytes", 0)))
        self._trials, self._ready = 0, None
        while (kept := self._keeper.take(self._key, self._max_bytes)) is not None:
            if kept.is_loading or _computes(kept.transport):
                self._inner, self._trials, self._is_loading = kept.transport, kept.trials, kept.is_loading
                self._max_bytes = kept.max_bytes
                self._ready = None if kept.is_loading else {"event": "ready"}
                return
            kept.transport.kill()
        self._is_loading = True
        if (kept := self._keeper.take(_ungreeted(self._about), 0)) is not None:
            self._inner = kept.transport
            with contextlib.suppress(WorkerFault):
                self._inner.send(message, timeout_s)
                return
            self._inner.kill()  # it died while it loaded
        self._inner = self._make()
        self._inner.start()
        self._inner.send(message, timeout_s)

    def receive(self, timeout_s: float) -> Message:
        """See `Transport`."""
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        found = self._there().receive(timeout_s)
        self._is_loading = False
        return found

    def running(self) -> int:
        """See `Transport`."""
        return -1 if self._inner is None else self._inner.running()

    def kill(self) -> None:
        """See `Transport`."""
        inner, self._inner, self._ready = self._inner, None, None
        if inner is not None:
            inner.kill()

    def give_back(self) -> None:
        """Keep the worker for the next who wants it; it must be asked for nothing but its greeting."""
        inner, self._inner, self._ready = self._inner, None, None
        if isinstance(inner, ProcessTransport) and self._trials < MOST_TRIALS:
            kept = _Kept(self._key, inner, self._max_bytes, self._trials, self._is_loading, about=self._about)
            self._keeper.put(kept)
        elif inner is not None:
            inner.kill()

    def _there(self) -> Transport:
        if self._inner is None:
            raise WorkerFault(Fault.CRASH, "no worker")
        return self._inner


def about_worker(transport: ProcessTransport, cache: object) -> str:
    """All that a worker of this cache depends on but its greeting."""
    return repr([transport.about, cache])


def _ungreeted(about: str) -> str:
    return json.dumps([about])


@contextlib.contextmanager
def preloaded_worker(options: Options, threads: int) -> Iterator[None]:
    """The worker of a `Tuner` with these options and threads begins to load now, where that is worth it.

    It is for the first tuner inside of the block that greets one like it; nobody's is ended with the block. None loads
    where one is kept that may do.
    """
    if not options.keep_worker or not 0 < options.budget_s <= PRELOAD_BUDGET_S:
        yield
        return
    transport = worker_of(options, threads)
    about = about_worker(transport, options.cache)
    if KEEPER.has(about):
        yield
        return
    kept = _Kept(_ungreeted(about), transport, 0, 0, is_loading=True, about=about)
    try:
        transport.start()
        KEEPER.put(kept)
    except WorkerFault:
        transport.kill()  # who needs one starts another and hears why there is none
    try:
        yield
    finally:
        KEEPER.drop(kept)


def _computes(transport: Transport) -> bool:
    """Whether a worker that was idle is there and adds up rightly."""
    try:
        transport.send(PROOF, PROOF_S)
        answer = transport.receive(PROOF_S)
    except WorkerFault:
        return False
    return answer.get("event") == "canary" and answer.get("problem") == ""
