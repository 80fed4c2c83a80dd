from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.runtime.memory import ALIGNMENT, Lifetime, plan_memory

lifetimes = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(0, 12)).map(
        lambda t: Lifetime(t[0], t[1], t[1] + t[2])
    ),
    max_size=40,
)


@given(lifetimes)
def test_buffers_that_live_together_never_overlap(items: list[Lifetime]) -> None:
    plan = plan_memory(items)
    for i, a in enumerate(items):
        assert plan.offsets[i] % ALIGNMENT == 0
        assert plan.offsets[i] + a.size <= plan.arena_bytes
        for j in range(i):
            b = items[j]
            if a.last < b.first or b.last < a.first:
                continue
            assert plan.offsets[i] + a.size <= plan.offsets[j] or plan.offsets[j] + b.size <= plan.offsets[i]


@given(lifetimes)
def test_the_arena_is_at_least_the_largest_live_set(items: list[Lifetime]) -> None:
    plan = plan_memory(items)
    assert plan.arena_bytes >= plan.live_bytes
    assert plan.live_bytes >= max((x.size for x in items), default=0)


def test_a_chain_needs_two_buffers() -> None:
    plan = plan_memory([Lifetime(1000, i, i + 1) for i in range(10)])
    assert plan.arena_bytes == plan.live_bytes == 2 * 1024
    assert plan.overhead == 0


def test_nothing_needs_nothing() -> None:
    assert plan_memory([]).arena_bytes == 0
