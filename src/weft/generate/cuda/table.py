"""All patterns of problems that CUDA templates write kernels of, and all templates: a line for each.

The first pattern that has a problem is asked for it; the templates of a pattern are asked in the order in which they
stand here. `docs/writing-a-template.md` says what a new line needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.generate.cuda.attention import template as attention
from weft.generate.cuda.attention.gradient import template as attention_gradient
from weft.generate.cuda.conv.depthwise import template as depthwise
from weft.generate.cuda.conv.depthwise_wgrad import template as depthwise_wgrad
from weft.generate.cuda.conv.groups import template as groups
from weft.generate.cuda.conv.halo import template as halo
from weft.generate.cuda.conv.pooled import template as pooled
from weft.generate.cuda.conv.separable import template as separable
from weft.generate.cuda.conv.squeeze_excite import template as squeeze_excite
from weft.generate.cuda.conv.stacked import template as stacked
from weft.generate.cuda.embedding_gradient import template as embedding_gradient
from weft.generate.cuda.gemm import pattern as gemm
from weft.generate.cuda.gemm.gemv import template as gemv
from weft.generate.cuda.gemm.grouped import template as grouped
from weft.generate.cuda.gemm.mma import template as mma
from weft.generate.cuda.gemm.swap_ab import template as swap_ab
from weft.generate.cuda.gemm.tma import template as tma
from weft.generate.cuda.mlp import template as mlp
from weft.generate.cuda.template import Pattern, Template

PATTERNS: tuple[Pattern[Any], ...] = (
    grouped.PRODUCTS_IN_ONE_LAUNCH,
    mlp.CHAIN,
    attention.LINEAR_ATTENTION_PROBLEM,
    attention.ATTENTION_PROBLEM,
    attention_gradient.ATTENTION_GRADIENT_PROBLEM,
    embedding_gradient.EMBEDDING_GRADIENT_PROBLEM,
    squeeze_excite.SQUEEZE_EXCITE_PROBLEM,
    separable.SEPARABLE_CONVOLUTIONS,
    stacked.STACKED_CONVOLUTIONS,
    pooled.CONVOLUTION_AND_POOL,
    depthwise_wgrad.DEPTHWISE_WEIGHT_GRADIENT,
    depthwise.DEPTHWISE_CONVOLUTION,
    gemm.PRODUCT,
)
BY_OPERATOR: tuple[Pattern[Any], ...] = (
    depthwise_wgrad.DEPTHWISE_WEIGHT_GRADIENT,
    attention.ATTENTION_PROBLEM,
    attention_gradient.ATTENTION_GRADIENT_PROBLEM,
    embedding_gradient.EMBEDDING_GRADIENT_PROBLEM,
)
"""Of these the patterns of problems without a contraction, which are known by the operator that they are."""
TEMPLATES: tuple[Template[Any], ...] = (
    mma.MMA,
    halo.HALO,
    groups.GROUP_CONV,
    tma.TMA,
    swap_ab.SWAP_AB,
    gemv.GEMV,
    depthwise.DEPTHWISE,
    depthwise_wgrad.DEPTHWISE_WGRAD,
    pooled.POOLED,
    stacked.STACKED,
    separable.SEPARABLE,
    squeeze_excite.SQUEEZE_EXCITE,
    attention.LINEAR_ATTENTION,
    attention.ATTENTION,
    attention.ATTENTION_TMA,
    attention_gradient.ATTENTION_GRADIENT,
    embedding_gradient.EMBEDDING_GRADIENT,
    mlp.MLP_PAIR,
    mlp.MLP,
    mlp.MLP_WIDE,
    grouped.GROUPED,
    grouped.GROUPED_TMA,
)
NAMED: Mapping[str, Template[Any]] = {name: t for t in TEMPLATES for name in t.names}
"""By the parameter `template` of their schedules."""
TENSOR = frozenset(name for t in TEMPLATES for name in t.tf32)
"""Names of templates for tensor cores: a schedule of one of them for a product of f32 means TF32."""


def of_pattern(pattern: Pattern[Any]) -> tuple[Template[Any], ...]:
    """The templates of a pattern."""
    return tuple(t for t in TEMPLATES if t.pattern is pattern)
