"""Activations of the user's own: a module that is an elementwise expression, as primitives and by torch."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock

import torch
from torch import fx, nn

from weft.frontends.torch import import_fx
from weft.generate.cuda.training import IDENTITY, Activation, Formula, formula
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.ir.types import DType

TRACING = RLock()
"""Held while anything is traced: torch.fx changes `nn.Module.__call__` for the process meanwhile."""
_PROBES = ((3, 5), (2, 1, 3, 4))
"""Shapes that a module is traced with: it must be the same expression in all."""


def traced(module: nn.Module) -> Activation | Declined:
    """The expression that a module is, or why it is none that kernels may compute.

    The module is called with stand-ins for its argument, in float32; it must not hold parameters or buffers.
    """
    name = type(module).__name__
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return Declined(f"{name} is no layer that the kernels know, and no expression without parameters")
    found: list[Formula] = []
    for shape in _PROBES:
        try:
            with TRACING, torch.no_grad(), torch.autocast("cpu", enabled=False):
                probe = torch.zeros(shape)
                same = module(probe) is probe
                if probe._version:
                    return Declined(f"{name} changes its argument in place")
                if same:
                    found.append(IDENTITY)
                    continue
                graph = import_fx(fx.symbolic_trace(module), (probe,)).graph
        except Exception as error:  # what a module of the user's does while it is traced is anyone's guess
            reason = (str(error).splitlines() or [""])[0][:160]
            return Declined(f"{name} cannot be traced: {type(error).__name__}: {reason}")
        expression = formula(graph)
        if isinstance(expression, Declined):
            return Declined(f"{name} is no elementwise expression: {expression.reason}")
        found.append(expression)
    if any(f != found[0] for f in found):
        return Declined(f"{name} depends on the shape of its argument")
    if unknown := [s.prim.value for s in found[0].steps if s.prim not in _TORCH]:
        return Declined(f"{name}: torch has no operation for {unknown[0]}")
    return Activation() if found[0] == IDENTITY else Activation("formula", (), found[0])


_TORCH: dict[Prim, Callable[..., torch.Tensor]] = {
    Prim.NEG: torch.neg, Prim.ABS: torch.abs, Prim.SIGN: torch.sign, Prim.EXP: torch.exp, Prim.EXPM1: torch.expm1,
    Prim.LOG: torch.log, Prim.LOG1P: torch.log1p, Prim.SQRT: torch.sqrt, Prim.RSQRT: torch.rsqrt,
    Prim.RECIPROCAL: torch.reciprocal, Prim.ERF: torch.erf, Prim.TANH: torch.tanh, Prim.SIN: torch.sin,
    Prim.COS: torch.cos, Prim.TAN: torch.tan, Prim.ASIN: torch.asin, Prim.ACOS: torch.acos, Prim.ATAN: torch.atan,
    Prim.SINH: torch.sinh, Prim.COSH: torch.cosh, Prim.ASINH: torch.asinh, Prim.ACOSH: torch.acosh,
    Prim.ATANH: torch.atanh, Prim.FLOOR: torch.floor, Prim.CEIL: torch.ceil, Prim.TRUNC: torch.trunc,
    Prim.ROUND: torch.round, Prim.ISNAN: torch.isnan, Prim.ISINF: torch.isinf, Prim.NOT: torch.logical_not,
    Prim.ADD: torch.add, Prim.SUB: torch.sub, Prim.MUL: torch.mul, Prim.DIV: torch.div, Prim.POW: torch.pow,
    Prim.MOD: torch.remainder, Prim.FMOD: torch.fmod, Prim.ATAN2: torch.atan2, Prim.MAX: torch.maximum,
    Prim.MIN: torch.minimum, Prim.AND: torch.logical_and, Prim.OR: torch.logical_or, Prim.XOR: torch.logical_xor,
    Prim.EQ: torch.eq, Prim.NE: torch.ne, Prim.LT: torch.lt, Prim.LE: torch.le, Prim.GT: torch.gt, Prim.GE: torch.ge,
    Prim.SELECT: torch.where, Prim.CAST: torch.Tensor.to,
}  # fmt: skip


def by_torch(expression: Formula, z: torch.Tensor) -> torch.Tensor:
    """The expression in torch's operations, in float32 or wider, differentiable as often as they are; z's type."""
    x = z if z.dtype is torch.float64 else z.float()
    values = [x]
    for step in expression.steps:
        operands: list[torch.Tensor] = []
        for at, operand in enumerate(step.operands):
            if isinstance(operand, int):
                operands.append(values[operand])
                continue
            kind = torch.bool if expression.type_of_number(step, at) is DType.BOOL else x.dtype
            operands.append(torch.full((), operand, dtype=kind, device=x.device))
        if step.prim is Prim.CAST:
            values.append(operands[0].to(torch.bool if step.dtype is DType.BOOL else x.dtype))
        else:
            values.append(_TORCH[step.prim](*operands))
    return values[-1].expand(z.shape).to(z.dtype)
