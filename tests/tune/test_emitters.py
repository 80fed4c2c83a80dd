"""Kernels written by other processes: the same as those written here, whatever becomes of the processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace

import pytest
from tests.orchestrate.graphs import residual_net

from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.generate.cuda import CudaGenerator
from weft.generate.offer import Offer, kernels_of
from weft.generate.registry import generators
from weft.kernels.candidate import Problem
from weft.kernels.codec import Json
from weft.options import Options
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.problems import Problems, collect
from weft.pipeline.search.emission import Emission
from weft.pipeline.search.kernels import FIRST, Depth, Order
from weft.tune import emitters
from weft.tune.asked import Asked
from weft.tune.emission_worker import answer, graph_digest, offer_to_json
from weft.tune.emitters import Emitters, offer_from_json
from weft.tune.messages import Message
from weft.tune.transport import Fault, WorkerFault
from weft.tune.wire import problem_from_json, problem_to_json

FACTS = GpuFacts()
OPTIONS = Options(device="cuda")


def posed() -> Problems:
    alternatives = find_alternatives(residual_net(2))
    candidates = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    return collect(alternatives.graph, candidates, alternatives, FACTS)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    found = [e.problem for e in posed().tasks.values()]
    return [*found[:4], *found[-8:]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Emitters]:
    with Emitters(FACTS, 1) as found:
        yield found


class Scripted:
    """A process that answers as the real one does, or with what `spoil` makes of that."""

    def __init__(self, spoil: Mapping[str, Json] | None = None, *, starts: bool = True) -> None:
        self.spoil, self.starts = spoil, starts
        self.asked = self.kills = 0
        self.last: Message = {}

    def start(self) -> None:
        if not self.starts:
            raise WorkerFault(Fault.CRASH, "no such program")

    def send(self, message: Message, timeout_s: float) -> None:
        self.last = message

    def receive(self, timeout_s: float) -> Message:
        self.asked += 1
        if self.spoil is None:
            raise WorkerFault(Fault.CRASH, "gone")
        return {**answer(FACTS, self.last), **self.spoil}

    def running(self) -> int:
        return -1

    def kill(self) -> None:
        self.kills += 1


def test_another_process_writes_the_same(pool: Emitters, problems: list[Problem]) -> None:
    futures = [pool.submit(CudaGenerator(), p, FIRST) for p in problems]
    found = [f.result(60) for f in futures]
    assert found == [kernels_of(CudaGenerator(), p, FACTS, FIRST) for p in problems]
    assert any(offer.kernels for offer in found)
    assert pool.lost == []


@pytest.mark.parametrize(
    "process",
    [
        Scripted(),
        Scripted(starts=False),
        Scripted({"event": "thing"}),
        Scripted({"kernels": [[1, 2]]}),
        Scripted({"kernels": 7}),
    ],
)
def test_what_a_process_spoils_is_written_here(process: Scripted, problems: list[Problem]) -> None:
    with Emitters(FACTS, 0, transports=[process]) as pool:
        found = [pool.submit(CudaGenerator(), p, 2).result(60) for p in problems[:3]]
    assert found == [kernels_of(CudaGenerator(), p, FACTS, 2) for p in problems[:3]]
    assert len(pool.lost) == 1
    assert process.asked <= 1, "a process that failed is not asked again"
    assert process.kills >= 1


def test_another_graph_is_written_here_and_costs_no_process(problems: list[Problem]) -> None:
    process = Scripted({"graph": "another", "kernels": []})
    with Emitters(FACTS, 0, transports=[process]) as pool:
        found = [pool.submit(CudaGenerator(), p, 2).result(60) for p in problems[:3]]
    assert found == [kernels_of(CudaGenerator(), p, FACTS, 2) for p in problems[:3]]
    assert (process.asked, pool.lost) == (3, [])


class Hanging(Scripted):
    """It is asked and never answers; killed, it is lost to whoever waits for it."""

    def __init__(self) -> None:
        super().__init__({})
        self.asking, self.killed = threading.Event(), threading.Event()

    def receive(self, timeout_s: float) -> Message:
        self.asking.set()
        assert self.killed.wait(60), "it was waited for, not killed"
        raise WorkerFault(Fault.CRASH, "killed")

    def kill(self) -> None:
        self.killed.set()


def test_closing_waits_for_nobody(problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    process = Hanging()
    pool = Emitters(FACTS, 0, transports=[process])
    future, waiting = (pool.submit(CudaGenerator(), p, 2) for p in problems[:2])
    assert process.asking.wait(60)

    def never(*_: object) -> Offer:
        raise AssertionError("it was written here, though nobody reads it")

    monkeypatch.setattr(emitters, "kernels_of", never)
    pool.close()
    assert process.killed.is_set() and waiting.cancelled()
    assert future.result(60).kernels == ()


def test_numbers_of_nodes_survive_the_way() -> None:
    for entry in posed().tasks.values():
        again = problem_from_json(problem_to_json(entry.problem))
        assert graph_digest(again.graph) == graph_digest(entry.problem.graph)
        assert again.origin_operand_nodes == entry.problem.origin_operand_nodes


def test_the_facts_of_the_device_are_told(problems: list[Problem]) -> None:
    old = replace(FACTS, capability=75)
    process = Scripted({})
    with Emitters(old, 0, transports=[process]) as pool:
        pool.start()
        assert process.last["op"] == "hello"
        assert process.last["facts"]["capability"] == 75  # type: ignore[index,call-overload]


def test_offers_cross_as_json(problems: list[Problem]) -> None:
    offers = [kernels_of(CudaGenerator(), p, f, 2) for p in problems for f in (FACTS, replace(FACTS, capability=75))]
    assert [offer_from_json(offer_to_json(o)) for o in offers] == offers
    assert any(o.declined for o in offers)
    with pytest.raises(ArtifactError):
        offer_from_json({"kernels": [], "declined": []})


def test_a_request_that_is_no_problem_is_an_error(problems: list[Problem]) -> None:
    with pytest.raises(ArtifactError):
        answer(FACTS, {"op": "make", "problem": {"graph": 3}, "most": 1})
    assert answer(FACTS, {"op": "make", "problem": problem_to_json(problems[0]), "most": 1})["event"] == "made"


def made(problems: Problems, count: int) -> dict[str, object]:
    emission = Emission(generators(device="cuda"), FACTS, OPTIONS, count=count)
    tasks = list(problems.tasks.values())[-8:]
    try:
        first = list(emission.write([Order(t) for t in tasks], lambda: False))
        order = [o.task.problem.key for o, _ in first]
        asked = [t.problem.key for t in tasks]
        assert order == asked if count == 0 else sorted(order) == sorted(asked)
        had = {o.task.problem.key: kernels for o, kernels in first}
        deeper = [Order(t, Depth.ALL, before=had[t.problem.key]) for t in tasks]
        found = {o.task.problem.key: kernels for o, kernels in emission.write(deeper, lambda: False)}
        assert found.keys() == had.keys()
        again = [Order(t, Depth.ALL, before=found[t.problem.key]) for t in tasks]
        assert all(kernels is o.before for o, kernels in emission.write(again, lambda: False)), "once"
        return {"first": had, "all": found}
    finally:
        emission.close()


def test_a_batch_does_not_depend_on_who_writes() -> None:
    ours = made(posed(), 0)
    assert ours == made(posed(), 2)
    assert ours["first"] != ours["all"]


def test_what_is_written_first_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [Order(t) for t in list(posed().tasks.values())[-3:]]
    emission = Emission(generators(device="cuda"), FACTS, OPTIONS, count=0)
    futures: list[Future[Offer]] = [Future() for _ in orders]
    offers = [kernels_of(CudaGenerator(), o.task.problem, FACTS, 2) for o in orders]
    waiting = iter(futures)
    monkeypatch.setattr(emission, "_begin", lambda order: {"cuda": next(waiting)})
    found = emission.write(orders, lambda: False)
    futures[1].set_result(offers[1])
    written = [next(found)]
    assert written[0][0] is orders[1]

    def others() -> None:
        for k in (2, 0):
            futures[k].set_result(offers[k])

    threading.Timer(0.02, others).start()
    written += [next(found), next(found)]
    assert {id(order) for order, _ in written[1:]} == {id(orders[0]), id(orders[2])}
    assert next(found, None) is None
    kernels = {id(order): [k for s, k in made.pairs if s.generator == "cuda"] for order, made in written}
    assert [kernels[id(order)] for order in orders] == [[k for _, k in o.kernels] for o in offers]
    emission.close()


def test_when_time_is_up_nothing_more_is_made() -> None:
    emission = Emission(generators(device="cuda"), FACTS, OPTIONS, count=0)
    orders = [Order(t) for t in list(posed().tasks.values())[:3]]
    left = iter([False, True])
    assert [order for order, _ in emission.write(orders, lambda: next(left))] == orders[:1]
    emission.close()


def test_waiting_for_what_is_measured_can_be_broken_off() -> None:
    """Whoever takes trials was interrupted: nothing that is waited for comes any more."""
    given_up = time.monotonic() + 300.0

    def trials() -> Iterator[int | None]:
        while time.monotonic() < given_up:
            yield None
        pytest.fail("the queue is filled to the end")

    Asked(trials(), 4).close(600.0)
    assert time.monotonic() < given_up


def test_an_offer_says_whether_there_is_more(problems: list[Problem]) -> None:
    offers = [kernels_of(CudaGenerator(), p, FACTS, 1) for p in problems]
    everything = [kernels_of(CudaGenerator(), p, FACTS, 1000) for p in problems]
    assert not any(offer.more for offer in everything)
    assert any(offer.more for offer in offers)
    assert all(len(whole.kernels) >= len(some.kernels) for some, whole in zip(offers, everything, strict=True))
    assert Offer(()) == Offer((), (), False)
