"""A measuring process that loads its libraries before anybody asks it and does nothing else until it is greeted."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

from weft.tune.messages import Message
from weft.tune.transport import Transport, WorkerFault


@final
class Ahead:
    """A worker that is started at once, and is the one that the first `start` gives; leaving the block ends it."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._ready = False

    def __enter__(self) -> Self:
        try:
            self._inner.start()
            self._ready = True
        except WorkerFault:
            self._inner.kill()  # who needs it starts another and hears why there is none
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """See `Transport`."""
        if not self._ready:
            self._inner.start()
        self._ready = False

    def send(self, message: Message, timeout_s: float) -> None:
        """See `Transport`."""
        self._inner.send(message, timeout_s)

    def receive(self, timeout_s: float) -> Message:
        """See `Transport`."""
        return self._inner.receive(timeout_s)

    def running(self) -> int:
        """See `Transport`."""
        return self._inner.running()

    def kill(self) -> None:
        """See `Transport`."""
        self._ready = False
        self._inner.kill()
