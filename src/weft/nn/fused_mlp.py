"""`FusedMLP`: a sequence of Linear layers and activations that runs, forward and backward, in generated kernels."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock, RLock
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import nn

from weft.generate.cuda.training import gradient_problem
from weft.generate.library.execute import plain_math
from weft.ir.declined import Declined
from weft.kernels.measurement import Verdict
from weft.nn.autograd import by_composite, fused
from weft.nn.judge import fallen_back
from weft.nn.kernels import DTYPES, BackwardCall, ForwardCall, Kernels, kernels_of
from weft.nn.layered import ByLayers, Memory
from weft.nn.layers import Layers, layers_of
from weft.nn.timing import contest, make_current, normal_like, on_gpu, replays, stream
from weft.tune.verify import Case, build_reference, compare

CONTESTED_ROWS = 1 << 13
"""Rows from which the ways to train wide layers are measured; fewer are trained by one kernel wherever there is one."""
COMPOSED = 2048
"""Rows of a step by layers that are judged as a whole; the others are zeros."""
_MOST_ROWS = 1 << 30
_ALIGNMENT = 16


class FusedMLP(nn.Sequential):
    """A drop-in for an `nn.Sequential` of Linear layers and activations, which may be the user's own.

    It holds the modules that the given one holds, under the same names: parameters, `state_dict`, hooks of the whole
    and `.to(...)` are as before. On a GPU of compute capability 8.0 or more, with 16-bit parameters or under
    `torch.autocast`, its forward pass is one kernel and its backward pass is three more, which keep no activations in
    between; layers too wide for that are trained by a few kernels each, which do. Gradients are the same bits in every
    run. Everywhere else it is the module that it was made from:
    `why_not(x)` says why. Gradients of gradients are taken through torch's operations.

    Parameters that require gradients are read in every call. Changes of others are noticed by their version, as
    autograd does, and all are read again after each replay of a `GraphedStep`; what is written to those through
    `.data`, or by a CUDA graph of your own, is not noticed, and wants `refresh()`. Each number of rows is compiled
    once, verified and measured in a worker, which takes some seconds the first time and is remembered on disk; where
    many rows are trained with layers of 128 columns and more, the ways to do that are measured besides. Where no kernel
    is found right the modules are used, with a warning.

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

    @staticmethod
    def from_module(module: nn.Module) -> nn.Module:
        """The same for a module whose layers are not a sequence: skip and residual connections, several inputs.

        Returns a `FusedMLP` for an `nn.Sequential`, else a `FusedNetwork`.
        """
        from weft.nn.fused_network import FusedNetwork

        return FusedMLP(module) if isinstance(module, nn.Sequential) else FusedNetwork(module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Columns of x are its last dimension; the result has the type that the module would give."""
        if torch.compiler.is_compiling():
            return super().forward(x)  # type: ignore[no-any-return,no-untyped-call]
        key = None if x.is_nested else (x.shape, x.dtype, torch.is_grad_enabled())
        call = None if key is None else self._images.calls.get(key)
        if call is not None:
            if call.holds(self._modules.values(), x):
                return call(x)
            self._images.forget()
        known = self._known()
        run = self._run(x, known)
        if isinstance(run, Declined) or isinstance(known, Declined):
            return super().forward(x)  # type: ignore[no-any-return,no-untyped-call]
        end = self._end(run, x) if run.layers.acts[-1].widened else None
        call = SeenCall(known, run, x, end)
        y = call(x)
        if key is not None and type(x) in (torch.Tensor, nn.Parameter):
            self._images.keep(key, call)
        return y

    def _end(self, run: _Run, x: torch.Tensor) -> torch.dtype:
        """Type of the result: autocast computes some activations in float32."""
        automatic = torch.is_autocast_enabled("cuda")
        if automatic not in run.ends:
            with torch.no_grad():
                y = torch.zeros(1, run.layers.widths[-1], dtype=run.dtype, device=x.device)
                modules = list(self._modules.values())
                last = max(i for i, m in enumerate(modules) if isinstance(m, nn.Linear))
                for module in modules[last + 1 :]:
                    y = module(y)
            run.ends[automatic] = y.dtype
        return run.ends[automatic]

    def why_not(self, x: torch.Tensor) -> str | None:
        """Why this input goes through the modules one by one; None: it goes through the kernels."""
        run = self._run(x, self._known())
        return run.reason if isinstance(run, Declined) else None

    def why_no_fused_backward(self, x: torch.Tensor) -> str | None:
        """Why gradients for this input are computed by torch; None: by the kernels."""
        run = self._run(x, self._known(), trains=True)
        return run.reason if isinstance(run, Declined) else None

    def refresh(self) -> None:
        """Read the parameters anew at the next call: they were changed behind autograd's back."""
        self._images.clear()

    def _run(self, x: torch.Tensor, known: _Known | Declined, *, trains: bool = False) -> _Run | Declined:
        """What computes the result for x, or why nothing does; `trains`: with gradients, whatever requires them."""
        return run_of(self._images, x, known, trains=trains)

    def _known(self) -> _Known | Declined:
        """The layers, as they are now."""
        last = self._images.last
        if last is None or not last.holds(self._modules.values()):
            last = self._images.last = _Seen(tuple(self._modules.values()), self._layers())
        return last.layers if isinstance(last.layers, Declined) else _Known(last.layers, last.in_order(), last)

    def _layers(self) -> Layers | Declined:
        modules = list(self._modules.values())
        for name, m in self.named_children():
            if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
                return Declined(f"module {name} has hooks")
        return layers_of(modules)


def run_of(images: _Images, x: torch.Tensor, known: _Known | Declined, *, trains: bool = False) -> _Run | Declined:
    """See `FusedMLP._run`."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return Declined("the module is being traced")
    if not on_gpu(x):
        return Declined(f"the input is on {x.device.type}; kernels are for CUDA devices")
    if x.is_nested:
        return Declined("a nested tensor")
    if isinstance(known, Declined):
        return known
    parameters, layers = known.parameters, known.layers
    types = {p.dtype for p in parameters}
    dtype = _type_of_products(x.dtype, types)
    if isinstance(dtype, Declined):
        return dtype
    if x.dim() == 0 or x.shape[-1] != layers.columns:
        return Declined(f"an input of shape {tuple(x.shape)} for {layers.columns} columns")
    rows = x.numel() // x.shape[-1]
    if not 0 < rows < _MOST_ROWS:
        return Declined(f"{rows} rows")
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return Declined("a transform of functions, or forward-mode gradients")
    device = x.get_device()
    for p in parameters:
        if p.is_inference():
            return Declined("parameters made in inference mode, which have no version")
        if p.get_device() != device:
            return Declined(f"parameters that are not on {x.device}")
    input_dtype = x.dtype if x.dtype is torch.float32 else dtype
    run = images.run(layers, dtype, input_dtype, None if types == {dtype} else torch.float32, device)
    if isinstance(run, Declined):
        return run
    trains = trains or (torch.is_grad_enabled() and known.trains(x))
    refused = run.kernels.training_refused(rows) if trains else run.kernels.refused(rows)
    return run if refused is None else refused


class _Seen:
    """What a module was when its layers were looked at."""

    def __init__(self, modules: Sequence[nn.Module], layers: Layers | Declined) -> None:
        held = [m for m in modules if isinstance(m, nn.Linear)]
        odd = next((m for m in held if _form(m._parameters) not in _forms_of(m)), None)
        self.modules = tuple(modules)
        self.layers = layers if odd is None else Declined(f"{odd} whose parameters are others, or of other sizes")
        self.parameters = [m._parameters for m in held]
        """Where those of each layer are."""
        self._forms = [_form(d) for d in self.parameters]
        self._hooks = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks += [d for m in modules for d in (m._backward_hooks, m._backward_pre_hooks)]
        self._hooked = any(self._hooks)
        self._others = [m.__dict__ for m in modules if not isinstance(m, nn.Linear)]
        self._counts = [len(d) for d in self._others]
        self._public = [(d, k) for d in self._others for k in d if k[0] != "_"]
        self._values = [d[k] for d, k in self._public]

    def holds(self, modules: Iterable[nn.Module]) -> bool:
        """Whether nothing has changed that decides what the modules compute, but for the values of parameters."""
        if (
            self._hooked
            or self.modules != tuple(modules)
            or any(self._hooks)
            or [len(d) for d in self._others] != self._counts
            or [_form(d) for d in self.parameters] != self._forms
        ):
            return False
        try:
            return [d[k] for d, k in self._public] == self._values
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, a tensor was replaced
            return False

    def in_order(self) -> list[torch.Tensor]:
        """Weight and bias of each layer, as they are now; one that two layers share stands there twice."""
        return [p for d in self.parameters for p in (d.get("weight"), d.get("bias")) if p is not None]


def _forms_of(layer: nn.Linear) -> list[tuple[object, ...]]:
    """What that may be of a layer as it was made, with a bias and without."""
    weight, bias = torch.Size((layer.out_features, layer.in_features)), torch.Size((layer.out_features,))
    return [(2, weight, bias), (2, weight, None), (1, weight, None)]


def _form(parameters: Mapping[str, torch.Tensor | None]) -> tuple[object, ...]:
    """How many parameters a layer has, and the sizes of those that are read: their order may change at any time."""
    weight, bias = parameters.get("weight"), parameters.get("bias")
    return len(parameters), None if weight is None else weight.shape, None if bias is None else bias.shape


class _Known(NamedTuple):
    """What a module is made of."""

    layers: Layers
    parameters: list[torch.Tensor]
    """Weight and bias of each layer."""
    seen: _Seen

    def trains(self, x: torch.Tensor) -> bool:
        """Whether anything requires a gradient."""
        return x.requires_grad or any(p.requires_grad for p in self.parameters)


class _Facts(NamedTuple):
    """What kernels have to know of parameters."""

    addresses: list[int] | None
    """As kernels read them; none where they are to be copied first."""
    trained: bool
    kind: torch.dtype
    """Of their gradients as kernels write them."""
    alike: bool
    """Whether that is the type of all."""


class SeenCall:
    """A call that kernels took, and all that has to be as it was for them to take one like it."""

    def __init__(self, known: _Known, run: _Run, x: torch.Tensor, end: torch.dtype | None) -> None:
        self._seen, self._run, self._end = known.seen, run, end
        self._type, self._needed = type(x), x.requires_grad
        self._parameters, self._facts = _Weakly(known.parameters), run.facts(known.parameters)
        self._state = _now(known.parameters)
        self._device, self._changes = x.get_device(), run.kernels.changes
        self._leading = None if x.dim() == 2 else x.shape[:-1]
        self._given = x.dtype if x.dtype is torch.float32 else run.dtype

    def holds(self, modules: Iterable[nn.Module], x: torch.Tensor) -> bool:
        """Whether x, of the same shape and type, would be taken as it was then."""
        seen, parameters = self._seen, self._seen.in_order()
        return (
            x.get_device() == self._device
            and type(x) is self._type
            and x.requires_grad is self._needed
            and self._changes == self._run.kernels.changes
            and self._parameters.are(parameters)
            and _now(parameters) == self._state
            and seen.holds(modules)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The result."""
        rows = x if self._leading is None else x.reshape(-1, x.shape[-1])
        rows = _dense(rows if rows.dtype is self._given else rows.to(self._given))
        parameters = self._seen.in_order()
        if self._device == torch.cuda.current_device():
            y = fused(self, rows, parameters)
        else:
            with torch.cuda.device(x.device):
                y = fused(self, rows, parameters)
        y = y if self._leading is None else y.reshape(*self._leading, y.shape[-1])
        return y if self._end is None else y.to(self._end)

    def forward(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `weft.nn.autograd.Engine`."""
        return self._run.forward(x, parameters, self._facts)

    def keep(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """See `weft.nn.autograd.Engine`."""
        return self._run.keep(x, parameters, self._facts)

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
        kept: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """See `weft.nn.autograd.Engine`. The parameters may lie elsewhere since."""
        same = [p.data_ptr() for p in parameters] == self._facts.addresses
        return self._run.backward(dy, x, parameters, needs, kept, self._facts if same else None)

    def composite(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `weft.nn.autograd.Engine`."""
        return self._run.composite(x, parameters)


class _Weakly:
    """Tensors that are known again while they live, and are not kept alive by that."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._held = [ref(t) for t in tensors]

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same ones."""
        held = self._held
        return len(held) == len(tensors) and all(r() is t for r, t in zip(held, tensors, strict=True))


_NONE = _Weakly()


def _now(parameters: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """What decides of the thread and of the parameters."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch._C._functorch.peek_interpreter_stack() is None,
        torch.autograd.forward_ad._current_level,
        torch._C._is_tracing(),
        [p.data_ptr() for p in parameters],
        [p.dtype for p in parameters],
        [p.requires_grad for p in parameters],
    )


def _type_of_products(given: torch.dtype, types: set[torch.dtype]) -> torch.dtype | Declined:
    """In which products are computed, or why in none that kernels know; `types`: those of the parameters."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        if given not in DTYPES or not types <= set(DTYPES):
            return Declined(f"{given} under autocast")
        return dtype if dtype in (torch.float16, torch.bfloat16) else Declined(f"autocast to {dtype}")
    if types != {given}:
        return Declined(f"an input of {given} and parameters of {', '.join(sorted(map(str, types)))}")
    if given not in (torch.float16, torch.bfloat16):
        return Declined(f"{given} outside of autocast; kernels multiply float16 and bfloat16")
    return given


class _Run:
    """One network in one type on one device, with the images of its weights; `weft.nn.autograd.Engine`.

    Threads take turns: a lock is held while launches are put on a stream, whose arguments are written in place.
    """

    def __init__(self, kernels: Kernels, layers: Layers, dtype: torch.dtype) -> None:
        self.kernels, self.layers, self.dtype = kernels, layers, dtype
        self._memory = torch.float32 if kernels.net.masters else dtype
        """Type of the parameters that kernels read."""
        self._lock = RLock()
        self._copies: list[torch.Tensor] = []
        self._versions: object = None
        self._held = _NONE
        """What was read last."""
        self._addresses: list[int] = []
        self._facts = _Facts(None, True, dtype, False)
        self._stamp = 0
        self._columns = layers.widths[-1]
        self._memory_of_layers = Memory()
        self._calls: dict[int, ForwardCall] = {}
        self._backs: dict[tuple[int, bool, bool, torch.dtype], BackwardCall] = {}
        self._blocks: torch.Tensor | None = None
        self._blocks_of: tuple[int, list[int]] = 0, []
        """Stamp and addresses of the parameters in these."""
        self._scratch: torch.Tensor | None = None
        self._recorded: list[object] = []
        """Once a graph was captured: what it may hold, though it was forgotten here."""
        self._stream: torch.cuda.Stream | None = None
        self._handle = -1
        self._captured = False
        self.ends: dict[bool, torch.dtype] = {}
        """Under autocast, and without: type of the result."""

    def clear(self) -> None:
        """The parameters have changed."""
        with self._lock:
            self._versions = None

    def _begin(self) -> int:
        """Handle of the current stream, which waits for the one that was used before."""
        capturing = torch.cuda.is_current_stream_capturing()
        handle = stream()
        if handle != self._handle:
            now = torch.cuda.current_stream()
            if self._stream is not None and not capturing:
                now.wait_stream(self._stream)
            for memory in self._own():  # it may be let go, and given to another stream, while this one still uses it
                memory.record_stream(now)
            self._stream, self._handle = now, handle
        self._captured = self._captured or capturing
        return handle

    def _own(self) -> list[torch.Tensor]:
        """Memory that is kept from call to call."""
        found = [c.image for c in self._calls.values()] + [*self._copies, *self._memory_of_layers.tensors()]
        return found + [t for t in (self._blocks, self._scratch) if t is not None]

    def facts(self, parameters: Sequence[torch.Tensor]) -> _Facts:
        """Of parameters as they are now."""
        types = {p.dtype for p in parameters}
        kind = self.dtype if types == {self.dtype} else torch.float32
        whole = types == {self._memory} and all(p.is_contiguous() for p in parameters)
        addresses = [p.data_ptr() for p in parameters] if whole else None
        return _Facts(addresses, any(p.requires_grad for p in parameters), kind, types == {kind})

    def reads(self, parameters: Sequence[torch.Tensor], facts: _Facts | None = None) -> list[int]:
        """Addresses of the parameters as kernels read them; `_stamp` is another if they may have changed.

        Versions tell of parameters that nobody trains. Others are taken for changed every time: an optimizer in one
        kernel (`fused=True`) changes them without a new version, and so does the replay of a graph, after which all
        are taken for changed where it was a `GraphedStep`.
        """
        facts = facts or self.facts(parameters)
        trained = self._captured or facts.trained
        if trained:
            self._versions = None
            self._stamp += 1
        else:
            versions = replays(), [(p.data_ptr(), p._version) for p in parameters]
            if versions != self._versions or not self._held.are(parameters):
                self._versions = versions
                self._stamp += 1
        if trained and facts.addresses is not None:
            self._held = _NONE  # nobody asks: they are read again, where they lie
        elif not self._held.are(parameters):
            self._held = _Weakly(parameters)
        self._facts = facts
        self._addresses = self._copied(parameters) if facts.addresses is None else facts.addresses
        return self._addresses

    def _reads_again(self, parameters: Sequence[torch.Tensor], facts: _Facts | None) -> tuple[list[int], _Facts]:
        """The same in a backward pass, where mostly the forward pass of these parameters was the last to read."""
        if facts is not None and facts.addresses is not None:
            return facts.addresses, facts
        if facts is None or not self._held.are(parameters):
            self.reads(parameters)
        return self._addresses, self._facts

    def _copied(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The same of parameters of several types, or that are views."""
        if not self._copies:
            with torch.inference_mode(mode=False):  # they are written again in any mode
                self._copies = [torch.empty(p.shape, dtype=self._memory, device=p.device) for p in parameters]
        with torch.no_grad():
            torch._foreach_copy_(self._copies, [p.detach() for p in parameters])
        return [p.data_ptr() for p in self._copies]

    def forward(self, x: torch.Tensor, parameters: Sequence[torch.Tensor], facts: _Facts | None = None) -> torch.Tensor:
        """By one kernel; by torch where the compiler, asked for the first time, refuses it."""
        make_current(x.device)
        rows = x.shape[0]
        with self._lock:
            handle = self._begin()
            addresses = self.reads(parameters, facts)
            call = self._calls.get(rows)
            if call is None:
                made = self.kernels.forward(x, addresses, lambda x: self.composite(x, parameters))
                call = None if isinstance(made, Declined) else self._kept(self._calls, rows, made.call())
            if call is not None:
                stale = call.stamp != self._stamp
                if stale:
                    call.pack(addresses, handle)
                    call.stamp = self._stamp
                y = torch.empty((rows, self._columns), dtype=self.dtype, device=x.device)
                call.run(x.data_ptr(), y.data_ptr(), handle, behind=stale)
                return y
        return self.composite(x, parameters)

    def _kept(self, calls: dict[_K, _C], key: _K, call: _C) -> _C:
        """The call, kept; the one that was made first goes."""
        while len(calls) >= KEPT_CALLS:
            old = calls.pop(next(iter(calls)))
            if self._captured:
                self._recorded.append(old)
        calls[key] = call
        return call

    def keep(
        self, x: torch.Tensor, parameters: Sequence[torch.Tensor], facts: _Facts | None = None
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The same for training: where a kernel takes one layer, the values between layers are kept."""
        layers = self.kernels.by_layers()
        if layers is not None and self.kernels.in_contest:
            many = len(x) >= CONTESTED_ROWS or self.kernels.chain_refused(len(x)) is not None
            layers = self._fastest_way(layers, x, parameters, facts) if many else None
        if layers is None:
            return self.forward(x, parameters, facts), ()
        make_current(x.device)
        with self._lock:
            self._begin()
            addresses = self.reads(parameters, facts)
            found = layers.forward(x, addresses, self._memory_of_layers, self._stamp)
        if not isinstance(found, Declined):
            return found
        if not torch.cuda.is_current_stream_capturing():
            layers.refuse(len(x), found)
        return self.composite(x, parameters), ()

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
        kept: Sequence[torch.Tensor],
        facts: _Facts | None = None,
    ) -> list[torch.Tensor | None]:
        """By three kernels, or by several for each layer, or by torch where they do not fit."""
        if x.get_device() != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return self.backward(dy, x, parameters, needs, kept, facts)
        make_current(x.device)
        dy = _dense(dy)
        with self._lock:
            found = self._in_kernels(dy, x, parameters, needs, kept, facts)
        return by_composite(self, dy, x, parameters, needs) if found is None else found

    def _in_kernels(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
        kept: Sequence[torch.Tensor],
        facts: _Facts | None,
    ) -> list[torch.Tensor | None] | None:
        """The gradients; None where no kernels give them."""
        handle = self._begin()
        addresses, facts = self._reads_again(parameters, facts)
        inputs, wanted, kind = needs[0], True in needs[1:], facts.kind
        key = x.shape[0], inputs, wanted, kind
        call = self._backs.get(key) if not kept else None
        if call is None:
            layers = self.kernels.by_layers()
            if layers is not None and (kept or not self.kernels.in_contest):
                return None if not kept else self._by_layers(layers, dy, x, parameters, needs, kept, addresses, facts)
            made = self.kernels.backward(key[0], inputs=inputs, parameters=wanted, dtype=DTYPES[kind])
            if isinstance(made, Declined):
                return None
            if self._blocks is None:
                self._blocks = made.image()
            call = self._kept(self._backs, key, made.call(self._blocks))
        if self._blocks_of[0] != self._stamp or self._blocks_of[1] != addresses:
            call.pack(addresses, handle)
            self._blocks_of = self._stamp, addresses
        dx = torch.empty_like(x) if inputs else None
        grads = torch.empty(self.kernels.elements, dtype=kind, device=x.device) if wanted else None
        scratch = self._room(call.scratch_bytes, x.device)
        call.run(
            x.data_ptr(),
            dy.data_ptr(),
            0 if dx is None else dx.data_ptr(),
            0 if grads is None else grads.data_ptr(),
            scratch.data_ptr(),
            handle,
        )
        if grads is not None and facts.alike and False not in needs[1:]:
            part = grads.as_strided
            return [dx, *[part(*view) for view in self.kernels.views]]
        return self._parts(dx, grads, parameters, needs)

    def _room(self, size: int, device: torch.device) -> torch.Tensor:
        """What kernels of a backward pass leave for each other; little of it is kept for the next one.

        A graph that is captured gets its own: its replays are in no order with later calls.
        """
        held = self._scratch
        if held is not None and held.numel() >= size and not self._recording():
            return held
        found = torch.empty(size, dtype=torch.uint8, device=device)
        if size <= KEPT_SCRATCH and not self._recording():
            self._scratch = found
        return found

    def _recording(self) -> bool:
        return self._captured and torch.cuda.is_current_stream_capturing()

    def _by_layers(
        self,
        layers: ByLayers,
        dy: torch.Tensor,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
        kept: Sequence[torch.Tensor],
        addresses: Sequence[int],
        facts: _Facts,
    ) -> list[torch.Tensor | None] | None:
        """Kernels for each layer; None where there are none."""
        run = self._passes(layers, x, needs, kept, addresses, facts)
        if layers.unknown(len(x), inputs=needs[0], parameters=any(needs[1:]), dtype=DTYPES[facts.kind]):
            self._judge(layers, run, dy, x, parameters, needs, facts.kind)
        if isinstance(layers.refused(len(x)), Declined):
            return None
        found = run(dy)
        return None if isinstance(found, Declined) else self._parts(*found, parameters, needs)

    def _passes(
        self,
        layers: ByLayers,
        x: torch.Tensor,
        needs: Sequence[bool],
        kept: Sequence[torch.Tensor],
        addresses: Sequence[int],
        facts: _Facts,
    ) -> Callable[[torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None] | Declined]:
        """From dy to the gradients of x and of the parameters, as far as they are needed."""
        inputs, wanted, kind = needs[0], any(needs[1:]), facts.kind
        of_rows = torch.zeros_like if self.kernels.net.parts else torch.empty_like  # between parts nothing is written

        def run(dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None] | Declined:
            dx = of_rows(x) if inputs else None
            grads = torch.empty(self.kernels.elements, dtype=kind, device=x.device) if wanted else None
            memory = self._memory_of_layers
            refused = layers.backward(dy, x, kept, addresses, memory, self._stamp, dx, grads, DTYPES[kind])
            return (dx, grads) if refused is None else refused

        return run

    def _fastest_way(
        self, layers: ByLayers, x: torch.Tensor, parameters: Sequence[torch.Tensor], facts: _Facts | None
    ) -> ByLayers | None:
        """`layers` where they train so many rows faster than the kernel of all layers does; measured once."""
        needs = x.requires_grad, *(p.requires_grad for p in parameters)
        key = len(x), needs[0], any(needs[1:])
        with self._lock:
            if key not in self.kernels.ways and not torch.cuda.is_current_stream_capturing():
                self.kernels.ways[key] = self._contest(layers, x, parameters, needs, facts)
        best = self.kernels.ways.get(key, False) and layers.refused(len(x)) is None
        return layers if best else None

    def _contest(
        self,
        layers: ByLayers,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
        facts: _Facts | None,
    ) -> bool:
        """Whether a kernel for each product is faster, and right. Where torch is faster than both, both are refused."""
        make_current(x.device)
        layered = self._layers_tried(layers, x, parameters, needs, facts)
        if isinstance(layered, Declined):
            layers.refuse(len(x), layered)
            return False
        try:
            dy = normal_like(x.new_empty(len(x), self._columns, dtype=self.dtype))

            def chained() -> list[torch.Tensor | None] | None:
                self.forward(x, parameters, facts)
                return self._in_kernels(dy, x, parameters, needs, (), facts)

            ways = [lambda: layered(dy), lambda: by_composite(self, dy, x, parameters, needs)]
            if not self.kernels.surely_by_layers(len(x)) and chained() is not None:
                ways.append(chained)
            ours, theirs, chain = (*contest(ways), math.inf)[:3]
        except torch.OutOfMemoryError:  # the training under way leaves none for a second pass beside it
            return False
        self.kernels.times[len(x), needs[0], any(needs[1:])] = ours, chain, theirs
        if theirs < min(ours, chain):
            widest = max(self.layers.widths)
            reason = f"layers of {widest} columns, which are faster one by one for {len(x)} rows"
            self.kernels.refuse(len(x), Declined(reason))
        return ours < chain

    def _layers_tried(
        self,
        layers: ByLayers,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
        facts: _Facts | None,
    ) -> Callable[[torch.Tensor], object] | Declined:
        """A step by layers, from dy; or why there is none that is right."""
        facts = facts or self.facts(parameters)
        addresses = self.reads(parameters, facts)
        memory, stamp = self._memory_of_layers, self._stamp
        try:
            found = layers.forward(x, addresses, memory, stamp)
        except torch.OutOfMemoryError:
            return _NO_MEMORY
        if isinstance(found, Declined):
            return found
        wrong = self._composed(layers, len(x), inputs=needs[0], wanted=any(needs[1:]), kind=facts.kind, device=x.device)
        layers.unknown(len(x), inputs=needs[0], parameters=any(needs[1:]), dtype=DTYPES[facts.kind])

        def step(dy: torch.Tensor) -> object:
            found = layers.forward(x, addresses, memory, stamp)
            assert not isinstance(found, Declined)
            return self._passes(layers, x, needs, found[1], addresses, facts)(dy)

        return step if wrong is None else wrong

    def _judge(
        self,
        layers: ByLayers,
        run: Callable[[torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None] | Declined],
        dy: torch.Tensor,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
        kind: torch.dtype,
    ) -> None:
        """Wrong gradients, and passes that torch's operations are faster at, are refused from now on."""
        wrong = self._composed(layers, len(x), inputs=needs[0], wanted=any(needs[1:]), kind=kind, device=x.device)
        if wrong is not None:
            return layers.refuse(len(x), wrong)
        addresses, memory = self._addresses, self._memory_of_layers
        ways = (
            lambda: (layers.forward(x, addresses, memory, self._stamp), run(dy)),
            lambda: by_composite(self, dy, x, parameters, needs),
        )
        try:
            ours, theirs = contest(ways)
        except torch.OutOfMemoryError:  # there is none for a second pass beside the one under way
            return None
        if theirs < ours:
            reason = f"layers of {max(self.layers.widths)} columns, which are faster one by one for {len(x)} rows"
            layers.refuse(len(x), Declined(reason))
        return None

    def _composed(
        self, layers: ByLayers, rows: int, *, inputs: bool, wanted: bool, kind: torch.dtype, device: torch.device
    ) -> Declined | None:
        """What is wrong with a whole step by layers, by the gate that judges each kernel of it; None: nothing.

        Inputs and parameters are drawn; all rows are there, those behind the first few with zeros.
        """
        few = min(rows, COMPOSED)
        net, dtype = self.kernels.net, DTYPES[kind]
        problem = gradient_problem(net, few, inputs=inputs, parameters=wanted, dtype=dtype, result=True)
        try:
            with torch.no_grad(), torch.autocast("cuda", enabled=False), plain_math(allow_tf32=False):
                reference = build_reference(problem, seed=0, device=device)
                for case in reference.cases:
                    found = self._of_case(layers, case, rows, inputs=inputs, wanted=wanted, kind=kind)
                    if isinstance(found, Declined):
                        return found
                    for number, (got, want) in enumerate(zip(found, case.expected, strict=True)):
                        finding = compare(got.contiguous(), want, f"{case.kind.value}, output {number}")
                        if finding.verdict is not Verdict.OK:
                            return fallen_back(f"a step by layers of {rows} rows", Declined(finding.error))
        except torch.OutOfMemoryError:  # what was not compared is not used
            return _NO_MEMORY
        return None

    def _of_case(
        self, layers: ByLayers, case: Case, rows: int, *, inputs: bool, wanted: bool, kind: torch.dtype
    ) -> list[torch.Tensor] | Declined:
        """The outputs of `gradient_problem` by layers."""
        net = self.kernels.net
        few, device = len(case.inputs[0]), case.inputs[0].device
        x, dy = (t.new_zeros(rows, t.shape[1]) for t in case.inputs[:2])
        x[:few], dy[:few] = case.inputs[0], case.inputs[1]
        addresses, memory = [p.data_ptr() for p in case.inputs[2:]], Memory()
        forward = layers.forward(x, addresses, memory, 1)
        if isinstance(forward, Declined):
            return forward
        dx = torch.zeros_like(x) if inputs else None
        grads = torch.empty(self.kernels.elements, dtype=kind, device=device) if wanted else None
        refused = layers.backward(dy, x, forward[1], addresses, memory, 1, dx, grads, DTYPES[kind])
        if refused is not None:
            return refused
        parts = net.parts or ((0, net.columns),)
        found = [forward[0][:few]]
        found += [] if dx is None else [dx[:few, start : start + width] for start, width in parts]
        return found if grads is None else [*found, *(grads.as_strided(*view) for view in self.kernels.views)]

    def _parts(
        self,
        dx: torch.Tensor | None,
        grads: torch.Tensor | None,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """The gradient of x and those of the parameters, as far as they are needed."""
        found: list[torch.Tensor | None] = [dx]
        if grads is None:
            return [dx, *[None] * len(parameters)]
        kind = grads.dtype
        for (shape, steps, offset), p, need in zip(self.kernels.views, parameters, needs[1:], strict=True):
            part = grads.as_strided(shape, steps, offset) if need else None
            found.append(part if part is None or p.dtype is kind else part.to(p.dtype))
        return found

    def composite(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """By torch."""
        with torch.autocast("cuda", enabled=False):
            return self.layers.composite(x, parameters, self.dtype)


_NO_MEMORY = Declined("gradients by layers that there is no memory to compare with those of torch")
KEPT_CALLS = 16
"""Numbers of rows whose launches, and images of the weights, are kept."""
KEPT_SCRATCH = 16 << 20
"""Bytes that a module keeps for values between the kernels of a backward pass."""
_Key = tuple[torch.Size, torch.dtype, bool]
"""Of a call: shape and type of the input, whether gradients are recorded."""
_K = TypeVar("_K")
_C = TypeVar("_C")


class _Images:
    """The runs of a module; a copy of the module begins with none."""

    def __init__(self) -> None:
        self.last: _Seen | None = None
        self.calls: dict[_Key, SeenCall] = {}
        self._lock = Lock()
        self._latest: tuple[Layers, tuple[object, ...], _Run | Declined] | None = None
        self._runs: dict[tuple[object, ...], _Run | Declined] = {}

    def keep(self, key: _Key, call: SeenCall) -> None:
        """The call, so that one like it needs no second look; the one that was made first goes."""
        with self._lock:
            while len(self.calls) >= KEPT_CALLS and key not in self.calls:
                self.calls.pop(next(iter(self.calls)))
            self.calls[key] = call

    def forget(self) -> None:
        """All calls."""
        with self._lock:
            self.calls.clear()

    def clear(self) -> None:
        """See `FusedMLP.refresh`."""
        for run in self._runs.values():
            if isinstance(run, _Run):
                run.clear()

    def run(
        self, layers: Layers, dtype: torch.dtype, input_dtype: torch.dtype, masters: torch.dtype | None, device: int
    ) -> _Run | Declined:
        """The run of a network, or why there is none on this device."""
        kind = dtype, input_dtype, masters, device
        latest = self._latest
        if latest is not None and latest[0] is layers and latest[1] == kind:
            return latest[2]
        run = self._runs.get((layers, *kind))
        if run is None:
            run = self._runs[layers, *kind] = self._made(layers, dtype, input_dtype, masters, device)
        self._latest = layers, kind, run
        return run

    def _made(
        self, layers: Layers, dtype: torch.dtype, input_dtype: torch.dtype, masters: torch.dtype | None, device: int
    ) -> _Run | Declined:
        wide = None if masters is None else DTYPES[masters]
        kernels = kernels_of(layers.network(DTYPES[dtype], DTYPES[input_dtype], wide), device)
        return kernels if isinstance(kernels, Declined) else _Run(kernels, layers, dtype)

    def __deepcopy__(self, memo: object) -> _Images:
        return _Images()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Images, ()


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Row-major and aligned."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
