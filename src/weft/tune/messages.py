"""Framing of what parent and worker say to each other: a 4-byte length, then UTF-8 JSON. No pickle.

Requests: `hello`, `canary`, `trial`, `rest` (give back what is kept between trials; no answer), `bye`. Answers are
events; each names the request it belongs to.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import cast

from weft.kernels.codec import Json

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Above the largest constant that stands in a problem; a length beyond it is garbage."""
BOARD = struct.Struct("=q")
"""What the shared page holds: the number of the kernel that runs, or -1."""
BOARD_BYTES = 4096
Message = Mapping[str, Json]


class GarbageError(ValueError):
    """Bytes that are no message."""


def encode(message: Message) -> bytes:
    """One framed message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack(">I", len(body)) + body


def body_size(header: bytes) -> int:
    """Length of the body that follows a 4-byte header.

    Raises:
        GarbageError: longer than any message of ours.
    """
    (size,) = struct.unpack(">I", header)
    if size > MAX_MESSAGE_BYTES:
        raise GarbageError(f"a message of {size} bytes")
    return int(size)


def decode(body: bytes) -> Message:
    """The JSON object in a body.

    Raises:
        GarbageError: not UTF-8, not JSON, or no object.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise GarbageError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise GarbageError("no JSON object")
    return cast("Message", value)
