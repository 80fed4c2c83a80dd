"""The fused network as a differentiable function: gradients by generated kernels, gradients of these by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Composite(Protocol):
    """A network in torch's operations."""

    def composite(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result in torch's operations, which record gradients."""
        ...


class Engine(Composite, Protocol):
    """What computes; `weft.nn.fused_mlp` has one on a GPU, tests have one of torch's operations."""

    def forward(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result; x is (rows, columns) and dense, no gradient is recorded."""
        ...

    def keep(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The same, and what `backward` wants of it besides."""
        ...

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
        kept: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Gradients of x and of the parameters as far as they are needed; `kept` comes from `keep`."""
        ...


def fused(engine: Engine, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The network's result for dense x (rows, columns); differentiable twice and more."""
    if not torch.is_grad_enabled() or not (x.requires_grad or any(p.requires_grad for p in parameters)):
        return engine.forward(x, parameters)
    found: torch.Tensor = _apply(engine, x, *parameters)  # type: ignore[no-untyped-call]
    return found


def by_composite(
    engine: Composite, dy: torch.Tensor, x: torch.Tensor, parameters: Sequence[torch.Tensor], needs: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Gradients by torch's operations, recomputing the forward pass."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, *parameters), needs, strict=True)]
        y = engine.composite(leaves[0], leaves[1:])
        found = iter(torch.autograd.grad(y, [t for t, need in zip(leaves, needs, strict=True) if need], dy))
    return [next(found) if need else None for need in needs]


def _asked(ctx: Any, *, before: int) -> tuple[bool, ...]:
    """Which tensors get a gradient in this backward pass: `before` of them stand in front of the parameters.

    `needs_input_grad` says which could: `torch.autograd.grad(y, x)` asks for that of x alone, however many parameters
    require one, and then the sums over rows are not computed. Of several parameters, one that is asked for brings all.
    """
    needs = ctx.needs_input_grad[before:]  # as many inputs are no tensors
    if before == 1 and not (needs[0] and any(needs[1:])):
        return tuple(needs)  # one kind requires gradients: somebody asks for them, or this pass would not be here
    nodes = [node for node, _ in ctx.next_functions]
    if len(nodes) != len(needs):
        return tuple(needs)
    found = [need and _is_executed(node) for need, node in zip(needs[:before], nodes[:before], strict=True)]
    rest = any(need and _is_executed(node) for need, node in zip(needs[before:], nodes[before:], strict=True))
    return (*found, *(need and rest for need in needs[before:]))


def _is_executed(node: Any) -> bool:
    tell = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return node is not None and (tell is None or bool(tell(node)))
    except RuntimeError:  # a leaf that was asked for by itself, of which the engine does not tell
        return True


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, engine: Engine, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.engine, ctx.count = engine, 1 + len(parameters)
        y, kept = engine.keep(x, parameters)
        ctx.save_for_backward(x, *parameters, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        x, parameters, kept = saved[0], saved[1 : ctx.count], saved[ctx.count :]
        needs = _asked(ctx, before=1)
        if not torch.is_grad_enabled():  # nobody wants gradients of these
            return (None, *ctx.engine.backward(cotangents[0], x, parameters, needs, kept))
        return (None, *_Gradient.apply(ctx.engine, (needs, kept), cotangents[0], x, *parameters))  # type: ignore[no-untyped-call]


# `Function.apply` looks for transforms of functions first, through which no engine computes
_apply = super(torch.autograd.Function, _Fused).apply


class _Gradient(torch.autograd.Function):
    """(dy, x, parameters) -> gradients of x and of the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        given: tuple[Sequence[bool], Sequence[torch.Tensor]],
        dy: torch.Tensor,
        x: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.engine = engine
        needs, kept = given
        ctx.save_for_backward(dy, x, *parameters)
        ctx.set_materialize_grads(False)
        return tuple(engine.backward(dy, x, parameters, needs, kept))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        dy, *inputs = ctx.saved_tensors
        needs = _asked(ctx, before=2)
        wanted = [t for t, need in zip((dy, *inputs), needs, strict=True) if need]
        again = torch.is_grad_enabled()
        given = [(i, c) for i, c in enumerate(cotangents) if c is not None]
        if not given or not wanted:
            return (None,) * (3 + len(inputs))
        with torch.enable_grad():
            y = ctx.engine.composite(inputs[0], inputs[1:])
            first = torch.autograd.grad(y, [inputs[i] for i, _ in given], dy, create_graph=True)
            pairs = [(g, c) for g, (_, c) in zip(first, given, strict=True) if g.requires_grad]
            if not pairs:
                return (None,) * (3 + len(inputs))
            second = torch.autograd.grad(
                [g for g, _ in pairs], wanted, [c for _, c in pairs], create_graph=again, allow_unused=True
            )
        found = iter(second)
        return (None, None, *(next(found) if need else None for need in needs))
