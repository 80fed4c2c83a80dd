"""A training step that is recorded into a CUDA graph once and replayed: the host then puts one launch on the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from weft.nn.timing import on_gpu

KEPT_GRAPHS = 8
"""Shapes of inputs whose steps are recorded; those of others are run as they are."""
_Shape = tuple[torch.Size, torch.dtype, torch.device]
_NOTE = (
    "while a training step was recorded into a CUDA graph: what it calls must not wait for the device (.item(), "
    ".cpu(), printing a tensor) and must be the same in every step"
)


@dataclass(slots=True)
class _Step:
    """The step for inputs of some shapes."""

    calls: int = 0
    """That were run as they are."""
    graph: torch.cuda.CUDAGraph | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    """What the graph reads."""
    loss: torch.Tensor | None = None
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """Where it leaves them."""
    settings: list[dict[str, object]] = field(default_factory=list)
    """Of the optimizer, as they were recorded."""
    places: list[int] = field(default_factory=list)
    """Addresses of the parameters."""
    state: object = None
    """The optimizer's."""


class GraphedStep:
    """A training step: gradients are cleared, a loss computed, its gradients, and the parameters changed.

    Every call is one step. On a GPU the first few are run as they are, on a stream beside; then the step is recorded
    and from there on replayed: inputs are copied to where the recording reads them. Inputs of another shape are
    recorded by themselves. Elsewhere than on a GPU every step is run as it is.

        rate = torch.tensor(1e-3, device="cuda")
        optimizer = torch.optim.Adam(net.parameters(), lr=rate, fused=True, capturable=True)

        def loss(x, wanted):
            with torch.autocast("cuda", torch.bfloat16):
                y = net(x)
            return (y.float() - wanted).square().mean()

        step = GraphedStep(loss, optimizer)
        for x, wanted in batches:
            step(x, wanted)

    What is recorded stays as it is: numbers that are to change, a learning rate above all, have to be tensors on the
    device; a module that is put into evaluation trains on. Numbers of the optimizer that have changed, and an
    optimizer's state or parameters that lie elsewhere, are errors.
    """

    def __init__(
        self,
        loss: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        warmup: int = 3,
    ) -> None:
        """`loss` takes the tensors that the step is called with; `warmup` steps of each shape are run as they are.

        Raises:
            ValueError: the optimizer cannot be recorded, or `warmup` is below 1.
        """
        if warmup < 1:
            raise ValueError(f"warmup={warmup}: at least one step is run before it can be recorded")
        self._loss, self._optimizer, self._warmup = loss, optimizer, warmup
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._parameters: list[torch.Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        self._steps: dict[tuple[_Shape, ...], _Step] = {}
        self._last: _Step | None = None
        self._side: torch.cuda.Stream | None = None
        if any(on_gpu(p) for p in self._parameters):
            self._check()

    def _check(self) -> None:
        name = type(self._optimizer).__name__
        for number, group in enumerate(self._optimizer.param_groups):
            if group.get("capturable") is False:
                raise ValueError(
                    f"group {number} of {name} cannot be recorded: make the optimizer with capturable=True"
                )
        if self._scaler is not None and not getattr(self._optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(f"{name} waits for the device under a gradient scaler: make it with fused=True")

    @property
    def recorded(self) -> bool:
        """Whether the last step was a replay."""
        return self._last is not None and self._last.graph is not None

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """What the last step's recording reads; a call without arguments takes them as they are. Empty before."""
        return () if self._last is None else tuple(self._last.inputs)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """One step; returns the loss, which the next call may overwrite.

        Raises:
            ValueError: numbers or the state of the optimizer have changed since they were recorded, parameters lie
                elsewhere, an input requires gradients, or there is nothing to take without arguments.
            RuntimeError: the step cannot be recorded.
        """
        if not inputs:
            step = self._last
            if step is None or step.graph is None:
                raise ValueError("a step without arguments takes the inputs of a recorded one, and there is none yet")
            return _on_device(step.inputs[0], lambda: self._replayed(step))
        if any(x.requires_grad for x in inputs):
            raise ValueError(
                "an input requires gradients: what is trained is read where it lies, not given to the step"
            )
        if not all(on_gpu(x) for x in inputs):
            return self._run(inputs)
        return _on_device(inputs[0], lambda: self._step(inputs))

    def _step(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """On a GPU."""
        shapes = tuple((x.shape, x.dtype, x.device) for x in inputs)
        step = self._steps.get(shapes)
        if step is None:
            step = _Step()
            if len(self._steps) < KEPT_GRAPHS:
                self._steps[shapes] = step
        self._last = step
        if step.graph is None:
            if step.calls < self._warmup:
                step.calls += 1
                with self._beside():
                    return self._run(inputs)
            self._record(step, inputs)
        else:
            pairs = [(to, x) for to, x in zip(step.inputs, inputs, strict=True) if to is not x]
            if pairs:
                with torch.no_grad():
                    torch._foreach_copy_([to for to, _ in pairs], [x.detach() for _, x in pairs])
        return self._replayed(step)

    def _run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The step as it is."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(*inputs)
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        else:
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._scaler.step(self._optimizer)
            self._scaler.update()
        return loss.detach()

    def _record(self, step: _Step, inputs: Sequence[torch.Tensor]) -> None:
        """Nothing is computed by that."""
        with torch.inference_mode(mode=False):
            step.inputs = [x.detach().clone() for x in inputs]
        step.settings, step.places, step.state = self._settings(), self._places(), self._optimizer.state
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step.loss = self._run(step.inputs)
        except RuntimeError as error:
            error.add_note(_NOTE)
            raise
        step.gradients = [p.grad for p in self._parameters]
        step.graph = graph

    def _replayed(self, step: _Step) -> torch.Tensor:
        assert step.graph is not None
        assert step.loss is not None
        if self._settings() != step.settings:
            raise ValueError(self._changed(step.settings))
        if self._places() != step.places:
            raise ValueError("parameters lie elsewhere than when the step was recorded: make a new GraphedStep")
        if self._optimizer.state is not step.state:
            raise ValueError("the optimizer's state was replaced since the step was recorded: make a new GraphedStep")
        for p, gradient in zip(self._parameters, step.gradients, strict=True):
            p.grad = gradient
        step.graph.replay()
        return step.loss

    def _places(self) -> list[int]:
        return [p.data_ptr() for p in self._parameters]

    def _settings(self) -> list[dict[str, object]]:
        """What is part of a recording; a GPU's tensors are read when it is replayed, wherever they lie now."""
        found = []
        for group in self._optimizer.param_groups:
            kept = {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
            found.append({k: _setting(v) for k, v in kept.items()})
        return found

    def _changed(self, before: list[dict[str, object]]) -> str:
        """What has."""
        for number, (old, new) in enumerate(zip(before, self._settings(), strict=False)):
            for name in [n for n in {**old, **new} if old.get(n) != new.get(n)]:
                group, was, now = f"{name} of group {number}", old.get(name), new.get(name)
                given = self._optimizer.param_groups[number].get(name)
                if isinstance(given, torch.Tensor) and on_gpu(given):
                    return f"{group} is another tensor than when the step was recorded: write into that one"
                return (
                    f"{group} was {was} when the step was recorded and is {now} now: make it a tensor on the device"
                    f" ({name}=torch.tensor({now}, device=...))"
                )
        return "the optimizer has other groups than when the step was recorded: make a new GraphedStep"

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Another stream, as recording wants of what runs before it."""
        main = torch.cuda.current_stream()
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            yield
        main.wait_stream(self._side)


def _setting(value: object) -> object:
    """What a recording depends on: where a GPU's tensor lies, the value of anything else."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.data_ptr() if on_gpu(value) else value.tolist()


def _on_device(x: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """With the device of x current."""
    if x.get_device() == torch.cuda.current_device():
        return run()
    with torch.cuda.device(x.device):
        return run()
