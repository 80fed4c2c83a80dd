"""Calls of attention with the slices that they read and the concatenation that they end in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.generate.cuda.attention.called import called_attention
from weft.generate.cuda.attention.gradient.match import AttentionGradient, attention_gradient
from weft.generate.cuda.attention.match import Attention
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits, mask_of
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate
from weft.orchestrate.called_attention import called_groups
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices
from weft.orchestrate.legality import EnumerationLimits
from weft.orchestrate.select import Priced, select
from weft.orchestrate.stored import Stored

ROWS, POSITIONS, HEADS, WIDTH = 2, 32, 2, 64
BF16 = DType.BF16
TURNED = a.TransposeAttrs((1, 0))


def trained(*, apart: bool = False, read: bool = False) -> tuple[Graph, dict[str, tuple[NodeId, ...]]]:
    """A layer with attention and its gradients, as they are traced; nodes by name.

    `apart`: Q, K and V are products each; `read`: somebody else reads a gradient.
    """
    b = GraphBuilder()
    columns = HEADS * WIDTH
    heads, flat = (ROWS, POSITIONS, HEADS, WIDTH), (ROWS, POSITIONS, columns)
    x, g = (b.input(TensorType(BF16, (ROWS * POSITIONS, columns))) for _ in range(2))
    weight = b.input(TensorType(BF16, (columns, 3 * columns)))
    slices: tuple[NodeId, ...] = ()
    if apart:
        weights = [b.input(TensorType(BF16, (columns, columns))) for _ in range(3)]
        operands = [b.reshape(b.add(Prim.MATMUL, x, w), heads) for w in weights]
    else:
        together = b.reshape(b.add(Prim.MATMUL, x, weight), (ROWS, POSITIONS, 3 * columns))
        slices = tuple(b.slice(together, (0, 0, i * columns), flat, (1, 1, 1)) for i in range(3))
        operands = [b.reshape(s, heads) for s in slices]
    of_heads, of_sums = TensorType(BF16, heads), TensorType(DType.F32, (ROWS, HEADS, POSITIONS))
    forward = called(b, "attention", operands, (of_heads, of_sums))
    gradient = b.reshape(g, heads)
    backward = called(b, "attention_backward", [gradient, *operands, *forward], (of_heads,) * 3)
    joined = b.add(Prim.CONCAT, *(b.reshape(n, flat) for n in backward), attrs=a.ConcatAttrs(2))
    back = b.add(
        Prim.MATMUL, b.reshape(joined, (ROWS * POSITIONS, 3 * columns)), b.add(Prim.TRANSPOSE, weight, attrs=TURNED)
    )
    graph = b.build([b.reshape(forward[0], flat), back, *([backward[1]] if read else [])])
    return graph, {"slices": slices, "forward": forward, "backward": backward, "joined": (joined,)}


def called(b: GraphBuilder, name: str, operands: list[NodeId], types: tuple[TensorType, ...]) -> tuple[NodeId, ...]:
    """All results of a call."""
    payload = json.dumps({
        "args": [*({"tensor": i} for i in range(len(operands))), False, 0.125],
        "inputs": [b.type_of(n).dtype.value for n in operands], "kwargs": {}, "op": f"weft::{name}", "overload": "",
    })  # fmt: skip
    of = [a.OpaqueAttrs("aten", f"weft.{name}.default", payload, i, types) for i in range(len(types))]
    return tuple(b.add(Prim.OPAQUE, *operands, attrs=x) for x in of)


def sets(graph: Graph) -> set[tuple[frozenset[NodeId], tuple[NodeId, ...]]]:
    return {(frozenset(bits(members)), written) for members, written in called_groups(graph, Stored.of(graph))}


def test_slices_and_the_concatenation_are_members() -> None:
    graph, at = trained()
    slices, forward, backward, joined = (at[k] for k in ("slices", "forward", "backward", "joined"))
    assert sets(graph) == {
        (frozenset({*slices, *forward}), forward),
        (frozenset({*slices, *backward}), backward),
        (frozenset({*backward, *joined}), joined),
        (frozenset({*slices, *backward, *joined}), joined),
    }


def test_where_nothing_is_moved_calls_stand_alone() -> None:
    graph, at = trained(apart=True, read=True)
    assert sets(graph) == set()
    graph, at = trained(apart=True)
    assert sets(graph) == {(frozenset({*at["backward"], *at["joined"]}), at["joined"])}


def test_a_gradient_that_others_read_is_stored() -> None:
    graph, at = trained(read=True)
    assert {written for _, written in sets(graph)} == {at["forward"], at["backward"]}


@pytest.mark.parametrize("attention", [False, True], ids=["cpu", "gpu"])
def test_each_is_a_problem_that_a_template_takes(attention: bool) -> None:
    graph, at = trained()
    calls = mask_of((*at["forward"], *at["backward"]))
    found = enumerate_candidates(graph, replace(EnumerationLimits(), attention=attention)).candidates
    candidates = [c for c in found if c.members & calls]
    assert len(candidates) == (6 if attention else 2)
    for c in candidates:
        form = matched(graph, c, forward=bool(c.members & mask_of(at["forward"])))
        packed = bool(c.members & mask_of(at["slices"]))
        if isinstance(form, Attention):
            assert len({x.index for x in (form.q, form.k, form.v)}) == (1 if packed else 3)
        else:
            assert len({i for i, _ in form.operands}) == (4 if packed else 6)
            assert len({x.output for x in form.results}) == (1 if c.outputs == at["joined"] else 3)


def test_a_plan_stores_neither_slices_nor_gradients_apart() -> None:
    graph, at = trained()
    found = enumerate_candidates(graph, replace(EnumerationLimits(), attention=True)).candidates
    priced = [Priced(c, f.inputs, f.outputs, 1.0) for c in found for f in format_choices(graph, c)[:1]]
    chosen = [found[k] for k in select(graph, priced, plans=1)[0].chosen]
    written = {o for c in chosen for o in c.outputs}
    assert written >= {*at["forward"], *at["joined"]}
    assert not written & {*at["slices"], *at["backward"]}


def matched(graph: Graph, candidate: Candidate, *, forward: bool) -> Attention | AttentionGradient:
    (formats,) = format_choices(graph, candidate)
    problem = extract(graph, candidate, formats.inputs, formats.outputs).problem
    found = called_attention(problem) if forward else attention_gradient(problem)
    assert isinstance(found, Attention | AttentionGradient), found
    return found
