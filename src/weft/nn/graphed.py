"""A training step that is recorded into a CUDA graph once and replayed: the host then puts one launch on the stream."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from weft.nn.timing import on_gpu, replayed

KEPT_GRAPHS = 8
"""Shapes of inputs whose steps are recorded; those of others are run as they are."""
_Shape = tuple[torch.Size, torch.dtype, torch.device]
_AGAIN = "when the step was recorded: make a new GraphedStep"
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
    parameters: list[torch.Tensor] = field(default_factory=list)
    """That it changes."""
    settings: list[dict[str, object]] = field(default_factory=list)
    """Of the optimizer's groups, and of the scaler behind them, as they were recorded."""
    addresses: list[tuple[int, bool]] = field(default_factory=list)
    """Addresses of the parameters, and whether they require gradients."""
    state: list[object] = field(default_factory=list)
    """The optimizer's: what it is of each parameter, where its tensors lie."""


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
    device; a module that is put into evaluation trains on. Numbers of the optimizer or the scaler that have changed,
    parameters and states that were replaced (`load_state_dict` of the optimizer), added or frozen since, and an
    optimizer that counts its steps on the host, are errors. An average of the parameters that is made in a step
    (`swa_utils.AveragedModel.update_parameters` in the loss or behind the optimizer) is made in every replay;
    `FusedMLP` and `FusedNetwork` read their parameters again after each.
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
        self._steps: dict[tuple[_Shape, ...], _Step] = {}
        self._last: _Step | None = None
        self._side: torch.cuda.Stream | None = None
        if any(on_gpu(p) for p in self._parameters()):
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
            ValueError: numbers or the state of the optimizer have changed since they were recorded, parameters are
                others, lie elsewhere or were frozen, the optimizer cannot be recorded, an input requires gradients, or
                there is nothing to take without arguments.
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
        self._check()
        with torch.inference_mode(mode=False):
            step.inputs = [x.detach().clone() for x in inputs]
        step.parameters, step.settings, step.addresses = self._parameters(), self._settings(), self._addresses()
        numbers = self._numbers()
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step.loss = self._run(step.inputs)
        except RuntimeError as error:
            error.add_note(_NOTE)
            raise
        self._check_numbers(numbers)
        step.state = self._state()
        step.gradients = [p.grad for p in step.parameters]
        step.graph = graph

    def _replayed(self, step: _Step) -> torch.Tensor:
        assert step.graph is not None
        assert step.loss is not None
        if self._settings() != step.settings:
            raise ValueError(self._changed(step.settings))
        if not _same(self._parameters(), step.parameters):
            raise ValueError(f"the optimizer has other parameters than {_AGAIN}")
        if (addresses := self._addresses()) != step.addresses:
            frozen = [at for at, _ in addresses] == [at for at, _ in step.addresses]
            what = "whether parameters require gradients is another" if frozen else "parameters lie elsewhere"
            raise ValueError(f"{what} than {_AGAIN}")
        if self._state() != step.state:
            raise ValueError(f"the optimizer's state was replaced: it is another than {_AGAIN}")
        for p, gradient in zip(step.parameters, step.gradients, strict=True):
            p.grad = gradient
        replayed()
        step.graph.replay()
        return step.loss

    def _parameters(self) -> list[torch.Tensor]:
        return [p for g in self._optimizer.param_groups for p in g["params"]]

    def _addresses(self) -> list[tuple[int, bool]]:
        return [(p.data_ptr(), p.requires_grad) for p in self._parameters()]

    def _state(self) -> list[object]:
        """Of each parameter that has one."""
        state = self._optimizer.state
        return [{k: _place(v) for k, v in state[p].items()} if p in state else None for p in self._parameters()]

    def _numbers(self) -> list[dict[str, object]]:
        """What the optimizer keeps on the host of each parameter, and of its groups."""
        state = self._optimizer.state
        held = [state.get(p, {}) for p in self._parameters()]
        return [*({k: _setting(v) for k, v in of.items() if not _moves(v)} for of in held), *self._settings()]

    def _check_numbers(self, before: list[dict[str, object]]) -> None:
        """What a step changed on the host while it was recorded, no replay changes."""
        for old, new in zip(before, self._numbers(), strict=False):
            for name in [n for n in {**old, **new} if old.get(n) != new.get(n)]:
                raise ValueError(
                    f"{type(self._optimizer).__name__} keeps its {name!r} on the host, where a replay does not change"
                    " it: it cannot be recorded"
                )

    def _settings(self) -> list[dict[str, object]]:
        """What is part of a recording; a GPU's tensors are read when it is replayed, wherever they lie now."""
        found = []
        for group in self._optimizer.param_groups:
            kept = {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
            found.append({k: _setting(v) for k, v in kept.items()})
        return found if self._scaler is None else [*found, _scaling(self._scaler)]

    def _changed(self, before: list[dict[str, object]]) -> str:
        """What has."""
        for number, (old, new) in enumerate(zip(before, self._settings(), strict=False)):
            for name in [n for n in {**old, **new} if old.get(n) != new.get(n)]:
                if number >= len(self._optimizer.param_groups):
                    return f"the scaler's {name} was {old.get(name)} when the step was recorded: make a new GraphedStep"
                group, was, now = f"{name} of group {number}", old.get(name), new.get(name)
                given = self._optimizer.param_groups[number].get(name)
                if isinstance(given, torch.Tensor) and on_gpu(given):
                    return f"{group} is another tensor than when the step was recorded: write into that one"
                return (
                    f"{group} was {was} when the step was recorded and is {now} now: make it a tensor on the device"
                    f" ({name}=torch.tensor({now}, device=...))"
                )
        return f"the optimizer has other groups than {_AGAIN}"

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


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _moves(value: object) -> bool:
    """Whether a replay changes it."""
    return isinstance(value, torch.Tensor) and on_gpu(value)


def _place(value: object) -> object:
    """Where a tensor lies; a number."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value if isinstance(value, int | float | str | None) else id(value)


def _scaling(scaler: torch.amp.GradScaler) -> dict[str, object]:
    """Numbers of a scaler that are part of a recording, and where its scale lies."""
    return {
        "growth factor": scaler.get_growth_factor(),
        "backoff factor": scaler.get_backoff_factor(),
        "growth interval": scaler.get_growth_interval(),
        "scale": _place(scaler._scale),
    }


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
