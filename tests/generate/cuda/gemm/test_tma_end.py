"""What follows a product in 16 bits: the machine's own functions where a result's rounding hides their error."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from tests.generate.cuda.gemm.test_tma import linear, made
from tests.generate.cuda.products import ROW
from tests.generate.cuda.tensor_emulator import Emulated, rounded, run

from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem

After = Callable[[GraphBuilder, NodeId], NodeId]


def gelu(b: GraphBuilder, y: NodeId) -> NodeId:
    e = b.apply(Prim.ERF, b.apply(Prim.MUL, y, 0.7071067811865476))
    return b.apply(Prim.MUL, b.apply(Prim.MUL, y, 0.5), b.apply(Prim.ADD, e, 1.0))


def mish(b: GraphBuilder, y: NodeId) -> NodeId:
    e = b.apply(Prim.EXP, b.apply(Prim.MIN, y, 20.0))
    n = b.apply(Prim.MUL, e, b.apply(Prim.ADD, e, 2.0))
    return b.apply(Prim.MUL, y, b.apply(Prim.DIV, n, b.apply(Prim.ADD, n, 2.0)))


def guarded_mish(b: GraphBuilder, y: NodeId) -> NodeId:
    """What is compared is no function's result."""
    return b.apply(Prim.SELECT, b.apply(Prim.GT, y, 20.0), y, mish(b, y))


def hard_swish(b: GraphBuilder, y: NodeId) -> NodeId:
    gate = b.apply(Prim.MIN, b.apply(Prim.MAX, b.apply(Prim.ADD, y, 3.0), 0.0), 6.0)
    return b.apply(Prim.DIV, b.apply(Prim.MUL, y, gate), 6.0)


def both(b: GraphBuilder, y: NodeId) -> NodeId:
    """The function of errors itself is read too."""
    e = b.apply(Prim.ERF, y)
    return b.apply(Prim.MUL, b.apply(Prim.ADD, e, 1.0), e)


def halves(b: GraphBuilder, y: NodeId) -> NodeId:
    """A small error of the quotient becomes a large one."""
    return b.apply(Prim.FLOOR, b.apply(Prim.DIV, y, b.apply(Prim.ADD, b.apply(Prim.MUL, y, y), 1.0)))


def wide(b: GraphBuilder, y: NodeId) -> NodeId:
    return b.cast(gelu(b, b.cast(y, DType.F32)), DType.F32)


def sigmoid(b: GraphBuilder, y: NodeId) -> NodeId:
    power = b.apply(Prim.EXP, b.apply(Prim.NEG, b.cast(y, DType.F32)))
    return b.cast(b.apply(Prim.DIV, 1.0, b.apply(Prim.ADD, power, 1.0)), DType.F16)


def silu(b: GraphBuilder, y: NodeId) -> NodeId:
    wide = b.cast(y, DType.F32)
    divisor = b.apply(Prim.ADD, 1.0, b.apply(Prim.EXP, b.apply(Prim.NEG, wide)))
    return b.cast(b.apply(Prim.DIV, wide, divisor), DType.F16)


ENDS: dict[str, tuple[After, set[str]]] = {
    "sigmoid": (sigmoid, {"w_rough_exp(", "w_rough_share("}),
    "silu": (silu, {"w_rough_exp(", "w_rough_share("}),
    "gelu": (gelu, {"w_rough_one_plus_erf("}),
    "mish": (mish, {"w_rough_exp(", "w_rough_div("}),
    "guarded mish": (guarded_mish, {"w_rough_exp(", "w_rough_div("}),
    "hard swish": (hard_swish, set()),
    "erf read twice": (both, set()),
    "floor": (halves, set()),
    "stored as f32": (wide, set()),
}


ROUGH = ("w_rough_one_plus_erf(", "w_rough_exp(", "w_rough_div(", "w_rough_share(")


def problem_of(after: After) -> Problem:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F16, (40, 16))), b.input(TensorType(DType.F16, (16, 32)), is_weight=True)
    graph = b.build([after(b, b.add(Prim.MATMUL, x, w))])
    return Problem(graph, f"{graph}", (ROW, ROW), (ROW,))


@pytest.fixture(scope="module")
def kernels() -> Emulated:
    return Emulated([made(problem_of(after), linear(64, 32), f"k{i}") for i, (after, _) in enumerate(ENDS.values())])


@pytest.mark.parametrize("name", list(ENDS))
def test_rough_only_where_rounding_hides_it(name: str, kernels: Emulated) -> None:
    after, wanted = ENDS[name]
    problem = problem_of(after)
    source = made(problem, linear(64, 32), f"k{list(ENDS).index(name)}")
    text = source.text[source.text.index(f" {source.entry}(") :]
    assert {f for f in ROUGH if f in text} == wanted
    divided = re.findall(r"const w_f32 \w+ = \(\S+ / \S+\);", text)
    assert bool(divided) == (name == "floor"), "no division whose last bits are lost anyway"
    rng = np.random.default_rng(3)
    inputs = [rng.integers(-4, 5, s).astype(np.float16) / np.float16(4) for s in ((40, 16), (16, 32))]
    (exact,) = evaluate(problem.graph, inputs, precise=True)
    (got,) = run(kernels, problem, source, inputs)
    right = rounded(exact, problem.graph.type_of(problem.graph.outputs[0]).dtype)
    unit = 2.0**-20 if name == "stored as f32" else 2.0**-10
    np.testing.assert_allclose(got, right, rtol=unit, atol=2.0**-18 if unit > 2.0**-12 else 2.0**-22)
