"""Who else could put something at a path: every level of it is checked, as ssh does for its keys.

What the cache holds is run: kernels, plans, the digests of saved plans that are trusted. A directory that others can
write to is therefore neither read nor written, and that is said once.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import threading
import warnings
from pathlib import Path

_told: set[str] = set()
_roots: set[Path] = set()
_lock = threading.Lock()


def weakness(path: Path) -> str:
    """Why somebody besides this user and root could change what is at `path`; empty if nobody could.

    Each level, a link and what it points to alike, belongs to this user or to root, and can be written by no other,
    save directories with the sticky bit, as /tmp. Levels that do not exist are passed over.
    """
    levels = dict.fromkeys(_levels(os.path.abspath(path)))
    levels |= dict.fromkeys(_levels(os.path.realpath(path)))
    for level in levels:
        try:
            status = os.lstat(level)
        except FileNotFoundError:
            continue  # made by us when it is needed
        except OSError as error:
            return f"{level}: {error.strerror}"
        if status.st_uid not in (0, os.getuid()):
            return f"{level} belongs to another user"
        if stat.S_ISLNK(status.st_mode) or not _others_write(status):
            continue  # a link has no permissions of its own
        if not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
            return f"others can write to {level} (mode {stat.S_IMODE(status.st_mode):04o}): chmod go-w it"
    return ""


def _levels(path: str) -> list[str]:
    """The path and all above it, the root first."""
    found = [path]
    while (above := os.path.dirname(found[-1])) != found[-1]:
        found.append(above)
    return found[::-1]


def _others_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _own_group(status.st_gid)


def _own_group(gid: int) -> bool:
    """Is this the group that systems with a umask of 002 give each user, with nobody else in it?

    Never for root, whose group strangers are in by number.
    """
    if os.getuid() == 0:
        return False
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def usable(cache: Path | None) -> Path | None:
    """The cache directory if nobody else can write there; else None, said once. None: no place for one is known."""
    if cache is None:
        nothing_kept(Path(), "neither WEFT_CACHE_DIR nor HOME is set")
        return None
    with _lock:
        _roots.add(cache)
    problem = weakness(cache)
    if problem:
        nothing_kept(cache, problem)
    return None if problem else cache


def nothing_kept(path: Path, problem: str, lost: str = "nothing is kept") -> None:
    """Warn, once for the cache that `path` is in, that what is compiled and measured is not kept."""
    with _lock:
        place = str(next((root for root in _roots if root == path or root in path.parents), path))
        if place in _told:
            return
        _told.add(place)
    warnings.warn(f"Weft goes on without its cache, {lost}: {problem}", stacklevel=2)
