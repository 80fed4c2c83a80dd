"""Executables on another GPU than the first, and made in unusual modes, on real GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.small_networks import network

import weft
from weft.options import Options
from weft.runtime.cuda_executable import CudaExecutable
from weft.torch_backend import Backend, Region

pytestmark = pytest.mark.gpu
BUDGET_S = 20.0


def near(found: object, want: torch.Tensor) -> None:
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.float(), want.float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("named", ["cuda:1", "cuda"])
def test_the_second_gpu(named: str, shared_cache: Path, tmp_path: Path) -> None:
    """Named while the first is current, or current itself; the model lies on the first."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    module, inputs = network("transformer", torch.float16)
    second = torch.device("cuda", 1)
    with torch.no_grad():
        want = module(*inputs)
    there = tuple(x.to(second) for x in inputs)
    options = Options(device=named, budget_s=BUDGET_S, cache_dir=shared_cache)
    with torch.cuda.device(1 if named == "cuda" else 0):
        compiled = weft.compile(module, there, options=options)
    exe = compiled.executable
    assert isinstance(exe, CudaExecutable) and exe.device == second and torch.cuda.current_device() == 0
    near(compiled(*there).to("cuda:0"), want)
    side = torch.cuda.Stream(second)
    with torch.cuda.stream(side):
        (y,) = exe(*there)
    side.synchronize()
    near(y.to("cuda:0"), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1):
        with torch.cuda.graph(graph):
            (z,) = exe(*there)
        z.zero_()
        graph.replay()
        torch.cuda.synchronize()
    near(z.to("cuda:0"), want)
    compiled.save(tmp_path / "plan.weft")
    with torch.cuda.device(1):
        loaded = weft.load(tmp_path / "plan.weft", options=options)
    near(loaded(*there).to("cuda:0"), want)
    assert torch.cuda.current_device() == 0


def test_what_is_compiled_in_inference_mode_is_called_outside(shared_cache: Path) -> None:
    module, inputs = network("cnn", torch.float16)
    options = Options(device="cuda", budget_s=BUDGET_S, cache_dir=shared_cache)
    with torch.inference_mode():
        compiled = weft.compile(module, inputs, options=options)
        want = module(*inputs)
    fresh = tuple(x.detach().clone().requires_grad_() for x in inputs)
    for _ in range(2):
        near(compiled(*fresh), want)
        near(compiled.executable(*fresh)[0], want)
    executable = compiled.executable
    assert isinstance(executable, CudaExecutable)
    assert not any(x.requires_grad for x in executable.static_inputs)


@pytest.mark.parametrize("budget_s", [0.0, BUDGET_S])
def test_what_becomes_of_the_model_does_not_matter(budget_s: float, shared_cache: Path) -> None:
    """Without a budget eager mostly wins: its graph must not hold memory that the model has given back."""
    module, inputs = network("cnn", torch.float16)
    with torch.no_grad():
        want = module(*inputs)
    compiled = weft.compile(module, inputs, options=Options(device="cuda", budget_s=budget_s, cache_dir=shared_cache))
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    module.train().cpu()
    torch.cuda.empty_cache()
    held = [torch.full((1 << 22,), float("nan"), device="cuda", dtype=torch.float16) for _ in range(64)]
    near(compiled(*inputs), want)
    near(compiled.executable(*inputs)[0], want)
    del held


def test_autocast_is_that_of_the_compilation(shared_cache: Path) -> None:
    module, x = torch.nn.Linear(256, 256).cuda().eval(), torch.randn(64, 256, device="cuda")
    options = Options(device="cuda", budget_s=BUDGET_S, cache_dir=shared_cache)
    plain = weft.compile(module, x, options=options)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        want = module(x)
        mixed = weft.compile(module, x, options=options)
        inside = plain(x)
    assert isinstance(inside, torch.Tensor) and inside.dtype is torch.float32
    torch.testing.assert_close(inside, torch.nn.functional.linear(x, module.weight, module.bias).detach())
    outside = mixed(x)
    assert isinstance(outside, torch.Tensor) and outside.dtype is torch.bfloat16
    near(outside, want)


def test_torch_compile_takes_attention_as_one_kernel(shared_cache: Path) -> None:
    """Its graphs name the GPU by number, for which what only GPUs have was not looked for."""
    regions: list[Region] = []
    q, k, v = (torch.randn(4, 8, 512, 64, device="cuda", dtype=torch.float16) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax((q @ k.transpose(-1, -2)) * 0.125, -1) @ v

    torch._dynamo.reset()
    backend = Backend(Options(budget_s=30.0, cache_dir=shared_cache), on_region=regions.append)
    with torch.no_grad():
        near(torch.compile(attend, backend=backend)(q, k, v), attend(q.float(), k.float(), v.float()))
    (region,) = regions
    assert region.fallback == ""
    linked = region._linked
    assert linked is not None
    cells = [c.cell_contents for c in getattr(linked.run, "__closure__", None) or ()]
    (exe,) = [c for c in cells if isinstance(c, CudaExecutable)]
    assert exe.kernels == 1, [str(s.kernel.schedule) for s in exe.plan.steps]
