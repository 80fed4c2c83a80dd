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
from weft.pipeline.problems import FIRST, Entry, Problems, collect
from weft.pipeline.search.emission import Emission
from weft.tune import emitters
from weft.tune.emission_worker import answer, graph_digest, offer_to_json
from weft.tune.emitters import Emitters, offer_from_json
from weft.tune.messages import Message
from weft.tune.transport import Fault, WorkerFault
from weft.tune.tuner import ProblemTrial, _Feeder
from weft.tune.wire import problem_from_json, problem_to_json

FACTS = GpuFacts()
OPTIONS = Options(device="cuda")


def posed() -> Problems:
    alternatives = find_alternatives(residual_net(2))
    candidates = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    return collect(alternatives.graph, candidates, alternatives, FACTS)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    found = [e.problem for e in posed().entries.values()]
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
    for entry in posed().entries.values():
        again = problem_from_json(problem_to_json(entry.problem))
        assert graph_digest(again.graph) == graph_digest(entry.problem.graph)


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
    entries = list(problems.entries.values())[-8:]
    try:
        order = [e.problem.key for e in emission.made(problems, [entries], lambda: False)]
        asked = [e.problem.key for e in entries]
        assert order == asked if count == 0 else sorted(order) == sorted(asked)
        first = {e.problem.key: (e.kernels, e.first, e.more) for e in entries}
        for e in entries:
            e.widened = True
        assert len(list(emission.made(problems, [entries], lambda: False))) == len(entries)
        return {"first": first, "all": {e.problem.key: (e.kernels, e.first, e.more) for e in entries}}
    finally:
        emission.close()


def test_a_batch_does_not_depend_on_who_writes() -> None:
    ours, theirs = posed(), posed()
    found = made(ours, 0)
    assert found == made(theirs, 2)
    assert ours.declined == theirs.declined
    assert found["first"] != found["all"]


def test_what_is_written_first_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = posed()
    entries = list(problems.entries.values())[-3:]
    emission = Emission(generators(device="cuda"), FACTS, OPTIONS, count=0)
    futures: list[Future[Offer]] = [Future() for _ in entries]
    offers = [kernels_of(CudaGenerator(), e.problem, FACTS, 2) for e in entries]
    waiting = iter(futures)
    monkeypatch.setattr(emission, "_begin", lambda entry: {"cuda": next(waiting)})
    found = emission.made(problems, [entries], lambda: False)
    futures[1].set_result(offers[1])
    assert next(found) is entries[1]
    threading.Timer(0.02, lambda: (futures[2].set_result(offers[2]), futures[0].set_result(offers[0]))).start()
    assert [id(e) for e in (next(found), next(found))] in (
        [id(entries[2]), id(entries[0])],
        [id(entries[0]), id(entries[2])],
    )
    assert next(found, None) is None
    generated = [[k for s, k in e.kernels or () if s.generator == "cuda"] for e in entries]
    assert generated == [[k for _, k in o.kernels] for o in offers]
    emission.close()


def test_when_time_is_up_nothing_more_is_made() -> None:
    problems = posed()
    emission = Emission(generators(device="cuda"), FACTS, OPTIONS, count=0)
    entries = list(problems.entries.values())[:3]
    left = iter([False, True])
    assert list(emission.made(problems, [entries], lambda: next(left))) == entries[:1]
    assert [e.kernels is None for e in entries] == [False, True, True]
    emission.close()


def test_waiting_for_what_is_measured_can_be_broken_off() -> None:
    """Whoever takes trials was interrupted: nothing that is waited for comes any more."""
    problems = posed()
    emission = Emission(generators(device="cuda"), FACTS, OPTIONS, count=0)
    given_up = time.monotonic() + 300.0
    nothing: list[Entry] = []

    def batches() -> Iterator[list[Entry]]:
        while time.monotonic() < given_up:
            yield nothing
        pytest.fail("the feeder waits to the end")

    def trials() -> Iterator[ProblemTrial | None]:
        for entry in emission.made(problems, batches(), lambda: False):
            assert entry is None
            yield None

    feeder = _Feeder(trials(), 4)
    feeder.close(600.0)
    assert time.monotonic() < given_up
    emission.close()


def test_an_offer_says_whether_there_is_more(problems: list[Problem]) -> None:
    offers = [kernels_of(CudaGenerator(), p, FACTS, 1) for p in problems]
    everything = [kernels_of(CudaGenerator(), p, FACTS, 1000) for p in problems]
    assert not any(offer.more for offer in everything)
    assert any(offer.more for offer in offers)
    assert all(len(whole.kernels) >= len(some.kernels) for some, whole in zip(offers, everything, strict=True))
    assert Offer(()) == Offer((), (), False)
