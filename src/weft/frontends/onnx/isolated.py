"""`import_onnx`: reads an untrusted file in a process of its own and takes over only our own data from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.frontends.imported import Imported
from weft.frontends.onnx.importer import ExampleInput
from weft.frontends.onnx.limits import Limits
from weft.frontends.onnx.read import read_model
from weft.ir.types import Array, DType

_LIMITS = Limits()


def import_onnx(
    source: Path | bytes,
    *,
    limits: Limits = _LIMITS,
    dims: Mapping[str, int] = {},
    example_inputs: Sequence[Array] | None = None,
) -> Imported:
    """Import an ONNX model.

    Raises:
        ModelError, UnsupportedError: see `errors`.
    """
    examples = None
    if example_inputs is not None:
        examples = [ExampleInput(DType.from_numpy(x.dtype), x.shape, x) for x in example_inputs]
    if isinstance(source, bytes):
        return read_model(source, limits=limits, dims=dims, examples=examples)[0]
    data = source.read_bytes()
    return read_model(
        data, directory=source.parent, limits=limits, dims=dims, examples=examples, file_name=source.name
    )[0]
