"""Runs one rule on torch tensors through the NumPy reference, and compares it with what torch gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft import fission
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, OriginParam
from weft.ir.prims import CATEGORY, Category
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph

DTYPES = {
    torch.float64: DType.F64,
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.int64: DType.I64,
    torch.int32: DType.I32,
    torch.int16: DType.I16,
    torch.int8: DType.I8,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
}
TORCH = {d: t for t, d in DTYPES.items()}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Operand = torch.Tensor | None


def array(x: torch.Tensor) -> np.ndarray:
    return (x.float() if x.dtype is torch.bfloat16 else x).detach().numpy()


def build(
    name: str, operands: Sequence[Operand], constants: Sequence[int] = (), **params: OriginParam
) -> tuple[Graph, list[np.ndarray]] | Declined:
    """The graph of one rule, and the arrays of its inputs. Operands numbered in `constants` become constants."""
    b, ids, arrays = GraphBuilder(), [], []
    for i, x in enumerate(operands):
        if x is None:
            ids.append(fission.ABSENT)
        elif i in constants:
            ids.append(b.constant(array(x), DTYPES[x.dtype]))
        else:
            ids.append(b.input(TensorType(DTYPES[x.dtype], tuple(x.shape))))
            arrays.append(array(x))
    results = fission.apply(b, name, ids, params)
    if isinstance(results, Declined):
        return results
    graph = b.build(results)
    verify_graph(graph)
    assert graph.origins[0].rule == name and graph.origins[0].results == results
    opaque = [n for n in graph.nodes if CATEGORY[n.prim] is Category.OPAQUE]
    assert not opaque
    return graph, arrays


def run(name: str, *operands: Operand, constants: Sequence[int] = (), **params: OriginParam) -> list[torch.Tensor]:
    """Results of one rule, in their own element types."""
    built = build(name, operands, constants, **params)
    assert not isinstance(built, Declined), built.reason
    graph, arrays = built
    values = evaluate(graph, arrays)
    return [
        torch.from_numpy(np.ascontiguousarray(v).reshape(v.shape).copy()).to(TORCH[graph.type_of(i).dtype])
        for v, i in zip(values, graph.outputs, strict=True)
    ]


def declined(name: str, *operands: Operand, **params: OriginParam) -> str:
    """Why a rule does not apply."""
    built = build(name, operands, (), **params)
    assert isinstance(built, Declined), f"{name} applies"
    return built.reason


def close(found: torch.Tensor, wanted: torch.Tensor, *, ulps: float, scale: float = 0.0) -> None:
    """Equal shapes and |found − wanted| ≤ ulps·eps·(|wanted| + scale), eps of the type of `found`; NaN, ∞ coincide.

    Denormal results may be 0 (exp overflows where its reciprocal is denormal); f16 may not lose its own denormals.
    """
    assert tuple(found.shape) == tuple(wanted.shape)
    info = torch.finfo(found.dtype)
    eps = info.eps
    lost = info.smallest_normal * (ulps * eps if found.dtype is torch.float16 else 1)
    torch.testing.assert_close(
        found.double(),
        wanted.to(found.dtype).double(),
        rtol=ulps * eps,
        atol=ulps * eps * scale + lost,
        equal_nan=True,
    )


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal element by element, with shape and type."""
    assert found.dtype is wanted.dtype, (found.dtype, wanted.dtype)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
