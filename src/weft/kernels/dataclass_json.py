"""Frozen records as JSON values and back, by their declared field types."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast

from weft.errors import ArtifactError
from weft.kernels.codec import Json

T = TypeVar("T")
_Reader = Callable[[Json], object]


LEFT_OUT: Mapping[str, bool] = types.MappingProxyType({"left_out": True})
"""Metadata of a field with a default that came later: JSON has it only where it is another value, so that records from
before are read, and those that do not need it are as they were."""


def to_json(value: object) -> Json:
    """Dataclasses become mappings, tuples lists, floats that JSON lacks their hexadecimal text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: to_json(getattr(value, f.name))
            for f in fields(value)
            if not (f.metadata.get("left_out") and getattr(value, f.name) == f.default)
        }
    if isinstance(value, tuple | list):
        return [to_json(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": value.hex()}
    return cast("Json", value)


def from_json(kind: type[T], data: Json) -> T:
    """Inverse of `to_json` for a record class.

    Raises:
        ArtifactError: fields or types differ [W401].
    """
    try:
        return cast("T", _reader(cast("Any", kind))(data))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ArtifactError(problem=f"malformed {kind.__name__}", remedy="make it again with this version") from None


@cache
def _reader(kind: Any) -> _Reader:
    """What reads values of a declared type; made once, because to resolve annotations costs more than to read."""
    if is_dataclass(kind) and isinstance(kind, type):
        return _record_reader(kind)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _tuple_reader(typing.get_args(kind))
    if origin in (types.UnionType, typing.Union):
        read = _reader(next(k for k in typing.get_args(kind) if k is not type(None)))
        return lambda data: None if data is None else read(data)
    return _value_reader(kind)


def _record_reader(kind: type) -> _Reader:
    readers = {name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()}
    later = {f.name for f in fields(kind) if f.metadata.get("left_out")}

    def read(data: Json) -> object:
        record = cast("Mapping[str, Json]", data)
        if record.keys() - later != readers.keys() - later or not record.keys() <= readers.keys():
            raise ValueError
        return kind(**{name: one(record[name]) for name, one in readers.items() if name in record})

    return read


def _tuple_reader(args: tuple[Any, ...]) -> _Reader:
    repeats = len(args) == 2 and args[1] is Ellipsis
    readers = [_reader(k) for k in args[: 1 if repeats else None]]

    def read(data: Json) -> object:
        if not isinstance(data, list):
            raise TypeError
        if repeats:
            (one,) = readers
            return tuple([one(v) for v in data])
        return tuple([one(v) for one, v in zip(readers, data, strict=True)])

    return read


def _value_reader(kind: Any) -> _Reader:
    def read(data: Json) -> object:
        if isinstance(data, dict) and data.keys() == {"float"}:
            return float.fromhex(str(data["float"]))
        if kind is float and isinstance(data, int | float):
            return float(data)
        if isinstance(kind, type) and not isinstance(data, kind):
            raise TypeError
        return data

    return read
