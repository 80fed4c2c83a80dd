"""Import a module, evaluate the primitives with NumPy and compare with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.frontends.torch import import_exported_program
from weft.frontends.torch.dtypes import TO_TORCH, from_numpy, to_numpy
from weft.generate.library.opaque_aten import input_dtypes, run_aten
from weft.ir import reference
from weft.ir.types import DType
from weft.ir.verify import verify_graph

LIMITS = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-11},
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def opaque(attrs: Any, operands: Any) -> Any:
    """The reference's way to ATen."""
    assert attrs.framework == "aten"
    kinds = input_dtypes(attrs.payload)
    found = run_aten(attrs.payload, [from_numpy(x, DType(k)) for x, k in zip(operands, kinds, strict=True)])
    return [to_numpy(t)[0] for t in found]


def evaluate(graph: Any, tensors: Any) -> Any:
    """Outputs of a graph as tensors."""
    found = reference.evaluate(graph, [to_numpy(t)[0] for t in tensors], opaque=opaque)
    return [from_numpy(x, graph.type_of(o).dtype) for x, o in zip(found, graph.outputs, strict=True)]


def flat(value: Any) -> Any:
    return [value] if isinstance(value, torch.Tensor) else [x for item in value for x in flat(item)]


def check(module: Any, *inputs: Any, dtype: torch.dtype = torch.float32, opaque_ops: Any = ()) -> Any:
    """Agrees with eager in value, shape and type; returns the import."""
    module = module.eval() if isinstance(module, torch.nn.Module) else Wrapped(module).eval()
    with torch.no_grad():
        wanted = flat(module(*inputs))
        program = import_exported_program(torch.export.export(module, inputs))
    imported = program.imported
    verify_graph(imported.graph)
    assert sorted(u.op for u in imported.opaque) == sorted(opaque_ops), imported.opaque
    found = evaluate(imported.graph, [flat(list(inputs))[i] for i in program.arguments])
    results = [found[r.value] for r in program.results]
    assert len(results) == len(wanted)
    for x, y in zip(results, wanted, strict=True):
        limits = LIMITS.get(dtype, {"rtol": 0, "atol": 0}) if y.dtype.is_floating_point else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(x, y, equal_nan=True, **limits)
    return imported


class Wrapped(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


__all__ = ["TO_TORCH", "Wrapped", "check", "evaluate", "flat"]
