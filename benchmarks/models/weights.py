"""Random weights under which a network behaves like a trained one: activations of order 1 at every depth.

Otherwise outputs are zero, infinite or all alike, and comparing two implementations by them would show nothing.
"""

from __future__ import annotations

import math

import torch
from torch import nn

_Norm = nn.BatchNorm2d | nn.InstanceNorm2d | nn.LayerNorm


def randomise(network: nn.Module) -> None:
    """Draw every weight; call under a seeded generator.

    Source of the scales: He et al., arXiv:1502.01852.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = math.prod(module.weight.shape[1:])
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_in))
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=math.sqrt(1 / module.in_features))
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, _Norm):
            nn.init.uniform_(module.weight, 0.75, 1.25)
        if isinstance(module, nn.Conv2d | nn.Linear | _Norm) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)


def settle_batch_norms(network: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Give every batch norm the statistics of what reaches it, off by some noise as for any other image."""

    def settle(norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].double()
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        # few images tell little about a channel that hardly varies within one (a single position, a large pool):
        # what the channels have in common is the better estimate there
        variance = torch.maximum(variance, 0.5 * variance.mean()) + 0.02 * mean.square()
        noise = torch.randn_like(mean)
        kept, spread = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        kept.copy_(mean + 0.1 * noise * variance.sqrt())
        spread.copy_(variance * torch.exp(0.1 * torch.randn_like(mean)))

    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    if not norms:
        return
    hooks = [norm.register_forward_pre_hook(settle) for norm in norms]
    with torch.no_grad():
        network(*inputs)
    for hook in hooks:
        hook.remove()
