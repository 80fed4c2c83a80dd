"""TensorProto -> NumPy array, with every header checked before a byte is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from weft.frontends.onnx.check import node_where, subgraphs
from weft.frontends.onnx.errors import BadTensorError, UnsupportedTypeError
from weft.frontends.onnx.external import ExternalFiles, ExternalRange, parse_entries
from weft.frontends.onnx.names import shown
from weft.ir.types import Array, DType, TensorType, from_bits, to_bits

TP = onnx.TensorProto

DTYPES: dict[int, DType] = {
    TP.DOUBLE: DType.F64,
    TP.FLOAT: DType.F32,
    TP.FLOAT16: DType.F16,
    TP.BFLOAT16: DType.BF16,
    TP.FLOAT8E4M3FN: DType.F8E4M3,
    TP.FLOAT8E5M2: DType.F8E5M2,
    TP.INT64: DType.I64,
    TP.INT32: DType.I32,
    TP.INT16: DType.I16,
    TP.INT8: DType.I8,
    TP.UINT8: DType.U8,
    TP.BOOL: DType.BOOL,
}
"""ONNX element type -> ours; every other type is refused by name."""
ONNX_TYPES = {d: t for t, d in DTYPES.items()}
FOREIGN = frozenset({TP.UINT16, TP.UINT32, TP.UINT64, TP.INT4, TP.UINT4})
"""Element types that Weft lacks and ONNX Runtime has: values of these stay inside of pieces that it runs."""

BITS: Mapping[int, int] = MappingProxyType(
    {
        TP.DOUBLE: 64, TP.FLOAT: 32, TP.FLOAT16: 16, TP.BFLOAT16: 16, TP.FLOAT8E4M3FN: 8, TP.FLOAT8E4M3FNUZ: 8,
        TP.FLOAT8E5M2: 8, TP.FLOAT8E5M2FNUZ: 8, TP.INT64: 64, TP.INT32: 32, TP.INT16: 16, TP.INT8: 8, TP.INT4: 4,
        TP.UINT64: 64, TP.UINT32: 32, TP.UINT16: 16, TP.UINT8: 8, TP.UINT4: 4, TP.BOOL: 8, TP.COMPLEX64: 64,
        TP.COMPLEX128: 128, 23: 4, 24: 8, 25: 2, 26: 2,
    }
)  # fmt: skip
"""Of one element of every ONNX type with data of fixed size; 23 to 26 (FLOAT4E2M1, FLOAT8E8M0, UINT2, INT2) are newer
than the oldest onnx that is allowed."""

MAX_RANK = 32
"""Dimensions of a tensor; NumPy and PyTorch end at 64."""
_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_FIELD_OF = {
    DType.F64: "double_data",
    DType.F32: "float_data",
    DType.I64: "int64_data",
}
"""Typed field of each element type; int32_data for the others."""


def type_name(onnx_type: int) -> str:
    """`FLOAT8E4M3FN` for 17; the number itself for one that ONNX does not know."""
    try:
        return str(TP.DataType.Name(onnx_type))
    except ValueError:
        return f"number {onnx_type}"


def dtype_of(onnx_type: int, what: str, where: str) -> DType:
    """Our element type.

    Raises:
        UnsupportedTypeError: outside of the closed set [W203].
    """
    dtype = DTYPES.get(onnx_type)
    if dtype is None:
        raise UnsupportedTypeError(
            where=where, op="", what=what, type=type_name(onnx_type), reason="Weft has no such element type"
        )
    return dtype


def checked_shape(dims: Sequence[int], itemsize: int, where: str) -> tuple[int, ...]:
    """Dimensions that are >= 0 and whose product fits in 62 bits.

    Raises:
        BadTensorError [W104].
    """
    shape = tuple(dims)
    remedy = "the file is damaged or forged: export it again"
    if any(d < 0 for d in shape):
        raise BadTensorError(where=where, problem=f"negative dimension in {shape[:8]}", remedy=remedy)
    if len(shape) > MAX_RANK:
        raise BadTensorError(where=where, problem=f"rank {len(shape)}", remedy=f"at most {MAX_RANK} dimensions")
    if math.prod(d for d in shape if d) * itemsize >= 2**62:
        raise BadTensorError(where=where, problem=f"dimensions {shape[:8]} overflow", remedy=remedy)
    return shape


class TensorReader:
    """Reads the tensors of one model; external ones through `files`."""

    def __init__(self, files: ExternalFiles, model_bytes: int) -> None:
        self._files = files
        self._limit = model_bytes
        self.external: dict[int, ExternalRange] = {}
        """Where each external array lies, by the address of its first byte."""

    def place(self, t: onnx.TensorProto, where: str) -> ExternalRange | None:
        """Where the data of a tensor of any type lie, if outside of the model; nothing is opened.

        Raises:
            BadTensorError, ExternalKeyError, ExternalRangeError, ExternalPathError.
        """
        remedy = "the file is damaged or forged: export it again"
        if t.data_location not in (TP.DEFAULT, TP.EXTERNAL):
            raise BadTensorError(where=where, problem=f"data location {t.data_location}", remedy=remedy)
        if t.data_location == TP.DEFAULT:
            if t.external_data:
                problem = "external entries on a tensor that is not external"
                raise BadTensorError(where=where, problem=problem, remedy=remedy)
            return None
        bits = BITS.get(t.data_type)
        if bits is None:
            problem = f"external data of type {type_name(t.data_type)}"
            raise BadTensorError(where=where, problem=problem, remedy="store them in the model")
        entries = [(e.key, e.value) for e in t.external_data]
        if not all(isinstance(text, str) for entry in entries for text in entry):
            raise BadTensorError(where=where, problem="external entries that are not UTF-8", remedy=remedy)
        shape = checked_shape(t.dims, max(bits // 8, 1), where)
        return parse_entries(entries, -(-math.prod(shape) * bits // 8), where)

    def hold(self, t: onnx.TensorProto, where: str) -> None:
        """Hold a tensor of any type to the rules of `external`: what it names is opened, and is all there.

        Raises:
            BadTensorError, ExternalKeyError, ExternalRangeError, ExternalPathError.
        """
        part = self.place(t, where)
        if part is not None:
            self._files.read(part, where)

    def inline(self, t: onnx.TensorProto, where: str) -> int:
        """Put external data into the tensor itself; how many bytes.

        Raises:
            BadTensorError, ExternalKeyError, ExternalRangeError, ExternalPathError.
        """
        part = self.place(t, where)
        if part is None:
            return 0
        t.raw_data = self._files.read(part, where).tobytes()
        t.ClearField("external_data")
        t.ClearField("data_location")
        return part.length

    def check_foreign(self, t: onnx.TensorProto, where: str) -> tuple[int, ...]:
        """The shape of a tensor of one of the types `FOREIGN`, whose header must hold.

        Raises:
            BadTensorError, ExternalKeyError, ExternalRangeError, ExternalPathError.
        """
        remedy = "the file is damaged or forged: export it again"
        if t.HasField("segment"):
            raise BadTensorError(where=where, problem="a tensor in segments", remedy="export it in one piece")
        bits = BITS[t.data_type]
        shape = checked_shape(t.dims, max(bits // 8, 1), where)
        size = math.prod(shape)
        filled = [f for f in _FIELDS if len(getattr(t, f))]
        external = self.place(t, where) is not None
        if len(filled) + t.HasField("raw_data") + external > 1:
            raise BadTensorError(where=where, problem="more than one data field", remedy=remedy)
        if external:
            return shape
        field = "int32_data" if t.data_type not in (TP.UINT32, TP.UINT64) else "uint64_data"
        wanted, have = -(-size * bits // 8), len(t.raw_data)
        if filled:
            per = 8 // bits if bits < 8 else 1
            wanted, have = -(-size // per), len(getattr(t, field))
        if have != wanted:
            problem = f"{have} {'values' if filled else 'bytes of data'} where dimensions {shape[:8]} need {wanted}"
            raise BadTensorError(where=where, problem=problem, remedy=remedy)
        return shape

    def read(self, t: onnx.TensorProto, where: str) -> tuple[DType, Array]:
        """Element type and values (bf16 and 8-bit floats as exact float32).

        Raises:
            BadTensorError, ExternalKeyError, ExternalRangeError, ExternalPathError, UnsupportedTypeError.
        """
        remedy = "the file is damaged or forged: export it again"
        if t.HasField("segment"):
            raise BadTensorError(where=where, problem="a tensor in segments", remedy="export it in one piece")
        dtype = dtype_of(t.data_type, "a tensor", where)
        shape = checked_shape(t.dims, dtype.itemsize, where)
        size = math.prod(shape)
        filled = [f for f in _FIELDS if len(getattr(t, f))]
        has_raw = t.HasField("raw_data")
        external = t.data_location == TP.EXTERNAL
        self.place(t, where)
        count = len(filled) + has_raw + external
        if count > 1:
            raise BadTensorError(where=where, problem="more than one data field", remedy=remedy)
        if count == 0 and size:
            raise BadTensorError(where=where, problem=f"no data for {size} elements", remedy=remedy)
        if external:
            part = self.place(t, where)
            assert part is not None
            raw = self._files.read(part, where)
            values = _from_raw(raw, dtype)
            if values.size and dtype is not DType.BOOL and not dtype.is_emulated:
                self.external[values.__array_interface__["data"][0]] = part
        elif has_raw:
            if len(t.raw_data) != size * dtype.itemsize:
                raise BadTensorError(
                    where=where,
                    problem=f"{len(t.raw_data)} bytes of data, dimensions {shape[:8]} need {size * dtype.itemsize}",
                    remedy=remedy,
                )
            values = _from_raw(np.frombuffer(t.raw_data, np.uint8), dtype)
        elif size == 0:
            values = np.zeros(0, dtype.numpy)
        else:
            field = _FIELD_OF.get(dtype, "int32_data")
            if filled != [field]:
                raise BadTensorError(where=where, problem=f"{dtype.value} data in field {filled[0]}", remedy=remedy)
            listed = getattr(t, field)
            if len(listed) != size:
                raise BadTensorError(where=where, problem=f"{len(listed)} values for {size} elements", remedy=remedy)
            values = _from_list(listed, dtype, where)
        if dtype is DType.BOOL:
            values = values.astype(np.bool_)
        return dtype, values.reshape(shape)


def _from_raw(raw: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any]
    if dtype.is_emulated:
        return from_bits(raw.view("<u2") if dtype is DType.BF16 else raw, dtype)
    if dtype is DType.BOOL:
        values = raw != 0
        return values
    return raw.view(dtype.numpy.newbyteorder("<"))


def _from_list(listed: Sequence[Any], dtype: DType, where: str) -> np.ndarray[Any, Any]:
    if dtype in (DType.F64, DType.F32, DType.I64):
        return np.array(listed, dtype.numpy)
    wide = np.array(listed, np.int64)
    if dtype is DType.F16 or dtype.is_emulated:
        if wide.min() < 0 or wide.max() >= 1 << 8 * dtype.itemsize:
            raise BadTensorError(where=where, problem=f"{dtype.value} bits out of range", remedy="export it again")
        if dtype is DType.F16:
            return wide.astype(np.uint16).view(np.float16)
        return from_bits(wide, dtype)
    if dtype is not DType.BOOL:
        info = np.iinfo(dtype.numpy)  # type: ignore[type-var]
        if wide.min() < info.min or wide.max() > info.max:
            raise BadTensorError(where=where, problem=f"{dtype.value} value out of range", remedy="export it again")
    return wide.astype(dtype.numpy)


def to_proto(value: Array, dtype: DType, name: str = "") -> onnx.TensorProto:
    """The array as a TensorProto with raw data."""
    return TP(
        name=name, data_type=ONNX_TYPES[dtype], dims=value.shape, raw_data=stored(value, dtype).tobytes()
    )  # fmt: skip


def stored(value: Array, dtype: DType) -> Array:
    """The array as ONNX stores it: row-major, and types that NumPy lacks as their bits."""
    return to_bits(value, dtype) if dtype.is_emulated else np.asarray(value, order="C")


def type_proto(type: TensorType) -> onnx.TypeProto:
    """The ONNX type of a tensor of ours."""
    return onnx.helper.make_tensor_type_proto(ONNX_TYPES[type.dtype], type.shape)


def tensors_of_graph(graph: onnx.GraphProto, where: str = "") -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor that a graph and those inside of it hold, with where it stands."""
    for t in graph.initializer:
        yield f"{where}{tensor_name(t)}", t
    for s in graph.sparse_initializer:
        yield from _of_sparse(s, f"{where}{tensor_name(s.values)}")
    yield from tensors_of_nodes(graph.node, where)


def tensors_of_nodes(nodes: Iterable[onnx.NodeProto], where: str = "") -> Iterator[tuple[str, onnx.TensorProto]]:
    """The same of nodes: their attributes and the graphs in these; the nesting was bounded before."""
    for index, node in enumerate(nodes):
        if node.attribute:
            yield from tensors_of_attributes(node.attribute, f"{where}{node_where(node, index)}")


def tensors_of_attributes(
    attributes: Iterable[onnx.AttributeProto], where: str
) -> Iterator[tuple[str, onnx.TensorProto]]:
    """The same of attributes: of a node, or of a function as defaults."""
    for a in attributes:
        at = f"{where}, attribute '{shown(a.name)}'"
        if a.HasField("t"):
            yield at, a.t
        for t in a.tensors:
            yield at, t
        for s in (*([a.sparse_tensor] if a.HasField("sparse_tensor") else ()), *a.sparse_tensors):
            yield from _of_sparse(s, at)
        for graph in subgraphs(a):
            yield from tensors_of_graph(graph, f"{where}, subgraph '{shown(a.name)}', ")


def _of_sparse(s: onnx.SparseTensorProto, where: str) -> Iterator[tuple[str, onnx.TensorProto]]:
    yield where, s.values
    yield f"{where}, its indices", s.indices


def tensors_of_model(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor of a model, those of its functions included."""
    yield from tensors_of_graph(model.graph)
    for f in model.functions:
        where = f"function '{shown(f.name)}'"
        yield from tensors_of_attributes(f.attribute_proto, where)
        yield from tensors_of_nodes(f.node, f"{where}, ")


Reader = Callable[[onnx.TensorProto, str], tuple[DType, Array]]


def tensor_name(t: onnx.TensorProto) -> str:
    """For messages."""
    return f"initializer '{shown(t.name)}'"
