"""Whatever a model says, `apply` gives a graph that holds together or a reason: it never raises."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from tests.fission.harness import declined

from weft import fission
from weft.fission import RULES
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph

SHAPES = [
    (),
    (1,),
    (4,),
    (0,),
    (2, 3),
    (4, 4),
    (3, 0),
    (2, 4, 6),
    (1, 4, 5, 5),
    (2, 2, 3, 3),
    (4, 1, 3, 3),
    (1, 2, 3, 3, 3),
]
TYPES = [DType.F32, DType.F32, DType.F32, DType.F16, DType.I64, DType.U8, DType.BOOL]
TEXTS = [
    "none",
    "tanh",
    "half_pixel",
    "align_corners",
    "mean",
    "sum",
    "add",
    "and",
    "ij,jk->ik",
    "...i",
    "2.0,3.0",
    "CRD",
    "reflect",
]


def value(annotation: str, rng: random.Random) -> object:
    if "Sequence" in annotation or annotation == "Axes":
        return tuple(rng.choice((-7, -1, 0, 1, 1, 2, 2, 3, 9)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 4))))
    if annotation.startswith("bool"):
        return rng.random() < 0.5
    if annotation.startswith("str"):
        return rng.choice(TEXTS)
    if annotation.startswith("float"):
        return rng.choice((-1.0, 0.0, 0.5, 1.0, 2.0, float("inf")))
    return rng.choice((-3, -1, 0, 1, 2, 3, 8))


@pytest.mark.parametrize("name", RULES)
def test_nonsense_is_declined_not_raised(name: str) -> None:
    rng = random.Random(name)
    _, *parameters = inspect.signature(RULES[name]).parameters.values()

    for _ in range(60):
        b = GraphBuilder()
        shape, dtype = rng.choice(SHAPES), rng.choice(TYPES)
        operands, params = [], dict[str, Any]()
        for p in parameters:
            if p.kind is p.KEYWORD_ONLY:
                if p.default is p.empty or rng.random() < 0.5:
                    params[p.name] = "f32" if p.name == "dtype" else value(str(p.annotation), rng)
                continue
            for _ in range(rng.choice((1, 2, 3)) if p.kind is p.VAR_POSITIONAL else 1):
                like = rng.random() < 0.5
                t = TensorType(
                    dtype if like else rng.choice(TYPES), shape if rng.random() < 0.5 else rng.choice(SHAPES)
                )
                operands.append(fission.ABSENT if p.default == fission.ABSENT and rng.random() < 0.3 else b.input(t))
        found = fission.apply(b, name, operands, params)
        if not isinstance(found, Declined):
            verify_graph(b.build(found))
            assert all(min(b.type_of(i).shape, default=0) >= 0 for i in found)
        else:
            assert found.reason


def test_cases_that_once_raised() -> None:
    assert "slice" in declined("slice", torch.tensor(1.0), starts=(0,), ends=(1,), axes=(0,))
    assert "scale of shape" in declined("quantize_linear", torch.tensor(1.0), torch.ones(2), axis=0)
    assert "arange" in declined("arange", size=2, start=float("inf"), dtype="f32")
    assert "output paddings" in declined(
        "conv_transpose", torch.ones(1, 1, 3), torch.ones(1, 1, 3),
        strides=(1,), pads_lo=(0,), pads_hi=(0,), dilations=(1,), output_padding=(0, 0),
    )  # fmt: skip
