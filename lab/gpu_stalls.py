"""Where the tail of a launch on an idle GPU comes from: the host, the driver's call, or the clock that is asked for.

    PYTHONPATH=src:. python -m lab.gpu_stalls

Prints, for a small graph on an idle GPU once a millisecond: from the push to the begin of the driver's call (`hand
over`), to the begin of what is behind it (`call`), and to the end as it was seen (`end`); quantiles in us, with another
thread that asks for the clock and without. And how often a thread that does nothing but look at the time is held up.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import numpy as np
import torch

from weft.colocate.live import quietly
from weft.device.cuda import nvml
from weft.device.cuda.dispatch import dispatcher
from weft.device.cuda.driver import primary_context
from weft.device.cuda.streams import Stream, captured, destroyed

LAUNCHES = 3000
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


def shown(name: str, ns: list[int]) -> None:
    """Quantiles in us."""
    print(f"{name:28s}", " ".join(f"{x:9.1f}" for x in np.quantile(ns, QUANTILES) / 1e3), flush=True)


def held_up(seconds: float) -> list[int]:
    """Gaps of a loop that looks at the time."""
    found, last = [], time.perf_counter_ns()
    end = last + round(seconds * 1e9)
    while last < end:
        now = time.perf_counter_ns()
        if now - last > 5_000:
            found.append(now - last)
        last = now
    return found


def launches(clock_s: float) -> None:
    """One run; with the clock asked for so often, or never (0)."""
    with ExitStack() as held:
        queue = dispatcher(held)
        stream = Stream(priority=-5)
        held.callback(stream.close)
        x = torch.zeros(1 << 20, device="cuda")
        outer = torch.cuda.ExternalStream(stream.handle)  # type: ignore[no-untyped-call]

        def work(_: int) -> None:
            with torch.cuda.stream(outer):
                for _i in range(20):
                    x.add_(1.0)

        work(0)
        torch.cuda.synchronize()
        graph = captured(work, stream.handle)
        held.callback(destroyed, graph)
        read = nvml.sm_clock_of(str(torch.cuda.get_device_properties(0).uuid))
        begin, end = queue.event(), queue.event()
        asked, call, over, clocks = [], [], [], []
        ends = threading.Event()

        def look() -> None:
            while not ends.wait(clock_s):
                before = time.perf_counter_ns()
                read()
                clocks.append(time.perf_counter_ns() - before)

        if clock_s:
            threading.Thread(target=look, daemon=True).start()
        held.callback(ends.set)
        with quietly():
            for _ in range(LAUNCHES):
                until = time.perf_counter_ns() + 700_000
                while time.perf_counter_ns() < until:
                    pass
                at = time.perf_counter_ns()
                queue.record(begin, stream.handle)
                queue.launch(graph, stream.handle)
                queue.mark(end, stream.handle, since=begin)
                while not queue.happened(end):
                    pass
                asked.append(queue.put_ns(begin) - at)
                call.append(queue.put_ns(end) - queue.put_ns(begin))
                over.append(queue.seen_ns(end) - at)
        print(f"clock asked for each {clock_s:g} s" if clock_s else "clock never asked for")
        for name, ns in (("hand over", asked), ("call", call), ("end", over)):
            shown(name, ns)
        if clocks:
            shown("asking for the clock", clocks)
        torch.cuda.synchronize()


def main() -> None:
    """See the module."""
    torch.zeros(1, device="cuda")
    print(f"{'us':28s}", " ".join(f"{q:>9g}" for q in QUANTILES))
    gaps = held_up(2.0)
    print(f"a loop of 2 s was held up {len(gaps)} times by over 5 us")
    if gaps:
        shown("held up", gaps)
    with primary_context():
        for clock_s in (0.0, 0.25, 0.0, 0.05):
            launches(clock_s)


if __name__ == "__main__":
    main()
