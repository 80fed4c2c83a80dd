"""Kernels of a batch of orders: CUDA texts by several processes where the machine has cores, the rest here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import final

from weft.device.any import DeviceFacts
from weft.generate.offer import Offer, kernels_of
from weft.generate.protocol import Generator
from weft.options import Options
from weft.pipeline.search.kernels import Kernels, Order
from weft.tune.emitters import emitters_for, writes

LOOK_S = 0.02
"""How long something is waited for before the clock is looked at again."""


def _first_written(orders: Collection[Order], written: Mapping[str, Mapping[str, Future[Offer]]]) -> Order | None:
    """The first that other processes need no longer write; None: for a moment none was finished."""
    for order in orders:
        if all(f.done() for f in written[order.task.problem.key].values()):
            return order
    wait(
        [f for o in orders for f in written[o.task.problem.key].values() if not f.done()],
        timeout=LOOK_S,
        return_when=FIRST_COMPLETED,
    )
    return None


@final
class Emission:
    """Asks the generators. `write` is its one door; whoever searches calls it, in one thread."""

    def __init__(
        self, generators: Sequence[Generator], facts: DeviceFacts, options: Options, *, count: int | None = None
    ) -> None:
        """`count`: processes, which begin to load; None: as many as the machine has cores for."""
        self._generators, self._facts, self._options = generators, facts, options
        self._emitters = emitters_for(generators, facts, count)
        if self._emitters is not None:
            self._emitters.start()

    def close(self) -> None:
        """End the processes."""
        if self._emitters is not None:
            self._emitters.close()

    def write(self, orders: Sequence[Order], out_of_time: Callable[[], bool]) -> Iterator[tuple[Order, Kernels]]:
        """The kernels of each order, one by one as soon as they are there; those that time allows."""
        written = {o.task.problem.key: self._begin(o) for o in orders}
        left = {o.task.problem.key: o for o in orders}
        try:
            while left and not out_of_time():
                order = _first_written(left.values(), written)
                if order is None:
                    continue
                del left[order.task.problem.key]
                yield order, self._taken(order, written[order.task.problem.key])
        finally:
            for future in (f for futures in written.values() for f in futures.values()):
                future.cancel()

    def _begin(self, order: Order) -> Mapping[str, Future[Offer]]:
        """What other processes write, by generator."""
        if self._emitters is None or order.written is not None:
            return {}
        most = order.most(self._options)
        return {g.name: self._emitters.submit(g, order.task.problem, most) for g in self._generators if writes(g)}

    def _taken(self, order: Order, written: Mapping[str, Future[Offer]]) -> Kernels:
        if (had := order.written) is not None:
            return had
        return order.taken([self._offer(order, g, written.get(g.name)) for g in self._generators])

    def _offer(self, order: Order, generator: Generator, written: Future[Offer] | None) -> Offer:
        if written is not None:
            return written.result()
        return kernels_of(generator, order.task.problem, self._facts, order.most(self._options))
