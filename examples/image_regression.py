"""Learn an image as a function of the pixel's position, by modules one after the other and by `weft.nn.FusedMLP`.

    python examples/image_regression.py [--device cuda] [--size 512] [--steps 1000]

Two networks: sines throughout (arXiv:2006.09661), and ReLU on a frequency encoding (arXiv:2006.10739). Both runs begin
with the same weights and see all pixels in every step; on a GPU in float16 with a gradient scaler. Prints the peak
signal-to-noise ratio of what was learnt, and the time of the steps without the first few. On a GPU a second pair of
runs records forward and backward pass into a CUDA graph once and replays it: Python's time then no longer hides the
device's.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import torch
from torch import nn

from weft.nn import FusedMLP, Sine

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
    net: nn.Module, x: torch.Tensor, wanted: torch.Tensor, steps: int, rate: float, *, replay: bool = False
) -> tuple[float, float]:
    """(dB, seconds); `replay`: forward and backward pass from a CUDA graph."""
    on_gpu = x.device.type == "cuda"
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, fused=on_gpu)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps + WARM)
    scaler = torch.amp.GradScaler("cuda", enabled=on_gpu)

    def predict() -> torch.Tensor:
        with torch.autocast(x.device.type, torch.float16, enabled=on_gpu):
            return net(x).float()

    def gradients() -> None:
        scaler.scale(nn.functional.mse_loss(predict(), wanted)).backward()

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    step = gradients
    with _beside(x.device) if replay else nullcontext():
        for _ in range(WARM):
            optimizer.zero_grad()
            gradients()
            update()
    if replay:
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gradients()
        step = graph.replay
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        if not replay:  # a replay writes gradients where the recording put them
            optimizer.zero_grad()
        step()
        update()
    wait()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        error = float((predict().clamp(0, 1) - wanted).square().mean())
    return -10 * math.log10(max(error, 1e-12)), seconds


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Another stream, as recording wants of what runs before it."""
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield
    main.wait_stream(side)


def main(arguments: Sequence[str] | None = None) -> list[tuple[str, float, float, float, float]]:
    """Returns and prints (network, dB and seconds of the modules, dB and seconds of the kernels)."""
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
        for replay in (False, True) if x.is_cuda else (False,):
            plain, fused = copy.deepcopy(net), FusedMLP(copy.deepcopy(net))
            decibels, seconds = train(plain, x, wanted, given.steps, rate, replay=replay)
            own, own_seconds = train(fused, x, wanted, given.steps, rate, replay=replay)
            with torch.autocast("cuda", torch.float16, enabled=x.is_cuda):
                reason = fused.why_not(x)
            label = f"{name}, replayed" if replay else name
            found.append((label, decibels, seconds, own, own_seconds))
            ratio = f"{seconds / own_seconds:.2f} times as fast" if reason is None else f"not fused: {reason}"
            print(f"{label:28} modules {decibels:6.2f} dB {seconds:7.2f} s", end="")
            print(f"   FusedMLP {own:6.2f} dB {own_seconds:7.2f} s, {ratio}", flush=True)
    return found


if __name__ == "__main__":
    main()
