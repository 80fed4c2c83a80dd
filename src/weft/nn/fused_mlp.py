"""`FusedMLP`: a sequence of Linear layers and activations that runs, forward and backward, in generated kernels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weft.generate.cuda.training import Network
from weft.ir.declined import Declined
from weft.nn.autograd import by_composite, fused
from weft.nn.kernels import DTYPES, WIDEST, Backward, Forward, Kernels, kernels_of, make_current
from weft.nn.layers import Layers, layers_of

_MOST_ROWS = 1 << 30
_ALIGNMENT = 16


class FusedMLP(nn.Sequential):
    """A drop-in for an `nn.Sequential` of Linear layers and activations.

    It holds the modules that the given one holds, under the same names: parameters, `state_dict`, hooks of the whole
    and `.to(...)` are as before. On a GPU of compute capability 8.0 or more, with 16-bit parameters or under
    `torch.autocast`, its forward pass is one kernel and its backward pass is three more, which keep no activations in
    between; gradients are the same bits in every run. Everywhere else it is the module that it was made from:
    `why_not(x)` says why. Gradients of gradients are taken through torch's operations.

    Weights that change are noticed by their version, as autograd does; what is written through `.data` is not, and
    wants `refresh()`. Each number of rows is compiled once, which takes about a second.

        net = FusedMLP(nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            y = net(x)  # x: (..., 3); y: (..., 1), bf16
    """

    def __init__(self, sequential: nn.Sequential | OrderedDict[str, nn.Module]) -> None:
        """Takes over the modules of `sequential`, which stays usable and shares the parameters.

        Raises:
            TypeError: it is neither an `nn.Sequential` nor what one is made of.
        """
        if not isinstance(sequential, nn.Sequential | OrderedDict):
            raise TypeError(f"FusedMLP wraps an nn.Sequential, not a {type(sequential).__name__}")
        modules = sequential._modules if isinstance(sequential, nn.Sequential) else sequential
        super().__init__(OrderedDict(modules.items()))
        self.train(sequential.training if isinstance(sequential, nn.Sequential) else True)
        self._images = _Images()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Columns of x are its last dimension; the result has the type that the module would give."""
        parameters = self._in_order()
        run = self._run(x, parameters)
        if isinstance(run, Declined):
            return super().forward(x)  # type: ignore[no-any-return,no-untyped-call]
        rows = x.reshape(-1, x.shape[-1])
        rows = rows.to(run.dtype) if rows.dtype not in (run.dtype, torch.float32) else rows
        rows = _dense(rows)
        with torch.autocast("cuda", enabled=False), torch.cuda.device(x.device):
            y = fused(run, rows, parameters)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        # autocast computes this one in float32
        return y.float() if torch.is_autocast_enabled("cuda") and run.layers.acts[-1].kind == "softplus" else y

    def why_not(self, x: torch.Tensor) -> str | None:
        """Why this input goes through the modules one by one; None: it goes through the kernels."""
        run = self._run(x, self._in_order())
        return run.reason if isinstance(run, Declined) else None

    def why_no_fused_backward(self, x: torch.Tensor) -> str | None:
        """Why gradients for this input are computed by torch, from a forward pass done again; None: by the kernels."""
        run = self._run(x, self._in_order())
        if isinstance(run, Declined):
            return run.reason
        found = run.kernels.backward_refused()
        return None if found is None else found.reason

    def refresh(self) -> None:
        """Read the parameters anew at the next call: they were changed behind autograd's back."""
        self._images.clear()

    def _run(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> _Run | Declined:
        """What computes the result for x, or why nothing does."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return Declined("the module is being traced")
        if x.device.type != "cuda":
            return Declined(f"the input is on {x.device.type}; kernels are for CUDA devices")
        dtype = _type_of_products(x, parameters)
        if isinstance(dtype, Declined):
            return dtype
        layers = self._layers()
        if isinstance(layers, Declined):
            return layers
        if x.dim() == 0 or x.shape[-1] != layers.widths[0]:
            return Declined(f"an input of shape {tuple(x.shape)} for {layers.widths[0]} columns")
        rows = x.numel() // x.shape[-1]
        if not 0 < rows < _MOST_ROWS:
            return Declined(f"{rows} rows")
        if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
            return Declined("a transform of functions, or forward-mode gradients")
        if any(p.is_inference() for p in parameters):
            return Declined("parameters made in inference mode, which have no version")
        if any(p.device != x.device for p in parameters):
            return Declined(f"parameters that are not on {x.device}")
        if max(layers.widths) > WIDEST:
            return Declined(f"{max(layers.widths)} columns; kernels take up to {WIDEST}")
        given = DTYPES[torch.float32 if x.dtype is torch.float32 else dtype]
        net = Network(layers.widths, layers.acts, layers.biases, DTYPES[dtype], given)
        kernels = kernels_of(net, x.device.index)
        if isinstance(kernels, Declined):
            return kernels
        return self._images.run(kernels, layers, dtype, rows)

    def _in_order(self) -> list[torch.Tensor]:
        """Weight and bias of each layer; one that two layers share stands there twice."""
        layers = [m for m in self._modules.values() if isinstance(m, nn.Linear)]
        return [p for m in layers for p in m._parameters.values() if p is not None]

    def _layers(self) -> Layers | Declined:
        modules = list(self._modules.values())
        for name, m in self.named_children():
            if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
                return Declined(f"module {name} has hooks")
        return layers_of(modules)


def _type_of_products(x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.dtype | Declined:
    """In which products are computed, or why in none that kernels know."""
    types = {p.dtype for p in parameters}
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        if x.dtype not in DTYPES or not types <= set(DTYPES):
            return Declined(f"{x.dtype} under autocast")
        return dtype if dtype in (torch.float16, torch.bfloat16) else Declined(f"autocast to {dtype}")
    if types != {x.dtype}:
        return Declined(f"an input of {x.dtype} and parameters of {', '.join(sorted(map(str, types)))}")
    if x.dtype not in (torch.float16, torch.bfloat16):
        return Declined(f"{x.dtype} outside of autocast; kernels multiply float16 and bfloat16")
    return x.dtype


class _Run:
    """One network in one type on one device, with the images of its weights; `weft.nn.autograd.Engine`."""

    def __init__(self, kernels: Kernels, layers: Layers, dtype: torch.dtype) -> None:
        self.kernels, self.layers, self.dtype = kernels, layers, dtype
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._versions: object = None
        self._held: list[torch.Tensor] = []
        """What was copied: while it is held no other tensor has its identity and its address."""
        self._stamp = 0
        self._blocks: torch.Tensor | None = None
        self._blocks_stamp = 0
        self._packed: dict[int, tuple[Forward, list[torch.Tensor], int]] = {}
        self._stream: torch.cuda.Stream | None = None
        self._captured = False

    def clear(self) -> None:
        """The parameters have changed."""
        self._versions = None

    def reads(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """All parameters in the type of the products, in one buffer; copied if they have changed."""
        places = self.kernels.places
        if self._flat is None:
            count, device = self.kernels.elements, parameters[0].device
            with torch.inference_mode(mode=False):  # it is written again in any mode
                self._flat = torch.zeros(count, dtype=self.dtype, device=device)
                self._views = [self._flat[p.offset : p.offset + p.size].view(p.shape) for p in places]
        current = torch.cuda.current_stream()
        if self._stream is not None and self._stream != current and not torch.cuda.is_current_stream_capturing():
            current.wait_stream(self._stream)
        self._stream = current
        # a graph that is replayed changes parameters without a new version
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        versions = [(id(p), p.data_ptr(), p._version) for p in parameters]
        if self._captured or versions != self._versions:
            with torch.no_grad():
                torch._foreach_copy_(self._views, [p.detach() for p in parameters])
            self._versions, self._held = versions, list(parameters)
            self._stamp += 1
        return self._flat

    def ready(
        self, x: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> tuple[Forward, list[torch.Tensor]] | Declined:
        """The forward kernel for the rows of x, and its image of the weights."""
        self.reads(parameters)
        forward = self.kernels.forward(x, self._views, lambda first: [self.composite(first, self._views)])
        if isinstance(forward, Declined):
            return forward
        rows = len(x)
        known = self._packed.get(rows)
        if known is not None and known[0] is forward and known[2] == self._stamp:
            return forward, known[1]
        image = known[1] if known is not None and known[0] is forward else forward.image()
        forward.pack([v.data_ptr() for v in self._views], image)
        self._packed[rows] = forward, image, self._stamp
        while len(self._packed) > KEPT_IMAGES:
            self._packed.pop(next(iter(self._packed)))
        return forward, image

    def forward(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """By one kernel; by torch where the compiler, asked for the first time, refuses it."""
        make_current(x.device)
        found = self.ready(x, parameters)
        if isinstance(found, Declined):
            return self.composite(x, parameters)
        forward, image = found
        y = torch.empty(len(x), self.layers.widths[-1], dtype=self.dtype, device=x.device)
        forward.run(x, image, y)
        return y

    def _type(self, parameters: Sequence[torch.Tensor]) -> torch.dtype:
        """Of the gradients of the parameters as kernels write them."""
        return self.dtype if all(p.dtype is self.dtype for p in parameters) else torch.float32

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, parameters: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """By three kernels, or by torch where they do not fit."""
        with torch.autocast("cuda", enabled=False), torch.cuda.device(x.device):
            make_current(x.device)
            flat, dy = self.reads(parameters), _dense(dy)
            kind = self._type(parameters)
            inputs, sums_wanted = needs[0], any(needs[1:])

            def reference(first: torch.Tensor) -> list[torch.Tensor]:
                return self._reference(first, x[: len(first)], inputs=inputs, parameters=sums_wanted)

            made = self.kernels.backward(
                x, dy, flat, reference, inputs=inputs, parameters=sums_wanted, dtype=DTYPES[kind]
            )
            if isinstance(made, Declined):
                return by_composite(self, dy, x, parameters, needs)
            dx = torch.empty_like(x) if needs[0] else None
            sums = None
            if any(needs[1:]):
                sums = torch.empty(self.kernels.elements, dtype=kind, device=x.device)
            made.run(x, dy, self._image(made, flat), dx, sums)
            found: list[torch.Tensor | None] = [dx]
            for place, p, need in zip(self.kernels.places, parameters, needs[1:], strict=True):
                part = None if sums is None or not need else sums[place.offset : place.offset + place.size]
                found.append(None if part is None else part.view(place.shape).to(p.dtype))
            return found

    def _reference(self, dy: torch.Tensor, x: torch.Tensor, *, inputs: bool, parameters: bool) -> list[torch.Tensor]:
        """Gradients by torch: that of x, and those of the parameters at their places; zeros where none is wanted."""
        views = [v.detach() for v in self._views]
        dx, *others = by_composite(self, dy, x, views, [inputs, *([parameters] * len(views))])
        sums = torch.zeros(self.kernels.elements, dtype=torch.float32, device=x.device)
        for place, found in zip(self.kernels.places, others, strict=True):
            if found is not None:
                sums[place.offset : place.offset + place.size] = found.reshape(-1).float()
        return [torch.zeros_like(x) if dx is None else dx, sums]

    def _image(self, made: Backward, flat: torch.Tensor) -> torch.Tensor:
        """Of the weights as the kernels of gradients read them."""
        if self._blocks is None or self._blocks_stamp != self._stamp:
            if self._blocks is None:
                self._blocks = made.image(flat)
            made.pack(flat, self._blocks)
            self._blocks_stamp = self._stamp
        return self._blocks

    def composite(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """By torch."""
        with torch.autocast("cuda", enabled=False):
            return self.layers.composite(x, parameters, self.dtype)


KEPT_IMAGES = 16
"""Numbers of rows whose images of the weights are kept."""


class _Images:
    """The runs of a module; a copy of the module begins with none."""

    def __init__(self) -> None:
        self._runs: dict[Kernels, _Run] = {}

    def clear(self) -> None:
        """See `FusedMLP.refresh`."""
        for run in self._runs.values():
            run.clear()

    def run(self, kernels: Kernels, layers: Layers, dtype: torch.dtype, rows: int) -> _Run | Declined:
        """The run of a network, if its forward pass is possible for so many rows."""
        run = self._runs.get(kernels)
        if run is None:
            run = self._runs[kernels] = _Run(kernels, layers, dtype)
        refused = kernels.refused(rows)
        return run if refused is None else refused

    def __deepcopy__(self, memo: object) -> _Images:
        return _Images()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Images, ()


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Row-major and aligned."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
