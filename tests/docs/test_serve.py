"""The examples of docs/serve.md are run."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
EMBEDDED, ON_RAY, CLIENT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    module = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
    for rows in (1, 8):
        options = weft.Options(budget_s=0, threads=1)
        weft.compile(module, torch.randn(rows, 16), options=options).save(f"mlp-{rows}.weft")
    return module


def test_the_embedded_server(plans: torch.nn.Module) -> None:
    scope: dict[str, Any] = {}
    exec(compile(EMBEDDED, "serve.md", "exec", dont_inherit=True), scope)  # noqa: S102 - our own page
    wanted = plans(torch.ones(3, 16)).detach()
    assert torch.allclose(torch.from_numpy(scope["y"]), wanted, atol=1e-5)


def test_replicas(plans: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much of Ray as the example uses, in this process: `tests/serve/test_ray.py` has a cluster."""
    pytest.importorskip("fastapi", reason="the extra weft[serve] is not installed")
    told: dict[str, Any] = {}

    def deployment(**settings: Any) -> Any:
        told.update(settings)
        return lambda kind: SimpleNamespace(bind=kind)

    def run(replica: Any, *, route_prefix: str) -> Any:
        def remote(x: Any) -> Any:
            return SimpleNamespace(result=lambda: asyncio.run(replica.submit(x)))

        told.update(replica=replica, route_prefix=route_prefix)
        return SimpleNamespace(submit=SimpleNamespace(remote=remote))

    serve: Any = ModuleType("ray.serve")
    serve.deployment, serve.run = deployment, run
    ray: Any = ModuleType("ray")
    ray.serve = serve
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    scope: dict[str, Any] = {"x": torch.ones(3, 16).numpy()}
    code = compile(ON_RAY.replace("/plans/", ""), "serve.md", "exec", dont_inherit=True)
    exec(code, scope)  # noqa: S102 - our own page
    assert torch.allclose(torch.from_numpy(scope["y"]), plans(torch.ones(3, 16)).detach(), atol=1e-5)
    assert told["num_replicas"] == 4 and told["max_ongoing_requests"] == 1024 and told["name"] == "weft"
    told["replica"].__del__()


def test_a_client_over_http(plans: torch.nn.Module) -> None:
    pytest.importorskip("fastapi", reason="the extra weft[serve] is not installed")
    pytest.importorskip("uvicorn", reason="the extra weft[serve] is not installed")
    from weft.serve import ServeOptions, Server
    from weft.serve.access import FrontOptions
    from weft.serve.front import Front, listen

    scope: dict[str, Any] = {}
    exec(compile(CLIENT, "serve.md", "exec", dont_inherit=True), scope)  # noqa: S102 - our own page
    options = FrontOptions(port=0, grpc_port=-1)
    files = {"mlp": ["mlp-1.weft", "mlp-8.weft"]}
    with Server(files, ServeOptions(isolated=False)) as server, listen(options) as listening:
        front = Front(server, options, listening)
        front.start()
        found = scope["infer"](f"http://127.0.0.1:{front.port}", [[1.0] * 16] * 3)
        front.stop()
    assert torch.allclose(torch.tensor(found).reshape(3, 4), plans(torch.ones(3, 16)).detach(), atol=1e-5)


def test_every_option_is_one_of_the_command() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for row in re.findall(r"^\| (`--.*?) \|", PAGE, re.MULTILINE):
        for name in re.findall(r"--[a-z-]+", row):
            assert name in shown, name
