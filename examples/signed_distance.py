"""Learn the distance to a surface, with slopes of length one (an Eikonal loss), by modules and by `weft.nn.FusedMLP`.

    python examples/signed_distance.py [--device cuda] [--points 65536] [--steps 500]

The surface is a torus with a sphere beside it, whose distance is known. The loss holds the network's slope, so its
gradient is one of second order: the network and its first derivative run in generated kernels, the second in torch's
operations. On a GPU products are computed in bfloat16. Prints errors of distance and slope on new points.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from weft.nn import FusedMLP

WARM = 3
"""Steps that do not count."""


def distance(at: torch.Tensor) -> torch.Tensor:
    """(n, 3) to (n, 1): negative inside."""
    ring = torch.stack([at[:, :2].norm(dim=1) - 0.5, at[:, 2]], 1).norm(dim=1) - 0.2
    ball = (at - at.new_tensor([0.0, 0.0, 0.6])).norm(dim=1) - 0.15
    return torch.minimum(ring, ball)[:, None]


def points(count: int, device: str, generator: torch.Generator) -> torch.Tensor:
    """Within the cube from -1 to 1."""
    return torch.rand(count, 3, generator=generator).to(device) * 2 - 1


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


def train(net: nn.Module, count: int, steps: int, device: str) -> tuple[float, float, float]:
    """(mean error of the distance, mean error of the slope's length, seconds)."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps + WARM)

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    start = time.perf_counter()
    for step in range(steps + WARM):
        if step == WARM:
            wait()
            start = time.perf_counter()
        at = points(count, device, generator)
        value, gradient = slope(net, at, record=True)
        loss = (value - distance(at)).abs().mean() + 0.05 * (gradient.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    wait()
    seconds = time.perf_counter() - start
    at = points(count, device, generator)
    value, gradient = slope(net, at, record=False)
    value = value.detach()
    return (
        float((value - distance(at)).abs().mean()),
        float((gradient.norm(dim=1) - 1).abs().mean()),
        seconds,
    )


def main(arguments: Sequence[str] | None = None) -> list[tuple[float, float, float]]:
    """Returns and prints errors and seconds of the modules and of the kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--points", type=int, default=1 << 16, help="of a step (65536)")
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    plain = network().to(given.device)
    fused = FusedMLP(copy.deepcopy(plain))
    found = []
    for name, net in (("modules", plain), ("FusedMLP", fused)):
        found.append(train(net, given.points, given.steps, given.device))
        print(f"{name:9} distance off by {found[-1][0]:.4f}, slope by {found[-1][1]:.4f}, {found[-1][2]:.2f} s")
    with torch.autocast("cuda", torch.bfloat16, enabled=given.device.startswith("cuda")):
        reason = fused.why_not(torch.zeros(4, 3, device=given.device))
    if reason is not None:
        print(f"not fused: {reason}")
    return found


if __name__ == "__main__":
    main()
