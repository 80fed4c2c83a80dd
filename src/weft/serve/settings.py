"""What a server is told: which files are which models, and its limits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.colocate.bundle import is_bundle
from weft.errors import OptionError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
VERSION = re.compile(r"[0-9]{1,9}")
SUFFIX = ".weft"


@dataclass(frozen=True, slots=True)
class Source:
    """Where one version of a model is loaded from."""

    name: str
    version: str
    files: tuple[Path, ...]
    """Plans of one model for several batch sizes, or one co-location bundle."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Limits and settings of the part that answers queries; `front.FrontOptions` has those of the protocols."""

    max_batch: int = 0
    """Rows of a batch; 0: those of the largest plan."""
    max_delay_s: float = 0.0
    """How long a batch that is not full waits for further queries."""
    max_queries: int = 1024
    """Queries of a model that wait at once."""
    timeout_s: float = 30.0
    """Of a query that does not say how long it waits."""
    worker_timeout_s: float = 60.0
    """A worker that is at one batch for longer is killed."""
    drain_s: float = 30.0
    """How long a model that is unloaded, or a server that ends, answers what it has."""
    threads: int = 0
    """Of the plans' kernels; 0: as each plan has them."""
    isolated: bool = True
    """Plans run in processes of their own, one for each model."""
    standby: bool = False
    """A second process for each model, loaded and idle, which takes over when the first dies."""
    cache: Path | None = None
    """Where digests of trusted plans are; None: `WEFT_CACHE_DIR` or XDG."""
    trust: tuple[str, ...] = ()
    """Digests of plans that somebody else saved."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "worker_timeout_s"):
            if not getattr(self, name) > 0:
                raise OptionError(option=name, problem=f"{getattr(self, name)} is no time")
        for name in ("max_delay_s", "drain_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise OptionError(option=name, problem=f"{getattr(self, name)} is no time")
        for name, least in (("max_batch", 0), ("max_queries", 1), ("threads", 0)):
            if getattr(self, name) < least:
                raise OptionError(option=name, problem=f"{getattr(self, name)} is less than {least}")


def sources(texts: Iterable[str]) -> list[Source]:
    """What `[NAME[:VERSION]=]FILE[,FILE...]` say; a name is that of the file, a version 1, where none is given.

    Raises:
        OptionError: a name or version that is none, or one given twice [W001].
    """
    found: dict[tuple[str, str], Source] = {}
    for text in texts:
        head, equals, files = text.partition("=")
        if not equals:
            head, files = "", text
        paths = tuple(Path(x) for x in files.split(",") if x)
        if not paths:
            raise OptionError(option="FILE", problem=f"{text[:200]!r} names no file")
        name, _, version = head.partition(":")
        source = Source(name or paths[0].name.removesuffix(SUFFIX), version or "1", paths)
        checked_name(source.name, source.version)
        if (source.name, source.version) in found:
            raise OptionError(option="FILE", problem=f"version {source.version} of {source.name!r} is given twice")
        found[source.name, source.version] = source
    return list(found.values())


def checked_name(name: str, version: str) -> None:
    """OptionError where it could not be part of a path of the protocol [W001]."""
    if not NAME.fullmatch(name):
        problem = f"{name[:130]!r} is no name of a model: letters, digits, _, . and -, at most 128"
        raise OptionError(option="FILE", problem=problem)
    if not VERSION.fullmatch(version):
        raise OptionError(option="FILE", problem=f"{version[:20]!r} is no version: a number")


def found_in(directory: Path) -> list[Source]:
    """Models of a directory: `NAME.weft` is version 1, `NAME/VERSION/*.weft` one version with a plan for each size.

    A co-location bundle is version 1 of the model that its folder is called.

    Raises:
        OptionError: the directory cannot be read [W001].
    """
    found: list[Source] = []
    try:
        entries = sorted(directory.iterdir())
        for entry in entries:
            if is_bundle(entry) and NAME.fullmatch(entry.name):
                found.append(Source(entry.name, "1", (entry,)))
            elif entry.is_file() and entry.name.endswith(SUFFIX) and NAME.fullmatch(entry.name.removesuffix(SUFFIX)):
                found.append(Source(entry.name.removesuffix(SUFFIX), "1", (entry,)))
            elif entry.is_dir() and NAME.fullmatch(entry.name):
                versions = [v for v in sorted(entry.iterdir()) if v.is_dir() and VERSION.fullmatch(v.name)]
                plans = [(v.name, tuple(sorted(v.glob(f"*{SUFFIX}")))) for v in versions]
                found += [Source(entry.name, version, files) for version, files in plans if files]
    except OSError as error:
        raise OptionError(option="--repository", problem=f"{directory}: {error.strerror}") from None
    names = [(s.name, s.version) for s in found]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise OptionError(option="--repository", problem=f"version {twice[1]} of {twice[0]!r} is there twice")
    return found


def newest(versions: Sequence[str]) -> str:
    """The greatest number."""
    return max(versions, key=int)
