"""What turns an imported graph into something that runs: the compiler, or NumPy for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from weft.frontends.imported import Imported
from weft.frontends.torch.dtypes import from_numpy, to_numpy
from weft.generate.library.opaque_aten import input_dtypes, run_aten
from weft.ir import reference
from weft.ir.attrs import OpaqueAttrs
from weft.ir.types import Array, DType
from weft.options import Options

if TYPE_CHECKING:
    from weft.pipeline.job import Compilation

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Inputs of a graph → its outputs, new tensors."""


class Engine(Protocol):
    """Compiles one imported graph."""

    def __call__(self, imported: Imported, options: Options, eager: Run) -> Run:
        """An executable of the graph; a WeftError where there is none.

        `eager` runs the same graph by the framework's operators: the baseline that an executable must beat.
        """
        ...


def opaque_call(attrs: OpaqueAttrs, operands: Sequence[Array]) -> list[Array]:
    """One ATen call on arrays, for the reference evaluator."""
    kinds = input_dtypes(attrs.payload)
    given = [from_numpy(x, DType(kind)) for x, kind in zip(operands, kinds, strict=True)]
    return [to_numpy(t)[0] for t in run_aten(attrs.payload, given)]


def reference_engine(imported: Imported, options: Options, eager: Run) -> Run:
    """Evaluates the primitives with NumPy: right and slow, for tests of the front end."""
    del options, eager
    graph = imported.graph

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = reference.evaluate(graph, [to_numpy(t)[0] for t in inputs], opaque=opaque_call)
        return [from_numpy(x, graph.type_of(o).dtype) for x, o in zip(found, graph.outputs, strict=True)]

    return run


def compiling_engine(imported: Imported, options: Options, eager: Run) -> Run:
    """The whole compiler; `eager` answers where it beats every plan.

    Raises:
        WeftError: whatever the compiler says.
    """
    # the compiler is loaded when the first graph is compiled: registering a backend must stay cheap
    from weft.pipeline.compile import compile_imported

    return run_of(compile_imported(imported, options, eager=lambda *tensors: eager(tensors)))


def run_of(compilation: Compilation) -> Run:
    """What a compilation came to: its plan, or the framework's own execution as it was timed beside the plans."""
    run = compilation.run
    return lambda tensors: run(*tensors)
