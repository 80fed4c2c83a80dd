"""ONNX files -> primitives (`import_onnx`), and primitives -> ONNX files (`export_onnx`, `write_onnx`)."""

from __future__ import annotations

from weft.frontends.onnx.export import export_onnx
from weft.frontends.onnx.isolated import import_onnx, import_partitioned
from weft.frontends.onnx.limits import Limits
from weft.frontends.onnx.write import write_onnx

__all__ = ["Limits", "export_onnx", "import_onnx", "import_partitioned", "write_onnx"]
