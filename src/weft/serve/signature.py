"""What a served model takes and gives, as both processes and the protocol name it. Knows neither torch nor a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from weft.errors import ArtifactError
from weft.ir.graph import Graph
from weft.ir.types import Array, DType
from weft.serve.errors import RequestError
from weft.serve.rows import batch_of, independent

DATATYPES: Mapping[DType, str] = {
    DType.F64: "FP64", DType.F32: "FP32", DType.F16: "FP16", DType.BF16: "BF16", DType.I64: "INT64",
    DType.I32: "INT32", DType.I16: "INT16", DType.I8: "INT8", DType.U8: "UINT8", DType.BOOL: "BOOL",
}  # fmt: skip
"""Names of the protocol; it has none for 8-bit floats."""
STORED: Mapping[str, np.dtype[np.generic]] = {
    "FP64": np.dtype(np.float64), "FP32": np.dtype(np.float32), "FP16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16), "INT64": np.dtype(np.int64), "INT32": np.dtype(np.int32),
    "INT16": np.dtype(np.int16), "INT8": np.dtype(np.int8), "UINT8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
"""How an element lies in memory; of BF16 the sixteen bits."""
PROTOCOL_TYPES = frozenset({*STORED, "UINT16", "UINT32", "UINT64", "BYTES"})
"""All that the protocol knows, whether or not a plan may take it."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """Of one row. Where queries are not packed, the whole tensor is the one row."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """How an element is stored."""
        return STORED[self.datatype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Signature:
    """Of a model with a plan for each of some batch sizes."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]
    """Rows of each plan, ascending; (1,) where queries are not packed."""
    packs: bool
    """Whether queries share a run: tensors have an axis of rows in front, of any size up to the largest plan's."""
    reason: str = ""
    """Why not."""

    @property
    def max_rows(self) -> int:
        """Most rows of a batch, and of a query."""
        return self.sizes[-1]

    def plan_for(self, rows: int) -> int:
        """Position of the smallest plan that takes so many rows."""
        return next(i for i, size in enumerate(self.sizes) if size >= rows)

    def shape_of(self, spec: TensorSpec) -> list[int]:
        """As the protocol's metadata have it: -1 for rows."""
        return [-1, *spec.shape] if self.packs else list(spec.shape)

    def rows_of(self, given: Mapping[str, tuple[str, Sequence[int]]]) -> int:
        """The rows of a query with tensors of these types and shapes.

        Raises:
            RequestError: a name, type or shape that the model does not have [W019].
        """
        names = {s.name for s in self.inputs}
        for name in given:
            if name not in names:
                raise RequestError(problem=f"the model has no input {name[:80]!r}, it has {_listed(names)}")
        rows: int | None = None
        for spec in self.inputs:
            if spec.name not in given:
                raise RequestError(problem=f"input {spec.name!r} is missing")
            datatype, shape = given[spec.name]
            if datatype != spec.datatype:
                raise RequestError(problem=f"input {spec.name!r} is {spec.datatype}, not {datatype[:20]}")
            mine = self._rows(spec, shape)
            if rows is not None and mine != rows:
                raise RequestError(problem=f"input {spec.name!r} has {mine} rows, another input has {rows}")
            rows = mine
        return rows if rows is not None else 1

    def _rows(self, spec: TensorSpec, shape: Sequence[int]) -> int:
        told = (
            str(self.shape_of(spec)).replace("-1", f"1 to {self.max_rows}", 1) if self.packs else str(list(spec.shape))
        )
        if tuple(shape[1:] if self.packs else shape) != spec.shape or (self.packs and not shape):
            raise RequestError(problem=f"input {spec.name!r} has shape {list(shape)[:16]}, the model takes {told}")
        if not self.packs:
            return 1
        if not 1 <= shape[0] <= self.max_rows:
            raise RequestError(problem=f"input {spec.name!r} has {shape[0]} rows, the model takes 1 to {self.max_rows}")
        return int(shape[0])

    def accept(self, arrays: Mapping[str, Array]) -> tuple[tuple[Array, ...], int]:
        """The arrays of a query in order, dense, each with an axis of rows in front; and their rows.

        Raises:
            RequestError: they do not fit [W019].
        """
        given = {n: (datatype_of(n, x, self.inputs), x.shape) for n, x in arrays.items()}
        rows = self.rows_of(given)
        placed = [arrays[s.name].reshape(rows, *s.shape) for s in self.inputs]
        return tuple(np.ascontiguousarray(x) for x in placed), rows

    def to_json(self) -> dict[str, object]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        """A signature that another process told."""

        def specs(name: str) -> tuple[TensorSpec, ...]:
            found: Iterable[Mapping[str, object]] = data[name]  # type: ignore[assignment]
            return tuple(TensorSpec(str(x["name"]), str(x["datatype"]), tuple(x["shape"])) for x in found)  # type: ignore[arg-type]

        sizes: Iterable[int] = data["sizes"]  # type: ignore[assignment]
        return cls(specs("inputs"), specs("outputs"), tuple(sizes), bool(data["packs"]), str(data["reason"]))


def datatype_of(name: str, array: Array, specs: Iterable[TensorSpec]) -> str:
    """What an array's elements are called; the bits of BF16 by what the input of this name takes."""
    wanted = next((s.datatype for s in specs if s.name == name), "")
    if wanted in STORED and array.dtype == STORED[wanted]:
        return wanted
    return next((t for t, d in STORED.items() if d == array.dtype and t != "BF16"), str(array.dtype))


def signature_of(graphs: Sequence[Graph]) -> tuple[Signature, tuple[int, ...]]:
    """What a model with these plans takes; and in which order the plans are meant by `sizes`.

    Raises:
        ArtifactError: the plans are not of one model, or have a type that the protocol lacks [W401].
    """
    batches = [batch_of(g) for g in graphs]
    declined = [independent(g) if b != 1 else None for g, b in zip(graphs, batches, strict=True)]
    why = next((d.reason for d in declined if d is not None), "")
    sizes = [b for b in batches if isinstance(b, int)]
    if why or len(sizes) < len(batches) or sizes == [1]:
        if len(graphs) > 1:
            raise _refused(f"several files are plans of one model for several batch sizes: {why or 'no common axis'}")
        inputs, outputs = _specs(graphs[0], packs=False)
        return Signature(inputs, outputs, (1,), packs=False, reason=why or "a batch of one row"), (0,)
    order = tuple(sorted(range(len(graphs)), key=sizes.__getitem__))
    found = {_specs(g, packs=True) for g in graphs}
    if len(found) > 1 or len(set(sizes)) < len(sizes):
        raise _refused("the files of one model differ in more than their batch size, or are of one size")
    ((inputs, outputs),) = found
    return Signature(inputs, outputs, tuple(sizes[i] for i in order), packs=True), order


def _specs(graph: Graph, *, packs: bool) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    found = []
    for kind, nodes, names in (
        ("input", graph.inputs, graph.input_names), ("output", graph.outputs, graph.output_names),
    ):  # fmt: skip
        usable = len(names) == len(nodes) and all(names) and len(set(names)) == len(names)
        told = names if usable else [f"{kind}_{i}" if len(nodes) > 1 else kind for i in range(len(nodes))]
        types = [graph.type_of(n) for n in nodes]
        missing = next((t.dtype for t in types if t.dtype not in DATATYPES), None)
        if missing is not None:
            raise _refused(f"the protocol has no type for {missing.value}")
        shapes = [t.shape[1:] if packs else t.shape for t in types]
        found.append(tuple(TensorSpec(n, DATATYPES[t.dtype], s) for n, t, s in zip(told, types, shapes, strict=True)))
    return found[0], found[1]


def _refused(problem: str) -> ArtifactError:
    return ArtifactError(problem=problem, remedy="docs/serve.md says which files are served together")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(n[:80]) for n in sorted(names)[:8])
