"""Bytes of an ONNX file -> `Imported`, in this process. `import_onnx` runs it in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from weft.errors import LimitError, WeftError
from weft.frontends.imported import Imported
from weft.frontends.onnx.check import check_model, parse
from weft.frontends.onnx.external import ExternalFiles, ExternalRange
from weft.frontends.onnx.importer import Examples, Importer
from weft.frontends.onnx.limits import Limits, raised_by
from weft.frontends.onnx.pieces import Absent, Runtime
from weft.frontends.onnx.tensors import TensorReader, tensors_of_model
from weft.ir.types import Array


def read_model(
    data: bytes | memoryview,
    *,
    directory: Path | None = None,
    limits: Limits | None = None,
    dims: Mapping[str, int] | None = None,
    examples: Examples | None = None,
    file_name: str = "",
    initializers: Mapping[str, Array] = MappingProxyType({}),
    runtime: Runtime | Absent = Absent.UNUSED,
) -> tuple[Imported, dict[int, ExternalRange]]:
    """The imported model, and where its external arrays lie (by the address of their first byte).

    `initializers` stand for those of the model; `runtime` tries the operators that ONNX Runtime is to run.

    Raises:
        RuntimeWantedError: it is `Absent.YET`, and there are such operators.
        ModelError, UnsupportedError: see `errors`.
    """
    limits = limits or Limits()
    model = parse(data, limits)
    checked = check_model(model, limits)
    reader = TensorReader(ExternalFiles(directory, limits), limits.model_bytes)
    for where, t in tensors_of_model(model):  # in branches and functions too, whoever reads them later
        if t.data_location or t.external_data:
            reader.hold(t, where)
    try:
        importer = Importer(checked, reader, limits, dims or {}, examples, file_name, initializers, runtime)
        return importer.run(), reader.external
    except WeftError:
        raise
    except (MemoryError, RecursionError) as error:
        raise LimitError(
            problem=f"the model needs more {'memory' if isinstance(error, MemoryError) else 'depth'} than is allowed",
            remedy=f"simplify it, or {raised_by('parse_memory_bytes')}",
        ) from None
