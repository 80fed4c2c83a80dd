"""A device that is not the CPU, simulated on the CPU: it finds code that mixes tensors of two devices.

Tensors on it say `meta` and hold their values in a CPU tensor. An operator that meets one of them and a CPU tensor
with dimensions fails, as it would on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FAR = torch.device("meta")


class FarGenerator(torch.Generator):
    """Random numbers for any device, drawn on the CPU."""

    where: torch.device

    def __new__(cls, device: torch.device | str = "cpu") -> Self:
        made = super().__new__(cls)
        made.where = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # as torch.Generator itself has it
        return self.where


class Far(torch.Tensor):
    """A tensor of the device."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inside.shape,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=FAR,
        )
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's own is untyped
        return dispatch(func, args, kwargs or {})


class FarMode(TorchDispatchMode):
    """Inside of it tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    near = [x for x in tensors if not isinstance(x, Far)]
    far = len(near) < len(tensors)
    device = kwargs.get("device")
    copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if far and not copies and any(x.dim() for x in near):
        raise AssertionError(f"{func} on two devices")
    if device is not None:
        far = torch.device(device) == FAR
        kwargs = {**kwargs, "device": torch.device("cpu")}

    def unwrap(x: Any) -> Any:
        return x.inside if isinstance(x, Far) else x

    result = func(*mapped(unwrap, args), **mapped(unwrap, kwargs))
    if func is torch.ops.aten.copy_.default or func.__name__.split(".")[0].endswith("_"):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return mapped(lambda x: Far(x) if far and isinstance(x, torch.Tensor) else x, result)


def leaves(x: Any) -> list[Any]:
    if isinstance(x, dict):
        x = list(x.values())
    return [y for z in x for y in leaves(z)] if isinstance(x, list | tuple) else [x]


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, dict):
        return {k: mapped(function, v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return type(x)([mapped(function, y) for y in x])
    return function(x)
