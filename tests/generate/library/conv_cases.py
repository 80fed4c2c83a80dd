"""Convolutions as problems, and their calls by recorded engines of cuDNN."""

from __future__ import annotations

from typing import Any

import torch
from tests.generate.library.lt_cases import FACTS, launcher

from weft import fission
from weft.device.cuda.facts import GpuFacts
from weft.generate.library import LibraryGenerator
from weft.generate.library.execute import TORCH_DTYPE
from weft.ir.attrs import ConvAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.text import print_graph
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import LibraryCall


def convolution(
    dtype: DType = DType.F32,
    *,
    sizes: tuple[int, int, int, int, int] = (2, 8, 6, 5, 16),
    kernel: int = 3,
    attrs: ConvAttrs | None = None,
    bias: bool = True,
    residual: bool = False,
    activation: str = "relu",
    formats: tuple[Format, Format] = (Format.LAST, Format.LAST),
) -> Problem:
    """(n, c, h, w) to k channels, in those memory orders; the residual lies as the result."""
    n, c, h, w, k = sizes
    at = attrs or ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 1)
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (n, c, h, w)))
    weight = b.input(TensorType(dtype, (k, c // at.groups, kernel, kernel)), is_weight=True)
    y = b.add(Prim.CONV, x, weight, attrs=at)
    out, order = b.type_of(y).shape, [formats[0], Format.ROW]
    if bias:
        flat = b.reshape(b.input(TensorType(dtype, (k,)), is_weight=True), (1, k, 1, 1))
        y, order = b.add(Prim.ADD, y, b.broadcast(flat, out)), [*order, Format.ROW]
    if residual:
        y, order = b.add(Prim.ADD, y, b.input(TensorType(dtype, out))), [*order, formats[1]]
    if activation:
        made = fission.apply(b, activation, (y,), {})
        assert not isinstance(made, Declined), made.reason
        (y,) = made
    graph = b.build([y])
    return Problem(graph, print_graph(graph), tuple(order), (formats[1],))


def inputs_of(problem: Problem, device: str = "cpu") -> list[torch.Tensor]:
    """Normal numbers in the problem's memory orders."""
    chance = torch.Generator(device).manual_seed(0)
    found = []
    for i, order in zip(problem.graph.inputs, problem.input_formats, strict=True):
        t = problem.graph.type_of(i)
        x = torch.randn(t.shape, generator=chance, device=device).to(TORCH_DTYPE[t.dtype])
        found.append(x.to(memory_format=torch.channels_last) if order is Format.LAST else x)
    return found


def expected(problem: Problem, inputs: list[torch.Tensor], *, bias: bool, residual: bool, relu: bool) -> torch.Tensor:
    """In float64."""
    x, w, *others = (t.double() for t in inputs)
    (at,) = [n.attrs for n in problem.graph.nodes if n.prim is Prim.CONV]
    assert isinstance(at, ConvAttrs)
    (top, left), (bottom, right) = at.pads_lo, at.pads_hi
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    y = torch.nn.functional.conv2d(padded, w, others.pop(0) if bias else None, at.strides, 0, at.dilations, at.groups)
    y = y + others.pop(0) if residual else y
    return y.relu() if relu else y


def calls(problem: Problem, facts: GpuFacts = FACTS) -> list[LibraryCall]:
    """By every engine that is offered."""
    found = LibraryGenerator().schedules(problem, facts)
    assert not isinstance(found, Declined)
    made = [LibraryGenerator().emit(problem, s) for s in found if dict(s.params)["form"] == "engine"]
    assert all(isinstance(x, LibraryCall) for x in made), made
    return [x for x in made if isinstance(x, LibraryCall)]


def prepared(
    problem: Problem, call: LibraryCall, inputs: list[torch.Tensor], room: torch.Tensor | None = None
) -> tuple[Any, torch.Tensor]:
    """What runs the call, and the result that it writes, in the problem's memory order."""
    last = problem.output_formats == (Format.LAST,)
    return launcher(problem, call, inputs, room, order=torch.channels_last if last else torch.contiguous_format)
