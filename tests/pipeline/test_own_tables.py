"""Calls that make their tables themselves are verified with these: no drawn ones are right for them."""

from __future__ import annotations

import json
from typing import cast

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from weft.device.facts import CpuFacts
from weft.frontends.torch import import_exported
from weft.generate.registry import generators
from weft.ir.passes import clean_up
from weft.kernels.candidate import Kind
from weft.kernels.plan import Step
from weft.kernels.source import Kernel, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.problems import Problems, Task, collect
from weft.pipeline.qualify import trial
from weft.pipeline.search.kernels import Depth, Order, write
from weft.pipeline.search.prices import Known
from weft.tune.inputs import Domain, InputSet, draw
from weft.tune.store import Database
from weft.tune.tuner import ProblemTrial, Tuner
from weft.tune.worker import REAL, TrialRequest, run_trial

FACTS = CpuFacts()


class Resized(torch.nn.Module):
    """An image at another resolution."""

    def __init__(self, size: tuple[int, int], mode: str) -> None:
        super().__init__()
        self.size, self.mode = size, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.relu(), self.size, mode=self.mode)


Pairs = tuple[tuple[Schedule, Kernel], ...]


def written(task: Task) -> Pairs:
    return write(Order(task, Depth.ALL), generators(), FACTS, Options()).pairs


def posed(size: tuple[int, int], mode: str) -> tuple[Problems, Task, Pairs, LibraryCall]:
    """All problems of a small model, that of its resizing, its kernels, and among them the operator's call."""
    program = torch.export.export(Resized(size, mode), (torch.zeros(1, 3, 20, 28),), strict=False)
    alternatives = find_alternatives(clean_up(import_exported(program).graph, strict=False).graph)
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    task = next(
        t
        for t in problems.tasks.values()
        if t.problem.origin_rule.startswith("resize") and any(c.kind is Kind.ORIGIN for c, _ in t.uses)
    )
    made = written(task)
    call = next(k for _, k in made if isinstance(k, LibraryCall) and ("form", "operator") in k.schedule.params)
    return problems, task, made, call


class Heard:
    """Keeps what a trial says."""

    def __init__(self) -> None:
        self.verdicts: list[str] = []

    def at(self, kernel: int) -> None:
        """See `Channel`."""

    def say(self, **message: object) -> None:
        """See `Channel`."""
        if message["event"] == "verdict":
            self.verdicts.append(str(message["verdict"]))


def verdicts(asked: ProblemTrial) -> list[str]:
    """What a worker says of a trial that was sent to it."""
    with Tuner(Options(), FACTS, Database.open(None)) as tuner:
        work = tuner._look_up(asked)
        work.paths = dict.fromkeys(range(len(asked.kernels)), "")
        message = json.loads(json.dumps(tuner._request(work, range(len(asked.kernels)), None), allow_nan=False))
    heard = Heard()
    run_trial(TrialRequest.from_message(message), heard, REAL)
    return heard.verdicts


@pytest.mark.parametrize("size", [(40, 56), (80, 112)], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_call_is_right_for_the_tables_that_it_makes_and_for_no_others(size: tuple[int, int], mode: str) -> None:
    problems, task, _, call = posed(size, mode)
    known = Known()
    step = Step(call, (), (), (), Kind.ORIGIN, task.problem.key, 1.0, measured=False)
    asked = trial(step, problems, known)
    graph = task.problem.graph
    assert asked.tables and all(np.shape(x) == graph.type_of(graph.inputs[k]).shape for k, x in asked.tables.items())
    (found,) = verdicts(asked)
    if found == "nan_class":  # what is infinite beside a weight of zero
        known.odd.add((task.problem.key, call.schedule))
        (found,) = verdicts(trial(step, problems, known))
    assert found == "ok"
    drawn = draw(graph, InputSet.NORMAL, Domain.ZERO_MEAN, seed=1)
    others = {k: cast("np.ndarray[tuple[int], np.dtype[np.float32]]", drawn[k].numpy()) for k in asked.tables}
    assert verdicts(ProblemTrial(task.problem, asked.kernels, timed=False, finite=True, tables=others)) == ["wrong"]
    assert verdicts(ProblemTrial(task.problem, asked.kernels, timed=False, finite=True)) == ["wrong"], "as before"


def test_kernels_that_read_their_tables_are_verified_with_drawn_ones() -> None:
    """A kernel may meet other tables in another model: what the worker finds of it is remembered."""
    problems, task, made, call = posed((40, 56), "nearest")
    kernels = [(s, k, None) for s, k in made]
    (nothing, readers), (given, makers) = problems.by_tables(task, kernels)
    assert nothing == {} and given and [k for _, k, _ in makers] == [call] and len(readers) == len(kernels) - 1
    for other in problems.tasks.values():
        if other is not task and not other.problem.origin_rule.startswith("resize"):
            assert all(problems.tables(other, k) == {} for _, k in written(other))
