"""What users touch, on a real GPU: `torch.compile(backend="weft")` and the command line."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.gpu.conftest import Tell
from tests.gpu.small_networks import Cnn, Transformer
from torch import nn

import weft
from weft.errors import DeviceError, OptionError
from weft.torch_backend.backend import register, weft_backend_with
from weft.torch_backend.engine import compiling_engine
from weft.torch_backend.region import Region

pytestmark = pytest.mark.gpu
SOURCE = Path(weft.__file__).parent.parent


@pytest.fixture
def regions(shared_cache: Path) -> Any:
    """A backend with a small budget, and what it made of each region."""
    seen: list[Region] = []
    options = weft.Options(device="cuda", budget_s=30.0, cache_dir=shared_cache)
    backend = weft_backend_with(compiling_engine, options)
    object.__setattr__(backend, "on_region", seen.append)
    torch.compiler.reset()
    yield backend, seen
    torch.compiler.reset()


def test_torch_compile_for_inference_and_a_second_shape(regions: Any) -> None:
    backend, seen = regions
    torch.manual_seed(0)
    module = Transformer().eval().cuda()
    compiled = torch.compile(module, backend=backend, dynamic=False)
    with torch.no_grad():
        for batch in (2, 3, 2):
            x = torch.randn(batch, 32, 64, device="cuda")
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
    assert len(seen) == 2 and not any(r.fallback for r in seen), [r.fallback for r in seen]


def test_torch_compile_for_training(regions: Any) -> None:
    """Compiled or left to eager, the losses and gradients are eager's."""
    backend, seen = regions
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend=backend)
    x, y = torch.randn(16, 32, device="cuda"), torch.randn(16, 8, device="cuda")
    for step in range(3):
        losses = []
        for model, own in ((eager, eager), (compiled, module)):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                for p in own.parameters():
                    assert p.grad is not None
                    p.sub_(0.05 * p.grad)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=partial("{}: {}".format, step))
        eager.zero_grad()
        module.zero_grad()
    assert {r.name.rpartition("(")[2] for r in seen} >= {"forward)", "backward)"}


def test_the_backend_by_its_name(shared_cache: Path) -> None:
    register()
    torch.compiler.reset()
    torch.manual_seed(0)
    module = Cnn().eval().half().cuda()
    options: Any = {"budget_s": 0.0, "cache_dir": shared_cache}
    compiled = torch.compile(module, backend="weft", options=options)
    x = torch.randn(1, 3, 64, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-2, atol=1e-2)
    torch.compiler.reset()


# -- the command line


def perceptron(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """y = softmax(relu(x · w) + b) as ONNX; an input, and its output in float64."""
    chance = np.random.default_rng(0)
    w, b = chance.normal(size=(96, 160)).astype(np.float32) / 10, chance.normal(size=160).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="[bold]<script>"),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("Add", ["r", "b"], ["a"]),
        helper.make_node("Softmax", ["a"], ["y"], axis=-1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 96])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 160])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    given = chance.normal(size=(64, 96)).astype(np.float32)
    a = np.maximum(given.astype(np.float64) @ w, 0) + b
    e = np.exp(a - a.max(1, keepdims=True))
    return given, e / e.sum(1, keepdims=True)


def command(cache: Path, *arguments: object) -> Any:
    """Run `weft ... --format json` in a process of its own; its output as JSON."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")}
    done = subprocess.run(
        [sys.executable, "-m", "weft", *map(str, arguments), "--format", "json"],
        capture_output=True, text=True, timeout=180, check=False,
        env={**environ, "WEFT_CACHE_DIR": str(cache), "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


ENOUGH_S = 30
"""A third of it starts the process that measures: no more is needed on any machine that has a GPU."""


def test_the_command_line(shared_cache: Path, tmp_path: Path, tell: Tell) -> None:
    """Compile, run, time and trace one model."""
    model, plan, x, out = (tmp_path / name for name in ("net.onnx", "net.weft", "x.npy", "y.npz"))
    given, want = perceptron(model)
    np.save(x, given)
    record = command(shared_cache, "compile", model, "--device", "cuda", "--budget", ENOUGH_S, "-o", plan)
    assert record["chosen"] and record["device"] == torch.cuda.get_device_name() and plan.is_file()
    (row,) = command(shared_cache, "run", plan, "--input", x, "-o", out)
    assert row["shape"] == [64, 160]
    got = np.load(out)["arr_0"]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    timed = command(
        shared_cache, "bench", model, "--device", "cuda", "--budget", ENOUGH_S, "--rounds", 5,
        "--against", "eager,onnxruntime",
    )  # fmt: skip
    assert 0 < timed["median_us"]["weft"] < 1e4 and timed["median_us"]["eager"] > 0
    assert "CPU only" in timed["notes"]["onnxruntime"] and "differ" not in timed["notes"]["eager"], timed["notes"]
    tell(f"weft bench --device cuda: {timed['median_us']}")
    trace = tmp_path / "trace.json"
    told = command(shared_cache, "trace", plan, "-o", trace)
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [e for e in events if e["ph"] == "X" and e["cat"] == "kernel"]
    assert kernels and all(e["dur"] > 0 for e in kernels) and "<script>" not in trace.read_text()
    assert told["source"] in ("profiler", "events")
    tell(f"weft trace: {len(kernels)} kernels by {told['source']}, {told['microseconds']:.1f} us")


def test_weft_mlp_as_text(shared_cache: Path, tell: Tell) -> None:
    """What people see, in graphs: a row for each contender, and nothing below it where all is fused."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")}
    done = subprocess.run(
        [sys.executable, "-m", "weft", "mlp", "--widths", "32,32,32,8", "--rows", "4096", "--graph", "--rounds", "3",
         "--against", "eager,cublas", "--activation", "silu,sin,none"],
        capture_output=True, text=True, timeout=120, check=False,
        env={**environ, "WEFT_CACHE_DIR": str(shared_cache), "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert rows[1:] == ["weft", "eager", "cublas"] and "not fused" not in done.stdout, done.stdout
    tell(done.stdout.strip())


def test_a_device_that_is_not_there(shared_cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    perceptron(model)
    for device, error, told in (("cuda:77", DeviceError, "77"), ("tpu", OptionError, "'cpu', 'cuda' or 'cuda:N'")):
        with pytest.raises(error, match=told):
            weft.compile(model, device=device, options=weft.Options(budget_s=0.0, cache_dir=shared_cache))
