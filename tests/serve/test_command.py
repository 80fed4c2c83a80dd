"""`weft serve` as it is started: processes that are killed, signals, and the client of another server."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from benchmarks.cases.serve_requests import Answer, Request, good, send
from tests.serve.conftest import Saved

ROOT = Path(__file__).parents[2]
pytest.importorskip("fastapi", reason="the extra weft[serve] is not installed")
pytest.importorskip("grpc", reason="the extra weft[serve] is not installed")
BODY = json.dumps(good()).encode()


def alive(port: int) -> bool:
    try:
        return send(port, Request(method="GET", path="/v2/health/live"), timeout_s=5).status == 200
    except OSError:
        return False


class Running:
    """The command, and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self._read, args=(process.stderr,))
        self.thread.start()
        self.wait_for(lambda: any("ready" in x for x in self.lines) or process.poll() is not None)
        ports = re.findall(r"127\.0\.0\.1:(\d+)", " ".join(self.lines))
        self.http, self.grpc = map(int, ports[:2]) if len(ports) > 1 else (0, 0)

    def _read(self, stream: IO[str]) -> None:
        self.lines += stream

    def wait_for(self, what: object, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not what():  # type: ignore[operator]
            assert time.monotonic() < end, f"it never came: {self.lines}"
            time.sleep(0.05)

    def ask(self) -> Answer:
        return send(self.http, Request(BODY), timeout_s=60)

    def children(self, module: str) -> list[int]:
        found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        rows = [x.split(None, 2) for x in found.splitlines()[1:]]
        mine = {str(self.process.pid)}
        for _ in range(4):
            mine |= {r[0] for r in rows if r[1] in mine}
        return [int(r[0]) for r in rows if r[0] in mine and len(r) > 2 and module in r[2]]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def started(saved: Saved, *arguments: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "weft", "serve", *arguments, "--port", "0", "--grpc-port", "0"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "WEFT_CACHE_DIR": str(saved.cache)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environ) as p:
        running = Running(p)
        try:
            yield running
        finally:
            if p.poll() is None:
                running.end()
            running.thread.join(60)


@pytest.mark.slow
def test_processes_that_are_killed_come_back(saved: Saved) -> None:
    with started(saved, f"mlp={saved.one},{saved.eight}", "--threads", "1") as running:
        want = json.loads(running.ask().body)["outputs"]
        (worker,) = running.children("weft.serve.worker")
        os.kill(worker, signal.SIGKILL)
        assert json.loads(running.ask().body)["outputs"] == want
        (front,) = running.children("weft.serve.front")
        os.kill(front, signal.SIGKILL)
        running.wait_for(lambda: sum("ready" in x for x in running.lines) == 2)
        assert json.loads(running.ask().body)["outputs"] == want
        assert running.children("weft.serve.worker") != [worker]
        os.kill(running.process.pid, signal.SIGKILL)  # the others end with it
        running.wait_for(lambda: not alive(running.http), 60)
        assert "the front end died and is started again" in "".join(running.lines)


@pytest.mark.slow
def test_a_front_end_that_stands_by_serves_what_was_served(saved: Saved, tmp_path: Path) -> None:
    file = tmp_path / "m.weft"
    shutil.copy(saved.eight, file)
    given = [f"mlp={file}", f"gone={saved.one}", "--threads", "1", "--standby"]
    with started(saved, *given) as running:

        def stood_by() -> int:
            return sum("stands by" in x for x in running.lines)

        first = json.loads(running.ask().body)["outputs"]
        running.wait_for(lambda: stood_by() == 1, 240)
        fresh = tmp_path / "fresh.weft"
        shutil.copy(saved.other, fresh)
        os.replace(fresh, file)
        for path in ("mlp/load", "gone/unload"):
            before = stood_by()
            answer = send(running.http, Request(b"{}", path=f"/v2/repository/models/{path}"), timeout_s=240)
            assert answer.status == 200
        want = json.loads(running.ask().body)["outputs"]
        assert want != first
        running.wait_for(lambda: stood_by() > before, 240)  # another one, without the model that was unloaded
        front = min(running.children("weft.serve.front"))  # the first that was started
        os.kill(front, signal.SIGKILL)
        assert json.loads(running.ask().body)["outputs"] == want
        assert "the front end died, and the one that stood by serves" in "".join(running.lines)
        gone = json.dumps(good()).encode()
        assert send(running.http, Request(gone, path="/v2/models/gone/infer"), timeout_s=60).status == 503
        assert running.end() == 0
        running.wait_for(lambda: not running.children("weft.serve.front"))


def test_a_command_that_cannot_serve_says_why(saved: Saved, tmp_path: Path) -> None:
    with started(saved, str(tmp_path / "none.weft")) as running:
        assert running.process.wait(60) == 3
        assert "it cannot be opened" in "".join(running.lines)


@pytest.mark.slow
def test_a_signal_drains(saved: Saved) -> None:
    with started(saved, f"mlp={saved.eight}", "--max-queue-delay", "1500", "--threads", "1") as running:
        answers: list[Answer] = []
        threads = [threading.Thread(target=lambda: answers.append(running.ask())) for _ in range(4)]
        for t in threads:
            t.start()
        time.sleep(0.5)
        assert running.end() == 0
        for t in threads:
            t.join()
        assert [a.status for a in answers] == [200] * 4


def client() -> str | None:
    """A Python that has the client: this one, or that of the environment that `tools/setup.sh` makes."""
    if importlib.util.find_spec("tritonclient") and importlib.util.find_spec("geventhttpclient"):
        return sys.executable
    there = ROOT / ".venv-client" / "bin" / "python"
    return str(there) if there.exists() else None


@pytest.mark.skipif(
    client() is None, reason="tritonclient[http,grpc] is not installed: tools/setup.sh makes .venv-client"
)
def test_the_client_of_triton_works_unchanged(saved: Saved) -> None:
    from weft.serve import Server
    from weft.serve.access import FrontOptions
    from weft.serve.front import Front, listen

    options = FrontOptions(port=0, grpc_port=0)
    with (
        Server({"mlp": [saved.one, saved.eight]}, saved.options(isolated=False)) as server,
        listen(options) as listening,
    ):
        front = Front(server, options, listening)
        front.start()
        program = [str(client()), str(Path(__file__).with_name("client.py")), str(front.port), str(front.grpc_port)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
        front.stop()
    assert done.stdout.strip() == "fine", done.stderr
