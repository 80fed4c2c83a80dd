"""The last word: whole plans are verified, timed against each other, and the fastest verified one wins.

The sum of isolated kernels only proposes. Protocol: all plans and baselines in one process, on the same inputs,
in interleaved rounds of seeded random order; a plan replaces the best baseline only by the margin rule (`wins`).
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from weft.errors import ArtifactError, BudgetWarning, DeviceError, DifferenceWarning, OptionError
from weft.frontends.torch.dtypes import EMULATED
from weft.ir.graph import Graph
from weft.ir.types import Array, DType
from weft.kernels.interval import median_interval
from weft.kernels.record import CompileRecord, PlanRecord
from weft.platform.cpu import host_sample
from weft.runtime.any import AnyExecutable
from weft.tune.tolerance import TOLERANCES, ModelCheck, gate_b
from weft.tune.verify import POISONS

Run = Callable[[], Sequence[torch.Tensor]]
Sample = Callable[[Callable[[], object], int], float]
"""(function, calls) -> microseconds per call."""
FAULTS = (RuntimeError, ArtifactError, DeviceError, TypeError, ValueError, IndexError, MemoryError)
"""What a plan may raise while it is linked, run or judged; it is dropped then."""
ROUNDS = 15
LEAST_ROUNDS = 2
"""Below which nothing is said about which of two contenders is faster."""
MARGIN = 0.02
PLACED_RUNS = 6.0
"""As long as so many runs it takes about to place a contender, and to time it."""
LEAST_TIMED = 0.5
"""Of the time for timing: what judging plans on other inputs leaves of it."""
TIMED_S = 0.5
"""What timing has though the time is up: without it a plan that was found right, and all that was spent on it, is lost.
A run that takes more than a quarter of it is not begun."""
PART = 1 << 27
"""Elements of an output that are compared at a time: each takes some ten float64 numbers meanwhile."""
FAR_OFF = math.sqrt(1 - 0.99**2)
"""Of all values by their root mean square, and of the largest: what differs by more is no rounding (cosine < 0.99)."""
HOPELESS = 1.5
"""Whole plans so many times as slow as the fastest after two rounds are timed no further."""


RESERVED_RUNS, RESERVED_SHARE = 30.0, 0.4
"""Runs of the model that judging and timing whole plans take about, and the share of the budget they get at most.

A third are the model in float64, which memory takes longest; each plan runs twice to be judged, and some four times."""
RESERVED_PLANS, PACKED_BYTES = 3, 1e9
"""Plans that are linked, and bytes of weights that are folded and packed in a second, about."""


def judged_s(budget_s: float, run_us: float, weight_bytes: int) -> float:
    """What linking, judging and timing whole plans takes about, `RESERVED_SHARE` of the budget at most.

    A run takes about `run_us`; each plan packs the weights.
    """
    needed_s = RESERVED_RUNS * run_us / 1e6 + RESERVED_PLANS * weight_bytes / PACKED_BYTES
    return min(RESERVED_SHARE * budget_s, needed_s)


def reserve_s(budget_s: float, run_us: float = 0.0, weight_bytes: int = 0) -> float:
    """The part of a compilation's budget that is left for whole plans: `judged_s`, and what their steps lack."""
    return max(min(20.0, 0.15 * budget_s), judged_s(budget_s, run_us, weight_bytes))


def weight_bytes(graph: Graph) -> int:
    """Of all constants, as each plan packs them."""
    return sum(x.nbytes for x in graph.constants.values())


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that computes the whole graph."""

    name: str
    run: Run
    kernels: int
    predicted_us: float
    baseline: bool
    executable: AnyExecutable | None
    """None for the framework's own eager execution."""
    eligible: bool = True
    """False: only compared with, because nothing is known of the memory it takes and there is a limit."""
    first_s: float = 0.0
    """Seconds that its first run took; 0: not known."""
    in_place: Callable[[], Run] | None = None
    """Makes the run that is timed, where that is another one than is judged."""

    @property
    def is_framework(self) -> bool:
        """Whether this is the framework's own execution."""
        return self.baseline and self.executable is None


@dataclass(frozen=True, slots=True)
class Check:
    """All outputs of one contender against the reference."""

    ok: bool
    worst: float
    """Largest absolute difference."""
    note: str
    ran: bool = True
    """False: it raised instead."""
    undecided: bool = False
    """Not accepted, but only float64, which there is none of, could tell whether it is wrong."""
    far: bool = False
    """Not accepted, and off by more than any rounding."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a model must give, and how far the framework's own arithmetic is from it."""

    exact: Sequence[Array | torch.Tensor]
    """The model as it was imported, in float64; what `note` says where there was no time. Large ones stay on a GPU."""
    plain: Sequence[Array | torch.Tensor]
    """The same primitives, one library call each, in the model's own types."""
    note: str = ""
    """What stands for float64, if that was not computed in time."""


@dataclass(frozen=True, slots=True)
class Other:
    """Other inputs than those that plans are timed on, and what a model must give of them."""

    inputs: Sequence[torch.Tensor]
    expected: Expected
    timed: Sequence[torch.Tensor]
    """Those that plans are timed on, which they are called with again."""


def verify(contender: Contender, expected: Expected, dtype: DType) -> Check:
    """Is a contender as right as the model's own precision allows?

    An output is accepted by gate B of `tune.tolerance` (absolute and relative limits), or, where a deep network
    amplifies rounding so that not even the framework's own arithmetic meets those, by the rule of gate A: its RMSE and
    largest error are within the factors of the table of those of the plain evaluation. An output of more than `PART`
    elements must be so in every part.

    Where there was no time for float64, the second rule has nothing to compare with. What the first does not accept is
    undecided then, unless it is wrong by more than any rounding (`is_far_off`).

    A plan runs with its memory poisoned, twice, as kernels are verified: what a step does not write is then NaN, or no
    value that it ever had.
    """
    worst, notes, undecided, far = 0.0, [], True, False
    before: Sequence[torch.Tensor] = ()
    for poison in POISONS if contender.executable is not None else POISONS[:1]:
        if contender.executable is not None:
            contender.executable.poison(poison)
        outputs = contender.run()
        if before and all(_same(x, y) for x, y in zip(outputs, before, strict=True)):
            break  # those values were judged
        before = outputs
        for position, (output, exact, plain) in enumerate(zip(outputs, expected.exact, expected.plain, strict=True)):
            floats = output.is_floating_point()
            if floats and output.is_cuda and (share := near_on_device(dtype, output, exact)) is not None:
                worst = max(worst, share)
                continue
            got, want = as_array(output), as_array(exact)
            kind = dtype if floats else DType.from_numpy(got.dtype)
            found = judged(kind, got, want, as_array(plain), floats=floats)
            worst = max(worst, found.worst)
            if not found.ok:
                notes.append(f"output {position}: {found.outside:.2%} outside, cosine {found.cosine:.6f}")
                off = floats and is_far_off(got, want)
                far = far or off
                undecided = undecided and bool(expected.note) and floats and not off
        if notes:
            break
    if notes and undecided:
        return Check(ok=False, worst=worst, note=f"{UNDECIDED} ({'; '.join(notes)})", undecided=True)
    return Check(not notes, worst, "; ".join(notes), far=far)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two outputs have the same values, NaN where NaN is."""
    if torch.equal(one, other):  # all cores, and no copies
        return True
    return np.array_equal(as_array(one), as_array(other), equal_nan=True)


ON_DEVICE = 1 << 24
"""Elements that are compared at a time on a GPU."""


def near_on_device(dtype: DType, got: torch.Tensor, want: Array | torch.Tensor) -> float | None:
    """The largest share of a part that is outside of gate B, for a finite output that passes it in every part.

    None: it does not, or what it must be lies elsewhere; then `judged` tells. On the host that takes some 15 s a GB.
    """
    if not isinstance(want, torch.Tensor) or got.device != want.device or got.shape != want.shape:
        return None
    limits, worst = TOLERANCES[dtype], 0.0
    mine, theirs = got.detach().reshape(-1), want.reshape(-1)
    for start in range(0, mine.numel(), ON_DEVICE):
        g, w = (x[start : start + ON_DEVICE].double() for x in (mine, theirs))
        size = w.abs()
        outside = float(((g - w).abs() > limits.atol + limits.rtol * size).double().mean())
        scale = torch.maximum(g.abs().max(), size.max())
        scale = torch.where(scale > 0, scale, 1.0)
        g, w = g / scale, w / scale
        norm = g.norm() * w.norm()
        cosine = float(torch.where(norm > 0, torch.dot(g, w) / norm, 1.0 - torch.maximum(g.norm(), w.norm())))
        allowed = limits.outside if g.numel() * limits.outside >= 1 else 0.0
        # what is not finite makes the cosine NaN, and no comparison with it is true
        if not (outside <= allowed and cosine >= limits.cosine * (1 - 1e-12)):
            return None
        worst = max(worst, outside)
    return worst


def is_far_off(got: Array, want: Array) -> bool:
    """Whether no rounding explains a difference: other shapes or classes, or more than `FAR_OFF` in any part."""
    if got.shape != want.shape:
        return True
    for part in _parts(got.size):
        mine, theirs = (np.asarray(x if part is None else x.reshape(-1)[part], np.float64) for x in (got, want))
        finite = np.isfinite(mine) & np.isfinite(theirs)
        if not np.array_equal(mine[~finite], theirs[~finite], equal_nan=True):
            return True
        mine, theirs = mine[finite], theirs[finite]
        for size in (np.linalg.norm, lambda x: np.abs(x).max(initial=0.0)):
            if size(mine - theirs) > FAR_OFF * size(theirs):
                return True
    return False


def judged(dtype: DType, got: Array, exact: Array, plain: Array, *, floats: bool) -> ModelCheck:
    """The finding of the first part that is wrong, else that of all parts together."""
    worst, found = 0.0, ModelCheck(True, 0.0, 1.0, 0.0)
    for part in _parts(got.size if got.shape == exact.shape == plain.shape else 0):
        got_, exact_, plain_ = (x if part is None else x.reshape(-1)[part] for x in (got, exact, plain))
        found = gate_b(dtype, got=got_, want=exact_)
        worst = max(worst, found.worst)
        ok = found.ok or (floats and as_good(dtype, got_, plain_, exact_))
        found = replace(found, ok=ok, worst=worst)
        if not ok:
            break  # one part is enough
    return found


def _parts(size: int) -> Sequence[slice | None]:
    """Parts of an output of so many elements that are judged one after another; None: all of it at once."""
    if size <= PART:
        return [None]
    return [slice(k, k + PART) for k in range(0, size, PART)]


def as_good(dtype: DType, got: Array, plain: Array, exact: Array) -> bool:
    """Gate A on whole outputs: same classes, RMSE and largest error within the table's factors of the plain ones."""
    mine, theirs, truth = (np.asarray(x, dtype=np.float64) for x in (got, plain, exact))
    if mine.shape != truth.shape or not np.array_equal(np.isfinite(mine), np.isfinite(theirs)):
        return False
    finite = np.isfinite(truth) & np.isfinite(theirs)
    if not np.array_equal(mine[~finite], theirs[~finite], equal_nan=True):
        return False
    mine, theirs = np.abs(mine[finite] - truth[finite]), np.abs(theirs[finite] - truth[finite])
    if mine.size == 0:
        return True
    limits = TOLERANCES[dtype]
    rmse_ok = np.sqrt(np.mean(mine**2)) <= limits.rmse_factor * np.sqrt(np.mean(theirs**2))
    return bool(rmse_ok and mine.max() <= limits.max_factor * theirs.max())


def as_array(tensor: Array | torch.Tensor) -> Array:
    """Values as NumPy has them; bf16 widens to float32."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return (tensor.float() if tensor.dtype in EMULATED else tensor).detach().cpu().numpy()


def interleave(
    runs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    seed: int,
    budget_s: float,
    sample: Sample | None = None,
    drop: bool = False,
    keep: Collection[str] = (),
    left_s: Callable[[], float] = lambda: math.inf,
    longest_s: float = 0.0,
) -> dict[str, list[float]]:
    """Microseconds per call in `rounds` rounds, fewer if the budget ends (but at least 5, or 2 of long runs).

    Each sample repeats the call until about 2 ms have passed; two untimed calls go first. `sample` measures so many
    calls (default: by the host's clock). With `drop`, what is more than `HOPELESS` times as slow as the fastest after
    two rounds takes no part in the others; the fastest of `keep` always does.

    `left_s` is a bound: what would not end within it is not begun, be it the first round, for which the untimed calls
    then stand, or a contender, which has no samples then. `longest_s`: what a run took before, 0 where that is unknown.
    """
    sample = sample or host_sample
    repeats: dict[str, int] = {}
    first: dict[str, float] = {}
    for name, run in runs.items():
        if left_s() <= 2 * longest_s:
            break
        run()
        first[name] = sample(run, 1)
        longest_s = max(longest_s, first[name] / 1e6)
        repeats[name] = max(1, min(200, round(2e3 / max(first[name], 0.1))))
    order = list(first)
    rng = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for done in range(rounds):
        spent = time.perf_counter() - began
        if done >= (5 if spent < 1.5 * budget_s else 2) and spent > budget_s:
            break
        if left_s() < sum(first[name] * repeats[name] for name in order) / 1e6:
            break
        if drop and done == 2 and order:
            least = {name: min(samples[name]) for name in order}
            limit = HOPELESS * min(least.values())
            spared = min((name for name in keep if name in least), key=lambda name: least[name], default="")
            order = [name for name in order if least[name] <= limit or name == spared]
        rng.shuffle(order)
        for name in order:
            samples[name].append(sample(runs[name], repeats[name]))
    return samples if any(samples.values()) or not rounds else {n: [first[n]] if n in first else [] for n in runs}


def wins(challenger: Sequence[float], incumbent: Sequence[float]) -> bool:
    """The margin rule on paired rounds: by more than 2 % in the median, and surely by more than nothing.

    The lower end of the 95 % interval of the median difference is an order statistic (sign test), so that one
    disturbed round decides nothing.
    """
    differences = [a - b for a, b in zip(incumbent, challenger, strict=False)]  # one may have been dropped
    gain = statistics.median(differences)
    return gain > MARGIN * statistics.median(incumbent) and median_interval(differences)[0] > 0


def _beats(samples: Mapping[str, Sequence[float]], plan: Contender, base: Contender) -> bool:
    """The margin rule, which needs some rounds of both."""
    mine, theirs = samples.get(plan.name, ()), samples.get(base.name, ())
    return min(len(mine), len(theirs)) >= LEAST_ROUNDS and wins(mine, theirs)


def fastest(
    contenders: Sequence[Contender], timed: Sequence[PlanRecord], *, unjudged: bool = False
) -> AnyExecutable | None:
    """The fastest plan that was found right, or with `unjudged` not found wrong; None: there is none."""
    right = {p.name: p.median_us for p in timed if p.verified or (unjudged and p.note == NOT_JUDGED)}
    plans = [c for c in contenders if c.executable is not None and c.name in right]
    return min(plans, key=lambda c: right[c.name]).executable if plans else None


NOT_JUDGED = "not judged: the time was up"
ALONE = "not judged: there is nothing else"
UNDECIDED = (
    "not judged: its result differs from the framework's own within what only float64 can decide,"
    " and there was no time for that"
)


def is_judged(note: str) -> bool:
    """Whether a record's note is that of a plan which was found right or wrong."""
    return note != NOT_JUDGED and not note.startswith(UNDECIDED)


DIFFERS = "beyond rounding it is not what was imported: "
"""Begins the note of the framework's own execution where plans compute something else, however exactly."""


def tell_difference(record: CompileRecord) -> None:
    """Warn where the framework's own execution of a model is not what was imported of it, and say by how much."""
    for plan in record.plans:
        if plan.note.startswith(DIFFERS):
            text = (
                f"Weft: {plan.name} gives other results than the model as it was imported, by up to"
                f" {plan.worst_error:.2g} ({plan.note.removeprefix(DIFFERS)}), and plans give the latter's."
                " With a padding mask torch's TransformerEncoder does that where it has a padded place"
                " (enable_nested_tensor=False ends it); else please report it"
            )
            warnings.warn(text, DifferenceWarning, stacklevel=3)


def _judge(
    contenders: Sequence[Contender],
    expected: Expected | None,
    dtype: DType,
    lives: Callable[[], bool],
    left_s: Callable[[], float],
    *,
    all_of_them: bool,
) -> dict[str, Check]:
    """All contenders, or up to the first that is right.

    Where time is short, those first that matter most: the first plan and the framework's own.
    """
    found: dict[str, Check] = {}
    longest_s = max((c.first_s for c in contenders), default=0.0)
    for c in sorted(contenders, key=lambda c: c is not contenders[0] and not c.is_framework):  # stable
        enough = not all_of_them and any(check.ok for check in found.values())
        if expected is None or enough or left_s() <= 2 * longest_s:
            found[c.name] = Check(ok=False, worst=math.inf, note=NOT_JUDGED)
            continue
        began = time.perf_counter()
        found[c.name] = _checked(c, expected, dtype, lives)
        longest_s = max(longest_s, time.perf_counter() - began)
    return found


OTHER = "on other inputs: "
"""Begins the note of a plan that is right on the inputs that plans are timed on, and wrong on others."""


def _judged_again(
    contenders: Sequence[Contender],
    checked: Mapping[str, Check],
    other: Callable[[], Other | None],
    dtype: DType,
    lives: Callable[[], bool],
    left_s: Callable[[], float],
) -> dict[str, Check]:
    """The plans that are right, on other inputs, as long as there is time: of one set a plan may be right by chance."""
    found = dict(checked)
    right = [c for c in contenders if found[c.name].ok and c.executable is not None]
    second = other() if right else None
    for c in right:
        if second is None or left_s() <= 3 * c.first_s:
            break
        executable = c.executable
        assert executable is not None
        again = _checked(replace(c, run=partial(executable, *second.inputs)), second.expected, dtype, lives)
        if not again.ok:
            found[c.name] = replace(again, note=OTHER + again.note)
        elif again.worst > found[c.name].worst:
            found[c.name] = replace(found[c.name], worst=again.worst)
        with contextlib.suppress(*FAULTS):
            executable(*second.timed)
    return found


def _checked(contender: Contender, expected: Expected, dtype: DType, lives: Callable[[], bool]) -> Check:
    try:
        found = verify(contender, expected, dtype)
        against = "" if found.undecided else expected.note
        return replace(found, note="; ".join(filter(None, (found.note, against))))
    except FAULTS as error:
        said = f"does not run: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
        if not lives():
            problem = f"the plan {contender.name} ended this process's use of the GPU: {said}"
            raise DeviceError(problem=problem) from error
        return Check(ok=False, worst=math.inf, note=said, ran=False)


def _rounds(check: Check) -> bool:
    """Whether nothing but rounding speaks against a contender, as far as was looked."""
    return check.note == NOT_JUDGED or (check.ran and not check.far)


def _timed_runs(contenders: Sequence[Contender], left_s: Callable[[], float]) -> dict[str, Run]:
    """What is timed of each, by name; nothing of those that there is no time to place, or that cannot be."""
    found: dict[str, Run] = {}
    for c in contenders:
        if c.in_place is None:
            found[c.name] = c.run
        elif left_s() > PLACED_RUNS * c.first_s:
            with contextlib.suppress(*FAULTS):
                found[c.name] = c.in_place()
    return found


def decide(
    contenders: Sequence[Contender],
    expected: Expected | None,
    dtype: DType,
    *,
    seed: int,
    budget_s: float = 20.0,
    sample: Sample | None = None,
    lives: Callable[[], bool] = lambda: True,
    left_s: Callable[[], float] = lambda: math.inf,
    other: Callable[[], Other | None] = lambda: None,
) -> tuple[Contender, tuple[PlanRecord, ...]]:
    """The fastest verified contender by the margin rule, and what was found of each.

    Where nothing agrees with the reference (values outside of a cast's range, rounding that is amplified without
    limit), the framework's own operators are right by definition; without them the last contender that ran is taken,
    with a warning. `lives` says whether the device still computes in this process: it is asked when a contender raised.

    What only float64 could decide, where there was no time for it, is left out, but not called wrong.

    `other` gives a second set of inputs, if there is time for one: what is right on the first and wrong on it is wrong.

    Without a budget nothing is timed: the first plan that is right is taken. `left_s` is a bound: what would not end
    within it is not judged, nor timed but for `TIMED_S` of short runs. Where no plan is judged (`expected` is None:
    there is nothing to judge by), the framework's own execution is the answer, if there is one; a plan that could not
    be timed beside a baseline is not taken instead of it.

    Raises:
        DeviceError: a contender took the device's context with it [W301].
        OptionError: some contender is not eligible, and none that is was right [W001].
    """
    checked = _judge(contenders, expected, dtype, lives, left_s, all_of_them=budget_s > 0)
    if budget_s > 0:
        began = time.perf_counter()
        checked = _judged_again(contenders, checked, other, dtype, lives, left_s)
        budget_s = max(budget_s - (time.perf_counter() - began), LEAST_TIMED * budget_s)
    sound = [c for c in contenders if checked[c.name].ok]
    # the framework's own execution is what there is without a plan: where it was not compared with the reference, or
    # only its rounding is worse than a plan's, nobody is to have a slower one instead
    unjudged = [c for c in contenders if sound and c.is_framework and c not in sound and _rounds(checked[c.name])]
    rivals = [c for c in contenders if c in sound or c in unjudged]
    first = sorted(rivals, key=lambda c: c is not sound[0] and not c.baseline)  # stable
    timed_by = time.perf_counter() + TIMED_S

    def timed_s() -> float:
        return max(left_s(), timed_by - time.perf_counter())

    samples = interleave(
        _timed_runs(first if budget_s > 0 else (), timed_s),
        rounds=ROUNDS,
        seed=seed,
        budget_s=budget_s,
        sample=sample,
        drop=True,
        keep=[c.name for c in rivals if c.baseline],
        left_s=timed_s,
        longest_s=max((c.first_s for c in rivals), default=0.0),
    )
    median = {name: statistics.median(s) for name, s in samples.items() if s}
    ranked = sorted((c for c in rivals if c.eligible), key=lambda c: median.get(c.name, math.inf))  # stable
    plans = [c for c in ranked if not c.baseline]
    bases = [c for c in ranked if c.baseline]
    judged = [c for c in contenders if is_judged(checked[c.name].note)]
    if judged and not ranked and not all(c.eligible for c in contenders):
        raise OptionError(option="memory_limit_bytes", problem="no plan within it computes what the model does")
    if budget_s <= 0:
        best = next((c for c in ranked if c.executable is not None), None)
    else:
        # the framework's own execution, which is right by definition, is not replaced by what was not timed beside it
        untimed = (c for c in contenders if c.is_framework and c.eligible and not samples.get(c.name))
        bases = [c for c in untimed if c in rivals or c not in judged] or bases
        best = plans[0] if plans and (not bases or _beats(samples, plans[0], bases[0])) else None
    left = [c for c in contenders if c.eligible and (checked[c.name].ran or c.executable is None)] or contenders
    chosen = best or (bases[0] if bases else left[-1])
    if not sound and chosen.executable is not None:
        category: type[UserWarning] = UserWarning
        text = f"no plan agrees with a float64 evaluation of the model on these inputs: {checked[chosen.name].note}"
        if chosen not in judged:
            text = f"the plan {chosen.name} is given back {checked[chosen.name].note}"
            if checked[chosen.name].note == NOT_JUDGED:
                category = BudgetWarning
                text = (
                    f"the plan {chosen.name} is given back unjudged:"
                    " the time was up before there was anything to judge by"
                )
        warnings.warn(text, category, stacklevel=2)
    if any(
        c.executable is not None for c in sound
    ):  # what was imported is right by some plan, and not by its framework
        differing = {c.name: checked[c.name] for c in contenders if c.is_framework and checked[c.name].far}
        checked |= {name: replace(check, note=f"{DIFFERS}{check.note}") for name, check in differing.items()}
    records = tuple(
        PlanRecord(
            name=c.name,
            kernels=c.kernels,
            predicted_us=c.predicted_us,
            samples_us=tuple(samples.get(c.name, ())),
            median_us=median.get(c.name, float("inf")),
            verified=checked[c.name].ok,
            worst_error=checked[c.name].worst,
            note=checked[c.name].note,
        )
        for c in contenders
    )
    return chosen, records
