"""Generated C++ with OpenMP and SIMD: any group of elementwise, layout, gather, window and reduction primitives."""

from __future__ import annotations

from weft.generate.cpp.generator import CppGenerator

__all__ = ["CppGenerator"]
