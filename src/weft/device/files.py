"""Publishing files so that a reader sees a whole one or none, whatever happens to the writer.

Every write of the compiler's caches goes through `publish`, so that a full or read-only disk can be injected at one
place, and every read through `read_private`, which takes nothing that somebody else could have put there. Callers go on
without the cache where either fails, inside of `doing_without`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.private import nothing_kept, weakness

_LOST = "what is new is not kept"
fault: Callable[[str, Path], None] | None = None
"""Test hook: called with (`mkdir` | `write` | `rename`, path) before each step; may raise OSError."""


def _check(site: str, path: Path) -> None:
    if fault is not None:
        fault(site, path)


def private_directory(path: Path) -> Path:
    """Create `path` with mode 0700 if needed.

    Raises:
        OSError: it cannot be made, or somebody else can write to it or above it.
    """
    _check("mkdir", path)
    demand_private(path)  # first: nothing is made where a stranger could take it away
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    demand_private(path)
    return path


def demand_private(path: Path) -> None:
    """Raise unless only this user and root can change what is at `path`.

    Raises:
        PermissionError: which level others can write to.
    """
    problem = weakness(path)
    if problem:
        raise PermissionError(problem)


def read_private(path: Path) -> bytes:
    """The bytes of a file of the cache.

    Raises:
        OSError: there is none, or somebody else could have written it.
    """
    data = path.read_bytes()  # what is not there is a miss, whoever could have put it there
    demand_private(path)
    return data


def find_private(path: Path) -> bytes | None:
    """The bytes of a file of the cache; None, said where there is more to it than a miss, if they cannot be taken."""
    try:
        return read_private(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        nothing_kept(path, error.strerror or str(error), _LOST)
        return None


@contextlib.contextmanager
def doing_without(path: Path) -> Iterator[None]:
    """Whatever keeps a file of the cache from being written is said once, and costs the cache only."""
    try:
        yield
    except OSError as error:
        nothing_kept(path, error.strerror or str(error), _LOST)


def publish(path: Path, data: bytes, *, private: bool = True) -> None:
    """Write `data` to `path`: unique temporary beside it, fsync, rename.

    `private`: into a directory that is made if needed, where nobody else can write.

    Raises:
        OSError: nothing is left behind then.
    """
    if private:
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


def record_trust(cache_dir: Path | None, digest: str) -> None:
    """Record that this user has written what has this digest; None: nowhere."""
    if cache_dir is not None:
        with doing_without(cache_dir):  # then whoever loads it is asked for the digest
            publish(cache_dir / "trusted" / digest, b"")


def is_trusted(cache_dir: Path | None, digest: str) -> bool:
    """Whether this user has."""
    return cache_dir is not None and find_private(cache_dir / "trusted" / digest) is not None
