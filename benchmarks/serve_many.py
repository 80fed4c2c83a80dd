"""A million queries to a small network through the server: each has one answer, its own, and memory stays flat.

    python -m benchmarks.serve_many [--count 1000000] [--share 50000] [--loop 20000] [--only WAY]

The network of `benchmarks.serve` is called one row at a time by `CALLERS` callers, each with its next query when it has
its answer (a closed loop). `--share` of the queries go to `weft serve` over HTTP with binary tensors, as many over
gRPC; the others to `weft.serve.Server` in this process, whose worker is a process. The same plan in a plain loop stands
beside.

Query number i is one of `QUERIES` rows whose answers differ by far more than rounding, so that an answer of another
query is wrong; an answer for a number that had one is doubled, a number without one is lost; and the server's own count
must be that of what was asked. Memory: `benchmarks/harness/memory.py`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree

from benchmarks import serve
from benchmarks.harness.memory import Memory
from benchmarks.harness.record import Record, Row
from benchmarks.serve_soak import answered
from weft.serve import ServeOptions, Server
from weft.serve.process import ProcessBackend

QUERIES, CALLERS, SAMPLE_S, FAR = 4096, 16, 1.0, 1e-4
WAYS = ("plain loop", "HTTP", "gRPC", "Server")


def many(
    caller: Callable[[], serve.Caller], there: serve.Setting, callers: int, count: int, memories: Mapping[str, Memory]
) -> Row:  # fmt: skip
    """So many queries; memory is sampled meanwhile."""
    # full, and not zeros: pages that are first touched later would look as if the process grew
    took, times, right = np.full(count, 0.0), np.full(count, 0, np.uint8), np.full(count, fill_value=False)
    errors: list[str] = []
    numbers = itertools.count()
    done = threading.Event()
    began = time.perf_counter()

    def work() -> None:
        call = caller()
        while (i := next(numbers)) < count:
            start = time.perf_counter()
            try:
                found = call(i)
            except Exception as error:  # counted
                errors.append(f"{type(error).__name__}: {error}"[:200])
                continue
            took[i] = time.perf_counter() - start
            right[i] = np.abs(found.reshape(-1) - there.answers[i % QUERIES]).max() < FAR
            times[i] += 1
        serve.end(call)

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            for one in memories.values():
                one.sample(time.perf_counter() - began)

    sampler = threading.Thread(target=sample)
    sampler.start()
    serve.together(callers, work)
    wall = time.perf_counter() - began
    done.set()
    sampler.join()
    ended = times > 0
    return {
        "callers": callers, "asked": count, **serve.told(took[ended].tolist(), wall), "seconds": round(wall, 1),
        "wrong": int((ended & ~right).sum()), "errors": len(errors), "first_errors": errors[:3],
        "lost": int((~ended).sum()) - len(errors), "doubled": int((times > 1).sum()),
    }  # fmt: skip


def distinct(there: serve.Setting) -> serve.Setting:
    """With more queries, whose answers all differ."""
    queries = np.random.default_rng(serve.SEED).standard_normal((QUERIES, there.queries.shape[1])).astype(np.float32)
    with torch.no_grad():
        answers = serve.network()(torch.from_numpy(queries)).numpy()
    near = cKDTree(answers).query(answers, k=2, p=np.inf)[0][:, 1].min()
    if near < 10 * FAR:
        raise RuntimeError(f"two answers differ by {near:.3g} alone")
    return replace(there, queries=queries, answers=answers)


def _add(record: Record, case: str, row: Row, memories: Mapping[str, Memory]) -> None:
    record.add({"record": "case", "case": case, **row})
    for name, memory in memories.items():
        record.add({"record": "case", "case": f"memory: {case}, {name}", **memory.row()})


def main(arguments: Sequence[str] | None = None, path: Path | None = None) -> None:
    """Ask so often."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_many", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="queries to the server")
    parser.add_argument("--share", type=int, default=50_000, help="of them over HTTP, and as many over gRPC")
    parser.add_argument("--only", nargs="*", choices=WAYS, default=WAYS, help="some of the ways")
    parser.add_argument("--loop", type=int, default=20_000, help="of the plain loop")
    a = parser.parse_args(arguments)
    record = Record("cpu", "serve-many", path=path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with serve.setting() as small:
            _run(record, distinct(small), a)
    finally:
        torch.set_num_threads(threads)
    record.close()


def _run(record: Record, there: serve.Setting, a: argparse.Namespace) -> None:
    if "plain loop" in a.only:
        with record.measuring(case="plain loop"):
            memories = {"process": Memory(os.getpid())}
            _add(record, "plain loop", many(serve.loop(there), there, 1, a.loop, memories), memories)
    if a.share and {"HTTP", "gRPC"} & set(a.only):
        with serve.command(there) as found:
            processes = {"worker": "weft.serve.worker", "front end": "weft.serve.front"}
            first = 0
            for case, caller in (
                ("HTTP", serve.over_http(there, found.port)), ("gRPC", serve.over_grpc(there, found.grpc_port)),
            ):  # fmt: skip
                if case not in a.only:
                    continue
                with record.measuring(case=case):
                    memories = {name: Memory(found.child(module)) for name, module in processes.items()}
                    row = many(caller, there, CALLERS, a.share, memories)
                    counted = answered(found.port, there.model)
                    _add(record, case, {**row, "answered_by_the_server": counted - first}, memories)
                    first = counted
    if "Server" not in a.only:
        return
    with record.measuring(case="Server"):
        options = ServeOptions(cache=there.options.cache, threads=1, timeout_s=60)
        with Server({there.model: list(map(str, there.files))}, options) as server:
            served = server.model(there.model)
            assert isinstance(served.backend, ProcessBackend)  # isolated
            memories = {"worker": Memory(served.backend.pid), "queue and callers": Memory(os.getpid())}
            row = many(serve.embedded(there, server), there, CALLERS, a.count - 2 * a.share, memories)
            counted = served.statistics.snapshot().outcomes["success"]
            _add(record, "Server", {**row, "answered_by_the_server": counted}, memories)


if __name__ == "__main__":
    main()
