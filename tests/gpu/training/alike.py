"""The same steps twice."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.training import Step


def two_runs(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    batch: Callable[[int], tuple[torch.Tensor, ...]],
    first: dict[str, torch.Tensor],
) -> list[list[torch.Tensor]]:
    """Losses of ten batches and what the model holds then, of two runs from these weights and no state."""
    found: list[list[torch.Tensor]] = []
    for _ in range(2):
        model.load_state_dict(first)
        for state in optimizer.state.values():
            for x in state.values():
                x.zero_()
        losses = [step(*batch(k)).clone() for k in range(10)]
        found.append([*losses, *(x.detach().clone() for x in model.state_dict().values())])
    return found
