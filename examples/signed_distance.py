"""Learn the distance to a surface, with slopes of length one (an Eikonal loss), by modules and by `weft.nn.FusedMLP`.

    python examples/signed_distance.py [--device cuda] [--points 65536] [--steps 500]

The surface is a torus with a sphere beside it, whose distance is known. The loss holds the network's slope, so its
gradient is one of second order: the network and its first derivative run in generated kernels, the second in torch's
operations. On a GPU products are computed in bfloat16, and both ways are trained twice: called from Python step by
step, and as steps that `weft.nn.GraphedStep` records once and replays. Prints errors of distance and slope on new
points.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from weft.nn import FusedMLP, GraphedStep

WARM = 4
"""Steps that do not count."""
RATE = 2e-3
"""At which training begins."""


def distance(at: torch.Tensor) -> torch.Tensor:
    """(n, 3) to (n, 1): negative inside."""
    ring = torch.stack([at[:, :2].norm(dim=1) - 0.5, at[:, 2]], 1).norm(dim=1) - 0.2
    ball = torch.stack([at[:, 0], at[:, 1], at[:, 2] - 0.6], 1).norm(dim=1) - 0.15
    return torch.minimum(ring, ball)[:, None]


def points(count: int, generator: torch.Generator) -> torch.Tensor:
    """Within the cube from -1 to 1."""
    return torch.rand(count, 3, generator=generator, device=generator.device) * 2 - 1


def network(width: int = 64) -> nn.Sequential:
    """Three columns to one, with a smooth activation."""
    sizes = (3, *(width,) * 4, 1)
    layers = [nn.Linear(k, n) for k, n in pairwise(sizes)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.SiLU())][:-1])


def slope(net: nn.Module, at: torch.Tensor, *, record: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(distance, its gradient in space)."""
    at = at.detach().requires_grad_()
    with torch.autocast(at.device.type, torch.bfloat16, enabled=at.is_cuda):
        value = net(at)
    value = value.float()
    (found,) = torch.autograd.grad(value.sum(), at, create_graph=record)
    return value, found


def train(net: nn.Module, count: int, steps: int, device: str, *, graphed: bool = False) -> tuple[float, float, float]:
    """(mean error of the distance, mean error of the slope's length, seconds); `graphed`: steps are replayed."""
    on_gpu = device.startswith("cuda")
    generator = torch.Generator(device).manual_seed(1)
    rate = torch.tensor(RATE, device=device)  # on the device: a recorded step reads it there
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, fused=on_gpu, capturable=on_gpu)

    def loss(at: torch.Tensor) -> torch.Tensor:
        value, gradient = slope(net, at, record=True)
        return (value - distance(at)).abs().mean() + 0.05 * (gradient.norm(dim=1) - 1).square().mean()

    def plain(at: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(at).backward()
        optimizer.step()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    step = GraphedStep(loss, optimizer, warmup=WARM - 1) if graphed else plain
    start = time.perf_counter()
    for number in range(steps + WARM):
        if number == WARM:
            wait()
            start = time.perf_counter()
        rate.fill_(0.5 * RATE * (1 + math.cos(math.pi * number / (WARM + steps))))
        step(points(count, generator))
    wait()
    seconds = time.perf_counter() - start
    at = points(count, generator)
    value, gradient = slope(net, at, record=False)
    value = value.detach()
    return (
        float((value - distance(at)).abs().mean()),
        float((gradient.norm(dim=1) - 1).abs().mean()),
        seconds,
    )


def main(arguments: Sequence[str] | None = None) -> list[tuple[str, float, float, float]]:
    """Returns and prints (way, error of the distance, error of the slope, seconds)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--points", type=int, default=1 << 16, help="of a step (65536)")
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    net = network().to(given.device)
    on_gpu = given.device.startswith("cuda")
    found = []
    for graphed in (False, True) if on_gpu else (False,):
        for way, module in (("modules", copy.deepcopy(net)), ("FusedMLP", FusedMLP(copy.deepcopy(net)))):
            label = f"{way}, recorded" if graphed else way
            off, tilted, seconds = train(module, given.points, given.steps, given.device, graphed=graphed)
            found.append((label, off, tilted, seconds))
            print(f"{label:19} distance off by {off:.4f}, slope by {tilted:.4f}, {seconds:.2f} s", flush=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
        reason = FusedMLP(net).why_not(torch.zeros(4, 3, device=given.device))
    if reason is not None:
        print(f"not fused: {reason}")
    return found


if __name__ == "__main__":
    main()
