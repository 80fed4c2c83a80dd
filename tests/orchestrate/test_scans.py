from __future__ import annotations

from tests.generate.scans import S, plain, selective

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, bits
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.orchestrate.compulsory import fully_needed
from weft.orchestrate.enumerate import enumerate_candidates


def groups(graph: Graph) -> list[list[str]]:
    """Primitives of each candidate with a scan."""
    found = [[graph.nodes[i].prim.value for i in bits(c.members)] for c in enumerate_candidates(graph).candidates]
    return [g for g in found if "scan" in g]


def test_the_whole_selective_scan_is_one_candidate() -> None:
    graph = selective(1, 4, 8, 4).graph
    work = {
        n.prim.value for n in graph.nodes if n.prim not in (Prim.INPUT, Prim.BROADCAST, Prim.RESHAPE, Prim.CONSTANT)
    }
    largest = max(groups(graph), key=len)
    assert set(largest) == work and "reduce_sum" in largest


def test_two_scans_are_never_in_one() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 8)))
    y = b.add(Prim.SCAN, b.add(Prim.TANH, x), attrs=S(1, "sum"))
    z = b.add(Prim.SCAN, b.add(Prim.TANH, y), attrs=S(0, "sum"))
    found = groups(b.build([z]))
    assert found and all(g.count("scan") == 1 for g in found)


def test_neither_products_nor_sums_in_front_nor_pieces_behind() -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (4, 8))), b.input(TensorType(DType.F32, (8, 8)))
    shifted = b.apply(Prim.SUB, x, b.reduce(Prim.REDUCE_MAX, x, (1,)))
    y = b.add(Prim.SCAN, b.add(Prim.MATMUL, shifted, w), attrs=S(1, "sum"))
    summed = b.reduce(Prim.REDUCE_SUM, y, (1,))
    last = b.slice(y, (0, 7), (4, 1), (1, 1))
    found = groups(b.build([summed, last]))
    assert found == [["scan"]]


def test_what_a_scan_needs_whole() -> None:
    for attrs, needed in [
        (S(1, "sum"), [True]),
        (S(1, "sum", exclusive=True), [False]),
        (a.ScanAttrs(1, "linear"), [False, True]),
    ]:
        graph = plain((3, 5), attrs).graph
        assert [fully_needed(graph)[i] for i in graph.inputs] == needed
