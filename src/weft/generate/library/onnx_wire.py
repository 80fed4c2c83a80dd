"""Does a serialised ONNX model carry all of its data? Answered from the wire form, where no onnx is installed.

Only the fields that lead to tensors are walked; everything else is skipped by its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TENSOR = "TensorProto"
FIELDS: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
        "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
        "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
        "GraphProto": {1: "NodeProto", 5: TENSOR, 15: "SparseTensorProto"},
        "NodeProto": {5: "AttributeProto"},
        "AttributeProto": {
            5: TENSOR, 6: "GraphProto", 10: TENSOR, 11: "GraphProto", 22: "SparseTensorProto", 23: "SparseTensorProto",
        },
        "SparseTensorProto": {1: TENSOR, 2: TENSOR},
    }
)  # fmt: skip
"""Message -> number of each field that leads to a tensor -> its message."""
EXTERNAL_DATA, DATA_LOCATION = 13, 14
"""Fields of a tensor that lies elsewhere."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def carries_its_data(model: bytes) -> bool:
    """False where a tensor of the model lies in a file, or where these bytes are no model as protobuf writes it."""
    stack = [("ModelProto", 0, len(model))]
    try:
        while stack:
            message, at, end = stack.pop()
            leads = FIELDS.get(message, {})
            while at < end:
                tag, at = _varint(model, at)
                number, kind = tag >> 3, tag & 7
                elsewhere = message == TENSOR and number in (EXTERNAL_DATA, DATA_LOCATION)
                if kind == _VARINT:
                    value, at = _varint(model, at)
                    if elsewhere and value:  # 0: here
                        return False
                    continue
                if elsewhere:
                    return False
                size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
                if size is None:
                    if kind != _BYTES:
                        return False
                    size, at = _varint(model, at)
                    if number in leads:
                        stack.append((leads[number], at, at + size))
                at += size
            if at != end:
                return False
    except IndexError:
        return False
    return True


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise IndexError
