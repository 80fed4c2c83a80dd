"""Imports PyTorch programs: exported ones and FX graphs of core ATen."""

from __future__ import annotations

from weft.frontends.torch.decompose import decompositions, whole_resizes
from weft.frontends.torch.importer import (
    Functional,
    Program,
    Result,
    as_function,
    calls_of_framework,
    functional_program,
    import_exported,
    import_exported_program,
    import_functional_program,
    import_fx,
    import_fx_program,
)

__all__ = [
    "Functional",
    "Program",
    "Result",
    "as_function",
    "calls_of_framework",
    "decompositions",
    "functional_program",
    "import_exported",
    "import_exported_program",
    "import_functional_program",
    "import_fx",
    "import_fx_program",
    "whole_resizes",
]
