"""Inputs and results of a best-effort network: folders of .npz files, one an inference, read with nothing believed.

A file has a member of the name of each input (`x.npy`), or `arr_0`, `arr_1`, ... in their order; of a network with one
input any name will do. Results have the name of the file that they are of, and members by the names of the outputs.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

import numpy as np

from weft.colocate.job import JobError
from weft.errors import ArtifactError

Array = np.ndarray[Any, Any]
SUFFIX = ".npz"
MOST_FILES = 1_000_000
MOST_BYTES = 16 << 30
"""Of a member whose size nobody has said before."""
MOST_KNOWN = 65_536
"""Files of which is remembered where their arrays lie."""
_HEADER = 1 << 16
"""Bytes in front of an array, at most."""
_LOCAL = struct.Struct("<4s22xHH")
"""The header in front of a member of an archive: its magic, bytes of its name and of what else stands there."""
_ENCRYPTED = 1
_BROKEN = (OSError, ValueError, TypeError, EOFError, SyntaxError, MemoryError, NotImplementedError, zipfile.BadZipFile)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or an output of a network."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As NumPy calls it."""

    @property
    def nbytes(self) -> int:
        """Without what stands in front of it in a file."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


def input_files(folder: Path) -> list[str]:
    """Names of the inputs, in their order.

    Raises:
        JobError: there are none, more than `MOST_FILES`, or the folder cannot be read [W018].
    """
    try:
        found = sorted(x.name for x in os.scandir(folder) if x.name.endswith(SUFFIX) and x.is_file())
    except OSError as error:
        raise _bad(folder.name, f"the folder cannot be read: {error.strerror}") from None
    if not found:
        raise _bad(folder.name, f"no {SUFFIX} file is in this folder")
    if len(found) > MOST_FILES:
        raise _bad(folder.name, f"{len(found)} files, at most {MOST_FILES} are taken")
    return found


def members(path: Path) -> dict[str, Array]:
    """All arrays of a file, of which nothing is known.

    Raises:
        JobError: it holds none, or cannot be read [W018].
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            if not infos or sum(i.file_size for i in infos) > MOST_BYTES:
                raise ValueError(f"{len(infos)} arrays of {sum(i.file_size for i in infos)} bytes")
            return {i.filename.removesuffix(".npy"): _array(archive, i) for i in infos}
    except _BROKEN as error:
        raise _bad(path.name, _told(error)) from None


def read_into(path: Path, inputs: Sequence[TensorSpec], places: Sequence[Array]) -> tuple[int, ...]:
    """The inputs of one inference, into arrays of their shapes and types.

    Returns:
        Where the bytes of each lie in the file; empty: not all of them lie there as they are in memory.

    Raises:
        JobError: one is missing, has another shape or type, or the file cannot be read [W018].
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            infos = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}
            found = []
            for position, (spec, place) in enumerate(zip(inputs, places, strict=True)):
                info = _member(infos, spec, position, len(inputs))
                if info.file_size > spec.nbytes + _HEADER:
                    raise ValueError(f"{info.filename} has {info.file_size} bytes, expected {spec}")
                found.append(_plain(file, info, spec, place) or _streamed(archive, info, spec, place))
            return tuple(found) if all(found) else ()
    except _BROKEN as error:
        raise _bad(path.name, _told(error)) from None


@final
class InputReader:
    """Reads inputs of many inferences, from several threads.

    Where arrays lie is remembered: of a file that has not changed since it was read, and whose checksums were right,
    nothing but their bytes is read again.
    """

    def __init__(self, folder: Path, inputs: Sequence[TensorSpec], *, most: int = MOST_KNOWN) -> None:
        """`most`: files that are remembered."""
        self._folder, self._inputs, self._most = folder, inputs, most
        self._known: dict[str, tuple[_Stamp, tuple[int, ...]]] = {}

    def read(self, name: str, places: Sequence[Array]) -> None:
        """See `read_into`."""
        path = self._folder / name
        if name in self._known and self._again(path, *self._known[name], places):
            return
        before = _stamp_of(path)
        at = read_into(path, self._inputs, places)
        room = name in self._known or len(self._known) < self._most
        if at and room and before is not None and before == _stamp_of(path):
            self._known[name] = before, at

    @staticmethod
    def _again(path: Path, stamp: _Stamp, at: tuple[int, ...], places: Sequence[Array]) -> bool:
        try:
            with path.open("rb", buffering=0) as file:
                if _stamp(os.fstat(file.fileno())) != stamp:
                    return False
                for offset, place in zip(at, places, strict=True):
                    _fill(file.fileno(), offset, place)
                return _stamp(os.fstat(file.fileno())) == stamp
        except _BROKEN:  # it is told by who reads all of it
            return False


def write_results(path: Path, outputs: Sequence[TensorSpec], arrays: Sequence[Array]) -> None:
    """The results of one inference, whole or not at all: a crash meanwhile leaves what was there.

    Raises:
        ArtifactError: they cannot be written [W401].
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for spec, array in zip(outputs, arrays, strict=True):
                with archive.open(f"{spec.name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise ArtifactError(
            where=path.name, problem=f"results cannot be written: {error.strerror}", remedy="choose another place"
        ) from None


def named(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Names of tensors in a file: as the model calls them, or `arr_0`, `arr_1`, ... where it does not, or twice."""
    if len(names) == count and len(set(names)) == count and all(names):
        return tuple(names)
    return tuple(f"arr_{i}" for i in range(count))


def _member(infos: Mapping[str, zipfile.ZipInfo], spec: TensorSpec, position: int, count: int) -> zipfile.ZipInfo:
    found = infos.get(spec.name) or infos.get(f"arr_{position}")
    if found is None and count == 1 and len(infos) == 1:
        (found,) = infos.values()
    if found is None:
        has = ", ".join(sorted(infos)[:8]) or "nothing"
        raise ValueError(f"it has no {spec.name!r}, but {has}")
    return found


def _plain(file: IO[bytes], info: zipfile.ZipInfo, spec: TensorSpec, place: Array) -> int:
    """Read a member that lies in its file as it does in memory; where, or 0: it does not lie so, or is not `spec`."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
        return 0
    file.seek(info.header_offset)
    local = file.read(_LOCAL.size)
    if len(local) < _LOCAL.size:
        return 0
    magic, name, extra = _LOCAL.unpack(local)
    begin = info.header_offset + _LOCAL.size + name + extra
    file.seek(begin)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    reader = readers.get(np.lib.format.read_magic(file)) if magic == b"PK\3\4" else None
    if reader is None:
        return 0
    shape, fortran, dtype = reader(file)
    at = file.tell()
    if (shape, dtype) != (spec.shape, np.dtype(spec.dtype)) or (fortran and len(shape) > 1):
        return 0
    if at + spec.nbytes != begin + info.file_size:
        return 0
    _fill(file.fileno(), at, place)
    file.seek(begin)
    if zlib.crc32(_bytes_of(place), zlib.crc32(file.read(at - begin))) != info.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {info.filename!r}")
    return at


def _bytes_of(place: Array) -> memoryview:
    return place.reshape(-1).view(np.uint8).data


def _fill(file: int, at: int, place: Array) -> None:
    """Bytes from a place in a file."""
    into, done = _bytes_of(place), 0
    while done < len(into):
        got = os.preadv(file, [into[done:]], at + done)
        if not got:
            raise EOFError("the file ends within an array")
        done += got


def _streamed(archive: zipfile.ZipFile, info: zipfile.ZipInfo, spec: TensorSpec, place: Array) -> int:
    """Read any member; 0: it does not lie in the file as it does in memory."""
    found = _array(archive, info)
    if found.shape != spec.shape or found.dtype != np.dtype(spec.dtype):
        raise ValueError(f"expected {spec}, got {found.dtype}{list(found.shape)}")
    np.copyto(place, found)
    return 0


_Stamp = tuple[int, int, int, int]


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        return _stamp(path.stat())
    except OSError:
        return None


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        source: IO[bytes] = member
        found: Array = np.lib.format.read_array(source, allow_pickle=False)
        return found


def _told(error: BaseException) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (said or type(error).__name__)[:300]


def _bad(where: str, problem: str) -> JobError:
    return JobError(where=where, key="inputs", problem=problem, remedy="docs/colocation.md says what a file holds")
