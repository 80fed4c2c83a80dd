"""What a call that stands for an opaque ONNX operator is held to: what ONNX Runtime gives for the same inputs.

`generate.library.onnx_aten` has the calls. Operators that move values must give equal ones. A recurrence may shrink
the errors of its sums or let them grow with every step; so how far a right result may be off is how far ONNX Runtime's
own is moved by operands that are off by about what a plain sum is.
"""

from __future__ import annotations

import math

import torch

from weft.errors import WeftError
from weft.generate.library.execute import BoundCall
from weft.generate.library.translate import Program
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.kernels.source import Schedule
from weft.tune.oracle import rms
from weft.tune.tolerance import (
    MAX_OVER_RMSE,
    OPAQUE_RUNS,
    OPAQUE_ULPS,
    ORDER_FACTOR,
    TOLERANCES,
    Limits,
    gate_a,
)


def scaled(graph: Graph, inputs: list[torch.Tensor], weights: frozenset[int]) -> list[torch.Tensor]:
    """Inputs with matrices of weights scaled by 1/sqrt(K), as in networks: else rounding grows with every step."""
    from weft.generate.library.onnx_aten import EXACT, operator_of

    if operator_of(graph) in EXACT:
        return inputs
    wide = {k for k in weights if inputs[k].is_floating_point() and inputs[k].dim() > 2}
    return [x / math.sqrt(max(x.shape[-1], 1)) if k in wide else x for k, x in enumerate(inputs)]


def told(
    graph: Graph, inputs: list[torch.Tensor], *, seed: int, weights: frozenset[int]
) -> list[tuple[torch.Tensor, Limits | None]] | Declined:
    """Per output what ONNX Runtime gives, in the output's type; and gate A, None where values must be equal.

    `weights`: positions of inputs that are constant. Declined: it does not run this, or is not installed.
    """
    from weft.generate.library.onnx_aten import EXACT, operator_of

    call = Program(graph).finish(Schedule("library", (("form", "primitives"),)))

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        device = tensors[0].device if tensors else None
        return BoundCall(call, {k: tensors[k] for k in sorted(weights)}, device=device).run(tensors)

    try:
        values = run(inputs)
        if operator_of(graph) in EXACT:
            return [(x, None) for x in values]
        others = [run(_off(inputs, seed + k)) for k in range(OPAQUE_RUNS)]
    except WeftError as error:
        return Declined(f"ONNX Runtime gave no result to compare with: {error}")
    types = [graph.type_of(n).dtype for n in graph.outputs]
    found: list[tuple[torch.Tensor, Limits | None]] = []
    for k, (t, value) in enumerate(zip(types, values, strict=True)):
        size = rms(value)
        least = OPAQUE_ULPS * TOLERANCES[t].unit * size
        errors = [(other[k].double() - value.double()).nan_to_num(0.0, 0.0, 0.0) for other in others]
        rmse = max(least, *(math.sqrt(float(e.square().mean())) for e in errors))
        most = max(MAX_OVER_RMSE * least, *(float(e.abs().max()) for e in errors))
        limits = gate_a(t, size=value.numel(), rmse_ref=rmse, max_ref=most, rms=size, ulps=OPAQUE_ULPS, flips=0)
        found.append((value, limits))
    return found


def _off(inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Floats that are off by about as much as a plain sum along the longest last dimension."""
    floats = [x for x in inputs if x.is_floating_point()]
    terms = max((x.shape[-1] for x in floats if x.dim()), default=1)
    noise = torch.Generator().manual_seed(seed)

    def off(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        units = (1.0 + ORDER_FACTOR * math.sqrt(terms)) * torch.finfo(x.dtype).eps / 2
        share = torch.rand(x.shape, generator=noise, dtype=torch.float64).mul_(2).sub_(1).mul_(units).add_(1)
        return (x.double() * share.to(x.device)).to(x.dtype)

    return [off(x) for x in inputs]
