from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from weft.runtime.single_flight import SingleFlightCache

WAIT_S = 20.0


def test_a_value_is_made_once_and_others_wait_for_it() -> None:
    cache, made, begun, go = SingleFlightCache[str, str](4), Counter[str](), threading.Event(), threading.Event()

    def make() -> str:
        made["a"] += 1
        begun.set()
        assert go.wait(WAIT_S)
        return "A"

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(cache.get, "a", make) for _ in range(4)]
        assert begun.wait(WAIT_S)
        go.set()
        assert [w.result(WAIT_S) for w in waiting] == ["A"] * 4
    assert made == {"a": 1}


def test_who_asks_for_what_is_there_does_not_wait_for_what_is_made() -> None:
    cache, begun, go = SingleFlightCache[str, str](4), threading.Event(), threading.Event()
    cache.put("old", "O")

    def make() -> str:
        begun.set()
        assert go.wait(WAIT_S)
        return "N"

    with ThreadPoolExecutor(2) as pool:
        new = pool.submit(cache.get, "new", make)
        assert begun.wait(WAIT_S)
        known = pool.submit(cache.get, "old", lambda: pytest.fail("it is there"))
        assert known.result(WAIT_S) == "O"
        assert not new.done()
        go.set()
        assert new.result(WAIT_S) == "N"


def test_two_are_never_made_at_the_same_time() -> None:
    cache, inside, most = SingleFlightCache[int, int](8), [0], [0]

    def make(key: int) -> int:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.005)
        inside[0] -= 1
        return key

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(lambda k: cache.get(k, lambda: make(k)), range(6))) == list(range(6))
    assert most == [1]


def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    cache, begun, go = SingleFlightCache[str, str](4), threading.Event(), threading.Event()

    def fails() -> str:
        begun.set()
        assert go.wait(WAIT_S)
        raise ValueError("no plan")

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(cache.get, "a", fails)
        assert begun.wait(WAIT_S)
        others = [pool.submit(cache.get, "a", lambda: pytest.fail("it is being made")) for _ in range(2)]
        while len(cache._pending["a"].future._condition._waiters) < 2:  # type: ignore[attr-defined]
            threading.Event().wait(0.001)
        go.set()
        for asked in (first, *others):
            with pytest.raises(ValueError, match="no plan"):
                asked.result(WAIT_S)
    assert len(cache) == 0
    assert cache.get("a", lambda: "A") == "A"


def test_an_interruption_is_that_of_one_thread_and_another_goes_on() -> None:
    cache, begun, go = SingleFlightCache[str, str](4), threading.Event(), threading.Event()

    def interrupted() -> str:
        begun.set()
        assert go.wait(WAIT_S)
        raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", interrupted)
        assert begun.wait(WAIT_S)
        other = pool.submit(cache.get, "a", lambda: "A")
        go.set()
        assert other.result(WAIT_S) == "A"
        assert isinstance(first.exception(WAIT_S), KeyboardInterrupt)


def test_a_value_that_does_not_hold_is_made_anew() -> None:
    cache = SingleFlightCache[str, int](2)
    assert cache.get("a", lambda: 1) == 1
    assert cache.get("a", lambda: 2, lambda value: value == 2) == 2
    assert cache.known("a") == 2
    assert len(cache) == 1


def test_asked_for_by_who_makes_it() -> None:
    cache = SingleFlightCache[str, str](2)
    assert cache.get("a", lambda: cache.get("a", lambda: "inner") + " outer") == "inner outer"


def test_the_least_recently_used_goes() -> None:
    cache = SingleFlightCache[int, int](2)
    for key in (1, 2, 1, 3):
        cache.get(key, lambda: key * 10)  # noqa: B023 - called before the next round
    assert (cache.known(1), cache.known(2), cache.known(3)) == (10, None, 30)


def test_a_renewal_replaces_all_values_together_or_none() -> None:
    cache = SingleFlightCache[int, str](4)
    cache.put(1, "a")
    cache.put(2, "b")
    with cache.renewal() as values:
        for key in values:
            values[key] = values[key].upper()
            assert cache.known(key) == "ab"[key - 1], "not before the block ends"
    assert (cache.known(1), cache.known(2)) == ("A", "B")

    def fails_half_way() -> None:
        with cache.renewal() as values:
            values[1] = "x"
            raise ValueError("the second fails")

    with pytest.raises(ValueError, match="second"):
        fails_half_way()
    assert (cache.known(1), cache.known(2)) == ("A", "B")


def test_many_threads_over_more_keys_than_are_kept() -> None:
    cache, making, lock = SingleFlightCache[int, int](3), Counter[int](), threading.Lock()

    def make(key: int) -> int:
        with lock:
            making[key] += 1
            assert making[key] == 1, "one at a time makes a key"
        if random.Random(key + len(cache)).random() < 0.2:
            with lock:
                making[key] -= 1
            raise LookupError(key)
        with lock:
            making[key] -= 1
        return key * 7

    def work(seed: int) -> int:
        chance, failed = random.Random(seed), 0
        for _ in range(300):
            key = chance.randrange(6)
            try:
                assert cache.get(key, lambda: make(key)) == key * 7  # noqa: B023 - called before the next round
            except LookupError:
                failed += 1
            assert len(cache) <= 3
        return failed

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) < 8 * 300
    assert not cache._pending
