from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.runtime.fake_cuda import install
from tests.runtime.plans import PRIMITIVES, library_plan
from tests.runtime.plans import executable as executable_of

from weft.errors import BudgetWarning, DifferenceWarning
from weft.generate.library import execute
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.record import PlanRecord
from weft.kernels.source import CallStep, LibraryCall, Ref
from weft.pipeline import finish, reference
from weft.pipeline.finish import Contender, Expected, as_good, interleave, near_on_device, verify, wins
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Executable, Linked
from weft.tune.tolerance import gate_b
from weft.tune.verify import POISONS


def test_a_clear_gain_wins_even_with_disturbed_rounds() -> None:
    base = [10.0] * 15
    assert wins([8.0] * 13 + [90.0, 70.0], base)
    assert wins([8.0] * 15, [*base[:13], 900.0, 700.0])


def test_within_two_percent_nothing_is_replaced() -> None:
    assert not wins([9.9] * 15, [10.0] * 15)
    assert wins([9.7] * 15, [10.0] * 15)


def test_a_gain_that_is_not_sure_does_not_win() -> None:
    assert not wins([5.0] * 8 + [15.0] * 7, [10.0] * 15)


def test_rounds_are_interleaved_and_all_are_kept() -> None:
    calls: list[str] = []
    samples = interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=7, seed=0, budget_s=10
    )
    assert {k: len(v) for k, v in samples.items()} == {"a": 7, "b": 7}
    assert min(samples["a"]) >= 0


def test_a_result_as_good_as_the_plain_one_passes_where_both_are_far_from_exact() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(1000)
    plain = exact + 1e-3 * rng.standard_normal(1000)
    assert as_good(DType.F32, exact + 1.5e-3 * rng.standard_normal(1000), plain, exact)
    assert not as_good(DType.F32, exact + 3e-3 * rng.standard_normal(1000), plain, exact)
    wrong = plain.copy()
    wrong[7] += 1.0
    assert not as_good(DType.F32, wrong, plain, exact)


def test_other_classes_or_shapes_never_pass() -> None:
    exact = np.array([1.0, np.inf, np.nan])
    assert as_good(DType.F32, exact, exact, exact)
    assert not as_good(DType.F32, np.array([1.0, np.nan, np.nan]), exact, exact)
    assert not as_good(DType.F32, np.array([1.0, -np.inf, np.nan]), exact, exact)
    assert not as_good(DType.F32, exact[:2], exact, exact)


@pytest.mark.parametrize("part", [1 << 27, 1000, 7])
def test_a_large_output_is_judged_part_by_part(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "PART", part)
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((30, 100))
    expected = Expected([exact], [exact.astype(np.float32)])

    def check(values: np.ndarray) -> finish.Check:
        run = lambda: [torch.from_numpy(values)]  # noqa: E731
        return verify(Contender("plan", run, 1, 0.0, baseline=False, executable=None), expected, DType.F32)

    good = exact.astype(np.float32)
    assert check(good).ok and check(good).worst < 1e-6
    for at in ((0, 0), (29, 99)):
        bad = good.copy()
        bad[at] = np.nan
        assert not check(bad).ok
    wrong = good.copy()
    wrong[20:] += 0.5
    found = check(wrong)
    assert not found.ok and found.note.count("output 0") == 1 and "outside" in found.note
    assert not check(good[:29]).ok


def stale(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Executable | CudaExecutable, torch.Tensor]:
    """A plan whose middle step writes its result in the first call only, and the input that it got then."""

    def write_once(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        written.append(0)
        return torch.exp(x, out=out) if len(written) <= calls else out

    written: list[int] = []
    monkeypatch.setitem(execute._SPECIAL, "weft.write_once", write_once)
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (3, 40)))
    graph = b.build([b.apply(Prim.NEG, b.apply(Prim.EXP, b.apply(Prim.NEG, x)))])
    plan = library_plan(graph)
    steps = list(plan.steps)
    steps[1] = replace(
        steps[1],
        kernel=LibraryCall(
            PRIMITIVES, (), (CallStep("weft.write_once", (Ref("in", 0),)),), (Ref("tmp", 0),), out_variant=True
        ),
    )
    linked = Linked(graph, replace(plan, steps=tuple(steps)), {}, None, None, 0, {})
    given = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    if kind == "cpu":
        calls = 1
        executable: Executable | CudaExecutable = Executable(linked)
    else:
        install(monkeypatch)
        calls = 3  # when it is made, while it is recorded, in the first call
        executable = CudaExecutable(linked, device=torch.device("cpu"))
    executable(given)
    assert len(written) == calls
    return executable, given


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_step_that_writes_nothing_is_seen_though_its_memory_holds_the_right_values(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable, given = stale(kind, monkeypatch)
    run = executable.replay if isinstance(executable, CudaExecutable) else (lambda: executable(given))
    want = -torch.exp(-given)
    torch.testing.assert_close(run()[0], want)
    expected = Expected([want.double().numpy()], [want.numpy()])
    found = verify(Contender("plan", run, 3, 0.0, baseline=False, executable=executable), expected, DType.F32)
    assert not found.ok and "outside" in found.note


@pytest.mark.parametrize("byte", POISONS)
def test_poison_fills_what_the_next_call_writes_and_no_more(byte: int) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (3, 40)))
    graph = b.build([b.apply(Prim.NEG, b.apply(Prim.EXP, x))])
    exe = executable_of(graph)
    given = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    before = exe(given)[0]
    exe.poison(byte)
    assert torch.equal(exe(given)[0], before) and torch.equal(before, -torch.exp(given))
    expected = Expected([before.double().numpy()], [before.numpy()])
    good = Contender("plan", lambda: exe(given), 2, 0.0, baseline=False, executable=exe)
    assert verify(good, expected, DType.F32).ok


# --- where there was no time for float64 ---


OWN = np.linspace(-2.0, 2.0, 400).reshape(4, 100).astype(np.float32)


def by_own(got: np.ndarray, note: str = reference.OWN) -> tuple[Contender, PlanRecord]:
    """What answers, and what is said of a plan that gives this while the framework gives `OWN`."""
    plan = Contender("solution-1", lambda: [torch.from_numpy(got)], 3, 1.0, baseline=False, executable=None)
    eager = Contender("eager", lambda: [torch.from_numpy(OWN)], 0, 0.0, baseline=True, executable=None)
    chosen, records = finish.decide([plan, eager], Expected([OWN], [OWN], note), DType.F32, seed=0, budget_s=0.0)
    return chosen, records[0]


def test_what_only_float64_can_decide_is_left_out_and_not_called_wrong() -> None:
    rounded = OWN * (1 + 1e-2 * np.random.default_rng(0).standard_normal(OWN.shape).astype(np.float32))
    chosen, record = by_own(rounded)
    assert chosen.name == "eager" and not record.verified
    assert record.note.startswith(finish.UNDECIDED) and not finish.is_judged(record.note)
    assert "outside, cosine 0.9999" in record.note
    near = by_own(OWN * np.float32(1 + 1e-6))[1]
    assert near.verified and near.note == reference.OWN, "within the limits it is accepted"
    known = by_own(rounded, note="")[1]
    assert not known.verified and finish.is_judged(known.note), "against float64 it is wrong"


@pytest.mark.parametrize("kind", ["nan", "infinite", "other", "scaled", "one value", "shape"])
def test_what_no_rounding_explains_is_wrong_without_float64_too(kind: str) -> None:
    got = OWN.copy()
    if kind in ("nan", "infinite", "one value"):
        got[3, 7] = {"nan": np.nan, "infinite": np.inf, "one value": -2.0}[kind]
    elif kind == "other":
        got += 0.5 * np.random.default_rng(1).standard_normal(OWN.shape).astype(np.float32)
    else:
        got = got * np.float32(2) if kind == "scaled" else got[:3]
    record = by_own(got)[1]
    assert not record.verified
    if kind == "one value":  # few enough for the limits of a share, so by its size
        assert finish.is_far_off(got, OWN)
    assert finish.is_judged(record.note) and "outside" in record.note


def test_other_integers_are_wrong_without_float64_too() -> None:
    plan = Contender("solution-1", lambda: [torch.tensor([1000, 1001])], 3, 1.0, baseline=False, executable=None)
    want = np.array([1000, 1000])
    check = verify(plan, Expected([want], [want], reference.OWN), DType.F32)
    assert not check.ok and not check.undecided


def test_without_a_framework_such_a_plan_is_given_back_unjudged() -> None:
    plan = Contender("library", lambda: [torch.from_numpy(OWN * np.float32(1.01))], 3, 1.0, True, None)
    plan = replace(plan, executable=type("Fixed", (), {"poison": lambda *_: None})())
    with pytest.warns(UserWarning, match="is given back not judged"):
        chosen, _ = finish.decide([plan], Expected([OWN], [OWN], reference.PLAIN), DType.F32, seed=0, budget_s=0.0)
    assert chosen is plan


@pytest.mark.parametrize("judgeable", [True, False])
def test_that_the_time_was_up_is_a_warning_about_the_budget(judgeable: bool) -> None:
    """Which is the machine's doing: tests, for which warnings are errors, let it pass."""
    plan = Contender("library", lambda: [torch.from_numpy(OWN)], 3, 1.0, True, None)
    plan = replace(plan, executable=type("Fixed", (), {"poison": lambda *_: None})())
    expected = Expected([OWN], [OWN], reference.PLAIN) if judgeable else None
    with pytest.warns(BudgetWarning, match="is given back unjudged: the time was up"):
        chosen, _ = finish.decide([plan], expected, DType.F32, seed=0, budget_s=0.0, left_s=lambda: -1.0)
    assert chosen is plan


@pytest.mark.parametrize(("plan_us", "own_us", "answer"), [(2.0, 8.0, "solution-1"), (8.0, 2.0, "eager")])
def test_where_there_is_no_time_to_compare_the_framework_it_is_timed_all_the_same(
    plan_us: float, own_us: float, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = cast("Executable", type("Fixed", (), {"poison": lambda *_: None})())
    plan = Contender("solution-1", lambda: [torch.from_numpy(OWN)], 3, 1.0, baseline=False, executable=executable)
    later = replace(plan, name="solution-2", run=lambda: [torch.from_numpy(OWN)])
    own = Contender("eager", lambda: [torch.from_numpy(OWN)], 0, 0.0, baseline=True, executable=None)
    slow = finish._checked  # comparing the first plan takes what is left for comparing
    spent: list[str] = []
    timing: list[bool] = []

    def interleaved(*given: Any, **more: Any) -> dict[str, list[float]]:
        timing.append(True)
        return interleave(*given, **more)

    def compared(contender: Contender, *rest: Any) -> finish.Check:
        spent.append(contender.name)
        return slow(contender, *rest)

    monkeypatch.setattr(finish, "_checked", compared)
    monkeypatch.setattr(finish, "interleave", interleaved)
    chosen, records = finish.decide(
        [plan, later, own],
        Expected([OWN], [OWN]),
        DType.F32,
        seed=0,
        sample=lambda run, _calls: plan_us if run is plan.run else own_us,
        left_s=lambda: 0.0 if len(spent) == 1 and not timing else 9.0,
    )
    assert chosen.name == answer and spent == ["solution-1"]
    first, second, framework = records
    assert first.verified and framework.median_us == own_us and framework.samples_us
    assert not framework.verified and framework.note == finish.NOT_JUDGED
    assert not second.samples_us, "a plan that was not compared is not timed"


# --- a second set of inputs ---


class Remembers:
    """A plan of x + 1 that gives what it gave first, or the value of one row for all: right on rows that are equal."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.first: torch.Tensor | None = None

    def poison(self, byte: int) -> None:
        del byte

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self.how == "one row":
            return [(x[:1] + 1).expand(x.shape)]
        if self.how == "first" and self.first is None:
            self.first = x + 1
        return [x + 1 if self.first is None else self.first]


@pytest.mark.parametrize("how", ["first", "one row"])
def test_a_plan_that_is_right_on_one_set_of_inputs_and_wrong_on_another_is_refused(how: str) -> None:
    given = torch.ones(4, 100)
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 100)))
    second = reference.other_inputs(b.build([b.apply(Prim.ADD, x, 1.0)]), [given], seed=0)
    assert second is not None
    plans = [Remembers(how), Remembers("sound")]
    bad, good = (
        Contender(p.how, partial(p, given), 1, 1.0, baseline=False, executable=cast("Executable", p)) for p in plans
    )
    expected, wanted = (Expected([y.double().numpy()], [y.numpy()]) for y in (given + 1, second[0] + 1))
    asked = []

    def other() -> finish.Other:
        asked.append(1)
        return finish.Other(second, wanted, [given])

    chosen, records = finish.decide([bad, good], expected, DType.F32, seed=0, budget_s=0.05, other=other)
    assert chosen is good and len(asked) == 1
    assert [r.verified for r in records] == [False, True]
    assert records[0].note.startswith(finish.OTHER) and records[1].note == ""
    assert finish.decide([bad], expected, DType.F32, seed=0, budget_s=0.05)[1][0].verified, "one set does not show it"
    decided = finish.decide([bad], expected, DType.F32, seed=0, budget_s=0.0, other=other)
    assert decided[1][0].verified and len(asked) == 1, "without a budget there is no time for another"


def test_no_plan_is_judged_again_that_would_not_end_in_time() -> None:
    given = torch.ones(4, 100)
    plan = Remembers("sound")
    slow = Contender("plan", lambda: plan(given), 1, 1.0, False, cast("Executable", plan), first_s=4.0)
    eager = Contender("eager", lambda: [given + 1], 0, 0.0, baseline=True, executable=None)
    expected = Expected([np.full((4, 100), 2.0)], [np.full((4, 100), 2.0, np.float32)])
    wrong = finish.Other([given], Expected([np.zeros((4, 100))], [np.zeros((4, 100), np.float32)]), [given])
    for left_s, verified in ((20.0, False), (10.0, True)):
        later = partial(float, left_s)
        _, records = finish.decide(
            [slow, eager], expected, DType.F32, seed=0, budget_s=0.01, left_s=later, other=lambda: wrong
        )
        assert records[0].verified is verified


def test_other_inputs_differ_in_their_rows_and_leave_indices_and_held_values_alone() -> None:
    b = GraphBuilder()
    kinds = [(DType.F32, (1, 6, 400)), (DType.I64, (3,)), (DType.F32, (3,)), (DType.F16, (5, 300)), (DType.BOOL, (2,))]
    values = [b.input(TensorType(dtype, shape)) for dtype, shape in kinds]
    graph = b.build(values)
    g = torch.Generator().manual_seed(1)
    inputs = reference.example_inputs(graph, 3)
    inputs[1] = torch.randint(0, 9, (3,), generator=g)
    found = reference.other_inputs(graph, inputs, 3, {2})
    again = reference.other_inputs(graph, inputs, 3, {2})
    assert found is not None and again is not None
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    assert [x is y for x, y in zip(found, inputs, strict=True)] == [False, True, True, False, True]
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in inputs]
    for k, axis in ((0, 1), (3, 0)):
        sizes = found[k].double().transpose(0, axis).flatten(1).std(1)
        before = inputs[k].double().transpose(0, axis).flatten(1).std(1)
        assert sizes.max() > 1.9 * sizes.min() and before.max() < 1.5 * before.min()
    assert reference.other_inputs(graph, inputs, 3, {0, 2, 3}) is None


def contenders_of(*, framework: np.ndarray, plan: np.ndarray) -> tuple[list[Contender], Expected]:
    """A plan and the framework's own execution that give these values; ones are right."""
    exact = np.ones((4, 40))
    run = lambda values: lambda: [torch.from_numpy(values.astype(np.float32))]  # noqa: E731
    made = cast("Any", SimpleNamespace(poison=lambda byte: None))
    return [
        Contender("solution-1", run(plan), 1, 0.0, baseline=False, executable=made),
        Contender("eager", run(framework), 1, 0.0, baseline=True, executable=None),
    ], Expected([exact], [exact.astype(np.float32)])


def record_of(plans: tuple[PlanRecord, ...]) -> Any:
    return SimpleNamespace(plans=plans)


def padded() -> np.ndarray:
    """What torch's fast path of an encoder gives: zeros in padded places."""
    values = np.ones((4, 40))
    values[3, 30:] = 0.0
    return values


@pytest.mark.parametrize("budget_s", [0.0, 1.0])
def test_a_framework_that_computes_something_else_is_told_of(budget_s: float) -> None:
    contenders, expected = contenders_of(framework=padded(), plan=np.ones((4, 40)))
    chosen, plans = finish.decide(contenders, expected, DType.F32, seed=0, budget_s=budget_s)
    assert chosen.name == "solution-1"
    if budget_s == 0:  # the framework's own was not run
        finish.tell_difference(record_of(plans))
        return
    with pytest.warns(DifferenceWarning, match=r"^Weft: eager gives other results .* by up to 1 \(output 0: 6.25%"):
        finish.tell_difference(record_of(plans))


@pytest.mark.parametrize(("plan_us", "answer"), [(2.0, "solution-1"), (8.0, "eager")])
def test_a_framework_that_only_rounds_worse_is_not_replaced_by_a_slower_plan(plan_us: float, answer: str) -> None:
    """As eager's batch norms in a training step: what it computes is what there is without a plan."""
    contenders, expected = contenders_of(framework=np.ones((4, 40)) * 1.01, plan=np.ones((4, 40)))
    plan = contenders[0]
    chosen, records = finish.decide(
        contenders, expected, DType.F32, seed=0, sample=lambda run, _calls: plan_us if run is plan.run else 4.0
    )
    assert chosen.name == answer and [r.verified for r in records] == [True, False]
    assert "outside" in records[1].note and records[1].samples_us


@pytest.mark.parametrize(("placed_us", "answer"), [(2.0, "solution-1"), (8.0, "eager")])
def test_what_is_timed_is_the_run_as_callers_have_it(placed_us: float, answer: str) -> None:
    (plan, own), expected = contenders_of(framework=np.ones((4, 40)), plan=np.ones((4, 40)))
    runs = [lambda: [torch.ones(1)], lambda: [torch.ones(1)]]
    us = dict(zip(map(id, runs), (placed_us, 4.0), strict=True))
    contenders = [replace(plan, in_place=lambda: runs[0]), replace(own, in_place=lambda: runs[1])]
    chosen, records = finish.decide(contenders, expected, DType.F32, seed=0, sample=lambda run, _calls: us[id(run)])
    assert chosen.name == answer and [r.median_us for r in records] == [placed_us, 4.0]


@pytest.mark.parametrize("how", ["fails", "late"])
def test_a_plan_that_cannot_be_placed_is_not_taken_instead_of_the_framework(how: str) -> None:
    def fails() -> Any:
        raise MemoryError("none")

    (plan, own), expected = contenders_of(framework=np.ones((4, 40)), plan=np.ones((4, 40)))
    place = fails if how == "fails" else lambda: plan.run
    slow = replace(plan, in_place=place, first_s=2.0 if how == "late" else 0.0)
    chosen, records = finish.decide([slow, own], expected, DType.F32, seed=0, left_s=lambda: 9.0)
    assert chosen is own and not records[0].samples_us and records[0].verified and records[1].samples_us


@pytest.mark.parametrize(
    ("framework", "plan"),
    [(np.ones((4, 40)), np.ones((4, 40))), (np.ones((4, 40)) * 1.01, np.ones((4, 40))), (padded(), padded())],
    ids=["equal", "rounding", "no plan is right"],
)
@pytest.mark.filterwarnings("ignore:no plan agrees:UserWarning")
def test_no_difference_is_told_of_rounding_or_where_nothing_is_right(framework: Any, plan: Any) -> None:
    contenders, expected = contenders_of(framework=framework, plan=plan)
    _, plans = finish.decide(contenders, expected, DType.F32, seed=0, budget_s=1.0)
    finish.tell_difference(record_of(plans))


@pytest.mark.parametrize("off", [0.0, 1e-3, 0.02, 0.3])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("size", [0, 1, 50, 5000])
def test_what_is_near_on_a_gpu_passes_gate_b(size: int, scale: float, off: float) -> None:
    """The short way accepts what the long one does, with the same share outside, and nothing else."""
    g = torch.Generator().manual_seed(size)
    want = scale * torch.randn(size, dtype=torch.float64, generator=g)
    got = (want * (1 + off * torch.randn(size, dtype=torch.float64, generator=g))).float()
    if size == 5000:
        got[7] += 100 * scale
    found = gate_b(DType.F16, got=got.numpy(), want=want.numpy())
    assert near_on_device(DType.F16, got, want) == (found.outside if found.ok else None)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_is_left_to_the_host(odd: float) -> None:
    want = torch.ones(10, dtype=torch.float64)
    want[3] = odd
    assert near_on_device(DType.F32, want.float(), want) is None
    assert near_on_device(DType.F32, torch.ones(10), want) is None
    assert near_on_device(DType.F32, want.float(), torch.ones(10, dtype=torch.float64)) is None
    assert near_on_device(DType.F32, torch.zeros(10), torch.ones(10, dtype=torch.float64)) is None
    assert near_on_device(DType.F32, torch.ones(9), torch.ones(10, dtype=torch.float64)) is None
    assert near_on_device(DType.F32, torch.zeros(10), torch.zeros(10, dtype=torch.float64)) == 0.0
