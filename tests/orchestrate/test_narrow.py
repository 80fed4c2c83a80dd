"""Products of 8-bit integers as candidates: with the casts that widen their operands, and what follows."""

from __future__ import annotations

import numpy as np
import pytest

from weft.device.cuda.facts import GpuFacts
from weft.fission.quantize import qlinear_matmul
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType, round_f8
from weft.kernels.candidate import Candidate
from weft.kernels.formats import Format
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.estimate_cuda import gpu_estimate_us, gpu_lower_bound_us
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits


def quantised(*, read_again: bool = False, rows: int = 64) -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.I8, (rows, 1024)))
    w = b.constant(np.random.default_rng(0).integers(-128, 128, (1024, 1024)).astype(np.int8))
    scales = [b.constant(np.array(v, np.float32)) for v in (0.1, 0.2, 0.3)]
    zero = b.constant(np.array(0, np.int8))
    y = qlinear_matmul(b, x, scales[0], zero, w, scales[1], zero, scales[2], zero)
    assert not isinstance(y, Declined)
    outputs = [y, b.apply(Prim.ABS, b.cast(x, DType.I32))] if read_again else [y]
    return clean_up(b.build(outputs), strict=False).graph


def with_bytes(graph: Graph, *, attention: bool = True) -> list[Candidate]:
    """Candidates with the product that read its operands in 8 bits."""
    found = enumerate_candidates(graph, EnumerationLimits(attention=attention)).candidates
    product = next(i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL)
    return [
        c for c in found if c.members >> product & 1 and sum(graph.type_of(i).dtype is DType.I8 for i in c.inputs) == 2
    ]


def test_the_product_and_what_follows_take_the_casts_in() -> None:
    graph = quantised()
    found = with_bytes(graph)
    assert len(found) >= 2
    whole = max(found, key=lambda c: c.members.bit_count())
    assert whole.outputs == graph.outputs
    assert not [i for i in whole.inputs if graph.type_of(i).dtype is DType.I32]


def test_not_on_a_cpu() -> None:
    assert with_bytes(quantised(), attention=False) == []


def test_a_cast_that_others_read_stays_outside() -> None:
    assert with_bytes(quantised(read_again=True)) == []


def of_floats(rows: int = 1024, dtype: DType = DType.F8E4M3, *, read_again: bool = False) -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (rows, 4096)))
    w = b.constant(round_f8(np.random.default_rng(0).standard_normal((4096, 1024)), dtype), dtype)
    wide = b.cast(x, DType.F32)
    y = b.apply(Prim.MUL, b.add(Prim.MATMUL, wide, b.cast(w, DType.F32)), b.input(TensorType(DType.F32, ())))
    outputs = [b.cast(y, DType.BF16), *([b.apply(Prim.ABS, wide)] if read_again else [])]
    return clean_up(b.build(outputs), strict=False).graph


def test_products_of_8_bit_floats_take_the_casts_in() -> None:
    graph = of_floats()
    assert any(n.prim is Prim.CONSTANT and n.type.dtype is DType.F8E4M3 for n in graph.nodes), "not widened beforehand"
    found = enumerate_candidates(graph, EnumerationLimits(attention=True)).candidates
    product = next(i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL)
    whole = max((c for c in found if c.members >> product & 1), key=lambda c: c.members.bit_count())
    assert whole.outputs == graph.outputs
    assert sum(graph.type_of(i).dtype is DType.F8E4M3 for i in whole.inputs) == 2
    again = of_floats(read_again=True)
    product = next(i for i, n in enumerate(again.nodes) if n.prim is Prim.MATMUL)
    for c in enumerate_candidates(again, EnumerationLimits(attention=True)).candidates:
        if c.members >> product & 1:
            assert sum(again.type_of(i).dtype is DType.F8E4M3 for i in c.inputs) < 2


def test_they_are_priced_at_their_own_rate() -> None:
    graph = of_floats(8192)
    found = enumerate_candidates(graph, EnumerationLimits(attention=True)).candidates
    whole = max(found, key=lambda c: c.members.bit_count())
    problem = extract(graph, whole, (Format.ROW,) * len(whole.inputs), (Format.ROW,)).problem
    facts = GpuFacts()
    flops = 2.0 * 8192 * 4096 * 1024
    assert gpu_lower_bound_us(problem, facts) < flops / 1.9e15 * 1e6
    assert gpu_lower_bound_us(problem, facts) < gpu_estimate_us(problem, facts) < flops / 0.4e15 * 1e6


def quantised_on_the_way(*, turned: bool = False) -> Graph:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (64, 256))), b.input(TensorType(DType.F8E4M3, (128, 256)))
    q = b.cast(b.apply(Prim.DIV, x, b.apply(Prim.ABS, b.input(TensorType(DType.F32, ())))), DType.F8E4M3)
    if turned:
        w = b.transpose(w, (1, 0))
        return b.build([b.add(Prim.MATMUL, b.cast(q, DType.F32), b.cast(w, DType.F32))])
    return b.build([b.add(Prim.MATMUL, b.cast(q, DType.F32), b.transpose(b.cast(w, DType.F32), (1, 0)))])


@pytest.mark.parametrize("turned", [False, True], ids=["turned wide", "turned narrow"])
def test_what_makes_the_bytes_ends_in_them(turned: bool) -> None:
    graph = quantised_on_the_way(turned=turned)
    found = enumerate_candidates(graph, EnumerationLimits(attention=True)).candidates
    cast = next(i for i, n in enumerate(graph.nodes) if n.type.dtype is DType.F8E4M3 and n.prim is Prim.CAST)
    product = next(i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL)
    assert any(c.outputs == (cast,) and c.members.bit_count() > 1 for c in found)
    whole = [c for c in found if c.members >> product & 1 and cast in c.inputs]
    assert any(graph.inputs[1] in c.inputs for c in whole), "the transpose of the other operand is inside"
