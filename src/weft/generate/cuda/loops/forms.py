"""What a schedule of the CUDA generator decides."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

from weft.kernels.source import Schedule

LEAST_CTAS = 2
"""Of a cross-CTA reduction."""


@dataclass(frozen=True, slots=True)
class Form:
    """Parameters of a kernel; a segment to which one does not apply ignores it."""

    threads: int = 256
    """Threads of a block, a power of two."""
    vector: int = 16
    """Most bytes of one memory access."""
    items: int = 1
    """Vectors per thread of an elementwise kernel."""
    fuse: bool = True
    """Dependent reductions over the same rows, and what is computed from them, share a launch."""
    keep: bool = True
    """Costly values that several stages need are computed once per thread."""
    per_row: int = 0
    """Threads that share one row of a reduction, a power of two; 0: by the rules."""
    columns: int = 0
    """Neighbouring rows (in vectors) of one block where the rows are contiguous in memory; 0: by the rules."""
    cluster: int = 1
    """Blocks that share one row."""
    spread: int = 0
    """Blocks in all among which few long rows are divided where no cluster is used; 0: a row has one block."""
    tile: bool = False
    """Elementwise kernels go through shared memory where input and output run along different axes."""
    num_splits: int = 1
    """Parts into which the longest rows are cut; each is reduced by itself, all of them by whoever needs the result."""
    apart: bool = False
    """What follows the reductions element by element has a launch of its own, whatever `fuse` says."""
    corners: bool = False
    """A thread's vectors stand beside each other along an axis of gathers, see `corners`."""
    whole: bool = False
    """A thread has all of a short innermost axis of joined values, of one or more neighbours."""
    single_pass: bool = False
    """Mean and variance by a single pass over a row (Welford), see `moments`."""
    cross_cta: int = 1
    """CTAs that share one row and reduce across CTAs through global memory (single-pass mean and variance, no
    cluster)."""
    eager: bool = False
    """With `corners`: what every other vector needs is read first, whether it turns out to be there or not."""
    scatter: bool = False
    """Results are scattered from where they are computed to all coordinates of pads and resizes that show them."""
    smem_stash: bool = False
    """What CTAs of a cross-CTA reduction have read is stashed in shared memory, where registers are too few."""

    def schedule(self) -> Schedule:
        """The schedule with these parameters; those that came later stand in it only where they matter."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Schedule("cuda", tuple(sorted((k, v) for k, v in values.items() if k not in LATER or v != LATER[k])))

    @staticmethod
    def of(schedule: Schedule) -> Form:
        """Inverse of `schedule`; KeyError where a parameter is missing."""
        given = dict(schedule.params)
        return Form(**{f.name: cast("Any", (LATER | given)[f.name]) for f in fields(Form)})


LATER = {
    "num_splits": 1, "single_pass": False, "apart": False, "corners": False, "whole": False, "cross_cta": 1,
    "scatter": False, "smem_stash": False, "eager": False,
}  # fmt: skip
"""Parameters that schedules of old do not have, and what they mean by that."""
