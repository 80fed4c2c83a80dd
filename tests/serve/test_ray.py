"""The server on Ray Serve: a replica by itself, and two of them in a local cluster."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.serve.conftest import Saved

from weft.errors import OptionError
from weft.serve.errors import OverloadedError, RequestError, UnavailableError
from weft.serve.ray_serve import Replica, application

ROOT = Path(__file__).parents[2]


def with_ray() -> str | None:
    """A Python that has Ray Serve and Weft: this one, or that of the environment that `tools/setup.sh` makes."""
    if importlib.util.find_spec("ray") and importlib.util.find_spec("ray.serve"):
        return sys.executable
    there = ROOT / ".venv-ray" / "bin" / "python"
    return str(there) if there.exists() else None


@pytest.mark.slow
@pytest.mark.skipif(with_ray() is None, reason="ray[serve] is not installed: tools/setup_ray.sh makes .venv-ray")
def test_replicas_in_a_local_cluster(saved: Saved, tmp_path: Path) -> None:
    program = [str(with_ray()), str(Path(__file__).with_name("ray_cluster.py")), str(saved.cache)]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp"}
    done = subprocess.run(
        [*program, f"{saved.one},{saved.eight}"], capture_output=True, text=True, timeout=400, check=False, env=environ
    )
    assert done.stdout.strip().endswith("fine"), done.stderr[-4000:]


class Asked:
    """As much of a request as an application of ASGI reads."""

    def __init__(self, method: str, path: str, body: bytes = b"") -> None:
        self.scope: dict[str, Any] = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
            "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
        }  # fmt: skip
        self._body: bytes | None = body

    async def receive(self) -> dict[str, Any]:
        if self._body is None:  # nobody hangs up
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def test_a_replica_answers_queries_and_http(saved: Saved) -> None:
    pytest.importorskip("fastapi", reason="the extra weft[serve] is not installed")
    replica = Replica({"mlp": [saved.one, saved.eight]}, saved.options(isolated=False, max_delay_s=0.02))
    x = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
    want = saved.answer("mlp", x)[0]

    async def ask() -> None:
        found = await asyncio.gather(*[replica.submit(x[i % 2 : i % 2 + 1]) for i in range(32)])
        for i, (y,) in enumerate(found):
            assert np.allclose(y, want[i % 2 : i % 2 + 1], atol=1e-5)
        with pytest.raises(RequestError, match="has shape"):
            await replica.submit(x[:, :3])
        tensor = {"name": "input", "shape": [2, 16], "datatype": "FP32", "data": x.reshape(-1).tolist()}
        for path, body, status in (
            ("/v2/models/mlp/infer", {"inputs": [tensor]}, 200),
            ("/v2/models/none/infer", {"inputs": [tensor]}, 404),
            ("/v2/repository/models/mlp/unload", {}, 400),
        ):
            answer = await replica(Asked("POST", path, json.dumps(body).encode()))  # type: ignore[arg-type]
            assert answer.status_code == status
            told = json.loads(bytes(answer.body))
            if status == 200:
                assert np.allclose(np.reshape(told["outputs"][0]["data"], (2, 4)), want, atol=1e-5)
                assert dict(answer.headers)["content-type"] == "application/json"
            else:
                assert told["error"]

    asyncio.run(ask())
    counted = replica._server.model("mlp").statistics.snapshot()
    assert sum(b[1].count for b in counted.batches.values()) < 20  # of 33 queries
    replica.check_health()
    replica._server.drain(1.0)
    with pytest.raises(UnavailableError, match="it ends"):
        replica.check_health()
    replica.__del__()


def test_what_no_replica_could_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for models in ({"m": object()}, object(), {"m": []}, {"m": ["a.weft", 1]}):
        with pytest.raises(OptionError, match="is no path: save the model"):
            application(models)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(UnavailableError, match=r"pip install 'weft\[ray\]'"):
        application("m.weft")


def test_an_error_can_be_sent_as_it_is() -> None:
    error = OverloadedError(problem="9 queries wait", retry_after_s=2.5, where="mlp")
    error.add_note("seen in a test")
    again = copy.deepcopy(error)  # by what is sent to another process, too
    assert type(again) is OverloadedError and str(again) == str(error)
    assert again.retry_after_s == 2.5 and again.details == error.details and again.__notes__ == error.__notes__
