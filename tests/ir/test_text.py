from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.random_graphs import random_graph
from tests.ir.small_graphs import GRAPHS

from weft.errors import ModelError
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, Origin
from weft.ir.prims import Prim
from weft.ir.text import INLINE_LIMIT, parse_graph, print_graph
from weft.ir.types import Array, DType, TensorType, round_bf16
from weft.ir.verify import verify_graph


def assert_same(graph: Graph, other: Graph) -> None:
    """Field by field; only the arrays are compared by bytes."""
    assert other.nodes == graph.nodes
    assert [n.origin for n in other.nodes] == [n.origin for n in graph.nodes]
    assert (other.inputs, other.outputs) == (graph.inputs, graph.outputs)
    assert (other.input_names, other.output_names) == (graph.input_names, graph.output_names)
    assert other.origins == graph.origins
    assert other.constants.keys() == graph.constants.keys()
    for digest, data in graph.constants.items():
        assert other.constants[digest].tobytes() == data.tobytes()


@pytest.mark.parametrize("name", GRAPHS)
def test_golden(name: str, golden: Callable[[str], None]) -> None:
    golden(print_graph(GRAPHS[name](), origins=True))


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_printed_can_be_read(name: str) -> None:
    graph = GRAPHS[name]()
    verify_graph(graph, data=True)
    assert_same(graph, parse_graph(print_graph(graph, origins=True), graph.constants))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([DType.F64, DType.F32, DType.F16, DType.BF16]))
def test_parser_undoes_printer(seed: int, dtype: DType) -> None:
    graph = random_graph(seed, dtype=dtype)
    assert_same(graph, parse_graph(print_graph(graph, origins=True), graph.constants))


def test_without_origins_only_the_program_is_printed() -> None:
    graph = GRAPHS["softmax"]()
    text = print_graph(graph)
    assert "@" not in text
    assert parse_graph(text, graph.constants).nodes == graph.nodes


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_any_name_survives(name: str, source: str) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, ()), name)
    with b.origin(
        Origin("r", (("s", source), ("t", (1, -2)), ("f", 1e-5), ("b", True)), (x, -1, -2), (x,), source, name)
    ):
        y = b.add(Prim.NEG, x)
    graph = b.build([y], [source])
    text = print_graph(graph, origins=True)
    assert text.isascii()
    assert_same(graph, parse_graph(text))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(list(DType)), st.binary(min_size=8 * INLINE_LIMIT, max_size=8 * INLINE_LIMIT), st.integers(0, 16)
)
def test_small_constants_of_any_bits_survive(dtype: DType, raw: bytes, size: int) -> None:
    data: Array
    if dtype is DType.BOOL:
        data = np.frombuffer(raw, np.uint8)[:size] < 128
    else:
        data = np.frombuffer(raw, dtype.numpy)[:size].copy()
    if dtype is DType.BF16:
        data = round_bf16(data.astype(np.float32))
    b = GraphBuilder()
    graph = b.build([b.constant(data, dtype)])
    assert_same(graph, parse_graph(print_graph(graph), graph.constants))


@pytest.mark.parametrize("value", [np.float32(1e-45), np.float32(0.1), np.float32(16777217), np.float32(-0.0)])
def test_floats_stand_by_value_exactly(value: np.float32) -> None:
    b = GraphBuilder()
    graph = b.build([b.constant(np.array([value, np.inf, -np.inf, np.nan], np.float32))])
    assert "digest" not in print_graph(graph)
    assert_same(graph, parse_graph(print_graph(graph)))


def test_large_constants_stand_by_digest() -> None:
    b = GraphBuilder()
    graph = b.build([b.constant(np.zeros(INLINE_LIMIT + 1, np.float32))])
    text = print_graph(graph)
    assert f'digest="{next(iter(graph.constants))}"' in text
    with pytest.raises(ModelError, match=r"line 3: the data of constant .* are missing"):
        parse_graph(text)
    wrong = {digest: data + 1 for digest, data in graph.constants.items()}
    with pytest.raises(ModelError, match="are not those of its digest"):
        parse_graph(text, wrong)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_the_line_of_a_damaged_constant_is_named(damaged: int) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 100)))
    graph = b.build([x, *(b.constant(np.full(100_000 + k, k, np.float32)) for k in range(3))])
    data = dict(graph.constants)
    digest = list(data)[damaged]
    data[digest] = data[digest].copy()
    data[digest][-1] += 1
    with pytest.raises(ModelError, match=rf"line {4 + damaged}: the data of constant '{digest[:16]}'… are not those"):
        parse_graph(print_graph(graph), data)


def test_opaque_reason_is_kept_with_origins() -> None:
    graph = GRAPHS["opaque"]()
    parsed = parse_graph(print_graph(graph, origins=True), graph.constants)
    attrs = [n.attrs for n in parsed.nodes if isinstance(n.attrs, a.OpaqueAttrs)]
    assert {x.reason for x in attrs} == {"no rule"}


GOOD = """\
graph 1
inputs %0 "x"
%0 = input() index=0 : 4x8xf32
%1 = reduce_max(%0) axes=(1,) : 4x1xf32 @0
%2 = constant() values=(1.0, 2.0) : 2xf32
outputs %1 "y", %2 "z"
@0 {"rule": "r", "params": {}, "operands": [0], "results": [1], "source": "", "location": ""}"""

BAD = {
    "no header": ("graph 1\n", "", "line 1: expected `graph 1`"),
    "other version": ("graph 1", "graph 2", "line 1: expected `graph 1`"),
    "signature": ('inputs %0 "x"', "inputs %0 x", "line 2: expected `inputs"),
    "not an input": ('inputs %0 "x"', 'inputs %1 "x"', "is no input node"),
    "missing input": ('inputs %0 "x"', "inputs", "1 input nodes, but the signature lists 0"),
    "gap": ("%1 = reduce", "%2 = reduce", "line 4: expected %1, found %2"),
    "unknown primitive": ("reduce_max", "reduce_mux", "line 4: unknown primitive 'reduce_mux'"),
    "forward reference": ("reduce_max(%0)", "reduce_max(%1)", "line 4: %1 reads %1"),
    "no operand": ("reduce_max(%0)", "reduce_max(x)", "line 4: 'x' is no operand"),
    "missing operand": ("reduce_max(%0)", "reduce_max()", "line 4: reduce_max takes 1 operands"),
    "unknown attribute": ("axes=(1,)", "axis=(1,)", "line 4: reduce_max has no attribute 'axis'"),
    "missing attribute": (" axes=(1,)", "", "line 4: reduce_max lacks attribute 'axes'"),
    "attribute twice": ("axes=(1,)", "axes=(1,) axes=(1,)", "line 4: an attribute is given twice"),
    "attribute value": ("axes=(1,)", "axes=(y,)", "line 4: 'y' is no integer"),
    "attribute kind": ("axes=(1,)", "axes=1", "line 4: 1 is no tuple"),
    "axis out of range": ("axes=(1,)", "axes=(2,)", r"line 4: axes \(2,\) of rank 2"),
    "wrong type": ("4x1xf32", "4x2xf32", "line 4: reduce_max gives 4x1xf32, not 4x2xf32"),
    "unknown type": ("4x1xf32", "4x1xf33", "line 4: unknown element type 'f33'"),
    "huge type": ("4x8xf32", "9999999999x9999999999xf32", "line 3: bad shape"),
    "huge number": ("index=0", "index=" + "9" * 5000, "line 3: .* is no integer"),
    "number of values": ("(1.0, 2.0)", "(1.0,)", "line 5: 1 values for 2xf32"),
    "no number": ("(1.0, 2.0)", "(1.0, one)", "line 5: 'one' is no number"),
    "values and digest": ("values=(1.0, 2.0)", 'values=(1.0, 2.0) digest="0"', "line 5: constant takes either"),
    "trailing text": ("4x1xf32 @0", "4x1xf32 @0 nonsense", "line 4: malformed node"),
    "output missing": ('%2 "z"', '%9 "z"', "line 6: output 1 is %9"),
    "no outputs": ("outputs", "result", "line 6: expected `outputs"),
    "comma": ('"y", %2', '"y" %2', "line 6: expected `outputs"),
    "unnamed": ('%1 "y", %2 "z"', '%1, %2 "z"', "line 6: a name after an unnamed value"),
    "half of the names": ('%1 "y", %2 "z"', '%1 "y", %2', "1 output names for 2 outputs"),
    "bad escape": ('"z"', r'"\q"', "line 6: malformed string"),
    "unknown origin": ("@0\n", "@1\n", "%1 comes from origin @1"),
    "origin order": ('@0 {"rule"', '@3 {"rule"', "line 7: expected origin @0"),
    "origin json": ('"params": {}', '"params": {', "line 7: an origin that is no JSON"),
    "origin fields": ('"rule": "r", ', "", "line 7: an origin with missing or unknown fields"),
    "origin node": ('"results": [1]', '"results": [3]', "line 7: results are no nodes"),
    "origin bool node": ('"results": [1]', '"results": [true]', "line 7: results are no nodes"),
    "origin param": ('"params": {}', '"params": {"a": null}', "line 7: parameter 'a'"),
    "origin params": ('"params": {}', '"params": 1', "line 7: params are no object"),
    "origin text": ('"source": ""', '"source": 1', "line 7: source is no string"),
    "deep json": ('"params": {}', '"params": ' + "[" * 100_000 + "]" * 100_000, "line 7: an origin that is no JSON"),
}


def test_the_good_text_is_good() -> None:
    graph = parse_graph(GOOD)
    assert len(graph) == 3
    assert graph.constant(2).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("what", BAD)
def test_malformed_text_is_refused(what: str) -> None:
    old, new, message = BAD[what]
    assert GOOD.count(old) >= 1
    with pytest.raises(ModelError, match=message):
        parse_graph(GOOD.replace(old, new, 1))


def test_a_node_twice_is_refused() -> None:
    text = GOOD.replace("%2 = constant() values=(1.0, 2.0) : 2xf32", "%2 = reduce_max(%0) axes=(1,) : 4x1xf32")
    with pytest.raises(ModelError, match="line 5: %2 is %1 once more"):
        parse_graph(text)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.characters(), st.booleans())
def test_an_edited_character_never_crashes_the_parser(at: int, char: str, insert: bool) -> None:
    text = GOOD[:at] + char + GOOD[at + (not insert) :]
    try:
        graph = parse_graph(text)
    except ModelError as error:
        assert str(error).startswith("line ")  # noqa: PT017
    else:
        verify_graph(graph, data=True)


def test_origin_parameters_keep_their_kinds() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2,)))
    params = (("a", True), ("b", 1), ("c", 1.0), ("d", "1"), ("e", (1,)), ("f", ()))
    with b.origin(Origin("r", params)):
        graph = b.build([b.add(Prim.NEG, x)])
    found = parse_graph(print_graph(graph, origins=True)).origins[0].params
    assert [(k, type(v), v) for k, v in found] == [(k, type(v), v) for k, v in params]
    assert json.loads(print_graph(graph, origins=True).splitlines()[-1][3:])["params"]["a"] is True
