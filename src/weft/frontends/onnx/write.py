"""`write_onnx`: a graph of primitives as an ONNX file, with its weights in a file beside it where they are many."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO, final

import onnx

from weft.frontends.onnx.export import MAX_BYTES, export_onnx
from weft.frontends.onnx.tensors import ONNX_TYPES, stored
from weft.ir.graph import Graph
from weft.ir.types import Array, DType

_PAGE = 4096
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@final
class ExternalFile:
    """Constants that lie outside of the model, each at the start of a page so that a runtime can map it."""

    def __init__(self, location: str, stream: IO[bytes]) -> None:
        self._location = location
        self._stream = stream

    def keep(self, value: Array, dtype: DType, name: str) -> onnx.TensorProto:
        """Append the array; what stands for it in the model."""
        self._stream.write(bytes(-self._stream.tell() % _PAGE))
        offset, data = self._stream.tell(), stored(value, dtype)
        self._stream.write(data.reshape(-1).view("u1").data)
        t = onnx.TensorProto(name=name, data_type=ONNX_TYPES[dtype], dims=value.shape)
        t.data_location = onnx.TensorProto.EXTERNAL
        for key, entry in (("location", self._location), ("offset", offset), ("length", data.nbytes)):
            t.external_data.add(key=key, value=str(entry))
        return t


def data_name(path: Path) -> str:
    """The name of the file of weights beside `path`: no character in it means anything to a reader of models."""
    name = path.name
    return f"{name if _PLAIN.fullmatch(name) else sha256(os.fsencode(name)).hexdigest()[:16]}.data"


def write_onnx(graph: Graph, path: Path, *, external: bool = False, inline_bytes: int = MAX_BYTES) -> tuple[Path, ...]:
    """Write the graph as an ONNX model (see `export_onnx`); the files that were written.

    Above `inline_bytes` of constants, or where `external` asks for it, those from 1 KiB on go to a file beside the
    model, named after it. Both files are complete before either takes its name, and an older model goes first:
    whenever the writer dies, no model lies beside the weights of another.

    Raises:
        UnsupportedError: a primitive without an ONNX form here [W201].
        OSError: no part of the new model is left behind then.
    """
    special = path.exists() and not path.is_file()
    if not external and sum(v.nbytes for v in graph.constants.values()) <= inline_bytes:
        data = export_onnx(graph)
        if special:  # a pipe, say
            path.write_bytes(data)
            return (path,)
        with _temporary(path.parent) as (stream, name):
            _finish(stream, data)
            os.replace(name, path)
        return (path,)
    if special:
        raise OSError(errno.EINVAL, "weights cannot lie beside what is no regular file")
    beside = path.with_name(data_name(path))
    with _temporary(path.parent) as (model, model_name), _temporary(path.parent) as (weights, weights_name):
        _finish(model, export_onnx(graph, keep=ExternalFile(beside.name, weights).keep))
        _finish(weights)
        path.unlink(missing_ok=True)
        os.replace(weights_name, beside)
        os.replace(model_name, path)
    return (path, beside)


def _finish(stream: IO[bytes], data: bytes = b"") -> None:
    stream.write(data)
    stream.flush()
    os.fsync(stream.fileno())


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A new file with the permissions that files of this user get; removed at the end if it still has its name."""
    name = folder / f".tmp-{secrets.token_hex(8)}"
    try:
        with name.open("xb") as stream:
            yield stream, name
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
