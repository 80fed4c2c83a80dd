"""What attention writes: its result, and where gradients need them the logarithms of the softmax's sums."""

from __future__ import annotations

from weft.generate.cuda.attention.load import dims_offset
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.role.role import WRITTEN, Parameter
from weft.generate.expr.ctype import literal
from weft.generate.expr.integer import behind, summed
from weft.ir.types import DType
from weft.kernels.source import Pointer

LOG_SUM = """// logarithm of a row's sum; infinity where nothing was added or a score is NaN, as FlashAttention-2 has it
W_FN float w_log_sum(float top, float sum) { return sum > 0.0f ? top + logf(sum) : __builtin_inff(); }
"""


def results(p: Attention) -> tuple[Parameter, ...]:
    """The arrays that are written."""
    written = p.outputs[: 1 if p.sums is None else 2]
    return tuple(Parameter(f"out{i}", Pointer("out", i), WRITTEN) for i in written)


def functions(p: Attention) -> tuple[str, ...]:
    """Text that `logarithm` needs."""
    return () if p.sums is None else (LOG_SUM,)


def logarithm(p: Attention, top: str, scale: float, total: str) -> str:
    """Statement: stores the logarithm of row m's sum; empty where nobody asks for it.

    `top`: the row's largest score before `scale`; `total`: the sum of exponentials beside it.
    """
    if p.sums is None:
        return ""
    z, m = dims_offset(p, p.sums, p.z, "z"), dims_offset(p, p.sums, p.rows, "m")
    place = behind(f"(float*)out{p.outputs[1]}", summed(z, m, p.sums.offset))
    factor = f" * {literal(scale, DType.F32)}" if scale != 1.0 else ""
    return f"*({place}) = w_log_sum({top}{factor}, {total});"
