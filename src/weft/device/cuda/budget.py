"""Whether a kernel leaves room for a co-runner: pure rules over what a function takes and `GpuFacts.within` a budget.

A kernel beside a persistent grid starts where one of its CTAs finds room in what that grid leaves; a kernel that never
does waits until the other job ends. What a function takes is the assembler's word, read from the cubin (`weft.device.
cuda.cubin.usage`) or from the loaded function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from weft.device.cuda.occupancy import occupancy, register_need
from weft.device.cuda.record import GpuFacts
from weft.device.cuda.resources import Launched
from weft.ir.declined import Declined
from weft.sm_budget import NAMES, SmBudget


class Taken(Protocol):
    """What a compiled function takes; `resources.Resources` and `driver.FunctionAttributes` say so."""

    @property
    def registers(self) -> int:
        """Of a thread."""

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a CTA."""


class Placed(Launched, Protocol):
    """The parts of a launch that decide where its CTAs find room; `weft.kernels.source.Launch` has them."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs."""

    @property
    def co_resident(self) -> int:
        """Neighbouring CTAs that spin on each other."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a launch takes of each SM that it is spread over."""

    of_a_cta: SmBudget
    """One CTA, what the system takes of it included."""
    resident: int
    """CTAs that are resident at once, as many as room and grid allow."""

    def text(self, facts: GpuFacts) -> str:
        """For people: resident CTAs, and what these take of the whole SM."""
        whole = facts.whole
        has = (whole.registers_per_sm, whole.shared_per_sm, whole.threads_per_sm)
        parts = zip(("registers", "shared", "threads"), has, strict=True)
        shares = ", ".join(f"{n} {100 * self.resident * (self.of_a_cta.of(n) or 0) / all_:.0f} %" for n, all_ in parts)
        return f"{self.resident} CTA{'' if self.resident == 1 else 's'}: {shares}"


def share(launch: Placed, taken: Taken, facts: GpuFacts) -> Share:
    """Of one launch of a function; no CTA is resident where none finds room."""
    threads, shared = math.prod(launch.block), taken.shared_bytes + launch.shared_bytes
    ctas = SmBudget(
        registers=register_need(threads, taken.registers),
        shared_bytes=-(-shared // 128) * 128 + facts.shared_reserved,
        threads=-(-threads // 32) * 32,
        ctas=1,
    )
    most = -(-math.prod(launch.grid) // facts.sms)
    return Share(ctas, min(most, occupancy(facts, threads, shared, taken.registers)))


def over_budget(launch: Placed, taken: Taken, facts: GpuFacts) -> Declined | None:
    """Why a launch does not fit into the budget of `facts`; None: it does, or there is no budget.

    Of CTAs that spin on each other twice as many must find room, as without a budget: clusters leave gaps.
    """
    budget = facts.sm_budget
    if budget is None:
        return None
    threads, shared = math.prod(launch.block), taken.shared_bytes + launch.shared_bytes
    resident = occupancy(facts, threads, shared, taken.registers)
    if not resident:
        takes = share(launch, taken, facts).of_a_cta
        short = [f"{takes.of(n)} {n} of {budget.of(n)}" for n in NAMES if (takes.of(n) or 0) > (budget.of(n) or 0)]
        said = ", ".join(short) or "registers, as each of the four parts of an SM has a fourth of them"
        return Declined(f"a CTA of {launch.entry} is over sm_budget: {said}")
    if launch.co_resident > 1 and 2 * launch.co_resident > facts.sms * resident:
        room = f"{facts.sms} SMs within sm_budget hold {facts.sms * resident} CTAs"
        return Declined(
            f"{launch.co_resident} CTAs of {launch.entry} must be co-resident, twice as many find room: {room}"
        )
    return None


def first_over_budget(launches: Iterable[Placed], taken: Mapping[str, Taken], facts: GpuFacts) -> Declined | None:
    """The first launch that does not fit; an entry of which nothing is known does not."""
    for launch in launches:
        own = taken.get(launch.entry)
        found = Declined(f"the object has no entry {launch.entry}") if own is None else over_budget(launch, own, facts)
        if found is not None:
            return found
    return None
