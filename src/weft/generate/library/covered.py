"""Which library calls a test of the tables covers: entry, element types, memory formats, poison.

A call in a covered form may run although nobody measured it. `tests/generate/library/test_tables.py` runs every entry
of the tables (`translate.TRANSLATE`, `operators.OPERATORS`, the fused forms) under both poisons for every element type
and every combination of memory formats of its operands and result, and holds the table below to what it finds: an
entry that is missing here, or that is wrong in a type which stands here, fails it. Calls that stand for ONNX Runtime's
(`device`) are held against that in `test_onnx_aten.py`, and on a GPU in `tests/gpu/runtime/test_opaque.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from weft.generate.library.operators import OPERATORS
from weft.generate.library.translate import TRANSLATE
from weft.ir.prims import FREE, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import LibraryCall

_ALL = frozenset(DType)
_COMPUTED = frozenset(d for d in DType if not d.is_float8)
_FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
_WIDE = frozenset({DType.F32})
_HALVES = frozenset({DType.F16, DType.BF16})
CONVERT, OPAQUE, GELU = "convert", "opaque", "cublaslt gelu"
_VIEWS = frozenset({Prim.TRANSPOSE, Prim.SLICE})
"""In front of others they are strides of an operand."""
_MOVED = (Prim.CAST, Prim.TRANSPOSE, Prim.CONCAT, Prim.GATHER, Prim.SELECT)


@cache
def covered(device: str) -> Mapping[str, frozenset[DType]]:
    """Entry (see `entry_of`) -> element types of a problem's inputs and outputs in which it is covered.

    `device`: a kind (`weft.device.kinds`), on which the test of the tables was run. Attention is covered only as the
    framework itself calls it, and no algorithm of a library by number. Opaque operators are what the framework runs;
    there is nothing to hold them against.
    """
    prims = [p for p in TRANSLATE if p not in FREE]
    found = {f"primitives {p.value}": _ALL if p in _MOVED else _COMPUTED for p in prims}
    found |= {f"operator {rule}": _FLOATS for rule in OPERATORS}
    found["widened"] = _HALVES
    found["operator grid_sample"] = _WIDE  # places of 16 bits, and f64 in another order
    found |= {"operator sdpa": _FLOATS | {DType.BOOL}, CONVERT: _ALL, OPAQUE: _ALL}
    del found[f"primitives {Prim.OPAQUE.value}"]
    found[f"primitives {Prim.CONV.value}"] = _FLOATS
    if device == "cpu":
        return found | {"conv": _WIDE, "linear": _WIDE}
    found[f"primitives {Prim.MATMUL.value}"] = _FLOATS  # cuBLAS has no products of integers
    if device != "cuda":  # the framework's operators alone
        return found
    found["operator hard_swish"] = _FLOATS - {DType.F64}  # computes f64 with a sixth of f32
    found["device"] = _COMPUTED - {DType.BF16, DType.BOOL}
    # cuBLASLt's GELU is none of f32's precision: 3.8 times what gate A allows, on an H200
    return found | {"cudnn": _FLOATS - {DType.F64}, "cublaslt": _FLOATS - {DType.F64}, GELU: _HALVES}


def entry_of(problem: Problem, call: LibraryCall) -> str:
    """The entry of the tables that a call comes from; empty for one of several entries, or of none.

    `primitives PRIM`, `operator RULE`, `convert` (a change of the memory format alone), `opaque`, `cublaslt gelu`, else
    the form's name. Views in front of a primitive or an operator are strides of its operands.
    """
    form = str(dict(call.schedule.params).get("form", ""))
    if form == "operator":
        return f"operator {problem.origin_rule}"
    if form == "cublaslt" and any(step.kwargs == (("use_gelu", True),) for step in call.run):
        return GELU
    if form != "primitives":
        return form
    every = {n.prim for n in problem.graph.nodes if n.prim not in FREE}
    if not every:
        return CONVERT
    prims = every - _VIEWS or every
    if prims == {Prim.OPAQUE}:
        return OPAQUE
    (prim, *more) = prims
    return "" if more else f"primitives {prim.value}"


def is_covered(problem: Problem, call: LibraryCall, device: str) -> bool:
    """Whether the test of the tables covers a call's form, so that it may run where nobody measured it.

    By the types of what it reads and writes: tables that follow from its parameters it does not read.

    `device`: as of `covered`. Memory formats are covered in every combination.
    """
    graph = problem.graph
    read = [n for k, n in enumerate(graph.inputs) if k in call.reads]
    dtypes = {graph.type_of(n).dtype for n in (*read, *graph.outputs)}
    return dtypes <= covered(device).get(entry_of(problem, call), frozenset())
