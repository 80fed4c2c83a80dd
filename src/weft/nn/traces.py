"""What a module's `forward` is as layers with skips: traced by torch.fx, matched node by node, or refused by reason."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from weft.generate.cuda.training import Activation, Added, called
from weft.ir.declined import Declined
from weft.nn.formulas import TRACING
from weft.nn.layers import Layers, activation_of
from weft.nn.timing import near

ALIGNED = 8
"""Columns at whose multiples the inputs of a network begin in one matrix."""

Columns = tuple[int, int, int]
"""(input, first column, columns)"""


@dataclass(frozen=True)
class Traced:
    """The layers of a module, and how its inputs become one matrix."""

    layers: Layers
    columns: tuple[Columns, ...]
    """What stands at each of the layers' parts."""
    modules: tuple[nn.Module, ...]
    """Linear layers in the order of their calls, then what else decides what is computed."""
    whole: bool
    """Whether the first input is that matrix itself."""

    def joined(self, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The matrix: rows of all inputs side by side in `dtype`, each part at a multiple of eight columns.

        What lies between two parts is never read, and may be anything.
        """
        if self.whole:
            return inputs[0]
        found: torch.Tensor = _Join.apply((self.columns, self.layers.row), dtype, *inputs)  # type: ignore[no-untyped-call]
        return found


class _Join(torch.autograd.Function):
    """Columns of several tensors in one, each copied and rounded once."""

    @staticmethod
    def forward(
        ctx: Any, joined: tuple[tuple[Columns, ...], int], dtype: torch.dtype, *inputs: torch.Tensor
    ) -> torch.Tensor:
        columns, row = joined
        ctx.columns, ctx.kinds = columns, [(x.shape[-1], x.dtype) for x in inputs]
        found = inputs[0].new_empty((*inputs[0].shape[:-1], row), dtype=dtype)
        at = 0
        for number, start, width in columns:
            found[..., at : at + width].copy_(inputs[number][..., start : start + width])
            at += width + -width % ALIGNED
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        found: list[torch.Tensor | None] = [None] * len(ctx.kinds)
        at = 0
        for number, start, width in ctx.columns:
            if ctx.needs_input_grad[2 + number]:
                whole, kind = ctx.kinds[number]
                part = cotangents[0][..., at : at + width].to(kind)
                part = part if width == whole else nn.functional.pad(part, (start, whole - start - width))
                held = found[number]
                found[number] = part if held is None else held + part
            at += width + -width % ALIGNED
        return None, None, *found


@dataclass
class _Layer:
    module: nn.Linear
    reads: list[Any]
    act: Activation = field(default_factory=Activation)
    added: Any = None
    before: bool = False
    stage: str = "linear"
    """Then "added" where a value came to its product, "result" behind the activation, "done" where one came to that."""


class _RefusedError(Exception):
    pass


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        alone = next(m.children(), None) is None and next(m.parameters(), None) is None
        return isinstance(m, nn.Linear) or alone or super().is_leaf_module(m, module_qualified_name)


def traced(module: nn.Module, widths: Sequence[int], dims: int) -> Traced | Declined:
    """The layers that a module is for inputs of so many columns and dimensions, or why the kernels do not know it.

    One thread traces at a time; what others call meanwhile is called through torch.fx.
    """
    with TRACING:  # activations are traced, too
        return _traced(module, widths, dims)


def _traced(module: nn.Module, widths: Sequence[int], dims: int) -> Traced | Declined:
    for name, m in module.named_modules():
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return Declined(f"module {name or type(m).__name__} has hooks")
        if type(m) not in _QUIET and any(True for _ in m.named_buffers(recurse=False)):
            return Declined(f"module {name or type(m).__name__} has buffers")
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # what a module of the user's does while it is traced is anyone's guess
        reason = (str(error).splitlines() or [""])[0][:160]
        return Declined(f"{type(module).__name__} cannot be traced: {type(error).__name__}: {reason}")
    try:
        _without_unread(module, graph)
        return _Reader(module, graph, widths, dims).read()
    except _RefusedError as no:
        return Declined(str(no))


_QUIET: tuple[type, ...] = (nn.Linear,)
_ROWS = 16
_NEAR = 1e-2
"""Share of the norm by which the same operations in float32 may differ, their products in TensorFloat-32 or not."""


def unlike(
    module: nn.Module, found: Traced, widths: Sequence[int], dims: int, parameters: Sequence[torch.Tensor]
) -> Declined | None:
    """How a module's results for a few random rows differ from those of the layers it was traced to; None: not at all.

    Both are computed in float32, or in float64 where a parameter has that type, on the device of `parameters`, which
    are those of the layers in order. `widths`, `dims`: of the inputs. torch's own generators are left alone.
    """
    name, device = type(module).__name__, parameters[0].device
    held = {k: p.detach() for k, p in module.named_parameters() if p.is_floating_point()}
    kinds = {p.dtype for p in held.values()}
    dtype = torch.float64 if torch.float64 in kinds else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    shape = (*[1] * (dims - 2), _ROWS)[: dims - 1]
    inputs = [torch.randn((*shape, n), generator=generator, device=device, dtype=dtype) for n in widths]
    given = [x.clone() for x in inputs]
    try:
        with TRACING, torch.no_grad(), torch.autocast(device.type, enabled=False):
            joined = found.joined(inputs, dtype)
            ours = found.layers.composite(joined.reshape(-1, joined.shape[-1]), parameters, dtype)
            if kinds == {dtype}:
                theirs = module(*given)
            else:
                theirs = torch.func.functional_call(module, {k: p.to(dtype) for k, p in held.items()}, tuple(given))
    except Exception as error:  # what a module of the user's does is anyone's guess
        reason = (str(error).splitlines() or [""])[0][:160]
        return Declined(f"{name} cannot be compared with its layers: {type(error).__name__}: {reason}")
    if not all(map(torch.equal, given, inputs)):
        return Declined(f"{name} changes its inputs")
    if (
        not isinstance(theirs, torch.Tensor)
        or theirs.shape != (*shape, ours.shape[-1])
        or not near(ours, theirs.reshape(ours.shape), _NEAR)
    ):
        return Declined(f"{name} computes something else than the layers that it was traced to")
    return None


def _without_unread(module: nn.Module, graph: fx.Graph) -> None:
    """Take out what nobody reads; what might have changed its argument is refused."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if _changes(module, node):
            raise _RefusedError(f"{node.target}, which may change its argument in place, its result unread")
        graph.erase_node(node)


def _changes(module: nn.Module, node: fx.Node) -> bool:
    """Whether an operation may write to its argument."""
    if node.op == "call_module":
        m = module.get_submodule(str(node.target))
        act = Activation() if type(m) is nn.Linear else activation_of(m)
        return bool(getattr(m, "inplace", False)) or isinstance(act, Declined) or act.kind == "formula"
    if node.op == "get_attr":
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    flagged = any(x is True for x in node.args) or bool(node.kwargs.get("inplace")) or "out" in node.kwargs
    return flagged or name.endswith("_") or node.target in _IN_PLACE


_IN_PLACE = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
    operator.iconcat, operator.setitem, operator.delitem, setattr,
)  # fmt: skip


class _Reader:
    def __init__(self, module: nn.Module, graph: fx.Graph, widths: Sequence[int], dims: int) -> None:
        self.module, self.graph, self.widths, self.dims = module, graph, widths, dims
        self.layers: list[_Layer] = []
        self.found: dict[fx.Node, Any] = {}
        """A node is columns of an input, the number of a layer, or a list of such side by side."""
        self.others: list[nn.Module] = []

    def read(self) -> Traced | Declined:
        given = 0
        result: Any = None
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                if given >= len(self.widths):
                    if node.users:
                        raise _RefusedError(f"an input {node.target} that was not given")
                    continue
                self.found[node] = (given, 0, self.widths[given])
                given += 1
            elif node.op == "output":
                result = node.args[0]
            elif node.op == "call_module":
                self.found[node] = self._called(node)
            elif node.op in ("call_function", "call_method"):
                self.found[node] = self._function(node)
            else:
                raise _RefusedError(f"{node.target}, which is no layer")
        if given != len(self.widths):
            raise _RefusedError(f"{len(self.widths)} inputs for a module of {given}")
        if not isinstance(result, fx.Node) or not isinstance(self.found[result], int):
            raise _RefusedError("a result that is not that of one layer")
        if len(self.layers) < 2:
            return Declined("fewer than two Linear layers")
        if self.found[result] != len(self.layers) - 1:
            raise _RefusedError("layers behind the result")
        return self._traced()

    def _module(self, node: fx.Node) -> nn.Module:
        return self.module.get_submodule(str(node.target))

    def _called(self, node: fx.Node) -> Any:
        m = self._module(node)
        if len(node.args) != 1 or node.kwargs:
            raise _RefusedError(f"{type(m).__name__} of several arguments")
        value = self._value(node.args[0])
        if type(m) is nn.Linear:
            reads = value if isinstance(value, list) else [value]
            if sum(map(self._width, reads)) != m.in_features:
                raise _RefusedError(f"{node.target} of {m.in_features} columns behind {sum(map(self._width, reads))}")
            self.layers.append(_Layer(m, reads))
            return len(self.layers) - 1
        self.others.append(m)
        act = activation_of(m)
        if isinstance(act, Declined):
            raise _RefusedError(act.reason)
        return self._activated(node, value, act)

    def _value(self, node: Any) -> Any:
        if not isinstance(node, fx.Node) or node not in self.found:
            raise _RefusedError(f"an operand {str(node)[:40]} that is no value")
        return self.found[node]

    def _width(self, value: Any) -> int:
        return self.layers[value].module.out_features if isinstance(value, int) else int(value[2])

    def _activated(self, node: fx.Node, value: Any, act: Activation) -> Any:
        if act.kind == "identity":  # the same tensor: who reads one reads the other
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            self.graph.erase_node(node)
            return value
        if not isinstance(value, int):
            raise _RefusedError(f"{node.target} that is not behind a Linear")
        layer = self.layers[value]
        if layer.stage not in ("linear", "added"):
            raise _RefusedError(f"{node.target} behind another activation")
        self._alone(node.args[0])
        layer.act, layer.stage = act, "result"
        return value

    def _alone(self, operand: Any) -> None:
        """What is to change while nobody else has read it."""
        if len(operand.users) != 1:
            raise _RefusedError(f"{operand.name}, which is read before and behind what follows it")

    def _function(self, node: fx.Node) -> Any:
        target, args, kwargs = node.target, node.args, node.kwargs
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if target in (torch.cat, torch.concat, torch.concatenate):
            return self._side_by_side(args, kwargs)
        if target in (operator.add, operator.iadd, torch.add) or name in ("add", "add_"):
            if len(args) != 2 or kwargs:
                raise _RefusedError("an addition that scales")
            if target is operator.iadd or name == "add_":
                if not isinstance(self._value(args[0]), int):
                    raise _RefusedError("an addition to an input in place")
                self._alone(args[0])
            return self._sum(args[0], args[1])
        if target is operator.getitem:
            return self._item(args)
        if target in (torch.split, torch.narrow) or name in ("split", "narrow"):
            return self._split(name, args, kwargs)
        act = called(name, args[1:], kwargs)
        if act is None or not args:
            raise _RefusedError(f"{name}, which no kernel of layers has")
        return self._activated(node, self._value(args[0]), act)

    def _last(self, dim: Any) -> None:
        if dim not in (-1, self.dims - 1):
            raise _RefusedError(f"dimension {dim}, which is not that of columns")

    def _side_by_side(self, args: Any, kwargs: Any) -> list[Any]:
        given = args[0] if args else kwargs.get("tensors")
        self._last(args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0)))
        found: list[Any] = []
        for node in given:
            value = self._value(node)
            found += value if isinstance(value, list) else [value]
        return found

    def _sum(self, one: Any, other: Any) -> int:
        values = [(node, self._value(node)) for node in (one, other)]
        layers = sorted((v, node.name, node) for node, v in values if isinstance(v, int))
        if not layers or any(isinstance(v, list) for _, v in values):
            raise _RefusedError("a sum of what is no layer's result")
        at, _, node = layers[-1]
        value = next((v for n, v in values if n is not node), at)
        layer = self.layers[at]
        if value == at or self._width(value) != self._width(at):
            raise _RefusedError("a sum of different columns, or of a value and itself")
        if layer.stage not in ("linear", "result"):
            raise _RefusedError("a layer to which two values are added")
        self._alone(node)
        layer.added, layer.before = value, layer.stage == "linear"
        layer.stage = "added" if layer.before else "done"
        return at

    def _item(self, args: Any) -> Any:
        value, index = self.found.get(args[0]), args[1]
        if isinstance(value, tuple) and isinstance(value[0], tuple):  # of a split
            return value[index]
        if not isinstance(value, tuple):
            raise _RefusedError("an item of what is no input")
        parts = index if isinstance(index, tuple) else (index,)
        full = parts[0] is Ellipsis or (len(parts) == self.dims and all(p == slice(None) for p in parts[:-1]))
        last = parts[-1]
        if len(parts) < 2 or not full or not isinstance(last, slice) or last.step not in (None, 1):
            raise _RefusedError("an item of an input that is not some of its columns")
        if not all(p is None or isinstance(p, int) for p in (last.start, last.stop)):
            raise _RefusedError("columns of an input that are computed")
        start, stop, _ = last.indices(value[2])
        return self._columns(value, start, stop - start)

    def _columns(self, of: Columns, start: int, width: int) -> Columns:
        if width < 1 or start + width > of[2]:
            raise _RefusedError("no columns of an input")
        return of[0], of[1] + start, width

    def _split(self, name: str, args: Any, kwargs: Any) -> Any:
        value = self._value(args[0])
        if not isinstance(value, tuple):
            raise _RefusedError("a part of what is no input")
        if name == "narrow":
            self._last(args[1])
            return self._columns(value, int(args[2]), int(args[3]))
        self._last(args[2] if len(args) > 2 else kwargs.get("dim", 0))
        sizes = args[1]
        if isinstance(sizes, int):
            sizes = [min(sizes, value[2] - at) for at in range(0, value[2], sizes)]
        found, start = [], 0
        for size in sizes:
            found.append(self._columns(value, start, size))
            start += size
        return tuple(found)

    def _traced(self) -> Traced:
        columns: dict[Columns, int] = {}

        def number(value: Any) -> int:
            return value + 1 if isinstance(value, int) else columns.setdefault(value, -len(columns))

        sources = tuple(tuple(number(v) for v in layer.reads) for layer in self.layers)
        added = tuple(None if x.added is None else Added(number(x.added), x.before) for x in self.layers)
        for at, reads in enumerate(sources):
            if any(v > at for v in reads):
                raise _RefusedError("a layer that reads what comes later")
        if any(x is not None and x.value > at for at, x in enumerate(added)):
            raise _RefusedError("a sum with what comes later")
        if len(set(sources[0])) != len(sources[0]) or any(len(set(x)) != len(x) for x in sources):
            raise _RefusedError("a value beside itself")
        return self._placed(tuple(columns), sources, added)

    def _placed(
        self, columns: tuple[Columns, ...], sources: tuple[tuple[int, ...], ...], added: tuple[Added | None, ...]
    ) -> Traced:
        ends = sorted((start, start + width) for _, start, width in columns)
        apart = all(a[1] <= b[0] for a, b in pairwise(ends))
        covered = sum(width for *_, width in columns) == self.widths[0]
        whole = len(self.widths) == 1 and apart and covered
        parts: list[tuple[int, int]] = []
        at = 0
        for _, start, width in columns:
            parts.append((start if whole else at, width))
            at += -(-width // ALIGNED) * ALIGNED
        first = columns[0][2]
        layers = self.layers
        plain = whole and len(columns) == 1
        skips = any(x is not None for x in added) or sources != tuple((i,) for i in range(len(layers)))
        found = Layers(
            (first, *(x.module.out_features for x in layers)),
            tuple(x.act for x in layers),
            tuple(x.module.bias is not None for x in layers),
            sources if skips or not plain else (),
            added if skips or not plain else (),
            () if plain else tuple(parts),
            0 if plain else (self.widths[0] if whole else at),
        )
        held = tuple(x.module for x in layers)
        rest = tuple(m for m in self.module.modules() if not isinstance(m, nn.Linear))
        return Traced(found, columns, (*held, *rest), whole)
