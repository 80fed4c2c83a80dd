"""A training step as a unit of a job: forward, backward and the optimiser's step are segments of their own.

Batches are drawn by the number of the unit, so that the same unit is the same whenever it is done. State: weights,
statistics of norms and the optimiser's momentum, as safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

import torch
from safetensors.torch import load_file, save_file
from torch import nn

Loss = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


@final
class Training:
    """A network that is trained by stochastic gradient descent with momentum."""

    def __init__(
        self, network: nn.Module, inputs: Callable[[int], torch.Tensor], loss: Loss, *, rate: float = 1e-3
    ) -> None:
        """`inputs`: a batch by the number of the unit. `loss`: of the network's output, its targets drawn."""
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.network = network.to(self.device).train()
        self._inputs, self._loss = inputs, loss
        self._optimiser = torch.optim.SGD(self.network.parameters(), lr=rate, momentum=0.9)

    def unit(self, number: int) -> Iterator[None]:
        """One step."""
        generator = torch.Generator(device=self.device).manual_seed(number)
        self._optimiser.zero_grad(set_to_none=True)
        found = self.network(self._inputs(number).to(self.device))
        loss = self._loss(found.float(), generator)
        yield
        loss.backward()
        yield
        self._optimiser.step()

    def save(self, path: str) -> None:
        """Into one file."""
        state = {f"network.{n}": x.contiguous() for n, x in self.network.state_dict().items()}
        for name, parameter in self.network.named_parameters():
            if (own := self._optimiser.state[parameter].get("momentum_buffer")) is not None:
                state[f"momentum.{name}"] = own.contiguous()
        save_file(state, path)

    def load(self, path: str) -> None:
        """What `save` wrote."""
        state = load_file(path, device=self.device)
        own = {n.removeprefix("network."): x for n, x in state.items() if n.startswith("network.")}
        self.network.load_state_dict(own)
        for name, parameter in self.network.named_parameters():
            if f"momentum.{name}" in state:
                self._optimiser.state[parameter]["momentum_buffer"] = state[f"momentum.{name}"]


def classes(count: int) -> Loss:
    """Cross-entropy against classes that are drawn."""

    def loss(found: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        wanted = torch.randint(count, (found.shape[0],), generator=generator, device=found.device)
        return nn.functional.cross_entropy(found, wanted)

    return loss


def squares(found: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Squares of the distance from numbers that are drawn."""
    wanted = torch.randn(found.shape, generator=generator, device=found.device)
    return (found - wanted).square().mean()
