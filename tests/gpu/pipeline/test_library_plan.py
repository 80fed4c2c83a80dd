"""The library plan on a real GPU: right, the same in every run, whatever memory held before."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from tests.pipeline.test_library_plan import Attention, Style, Tokens, residual_block
from torch import nn

from weft.frontends.torch import import_exported
from weft.options import Options
from weft.pipeline.untuned import build
from weft.runtime.cuda_executable import CudaExecutable

pytestmark = pytest.mark.gpu
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention, one": (Attention, (1, 24, 64)),
    "attention, several": (Attention, (4, 24, 64)),
    "a factor": (lambda: Attention(96, 4), (2, 24, 96)),
    "residuals": (residual_block, (4, 32, 56, 56)),
    "style": (Style, (2, 3, 64, 64)),
    "tokens": (Tokens, (4, 256, 32)),
}


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, torch.Tensor, CudaExecutable]:
    """The module in float64 and in the type, an input, the plan."""
    make, shape = MODULES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        exact = make().eval().requires_grad_(False)
        for p in exact.parameters():
            nn.init.normal_(p, std=1 / math.sqrt(max(p[0].numel(), 1)))
    module = copy.deepcopy(exact).to("cuda", dtype)
    exact = copy.deepcopy(module).double()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to("cuda", dtype)
    program = torch.export.export(module, (x,))
    found = build(import_exported(program, device="cuda"), Options(device="cuda", budget_s=0), ("library",))
    plan = found.executables["library"]
    assert isinstance(plan, CudaExecutable)
    return exact, module, x, plan


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_as_right_as_the_framework(name: str, dtype: torch.dtype) -> None:
    exact, module, x, plan = made(name, dtype)
    want, eager, (got,) = exact(x.double()), module(x), plan(x)
    theirs, mine = ((y.double() - want).square().mean().sqrt() for y in (eager, got))
    unit = torch.finfo(dtype).eps * want.square().mean().sqrt()
    assert mine <= 1.5 * theirs + unit, f"{float(mine):.3g}, the framework's {float(theirs):.3g}"


@pytest.mark.parametrize("name", MODULES)
def test_the_same_bits_in_every_run_while_others_take_memory(name: str) -> None:
    _, _, x, plan = made(name, torch.float16)
    assert plan._held, "some values are kept as the framework made them"
    first = plan(x)[0].clone()
    side = torch.cuda.Stream()
    for turn in range(10):
        junk = [torch.full((1 << 18,), math.nan, device="cuda") for _ in range(turn)]
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            again = plan(x)[0]
        torch.cuda.synchronize()
        assert torch.equal(again, first)
        del junk


@pytest.mark.parametrize("name", MODULES)
def test_inside_of_a_callers_own_graph(name: str) -> None:
    _, _, x, plan = made(name, torch.float16)
    want = plan(x)[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (got,) = plan(x)
    torch.cuda.empty_cache()
    for _ in range(3):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_fused_convolution_reads_nothing_of_what_its_memory_held(
    dtype: torch.dtype, memory_format: torch.memory_format, residual: bool
) -> None:
    """The framework gives cuDNN the result's own memory for a residual that there is none of, by a factor of 0."""
    draw = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(2, 64, 28, 28, device="cuda", generator=draw).to(dtype, memory_format=memory_format)
    w = (torch.randn(96, 64, 3, 3, device="cuda", generator=draw) / 24).to(dtype, memory_format=memory_format)
    bias = torch.randn(96, device="cuda", generator=draw).to(dtype)
    z = torch.randn(2, 96, 28, 28, device="cuda", generator=draw).to(dtype, memory_format=memory_format)
    want = nn.functional.conv2d(x.double(), w.double(), bias.double(), padding=1) + (z.double() if residual else 0.0)
    for junk in (math.nan, math.inf):
        held = torch.full_like(z, junk)
        place = held.data_ptr()
        del held
        common = (1, 1), (1, 1), (1, 1), 1
        if residual:
            got = torch.ops.aten.cudnn_convolution_add_relu(x, w, z, 1.0, bias, *common)
        else:
            got = torch.ops.aten.cudnn_convolution_relu(x, w, bias, *common)
        assert got.data_ptr() == place, "the test wants the memory that it spoilt"
        torch.testing.assert_close(got.double(), want.relu(), rtol=2e-2, atol=2e-2)
