"""Learn an image as a function of the pixel's position, by modules one after the other and by `weft.nn.FusedMLP`.

    python examples/image_regression.py [--device cuda] [--size 512] [--steps 1000]

Two networks: sines throughout (arXiv:2006.09661), and ReLU on a frequency encoding (arXiv:2006.10739). All runs begin
with the same weights and see all pixels in every step; on a GPU in float16 with a gradient scaler. Prints the peak
signal-to-noise ratio of what was learnt, and the time of the steps without the first few. On a GPU both ways are
trained twice: called from Python step by step, and as steps that `weft.nn.GraphedStep` records once, optimizer and
scaler with them, and replays: Python's time then no longer hides the device's.
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

from weft.nn import FusedMLP, GraphedStep, Sine

WARM = 5
"""Steps that do not count: kernels are compiled in the first."""


def picture(size: int) -> torch.Tensor:
    """(size, size, 3) in [0, 1]: rings, a checkerboard, a disc with a sharp edge."""
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, size),) * 2, indexing="ij")
    radius = (x.square() + y.square()).sqrt()
    rings = 0.5 + 0.5 * torch.sin(24 * radius.square() + 3 * x)
    checks = ((x * 4).floor() + (y * 4).floor()) % 2 * 0.6 + 0.2
    disc = ((x - 0.3).square() + (y + 0.2).square() < 0.16).float()
    return torch.stack([rings, checks * (1 - disc) + 0.9 * disc, 0.5 * rings + 0.5 * disc], 2)


def positions(size: int) -> torch.Tensor:
    """(size^2, 2) in [-1, 1], row by row."""
    axis = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x, y], 2).reshape(-1, 2)


def frequencies(at: torch.Tensor, count: int = 8) -> torch.Tensor:
    """Sines and cosines of octaves: (n, 2) to (n, 4 * count)."""
    turned = torch.cat([math.pi * 2.0**i * at for i in range(count)], 1)
    return torch.cat([turned.sin(), turned.cos()], 1)


def siren(width: int = 64, omega: float = 20.0) -> nn.Sequential:
    """Two columns to three; weights as its authors draw them."""
    sizes = (2, *(width,) * 4, 3)
    modules: list[nn.Module] = []
    for i, (k, n) in enumerate(pairwise(sizes)):
        layer = nn.Linear(k, n)
        bound = 1 / k if i == 0 else math.sqrt(6 / k) / omega
        nn.init.uniform_(layer.weight, -bound, bound)
        modules += [layer, Sine(omega)]
    return nn.Sequential(*modules[:-1])


def relu(inputs: int, width: int = 64) -> nn.Sequential:
    """`inputs` columns to three."""
    sizes = (inputs, *(width,) * 4, 3)
    layers = [nn.Linear(k, n) for k, n in pairwise(sizes)]
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())][:-1])


def train(
    net: nn.Module, x: torch.Tensor, wanted: torch.Tensor, steps: int, rate: float, *, graphed: bool = False
) -> tuple[float, float]:
    """(dB, seconds); `graphed`: steps are recorded and replayed."""
    on_gpu = x.device.type == "cuda"
    now = torch.tensor(rate, device=x.device)  # on the device: a recorded step reads it there
    optimizer = torch.optim.Adam(net.parameters(), lr=now, fused=on_gpu, capturable=on_gpu)
    scaler = torch.amp.GradScaler("cuda", enabled=on_gpu)

    def loss(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.float16, enabled=on_gpu):
            y = net(x)
        return nn.functional.mse_loss(y.float(), wanted)

    def plain(x: torch.Tensor, wanted: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss(x, wanted)).backward()
        scaler.step(optimizer)
        scaler.update()

    recorded = GraphedStep(loss, optimizer, scaler=scaler) if graphed else None
    start = 0.0
    for number in range(WARM + steps):
        if number == WARM:
            wait(x)
            start = time.perf_counter()
        now.fill_(0.5 * rate * (1 + math.cos(math.pi * number / (WARM + steps))))
        if recorded is None:
            plain(x, wanted)
        elif recorded.recorded:
            recorded()  # its inputs are what they were
        else:
            recorded(x, wanted)
    wait(x)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        error = float(loss_of_picture(net, x, wanted, on_gpu=on_gpu))
    return -10 * math.log10(max(error, 1e-12)), seconds


def loss_of_picture(net: nn.Module, x: torch.Tensor, wanted: torch.Tensor, *, on_gpu: bool) -> torch.Tensor:
    """Mean square error of the picture."""
    with torch.autocast(x.device.type, torch.float16, enabled=on_gpu):
        y = net(x)
    return (y.float().clamp(0, 1) - wanted).square().mean()


def wait(x: torch.Tensor) -> None:
    """For the device."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def main(arguments: Sequence[str] | None = None) -> list[tuple[str, str, float, float]]:
    """Returns and prints (network, way, dB, seconds)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the picture (512)")
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    at = positions(given.size)
    wanted = picture(given.size).reshape(-1, 3).to(given.device)
    encoded = frequencies(at)
    cases = (("sines", siren(), at, 5e-4), ("relu, frequencies", relu(encoded.shape[1]), encoded, 5e-3))
    found = []
    for name, net, inputs, rate in cases:
        x = inputs.to(given.device)
        net = net.to(given.device)
        first = 0.0
        for graphed in (False, True) if x.is_cuda else (False,):
            for way, module in (("modules", copy.deepcopy(net)), ("FusedMLP", FusedMLP(copy.deepcopy(net)))):
                label = f"{way}, recorded" if graphed else way
                decibels, seconds = train(module, x, wanted, given.steps, rate, graphed=graphed)
                found.append((name, label, decibels, seconds))
                first = first or seconds
                print(f"{name:18} {label:19} {decibels:6.2f} dB {seconds:7.2f} s {first / seconds:6.2f} x", flush=True)
        fused = FusedMLP(net)
        with torch.autocast("cuda", torch.float16, enabled=x.is_cuda):
            reason = fused.why_not(x)
        if reason is not None:
            print(f"{name:18} not fused: {reason}")
    return found


if __name__ == "__main__":
    main()
