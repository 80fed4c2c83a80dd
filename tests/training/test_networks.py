"""Whole networks: many compiled steps beside the loop's, losses inside what eager's seeds spread over."""

from __future__ import annotations

import copy
import math
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.options import Options
from weft.training import compile_step

UNTUNED = Options(budget_s=0)
SEEDS = 5


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.layers(self.words(x)).mean(1))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over, self.last = nn.LSTM(4, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.over(x)[0][:, -1])


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _drawn(kind: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch number k of a task that can be learnt."""
    g = torch.Generator().manual_seed(1000 + k)
    if kind == "encoder":
        x = torch.randint(0, 12, (16, 6), generator=g)
        return x, (x == 1).sum(1).clamp(max=2)
    if kind == "convolutions":
        images = torch.randn(16, 1, 8, 8, generator=g)
        return images, torch.stack([images[:, 0, :4].sum((1, 2)), images[:, 0, 4:].sum((1, 2))]).argmax(0)
    shape = (16, 5, 4) if kind == "recurrent" else (16, 4)
    x = torch.randn(shape, generator=g)
    return x, x.reshape(16, -1)[:, -3:].argmax(1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer], int]] = {
    "mlp": (_mlp, lambda p: torch.optim.AdamW(p, 3e-3), 300),
    "convolutions": (_convolutions, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-4), 100),
    "encoder": (_Encoder, lambda p: torch.optim.Adam(p, 2e-3), 60),
    "recurrent": (_Recurrent, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), 100),
}


def _model(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def _last(losses: list[float]) -> float:
    return sum(losses[-30:]) / 30


def _by_eager(name: str, seed: int) -> float:
    make, optimizer_of, steps = NETWORKS[name]
    model = _model(make, seed)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for k in range(steps):
        x, t = _drawn(name, k)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _last(losses)


def _by_weft(name: str, seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    make, optimizer_of, steps = NETWORKS[name]
    model = _model(make, seed)
    optimizer = optimizer_of(model.parameters())
    step = compile_step(model, nn.CrossEntropyLoss(), optimizer, *_drawn(name, 0), options=UNTUNED)
    losses = [step(*_drawn(name, k)).item() for k in range(steps)]
    return _last(losses), copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_learns_as_with_eager(name: str) -> None:
    eager = [_by_eager(name, seed) for seed in range(SEEDS)]
    found, state = _by_weft(name, 0)
    assert math.isfinite(found)
    assert min(eager) <= found * (1 + 1e-3) and found * (1 - 1e-3) <= max(eager), (found, eager)
    again, same = _by_weft(name, 0)
    assert found == again
    assert all(torch.equal(x, same[n]) for n, x in state.items())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _distributed(rank: int, port: int, results: Any) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import weft  # noqa: F401

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        losses: dict[str, list[float]] = {}
        for kind in ("eager", "weft"):
            model = DistributedDataParallel(_model(_mlp, 0))
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            options: dict[str, Any] = {"budget_s": 0.0}
            run: Any = model if kind == "eager" else torch.compile(model, backend="weft", options=options)
            losses[kind] = []
            for k in range(6):
                x, t = _drawn("mlp", 2 * k + rank)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(run(x), t)
                loss.backward()
                optimizer.step()
                losses[kind].append(loss.item())
            losses[kind] += [p.detach().sum().item() for p in model.parameters()]
        results.put((rank, losses))
    finally:
        dist.destroy_process_group()


def test_two_processes_with_gloo() -> None:
    context = torch.multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    port = _free_port()
    processes = [context.Process(target=_distributed, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=500) for _ in processes)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    for losses in found.values():
        assert losses["weft"] == pytest.approx(losses["eager"], rel=1e-4, abs=1e-5)
    weights = [found[rank]["weft"][6:] for rank in range(2)]
    assert weights[0] == weights[1]  # the gradients were averaged: both have the same weights
    assert found[0]["weft"][:6] != found[1]["weft"][:6]
