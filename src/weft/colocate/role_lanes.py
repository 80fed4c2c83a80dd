"""Lanes of plan variants whose steps are fused: recorded once, the same bits as the plan's, measured whole.

Queries of all of them run on one stream, and the job has one form beside them: roles in their kernels draw its blocks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch

from weft.colocate.fused_plan import FusedPlan
from weft.colocate.gpu_machine import Form, Lane, ending
from weft.colocate.live import Machine
from weft.colocate.operating import Whole
from weft.colocate.recording import WARM_UP, back_to_back, spread
from weft.ir.declined import Declined
from weft.kernels.colocation import FusionShape
from weft.kernels.samples import StepSamples
from weft.kernels.scheduling import Variant
from weft.runtime.cuda_executable import Rebind

QUERIES = 100
"""Of a variant that is measured whole."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A plan on streams of its own."""

    lane: Lane
    outputs: tuple[torch.Tensor, ...]
    """What a query leaves in them."""
    plan: object = None
    """Whose graphs the lane launches: they are there as long as this is."""


_Key = tuple[bool, tuple[tuple[str, FusionShape], ...]]


@final
class RoleLanes:
    """Of one model and job."""

    def __init__(
        self, fused: FusedPlan, plain: Recorded, record: Callable[[Mapping[int, Rebind]], Recorded],
        synchronise: Callable[[], None] = torch.cuda.synchronize,
    ) -> None:  # fmt: skip
        """`plain`: the plan as it is; `record`: the same on the same stream, some steps launched in another way."""
        self.fused = fused
        self._plain, self._record, self._synchronise = plain, record, synchronise
        self._form = Form(plain.lane.stream, None, inside=True)
        self._made: dict[_Key, Recorded | Declined] = {}
        self._measured: dict[_Key, Whole] = {}

    def measured(
        self, variant: Variant, steps: Sequence[StepSamples], machine: Callable[[Lane], Machine], model: str, *,
        whole: bool = False,
    ) -> Whole | Declined:  # fmt: skip
        """A variant measured once on a machine that has its lane behind the plan's; or why it has none. See `of`."""
        key = self._key(variant, steps, whole)
        if isinstance(key, Declined):
            return key
        lane = self.of(variant, steps, whole=whole)
        if isinstance(lane, Declined):
            return lane
        if key not in self._measured:
            self._measured[key] = measured_whole(machine(lane), model)
        return self._measured[key]

    def of(self, variant: Variant, steps: Sequence[StepSamples], *, whole: bool = False) -> Lane | Declined:
        """The lane of a variant with fused steps; or why there is none.

        Args:
            variant: whose steps are meant.
            steps: samples that say in which shape each step is fused.
            whole: each step runs all kernels of the job once.

        Raises:
            KernelDeclinedError: the job's constants are not those of its files [W205].
            DeviceError: the GPU refuses something, or a kernel fails [W301, W302].
        """
        key = self._key(variant, steps, whole)
        if isinstance(key, Declined):
            return key
        if key not in self._made:
            self._made[key] = self._lane(dict(key[1]), whole)
            self.fused.job.ends.callback(self._forget, key)
        made = self._made[key]
        return made if isinstance(made, Declined) else made.lane

    @staticmethod
    def _key(variant: Variant, steps: Sequence[StepSamples], whole: bool) -> _Key | Declined:
        shapes = {s.step: s.shape for s in steps}
        chosen: list[tuple[str, FusionShape]] = []
        for name in sorted(a.step for a in variant.steps):
            if (shape := shapes.get(name)) is None:
                return Declined(f"{name}: its samples do not say in which shape it was fused")
            chosen.append((name, shape))
        return whole, tuple(chosen)

    def _lane(self, chosen: Mapping[str, FusionShape], whole: bool) -> Recorded | Declined:
        rebound = self.fused.rebound(chosen, whole=whole)
        if isinstance(rebound, Declined):
            return rebound
        made = self._record(rebound)
        if wrong := self._wrong(made):
            return Declined(f"{', '.join(chosen)}: {wrong}")
        return replace(made, lane=replace(made.lane, form=self._form))

    def _wrong(self, made: Recorded) -> str:
        """How results differ from the plan's own; empty: in no bit."""
        job, stream = self.fused.job, made.lane.stream
        want = self._results(self._plain)
        if not _alike(want, self._results(self._plain)):
            return "the plan's own results differ from run to run"
        if not _alike(want, self._results(made)):
            return "the results differ from the plan's, with nothing to draw"
        job.begin(stream)
        made.lane.launch()
        job.stop(stream)
        job.snapshot(stream)
        self._synchronise()
        job.read()
        return "" if _alike(want, _bits(made)) else "the results differ from the plan's, beside the job"

    def _results(self, made: Recorded) -> list[torch.Tensor]:
        made.lane.launch()
        self._synchronise()
        found = _bits(made)
        self._synchronise()  # before the next graph writes there
        return found

    def _forget(self, key: _Key) -> None:
        """Before the kernels that its graphs launch are given back."""
        self._synchronise()
        self._made.pop(key, None)
        gc.collect()


def _bits(made: Recorded) -> list[torch.Tensor]:
    """Copies, as bytes: what is no number is equal to itself."""
    return [x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for x in made.outputs]


def _alike(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def measured_whole(machine: Machine, model: str, queries: int = QUERIES) -> Whole:
    """The second variant of a machine, by queries back to back.

    Raises:
        DeviceError: something does not end, or a kernel fails [W301, W302].
    """
    with ending(machine):
        back_to_back(machine, model, 1, WARM_UP)
        before = machine.close_job().work_us
        us, clocks = back_to_back(machine, model, 1, queries)
        work = machine.close_job().work_us - before
    return Whole(spread(us, 0), work / len(us), round(float(np.median(clocks))))
