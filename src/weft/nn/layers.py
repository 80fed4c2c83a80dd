"""What a sequence of modules is as a fused network, and its forward pass in torch's own operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from weft.generate.cuda.training import Activation
from weft.ir.declined import Declined
from weft.nn.formulas import by_torch, traced


class Sine(nn.Module):
    """sin(omega · x), the activation of sinusoidal representation networks.

    Source: arXiv:2006.09661, section 3.2.
    """

    def __init__(self, omega: float = 1.0) -> None:
        super().__init__()
        self.omega = float(omega)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise; any shape and floating type. The product is rounded to that type before its sine is taken."""
        return torch.sin(self.omega * x)

    def extra_repr(self) -> str:
        """For `repr`."""
        return f"omega={self.omega}"


@dataclass(frozen=True, slots=True)
class Layers:
    """Linear layers with the activation behind each."""

    widths: tuple[int, ...]
    acts: tuple[Activation, ...]
    biases: tuple[bool, ...]

    def composite(self, x: torch.Tensor, parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The forward pass in torch's operations with products in `dtype`, differentiable as often as one likes.

        x is (rows, widths[0]); parameters are weight and, where there is one, bias of each layer.
        """
        left = iter(parameters)
        h = x.to(dtype)
        for act, bias in zip(self.acts, self.biases, strict=True):
            weight = next(left).to(dtype)
            h = _apply(act, F.linear(h, weight, next(left).to(dtype) if bias else None))
        return h


def layers_of(modules: Sequence[nn.Module]) -> Layers | Declined:
    """The network that modules applied one after the other are, or why the kernels do not know it."""
    widths: list[int] = []
    acts: list[Activation] = []
    biases: list[bool] = []
    for module in modules:
        if type(module) is nn.Linear:
            if widths and widths[-1] != module.in_features:
                return Declined(f"a layer of {module.in_features} columns behind one of {widths[-1]}")
            widths += [module.out_features] if widths else [module.in_features, module.out_features]
            biases.append(module.bias is not None)
            acts.append(Activation())
            continue
        act = activation_of(module)
        if isinstance(act, Declined):
            return act
        if act.kind == "identity":
            continue
        if not acts:
            return Declined(f"{type(module).__name__} in front of the first Linear")
        if acts[-1].kind != "identity":
            return Declined(f"{type(module).__name__} behind another activation")
        acts[-1] = act
    if len(acts) < 2:
        return Declined("fewer than two Linear layers")
    return Layers(tuple(widths), tuple(acts), tuple(biases))


def activation_of(module: nn.Module) -> Activation | Declined:
    """The activation that a module is, or why the kernels do not know it."""
    found: Activation
    match module:
        case nn.Identity():
            found = Activation()
        case nn.ReLU():
            found = Activation("relu")
        case nn.LeakyReLU():
            found = Activation("leaky_relu", (float(module.negative_slope),))
        case nn.ELU():
            found = Activation("elu", (float(module.alpha),))
        case nn.Tanh():
            found = Activation("tanh")
        case nn.Sigmoid():
            found = Activation("sigmoid")
        case nn.SiLU():
            found = Activation("silu")
        case nn.GELU():
            found = Activation("gelu_tanh" if module.approximate == "tanh" else "gelu")
        case nn.Softplus():
            found = Activation("softplus", (float(module.beta), float(module.threshold)))
        case Sine():
            found = Activation("sin", (module.omega,))
        case _:
            return traced(module)
    if type(module) not in _KNOWN:
        return traced(module)
    if not all(math.isfinite(x) for x in found.numbers) or (found.kind == "softplus" and found.numbers[0] == 0):
        return Declined(f"{module!r} has a number that is none")
    return found


_KNOWN = (
    nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.Softplus, Sine,
)  # fmt: skip


def _apply(act: Activation, z: torch.Tensor) -> torch.Tensor:
    if act.formula is not None:
        return by_torch(act.formula, z)
    n = act.numbers
    match act.kind:
        case "relu":
            return torch.relu(z)
        case "leaky_relu":
            return F.leaky_relu(z, n[0])
        case "elu":
            return F.elu(z, n[0])
        case "tanh":
            return torch.tanh(z)
        case "sigmoid":
            return torch.sigmoid(z)
        case "silu":
            return F.silu(z)
        case "gelu":
            return F.gelu(z)
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case "softplus":
            return F.softplus(z, n[0], n[1])
        case "sin":
            return torch.sin(n[0] * z)
        case _:
            return z
