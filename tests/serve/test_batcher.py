"""The queue: first in, first out, limits, and that nothing is lost or given twice whatever is done to it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.serve.batcher import Batcher, QueueLimits
from weft.serve.errors import OverloadedError
from weft.serve.query import Query


def query(rows: int = 1, at: float = 0.0, deadline: float = float("inf")) -> Query:
    return Query((np.zeros((rows, 1)),), rows, arrived=at, deadline=deadline)


def test_a_batch_is_due_when_its_first_query_has_waited() -> None:
    batcher = Batcher(QueueLimits(max_rows=4, max_delay_s=1.0))
    first, second = query(at=0.0), query(at=0.5)
    batcher.offer(first)
    batcher.offer(second)
    assert batcher.due_at() == 1.0 and batcher.take(0.9) == []
    assert batcher.take(1.0) == [first, second]
    assert batcher.due_at() is None and batcher.take(9.0) == []


def test_a_full_batch_does_not_wait() -> None:
    batcher = Batcher(QueueLimits(max_rows=4, max_delay_s=1.0))
    given = [query(2), query(1), query(2), query(4)]
    for q in given:
        batcher.offer(q)
    assert batcher.take(0.0) == given[:2]  # the third would not fit, and none overtakes it
    assert batcher.take(0.0) == given[2:3]
    assert batcher.take(0.0) == given[3:]


def test_what_is_to_be_alone_is_alone() -> None:
    batcher = Batcher(QueueLimits(max_rows=8))
    given = [query() for _ in range(4)]
    given[0].alone = given[2].alone = True
    for q in given:
        batcher.offer(q)
    assert [batcher.take(0.0) for _ in range(4)] == [[q] for q in given]


def test_the_queue_has_an_end() -> None:
    batcher = Batcher(QueueLimits(max_rows=1, max_queries=2))
    first = query()
    batcher.offer(first)
    batcher.offer(query())
    with pytest.raises(OverloadedError, match="2 queries wait") as told:
        batcher.offer(query(), retry_after_s=3.0)
    assert told.value.retry_after_s == 3.0
    assert batcher.remove(first) and not batcher.remove(first)
    batcher.offer(query())
    batcher.again([first])  # was taken before: it is not turned away
    assert len(batcher) == 3 and batcher.rows == 3


def test_what_comes_back_stands_where_it_was() -> None:
    batcher = Batcher(QueueLimits(max_rows=2))
    given = [query() for _ in range(6)]
    for q in given[:5]:
        batcher.offer(q)
    taken = [batcher.take(0.0), batcher.take(0.0)]
    batcher.offer(given[5])
    for batch in taken:
        batcher.again(batch)
    assert [q for _ in range(3) for q in batcher.take(0.0)] == given


def test_late_queries_are_given_out_as_such() -> None:
    batcher = Batcher(QueueLimits(max_rows=4, max_delay_s=9.0))
    late, other = query(deadline=1.0), query(deadline=2.0)
    batcher.offer(late)
    batcher.offer(other)
    assert batcher.expired(1.5) == [late] and len(batcher) == 1
    assert batcher.clear() == [other] and batcher.rows == 0


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_doubled_or_out_of_order(seed: int) -> None:
    chance = random.Random(seed)
    batcher = Batcher(QueueLimits(chance.randint(1, 8), chance.choice([0.0, 0.3, 2.0]), chance.randint(1, 12)))
    now, offered, gone, taken = 0.0, [], set(), []
    for _ in range(400):
        now += chance.random() * 0.2
        what = chance.random()
        if what < 0.5:
            q = query(chance.randint(1, batcher.limits.max_rows), now, now + chance.random() * 4)
            q.alone = chance.random() < 0.1
            try:
                batcher.offer(q)
                offered.append(q)
            except OverloadedError:
                assert len(batcher) >= batcher.limits.max_queries
        elif what < 0.6 and offered:
            q = chance.choice(offered)
            if batcher.remove(q):
                gone.add(q.number)
        elif what < 0.7:
            gone |= {q.number for q in batcher.expired(now)}
        else:
            batch = batcher.take(now)
            assert sum(q.rows for q in batch) <= batcher.limits.max_rows
            assert len(batch) == 1 or not any(q.alone for q in batch)
            if batch and chance.random() < 0.2:
                batcher.again(batch)
            else:
                taken += batch
        assert batcher.rows == sum(q.rows for q in offered if q.number in batcher._waiting)
    taken += [q for batch in iter(lambda: batcher.take(now + 10), []) for q in batch]
    places = [q.place for q in taken]
    assert places == sorted(places)
    assert {q.number for q in taken} | gone == {q.number for q in offered}
    assert len(taken) + len(gone) == len(offered)
