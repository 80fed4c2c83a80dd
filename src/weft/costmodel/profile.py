"""The constants of the cost models, by device: a file of `profiles` for each GPU that kernels were measured on.

A GPU without a file of its own has the constants of the newest generation that is not newer: its facts (clocks,
bandwidths, multiprocessors) are its own, so that what was fitted in cycles and shares carries over as an expectation.
The models rank, and measuring decides. How constants are fitted: docs/performance-model.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from weft.costmodel.constants import (
    Attention,
    AttentionTma,
    Depthwise,
    Estimate,
    Gemv,
    Grouped,
    Halo,
    Library,
    Mlp,
    Normed,
    Pointwise,
    Pooled,
    Reductions,
    Roofline,
    Separable,
    Stacked,
    SwapAB,
    Tiles,
    Tma,
    Training,
)
from weft.device.cuda.record import GpuFacts
from weft.errors import ArtifactError

SCHEMA = 1
REMEDY = "install Weft again; if you wrote the file, docs/performance-model.md says what belongs into it"


@dataclass(frozen=True, slots=True, eq=False)
class CostProfile:
    """What one file says. Two profiles are never equal: what a model remembers belongs to one of them."""

    device: str
    """As its driver names it."""
    names: tuple[str, ...]
    """Parts of a driver's name, in lower case, by which a GPU is this one."""
    capability: int
    """Compute capability: major * 10 + minor."""
    sources: Mapping[str, str]
    """By section: what the constants were fitted to."""
    roofline: Roofline
    tiles: Tiles
    tma: Tma
    swap_ab: SwapAB
    halo: Halo
    depthwise: Depthwise
    pointwise: Pointwise
    estimate: Estimate
    gemv: Gemv
    stacked: Stacked
    pooled: Pooled
    attention: Attention
    attention_tma: AttentionTma
    mlp: Mlp
    normed: Normed
    grouped: Grouped
    separable: Separable
    reductions: Reductions
    library: Library
    training: Training


def costs_of(facts: GpuFacts) -> CostProfile:
    """The constants for a GPU: its own, else those of the newest generation that is not newer (else the oldest).

    Raises:
        ArtifactError: a file of Weft's own is damaged [W401].
    """
    return _instead[-1] if _instead else _nearest(facts.name, facts.capability)


@contextmanager
def instead(profile: CostProfile) -> Iterator[None]:
    """Within this, every GPU has these constants: fits ask the models again and again.

    What models remember of a GPU (`least_cycles`, `product_us`) is not asked anew.
    """
    _instead.append(profile)
    try:
        yield
    finally:
        _instead.pop()


_instead: list[CostProfile] = []


@lru_cache(maxsize=64)
def _nearest(name: str, capability: int) -> CostProfile:
    return choose(profiles(), name, capability)


def choose(known: Mapping[str, CostProfile], name: str, capability: int) -> CostProfile:
    """The profile of this model, else of the newest generation that is not newer, else of the oldest."""
    for profile in known.values():
        if any(part in name.lower() for part in profile.names):
            return profile
    ascending = sorted(known.values(), key=lambda p: p.capability)
    older = [p for p in ascending if p.capability <= capability]
    return older[-1] if older else ascending[0]


@cache
def profiles() -> Mapping[str, CostProfile]:
    """The shipped profiles by the names of their files.

    Raises:
        ArtifactError: one of them is damaged [W401].
    """
    return load(resources.files("weft.costmodel").joinpath("profiles"))


def load(folder: Traversable) -> Mapping[str, CostProfile]:
    """All profiles of a folder by the names of their files.

    Raises:
        ArtifactError: one of them is damaged, or there is none [W401].
    """
    found = {}
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            found[file.name.removesuffix(".json")] = from_json(file.read_text(encoding="utf-8"), str(file))
    if not found:
        raise ArtifactError(where=str(folder), problem="no profile of a cost model", remedy=REMEDY)
    return MappingProxyType(found)


def from_json(text: str, where: str) -> CostProfile:
    """A profile from the text of its file; `where` is the file, for errors.

    Raises:
        ArtifactError: no JSON, another schema, or a constant that is missing, unknown or cannot be; the error names
            it [W401].
    """
    try:
        data = json.loads(text)
        schema = data.pop("schema", None) if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"schema {schema!r}, not {SCHEMA}")
        found = cast("CostProfile", _read(CostProfile, data, ""))
        sections = {f.name for f in fields(CostProfile) if is_dataclass(get_type_hints(CostProfile)[f.name])}
        if set(found.sources) != sections:
            raise ValueError(f"sources of other sections than {', '.join(sorted(sections))}")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(where=where, problem=f"malformed profile of a cost model: {error}", remedy=REMEDY) from None
    return found


def _read(kind: Any, value: Any, at: str) -> Any:
    """A value of JSON as the type says; `at` names it in errors.

    Raises:
        ValueError: it is no such thing.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        given = value if isinstance(value, dict) else {}
        wrong = [f"{name} is missing" for name in hints if name not in given]
        wrong += [f"{name} is not known" for name in given if name not in hints]
        if wrong:
            raise ValueError(f"{at or 'the file'}: {', '.join(wrong)}")
        return cast("Any", kind)(**{n: _read(hint, given[n], f"{at}.{n}".lstrip(".")) for n, hint in hints.items()})
    if get_origin(kind) is Mapping:
        key, of = get_args(kind)
        if not isinstance(value, dict) or not value:
            raise ValueError(f"{at}: {value!r} is no table")
        if get_origin(key) is Literal and set(value) != set(get_args(key)):
            raise ValueError(f"{at}: wanted are {', '.join(get_args(key))}")
        entries = sorted((_key(key, k, at), _read(of, v, f"{at}.{k}")) for k, v in value.items())
        return MappingProxyType(dict(entries))
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not value:
            raise ValueError(f"{at}: {value!r} is no list")
        return tuple(_read(get_args(kind)[0], v, f"{at}[{i}]") for i, v in enumerate(value))
    if kind is str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{at}: {value!r} is no text")
        return value
    return _number(kind, value, at)


def _key(kind: Any, text: str, at: str) -> int | str:
    if kind is not int:
        return text
    if not text.isdecimal():
        raise ValueError(f"{at}: {text!r} is no whole number")
    return int(text)


def _number(kind: Any, value: Any, at: str) -> float:
    """Times, rates and shares are finite and not negative; what is divided by is not 0 either, which a test holds."""
    allowed = (int,) if kind is int else (int, float)
    if type(value) not in allowed or not math.isfinite(value) or value < 0:
        raise ValueError(f"{at}: {value!r} is no {'whole ' if kind is int else ''}number of at least 0")
    return cast("float", kind(value))
