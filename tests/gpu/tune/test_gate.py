"""On a GPU: what would end its use for this process is refused where it harms nobody."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import final

import pytest
import torch
from benchmarks.gpu_faults import MULTIPLY, Bench, problem

import weft
from benchmarks import gpu_trust
from weft.generate.library import attention_call
from weft.kernels.measurement import Verdict
from weft.tune.tuner import ProblemTrial

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["mask broadcast", "relative bias", "odd heads", "window per head"])
def test_attention_models_are_right_and_this_process_lives(name: str, batch: int, shared_cache: Path) -> None:
    _, dtype = gpu_trust.MODELS[name]
    model, given = gpu_trust.made(name, batch, tokens=256)
    exact = model.cuda().double()
    with torch.no_grad():
        want = exact(*[x.cuda() for x in gpu_trust.as_type(given, torch.float64)])
        model, inputs = exact.to(dtype), [x.cuda() for x in gpu_trust.as_type(given, dtype)]
        theirs = gpu_trust.error(model(*inputs), want)
    for budget_s in (0.0, 30.0):  # a third of it is what a worker may take to be ready, beside other tests
        options = weft.Options(device="cuda", budget_s=budget_s, cache_dir=shared_cache)
        got = weft.compile(model, inputs, options=options)(*inputs)
        assert isinstance(got, torch.Tensor)
        assert gpu_trust.is_right(gpu_trust.error(got, want), theirs, dtype)
    assert gpu_trust.lives()


def test_a_call_that_ends_the_use_of_the_gpu_costs_a_worker_and_nobody_else(shared_cache: Path) -> None:
    bad = gpu_trust.broken("index outside", 1, MULTIPLY)

    def trials() -> Iterator[ProblemTrial]:
        kernels = [(bad.schedule, bad, None), (MULTIPLY.schedule, MULTIPLY, None)]
        yield ProblemTrial(problem("outside"), kernels, timed=False)

    with Bench.here(shared_cache).tuner() as tuner:
        found = {m.schedule: m for m in tuner.measure(trials())}
    assert found[bad.schedule].verdict in (Verdict.CRASH, Verdict.POISONED)
    assert found[MULTIPLY.schedule].verdict is Verdict.OK and not found[MULTIPLY.schedule].samples_us
    assert gpu_trust.lives()


def test_a_kernel_of_attention_that_the_framework_would_not_take_is_not_run() -> None:
    q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.float16)
    turned = q.transpose(-1, -2).contiguous().transpose(-1, -2)  # the last dimension has a stride
    for name in ("flash", "efficient"):
        with pytest.raises(RuntimeError, match=f"would not take {name} attention"):
            attention_call.attention(name, turned, turned, turned, None, causal=False, scale=None)
    taken = 0
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), q.float(), q.float())
    for name in attention_call.BACKENDS:
        try:
            got = attention_call.attention(name, q, q, q, None, causal=False, scale=None)
        except RuntimeError:
            continue  # this GPU has no such kernel
        taken += 1
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
    assert taken
    assert gpu_trust.lives()


@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, 3), (torch.float16, 4), (torch.bfloat16, 1)])
def test_attention_of_operands_that_its_kernels_cannot_load(dtype: torch.dtype, by: int) -> None:
    """They are copied: the framework's own questions let some of them pass, and the GPU is lost."""
    chance = torch.Generator().manual_seed(by)

    def operand(*shape: int) -> torch.Tensor:
        room = torch.randn(math.prod(shape) + by, generator=chance).to("cuda", dtype)
        return room[by:].view(shape)

    q, k, v = operand(5, 2, 16, 64), operand(5, 2, 24, 64), operand(5, 2, 24, 64)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    found = [attention_call.composed(q, k, v)]
    for name in attention_call.BACKENDS:
        with contextlib.suppress(RuntimeError):  # this GPU has no such kernel for the type
            found.append(attention_call.attention(name, q, k, v, None, causal=False, scale=None))
    assert len(found) >= 2
    for got in found:
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
    assert gpu_trust.lives()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_with_a_mask_that_begins_anywhere(dtype: torch.dtype) -> None:
    """Cut out of a larger one whose strides the framework does not pad."""
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=chance).to("cuda", dtype) for n in (5, 6, 6))
    mask = torch.randn(7, 8, generator=chance).to("cuda", dtype)[1:6, 1:7]
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double())
    got = attention_call.composed(q, k, v, mask)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
    assert gpu_trust.lives()


@final
class Copied(torch.nn.Module):
    """Makes the operands of its attention dense, as a model must whose framework cannot read them."""

    def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        k, v = (kv[..., at : at + 32].clone(memory_format=torch.contiguous_format) for at in (1, 35))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_copy_that_the_graph_does_not_have_is_made_for_attention(dtype: torch.dtype, shared_cache: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(3, 2, 48, n, generator=chance).to("cuda", dtype) for n in (32, 70))
    want = Copied()(q.double(), kv.double())
    theirs = gpu_trust.error(Copied()(q, kv), want)
    for budget_s in (0.0, 20.0):
        options = weft.Options(device="cuda", budget_s=budget_s, cache_dir=shared_cache)
        got = weft.compile(Copied(), (q, kv), options=options)(q, kv)
        assert isinstance(got, torch.Tensor)
        assert gpu_trust.is_right(gpu_trust.error(got, want), theirs, dtype)
    assert gpu_trust.lives()
