"""What a compilation says where kernels or plans are over a budget of an SM."""

from __future__ import annotations

from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule
from weft.options import Options
from weft.pipeline.plans import over_budget
from weft.pipeline.search.kernels import Kernels
from weft.pipeline.search.prices import Known
from weft.pipeline.summary import _refusal

BUDGET = "registers=49152,threads=1792"
OVER = "a CTA of k is over sm_budget: 64512 registers of 49152"


def outcome(number: int, verdict: Verdict, error: str) -> Measurement:
    return Measurement(f"p{number}", Schedule("cuda", (("n", number),)), verdict, error=error)


def options(budget_s: float) -> Options:
    return Options(device="cuda", budget_s=budget_s, sm_budget=BUDGET)  # type: ignore[arg-type]


def test_kernels_over_a_budget_are_counted_by_themselves() -> None:
    assert _refusal(outcome(0, Verdict.RESOURCE, OVER)) == "over sm_budget"
    assert _refusal(outcome(0, Verdict.RESOURCE, "k: 200 bytes of registers spilled per thread")) == "resource"
    assert _refusal(outcome(0, Verdict.WRONG, "")) == "wrong"


def test_an_error_has_what_was_declined_most_often_and_what_was_refused() -> None:
    known = Known(complete=True)
    declines = ["library: a call", "cuda: sort is not a primitive of fused loops", "library: a call"]
    for number, why in enumerate(declines):
        known.wrote(f"p{number}", Kernels((), declined=(why,)))
    for number in range(5):
        found = outcome(number, Verdict.RESOURCE, OVER)
        known.measurements[found.problem_key, found.schedule] = found
    found = outcome(9, Verdict.WRONG, "far off")
    known.measurements[found.problem_key, found.schedule] = found
    said = str(over_budget(options(20.0), known, ["no kernel produces the values [7]"]))
    assert said.startswith(
        f"option 'sm_budget': no plan of this model keeps to {BUDGET}: no kernel produces the values"
    )
    assert said.index(f"5 times: {OVER}") < said.index("2 times: library: a call") < said.index("1 times: cuda: sort")
    assert "far off" not in said and "[W001]" in said


def test_a_search_that_its_time_ended_does_not_say_that_there_is_no_plan() -> None:
    known = Known()
    found = outcome(0, Verdict.OK, "")
    known.measurements[found.problem_key, found.schedule] = found
    said = str(over_budget(options(12.0), known, ["no kernel produces the values [7]"]))
    assert said.startswith(
        "option 'budget_s': 12 s ended before each operator had a kernel that was measured and keeps to"
    )
    assert "compiling it again goes on" in said and "[7]" in said
    assert "no plan of this model" not in said


def test_an_error_without_reasons_says_that_there_was_no_time() -> None:
    error = over_budget(options(20.0), Known(), [])
    assert error.details["option"] == "budget_s" and "20 s ended before" in str(error)
    assert "budget_s is 0" in str(over_budget(options(0.0), Known(), ["whatever"]))
