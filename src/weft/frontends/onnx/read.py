"""Bytes of an ONNX file -> `Imported`, in this process. `import_onnx` runs it in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, Unpack

from weft.errors import LimitError, WeftError
from weft.frontends.imported import Imported
from weft.frontends.onnx.check import check_model, parse
from weft.frontends.onnx.cut import partitioned
from weft.frontends.onnx.external import ExternalFiles, ExternalRange
from weft.frontends.onnx.importer import Examples, Importer
from weft.frontends.onnx.limits import Limits, raised_by
from weft.frontends.onnx.partition import Partition
from weft.frontends.onnx.pieces import Absent, Runtime
from weft.frontends.onnx.tensors import TensorReader, tensors_of_model
from weft.ir.types import Array


class Given(TypedDict, total=False):
    """What an import takes besides the bytes."""

    directory: Path | None
    limits: Limits | None
    dims: Mapping[str, int] | None
    examples: Examples | None
    file_name: str
    initializers: Mapping[str, Array]
    """They stand for those of the model."""
    runtime: Runtime | Absent
    """Tries the operators that ONNX Runtime is to run."""


def read_model(
    data: bytes | memoryview, *, on_data: bool = True, **given: Unpack[Given]
) -> tuple[Imported, dict[int, ExternalRange]]:
    """The imported model, and where its external arrays lie (by the address of their first byte).

    `on_data`: the graph may be specialised on values of any input.

    Raises:
        RuntimeWantedError: the runtime is `Absent.YET`, and there are operators that it is to run.
        ModelError, UnsupportedError: see `errors`.
    """
    with _opened(data, **given) as (importer, reader):
        return importer(on_data).run(), reader.external


def read_partition(data: bytes | memoryview, **given: Unpack[Given]) -> tuple[Partition, dict[int, ExternalRange]]:
    """As `read_model`, of a model that has no graph of primitives as a whole."""
    with _opened(data, **given) as (importer, reader):
        return partitioned(lambda: importer(False)), reader.external


@contextmanager
def _opened(
    data: bytes | memoryview,
    directory: Path | None = None,
    limits: Limits | None = None,
    dims: Mapping[str, int] | None = None,
    examples: Examples | None = None,
    file_name: str = "",
    initializers: Mapping[str, Array] = MappingProxyType({}),
    runtime: Runtime | Absent = Absent.UNUSED,
) -> Iterator[tuple[Callable[[bool], Importer], TensorReader]]:
    """What begins an import of the model, which was checked, and what reads its tensors."""
    limits = limits or Limits()
    model = parse(data, limits)
    checked = check_model(model, limits)
    reader = TensorReader(ExternalFiles(directory, limits), limits.model_bytes)
    for where, t in tensors_of_model(model):  # in branches and functions too, whoever reads them later
        if t.data_location or t.external_data:
            reader.hold(t, where)
    try:
        begin = partial(Importer, checked, reader, limits, dims or {}, examples, file_name, initializers, runtime)
        yield lambda on_data: begin(on_data=on_data), reader
    except WeftError:
        raise
    except (MemoryError, RecursionError) as error:
        raise LimitError(
            problem=f"the model needs more {'memory' if isinstance(error, MemoryError) else 'depth'} than is allowed",
            remedy=f"simplify it, or {raised_by('parse_memory_bytes')}",
        ) from None
