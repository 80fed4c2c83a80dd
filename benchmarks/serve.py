"""A server on this machine under load: latencies beside a plain loop, and malformed requests.

    python -m benchmarks.serve [--count 2000] [--seconds 60] [--load 0.5] [--malformed 1000] [--only CASE]

A small network (64-256-256-10, plans for 1 and 8 rows, no tuning) is called one row at a time: by a plain loop in this
process; by `weft.serve.Server` in this process (`embedded`: the queue alone) and with its worker (`isolated`); by
`weft serve` over HTTP with binary tensors and over gRPC. Each has two rows. `closed`: as many callers as `CALLERS`,
each with its next query when it has its answer, so that is the rate it keeps up with. `open`: Poisson arrivals at
`--load` of that rate, fixed by a seed before the run; a latency counts from when a query was due, whenever it was sent,
so that whoever is late is late for all behind it; how late the sender was stands beside. All results are compared with
the network's.

`malformed` sends that many requests that are wrong (`benchmarks/cases/serve_requests.py`): the kinds in turn, then
bytes changed at random. Only 127.0.0.1 is called. Killed processes: `benchmarks.serve_faults`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

# before torch, and as workers have it: threads that spin while they wait take the cores from whom they wait for
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from torch import nn

import weft
from benchmarks.cases.serve_requests import HEADER, OVER, Request, changed, good, malformed, send
from benchmarks.harness.record import Record, Row
from weft.serve import ServeOptions, Server

ROOT = Path(__file__).parents[1]
WIDTH, SIZES, CALLERS, SEED = 64, (1, 8), 16, 20261124
CASES = ("loop", "embedded", "isolated", "http", "grpc", "malformed")
Numbers = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Setting:
    """Plans, queries, and what is right."""

    folder: Path
    options: ServeOptions
    files: tuple[Path, ...]
    queries: Numbers
    answers: Numbers
    model: str = "mlp"
    exact: bool = False
    """Whether an answer is right only with the same bits."""

    def right(self, i: int, found: Numbers) -> bool:
        if self.exact:
            return np.array_equal(found.reshape(-1), self.answers[i % len(self.answers)])
        return bool(np.allclose(found.reshape(-1), self.answers[i % len(self.answers)], rtol=1e-4, atol=1e-5))


class Caller(Protocol):
    """Answers query number i, as one of the callers."""

    def __call__(self, i: int) -> Numbers: ...


def network(width: int = WIDTH) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        layers = [nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
        return nn.Sequential(*layers).eval()


@contextmanager
def setting(width: int = WIDTH) -> Iterator[Setting]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        options = weft.Options(budget_s=0, threads=1, cache_dir=folder / "cache")
        module = network(width)
        files = []
        for rows in SIZES:
            files.append(folder / f"mlp-{rows}.weft")
            weft.compile(module, torch.zeros(rows, width), options=options).save(files[-1])
        queries = np.random.default_rng(SEED).standard_normal((64, width)).astype(np.float32)
        with torch.no_grad():
            answers = module(torch.from_numpy(queries)).numpy()
        served = ServeOptions(cache=options.cache_dir, threads=1, timeout_s=60)
        yield Setting(folder, served, tuple(files), queries, answers)


# -- load


def closed(caller: Callable[[], Caller], there: Setting, callers: int, count: int, seconds: float) -> Row:
    """Each caller has its next query when it has its answer."""
    took, wrong, errors = [0.0] * count, [0], [0]
    numbers = iter(range(count))
    lock = threading.Lock()
    until = time.perf_counter() + seconds

    def work() -> None:
        call = caller()
        while time.perf_counter() < until:
            with lock:
                i = next(numbers, -1)
            if i < 0:
                break
            began = time.perf_counter()
            try:
                fine = there.right(i, call(i))
            except Exception:  # counted
                errors[0] += 1
                continue
            took[i] = time.perf_counter() - began
            wrong[0] += not fine
        end(call)

    began = time.perf_counter()
    together(callers, work)
    wall = time.perf_counter() - began
    done = [x for x in took if x]
    return {"arrivals": "closed", "callers": callers, **told(done, wall), "wrong": wrong[0], "errors": errors[0]}


def opened(
    caller: Callable[[], Caller], there: Setting, callers: int, rate: float, count: int, seconds: float
) -> Row:  # fmt: skip
    """Poisson arrivals of this rate, fixed before; latencies count from when a query was due."""
    due = np.cumsum(np.random.default_rng(SEED).exponential(1 / rate, count))
    due = due[due < seconds]
    took, late = [0.0] * len(due), [0.0] * len(due)
    wrong, errors = [0], [0]
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    began = time.perf_counter() + 0.1

    def work() -> None:
        call = caller()
        while (i := todo.get()) >= 0:
            late[i] = time.perf_counter() - began - due[i]
            try:
                fine = there.right(i, call(i))
            except Exception:  # counted
                errors[0] += 1
                continue
            took[i] = time.perf_counter() - began - due[i]
            wrong[0] += not fine
        end(call)

    def schedule() -> None:
        for i, at in enumerate(due):
            if (left := began + at - time.perf_counter()) > 0:
                time.sleep(left)
            todo.put(i)
        for _ in range(callers):
            todo.put(-1)

    clock = threading.Thread(target=schedule)
    clock.start()
    together(callers, work)
    clock.join()
    done = [x for x in took if x]
    sent = {"sent_late_p99_ms": round(float(np.percentile(late, 99)) * 1e3, 3)}
    row = told(done, time.perf_counter() - began)
    return {"arrivals": "open", "rate": round(rate, 1), **row, **sent, "wrong": wrong[0], "errors": errors[0]}


def together(count: int, work: Callable[[], None]) -> None:
    """In so many threads."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def told(seconds: Sequence[float], wall: float) -> Row:
    """Percentiles and the rate."""
    busy = round(os.getloadavg()[0], 1)
    found: Row = {"queries": len(seconds), "per_second": round(len(seconds) / wall, 1), "load_average": busy}
    if not seconds:
        return found
    marks = {f"p{p}_ms": round(float(np.percentile(seconds, p)) * 1e3, 3) for p in (50, 95, 99)}
    return {**found, **marks, "most_ms": round(max(seconds) * 1e3, 3)}


# -- whom the queries go to


def loop(there: Setting) -> Callable[[], Caller]:
    plan = weft.load(there.files[0], options=weft.Options(cache_dir=there.options.cache, threads=1))
    tensors = torch.from_numpy(there.queries)

    def call(i: int) -> Numbers:
        found = plan(tensors[i % len(tensors)][None])
        assert isinstance(found, torch.Tensor)  # one output
        return found.numpy()

    return lambda: call


def embedded(there: Setting, server: Server) -> Callable[[], Caller]:
    def call(i: int) -> Numbers:
        found: Numbers = server.submit(there.queries[i % len(there.queries)][None]).result(60)[0]  # type: ignore[assignment]
        return found

    return lambda: call


def over_http(there: Setting, port: int) -> Callable[[], Caller]:
    width = there.queries.shape[1]
    head = {"inputs": [{"name": "input", "shape": [1, width], "datatype": "FP32",
                        "parameters": {"binary_data_size": 4 * width}}],
            "parameters": {"binary_data_output": True}}  # fmt: skip
    text = json.dumps(head).encode()

    return lambda: _OverHttp(there, port, text)


class _OverHttp:
    """One connection, which is opened again when it is lost."""

    def __init__(self, there: Setting, port: int, head: bytes) -> None:
        self._there, self._head = there, head
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def __call__(self, i: int) -> Numbers:
        body = self._head + self._there.queries[i % len(self._there.queries)].tobytes()
        try:
            path = f"/v2/models/{self._there.model}/infer"
            self._connection.request("POST", path, body, {HEADER: str(len(self._head))})
            response = self._connection.getresponse()
            data = response.read()
        except BaseException:
            self._connection.close()  # the next query opens another one
            raise
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {data[:200]!r}")
        return np.frombuffer(data[int(response.headers[HEADER]) :], np.float32)

    def close(self) -> None:
        self._connection.close()


def end(call: Caller) -> None:
    """Close its connection, where it has one."""
    close = getattr(call, "close", None)
    if close is not None:
        close()


def over_grpc(there: Setting, port: int) -> Callable[[], Caller]:
    from weft.serve import messages

    types = messages.classes()

    return lambda: _OverGrpc(there, port, types, f"/{messages.PACKAGE}.{messages.SERVICE}/ModelInfer")


class _OverGrpc:
    """One channel, with a connection of its own."""

    def __init__(self, there: Setting, port: int, types: Mapping[str, Any], method: str) -> None:
        import grpc

        self._there, self._types = there, types
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=options)
        self._method = self._channel.unary_unary(method, response_deserializer=types["ModelInferResponse"].FromString)

    def __call__(self, i: int) -> Numbers:
        queries = self._there.queries
        request = self._types["ModelInferRequest"](model_name=self._there.model)
        request.inputs.add(name="input", datatype="FP32", shape=[1, queries.shape[1]])
        request.raw_input_contents.append(queries[i % len(queries)].tobytes())
        answer = self._method(request.SerializeToString(), timeout=60)
        return np.frombuffer(answer.raw_output_contents[0], np.float32)

    def close(self) -> None:
        self._channel.close()


class Command:
    """`weft serve`, on ports of its choice."""

    def __init__(self, there: Setting, *arguments: str) -> None:
        files = ",".join(map(str, there.files))
        given = [] if "--port" in arguments else ["--port", "0"]
        program = [sys.executable, "-m", "weft", "serve", f"{there.model}={files}", *given, "--grpc-port", "0"]
        environ = {**os.environ, "WEFT_CACHE_DIR": str(there.options.cache), "PYTHONPATH": f"{ROOT / 'src'}"}
        self._process = subprocess.Popen(
            [*program, "--threads", "1", *arguments], stderr=subprocess.PIPE, text=True, env=environ
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.readies(1)
        self.port, self.grpc_port = map(int, re.findall(r"127\.0\.0\.1:(\d+)", " ".join(self.lines))[:2])

    @property
    def pid(self) -> int:
        """Of the command."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stderr is not None  # a pipe
        for line in self._process.stderr:
            self.lines.append(line)

    def readies(self, count: int, seconds: float = 120) -> None:
        """Wait until it has said so often that it is ready."""
        end = time.monotonic() + seconds
        while sum("ready" in x for x in self.lines) < count:
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"the server is not ready: {self.lines}")
            time.sleep(0.02)

    def child(self, module: str) -> int:
        """The process that runs a module, below this one; the first to be started, where there are several."""
        return self.children(module)[0]

    def children(self, module: str) -> list[int]:
        """All that run a module, the oldest first."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        rows = [x.split(None, 2) for x in listed.splitlines()[1:]]
        mine = {str(self._process.pid)}
        for _ in range(3):
            mine |= {r[0] for r in rows if r[1] in mine}
        found = [int(r[0]) for r in rows if r[0] in mine and module in r[2]]
        return sorted(found, key=_started)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._reader.join()
            assert self._process.stderr is not None  # a pipe
            self._process.stderr.close()


def _started(pid: int) -> int:
    """When, in ticks of the clock."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0  # it has ended meanwhile


@contextmanager
def command(there: Setting, *arguments: str) -> Iterator[Command]:
    found = Command(there, *arguments)
    try:
        yield found
    finally:
        found.close()


# -- cases


def measured(
    record: Record,
    case: str,
    caller: Callable[[], Caller],
    there: Setting,
    a: argparse.Namespace,
    callers: int = CALLERS,
) -> None:
    """The two rows of a way to call."""
    call = caller()
    for i in range(20):
        call(i)
    end(call)
    first: Row = {}
    with record.measuring(case=f"{case}: closed"):
        first = closed(caller, there, callers, a.count, a.seconds)
        record.add({"record": "case", "case": f"{case}: closed", **first})
    with record.measuring(case=f"{case}: open"):
        rate = float(str(first["per_second"])) * a.load
        row = opened(caller, there, callers, rate, a.count, a.seconds)
        record.add({"record": "case", "case": f"{case}: open", "load": a.load, **row})


def refused(there: Setting, count: int) -> Row:
    """How malformed requests are answered."""
    kinds = malformed()
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    with command(there, "--max-body", str(OVER / (1 << 20))) as server:
        asked = [(name, kinds[name]) for name in islice(cycle(kinds), count)]
        asked = [(f"{n} {i // len(kinds)}", r) for i, (n, r) in enumerate(asked)]
        for name, request in asked:
            answer = send(server.port, request)
            statuses[answer.status] += 1
            if answer.status not in request.statuses:
                wrong.append(f"{name}: {answer.status}")
        changed_at_random: Counter[int] = Counter()
        for body in changed(count, SEED):
            changed_at_random[send(server.port, Request(body)).status] += 1
        alive = send(server.port, Request(json.dumps(good()).encode())).status == 200
        restarts = sum("died" in x for x in server.lines)
    return {
        "requests": count, "kinds": len(kinds), "statuses": dict(sorted(statuses.items())), "unexpected": wrong[:8],
        "changed_at_random": dict(sorted(changed_at_random.items())), "answers_afterwards": alive,
        "processes_died": restarts,
    }  # fmt: skip


def _run(record: Record, a: argparse.Namespace) -> None:
    with setting() as there:
        if "loop" in a.only:
            measured(record, "loop", loop(there), there, a, callers=1)
        for case, isolated in (("embedded", False), ("isolated", True)):
            if case in a.only:
                options = ServeOptions(cache=there.options.cache, threads=1, timeout_s=60, isolated=isolated)
                with Server({"mlp": list(map(str, there.files))}, options) as server:
                    measured(record, case, embedded(there, server), there, a)
        if {"http", "grpc"} & set(a.only):
            with command(there) as found:
                for case, caller in (
                    ("http", over_http(there, found.port)),
                    ("grpc", over_grpc(there, found.grpc_port)),
                ):
                    if case in a.only:
                        measured(record, case, caller, there, a)
    if "malformed" in a.only and a.malformed:
        with setting(16) as there, record.measuring(case="malformed"):
            record.add({"record": "case", "case": "malformed", **refused(there, a.malformed)})


def main(arguments: Sequence[str] | None = None, path: Path | None = None) -> None:
    """Measure the cases, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="most queries of a row")
    parser.add_argument("--seconds", type=float, default=60.0, help="most seconds of a row")
    parser.add_argument("--load", type=float, default=0.5, help="arrivals over the rate of the closed row")
    parser.add_argument("--malformed", type=int, default=1000, help="requests")
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES, help="some of the cases")
    a = parser.parse_args(arguments)
    record = Record("cpu", "serve", path=path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _run(record, a)
    finally:
        torch.set_num_threads(threads)
    record.close()


if __name__ == "__main__":
    main()
