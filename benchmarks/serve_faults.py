"""Processes of `weft serve` that are killed under load: how long until the next answer, and whether one was wrong.

    python -m benchmarks.serve_faults [--kills 50] [--only CASE]

The network of `benchmarks.serve`, `CALLERS` callers over HTTP, each with its next query when it has its answer (a
closed loop); one whose connection is lost opens another one at once. Meanwhile a process is ended with SIGKILL, that
often: the worker, the front end, the command. A recovery counts from the kill to the first right answer of a query that
was sent after it. With `--standby` a process is killed once there is one that stands by; without it, a front end once
it has worked for `STEADY_S`.

Nobody starts a command again but a service manager: it is started anew here when the last of its processes has ended,
and a recovery counts from there; how long they took to end stands beside.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks import serve
from benchmarks.harness.record import Record, Row
from weft.serve.supervisor import STEADY_S

CALLERS, LONG_S = 4, 120.0
WORKER, FRONT = "weft.serve.worker", "weft.serve.front"
CASES = ("worker, standby", "front end, standby", "worker", "front end", "command")


class Load:
    """Callers that never rest; they know when the last right answer came, and when that query was sent."""

    def __init__(self, there: serve.Setting, port: int) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._there, self._port = there, port
        self._stop = threading.Event()
        self._right = threading.Condition()
        self._sent_at, self._got_at = 0.0, 0.0
        self._wanted_from = float("inf")
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(CALLERS)]
        for t in self._threads:
            t.start()

    def _work(self, number: int) -> None:
        call = serve.over_http(self._there, self._port)()
        i = number
        while not self._stop.is_set():
            i += CALLERS
            sent = time.perf_counter()
            self._count("asked")
            try:
                fine = self._there.right(i, call(i))
            except Exception as error:  # counted
                self._count("errors")
                self.errors[_kind(error)] += 1
                time.sleep(0.002)
                continue
            got = time.perf_counter()
            self._count("right" if fine else "wrong")
            with self._right:
                if fine and sent >= self._wanted_from:
                    self._sent_at, self._got_at, self._wanted_from = sent, got, float("inf")
                    self._right.notify_all()
        serve.end(call)

    def _count(self, what: str) -> None:
        with self._right:
            self.counts[what] += 1

    def next_right(self, since: float) -> float:
        """When there was the first right answer to a query that was sent after this moment."""
        with self._right:
            self._wanted_from = since
            if not self._right.wait_for(lambda: self._wanted_from == float("inf"), LONG_S):
                raise RuntimeError(f"no right answer within {LONG_S} s: {dict(self.errors)}")
            return self._got_at

    def stop(self) -> None:
        self._stop.set()
        for t in self._threads:
            t.join()

    def row(self) -> Row:
        counts = {k: self.counts[k] for k in ("asked", "right", "wrong", "errors")}
        lost = counts["asked"] - counts["right"] - counts["wrong"] - counts["errors"]
        return {**counts, "lost": lost, "error_kinds": dict(self.errors.most_common(6))}


@contextmanager
def load(there: serve.Setting, port: int) -> Iterator[Load]:
    found = Load(there, port)
    try:
        yield found
    finally:
        found.stop()


def _kind(error: Exception) -> str:
    text = str(error)
    return f"HTTP {text[:3]}" if text[:3].isdigit() else type(error).__name__


def until(what: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + LONG_S
    while not what():
        if time.monotonic() > end:
            raise RuntimeError(f"never: {why}")
        time.sleep(0.01)


def stands_by(port: int) -> bool:
    """Whether each model has a second worker."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    found = [x for x in lines if x.startswith("weft_model_standby{")]
    return bool(found) and all(x.endswith(" 1") for x in found)


def killed(there: serve.Setting, module: str, kills: int, *, standby: bool) -> Row:
    """A child of the command, again and again."""
    chance = random.Random(serve.SEED)
    took: list[float] = []
    with serve.command(there, *(["--standby"] if standby else [])) as server, load(there, server.port) as callers:
        for n in range(kills):
            callers.next_right(time.perf_counter())
            if standby and module == WORKER:
                until(lambda: stands_by(server.port), "a second worker")
                if n == 0:  # it is not loaded meanwhile
                    until(lambda: _said(server, "stands by") == 1, "a second front end")
            elif standby:
                until(lambda: _said(server, "stands by") == n + 1, "a second front end")  # noqa: B023
            elif (
                module == FRONT
            ):  # one that dies before is taken for one that cannot work, and is started later and later
                time.sleep(STEADY_S)
            time.sleep(chance.uniform(0.0, 0.1))
            pid = server.child(module)
            began = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            took.append(callers.next_right(began) - began)
        died = _said(server, "died")
    return {"kills": kills, **marks(took), **callers.row(), "front_ends_died": died}


def killed_commands(there: serve.Setting, kills: int) -> Row:
    """The command itself; it is started anew on the same port."""
    ended, took = [], []
    counts: Counter[str] = Counter()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = serve.Command(there, "--port", str(port))
    try:
        for _ in range(kills):
            with load(there, port) as callers:
                callers.next_right(time.perf_counter())
                pids = [*server.children(WORKER), *server.children(FRONT)]
                began = time.perf_counter()
                os.kill(server.pid, signal.SIGKILL)
                until(lambda: not any(_alive(p) for p in pids), "its processes end")  # noqa: B023
                ended.append(time.perf_counter() - began)
                server.close()
                began = time.perf_counter()
                server = serve.Command(there, "--port", str(port))
                took.append(callers.next_right(began) - began)
            counts.update({k: int(str(v)) for k, v in callers.row().items() if k != "error_kinds"})
    finally:
        server.close()
    return {"kills": kills, **marks(took), "ended_s": marks(ended), **counts}


def _said(server: serve.Command, what: str) -> int:
    return sum(what in x for x in server.lines)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def marks(seconds: Sequence[float]) -> Row:
    """The distribution."""
    found = {f"p{p}_s": round(float(np.percentile(seconds, p)), 3) for p in (50, 90, 99)}
    return {**found, "most_s": round(max(seconds), 3), "all_s": [round(x, 3) for x in sorted(seconds)]}


def main(arguments: Sequence[str] | None = None, path: Path | None = None) -> None:
    """Kill each process so often."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="of each process")
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES, help="some of the cases")
    a = parser.parse_args(arguments)
    record = Record("cpu", "serve-faults", path=path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with serve.setting() as there:
            for case in a.only:
                with record.measuring(case=case):
                    if case == "command":
                        row = killed_commands(there, a.kills)
                    else:
                        module = WORKER if case.startswith("worker") else FRONT
                        row = killed(there, module, a.kills, standby="standby" in case)
                    record.add({"record": "case", "case": case, **row, "load_average": round(os.getloadavg()[0], 1)})
    finally:
        torch.set_num_threads(threads)
    record.close()


if __name__ == "__main__":
    main()
