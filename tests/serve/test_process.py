"""Workers that die, hang, refuse and lie: every query has one answer, and it is right."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.serve.fakes import Launcher, answer, query

from weft.errors import ArtifactError
from weft.ir.types import Array
from weft.serve.errors import (
    DeadlineError,
    InferenceFailedError,
    OverloadedError,
    RequestError,
    ServeError,
    UnavailableError,
)
from weft.serve.process import TRIES, ProcessBackend
from weft.serve.query import Outputs
from weft.serve.served import Served
from weft.serve.statistics import Statistics


@contextmanager
def served(launcher: Launcher, tmp_path: Path, **settings: float) -> Iterator[Served]:
    file = tmp_path / "fake.weft"
    file.touch()
    timeout_s = settings.pop("timeout_s", 60.0)
    standby = bool(settings.pop("standby", 0))
    backend = ProcessBackend([file], launch=launcher, timeout_s=timeout_s, standby=standby)
    found = Served("fake", "1", backend, **settings)  # type: ignore[arg-type]
    found.start()
    try:
        yield found
    finally:
        found.close()


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def right(given: dict[str, Array], future: Future[Outputs]) -> bool:
    return bool(np.array_equal(future.result(20)[0], answer(given["x"], given["n"])))


def watched(model: Served) -> bool:
    model.watch()
    return True


def works(model: Served) -> bool:
    given = query(3, 0)
    return right(given, model.submit(given))


def special(n: int, rows: int = 1) -> dict[str, Array]:
    return {"x": np.ones((rows, 2), np.float32), "n": np.full((rows,), n)}


def test_queries_share_batches_and_each_gets_its_own(tmp_path: Path) -> None:
    with served(Launcher(), tmp_path, max_delay_s=0.005) as model:
        given = [query(1 + i % 4, i) for i in range(100)]
        futures = [model.submit(q) for q in given]
        assert all(right(q, f) for q, f in zip(given, futures, strict=True))
        counted = model.statistics.snapshot()
        assert counted.outcomes == {"success": 100} and counted.rows == sum(len(q["n"]) for q in given)
        assert sum(b[1].count for b in counted.batches.values()) < 100


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_query_has_one_answer(seed: int, tmp_path: Path) -> None:
    chance, launcher = random.Random(seed), Launcher()
    with served(launcher, tmp_path, max_delay_s=chance.choice([0.0, 0.002]), max_queries=64) as model:
        open_now: list[tuple[dict[str, Array], Future[Outputs]]] = []
        refused = 0
        for i in range(300):
            given = query(chance.randint(1, 8), i)
            if chance.random() < 0.03:
                given["n"][0] = chance.choice([-1, -2, -3])
            try:
                open_now.append((given, model.submit(given)))
            except OverloadedError:
                refused += 1
                time.sleep(0.01)
            if chance.random() < 0.05:
                chance.choice(open_now)[1].cancel()
            if chance.random() < 0.02:
                launcher.started[-1].kill()
        assert model.drain(30)
        cancelled = failed = 0
        for given, future in open_now:
            assert future.done()
            if future.cancelled():
                cancelled += 1
            elif (error := future.exception()) is None:
                assert right(given, future)
            else:
                failed += 1
                assert isinstance(error, RequestError | InferenceFailedError)
                assert any(n < 0 for n in given["n"].tolist()) or "died twice" in str(error)
        counted = model.statistics.snapshot().outcomes
        assert counted["cancelled"] == cancelled and counted["failed"] == failed and counted["rejected"] == refused
        assert counted["success"] == len(open_now) - cancelled - failed
        assert (model.waiting, model.running) == (0, 0)


def test_a_worker_that_dies_is_replaced_and_its_batch_replayed(tmp_path: Path) -> None:
    launcher = Launcher()
    with served(launcher, tmp_path) as model:
        hanging = model.submit(special(-4))  # sleeps: the kill meets it at work
        behind = [(q := query(2, i), model.submit(q)) for i in range(20)]
        wait_for(lambda: model.running > 0)
        launcher.started[-1].kill()
        assert hanging.result(20)[0].shape == (1, 2)
        assert all(right(q, f) for q, f in behind)
        assert model.restarts == 1 and 1 <= model.statistics.snapshot().replayed <= 4


def test_a_query_that_kills_is_tried_twice_and_hurts_no_other(tmp_path: Path) -> None:
    launcher = Launcher()
    with served(launcher, tmp_path, max_delay_s=0.05) as model:
        before, killer, after = query(1, 0), model.submit(special(-3)), query(1, 1)
        others = [(q, model.submit(q)) for q in (before, after)]
        with pytest.raises(InferenceFailedError, match="died twice"):
            killer.result(20)
        assert all(right(q, f) for q, f in others)
        assert model.restarts == 2


def test_one_bad_query_of_a_batch_alone_gets_the_error(tmp_path: Path) -> None:
    with served(Launcher(), tmp_path, max_delay_s=0.05) as model:
        bad, failing, good = model.submit(special(-1)), model.submit(special(-2)), query(1, 5)
        fine = model.submit(good)
        with pytest.raises(RequestError, match="n is -1"):
            bad.result(20)
        with pytest.raises(InferenceFailedError, match="n is -2"):
            failing.result(20)
        assert right(good, fine) and model.restarts == 0


def test_a_worker_that_hangs_is_killed(tmp_path: Path) -> None:
    launcher = Launcher()
    with served(launcher, tmp_path, timeout_s=0.05) as model:
        hanging = model.submit(special(-4))
        wait_for(lambda: watched(model) and hanging.done())
        with pytest.raises(InferenceFailedError, match="died twice"):
            hanging.result()
        assert works(model)


def test_late_queries_get_an_error_whether_they_wait_or_run(tmp_path: Path) -> None:
    with served(Launcher(), tmp_path) as model:
        running, waiting = model.submit(special(-4), timeout_s=0.1), model.submit(special(-4))
        behind = [model.submit(query(8, i), timeout_s=0.1) for i in range(3)]
        wait_for(lambda: watched(model) and running.done() and all(f.done() for f in behind))
        for future in (running, *behind):
            with pytest.raises(DeadlineError, match=r"no answer within 0\.1 s"):
                future.result()
        assert waiting.result(20)
        assert model.statistics.snapshot().outcomes["expired"] == 4


def test_a_query_that_would_be_late_is_refused_at_once(tmp_path: Path) -> None:
    with served(Launcher(), tmp_path) as model:
        model.submit(special(-4)).result(20)  # a batch takes 0.4 s, as far as is known
        kept = model.submit(special(-4))
        with pytest.raises(OverloadedError, match=r"its time is 0\.01 s") as told:
            model.submit(query(1, 0), timeout_s=0.01)
        assert 0 < told.value.retry_after_s < 5
        assert kept.result(20)


def test_of_too_many_queries_those_that_are_admitted_are_in_time(tmp_path: Path) -> None:
    with served(Launcher(sizes=(1,)), tmp_path) as model:
        model.submit(special(-4)).result(20)  # a batch takes 0.4 s
        admitted = []
        for _ in range(30):
            with contextlib.suppress(OverloadedError):
                admitted.append(model.submit(special(-4), timeout_s=4.0))
        assert 1 < len(admitted) <= 8
        assert model.statistics.snapshot().outcomes["rejected"] == 30 - len(admitted)
        wait_for(lambda: watched(model) and all(f.done() for f in admitted))
        assert all(f.exception() is None for f in admitted)


def test_what_batches_take_is_told_with_their_deviation() -> None:
    even, uneven = Statistics(), Statistics()
    assert even.takes_s(3) == 0.0
    for k in range(200):
        even.paced(0.1)
        uneven.paced(0.15 if k % 2 else 0.05)
    assert even.takes_s(9) == pytest.approx(0.9)
    assert uneven.takes_s(9) == pytest.approx(0.9 + 3 * 3 * 0.05, rel=0.1)
    assert uneven.takes_s(36) == pytest.approx(3.6 + 3 * 6 * 0.05, rel=0.1)


def test_what_is_cancelled_while_it_waits_is_not_run(tmp_path: Path) -> None:
    with served(Launcher(), tmp_path, max_queries=4) as model:
        model.submit(special(-4))
        wait_for(lambda: model.running == 1)
        model.submit(special(-4))
        wait_for(lambda: model.running == 2)
        waiting = [model.submit(query(1, i)) for i in range(4)]
        with pytest.raises(OverloadedError, match="4 queries wait"):
            model.submit(query(1, 9))
        assert all(f.cancel() for f in waiting)
        assert model.waiting == 0
        assert works(model)
        assert model.statistics.snapshot().outcomes == {"cancelled": 4, "rejected": 1, "success": 3}


def test_a_worker_that_cannot_be_started_again_is_told_and_tried_on(tmp_path: Path) -> None:
    launcher = Launcher()
    with served(launcher, tmp_path) as model:
        launcher.refusals = [ArtifactError(problem="the disk is gone", remedy="mend it")] * TRIES
        launcher.started[-1].kill()
        wait_for(lambda: model.backend.gone)
        assert model.state == "UNAVAILABLE" and model.problem == "the disk is gone"
        with pytest.raises(UnavailableError, match="cannot be started: the disk is gone") as told:
            model.submit(query(1, 0))
        assert told.value.retry_after_s == 10.0
        wait_for(lambda: model.state == "READY")
        assert works(model)


def test_a_file_that_is_written_over_is_not_served_by_accident(tmp_path: Path) -> None:
    launcher = Launcher()
    with served(launcher, tmp_path) as model:
        launcher.digest = "another"
        launcher.started[-1].kill()
        wait_for(lambda: "written over in place" in model.problem)


def test_a_standby_takes_over(tmp_path: Path) -> None:
    launcher = Launcher()
    with served(launcher, tmp_path, standby=1) as model:
        wait_for(lambda: len(launcher.started) == 2)
        launcher.started[0].kill()
        wait_for(lambda: model.restarts == 1 and len(launcher.started) == 3)
        assert works(model)


def test_a_first_start_that_fails_is_an_error(tmp_path: Path) -> None:
    launcher = Launcher()
    launcher.refusals = [ArtifactError(problem="no plan", remedy="save one")]
    with pytest.raises(ArtifactError, match=r"no plan \[W401\]\n  save one"), served(launcher, tmp_path):
        pass
    launcher.stillborn = 1
    with pytest.raises(UnavailableError, match=r"died (while|before) it"), served(launcher, tmp_path):
        pass
    with pytest.raises(ArtifactError, match="cannot be opened"):
        ProcessBackend([tmp_path / "none.weft"])


def test_the_end_answers_everybody(tmp_path: Path) -> None:
    with served(Launcher(), tmp_path) as model:
        futures = [model.submit(special(-4)) for _ in range(20)]
        assert not model.drain(0.05)
        with pytest.raises(UnavailableError, match="draining"):
            model.submit(query(1, 0))
        model.close()
        assert all(f.done() for f in futures)
        errors = [f.exception() for f in futures]
        assert sum(e is not None for e in errors) >= 18
        assert all(e is None or isinstance(e, ServeError) for e in errors)
        model.close()
