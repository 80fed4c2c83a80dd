"""Epilogues as text: what is read, what is refused, and that all of its meanings agree."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import OptionError
from weft.gemm.epilogue import FUSED, NAMED, Fused, epilogue
from weft.gemm.library import torch_value
from weft.gemm.spec import Gemm
from weft.ir.reference import evaluate
from weft.ir.types import DType

LEAVES = st.sampled_from(["acc", "acc", "bias", "col1", "row", "residual", "full2", "0.5", "-3", "2"])
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda x: st.one_of(
        st.tuples(x, st.sampled_from("+-*"), x).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "abs"]), x).map(
            lambda p: f"{p[0]}(acc + {p[1]})"
        ),
        st.tuples(st.sampled_from(["max", "min"]), x, x).map(lambda p: f"{p[0]}({p[1]}, acc * {p[2]})"),
    ),
    max_leaves=6,
)


def read(text: str) -> Any:
    """None for a text that is refused, for lack of `acc` or for its many operands."""
    try:
        return epilogue(text)
    except OptionError:
        return None


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_primitives_and_torch_agree(text: str) -> None:
    found = read(text)
    if found is None:
        return
    g = Gemm(4, 6, 8, dtype=DType.F32, epilogue=found)
    chance = np.random.default_rng(0)
    operands = [chance.normal(size=s).astype(np.float32) for s in g.shapes]
    (got,) = evaluate(g.problem().graph, operands)
    named = {name: torch.from_numpy(x).double() for (name, _), x in zip(found.operands, operands[2:], strict=True)}
    wanted = torch_value(found, torch.from_numpy(operands[0] @ operands[1]).double(), named).expand(4, 6).numpy()
    assert np.allclose(got, wanted, rtol=1e-4, atol=1e-3 * (1 + np.abs(wanted).max()))


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_what_the_library_fuses_and_what_is_left_make_the_whole(text: str) -> None:
    found = read(text)
    if found is None:
        return
    chance = torch.Generator().manual_seed(0)
    shapes = {"column": (6,), "row": (4, 1), "full": (4, 6)}
    named = {n: torch.randn(shapes[e], generator=chance, dtype=torch.float64) for n, e in found.operands}
    acc = torch.randn(4, 6, generator=chance, dtype=torch.float64)
    fused, rest = found.divided
    first = acc + (named[fused.bias] if fused.bias else 0) + (named[fused.residual] if fused.residual else 0)
    if fused.activation:
        first = torch_value(epilogue(f"{fused.activation}(acc)"), first, {})
    parts = first if rest is None else torch_value(rest, first, named)
    assert torch.allclose(parts, torch_value(found, acc, named), equal_nan=True)


@settings(deadline=None)
@given(st.text(max_size=40) | st.text("ac+bias()*/-.0123 ", max_size=30))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    found = read(text)
    if found is not None:
        assert read(found.text) == found
        assert re.fullmatch(r"\w+", found.name)


@pytest.mark.parametrize(
    "text",
    ["", "3", "row", "x", "acc.T", "acc[0]", "acc ** 2", "acc if acc else 1", "lambda: acc", "acc, acc", "acc +",
     "__import__('os')", "open(acc)", "acc + True", "acc + 'a'", "acc + 1e999", "acc + 1j", "relu()", "relu(acc, 2)",
     "relu(x=acc)", "max(acc)", "acc\0", "acc + biased", "acc + bias12", "acc // 2", "~acc", "acc @ bias",
     "(" * 250 + "acc" + ")" * 250, "-" * 390 + "acc", "acc" + " + 1" * 200, "acc + " + "9" * 380,
     "acc + 1/0", "acc + relu(3)", "acc * (1e300 * 1e300)",
     "acc + bias + bias1 + bias2 + bias3 + row + row1 + full"],
)  # fmt: skip
def test_what_is_no_epilogue_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=re.escape("option '--epilogue'")):
        epilogue(text)


def test_names_stand_for_expressions_and_expressions_find_their_names() -> None:
    for name, text in NAMED.items():
        assert epilogue(name) == epilogue(text)
        assert epilogue(f" {text} ").name == name
    assert set(FUSED) <= set(NAMED.values())
    assert epilogue("acc*2").text == epilogue("( acc *2)").text == "acc * 2"


def test_a_sum_that_only_looks_like_a_bias_is_left_alone() -> None:
    for text in ("2 * acc + bias", "acc + bias + bias", "acc + bias * 2", "silu(acc + bias) * acc", "acc + row"):
        assert epilogue(text).divided == (Fused(), epilogue(text))
    assert epilogue("silu(bias2 + acc) * 3").divided == (Fused("bias2"), epilogue("silu(acc) * 3"))
