"""How much of an untrusted file Weft is willing to look at; reaching a limit is a named refusal."""

from __future__ import annotations

from dataclasses import dataclass


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
