"""Inputs and results of a best-effort network: folders of .npz files, one an inference, read with nothing believed.

A file has a member of the name of each input (`x.npy`), or `arr_0`, `arr_1`, ... in their order; of a network with one
input any name will do. Results have the name of the file that they are of, and members by the names of the outputs.
"""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from weft.colocate.job import JobError
from weft.errors import ArtifactError

Array = np.ndarray[Any, Any]
SUFFIX = ".npz"
MOST_FILES = 1_000_000
MOST_BYTES = 16 << 30
"""Of a member whose size nobody has said before."""
_HEADER = 1 << 16
"""Bytes in front of an array, at most."""
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


def read_into(path: Path, inputs: Sequence[TensorSpec], places: Sequence[Array]) -> None:
    """The inputs of one inference, into arrays of their shapes and types.

    Raises:
        JobError: one is missing, has another shape or type, or the file cannot be read [W018].
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}
            for position, (spec, place) in enumerate(zip(inputs, places, strict=True)):
                info = _member(infos, spec, position, len(inputs))
                if info.file_size > spec.nbytes + _HEADER:
                    raise ValueError(f"{info.filename} has {info.file_size} bytes, expected {spec}")
                found = _array(archive, info)
                if found.shape != spec.shape or found.dtype != np.dtype(spec.dtype):
                    raise ValueError(f"expected {spec}, got {found.dtype}{list(found.shape)}")
                np.copyto(place, found)
    except _BROKEN as error:
        raise _bad(path.name, _told(error)) from None


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
