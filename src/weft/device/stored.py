"""What the records of CPUs and GPUs share: tables over sizes, and JSON that is kept beside its SHA-256."""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from weft.device.files import doing_without, find_private, publish

Provenance = Literal["measured", "attribute", "default"]
Table = tuple[tuple[int, float], ...]
"""(bytes, GB/s), sizes ascending."""


NOT_STORED: Mapping[str, bool] = MappingProxyType({"stored": False})
"""Metadata of a field that is no property of the device."""


def interpolate(table: Table, size_bytes: int) -> float:
    """The table's value at a size, linear on a logarithmic axis; beyond its ends that of the end."""
    sizes = [s for s, _ in table]
    at = bisect.bisect_left(sizes, size_bytes)
    if at == 0:
        return table[0][1]
    if at == len(table):
        return table[-1][1]
    (s0, b0), (s1, b1) = table[at - 1], table[at]
    t = math.log(size_bytes / s0) / math.log(s1 / s0)
    return b0 + (b1 - b0) * t


def dump(record: Any, schema: int) -> str:
    """Canonical JSON of a record's fields."""
    return json.dumps({"schema": schema, **{name: getattr(record, name) for name in _stored(record)}}, sort_keys=True)


def parse(kind: type[Any], text: str, schema: int, what: str) -> dict[str, Any]:
    """The fields that `dump` wrote, as JSON has them.

    Raises:
        ValueError: not such a record.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.pop("schema", None) != schema:
        raise ValueError(f"not a record of {what}")
    if set(data) != _stored(kind):
        raise ValueError(f"fields of {what} differ")
    return data


def _stored(kind: Any) -> set[str]:
    return {f.name for f in fields(kind) if f.metadata.get("stored", True)}


def load(path: Path | None) -> str | None:
    """The text that `keep` wrote, or None if there is none or it is damaged."""
    data = find_private(path) if path is not None else None
    if data is None:
        return None
    try:
        record = json.loads(data)
        text = record["facts"]
        return text if hashlib.sha256(text.encode()).hexdigest() == record["sha256"] else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(path: Path | None, text: str) -> None:
    """Write a text beside its digest; a full or read-only disk only costs the cache."""
    if path is not None:
        record = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "facts": text})
        with doing_without(path):
            publish(path, record.encode())
