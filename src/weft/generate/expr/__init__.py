"""The C-family expression emitter: elementwise primitives to expressions of C++ (later CUDA C++), nothing else.

`Value` is a name in the generated text with its element type; `elementwise` prints one primitive; `emit_expression`
prints a whole tree of them as straight-line statements. Neither knows loops, memory or index maps: whatever is not
elementwise is asked from the caller. The functions named `w_...` come from a runtime header of each back end.
"""

from __future__ import annotations

from weft.generate.expr.ctype import c_type, literal, splat, vector_type
from weft.generate.expr.elementwise import ELEMENTWISE, Emitted, Value, elementwise, emit_expression

__all__ = [
    "ELEMENTWISE",
    "Emitted",
    "Value",
    "c_type",
    "elementwise",
    "emit_expression",
    "literal",
    "splat",
    "vector_type",
]
