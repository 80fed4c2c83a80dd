"""`weft.serve` on a local cluster of Ray: `python ray_cluster.py CACHE PLAN[,PLAN...]`. Prints `fine`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve

from weft.serve import ServeOptions
from weft.serve.errors import RequestError, UnknownModelError
from weft.serve.ray_serve import application


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)


def ask(port: int, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data), timeout=60) as r:
            return r.status, json.loads(r.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def replicas() -> dict[str, Any]:
    """Those of the deployment that live, by name. Asked of the cluster: not every container shows titles in /proc."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return {
        one["name"]: ray.get_actor(one["name"], namespace=one["namespace"])
        for one in named
        if one["name"].startswith("SERVE_REPLICA::")
    }


def process(replica: Any) -> int:
    """Its process."""
    return int(ray.get(replica.__ray_call__.remote(lambda _: os.getpid()), timeout=60))


def main() -> None:
    cache, files = Path(sys.argv[1]), sys.argv[2].split(",")
    port = free_port()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = ServeOptions(cache=cache, threads=1, isolated=False, max_delay_s=0.05)
    handle = serve.run(
        application({"mlp": files}, options, num_replicas=2, ray_actor_options={"num_cpus": 0.5}), route_prefix="/"
    )
    alone = [handle.submit.remote(rows(1 + i % 3, i)).result(timeout_s=120)[0] for i in range(6)]
    waiting = [(i, handle.submit.remote(rows(1 + i % 3, i))) for i in range(120)]
    for i, one in waiting:
        (y,) = one.result(timeout_s=120)
        assert y.shape == (1 + i % 3, 4)
        assert i >= 6 or np.allclose(y, alone[i], atol=1e-5)
    for bad, kind, told in (
        ({"inputs": rows(1, 0)[:, :3]}, RequestError, "has shape"),
        ({"inputs": rows(1, 0), "model": "none"}, UnknownModelError, "no model 'none'"),
    ):
        with pytest.raises(kind, match=told):
            handle.submit.remote(**bad).result(timeout_s=120)
    x = rows(2, 1)
    tensor = {"name": "input", "shape": [2, 16], "datatype": "FP32", "data": x.reshape(-1).tolist()}
    status, answer = ask(port, "/v2/models/mlp/infer", {"id": "7", "inputs": [tensor]})
    assert status == 200 and answer["id"] == "7", answer
    assert np.allclose(np.reshape(answer["outputs"][0]["data"], (2, 4)), alone[1], atol=1e-5)
    assert ask(port, "/v2/models/mlp/infer", {"inputs": []})[0] == 400
    assert ask(port, "/v2/repository/models/mlp/load", {})[0] == 400
    counts = [ask(port, "/v2/models/mlp/stats")[1]["model_stats"][0] for _ in range(20)]
    shared = min(c["execution_count"] / c["inference_count"] for c in counts if c["inference_count"])
    assert shared < 0.6, shared  # queries shared runs
    mine, end = replicas(), time.monotonic() + 60
    while len(mine) < 2:  # the second may still be starting
        assert time.monotonic() < end, mine
        time.sleep(0.05)
        mine = replicas()
    ended = min(mine)
    os.kill(process(mine[ended]), signal.SIGKILL)
    end, right = time.monotonic() + 120, 0
    while right < 40 or len(replicas().keys() - {ended}) < 2:
        assert time.monotonic() < end, "no other replica came"
        try:
            (y,) = handle.submit.remote(rows(2, 1)).result(timeout_s=60)
        except ray.exceptions.RayError:
            continue  # it was at the replica that died
        assert np.allclose(y, alone[1], atol=1e-5)
        right += 1
    serve.shutdown()
    ray.shutdown()
    print("fine")  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
