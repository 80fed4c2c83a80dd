"""What a module keeps between calls: memory that several streams use, and nothing that its caller has let go."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tests.nn import emulation
from tests.nn.emulation import launched
from torch import nn

from weft.nn import FusedMLP, fused_mlp


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation.install(monkeypatch)


def test_weights_of_a_functional_call_are_let_go(device: None) -> None:
    net = FusedMLP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).half()).requires_grad_(False)
    x = torch.randn(5, 8).half()
    for trained in (False, True):
        others = {k: torch.randn_like(p).requires_grad_(trained) for k, p in net.named_parameters()}
        launched.clear()
        y = torch.func.functional_call(net, others, (x,))
        assert launched
        left = [weakref.ref(p) for p in others.values()]
        wanted = nn.functional.linear(x, others["0.weight"], others["0.bias"]).relu()
        wanted = nn.functional.linear(wanted, others["2.weight"], others["2.bias"])
        torch.testing.assert_close(y, wanted, rtol=1e-2, atol=2e-2)
        del others, wanted, y
        gc.collect()
        assert [r() for r in left] == [None] * len(left)
    torch.testing.assert_close(net(x), nn.Sequential(*net)(x), rtol=1e-2, atol=2e-2)


def test_other_weights_at_the_same_places_are_read(device: None) -> None:
    """A tensor that is gone may have left its address, and its version, to another one."""
    net = FusedMLP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).half()).requires_grad_(False)
    x, memory = torch.randn(5, 8).half(), {k: p.clone() for k, p in net.named_parameters()}
    for _ in range(3):
        others = {k: m.view(m.shape).detach() for k, m in memory.items()}
        found = torch.func.functional_call(net, others, (x,))
        wanted = torch.func.functional_call(nn.Sequential(*net), others, (x,))
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-2)
        del others
        for m in memory.values():
            m.data.mul_(-0.5)


@pytest.mark.slow
def test_memory_that_is_kept_is_known_to_every_stream(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(SimpleNamespace):
        def wait_stream(self, other: Stream) -> None:
            waits.append((self.cuda_stream, other.cuda_stream))

    waits: list[tuple[int, int]] = []
    used: dict[int, set[int]] = {}
    now = Stream(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now)
    monkeypatch.setattr(fused_mlp, "stream", lambda: now.cuda_stream)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, s: used.setdefault(self.data_ptr(), set()).add(s.cuda_stream)
    )
    net = FusedMLP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).half())
    x = torch.randn(5, 8).half()
    net(x).sum().backward()
    (run,) = net._images._runs.values()
    assert isinstance(run, fused_mlp._Run) and not used
    own = {t.data_ptr() for t in run._own()}
    assert len(own) >= 3  # images for both passes, and what lies between kernels
    now = Stream(cuda_stream=7)
    net(x).sum().backward()
    assert waits == [(7, 0)] and used == {at: {7} for at in own}
    net(x).sum().backward()
    assert waits == [(7, 0)] and used == {at: {7} for at in own}
