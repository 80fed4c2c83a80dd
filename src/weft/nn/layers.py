"""What a sequence of modules is as a fused network, and its forward pass in torch's own operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from weft.generate.cuda.training import KINDS, Activation, Added, Kind, Network
from weft.ir.declined import Declined
from weft.ir.types import DType
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
    sources: tuple[tuple[int, ...], ...] = ()
    """Of each layer, the values that it reads side by side, as in `Network`; none: the last one."""
    added: tuple[Added | None, ...] = ()
    parts: tuple[tuple[int, int], ...] = ()
    row: int = 0

    @property
    def columns(self) -> int:
        """Of the input."""
        return self.row if self.parts else self.widths[0]

    def network(self, dtype: DType, input_dtype: DType, masters: DType | None) -> Network:
        """What kernels compute."""
        return Network(
            self.widths,
            self.acts,
            self.biases,
            dtype,
            input_dtype,
            masters,
            self.sources,
            self.added,
            self.parts,
            self.row,
        )

    def composite(self, x: torch.Tensor, parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The forward pass in torch's operations with products in `dtype`, differentiable as often as one likes.

        x is (rows, columns); parameters are weight and, where there is one, bias of each layer.
        """
        left = iter(parameters)
        if self.sources or self.added or self.parts:
            return self._with_skips(x, left, dtype)
        h = x.to(dtype)
        for act, bias in zip(self.acts, self.biases, strict=True):
            weight = next(left).to(dtype)
            h = _apply(act, F.linear(h, weight, next(left).to(dtype) if bias else None))
        return h

    def _with_skips(self, x: torch.Tensor, left: Iterator[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        parts = self.parts or ((0, self.columns),)
        values = {-i: x[:, at : at + n].to(dtype) for i, (at, n) in enumerate(parts)}
        for layer, (act, bias) in enumerate(zip(self.acts, self.biases, strict=True)):
            read = [values[v] for v in (self.sources[layer] if self.sources else (layer,))]
            weight = next(left).to(dtype)
            h = F.linear(torch.cat(read, -1), weight, next(left).to(dtype) if bias else None)
            added = self.added[layer] if self.added else None
            h = h + values[added.value] if added is not None and added.before else h
            h = _apply(act, h)
            values[layer + 1] = h + values[added.value] if added is not None and not added.before else h
        return values[len(self.acts)]


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
    for kind in KINDS.values():
        if type(module) is not module_class(kind):
            continue
        if any(getattr(module, name) != value for name, value in kind.options.items()):
            continue
        numbers = tuple(float(getattr(module, name)) for name in kind.numbers)
        if not all(math.isfinite(x) for x in numbers) or kind.refused(*numbers):
            return Declined(f"{module!r} has a number that is none")
        return Activation(kind.name, numbers)
    return traced(module)


def module_class(kind: Kind) -> Callable[..., nn.Module]:
    """The class of the modules that are this activation."""
    found: Callable[..., nn.Module] = Sine if kind.module == "Sine" else getattr(nn, kind.module)
    return found


@lru_cache(maxsize=256)
def module_of(act: Activation) -> nn.Module:
    """A module that is this activation; of one of `KINDS`."""
    kind = KINDS[act.kind]
    return module_class(kind)(**dict(zip(kind.numbers, act.numbers, strict=True)), **kind.options)


def _apply(act: Activation, z: torch.Tensor) -> torch.Tensor:
    if act.formula is not None:
        return by_torch(act.formula, z)
    found: torch.Tensor = module_of(act).forward(z)  # not called: while something is traced, calls are recorded
    return found
