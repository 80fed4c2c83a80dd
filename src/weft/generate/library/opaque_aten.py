"""Runs opaque ATen calls from their payload: data, never code.

A payload is JSON: `{"op": "aten::topk", "overload": "", "inputs": ["f32"], "args": [...], "kwargs": {...}}`. Tensors
are `{"tensor": i}` (position among the inputs), complex ones `{"complex": i}` (their parts are inputs i and i + 1);
element types, layouts and memory formats are named; floats that JSON lacks are `{"float": "inf"}`. Results that are
None are left out, lists are flattened, a complex one gives its parts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from weft.errors import ArtifactError
from weft.generate.library import trained_attention, trained_recurrent
from weft.ir.opaque import LARGEST_SCORES

NAMESPACES = frozenset({"aten", "prims"})
OWN = frozenset(f"weft::{name}" for name in trained_attention.NAMES | trained_recurrent.NAMES)
"""Operators of this project's that payloads may name beside those."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
FORBIDDEN_ARGUMENTS = frozenset({"filename", "generator", "storage", "source_storage", "group_name"})
"""Argument names by which an operator reaches outside its tensors (`from_file` opens and creates files)."""
FORBIDDEN = frozenset({"from_file", "_linalg_check_errors", "set_data", "_cuda_getCurrentRawStream"})
_NEEDS_CONTIGUOUS = frozenset(
    {
        "as_strided", "view", "view_as_real", "_reshape_alias", "unfold_backward",
        "lstm", "gru", "rnn_tanh", "rnn_relu",  # cuDNN refuses a state of zeros that is one zero, expanded
    }
)  # fmt: skip
_CONSTANTS = {
    "dtype": frozenset(
        {
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "float8_e4m3fn",
            "float8_e5m2",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint8",
            "bool",
            "complex64",
            "complex128",
        }
    ),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}),
}


def _refuse(problem: str) -> ArtifactError:
    return ArtifactError(problem=f"opaque call: {problem}", remedy="compile the model again")


@lru_cache(maxsize=1024)
def resolve(op: str, overload: str) -> Any:
    """The overload that a payload names.

    Raises:
        ArtifactError: not a functional operator of an admitted namespace [W401].
    """
    namespace, _, name = op.partition("::")
    if (
        not (namespace in NAMESPACES or op in OWN)
        or not _NAME.match(name)
        or not (_NAME.match(overload) or overload == "")
    ):
        raise _refuse(f"operator {op!r} overload {overload!r} is not admitted")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except AttributeError:
        raise _refuse(f"operator {op!r} overload {overload!r} does not exist in torch {torch.__version__}") from None
    if not isinstance(found, torch._ops.OpOverload):
        raise _refuse(f"{op!r} is not an operator")
    schema = found._schema
    names = {x.name for x in schema.arguments}
    if schema.is_mutable or name in FORBIDDEN or names & FORBIDDEN_ARGUMENTS:
        raise _refuse(f"operator {op!r} has effects outside its results")
    return found


@lru_cache(maxsize=4096)
def _parse(payload: str) -> tuple[Any, list[Any], dict[str, Any], bool]:
    try:
        data = json.loads(payload)
    except ValueError:
        raise _refuse("payload is not JSON") from None
    if not isinstance(data, dict) or not isinstance(data.get("op"), str) or not isinstance(data.get("overload"), str):
        raise _refuse("payload names no operator")
    args, kwargs = data.get("args", []), data.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not all(_NAME.match(k) for k in kwargs):
        raise _refuse("arguments are not lists and names")
    op = resolve(data["op"], data["overload"])
    return op, args, kwargs, data["op"].partition("::")[2] in _NEEDS_CONTIGUOUS


def _argument(value: Any, inputs: Sequence[torch.Tensor], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_argument(v, inputs, device) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise _refuse("an argument is neither a value nor one reference")
    ((kind, content),) = value.items()
    if kind == "tensor" and isinstance(content, int) and not isinstance(content, bool) and 0 <= content < len(inputs):
        return inputs[content]
    if kind == "complex" and isinstance(content, int) and 0 <= content < len(inputs) - 1:
        return torch.complex(inputs[content], inputs[content + 1])
    if kind == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind == "device":
        # the device is not stored: a plan runs where it is loaded
        return device
    if kind in _CONSTANTS and content in _CONSTANTS[kind]:
        return getattr(torch, content)
    raise _refuse(f"argument {{{kind!r}: {content!r}}}")


def run_aten(payload: str, inputs: Sequence[torch.Tensor], device: str = "cpu") -> list[torch.Tensor]:
    """Results of one ATen call, lists flattened and None left out.

    Raises:
        ArtifactError: a payload that is malformed, or names anything but a functional ATen operator [W401].
    """
    op, args, kwargs, contiguous = _parse(payload)
    tensors = [x.contiguous() for x in inputs] if contiguous else list(inputs)
    place = tensors[0].device if tensors else torch.device(device)
    with torch.no_grad():
        found = op(
            *(_argument(x, tensors, place) for x in args),
            **{k: _argument(v, tensors, place) for k, v in kwargs.items()},
        )
    return _flat(found)


def _flat(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found.real, found.imag] if found.is_complex() else [found]
    if found is None:
        return []
    if isinstance(found, tuple | list):
        return [x for item in found for x in _flat(item)]
    raise _refuse(f"a result is {type(found).__name__}, not a tensor")


def has_float64(payload: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a call is of an operator of this project's that is written out in float64, and there is memory for that.

    `shapes`: of the call's operands.
    """
    call = json.loads(payload)
    namespace, _, name = str(call.get("op")).partition("::")
    if namespace != "weft" or name not in trained_attention.NAMES:
        return False
    first = trained_attention.QUERY[name]
    query, key = (shapes[int(x["tensor"])] for x in call["args"][first : first + 2])
    return bool(math.prod(query[:-1]) * key[1] <= LARGEST_SCORES)


def input_dtypes(payload: str) -> tuple[str, ...]:
    """Element types (`f32`, ...) of the tensors that the call was recorded with; empty where the payload lacks them."""
    found = json.loads(payload).get("inputs", [])
    return tuple(x for x in found if isinstance(x, str))
