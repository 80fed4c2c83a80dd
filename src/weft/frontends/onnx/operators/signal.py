"""Reserved."""

from __future__ import annotations

from weft.frontends.onnx.importer import Handler

HANDLERS: dict[tuple[str, str], Handler] = {}
