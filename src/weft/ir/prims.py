"""The closed set of primitives, and what each one means.

Shared semantics. Every table of the compiler that is keyed by `Prim` is total and follows this page.

* A value is a dense tensor of one `DType` and a static shape; nothing has a side effect; inputs never alias outputs.
* Floats are IEEE-754 in the node's own dtype. f16 and bf16 arithmetic is done in f32 and rounded once per
  primitive; inside one generated kernel the rounding of a value that stays inside may be skipped.
  Sums and products (reductions, windows, matmul, convolution) of f16/bf16 accumulate in f32.
  f8e4m3 and f8e5m2 are types of memory, treated alike; importers compute in f32 around casts from and to them.
  A product in f32 of two operands cast from them may be summed in less than f32 (see `weft.tune.oracle`).
* NaN propagates through arithmetic, MAX, MIN and the max/min reductions. Comparisons with NaN are false (NE true).
  Denormals are kept. exp, log, erf, tanh, ... are within 2 ulp; ADD, SUB, MUL, DIV and SQRT are exact to rounding.
* Only reductions and scans may be re-associated. A linear scan may be computed by pairs (a, b) under
  (a, b)(c, d) = (a c, c b + d): where a factor, a term or a value is infinite, any from there on may be NaN instead.
  A product followed by a sum may be contracted to an FMA.
* Integers wrap (two's complement). Integer DIV truncates toward zero, as C does; MOD has the sign of the divisor
  (Python's %), FMOD that of the dividend. Integer division by zero is undefined: any value, never a trap
  (generated code must guard it). Shifts outside [0, bits) are undefined: any value.
* bool is stored as one byte that is 0 or 1. AND, OR, XOR, NOT work on bool (logical) and integers (bitwise).
* An empty REDUCE_SUM is 0, PROD 1, MAX -inf (or the least integer / False), MIN +inf (or the greatest integer / True).
* SCAN goes along one axis, from its end with `reverse`. sum: y[t] = x[0] + ... + x[t]; prod likewise; linear, of
  factors a and terms b: h[0] = b[0], h[t] = a[t] h[t-1] + b[t], so that a[0] is never read. `exclusive` gives the
  value before each element: at t that of t - 1, and 0 (prod: 1) at first. Integers wrap; f16/bf16 accumulate in f32.
* GATHER and TAKE_ALONG need indices in [0, n). Rules normalise negative ones; an index outside is clamped, never
  followed out of bounds.
* CAST float -> integer truncates toward zero (out of range: undefined value); to bool is `x != 0`; float -> float
  rounds to nearest even. Beyond the greatest number e4m3 gives that (448; it has no infinity), others an infinity.
* Broadcasting is never implicit: elementwise operands have equal shapes, BROADCAST is a node. MATMUL alone
  broadcasts its batch dimensions as NumPy does.
* Two graphs are "equal" when their text forms are; two results are equal within `weft.tune.tolerance`.
* Layout (memory order) is no part of a value: it belongs to the plan.
"""

from __future__ import annotations

from enum import Enum, auto


class Category(Enum):
    """What a primitive does to the index space; decides where it may stand inside a kernel."""

    SOURCE = auto()
    """Graph inputs and constants: no work."""
    ELEMENTWISE = auto()
    """out[x] = f(in1[x], ...)"""
    BROADCAST = auto()
    """Repeats along dimensions; free inside any kernel, never a kernel of its own."""
    VIEW = auto()
    """Renames indices of a row-major tensor without moving bytes."""
    LAYOUT = auto()
    """out[x] = in[L(x)], no arithmetic."""
    REDUCE = auto()
    """Aggregates whole dimensions."""
    WINDOW = auto()
    """Aggregates sliding windows."""
    LINEAR = auto()
    """Contractions: matmul and convolution."""
    OPAQUE = auto()
    """Anything else; run by the source framework's own operator."""
    SCAN = auto()
    """Carries a value along one dimension."""


class Prim(Enum):
    """One member per primitive; the value is its name in the text form."""

    INPUT = "input"
    CONSTANT = "constant"
    # elementwise, one operand
    NEG = "neg"
    ABS = "abs"
    SIGN = "sign"
    EXP = "exp"
    EXPM1 = "expm1"
    LOG = "log"
    LOG1P = "log1p"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    RECIPROCAL = "reciprocal"
    ERF = "erf"
    TANH = "tanh"
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    ASIN = "asin"
    ACOS = "acos"
    ATAN = "atan"
    SINH = "sinh"
    COSH = "cosh"
    ASINH = "asinh"
    ACOSH = "acosh"
    ATANH = "atanh"
    FLOOR = "floor"
    CEIL = "ceil"
    TRUNC = "trunc"
    ROUND = "round"
    """To nearest, ties to even."""
    ISNAN = "isnan"
    ISINF = "isinf"
    NOT = "not"
    CAST = "cast"
    # elementwise, two operands
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    POW = "pow"
    MOD = "mod"
    FMOD = "fmod"
    ATAN2 = "atan2"
    MAX = "max"
    MIN = "min"
    AND = "and"
    OR = "or"
    XOR = "xor"
    SHL = "shl"
    SHR = "shr"
    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"
    # elementwise, three operands
    SELECT = "select"
    """select(c, a, b) = a where c else b; c is bool."""
    # index space
    BROADCAST = "broadcast"
    RESHAPE = "reshape"
    TRANSPOSE = "transpose"
    SLICE = "slice"
    CONCAT = "concat"
    PAD = "pad"
    GATHER = "gather"
    """gather(data, indices, axis=a): NumPy's take; indices of any rank replace dimension a."""
    TAKE_ALONG = "take_along"
    """take_along(data, indices, axis=a): NumPy's take_along_axis; equal shapes but for dimension a."""
    IOTA = "iota"
    """0, 1, 2, ... along one dimension."""
    # aggregation
    REDUCE_SUM = "reduce_sum"
    REDUCE_PROD = "reduce_prod"
    REDUCE_MAX = "reduce_max"
    REDUCE_MIN = "reduce_min"
    ARGMAX = "argmax"
    """Position of the first maximum (or of the first NaN) along one axis, i64; the axis is kept with size 1."""
    ARGMIN = "argmin"
    WINDOW_SUM = "window_sum"
    """Sum over sliding windows of the trailing dimensions; padding counts as 0."""
    WINDOW_MAX = "window_max"
    """Maximum over sliding windows; padding counts as -inf (the least integer)."""
    SCAN = "scan"
    """Running sum, product or linear recurrence along one axis: x, or factors and terms of equal type."""
    # contraction
    MATMUL = "matmul"
    """(..., m, k) @ (..., k, n), batch dimensions broadcast."""
    CONV = "conv"
    """Cross-correlation of x (n, c, *s) with w (o, c/groups, *k); transposed: w is (c, o/groups, *k)."""
    OPAQUE = "opaque"
    """Result number `result` of a framework operator; several nodes may share one call."""


_UNARY = frozenset(
    {
        Prim.NEG, Prim.ABS, Prim.SIGN, Prim.EXP, Prim.EXPM1, Prim.LOG, Prim.LOG1P, Prim.SQRT, Prim.RSQRT,
        Prim.RECIPROCAL, Prim.ERF, Prim.TANH, Prim.SIN, Prim.COS, Prim.TAN, Prim.ASIN, Prim.ACOS, Prim.ATAN,
        Prim.SINH, Prim.COSH, Prim.ASINH, Prim.ACOSH, Prim.ATANH, Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND,
        Prim.ISNAN, Prim.ISINF, Prim.NOT, Prim.CAST,
    }
)  # fmt: skip
_BINARY = frozenset(
    {
        Prim.ADD, Prim.SUB, Prim.MUL, Prim.DIV, Prim.POW, Prim.MOD, Prim.FMOD, Prim.ATAN2, Prim.MAX, Prim.MIN,
        Prim.AND, Prim.OR, Prim.XOR, Prim.SHL, Prim.SHR, Prim.EQ, Prim.NE, Prim.LT, Prim.LE, Prim.GT, Prim.GE,
    }
)  # fmt: skip

ARITY: dict[Prim, int | None] = {
    **dict.fromkeys(_UNARY, 1),
    **dict.fromkeys(_BINARY, 2),
    Prim.SELECT: 3,
    Prim.INPUT: 0,
    Prim.CONSTANT: 0,
    Prim.IOTA: 0,
    Prim.BROADCAST: 1,
    Prim.RESHAPE: 1,
    Prim.TRANSPOSE: 1,
    Prim.SLICE: 1,
    Prim.PAD: 1,
    Prim.CONCAT: None,
    Prim.GATHER: 2,
    Prim.TAKE_ALONG: 2,
    Prim.REDUCE_SUM: 1,
    Prim.REDUCE_PROD: 1,
    Prim.REDUCE_MAX: 1,
    Prim.REDUCE_MIN: 1,
    Prim.ARGMAX: 1,
    Prim.ARGMIN: 1,
    Prim.WINDOW_SUM: 1,
    Prim.WINDOW_MAX: 1,
    Prim.SCAN: None,
    Prim.MATMUL: 2,
    Prim.CONV: 2,
    Prim.OPAQUE: None,
}
"""Number of operands; None where it varies."""

CATEGORY: dict[Prim, Category] = {
    **dict.fromkeys(_UNARY | _BINARY | {Prim.SELECT}, Category.ELEMENTWISE),
    Prim.INPUT: Category.SOURCE,
    Prim.CONSTANT: Category.SOURCE,
    Prim.IOTA: Category.BROADCAST,
    Prim.BROADCAST: Category.BROADCAST,
    Prim.RESHAPE: Category.VIEW,
    Prim.TRANSPOSE: Category.LAYOUT,
    Prim.SLICE: Category.LAYOUT,
    Prim.CONCAT: Category.LAYOUT,
    Prim.PAD: Category.LAYOUT,
    Prim.GATHER: Category.LAYOUT,
    Prim.TAKE_ALONG: Category.LAYOUT,
    Prim.REDUCE_SUM: Category.REDUCE,
    Prim.REDUCE_PROD: Category.REDUCE,
    Prim.REDUCE_MAX: Category.REDUCE,
    Prim.REDUCE_MIN: Category.REDUCE,
    Prim.ARGMAX: Category.REDUCE,
    Prim.ARGMIN: Category.REDUCE,
    Prim.WINDOW_SUM: Category.WINDOW,
    Prim.WINDOW_MAX: Category.WINDOW,
    Prim.SCAN: Category.SCAN,
    Prim.MATMUL: Category.LINEAR,
    Prim.CONV: Category.LINEAR,
    Prim.OPAQUE: Category.OPAQUE,
}

COMMUTATIVE = frozenset({Prim.ADD, Prim.MUL, Prim.MAX, Prim.MIN, Prim.AND, Prim.OR, Prim.XOR, Prim.EQ, Prim.NE})
COMPARISONS = frozenset({Prim.EQ, Prim.NE, Prim.LT, Prim.LE, Prim.GT, Prim.GE})
PREDICATES = COMPARISONS | {Prim.ISNAN, Prim.ISINF}
"""Elementwise primitives whose result is bool whatever the operands are."""
FREE = frozenset({Prim.INPUT, Prim.CONSTANT, Prim.BROADCAST, Prim.IOTA, Prim.RESHAPE})
"""Primitives that are never a kernel of their own: the enumeration works on the others."""
