from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.ir.random_graphs import random_graph
from tests.tune.cases import problem, single_graphs

from weft.errors import ArtifactError
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.formats import Format
from weft.tune.messages import MAX_MESSAGE_BYTES, GarbageError, body_size, decode, encode
from weft.tune.wire import graph_from_json, graph_to_json, problem_from_json, problem_to_json


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_cross_unchanged(seed: int) -> None:
    graph = random_graph(seed)
    back = graph_from_json(json.loads(json.dumps(graph_to_json(graph), allow_nan=False)))
    nameless = replace(graph, input_names=("",) * len(graph.inputs), output_names=(), origins=())
    assert str(back) == str(nameless)
    assert all(np.array_equal(back.constants[k], graph.constants[k], equal_nan=True) for k in back.constants)


def test_every_primitive_crosses() -> None:
    for prim in Prim:
        if prim in (Prim.INPUT, Prim.CONSTANT, Prim.OPAQUE):
            continue  # sources stand in every graph; opaque below
        for graph in single_graphs(prim):
            assert str(graph_from_json(json.loads(json.dumps(graph_to_json(graph))))) == str(graph)


def test_special_constants_and_formats_cross() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (1, 2, 3, 4)), is_weight=True)
    data = np.array([math.nan, -math.inf, 1.5, -0.0], dtype=np.float32)
    graph = b.build([b.apply(Prim.ADD, x, b.constant(data, DType.BF16)), x])
    posed = problem(graph, Format.LAST, Format.ROW)
    back = problem_from_json(json.loads(json.dumps(problem_to_json(posed), allow_nan=False)))
    assert back.key == posed.key and back.input_formats == posed.input_formats
    assert str(back.graph) == str(graph)
    assert next(iter(back.graph.constants.values())).tobytes() == data.tobytes()


def test_the_operator_that_a_problem_is_crosses() -> None:
    """The templates of some operators know them by it: emitters were never asked for their kernels without."""
    params = (("kernel", (3, 3)), ("most", math.inf), ("none", ()), ("scale", 0.5), ("slow", True), ("type", "f16"))
    posed = replace(
        problem(random_graph(3)),
        origin_rule="some_rule", origin_params=params, origin_operands=(0, -1), origin_operand_nodes=(2, -1),
    )  # fmt: skip
    back = problem_from_json(json.loads(json.dumps(problem_to_json(posed), allow_nan=False)))
    for told in ("origin_rule", "origin_params", "origin_operands", "origin_operand_nodes", "alignment", "finite"):
        assert getattr(back, told) == getattr(posed, told)
    assert [type(x) for _, x in back.origin_params] == [type(x) for _, x in params]
    for bad in (None, {"params": [["x", None]]}, {"params": 3}, {"operands": ["x"]}):
        sent = json.loads(json.dumps(problem_to_json(posed)))
        sent["origin"] = {**sent["origin"], **bad} if bad else None
        with pytest.raises(ArtifactError, match="malformed"):
            problem_from_json(sent)


@pytest.mark.parametrize("damage", range(8))
def test_malformed_problems_are_refused(damage: int) -> None:
    good = json.loads(json.dumps(problem_to_json(problem(random_graph(3)))))
    bad = copy.deepcopy(good)
    nodes = bad["graph"]["nodes"]
    if damage == 0:
        del bad["graph"]["inputs"]
    elif damage == 1:
        nodes[-1][0] = "no such primitive"
    elif damage == 2:
        nodes[-1][1] = [10_000]
    elif damage == 3:
        nodes[-1][3] = ["f32", [7, 7, 7]]
    elif damage == 4:
        bad["graph"]["outputs"] = ["x"]
    elif damage == 5:
        bad["input_formats"] = []
    elif damage == 6:
        bad["output_formats"] = ["diagonal"] * len(bad["output_formats"])
    else:
        bad["graph"] = None
    problem_from_json(good)
    with pytest.raises(ArtifactError, match="malformed"):
        problem_from_json(bad)


def test_framing() -> None:
    data = encode({"op": "x", "y": [1, 2.5, "ü"]})
    assert body_size(data[:4]) == len(data) - 4
    assert decode(data[4:]) == {"op": "x", "y": [1, 2.5, "ü"]}
    for body in (b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, b"3"):
        with pytest.raises(GarbageError):
            decode(body)
    with pytest.raises(GarbageError):
        body_size((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
