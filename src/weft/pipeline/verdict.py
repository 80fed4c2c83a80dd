"""What may be said of a compilation's plans: whether they are made of measurements or hang on guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.kernels.plan import Plan
from weft.kernels.record import Tuning
from weft.options import Options
from weft.pipeline.search.prices import Known


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a search."""

    tuning: Tuning
    unmeasured: int = 0
    """Distinct problems of the best plan that nobody measured."""
    wanted: int = 0
    """Distinct problems of the best plan."""
    warning: str = ""
    """What the caller is told; empty: nothing."""

    @property
    def again(self) -> bool:
        """Whether the same command shall tune again: its plan is not remembered as tuned."""
        return self.tuning in (Tuning.CUT_SHORT, Tuning.UNTUNED)


UNTUNED = Judged(Tuning.UNTUNED)


def judged(known: Known, plans: Sequence[Plan], options: Options) -> Judged:
    """What a search with these plans, the best first, has come to."""
    problems = {s.problem_key: s.measured for s in plans[0].steps} if plans else {}
    open_ = sum(not measured for measured in problems.values())
    wanted = len(problems)
    if options.budget_s <= 0:
        return Judged(Tuning.UNTUNED, open_, wanted)
    if not open_ and plans:
        return Judged(Tuning.COMPLETE if known.complete else Tuning.MEASURED, 0, wanted)
    if known.complete:  # every kernel was refused of what a library call stands in for: time changes nothing
        return Judged(Tuning.COMPLETE, open_, wanted)
    why = known.failed or "it ended"
    missing = f"{open_} of the {wanted} problems of this model's best plan were not measured" if wanted else ""
    text = (
        f"Weft's budget of {options.budget_s:g} s was too short, {why}: {missing or 'nothing was measured'}."
        " Nothing is remembered as tuned: with more time, or on an idle machine,"
        " compiling it again goes on from what was measured"
    )
    return Judged(Tuning.CUT_SHORT if known.measurements else Tuning.UNTUNED, open_, wanted, text)
