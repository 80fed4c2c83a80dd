"""How a job draws its blocks where it has the whole GPU: nearly as fast as it can, and stopped soon. Nothing runs here.

    best = fastest(rate, sms)        # `rate`: blocks in a second of a `Drawing`, measured; None: it cannot be

More CTAs and longer chunks hide what a draw costs, and are what a stop waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

CTAS = (1, 2, 4, 8)
"""Of an SM, that are tried."""
CHUNK_US = 10.0
"""A CTA's chunk, with the one that is drawn ahead, takes about so long at most; not where single blocks take longer."""
MOST_CHUNK = 64
ENOUGH = 0.97
"""Of the highest rate."""
_GROWS = 1.5
"""A chunk is measured once more where, by the rate that it gave, so many times as many blocks take no longer."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a co-runner draws (`KernelJob.co_runner`)."""

    ctas_per_sm: int
    chunk: int = 1
    ahead: bool = False

    @property
    def in_flight(self) -> int:
        """Blocks of an SM that may be drawn and have not ended: what a stop waits for."""
        return self.ctas_per_sm * self.chunk * (2 if self.ahead else 1)

    def of_threads(self, threads: int, most: int) -> Drawing:
        """The same in CTAs of `threads`, where it was chosen with `most`: blocks take longer in fewer."""
        chunk = max(1, self.chunk * min(threads, most) // most)
        return replace(self, chunk=chunk, ahead=self.ahead and chunk > 1)


def fastest(rate: Callable[[Drawing], float | None], sms: int, *, ctas: Sequence[int] = CTAS) -> Drawing | None:
    """Of those that run nearly as fast as any, the one with the fewest blocks in flight; None: none can be.

    `ctas`: of an SM, that are tried.

    Single blocks are measured for each number of CTAs, then chunks of as many blocks as take `CHUNK_US` by the rate so
    far, then half as many, without and with the next ones drawn ahead. Cost: 20 measurements at most.
    """
    found = dict(x for many in ctas for x in _tried(rate, many, sms))
    most = max(found.values(), default=0.0)
    enough = [drawing for drawing, got in found.items() if got >= ENOUGH * most]
    return min(enough, key=lambda x: (x.in_flight, -found[x]), default=None)


def _tried(rate: Callable[[Drawing], float | None], many: int, sms: int) -> Iterator[tuple[Drawing, float]]:
    """What is measured with so many CTAs of an SM, and its rates."""
    got = rate(Drawing(many))
    if got is None:
        return
    yield Drawing(many), got
    chunk, chunks = 1, {1}
    for _ in range(2):  # the first is too short: single blocks take as long as their draws, too
        wanted = min(MOST_CHUNK, int(CHUNK_US * 1e-6 * got / (many * sms)))
        if wanted < _GROWS * chunk:
            break
        chunk = wanted
        chunks.add(chunk)
        drawing = Drawing(many, chunk)
        if (found := rate(drawing)) is None:
            return
        yield drawing, found
        got = max(got, found)
    half = chunk // 2
    if half > 1:
        ways = [Drawing(many, half, ahead=True), *([] if half in chunks else [Drawing(many, half)])]
        yield from ((x, found) for x in ways if (found := rate(x)) is not None)
