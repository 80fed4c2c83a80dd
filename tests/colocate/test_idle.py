"""Which way of drawing is taken on the whole GPU: nearly the fastest, and of these the one that stops soonest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.colocate.idle import CHUNK_US, CTAS, ENOUGH, MOST_CHUNK, Drawing, fastest

SMS = 132


def machine(
    block_us: float, draw_us: float, most: float, *, fit: int = 8, asked: list[Drawing] | None = None
) -> Callable[[Drawing], float | None]:
    """Blocks in a second: a CTA draws, then runs its chunk; `most` in all. A long block hides what is drawn ahead."""

    def rate(drawing: Drawing) -> float | None:
        if asked is not None:
            asked.append(drawing)
        if drawing.ctas_per_sm > fit:
            return None
        hidden = min(draw_us, block_us) if drawing.ahead else 0.0
        us = drawing.chunk * block_us + draw_us - hidden
        return min(most, drawing.ctas_per_sm * SMS * drawing.chunk / us * 1e6)

    return rate


@pytest.mark.parametrize(("block_us", "draw_us", "sms_full", "wanted"), [
    (40.0, 1.0, 4, Drawing(4)),  # long blocks: as few CTAs as fill the GPU, one by one
    (1.0, 0.01, 2, Drawing(2)),  # a draw costs nothing
])  # fmt: skip
def test_single_blocks_where_they_do(block_us: float, draw_us: float, sms_full: int, wanted: Drawing) -> None:
    assert fastest(machine(block_us, draw_us, sms_full * SMS / block_us * 1e6), SMS) == wanted


@pytest.mark.parametrize(("block_us", "full"), [(1.0, 8), (0.5, 1), (2.5, 8), (0.1, 4)])
def test_chunks_where_draws_cost_as_much_as_blocks(block_us: float, full: int) -> None:
    asked: list[Drawing] = []
    rate = machine(block_us, 2.0, full * SMS / block_us * 1e6, asked=asked)
    best = fastest(rate, SMS)
    assert best is not None and best.chunk > 1
    rates = {x: rate(x) or 0.0 for x in tuple(asked)}
    assert rates[best] >= ENOUGH * max(rates.values()) > 1.2 * max(rates[Drawing(n)] for n in CTAS if n <= full)
    assert all(x.in_flight >= best.in_flight for x, got in rates.items() if got >= ENOUGH * max(rates.values()))
    assert all(2 <= x.chunk <= MOST_CHUNK for x in asked if x.chunk > 1 or x.ahead)
    # by rates that a GPU has which is not full, a chunk takes no longer than it may
    assert all(x.chunk * (1 + x.ahead) * block_us <= CHUNK_US for x in asked if x.chunk > 1)


def test_what_does_not_fit_and_how_much_is_measured() -> None:
    asked: list[Drawing] = []
    best = fastest(machine(0.3, 2.0, 1e12, fit=2, asked=asked), SMS)
    assert best is not None and best.ctas_per_sm == 2
    assert len(asked) == len(set(asked)) <= 20
    assert [x for x in asked if x.ctas_per_sm > 2] == [Drawing(4), Drawing(8)]
    assert fastest(lambda drawing: None, SMS) is None
    assert fastest(lambda drawing: None if drawing.chunk > 1 else 1e9, SMS) == Drawing(1), "chunks that do not compile"
    assert fastest(lambda drawing: 0.0, SMS) == Drawing(1), "a job that is done"


def test_of_equals_the_fewest_blocks_in_flight() -> None:
    assert [Drawing(2, 3).in_flight, Drawing(2, 3, ahead=True).in_flight, Drawing(1).in_flight] == [6, 12, 1]


def test_one_cta_of_an_sm_and_chunks_of_fewer_threads() -> None:
    asked: list[Drawing] = []
    best = fastest(machine(0.5, 2.0, 1e12, asked=asked), SMS, ctas=(1,))
    assert best is not None and best.chunk > 1 and {x.ctas_per_sm for x in asked} == {1}
    assert Drawing(1, 12, ahead=True).of_threads(64, 256) == Drawing(1, 3, ahead=True)
    assert Drawing(1, 3, ahead=True).of_threads(64, 256) == Drawing(1), "single blocks are not drawn ahead"
    assert Drawing(1, 12).of_threads(512, 256) == Drawing(1, 12), "chunks grow no longer"
