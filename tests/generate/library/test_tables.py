"""Every entry of the tables of framework calls, in every type, memory format and poison, through the tuner's gate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter_ns

import pytest
from tests.generate.library import table_cases as cases
from tests.slow import few
from tests.tune.cases import problem as problem_of

from weft.device.cuda.facts import profile
from weft.device.facts import CpuFacts
from weft.generate.library import LibraryGenerator
from weft.generate.library.covered import CONVERT, GELU, OPAQUE, covered, entry_of, is_covered
from weft.generate.library.operators import OPERATORS
from weft.generate.library.translate import OUT_VARIANTS, ROW_MAJOR_OUT_VARIANTS, TRANSLATE
from weft.ir.attrs import WindowAttrs
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import FREE, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import LibraryCall, Schedule
from weft.tune.verify import LibrarySubject, classify, reference_of, verify

PRIMS = [p for p in Prim if p not in FREE and p is not Prim.OPAQUE]
Problems = Iterable[Iterator[Problem]]


def checked(problems: Problems, *, for_gpus: bool = False) -> set[str]:
    """Run the covered calls of all problems; the entries that were met.

    `for_gpus`: what is called in this form on GPUs only, on the CPU.
    """
    facts = profile("h200") if for_gpus else None
    met, wrong = set(), []
    for family in problems:
        reference = None
        for problem in family:
            for call in cases.calls_of(problem, facts):
                entry = entry_of(problem, call)
                if not is_covered(problem, call, "cpu"):
                    continue
                met.add(entry)
                reference = reference or reference_of(problem.graph, seed=0)
                try:
                    subject = LibrarySubject(problem, call)
                    laid = reference.laid_out(problem).of_kernel(call)
                    found = verify(problem, subject, laid, {}, slow_s=1e9, clock=perf_counter_ns).finding
                except Exception as error:
                    found = classify(error)
                if not cases.is_right(entry, found):
                    formats = [f.value for f in problem.input_formats + problem.output_formats]
                    wrong.append(f"{entry} {problem.graph} {formats}: {found}")
    assert not wrong, f"{len(wrong)} calls are not right, such as {wrong[0]}"
    return met


@pytest.mark.parametrize("prim", few(PRIMS, 17), ids=lambda p: p.value)
def test_primitives(prim: Prim) -> None:
    assert f"primitives {prim.value}" in checked(map(cases.whole, cases.primitives(prim)))


@pytest.mark.parametrize("rule", few(OPERATORS, 4))
def test_operators(rule: str) -> None:
    assert f"operator {rule}" in checked(cases.of_operator(g, rule) for g in cases.operators(rule))


VIEWED = (DType.F32, DType.F16, DType.I64, DType.BOOL)
"""Element types of which views are read."""


@pytest.mark.parametrize(
    "prim", few([p for p in PRIMS if p not in (Prim.TRANSPOSE, Prim.SLICE)], 13), ids=lambda p: p.value
)
def test_primitives_of_views(prim: Prim) -> None:
    graphs = [g for g in cases.primitives(prim) if g.inputs and g.type_of(g.inputs[0]).dtype in VIEWED]
    assert f"primitives {prim.value}" in checked(
        (cases.whole(v) for g in graphs for v in cases.viewed(g)), for_gpus=True
    )


@pytest.mark.parametrize("rule", few(OPERATORS, 8))
def test_operators_of_views(rule: str) -> None:
    assert f"operator {rule}" in checked(
        (cases.of_viewed(g, rule) for g in cases.viewed_operators(rule)), for_gpus=True
    )


def test_what_is_rounded_once() -> None:
    assert checked(map(cases.whole, cases.rounded_once()), for_gpus=True) == {"widened"}


def test_fused_forms() -> None:
    assert {"conv", "linear"} <= checked(map(cases.whole, cases.products()))


def test_conversions() -> None:
    assert checked(map(cases.whole, cases.conversions())) == {CONVERT}


def every_problem() -> Iterator[Problem]:
    for prim in PRIMS:
        for graph in cases.primitives(prim):
            yield from cases.whole(graph)
    for rule in OPERATORS:
        for graph in cases.operators(rule):
            yield from cases.of_operator(graph, rule)


def test_the_tables_are_covered_whole() -> None:
    entries = {f"primitives {p.value}" for p in TRANSLATE if p not in FREE and p is not Prim.OPAQUE}
    entries |= {f"operator {rule}" for rule in OPERATORS}
    assert set(covered("cpu")) == entries | {CONVERT, OPAQUE, "widened", "conv", "linear"}
    assert set(covered("cuda")) == entries | {CONVERT, OPAQUE, "device", "widened", "cudnn", "cublaslt", GELU}
    assert all(covered("cuda").values())


def test_every_call_that_writes_its_output_itself_is_made() -> None:
    written = {c.run[-1].target for p in every_problem() for c in cases.calls_of(p) if c.out_variant}
    for problem in (p for g in cases.products() for p in cases.whole(g)):
        for form in ("cudnn", "cublaslt"):
            call = LibraryGenerator().emit(problem, Schedule("library", (("form", form),)))
            if isinstance(call, LibraryCall) and call.out_variant:
                written.add(call.run[-1].target)
    assert written == set(OUT_VARIANTS.values()) | set(ROW_MAJOR_OUT_VARIANTS.values())


@pytest.mark.parametrize("to", Format)
@pytest.mark.parametrize("of", Format)
def test_an_output_is_written_in_place_only_by_operands_that_lie_as_it_does(of: Format, to: Format) -> None:
    """oneDNN's GELU of a row-major image leaves a channels-last `out` as it was."""
    every = cases.of_operator(one_gelu(), "gelu")
    (problem,) = (p for p in every if (p.input_formats, p.output_formats) == ((of,), (to,)))
    (call,) = (c for c in cases.calls_of(problem) if entry_of(problem, c) == "operator gelu")
    assert call.out_variant is (of is to)


def one_gelu() -> Graph:
    b = GraphBuilder()
    return b.build(cases.applied(b, "gelu", b.input(TensorType(DType.F32, cases.IMAGE)), {"approximate": "none"}))


def test_a_view_of_an_operand_is_copied_into_a_channels_last_output() -> None:
    b = GraphBuilder()
    seen = b.reshape(b.input(TensorType(DType.F32, (2, 8, 30))), (2, 8, 5, 6))
    graph = b.build(cases.applied(b, "gelu", seen, {"approximate": "none"}))
    problems = list(cases.of_operator(graph, "gelu"))
    assert len(problems) == 2
    for problem in problems:
        (call,) = (c for c in cases.calls_of(problem) if entry_of(problem, c) == "operator gelu")
        assert call.out_variant is (problem.output_formats == (Format.ROW,))


@pytest.mark.parametrize("rule", ["average", "nearest"])
@pytest.mark.parametrize("turned", [True, False])
def test_an_image_is_not_written_in_place_of_a_view_with_other_strides(rule: str, turned: bool) -> None:
    """On a GPU the average pool of channels-last strides writes so into a row-major `out`."""
    b = GraphBuilder()
    if turned:
        image = b.reshape(b.transpose(b.input(TensorType(DType.F32, (2, 30, 8))), (0, 2, 1)), (2, 8, 5, 6))
    else:
        image = b.reshape(b.input(TensorType(DType.F32, (2, 8, 30))), (2, 8, 5, 6))
    if rule == "average":
        pool = WindowAttrs((3, 3), (2, 2), (1, 1), (1, 1), (1, 1))
        graph = b.build([b.add(Prim.WINDOW_SUM, image, attrs=pool)])
        found = cases.whole(graph)
    else:
        graph = b.build(cases.applied(b, "resize_nearest", image, cases.RULES["resize_nearest"][0][1]))
        found = cases.of_viewed(graph, "resize_nearest") if turned else cases.of_operator(graph, "resize_nearest")
    problems = [p for p in found if set(p.input_formats + p.output_formats) == {Format.ROW}]
    calls = [c for p in problems for c in cases.calls_of(p, profile("h200")) if is_covered(p, c, "cuda")]
    assert calls and {c.out_variant for c in calls} == {not turned}


def test_a_group_of_several_entries_is_not_covered() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (3, 4)))
    problem = problem_of(b.build([b.apply(Prim.NEG, b.apply(Prim.EXP, x))]))
    call = LibraryCall(LibraryGenerator().schedules(one_prim(), CpuFacts())[0], (), (), ())  # type: ignore[index]
    assert entry_of(problem, call) == "" and not is_covered(problem, call, "cpu")
    assert is_covered(one_prim(), call, "cpu")


def one_prim() -> Problem:
    b = GraphBuilder()
    return problem_of(b.build([b.apply(Prim.EXP, b.input(TensorType(DType.F32, (3, 4))))]))


def test_attention_is_covered_only_as_the_framework_calls_it() -> None:
    assert "operator sdpa" in covered("cuda") and "attention" not in covered("cuda")
