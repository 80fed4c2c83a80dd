"""A fully connected network with its parameters in one buffer, and its forward pass as a problem.

Parameters lie one after the other as torch has them, weights (out, in) row-major, each aligned to 16 bytes of 16-bit
numbers; gradients lie at the same places.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.cuda.templates.mlp_match import padded
from weft.generate.cuda.training.activation import Activation
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

ALIGNMENT = 8
"""Elements."""


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter in the buffer; all in elements."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        n = 1
        for x in self.shape:
            n *= x
        return n


@dataclass(frozen=True, slots=True)
class Network:
    """Layer l maps widths[l] to widths[l + 1] columns: h = acts[l](h W^T + b)."""

    widths: tuple[int, ...]
    acts: tuple[Activation, ...]
    biases: tuple[bool, ...]
    dtype: DType
    """Of products and results: f16 or bf16."""
    given: DType
    """Of the input: `dtype` or f32."""
    masters: DType | None = None
    """Of the parameters in memory, where that is not `dtype`: f32."""

    @property
    def depth(self) -> int:
        """Layers."""
        return len(self.acts)

    def places(self) -> tuple[Place, ...]:
        """Weight, and bias where there is one, of each layer."""
        found = []
        at = 0
        for k, n, bias in zip(self.widths, self.widths[1:], self.biases, strict=False):
            for shape in ((n, k), *([(n,)] if bias else [])):
                place = Place(at, shape)
                found.append(place)
                at += -(-place.size // ALIGNMENT) * ALIGNMENT
        return tuple(found)

    @property
    def elements(self) -> int:
        """Of the buffer."""
        last = self.places()[-1]
        return last.offset + -(-last.size // ALIGNMENT) * ALIGNMENT

    def place(self, layer: int) -> tuple[Place, Place | None]:
        """Weight and bias of a layer."""
        at = sum(2 if x else 1 for x in self.biases[:layer])
        places = self.places()
        return places[at], places[at + 1] if self.biases[layer] else None

    def width(self, value: int) -> int:
        """Columns of the input of layer `value`, padded to 16."""
        return padded(self.widths[value])


def forward_problem(net: Network, rows: int) -> Problem:
    """The forward pass: inputs are x and the parameters in the order of `places`."""
    b = GraphBuilder()
    h = b.cast(b.input(TensorType(net.given, (rows, net.widths[0]))), net.dtype)
    for k, n, bias, act in zip(net.widths, net.widths[1:], net.biases, net.acts, strict=False):
        w = b.input(TensorType(net.dtype, (n, k)), is_weight=True)
        h = b.add(Prim.MATMUL, h, b.transpose(w, (1, 0)))
        if bias:
            h = b.apply(Prim.ADD, h, b.input(TensorType(net.dtype, (n,)), is_weight=True))
        h = act.apply(b, h)
    graph = b.build([h])
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,))
