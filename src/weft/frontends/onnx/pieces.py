"""Pieces of a model that ONNX Runtime is to run, tried in the confined process that reads the model.

Every piece runs here once before it runs anywhere else: ONNX Runtime is native code, and the piece comes out of an
untrusted file. What ONNX itself has no rule for gets its result types here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, final

import numpy as np
import onnx

from weft.frontends.onnx.names import shown
from weft.frontends.onnx.trial import session_of
from weft.ir.types import Array, DType, TensorType

TP = onnx.TensorProto
_ONNX_TYPES = {
    "float": TP.FLOAT, "double": TP.DOUBLE, "float16": TP.FLOAT16, "bfloat16": TP.BFLOAT16, "bool": TP.BOOL,
    "float8e4m3fn": TP.FLOAT8E4M3FN, "float8e5m2": TP.FLOAT8E5M2, "int4": TP.INT4, "uint4": TP.UINT4,
    "int8": TP.INT8, "int16": TP.INT16, "int32": TP.INT32, "int64": TP.INT64,
    "uint8": TP.UINT8, "uint16": TP.UINT16, "uint32": TP.UINT32, "uint64": TP.UINT64,
}  # fmt: skip
"""ONNX Runtime's names of element types."""
_TENSOR = re.compile(r"tensor\((\w+)\)")
_HEAD = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
DRAWS = 3
"""Sets of inputs that a piece is run on where its results' shapes are not known without that."""


class Absent(Enum):
    """Why there is no `Runtime` here."""

    UNUSED = auto()
    """Nothing is tried."""
    YET = auto()
    """It is loaded, before the process is confined, once a model is found to want it."""
    INSTALLED = auto()
    """ONNX Runtime is not installed."""


class RuntimeWantedError(Exception):
    """Reading this model wants ONNX Runtime in the process that reads it."""


@final
class Runtime:
    """ONNX Runtime in this process, which can lose nothing by its death."""

    def __init__(self, trying: int, room_bytes: int) -> None:
        """`trying`: a file that says, should this process die, for whom; `room_bytes`: of a piece's inputs."""
        self._trying, self._room = trying, room_bytes

    def types(self, model: bytes, where: str) -> list[onnx.TypeProto | str]:
        """Types of the results as ONNX Runtime finds them, one for each output of `model`, sizes where it knows."""
        with self._telling(where):
            try:
                outputs = session_of(model, 1).get_outputs()
            except Exception as error:  # the runtime's own classes share no public base
                return [said(error)] * len(onnx.load_model_from_string(model).graph.output)
            return [_type(o) for o in outputs]

    def run(self, model: bytes, types: Sequence[TensorType], where: str, draws: int = 1) -> list[list[Array]] | str:
        """Results for up to `draws` sets of inputs: of those that it takes; a text: why it takes none.

        Integers are 0, then 1, then either; there is no larger index that every operator takes.
        """
        if sum(t.nbytes for t in types) > self._room:
            return f"inputs of more than {self._room} bytes are not tried"
        problem, found = "", []
        with self._telling(where):
            try:
                session = session_of(model, 1)
                names = [i.name for i in session.get_inputs()]
            except Exception as error:  # as above
                return said(error)
            for k in range(draws):
                rng = np.random.default_rng(k)
                feed = {name: _drawn(t, k, rng) for name, t in zip(names, types, strict=True)}
                try:
                    found.append([np.asarray(y) for y in session.run(None, feed)])
                except Exception as error:  # as above
                    problem = problem or said(error)
        return found or problem

    @contextmanager
    def _telling(self, where: str) -> Iterator[None]:
        os.pwrite(self._trying, where.encode("utf-8", "replace"), 0)
        yield
        os.ftruncate(self._trying, 0)


def _type(output: Any) -> onnx.TypeProto | str:
    match = _TENSOR.fullmatch(output.type)
    element = _ONNX_TYPES.get(match[1]) if match else None
    if element is None:
        return f"its result is a {output.type}"
    shape = output.shape
    # no sizes stand for a scalar, and for a rank that it does not know
    static = bool(shape) and all(isinstance(n, int) and n >= 0 for n in shape)
    return onnx.helper.make_tensor_type_proto(element, shape if static else None)


def _drawn(t: TensorType, k: int, rng: np.random.Generator) -> Array:
    if t.dtype.is_float:
        values: Array = np.zeros(t.shape) if k == 1 else rng.standard_normal(t.shape)
    else:
        values = np.full(t.shape, k) if k < 2 else rng.integers(0, 2, t.shape)
    return values.astype(np.float32 if t.dtype.is_emulated else t.dtype.numpy)


def said(error: BaseException) -> str:
    """The first line of what ONNX Runtime says, without its own numbers in front."""
    line = next((x.strip() for x in str(error).splitlines() if x.strip()), type(error).__name__)
    return shown(_HEAD.sub("", line))[:300]


def type_of(values: Sequence[Array], dtype: DType) -> TensorType | str:
    """The type that all of these results of one output share."""
    shapes = {v.shape for v in values}
    if len(shapes) != 1:
        return "the shape of its result depends on run-time values"
    return TensorType(dtype, shapes.pop())
