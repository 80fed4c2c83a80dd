"""How much of an untrusted file Weft is willing to look at; reaching a limit is a named refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Self

from weft.errors import OptionError
from weft.options import options_table, parse_text, read_fields


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one ONNX model. Bytes, seconds or counts."""

    model_bytes: int = 2 << 30
    """The protobuf file itself."""
    external_bytes: int = 64 << 30
    """All external data together."""
    tensor_bytes: int = 64 << 30
    """One value of the graph."""
    nodes: int = 100_000
    """Nodes in the file, and again primitives and inlined operators made of them."""
    primitives: int = 12_000
    """Primitives with work of their own in the imported graph: finding a plan takes more than linear time in them."""
    graph_depth: int = 16
    """Nested subgraphs."""
    call_depth: int = 64
    """Nested function calls."""
    name_bytes: int = 1024
    """Longer names are cut and hashed."""
    parse_cpu_s: int = 20
    parse_memory_bytes: int = 2 << 30
    """Address space of the parsing process, on top of four times the model's size."""
    fold_elements: int = 1 << 16
    """Largest constant that is evaluated while importing (shapes, axes, tables); larger ones stay in the graph."""
    allow_hardlinks: bool = False
    """External data may have several names in the file system."""
    model_root: str | None = None
    """Links in external locations are followed where they end beneath this directory; None refuses them."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int) and value < 0:
                raise OptionError(option=NAMES[f.name], problem=f"{value} is negative")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], flags: Mapping[str, str] = MappingProxyType({})) -> Self:
        """Limits by `flags` (texts by name), else `WEFT_<NAME>`, else `[limits]` of the options file; see `NAMES`.

        Raises:
            OptionError: a value that does not parse, or a name that is none [W001].
        """
        table = options_table(environ)
        section = table.get("limits", {})
        if not isinstance(section, dict):
            raise OptionError(option="limits", problem=f"{table.path} has no table of this name")
        unknown = sorted(set(section) - set(NAMES.values()))
        if unknown:
            raise OptionError(option=unknown[0], problem=f"[limits] of {table.path} has it, Weft does not")
        chosen = read_fields(cls, NAMES, environ, section, f"[limits] of {table.path}")
        for f in fields(cls):
            name = NAMES[f.name]
            if name in flags:
                chosen[f.name] = parse_text(f"--{name.replace('_', '-')}", str(f.type), flags[name])
        return cls(**chosen)  # type: ignore[arg-type]


NAMES: Mapping[str, str] = MappingProxyType(
    {
        "model_bytes": "max_model_bytes",
        "external_bytes": "max_external_bytes",
        "tensor_bytes": "max_tensor_bytes",
        "nodes": "max_nodes",
        "primitives": "max_graph",
        "graph_depth": "max_depth",
        "call_depth": "max_calls",
        "name_bytes": "max_name",
        "parse_cpu_s": "parse_timeout",
        "parse_memory_bytes": "max_parse_memory",
        "fold_elements": "max_fold_elements",
        "allow_hardlinks": "allow_hardlinks",
        "model_root": "model_root",
    }
)
"""What the user calls each field: the flag `--max-nodes`, the variable `WEFT_MAX_NODES`, the key `max_nodes`."""


def raised_by(field: str) -> str:
    """How to raise a limit, for the second line of an error."""
    name = NAMES[field]
    flag = name.replace("_", "-")
    return f"raise the limit with --{flag}, WEFT_{name.upper()} or `{name}` in [limits] of the options file"
