"""Kernels of a batch of problems: CUDA texts by several processes where the machine has cores, the rest here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import final

from weft.device.any import DeviceFacts
from weft.generate.offer import Offer, kernels_of
from weft.generate.protocol import Generator
from weft.options import Options
from weft.pipeline.problems import Entry, Problems, take_kernels
from weft.tune.emitters import emitters_for, writes

LOOK_S = 0.02
"""How long something is waited for before the clock is looked at again."""


def _first_written(entries: Collection[Entry], written: Mapping[str, Mapping[str, Future[Offer]]]) -> Entry | None:
    """The first that other processes need no longer write; None: for a moment none was finished."""
    for entry in entries:
        if all(f.done() for f in written.get(entry.problem.key, {}).values()):
            return entry
    wait(
        [f for e in entries for f in written[e.problem.key].values() if not f.done()],
        timeout=LOOK_S,
        return_when=FIRST_COMPLETED,
    )
    return None


@final
class Emission:
    """Asks the generators, see `made`."""

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

    def made(
        self, problems: Problems, batches: Iterable[Sequence[Entry]], out_of_time: Callable[[], bool]
    ) -> Iterator[Entry | None]:
        """The entries one by one, as soon as their kernels are there; those that time allows.

        None for an empty batch, after a moment: whoever takes entries may want no more meanwhile.
        """
        for entries in batches:
            if not entries:
                time.sleep(LOOK_S)
                yield None
            yield from self._made(problems, entries, out_of_time)

    def _made(self, problems: Problems, entries: Sequence[Entry], out_of_time: Callable[[], bool]) -> Iterator[Entry]:
        written = {e.problem.key: self._begin(e) for e in entries if not e.is_made}
        left = {e.problem.key: e for e in entries}
        try:
            while left and not out_of_time():
                entry = _first_written(left.values(), written)
                if entry is None:
                    continue
                del left[entry.problem.key]
                if entry.problem.key in written and not entry.is_made:
                    futures = written[entry.problem.key]
                    take_kernels(entry, problems, [self._offer(entry, g, futures) for g in self._generators])
                yield entry
        finally:
            for future in (f for futures in written.values() for f in futures.values()):
                future.cancel()

    def _begin(self, entry: Entry) -> dict[str, Future[Offer]]:
        """What other processes write, by generator."""
        if self._emitters is None:
            return {}
        most = entry.most(self._options)
        return {g.name: self._emitters.submit(g, entry.problem, most) for g in self._generators if writes(g)}

    def _offer(self, entry: Entry, generator: Generator, written: dict[str, Future[Offer]]) -> Offer:
        future = written.get(generator.name)
        if future is not None:
            return future.result()
        return kernels_of(generator, entry.problem, self._facts, entry.most(self._options))
