"""The shares of a multiprocessor (SM) that a plan and a network beside it take: pure arithmetic and rewritten launches.

That one CTA of each kernel finds room (`weft.device.cuda.budget`) keeps a plan from waiting for a persistent grid. A
network's kernels are no persistent grids: where the SM is free, as many of their CTAs become resident as fit, and a
plan then waits until some have ended. A limit on the CTAs of an SM prevents that: each launch asks for so much dynamic
shared memory that one CTA more than the limit has no room, whichever kernels they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from weft.device.cuda.budget import first_over_budget, share
from weft.device.cuda.cubin import Usage, usage
from weft.device.cuda.record import GpuFacts
from weft.errors import DeviceError, OptionError
from weft.ir.declined import Declined
from weft.kernels.colocation import left_beside
from weft.kernels.source import CudaSource, Launch
from weft.options import parse_text
from weft.runtime.budgeted import SM_BUDGET
from weft.runtime.executable import Linked
from weft.sm_budget import NAMES, UNITS, SmBudget

_SHARED_UNIT = UNITS["shared"][0]


@dataclass(frozen=True, slots=True)
class Budgets:
    """Two budgets that fill an SM together, for `Options(sm_budget=...)`."""

    latency_critical: SmBudget
    """Of the plan."""
    best_effort: SmBudget
    """Of the network that runs beside it."""


def whole(facts: GpuFacts) -> SmBudget:
    """All of an SM of a GPU."""
    of = facts.whole
    return SmBudget(of.registers_per_sm, of.shared_per_sm, of.threads_per_sm, of.blocks_per_sm)


def shared_of_a_cta(facts: GpuFacts, ctas: int) -> int:
    """Bytes of shared memory, the system's part included, of which an SM has room for `ctas` and not for one more."""
    return (facts.whole.shared_per_sm // (ctas + 1) // _SHARED_UNIT + 1) * _SHARED_UNIT


def budgets(facts: GpuFacts, *, ctas: int = 1, registers: int = 16384, threads: int = 512) -> Budgets:
    """Budgets of a plan and of a network beside it of which at most `ctas` CTAs are resident on an SM.

    Args:
        facts: the GPU, as `weft.device.cuda.facts.profile("h200")`.
        ctas: of the network on each SM, all its kernels together. Its shared memory is what that limit takes, just over
            ctas / (ctas + 1) of the SM; so the plan has most with 1.
        registers: of these CTAs together (32 bits each).
        threads: of these CTAs together.

    Raises:
        OptionError: nothing is left for one of the two, or no SM gives such a share [W001].
    """
    if ctas < 1:
        raise OptionError(option="ctas", problem=f"{ctas}: at least one CTA of the network is resident on an SM")
    network = SmBudget(registers, ctas * shared_of_a_cta(facts, ctas), threads, ctas)
    left = left_beside(whole(facts), network)
    problem = left.reason if isinstance(left, Declined) else left.problem()
    if problem or (problem := network.problem()):
        raise OptionError(option=SM_BUDGET, problem=f"{network} for the network: {problem}")
    assert isinstance(left, SmBudget)
    return Budgets(left, network)


def budget_of(linked: Linked, name: str) -> SmBudget:
    """The budget that a plan was made under.

    Raises:
        OptionError: it was made without one [W001].
    """
    text = linked.facts.get(SM_BUDGET, "")
    if not text:
        problem = (
            "its plan was made without sm_budget, so a kernel of it may want a whole SM and wait for the other job"
        )
        raise OptionError(option=name, problem=f"{problem}: compile it with weft.Options(sm_budget=...)")
    found = parse_text(SM_BUDGET, "SmBudget", text)
    assert isinstance(found, SmBudget)
    return found


def check_together(network: SmBudget, plan: SmBudget, facts: GpuFacts) -> None:
    """Whether two budgets fit an SM together; a number that one leaves out is all that the SM has.

    Raises:
        OptionError: they do not, with both of them and what is short [W001].
    """
    of_sm = whole(facts)
    try:
        mine, theirs = (facts.within(x).sm_budget for x in (network, plan))
    except ValueError as error:
        raise OptionError(option=SM_BUDGET, problem=str(error)) from None
    assert mine is not None
    assert theirs is not None
    short = [
        f"{(mine.of(n) or 0) + (theirs.of(n) or 0)} {n} of {of_sm.of(n)}"
        for n in NAMES
        if (mine.of(n) or 0) + (theirs.of(n) or 0) > (of_sm.of(n) or 0)
    ]
    if short:
        both = f"{mine} of the network and {theirs} of the plan beside it"
        problem = f"{both} do not fit an SM of {facts.name} together: {', '.join(short)}"
        raise OptionError(option=SM_BUDGET, problem=f"{problem}; weft.colocate.budgets.budgets gives two that do")


def limited(linked: Linked, facts: GpuFacts, ctas: int) -> Linked:
    """The same plan with launches of which at most `ctas` CTAs are resident on an SM, all kernels together.

    Args:
        linked: a plan under a budget.
        facts: the GPU.
        ctas: at least 1.

    Raises:
        OptionError: so many CTAs take more than the plan's budget [W001].
        DeviceError: what a kernel takes cannot be read [W301].
    """
    budget = budget_of(linked, "network")
    if ctas < 1:
        raise OptionError(option="ctas_per_sm", problem=f"{ctas}: at least one CTA is resident on an SM")
    per_cta = shared_of_a_cta(facts, ctas)
    within = facts.within(budget)
    known: dict[str, CudaSource] = {}
    objects: dict[str, Path] = dict(linked.objects)
    for step in linked.plan.steps:
        source = step.kernel
        if isinstance(source, CudaSource) and source.sha256 not in known:
            path = Path(linked.objects[source.sha256])
            made = _padded(source, _taken(source, path), within, per_cta, ctas)
            known[source.sha256] = made
            objects[made.sha256] = path
    steps = tuple(
        replace(s, kernel=known[s.kernel.sha256]) if isinstance(s.kernel, CudaSource) else s for s in linked.plan.steps
    )
    return replace(linked, plan=replace(linked.plan, steps=steps), objects=objects)


def _taken(source: CudaSource, path: Path) -> Mapping[str, Usage]:
    try:
        return usage(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DeviceError(problem=f"what {source.entry} takes of an SM cannot be read: {error}") from None


def _padded(source: CudaSource, taken: Mapping[str, Usage], facts: GpuFacts, per_cta: int, ctas: int) -> CudaSource:
    launches: list[Launch] = []
    for launch in source.launches:
        if launch.entry not in taken:
            raise DeviceError(problem=f"the object has no entry {launch.entry}")
        own = taken[launch.entry]
        least = per_cta - facts.shared_reserved - own.shared_bytes
        made = replace(launch, shared_bytes=max(launch.shared_bytes, least))
        budget, one = facts.sm_budget, share(made, own, facts).of_a_cta
        assert budget is not None
        short = [
            f"{ctas * (one.of(n) or 0)} {n} of {budget.of(n)}"
            for n in NAMES
            if ctas * (one.of(n) or 0) > (budget.of(n) or 0)
        ]
        if short:
            problem = f"{ctas} CTAs of {launch.entry} take more of an SM than sm_budget {budget}: {', '.join(short)}"
            raise OptionError(option="ctas_per_sm", problem=problem)
        if (why := first_over_budget([made], taken, facts)) is not None:
            raise OptionError(option="ctas_per_sm", problem=why.reason)
        launches.append(made)
    return replace(source, launches=tuple(launches))
