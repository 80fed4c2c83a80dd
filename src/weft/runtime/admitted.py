"""Which library calls of a saved plan run without trust: those of operators that check whatever they are given.

`generate.library.execute` refuses operators with effects outside their results. That is not enough for a file from
elsewhere: some operators of the framework, its fast paths for sparse tensors above all, believe their arguments, and
read or write wherever those point. So only names of this list pass; a plan with another one is code, as one with
kernels is.
"""

from __future__ import annotations

import json

from weft.kernels.source import CallStep, Kernel, LibraryCall

CHECKED = frozenset(
    {
        "abs", "acos", "acosh", "adaptive_avg_pool2d", "add", "addcmul", "addmm", "amax", "amin", "arange", "argmax",
        "argmin", "asin", "asinh", "atan", "atan2", "atanh", "avg_pool2d", "baddbmm", "bitwise_and",
        "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "bmm", "cat", "ceil",
        "clamp", "clone", "constant_pad_nd", "convolution", "cos", "cosh", "cumprod", "cumsum", "div", "elu", "eq",
        "erf", "exp", "expand", "expm1", "flip", "floor", "fmod", "full", "gather", "ge", "gelu", "grid_sampler_2d",
        "group_norm", "gt", "hardsigmoid", "hardswish", "index", "index_select", "isinf", "isnan", "layer_norm", "le",
        "leaky_relu", "linear", "log", "log1p", "lt", "matmul", "max_pool2d", "max_pool2d_with_indices", "maximum",
        "mean", "minimum", "mish", "mm", "mul", "native_layer_norm", "ne", "neg", "permute", "pow", "prelu", "prod",
        "reciprocal", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "relu", "remainder",
        "replication_pad1d", "replication_pad2d", "replication_pad3d", "reshape", "round", "rsqrt", "sigmoid", "sign",
        "silu", "sin", "sinh", "slice", "softplus", "sqrt", "sub", "sum", "t", "tan", "tanh", "trunc", "unfold",
        "unsqueeze", "where", "_log_softmax", "_softmax", "_to_copy",
    }
)  # fmt: skip
"""Operators of `aten` that the library generator writes, each of which checks shapes, indices and sizes."""


_SORT = "aten.sort.stable"
"""What stands for ONNX's TopK on a GPU. Other overloads write into tensors that they are given."""
_WHOLE = frozenset({"index_put", "scatter", "scatter_add", "scatter_reduce", "sort", "topk"})
"""Operators of `aten` without a rule, run whole (`weft.opaque_aten`), that check their arguments in the same way."""
_OPAQUE = "weft.opaque_aten"
_OWN = frozenset({"weft.number", "weft.tensor", "weft.result"})
"""Values that the plan itself holds, and one of an operator's results."""
_NAMED = {"dtype": "dtype:", "memory_format": "format:"}
"""Keywords whose values the framework looks up in a table without looking at the number, so that none may be given."""
_OPEN = frozenset({"layout", "device", "pin_memory", "out"})


def needs_trust(kernel: Kernel) -> bool:
    """Whether a kernel is code, or a call of what would take any argument for true."""
    if not isinstance(kernel, LibraryCall):
        return True
    return not all(_is_checked(step) for step in (*kernel.prepare, *kernel.run))


def _is_checked(step: CallStep) -> bool:
    if step.target == _OPAQUE:
        return _is_checked_whole(step)
    namespace, _, rest = step.target.partition(".")
    if step.target not in _OWN | {_SORT} and (namespace != "aten" or rest.partition(".")[0] not in CHECKED):
        return False
    for name, value in step.kwargs:
        if name in _OPEN or (name in _NAMED and not (isinstance(value, str) and value.startswith(_NAMED[name]))):
            return False
    return True


def _is_checked_whole(step: CallStep) -> bool:
    """Whether a payload names such an operator, with tensors, numbers and truth values alone."""
    payload = step.args[0] if step.args else None
    try:
        found = json.loads(payload) if isinstance(payload, str) else None
    except ValueError:
        return False
    if not isinstance(found, dict) or not isinstance(found.get("op"), str):
        return False
    namespace, _, name = found["op"].partition("::")
    named = found.get("kwargs")
    if namespace != "aten" or name not in CHECKED | _WHOLE or not isinstance(named, dict) or step.kwargs:
        return False
    return not any(isinstance(x, dict) and "tensor" not in x for x in named.values()) and not _OPEN & named.keys()
