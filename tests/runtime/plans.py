"""Small plans made by hand: one library call per primitive."""

from __future__ import annotations

from weft.generate.library import LibraryGenerator
from weft.ir.graph import Graph, bits
from weft.kernels.candidate import Candidate, Kind
from weft.kernels.plan import Plan, Step
from weft.kernels.source import Kernel, LibraryCall, Schedule
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import Extracted, extract, format_choices
from weft.runtime.executable import Executable, Linked

PRIMITIVES = Schedule("library", (("form", "primitives"),))


def step_of(candidate: Candidate, cut: Extracted, kernel: Kernel) -> Step:
    """A step of a plan by that kernel, of no particular cost."""
    return Step(
        kernel=kernel,
        inputs=tuple(zip(cut.inputs, cut.problem.input_formats, strict=True)),
        outputs=tuple(zip(cut.outputs, cut.problem.output_formats, strict=True)),
        members=tuple(bits(candidate.members)),
        kind=candidate.kind,
        problem_key=cut.problem.key,
        cost_us=1.0,
    )


def library_plan(graph: Graph) -> Plan:
    """Every non-free primitive as its own call, in the order of the graph."""
    steps = {}
    for candidate in enumerate_candidates(graph).candidates:
        if candidate.kind is not Kind.SINGLE:
            continue
        choice = format_choices(graph, candidate)[0]
        cut = extract(graph, candidate, choice.inputs, choice.outputs)
        kernel = LibraryGenerator().emit(cut.problem, PRIMITIVES)
        assert isinstance(kernel, LibraryCall)
        steps[min(bits(candidate.members))] = step_of(candidate, cut, kernel)
    return Plan("library", tuple(steps[k] for k in sorted(steps)))


def executable(graph: Graph) -> Executable:
    """The library plan, linked."""
    return Executable(Linked(graph, library_plan(graph), {}, None))
