"""Two models of one `weft serve`, of which one gets half as many queries again as it can answer.

    python -m benchmarks.serve_overload [--seconds 60] [--load 1.5] [--timeout 0.5]

`busy` is a network of 6 million weights, a query a run; what it keeps up with is measured first (a closed loop of four
callers). Then Poisson arrivals at `--load` of that, drawn before, each with `--timeout` (a parameter of the query), and
beside it `calm`, the network of `benchmarks.serve`, at `CALM` a second. Admission control is to refuse at once (429)
what would be late, so that what is admitted is in time. Times count from when a query was sent; how late the sender was
stands beside. Answers are compared with the network's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import weft
from benchmarks import serve
from benchmarks.cases.serve_requests import HEADER
from benchmarks.harness.record import Record, Row

CALM, CALLERS, WIDTH, BUDGET_S = 20.0, 256, 512, 120.0


def busy_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(serve.SEED)
        layers = [nn.Linear(WIDTH, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, WIDTH)]
        return nn.Sequential(*layers).eval()


def prepared(small: serve.Setting) -> serve.Setting:
    """The busy model, beside the small one."""
    module = busy_network()
    options = weft.Options(budget_s=BUDGET_S, threads=1, cache_dir=small.options.cache)
    file = small.folder / "busy.weft"
    weft.compile(module, torch.zeros(1, WIDTH), options=options).save(file)
    queries = np.random.default_rng(serve.SEED).standard_normal((16, WIDTH)).astype(np.float32)
    with torch.no_grad():
        answers = module(torch.from_numpy(queries)).numpy()
    return replace(small, files=(file,), queries=queries, answers=answers, model="busy")


class Asked:
    """Queries of one model, when they are due, and what each came to."""

    def __init__(self, there: serve.Setting, port: int, due: np.ndarray, timeout_s: float) -> None:
        self._there, self._port, self._due = there, port, due
        self._timeout_us = int(timeout_s * 1e6)
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.statuses: Counter[int] = Counter()
        self.took: dict[int, list[float]] = {}
        self.late: list[float] = []
        self.wrong = 0
        self.without_retry = 0
        self._lock = threading.Lock()

    def run(self, callers: int) -> None:
        began = time.perf_counter() + 0.1
        threads = [threading.Thread(target=self._work, args=(began,)) for _ in range(callers)]
        for t in threads:
            t.start()
        for i, at in enumerate(self._due):
            if (left := began + at - time.perf_counter()) > 0:
                time.sleep(left)
            self._todo.put(i)
        for _ in threads:
            self._todo.put(-1)
        for t in threads:
            t.join()

    def _work(self, began: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        width = self._there.queries.shape[1]
        tensor = {"name": "input", "shape": [1, width], "datatype": "FP32",
                  "parameters": {"binary_data_size": 4 * width}}  # fmt: skip
        parameters = {"binary_data_output": True, "timeout": self._timeout_us}
        text = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
        while (i := self._todo.get()) >= 0:
            body = text + self._there.queries[i % len(self._there.queries)].tobytes()
            sent = time.perf_counter()
            connection.request("POST", f"/v2/models/{self._there.model}/infer", body, {HEADER: str(len(text))})
            response = connection.getresponse()
            data = response.read()
            seconds = time.perf_counter() - sent
            right = response.status != 200 or self._there.right(
                i, np.frombuffer(data[int(response.headers[HEADER]) :], np.float32)
            )
            with self._lock:
                self.statuses[response.status] += 1
                self.took.setdefault(response.status, []).append(seconds)
                self.late.append(sent - began - float(self._due[i]))
                self.wrong += not right
                self.without_retry += response.status == 429 and "Retry-After" not in response.headers
        connection.close()

    def row(self, timeout_s: float) -> Row:
        found: Row = {"asked": len(self._due), "statuses": dict(sorted(self.statuses.items())), "wrong": self.wrong}
        for status, name in ((200, "answered"), (429, "refused"), (504, "late")):
            seconds = self.took.get(status, [])
            found[name] = len(seconds)
            if seconds:
                found |= {
                    f"{name}_p{p}_ms": round(float(np.percentile(seconds, p)) * 1e3, 2) for p in (50, 99)
                } | {f"{name}_most_ms": round(max(seconds) * 1e3, 2)}  # fmt: skip
        admitted = self.took.get(200, []) + self.took.get(504, [])
        in_time = sum(x <= timeout_s for x in self.took.get(200, []))
        found["admitted_in_time"] = round(in_time / len(admitted), 5) if admitted else None
        found["without_retry_after"] = self.without_retry
        found["sent_late_p99_ms"] = round(float(np.percentile(self.late, 99)) * 1e3, 2)
        return found


def arrivals(rate: float, seconds: float, seed: int) -> np.ndarray:
    due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, int(2 * rate * seconds) + 20))
    return due[due < seconds]


def overload(small: serve.Setting, seconds: float, load: float, timeout_s: float) -> dict[str, Row]:
    there = prepared(small)
    with serve.command(there, f"calm={','.join(map(str, small.files))}") as server:
        caller = serve.over_http(there, server.port)
        call = caller()
        for i in range(10):
            call(i)
        serve.end(call)
        closed = serve.closed(caller, there, 4, 1_000_000, min(15.0, seconds))
        rate = float(str(closed["per_second"]))
        busy = Asked(there, server.port, arrivals(load * rate, seconds, serve.SEED), timeout_s)
        calm = Asked(replace(small, model="calm"), server.port, arrivals(CALM, seconds, serve.SEED + 1), timeout_s)
        beside = threading.Thread(target=calm.run, args=(8,))
        beside.start()
        busy.run(CALLERS)
        beside.join()
    shared = {"load": load, "timeout_s": timeout_s, "seconds": seconds}
    return {
        "busy": {**shared, "keeps_up_with": round(rate, 1), "alone_p50_ms": closed["p50_ms"], **busy.row(timeout_s)},
        "calm": {**shared, "rate": CALM, **calm.row(timeout_s)},
    }


def main(arguments: Sequence[str] | None = None, path: Path | None = None) -> None:
    """Ask one model for more than it can answer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_overload", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=1.5, help="arrivals over what the model keeps up with")
    parser.add_argument("--timeout", type=float, default=0.5, help="seconds of a query")
    a = parser.parse_args(arguments)
    record = Record("cpu", "serve-overload", path=path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with serve.setting() as small, record.measuring(case="busy"):
            rows = overload(small, a.seconds, a.load, a.timeout)
            for case, row in rows.items():
                record.add({"record": "case", "case": case, **row, "load_average": serve.told([], 1)["load_average"]})
    finally:
        torch.set_num_threads(threads)
    record.close()


if __name__ == "__main__":
    main()
