"""Opening a model's external data: relative, contained, regular, in range; checked on the descriptor that is mapped.

The rules are section 2 of the security notes in `docs/`. No name is ever joined to a path and then opened:
each component is opened beneath the one before, without following links.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.frontends.onnx.errors import ExternalKeyError, ExternalPathError, ExternalRangeError
from weft.frontends.onnx.limits import Limits, raised_by
from weft.frontends.onnx.names import shown

KEYS = frozenset({"location", "offset", "length", "checksum"})
_MAX_DIGITS = 19


@dataclass(frozen=True, slots=True)
class ExternalRange:
    """Bytes [offset, offset + length) of the file at `location` beneath the model's directory."""

    location: str
    offset: int
    length: int


def parse_entries(entries: Sequence[tuple[str, str]], expected: int, where: str) -> ExternalRange:
    """Check the key-value pairs of one tensor.

    Raises:
        ExternalKeyError: unknown or repeated keys, or no location [W111].
        ExternalRangeError: numbers that are none, negative, or contradict the tensor's size [W112].
        ExternalPathError: a location that could leave the directory [W113].
    """
    found: dict[str, str] = {}
    for key, value in entries:
        if key not in KEYS or key in found:
            what = "given twice" if key in found else f"not one of {', '.join(sorted(KEYS))}"
            raise ExternalKeyError(
                where=where,
                problem=f"external-data key '{shown(key)}' is {what}",
                remedy="export the model again with a tool that writes standard external data",
            )
        found[key] = value
    if "location" not in found:
        raise ExternalKeyError(
            where=where, problem="external data without a location", remedy="export the model again, data included"
        )
    offset = _number(found, "offset", 0, where)
    length = _number(found, "length", expected, where)
    if length != expected:
        raise ExternalRangeError(
            where=where,
            problem=f"external length is {length} bytes, element type and dimensions need {expected}",
            remedy="the file is damaged or forged: export it again",
        )
    _check_location(found["location"], where)
    return ExternalRange(found["location"], offset, length)


def _number(found: Mapping[str, str], key: str, default: int, where: str) -> int:
    text = found.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ExternalRangeError(
            where=where,
            problem=f"external {key} '{shown(text)}' is not a decimal number of at most {_MAX_DIGITS} digits",
            remedy="the file is damaged or forged: export it again",
        )
    return int(text)


def _check_location(location: str, where: str) -> None:
    bad = ""
    if not location or "\0" in location:
        bad = "is empty or contains NUL"
    elif location.startswith("/") or "\\" in location or (len(location) > 1 and location[1] == ":"):
        bad = "is absolute or uses another system's separators"
    elif any(part in ("", ".", "..") for part in location.split("/")):
        bad = "has empty, '.' or '..' components"
    elif len(location.encode("utf-8", "surrogatepass")) > 4096 or any(len(p) > 255 for p in location.split("/")):
        bad = "is too long for a path"
    if bad:
        raise ExternalPathError(
            where=where,
            problem=f"external data '{shown(location)}' {bad}",
            remedy="external data must lie beside the model or beneath it, under a relative name",
        )


class ExternalFiles:
    """The files beneath one directory, each opened, checked and mapped once."""

    def __init__(self, directory: Path | int | None, limits: Limits) -> None:
        """`directory` is where the model lies (unresolved), a descriptor of it, or None: no external data at all."""
        self._limits = limits
        self._directory = directory
        self._maps: dict[str, memoryview] = {}
        self._total = 0

    def read(self, part: ExternalRange, where: str) -> np.ndarray:
        """The bytes as a read-only u8 array (a view of the mapped file).

        Raises:
            ExternalPathError: not there, a link, not a regular file [W113].
            ExternalRangeError: the range leaves the file, or all data are over the limit [W112].
        """
        data = self._maps.get(part.location)
        if data is None:
            data = self._map(part.location, where)
            self._maps[part.location] = data
        if part.offset > len(data) or part.length > len(data) - part.offset:
            raise ExternalRangeError(
                where=where,
                problem=f"range [{part.offset}, +{part.length}) leaves '{shown(part.location)}' of {len(data)} bytes",
                remedy="the data file is truncated or belongs to another model",
            )
        return np.frombuffer(data, np.uint8, part.length, part.offset)

    def _map(self, location: str, where: str) -> memoryview:
        _check_location(location, where)
        if self._directory is None:
            raise ExternalPathError(
                where=where,
                problem=f"external data '{shown(location)}' of a model that was given as bytes",
                remedy="pass the path of the model file, so that its directory is known",
            )
        descriptor = self._open(location, where)
        try:
            status = os.fstat(descriptor)
            self._check(status, location, where)
            self._total += status.st_size
            if self._total > self._limits.external_bytes:
                raise ExternalRangeError(
                    where=where,
                    problem=f"external data are over the limit of {self._limits.external_bytes} bytes, or what is free",
                    remedy=f"{raised_by('external_bytes')}, and WEFT_COMPILE_MEMORY_BYTES",
                )
            if status.st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(descriptor, status.st_size, mmap.MAP_PRIVATE, mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def _check(self, status: os.stat_result, location: str, where: str) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ExternalPathError(
                where=where,
                problem=f"external data '{shown(location)}' is not a regular file",
                remedy="external data must be an ordinary file",
            )
        if status.st_nlink != 1 and not self._limits.allow_hardlinks:
            raise ExternalPathError(
                where=where,
                problem=f"external data '{shown(location)}' has {status.st_nlink} hard links",
                remedy="copy the file, or pass --allow-hardlinks",
            )

    def _open(self, location: str, where: str) -> int:
        assert self._directory is not None
        own = isinstance(self._directory, int)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            current = os.dup(self._directory) if own else os.open(self._directory, flags)  # type: ignore[arg-type]
        except OSError as error:
            raise ExternalPathError(
                where=where,
                problem=f"the model's directory cannot be opened: {error.strerror}",
                remedy="check its permissions",
            ) from None
        parts = location.split("/")
        part = parts[0]
        try:
            for i, part in enumerate(parts):
                last = i == len(parts) - 1
                kind = os.O_NONBLOCK if last else os.O_DIRECTORY  # O_NONBLOCK: opening a FIFO must not hang
                following = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=current)
                os.close(current)
                current = following
        except OSError as error:
            try:
                linked = stat.S_ISLNK(os.stat(part, dir_fd=current, follow_symlinks=False).st_mode)
            except OSError:
                linked = False
            os.close(current)
            if linked and self._limits.model_root is not None and not own:
                return self._open_link(location, where)
            if linked:
                raise ExternalPathError(
                    where=where,
                    problem=f"external data '{shown(location)}' goes through a symbolic link",
                    remedy="pass `--model-root DIR` to allow links that end beneath DIR, or copy the file",
                ) from None
            raise ExternalPathError(
                where=where,
                problem=f"external data '{shown(location)}' cannot be opened: {error.strerror}",
                remedy="put the data file beside the model, under the name that the model gives",
            ) from None
        return current

    def _open_link(self, location: str, where: str) -> int:
        """Resolve a link; it must end beneath the root, and is then opened without following anything."""
        assert self._limits.model_root is not None
        assert isinstance(self._directory, Path)
        root = Path(self._limits.model_root).resolve()
        target = (self._directory / location).resolve()
        if not target.is_relative_to(root) or target == root:
            raise ExternalPathError(
                where=where,
                problem=f"external data '{shown(location)}' is a symbolic link that leaves the model root",
                remedy="widen `--model-root DIR`, or copy the file next to the model",
            )
        beneath = ExternalFiles(root, Limits(allow_hardlinks=self._limits.allow_hardlinks))
        return beneath._open(str(target.relative_to(root)), where)
