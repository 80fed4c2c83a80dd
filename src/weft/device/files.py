"""Publishing files so that a reader sees a whole one or none, whatever happens to the writer.

Every write of the compiler's caches goes through `publish`, so that a full or read-only disk can be
injected at one place; callers answer an OSError by going on without the cache.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

fault: Callable[[str, Path], None] | None = None
"""Test hook: called with (`mkdir` | `write` | `rename`, path) before each step; may raise OSError."""


def _check(site: str, path: Path) -> None:
    if fault is not None:
        fault(site, path)


def private_directory(path: Path) -> Path:
    """Create `path` with mode 0700 if needed.

    Raises:
        OSError: it cannot be made, or somebody else owns it.
    """
    _check("mkdir", path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


def publish(path: Path, data: bytes) -> None:
    """Write `data` to `path`: unique temporary beside it, fsync, rename.

    Raises:
        OSError: nothing is left behind then.
    """
    private_directory(path.parent)
    _check("write", path)
    handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        _check("rename", path)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
