"""Problems around one scan, for the generators of every device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType, round_emulated
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format


def posed(graph: Graph, key: str) -> Problem:
    """Everything row-major."""
    return Problem(graph, key, (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(graph.outputs))


def plain(shape: tuple[int, ...], attrs: a.ScanAttrs, dtype: DType = DType.F32) -> Problem:
    """A scan alone."""
    b = GraphBuilder()
    xs = [b.input(TensorType(dtype, shape)) for _ in range(1 + (attrs.kind == "linear"))]
    return posed(b.build([b.add(Prim.SCAN, *xs, attrs=attrs)]), f"scan {shape} {attrs} {dtype.value}")


def surrounded(shape: tuple[int, int, int], axis: int, *, kind: a.ScanKind = "sum") -> Problem:
    """A scan of what is computed and moved, behind it more of that; the values in front are stored as well."""
    b = GraphBuilder()
    t = TensorType(DType.F32, shape)
    x, y = b.input(t), b.input(TensorType(DType.F32, tuple(reversed(shape))))
    moved = b.apply(Prim.MUL, b.transpose(y, (2, 1, 0)), 0.5)
    front = b.add(Prim.TANH, b.apply(Prim.ADD, x, moved))
    operands = (b.add(Prim.TANH, x), front) if kind == "linear" else (front,)
    h = b.add(Prim.SCAN, *operands, attrs=a.ScanAttrs(axis, kind))
    out = b.transpose(b.apply(Prim.ADD, h, x), (1, 0, 2))
    return posed(b.build([out, front]), f"surrounded {shape} {axis} {kind}")


def selective(
    batch: int, width: int, length: int, states: int, dtype: DType = DType.F32, *, keep: bool = False
) -> Problem:
    """The selective scan of a state space: y = sum_n C h with h[t] = exp(dt A) h[t-1] + dt B x, and a gate behind it.

    `keep`: the values of h are a result, too.
    """
    b = GraphBuilder()

    def given(*shape: int) -> int:
        return b.cast(b.input(TensorType(dtype, shape)), DType.F32)

    x, dt, z = (given(batch, width, length) for _ in range(3))
    decay = given(width, states)
    b_in, c_in = given(batch, length, states), given(batch, length, states)
    whole = (batch, width, length, states)
    step = b.reshape(dt, (batch, width, length, 1))
    rate = b.reshape(decay, (width, 1, states))
    factor = b.add(Prim.EXP, b.apply(Prim.MUL, step, rate))
    term = b.apply(
        Prim.MUL,
        b.apply(Prim.MUL, step, b.reshape(b_in, (batch, 1, length, states))),
        b.reshape(x, (batch, width, length, 1)),
    )
    h = b.add(Prim.SCAN, b.broadcast(factor, whole), b.broadcast(term, whole), attrs=a.ScanAttrs(2, "linear"))
    read = b.apply(Prim.MUL, h, b.reshape(c_in, (batch, 1, length, states)))
    y = b.reshape(b.reduce(Prim.REDUCE_SUM, read, (3,)), (batch, width, length))
    gated = b.cast(b.apply(Prim.MUL, b.apply(Prim.ADD, y, x), b.add(Prim.TANH, z)), dtype)
    graph = b.build([gated, h] if keep else [gated])
    return posed(graph, f"selective {batch} {width} {length} {states} {dtype.value} {keep}")


def drawn(problem: Problem, seed: int = 0) -> list[Array]:
    """Inputs: normal, or small whole numbers."""
    rng = np.random.default_rng(seed)
    found: list[Array] = []
    for n in problem.graph.inputs:
        t = problem.graph.type_of(n)
        if t.dtype.is_float:
            x = rng.standard_normal(t.shape).astype(np.float32)
            if t.rank == 2 and problem.key.startswith("selective"):
                x = -np.abs(x)  # the decay
            found.append(round_emulated(x, t.dtype) if t.dtype.is_emulated else x.astype(t.dtype.numpy))
        else:
            found.append(rng.integers(-3, 4, t.shape).astype(t.dtype.numpy))
    return found


S = a.ScanAttrs
CASES: dict[str, Callable[[], Problem]] = {
    "rows": lambda: plain((5, 37), S(1, "sum")),
    "columns": lambda: plain((37, 21), S(0, "sum")),
    "columns exactly": lambda: plain((9, 64), S(0, "prod")),
    "one row": lambda: plain((70,), S(0, "sum")),
    "middle": lambda: plain((3, 33, 20), S(1, "linear")),
    "rows linear": lambda: plain((6, 100), S(1, "linear")),
    "exclusive": lambda: plain((4, 40), S(1, "sum", exclusive=True)),
    "exclusive product": lambda: plain((40, 5), S(0, "prod", exclusive=True)),
    "reverse": lambda: plain((40, 18), S(0, "linear", reverse=True)),
    "reverse exclusive": lambda: plain((3, 65), S(1, "linear", exclusive=True, reverse=True)),
    "wide integers": lambda: plain((4, 50), S(1, "sum"), DType.I64),
    "bytes": lambda: plain((4, 50), S(1, "sum"), DType.I8),
    "f64": lambda: plain((4, 50), S(1, "linear"), DType.F64),
    "f16": lambda: plain((20, 50), S(1, "sum"), DType.F16),
    "bf16": lambda: plain((20, 34), S(0, "linear"), DType.BF16),
    "surrounded": lambda: surrounded((3, 20, 7), 1),
    "surrounded rows": lambda: surrounded((3, 4, 35), 2),
    "surrounded first": lambda: surrounded((33, 2, 5), 0, kind="linear"),
    "selective": lambda: selective(2, 5, 33, 16),
    "selective odd": lambda: selective(1, 3, 9, 5),
    "selective wide": lambda: selective(1, 2, 40, 20),
    "selective f16": lambda: selective(1, 4, 12, 8, DType.F16),
    "selective kept": lambda: selective(1, 3, 10, 4, keep=True),
}
