"""Hours of resnet50 on a CPU through `weft serve`, beside the same plan in a plain loop.

    python -m benchmarks.serve_soak [--seconds 7200] [--rate 0.7] [--budget 90]

Poisson arrivals at `--rate`, drawn before the run, come to `weft serve` over HTTP with binary tensors (batch 1, 600 KB
a query), and half of the mean interval later the same ones to a plain loop in a process of its own: both stand under
the same load of the machine at the same time. A latency counts from when a query was due. Every answer is compared, bit
by bit, with what the plan gave before the run (which is compared with the framework); every query has its own
identifier, which its answer must bear; in the end the server's own count of what it answered must be that of what was
asked. Resident memory of each process is read every `SAMPLE_S` (`benchmarks/harness/memory.py`). The record is written
anew every `WINDOW_S`: who interrupts it keeps what was measured.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, as workers have it

import numpy as np
import torch

import weft
from benchmarks.cases.serve_requests import HEADER
from benchmarks.harness.memory import Memory
from benchmarks.harness.record import Record, Row
from benchmarks.models import load
from benchmarks.serve import SEED, Command, Numbers, Setting, command, told
from weft.serve import ServeOptions

IMAGES, CALLERS = 16, 4
WINDOW_S, SAMPLE_S = 600.0, 10.0
LEAD_S = 2.0
"""From the end of the preparations to the first query."""


@dataclass
class Told:
    """What one way to call has come to: seconds from when a query was due to its answer, by when it was due."""

    due: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, due: float, took: float, late: float, right: bool) -> None:
        self.due.append(due)
        self.took.append(took)
        self.late.append(late)
        self.wrong += not right

    def row(self, wall: float) -> Row:
        """Percentiles of the whole, and of each window."""
        windows = []
        for start in np.arange(0, wall, WINDOW_S):
            own = [t for d, t in zip(self.due, self.took, strict=True) if start <= d < start + WINDOW_S]
            if own:
                p50, p99 = np.percentile(own, (50, 99))
                windows.append([len(own), round(float(p50) * 1e3, 1), round(float(p99) * 1e3, 1)])
        late = round(float(np.percentile(self.late, 99)) * 1e3, 3) if self.late else None
        return {**told(self.took, wall), "sent_late_p99_ms": late, "windows": windows, "wrong": self.wrong,
                "errors": len(self.errors), "first_errors": self.errors[:3]}  # fmt: skip


# -- the plain loop


def alone(pipe: Connection, file: Path, options: ServeOptions, images: Numbers, answers: Numbers) -> None:
    """The process of the plain loop: is told when queries are due, and tells what each came to."""
    torch.set_num_threads(1)
    plan = weft.load(file, options=weft.Options(cache_dir=options.cache, threads=1))
    tensors = torch.from_numpy(images)
    plan(tensors[0][None])
    pipe.send("ready")
    began, due = pipe.recv()
    for i, at in enumerate(due):
        if (left := began + at - time.monotonic()) > 0:
            time.sleep(left)
        late = time.monotonic() - began - at
        found = plan(tensors[i % IMAGES][None])
        took = time.monotonic() - began - at
        assert isinstance(found, torch.Tensor)  # one output
        pipe.send((at, took, late, np.array_equal(found.numpy().reshape(-1), answers[i % IMAGES])))
    pipe.send(None)


def taken_in(pipe: Connection, into: Told) -> None:
    while (one := pipe.recv()) is not None:
        into.add(*one)


# -- the server


def caller(there: Setting, port: int, began: float, due: Numbers, todo: queue.SimpleQueue[int], into: Told) -> None:
    """One of those who ask the server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    shape = [1, *there.queries.shape[1:]]
    size = there.queries[0].nbytes
    while (i := todo.get()) >= 0:
        late = time.monotonic() - began - due[i]
        tensor = {"name": "input", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": size}}
        head = {"id": f"query {i}", "inputs": [tensor], "parameters": {"binary_data_output": True}}
        text = json.dumps(head).encode()
        try:
            body = text + there.queries[i % IMAGES].tobytes()
            connection.request("POST", f"/v2/models/{there.model}/infer", body, {HEADER: str(len(text))})
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {data[:200]!r}")
            length = int(response.headers[HEADER])
            found = np.frombuffer(data[length:], np.float32)
            right = json.loads(data[:length]).get("id") == f"query {i}" and there.right(i, found)
        except Exception as error:  # counted
            connection.close()  # the next query opens another one
            into.errors.append(f"{type(error).__name__}: {error}"[:200])
            continue
        into.add(float(due[i]), time.monotonic() - began - float(due[i]), float(late), right)
    connection.close()


def answered(port: int, model: str) -> int:
    """How many queries the server says that it answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/v2/models/{model}/stats")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return int(found["model_stats"][0]["inference_stats"]["success"]["count"])


# -- the run


def prepared(folder: Path, budget_s: float, model: str = "resnet50") -> tuple[Setting, str, float]:
    """Plan, images, what the plan gives for them; which plan it is, and its largest difference from the framework."""
    options = weft.Options(budget_s=budget_s, threads=1, cache_dir=folder / "cache")
    module, inputs = load(model)
    exe = weft.compile(module, inputs, options=options, name=model)
    file = folder / f"{model}.weft"
    exe.save(file)
    shape = tuple(inputs[0].shape[1:])
    images = np.random.default_rng(SEED).standard_normal((IMAGES, *shape)).astype(np.float32)
    plan = weft.load(file, options=weft.Options(cache_dir=options.cache_dir, threads=1))
    found = []
    for x in torch.from_numpy(images):
        y = plan(x[None])
        assert isinstance(y, torch.Tensor)  # one output
        found.append(y.numpy().reshape(-1).copy())
    answers = np.stack(found)
    with torch.no_grad():
        want = module(torch.from_numpy(images)).numpy()
    off = float(np.abs(answers - want).max() / np.abs(want).max())
    if off > 1e-3:
        raise RuntimeError(f"the plan differs from the framework by {off:.3g} of its largest output")
    served = ServeOptions(cache=options.cache_dir, threads=1)
    return Setting(folder, served, (file,), images, answers, model, exact=True), exe.record.chosen, off


def soak(record: Record, there: Setting, server: Command, seconds: float, rate: float, extra: Row) -> None:
    due = np.cumsum(np.random.default_rng(SEED).exponential(1 / rate, int(2 * seconds * rate) + 10))
    due = due[due < seconds]
    here, away = multiprocessing.get_context("spawn").Pipe()
    loop = multiprocessing.get_context("spawn").Process(
        target=alone, args=(away, there.files[0], there.options, there.queries, there.answers), daemon=True
    )
    loop.start()
    assert here.recv() == "ready"
    first = answered(server.port, there.model)
    memories = {
        "worker": Memory(server.child("weft.serve.worker")),
        "front end": Memory(server.child("weft.serve.front")),
        "command": Memory(server.pid),
        "plain loop": Memory(loop.pid or 0),
        "caller": Memory(os.getpid()),
    }
    began = time.monotonic() + LEAD_S
    here.send((began + 0.5 / rate, due))
    ways = {"server": Told(), "plain loop": Told()}
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    threads = [threading.Thread(target=caller, args=(there, server.port, began, due, todo, ways["server"]), daemon=True)
               for _ in range(CALLERS)]  # fmt: skip
    threads.append(threading.Thread(target=taken_in, args=(here, ways["plain loop"]), daemon=True))
    for t in threads:
        t.start()

    def write(wall: float, sent: int) -> None:
        for case, one in ways.items():
            record.add({"record": "case", "case": case, "rate": rate, "hours": round(wall / 3600, 3), "asked": sent,
                        **one.row(wall), **extra})  # fmt: skip
        for case, memory in memories.items():
            record.add({"record": "case", "case": f"memory: {case}", **memory.row()})
        one = ways["server"]
        ended = len(one.took) + len(one.errors)
        record.add({"record": "case", "case": "count", "asked": sent, "answers": len(one.took),
                    "errors": len(one.errors), "under_way" if sent < len(due) else "lost": sent - ended,
                    "answered_by_the_server": answered(server.port, there.model) - first,
                    "processes_died": sum("died" in x for x in server.lines)})  # fmt: skip

    sampled = written = began
    for i, at in enumerate(due):
        if (left := began + at - time.monotonic()) > 0:
            time.sleep(left)
        todo.put(i)
        now = time.monotonic()
        if now - sampled >= SAMPLE_S:
            sampled = now
            for memory in memories.values():
                memory.sample(now - began)
        if now - written >= WINDOW_S:
            written = now
            write(now - began, i + 1)
    for _ in range(CALLERS):
        todo.put(-1)
    for t in threads:
        t.join(600)
    loop.join(60)
    write(seconds, len(due))


def main(arguments: Sequence[str] | None = None, path: Path | None = None) -> None:
    """Serve for as long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--rate", type=float, default=0.7, help="arrivals a second")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of tuning")
    parser.add_argument("--model", default="resnet50", help="of benchmarks/models")
    a = parser.parse_args(arguments)
    record = Record("cpu", "serve-soak", path=path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as text:
            there, chosen, off = prepared(Path(text), a.budget, a.model)
            with command(there) as server:
                soak(record, there, server, a.seconds, a.rate, {"plan": chosen, "error": off})
    finally:
        torch.set_num_threads(threads)
    record.close()


if __name__ == "__main__":
    main()
