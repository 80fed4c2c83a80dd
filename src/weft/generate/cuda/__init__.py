"""Generated CUDA C++: groups of elementwise, layout, gather, window and reduction primitives; products by templates."""

from __future__ import annotations

from weft.generate.cuda.generator import CudaGenerator

__all__ = ["CudaGenerator"]
