"""Tokens, lists and problems of `weft gemm`."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import OptionError
from weft.gemm.epilogue import NAMED, epilogue
from weft.gemm.spec import LARGEST, LAYOUTS, THIRTEEN, TYPES, Gemm, Search, read_list, read_tokens, thirteen, typed
from weft.ir.types import DType

BASE = Gemm()
TOKENS = re.compile(r"([MNKtO|]+=[0-9]+ *)+")


@given(
    st.lists(
        st.tuples(st.text("MNKt|", min_size=1, max_size=6), st.integers(1, 4096)).filter(lambda x: x[0].strip("|")),
        max_size=8,
    )
)
def test_later_tokens_win_letter_by_letter(pairs: list[tuple[str, int]]) -> None:
    found = read_tokens([f"{letters}={number}" for letters, number in pairs], BASE)
    wanted = {"M": 1024, "N": 1024, "K": 1024, "t": 5000}
    for letters, number in pairs:
        wanted |= dict.fromkeys(letters.replace("|", ""), number)
    assert {"M": found.m, "N": found.n, "K": found.k, "t": found.most} == wanted


@pytest.mark.parametrize(
    "words",
    [["MN=1024", "K=2048", "t=64"], ["MN=1024 K=2048 t=64"], ["MN=1024K=2048t=64"], ["M|N=1024", "K=7  K=2048t=64"]],
)
def test_a_word_may_hold_several(words: list[str]) -> None:
    found = read_tokens(words, BASE)
    assert (found.m, found.n, found.k, found.most) == (1024, 1024, 2048, 64)


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    if TOKENS.fullmatch(text):
        return  # see above
    with pytest.raises(OptionError, match=re.escape("[W001]")) as raised:
        read_tokens([text], BASE)
    assert raised.value.exit_code == 2
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "token",
    ["", "M", "M=", "=4", "M=-1", "M=1.5", "X=4", "MNX=4", "M= 4", "M=4 ", "m=4", "|=4", "M=0", "t=0", "O=3", "O=9",
     f"M={LARGEST + 1}", "M=" + "9" * 40, "M=4\n", "O=65539",
     " M=4", "M=4 K", "M=4 |=2", "M=4,N=5", "M=4\tN=5", "M=4 X=1", "M=4 5", "MN=4 K=0"],
)  # fmt: skip
def test_malformed_tokens_are_refused(token: str) -> None:
    with pytest.raises(OptionError, match=re.escape("[W001]")):
        read_tokens([token], BASE)


@pytest.mark.parametrize("text", TYPES)
def test_types_of_operands_by_name(text: str) -> None:
    g = typed(BASE, text)
    assert g.types == text
    assert text in g.name
    (read,) = read_list(f"MNK=64 layout=nt dtype={text}", BASE, "LIST")
    assert read.types == text
    graph = read.problem().graph
    assert [graph.type_of(i).dtype for i in graph.inputs] == list(read.dtypes)
    assert [graph.type_of(i).shape for i in graph.inputs] == list(read.shapes)
    assert graph.type_of(graph.outputs[0]).dtype is read.out
    assert len(graph.inputs) == (4 if read.dtype.itemsize == 1 else 2)


def test_other_types_are_refused() -> None:
    for text in ("f8e4m3", "e4m3fn", "", "f64", "e4m3_f16"):
        with pytest.raises(OptionError, match="e4m3, e5m2"):
            typed(BASE, text)


def test_fast_sums_are_part_of_the_name() -> None:
    assert typed(replace(BASE, fast=True), "e4m3").name.endswith("nn_e4m3_fast")
    assert replace(BASE, fast=True).name == BASE.name


def test_letters_share_a_value_and_o_selects_the_search() -> None:
    found = read_tokens(["MNK=7384", "t=2398", "O=65536"], BASE)
    assert (found.m, found.n, found.k, found.most, found.search) == (7384, 7384, 7384, 2398, Search.TEMPLATES)
    assert read_tokens(["O=1"], BASE).search is read_tokens(["O=65537"], BASE).search is Search.LIBRARY
    assert read_tokens(["O=2"], BASE).search is read_tokens(["O=65538"], BASE).search is Search.EXHAUSTIVE


def test_matrices_of_2_to_31_elements_are_refused_wherever_they_are() -> None:
    for tokens in (["MK=65536"], ["NK=65536"], ["MN=65536"]):
        with pytest.raises(OptionError, match=r"65536 x 65536: the templates take fewer than 2\^31"):
            read_tokens(tokens, BASE)
    assert read_tokens(["MN=46340"], BASE).m == 46340


def test_the_thirteen_shapes() -> None:
    assert [(g.m, g.n, g.k) for g in thirteen(BASE)][:3] == [(512, 256, 640), (512, 384, 256), (512, 512, 512)]
    assert len({g.name for g in thirteen(BASE)}) == len(THIRTEEN) == 13


def test_lists_have_a_problem_per_line_with_its_own_layout_type_and_epilogue() -> None:
    text = """
    # attention
    MN=128 K=64 layout=nt dtype=bf16   # scores
    M=8 NK=4096 epilogue='relu(acc + bias)'
    MN=128 K=64 layout=nt dtype=bf16
    """
    first, second = read_list(text, BASE, "LIST")  # the third is the first again
    assert (first.m, first.layout, first.dtype, first.epilogue.name) == (128, "nt", DType.BF16, "none")
    assert (second.m, second.layout, second.dtype, second.epilogue.name) == (8, "nn", DType.F16, "bias_relu")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no problem in it"),
        ("# nothing\n\n", "no problem in it"),
        ("MN=4\nMX=4", "line 2: 'MX=4' is not letters"),
        ("MN=4 layout=xx", "line 1: 'xx' is none of nn, nt, tn, tt"),
        ("MN=4 dtype=f64", "line 1: 'f64' is none of f16, bf16, f32"),
        ("MN=4 epilogue=foo(acc)", "line 1: no function foo()"),
        ("MN=4 epilogue='acc", "line 1: a quotation mark without its partner"),
    ],
)
def test_bad_lists_are_refused_by_the_line(text: str, told: str) -> None:
    with pytest.raises(OptionError, match=re.escape(told)):
        read_list(text, BASE, "LIST")


@given(st.text(max_size=60))
def test_any_list_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(OptionError):
        assert read_list(text, BASE, "LIST")


def test_names_are_single_folders_and_tell_problems_apart() -> None:
    problems = [
        Gemm(layout=layout, dtype=dtype, epilogue=epilogue(text), constant=constant)
        for layout in LAYOUTS
        for dtype in (DType.F16, DType.BF16, DType.F32)
        for text in (*NAMED, "acc / 3", "acc * 2")
        for constant in (False, True)
    ]
    names = [g.name for g in problems]
    assert len(set(names)) == len(names)
    assert all(PurePath(name).name == name and re.fullmatch(r"[\w=]+", name) for name in names)


def test_problems_tell_what_decides_and_nothing_else() -> None:
    g = Gemm(64, 32, 16, layout="tt", epilogue=epilogue("relu(acc + bias)"))
    problem = g.problem()
    types = [problem.graph.nodes[i].type for i in problem.graph.inputs]
    assert [t.shape for t in types] == [(16, 64), (32, 16), (32,)]
    assert problem.graph.type_of(problem.graph.outputs[0]).shape == (64, 32)
    assert problem.key == replace(g, most=3, search=Search.EXHAUSTIVE).problem().key
    keys = {replace(g, layout=x, constant=y).problem().key for x in LAYOUTS for y in (False, True)}
    assert len(keys) == 8
