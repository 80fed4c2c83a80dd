"""Messages between a front end and a worker, over a pair of sockets: a kind, a length, bytes; file descriptors beside.

Tensors are not among them: those lie in memory that both have (`ring.py`).
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import final

HEAD = struct.Struct("<IB")
RUN = struct.Struct("<QId")
"""Number of a job, its plan, and the seconds that its oldest query has waited."""
DONE = struct.Struct("<Qd")
"""Number of a job, and the seconds that it took."""
FAILED = struct.Struct("<Q?")
"""Number of a job, and whether its inputs are why; the text follows."""
MAX_BYTES = 1 << 20
MAX_FDS = 64


class Kind(IntEnum):
    """Of a message."""

    HELLO = 1
    """To the worker, first: settings (JSON), and the files of the plans."""
    SIGNATURE = 2
    """From it: what the model takes (JSON)."""
    MEMORY = 3
    """To it: number and size of the slots (JSON), and the memory."""
    READY = 4
    """From it."""
    REFUSED = 5
    """From it, in place of the above: why it ends (text)."""
    RUN = 6
    DONE = 7
    FAILED = 8
    JOB = 9
    """From a worker that has a best-effort job beside the model: how both stand (JSON), about once a second."""


@dataclass(frozen=True, slots=True)
class Message:
    """What was received."""

    kind: Kind
    body: bytes
    fds: tuple[int, ...] = ()
    """The receiver's to close."""

    def json(self) -> dict[str, object]:
        """Of a body that is JSON."""
        found: dict[str, object] = json.loads(self.body)
        return found


@final
class Channel:
    """One end. One thread sends at a time, and one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, kind: Kind, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """OSError where the other end is gone."""
        data = HEAD.pack(len(body), kind) + body
        if not fds:
            self._end.sendall(data)
            return
        sent = socket.send_fds(self._end, [data], list(fds))
        if sent < len(data):  # the other end may have answered, and gone, by now
            self._end.sendall(data[sent:])

    def send_json(self, kind: Kind, body: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """As `send`."""
        self.send(kind, json.dumps(body).encode(), fds)

    def receive(self) -> Message | None:
        """The next message; None where the other end is gone.

        Raises:
            TimeoutError: there was none for as long as `patience` says.
        """
        fds: list[int] = []
        head = self._exactly(HEAD.size, fds)
        if head is None:
            return None
        size, kind = HEAD.unpack(head)
        if size > MAX_BYTES:
            return None  # no message of ours is as long: whoever sends it is sick
        body = self._exactly(size, fds)
        return None if body is None else Message(Kind(kind), body, tuple(fds))

    def has_more(self, seconds: float) -> bool:
        """Whether there is something to receive, or the other end is gone; waits for that, at most so long."""
        return bool(select.select([self._end], [], [], seconds)[0])

    def patience(self, seconds: float | None) -> None:
        """How long `receive` waits."""
        self._end.settimeout(seconds)

    def _exactly(self, size: int, fds: list[int]) -> bytes | None:
        found = bytearray()
        while len(found) < size:
            try:
                data, more = _receive(self._end, size - len(found))
            except TimeoutError:
                raise
            except OSError:
                return None
            fds += more
            if not data:
                return None
            found += data
        return bytes(found)

    def hang_up(self) -> None:
        """The other end, and whoever waits in `receive` here, finds this one gone."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is

    def close(self) -> None:
        """Give the socket back; nobody uses it any more."""
        self._end.close()


def _receive(end: socket.socket, size: int) -> tuple[bytes, list[int]]:
    room = array.array("i")
    data, ancillary, _, _ = end.recvmsg(size, socket.CMSG_SPACE(MAX_FDS * room.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            room.frombytes(content[: len(content) - len(content) % room.itemsize])
    for fd in room:
        os.set_inheritable(fd, False)
    return data, list(room)
