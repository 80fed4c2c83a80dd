"""`FusedNetwork`: a module of Linear layers with skip and residual connections that runs in generated kernels."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.ir.declined import Declined
from weft.nn import timing
from weft.nn.fused_mlp import SeenCall, _Images, _Known, _Run, _Seen, run_of
from weft.nn.traces import Traced, traced, unlike


@dataclass
class _Trace:
    """What a module was traced to, and what it was then."""

    modules: tuple[nn.Module, ...]
    seen: _Seen
    found: Traced | Declined
    compared: bool = False
    """Whether the layers were compared with the module."""


_MADE_ANEW = frozenset({"_inner", "_modules", "_parameters", "_buffers", "_images", "_traces", "_ends"})
"""Of a network: its module's, or what was learned of it."""


class FusedNetwork(nn.Module):
    """A drop-in for a module whose `forward` is Linear layers over rows: concatenations, additions, several inputs.

    The module's submodules and parameters are held under the same names: parameters, `state_dict` and `.to(...)` are as
    before. `forward` is traced once for each number of columns; where it is layers that kernels know - Linear layers,
    activations, `torch.cat` of the input, of other inputs and of earlier values along the columns, one addition of an
    earlier value per layer, in front of its activation or behind, columns of an input - it runs as `FusedMLP` does.
    Everywhere else it is the module: `why_not(*inputs)` says why. The layers are compared with the module on a few
    random rows before they are used; a module that computes something else is left as it is.

    Make the first call, or ask `why_not(*inputs)`, before other threads call modules: while torch.fx traces, it has
    its own `nn.Module.__call__` in place for the whole process. Networks are traced one at a time.

    Several inputs are joined in memory first; gradients come out of that for each of them.
    """

    def __init__(self, module: nn.Module) -> None:
        """Takes over what `module` holds; it stays usable and shares the parameters.

        Raises:
            TypeError: it is no module.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"FusedNetwork wraps an nn.Module, not a {type(module).__name__}")
        super().__init__()
        self.__dict__["_inner"] = module
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self.training = module.training
        self._images = _Images()
        traces: dict[tuple[tuple[int, ...], int], _Trace] = {}
        self.__dict__["_traces"] = traces
        self.__dict__["_ends"] = {}

    def train(self, mode: bool = True) -> FusedNetwork:
        """As of any module."""
        super().train(mode)
        self._inner.training = mode
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """What the module has is the module's."""
        inner = self.__dict__.get("_inner")
        if inner is not None and name in inner.__dict__ and name != "training" and not name.startswith("_"):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """What the module has besides."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_inner" not in self.__dict__:
                raise
            return getattr(self.__dict__["_inner"], name)

    def forward(self, *inputs: torch.Tensor, **others: Any) -> torch.Tensor:
        """The module's result; the last dimension of each input is that of columns, all others are equal."""
        found = Declined("arguments by name") if others else self._joined(inputs)
        if not isinstance(found, Declined):
            known, x = found
            # not of x: inputs of other columns may join to as many, and those of other types to the same
            key: Any = (tuple((i.shape, i.dtype) for i in inputs), torch.is_grad_enabled())
            call = self._images.calls.get(key)
            if call is not None and call._seen is known.seen and call.holds(known.seen.modules, x):
                return call(x)
            run = run_of(self._images, x, known)
            if not isinstance(run, Declined):
                call = SeenCall(known, run, x, self._end(run, inputs))
                self._images.keep(key, call)
                return call(x)
        result: torch.Tensor = self._inner(*inputs, **others)
        return result

    def why_not(self, *inputs: torch.Tensor) -> str | None:
        """Why these inputs go through the module; None: they go through the kernels."""
        return self._why(inputs, trains=False)

    def why_no_fused_backward(self, *inputs: torch.Tensor) -> str | None:
        """Why gradients for these inputs are computed by torch; None: by the kernels."""
        return self._why(inputs, trains=True)

    def _why(self, inputs: tuple[torch.Tensor, ...], *, trains: bool) -> str | None:
        found = self._joined(inputs)
        run = found if isinstance(found, Declined) else run_of(self._images, found[1], found[0], trains=trains)
        return run.reason if isinstance(run, Declined) else None

    def refresh(self) -> None:
        """Read the parameters anew at the next call: they were changed behind autograd's back."""
        self._images.clear()

    def _joined(self, inputs: tuple[torch.Tensor, ...]) -> tuple[_Known, torch.Tensor] | Declined:
        """The layers, and the inputs as one matrix; or why they are no layers."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return Declined("the module is being traced")
        given: tuple[object, ...] = inputs
        if not given or not all(isinstance(x, torch.Tensor) and x.dim() > 0 for x in given):
            return Declined("inputs that are no tensors of columns")
        if not all(map(timing.on_gpu, inputs)):  # before anything is traced or copied
            kinds = sorted({x.device.type for x in inputs if not timing.on_gpu(x)})
            return Declined(f"the input is on {kinds[0]}; kernels are for CUDA devices")
        if any(x.is_nested for x in inputs):
            return Declined("a nested tensor")
        if len({x.shape[:-1] for x in inputs}) > 1 or len({x.device for x in inputs}) > 1:
            return Declined("inputs of different rows, or on different devices")
        if not all(x.is_floating_point() for x in inputs):
            return Declined("inputs that are no floats")
        if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
            return Declined("a transform of functions, or forward-mode gradients")
        trace = self._trace(tuple(x.shape[-1] for x in inputs), inputs[0].dim())
        if isinstance(trace, Declined):
            return trace
        found, seen = trace
        automatic = torch.is_autocast_enabled("cuda")
        if len({x.dtype for x in inputs}) > 1 and not automatic:
            return Declined("inputs of several types")
        known = _Known(found.layers, seen.in_order(), seen)
        dtype = torch.get_autocast_dtype("cuda") if automatic else inputs[0].dtype
        return known, found.joined(inputs, dtype)

    def _trace(self, widths: tuple[int, ...], dims: int) -> tuple[Traced, _Seen] | Declined:
        """The layers for inputs of these columns, as they are now."""
        key = widths, dims
        modules = tuple(self._inner.modules())
        last = self._traces.get(key)
        if last is None or last.modules != modules or not last.seen.holds(last.seen.modules):
            found = traced(self._inner, widths, dims)
            held = modules if isinstance(found, Declined) else found.modules
            seen = _Seen(held, found if isinstance(found, Declined) else found.layers)
            if isinstance(seen.layers, Declined):  # parameters of a layer are others than it was made with
                found = seen.layers
            last = self._traces[key] = _Trace(modules, seen, found)
            self._ends.clear()
        if not isinstance(last.found, Declined) and not last.compared:
            parameters = last.seen.in_order()
            recorded = timing.on_gpu(parameters[0]) and torch.cuda.is_current_stream_capturing()
            # where parameters have no values or are on several devices, no kernel runs either
            if len({p.device for p in parameters}) == 1 and not parameters[0].is_meta and not recorded:
                last.compared = True
                last.found = unlike(self._inner, last.found, widths, dims, parameters) or last.found
        return last.found if isinstance(last.found, Declined) else (last.found, last.seen)

    def _end(self, run: _Run, inputs: tuple[torch.Tensor, ...]) -> torch.dtype | None:
        """Type of the result, where autocast makes it another one: as the module has it for a row."""
        key = torch.is_autocast_enabled("cuda"), run.dtype, *((x.shape[-1], x.dtype) for x in inputs)
        if key not in self._ends:
            with torch.no_grad():
                row = [x.new_zeros((*(1 for _ in x.shape[:-1]), x.shape[-1])) for x in inputs]
                self._ends[key] = self._inner(*row).dtype
        end: torch.dtype = self._ends[key]
        return None if end is run.dtype else end

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedNetwork:
        """A network of its own around a copy of the module, with the same hooks."""
        made = memo[id(self)] = FusedNetwork(copy.deepcopy(self._inner, memo))
        own = {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}
        made.__dict__.update(copy.deepcopy(own, memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedNetwork, (self._inner,)
