"""Why an ONNX file is refused: one class per cause, each naming the node or tensor and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.errors import LimitError, ModelError, UnsupportedError


class GarbledModelError(ModelError):
    """Not an ONNX model: empty, truncated or not a protobuf message of the right kind."""

    code = "W101"


class OpsetError(ModelError):
    """Operator-set imports that are missing, contradictory, too old or too new."""

    code = "W102"


class UnknownOperatorError(ModelError):
    """A domain or an operator that neither ONNX nor the model itself defines."""

    code = "W103"


class BadTensorError(ModelError):
    """Tensor data that contradict the tensor's own header."""

    code = "W104"


class BadGraphError(ModelError):
    """No graph: a name that is defined twice or never, a cycle, a missing output."""

    code = "W106"


class BadAttributeError(ModelError):
    """An attribute that is unknown, missing or of the wrong type."""

    code = "W107"


class MismatchError(ModelError):
    """Types or shapes that do not fit the operator, or a declared output that is not what was computed."""

    code = "W108"


class BadFunctionError(ModelError):
    """Functions that call themselves, too deeply, or with the wrong arguments."""

    code = "W109"


class ParserDiedError(ModelError):
    """The process that reads the file crashed, or ran out of time or memory."""

    code = "W110"


class ExternalKeyError(ModelError):
    """External-data entries outside of `location, offset, length, checksum`, or given twice."""

    code = "W111"


class ExternalRangeError(ModelError):
    """External data whose offset or length is no number or leaves the file."""

    code = "W112"


class ExternalPathError(ModelError):
    """External data outside of the model's directory, behind a link, or not a regular file."""

    code = "W113"


class BindingError(ModelError):
    """Sizes or example inputs from the caller that do not fit the model's signature."""

    code = "W114"


class NoRuleError(UnsupportedError):
    """An operator without a rule that ONNX Runtime cannot take over either."""

    code = "W201"
    todo = "export the model without this operator"


class NoRuntimeError(UnsupportedError):
    """An operator that only ONNX Runtime has, which is not installed."""

    code = "W201"
    todo = "install it (pip install onnxruntime), or export the model without this operator"


class NeedsValueError(UnsupportedError):
    """A shape or an axis depends on a run-time value."""

    code = "W202"
    template = "operator {op!r} needs the value of {what} at compile time: {reason}"
    todo = "pass example inputs (--input NAME=FILE); the model is then specialised on their values, and guarded"


def wants_values(error: UnsupportedError, examples: Sequence[object] | Mapping[str, object] | None) -> bool:
    """Whether a model was refused for values of inputs that nobody gave: with them there may be one graph of it."""
    drawn = examples is None or (isinstance(examples, Mapping) and any(x is None for x in examples.values()))
    return drawn and isinstance(error, NeedsValueError)


class UnsupportedTypeError(UnsupportedError):
    """An element or value type outside of the closed set."""

    code = "W203"
    template = "{what} has type {type}: {reason}"
    todo = "cast it to one of f64, f32, f16, bf16, i64, i32, i16, i8, u8, bool before the export"


ALL = {
    c.__name__: c
    for c in (
        ModelError, GarbledModelError, OpsetError, UnknownOperatorError, BadTensorError, LimitError, BadGraphError,
        BadAttributeError, MismatchError, BadFunctionError, ParserDiedError, ExternalKeyError, ExternalRangeError,
        ExternalPathError, BindingError, UnsupportedError, NoRuleError, NoRuntimeError, NeedsValueError,
        UnsupportedTypeError,
    )
}  # fmt: skip
"""By class name: how an error crosses from the parsing process."""
