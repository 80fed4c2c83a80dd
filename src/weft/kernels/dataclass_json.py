"""Frozen records as JSON values and back, by their declared field types."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

from weft.errors import ArtifactError
from weft.kernels.codec import Json

T = TypeVar("T")


def to_json(value: object) -> Json:
    """Dataclasses become mappings, tuples lists, floats that JSON lacks their hexadecimal text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
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
        return cast("T", _read(kind, data))
    except (KeyError, TypeError, ValueError):
        raise ArtifactError(problem=f"malformed {kind.__name__}", remedy="make it again with this version") from None


def _read(kind: Any, data: Json) -> object:
    if isinstance(data, Mapping) and set(data) == {"float"}:
        return float.fromhex(str(data["float"]))
    if is_dataclass(kind) and isinstance(kind, type):
        record = cast("Mapping[str, Json]", data)
        hints = typing.get_type_hints(kind)
        if set(record) != set(hints):
            raise ValueError
        return kind(**{name: _read(hints[name], record[name]) for name in hints})
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind), cast("Sequence[Json]", data))
    if origin in (types.UnionType, typing.Union):
        options = [k for k in typing.get_args(kind) if k is not type(None)]
        return None if data is None else _read(options[0], data)
    if kind is float and isinstance(data, int | float):
        return float(data)
    if isinstance(kind, type) and not isinstance(data, kind):
        raise TypeError
    return data


def _read_tuple(args: tuple[Any, ...], data: Sequence[Json]) -> tuple[object, ...]:
    if not isinstance(data, list):
        raise TypeError
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_read(args[0], v) for v in data)
    return tuple(_read(k, v) for k, v in zip(args, data, strict=True))
