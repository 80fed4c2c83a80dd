"""The registry and `apply`: names, docstrings, origins, and what happens with operands that do not fit."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from tests.fission.harness import build, declined, random

from weft import fission
from weft.fission import RULES
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType


@pytest.mark.parametrize("name", RULES)
def test_every_rule_states_its_arrow_shapes_conditions_and_source(name: str) -> None:
    text = inspect.getdoc(RULES[name])
    assert text is not None
    first, *rest = text.split("\n")
    assert "→" in first and first.rstrip().endswith("."), first
    for word in ("Shapes:", "Conditions:", "Source:"):
        assert re.search(rf"^{word} \S", "\n".join(rest), re.MULTILINE), f"{name} lacks {word}"


@pytest.mark.parametrize("name", RULES)
def test_every_rule_takes_a_builder_operands_and_keywords(name: str) -> None:
    first, *rest = inspect.signature(RULES[name]).parameters.values()
    assert first.name == "b"
    for p in rest:
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            assert p.default in (p.empty, fission.ABSENT), p  # an operand, perhaps absent
        else:
            assert p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL), p


def test_names_are_those_of_the_functions() -> None:
    aliases = {"reduce_log_sum_exp": "logsumexp", "isinf": "is_inf"}
    for name, rule in RULES.items():
        assert rule.__name__.rstrip("_") == aliases.get(name, name)
    with pytest.raises(TypeError):
        RULES["relu"] = RULES["gelu"]  # type: ignore[index]


def test_apply_records_the_operator() -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (2, 3))), b.input(TensorType(DType.F32, (4, 3)))
    y = fission.apply(b, "linear", (x, w, -1), {}, source="node 'fc'", location="m.onnx:7")
    assert isinstance(y, tuple)
    z = fission.apply(b, "softmax", y, {"axis": -1})
    assert isinstance(z, tuple)
    linear, softmax = b.build(z).origins
    assert (linear.rule, linear.operands, linear.results) == ("linear", (x, w, -1), y)
    assert (linear.source, linear.location, linear.params) == ("node 'fc'", "m.onnx:7", ())
    assert (softmax.rule, softmax.params, softmax.results) == ("softmax", (("axis", -1),), z)
    nodes = b.build(z).nodes
    assert {nodes[i].origin for i in range(x + 2, len(nodes))} == {0, 1}


def test_a_rule_that_calls_another_stays_one_operator() -> None:
    built = build("selu", [random(3)])
    assert not isinstance(built, Declined)
    assert [o.rule for o in built[0].origins] == ["selu"]


def test_parameters_are_sorted_and_hashable() -> None:
    params = {"pads_lo": (0, 0), "kernel": (2, 2), "strides": (2, 2), "pads_hi": (0, 0)}
    built = build("max_pool", [random(1, 1, 4, 4)], **params)
    assert not isinstance(built, Declined)
    origin = built[0].origins[0]
    assert [k for k, _ in origin.params] == sorted(params)
    hash(origin)


def test_what_does_not_fit_declines_with_a_reason() -> None:
    x = random(2, 3)
    assert declined("no_such_rule", x) == "no rule 'no_such_rule'"
    assert "does not take these operands" in declined("relu", x, x)
    assert "does not take these operands" in declined("softmax", x)
    assert "does not take these operands" in declined("softmax", x, axis=1, fast=True)
    assert "do not broadcast" in declined("binary", x, random(4), op="add")


def test_declining_leaves_the_builder_usable_and_outside_of_the_origin() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.I64, (2, 3)))
    assert isinstance(fission.apply(b, "softmax", (x,), {"axis": 0}), Declined)
    assert isinstance(fission.apply(b, "matmul", (x, x), {}), Declined)
    y = b.apply(Prim.NEG, x)
    assert b.node(y).origin == -1
    graph = b.build([y])
    assert all(o.results == () for o in graph.origins)


def test_absent_operands_may_be_left_out() -> None:
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    a, c = build("linear", [x, w]), build("linear", [x, w, None])
    assert not isinstance(a, Declined) and not isinstance(c, Declined)
    assert a[0].nodes == c[0].nodes
