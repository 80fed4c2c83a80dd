"""How a search spends its budget on a kind of device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class SearchPolicy:
    """Numbers of a search; what is not said is as on a CPU."""

    batch: int
    """Problems that are asked for at a time."""
    late: float
    """Share of the budget after which plans are first made of what is known, with `LATE_PRICE` on the rest."""
    last: float = math.inf
    """Share after which they are first made as they are in the end: of what was measured, and of library calls whose
    guesses are dear. Then the dearest of these calls are measured."""
    overlaps: bool = False
    """Whether the host is free while kernels are measured: batches are asked for while those before are measured, and
    plans are made beside. Then one kernel of each problem is measured first where time is short, see `HURRIED`."""
    calls_in_time: bool = False
    """Whether the calls of a library plan are verified before anything else once they would else come too late."""
    uses_at_once: float = math.inf
    """Places of kernels in formats of which all are cut out before the first plan is made; where there are more, that
    plan is made with channels-last images alone. With a limit on memory it might not exist."""
    first: int = 1
    """Kernels of each generator that are made and measured before it is known whether the problem matters."""
    spares_calls: bool = False
    """Whether library calls are among these only where they may win, or where nothing is generated."""
    unmeasured_call_us: float = 0.0
    """Added to a call that nobody measured."""
    library_near: float = math.inf
    """A library's further algorithms are measured where its best call took at most so many times the best kernel."""
    heuristic_within: float = math.inf
    """The heuristic plan is made where it is predicted to be at most so many times as slow as the best."""
    large_programs: bool = False
    """Whether the final plans are solved for over a core of the program, in a share of the budget."""
    counts_launches: bool = False
    """Whether the library plan is the one of least overhead (`generate.library.cost`); else that of fewest calls."""
