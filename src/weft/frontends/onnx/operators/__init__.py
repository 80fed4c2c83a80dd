"""The operator table: `(domain, op_type)` -> handler. One module per family; each follows the opset of its call."""

from __future__ import annotations

from collections.abc import Mapping

from weft.frontends.onnx.call import Handler
from weft.frontends.onnx.operators import (
    arithmetic,
    attention,
    contract,
    control,
    convert,
    layout,
    loss,
    normalise,
    optional,
    pooling,
    recurrent,
    reduction,
    resize,
    sequences,
    signal,
    training,
)

HANDLERS: Mapping[tuple[str, str], Handler] = {
    key: handler
    for module in (
        arithmetic, attention, contract, control, convert, layout, loss, normalise, optional, pooling, recurrent,
        reduction, resize, sequences, signal, training,
    )
    for key, handler in module.HANDLERS.items()
}  # fmt: skip
"""Operators that are taken apart natively; the others use ONNX's own body or fall back."""
