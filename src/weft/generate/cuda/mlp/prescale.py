"""In which scale the sums of a fused network, and the results between its layers, are.

Sums that one activation reads may be halves: exact, for bf16 has the range of f32. Between two layers with GELU, a
scale s = 0.0981^(1/3) c saves a multiplication of each value: with y = s x the tanh is that of y (y^2 + a), and
y (1 + tanh(...)) is 2 s times GELU, of which halved weights and biases times s make the next layer's y. A rounded
result has as many bits in one scale as in another.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from weft.generate.cuda.mlp.image import Image
from weft.generate.cuda.mlp.match import Chain, last_use
from weft.generate.cuda.mlp.runs import runs
from weft.generate.cuda.mlp.shapes import MlpConfig
from weft.generate.cuda.mlp.text import Kernel, halved
from weft.generate.expr.ctype import literal
from weft.ir.types import DType

LINEAR, CUBIC = 1.13159299, 0.09814895
"""1 + erf(u) is 1 + tanh(LINEAR u + CUBIC u^3), within 3e-4."""
ADDED = LINEAR / CUBIC ** (1 / 3)


@cache
def prescale_header() -> str:
    """Text of weft_cuda_mlp_prescale.h."""
    text = Path(__file__).with_name("weft_cuda_mlp_prescale.h").read_text(encoding="utf-8")
    return f"#define W_STRETCHED {literal(ADDED, DType.F32)}\n{text}"


def prepared(p: Chain, s: MlpConfig, image: Image) -> Image:
    """The image with all that saves operations of a sum."""
    return prescaled(p, s, halved(p, s, image))


def prescaled(p: Chain, s: MlpConfig, image: Image) -> Image:
    """Results of GELU that only the next layer reads, with GELU too."""
    kernel = Kernel(p, s, image)
    factors = {part: kernel.gelu_factor(part) for part in image.halved}
    uses = last_use(p)
    found: set[int] = set()
    for part in range(1, len(p.layers)):
        alone = len(p.kept[part]) == 1 and p.kept[part] == p.layers[part].left and not p.layers[part].beside
        gelus = factors.get(part) is not None and factors.get(part) == factors.get(part + 1)
        if alone and gelus and uses[p.kept[part][0]] == part + 1 and not p.ends_of(part):
            found.add(part)
    for first, count in () if s.flow else runs(p, s.fixed):
        around = set(range(first - 1, first + count))  # the layers of a loop have one text
        found -= set() if around <= found else around
    found = {x for x in found if found & {x - 1, x + 1}}  # two operations more at the ends, one less for each
    factor = next((factors[x] for x in sorted(found)), None)
    if factor is None or any(factors[x] != factor for x in found):
        return image
    into = frozenset(x + 1 for x in found)
    return replace(
        image,
        halved=image.halved - (found - into),
        prescaled=frozenset(found),
        prescale=float(factor) * CUBIC ** (1 / 3),
    )
