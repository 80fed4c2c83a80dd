"""Functional ATen graphs → graphs of primitives.

Only values are imported: aliasing, strides and memory formats are the framework's. What cannot be a value of static
shape refuses the whole graph by name, so that its caller can let the framework run it.
"""

from __future__ import annotations

import json
import math
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard, final

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from weft.errors import DataDependentError, InvalidGraphError, UnsupportedError
from weft.frontends.imported import Imported, OpaqueUse
from weft.frontends.torch.call import ABSENT, Call, NotTakenError, Pair, Ref
from weft.frontends.torch.complexes import COMPLEX, part_type
from weft.frontends.torch.decompose import decompositions
from weft.frontends.torch.dtypes import DEPENDS, PARTS, static_int, to_numpy, type_of
from weft.frontends.torch.foreign import FOREIGN, Foreign
from weft.frontends.torch.inplace import InPlace, functional_forms
from weft.frontends.torch.refusal import is_users, untraced
from weft.frontends.torch.table import CHECKS_ITSELF, KEPT, OPAQUE, REFUSED, STATIC, TABLE, WITHOUT_EFFECT
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, NodeId, Origin, digests_of
from weft.ir.prims import Prim
from weft.ir.shapes import ShapeError
from weft.ir.types import Array, DType, TensorType

_ADMITTED = frozenset({"aten", "prims"})
_OWN = frozenset(
    f"weft.{name}.default" for name in ("attention", "attention_backward", "recurrent", "recurrent_backward")
)
"""What a training step calls of this project's, see `generate.library.trained_attention` and `trained_recurrent`."""
_READS_MEMORY = frozenset(
    {"aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default"}
)
_NONE: Mapping[int, torch.Tensor] = MappingProxyType({})
_OF_FRAMEWORK = "it depends on what the framework runs"
_FILE_LINE = re.compile(r'File "([^"]*)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Result:
    """One result of the source program, and where a caller finds it."""

    value: int = -1
    """Position among the graph's outputs; -1: it is not computed."""
    argument: int = -1
    """Position of the argument that is handed back as it is; -1: none."""
    static: int | float | bool | str | None = None
    """The result where it is neither: a number that the specialisation fixed, or None."""
    strides: tuple[int, ...] = ()
    """Strides that the framework would give the tensor."""


@dataclass(frozen=True, slots=True)
class Program:
    """An imported graph with the calling convention of the program it came from."""

    imported: Imported
    arguments: tuple[int, ...]
    """For each input of the graph the position of the argument it reads."""
    results: tuple[Result, ...]
    mutations: tuple[tuple[int, int], ...] = ()
    """(argument, position among the graph's outputs): copied into the argument when everything is computed."""


@final
class _Left:
    """What a call gives that the framework runs, where it is no tensor that a graph could take as an input."""


@final
class _Importer:
    """Walks one FX graph."""

    def __init__(
        self,
        device: str,
        attribute: Callable[[str], object],
        inplace: Mapping[fx.Node, InPlace] | None = None,
    ) -> None:
        self.b = GraphBuilder()
        self.env: dict[fx.Node, object] = {}
        self.operators = 0
        self.fallen: dict[tuple[str, str], int] = {}
        self._device = torch.device(device).type
        self._attribute = attribute
        self._constants: dict[int, Ref | Pair] = {}
        self._read: dict[int, tuple[Array, DType, str]] = {}
        """Data and digests of tensors, by identity; see `read`."""
        self._inplace = inplace or {}
        self.left: dict[fx.Node, UnsupportedError] | None = None
        """Calls that no graph holds, where these are to be found and not refused: their results count as inputs."""
        self.in_reals = True
        """Complex numbers are two reals; else calls that take or give them are refused."""

    # values

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Look at tensors by name that `constant` will be asked for: all together their digests take less time."""
        fresh = {id(t): (t, n) for n, t in tensors.items() if id(t) not in self._read and t.dtype not in PARTS}
        for tensor, name in fresh.values():
            type_of(tensor, f"constant {name!r}")
        with _disable_current_modes():
            found = [to_numpy(t) for t, _ in fresh.values()]
        digests = digests_of([(dtype, data) for data, dtype in found])
        self._read.update({i: (*pair, digest) for i, pair, digest in zip(fresh, found, digests, strict=True)})

    def constant(self, tensor: torch.Tensor, name: str) -> Ref | Pair:
        """A tensor of the module, once."""
        if tensor.dtype in PARTS and id(tensor) not in self._constants:
            with _disable_current_modes():
                parts = [self.b.constant(*to_numpy(part)) for part in (tensor.real, tensor.imag)]
            self._constants[id(tensor)] = Pair(*parts)
        if id(tensor) not in self._constants:
            self.read({name: tensor})
            data, dtype, digest = self._read.pop(id(tensor))
            self._constants[id(tensor)] = Ref(self.b.constant(data, dtype, digest=digest))
        return self._constants[id(tensor)]

    def input(self, node: fx.Node, name: str) -> None:
        """A tensor argument."""
        value = node.meta["val"]
        self._check_device(value, name)
        self.env[node] = Ref(self.b.input(type_of(value, f"input {name!r}"), name))

    def attribute(self, node: fx.Node) -> None:
        """A tensor that the graph module holds."""
        value = self._attribute(str(node.target))
        if isinstance(value, torch.Tensor):
            self.env[node] = self.constant(value, str(node.target))
        elif isinstance(value, bool | int | float):
            self.env[node] = value
        elif isinstance(value, torch.nn.Module):  # the branches and bodies of `torch.cond` and its kind
            told = next(iter(node.users), node)
            raise UnsupportedError(
                where=_place(told), op=str(told.target), reason="which operators run depends on the values of tensors"
            )
        else:
            raise UnsupportedError(op=f"get_attr {node.target}", reason=f"holds a {type(value).__name__}")

    def resolve(self, value: object) -> object:
        """An argument of an FX node with nodes replaced by what they stand for."""
        if isinstance(value, fx.Node):
            found = self.env[value]
            if isinstance(found, _Left):
                raise UnsupportedError(op=str(value), reason=_OF_FRAMEWORK)
            return found
        if isinstance(value, list | tuple):
            return [self.resolve(v) for v in value]
        return _static(value)

    def _check_device(self, value: torch.Tensor, op: str) -> None:
        if value.device.type != self._device and value.dim() > 0:
            raise UnsupportedError(op=op, reason=f"a tensor on {value.device}, compiled for {self._device}")

    # calls

    def call(self, node: fx.Node) -> None:
        """One call_function node.

        Raises:
            UnsupportedError: nothing here runs it; the error has the node's place [W201].
        """
        try:
            self._called(node)
        except UnsupportedError as error:
            if error.where:
                raise
            raise type(error)(where=_place(node), **error.details) from error

    def _called(self, node: fx.Node) -> None:
        target = node.target
        value = node.meta.get("val")
        if target is operator.getitem:
            whole, index = self.resolve(node.args[0]), node.args[1]
            self.env[node] = whole[index]  # type: ignore[index]
            return
        name = str(target)
        is_number = isinstance(value, bool | int | float | torch.SymInt | torch.SymBool | torch.SymFloat)
        if name in STATIC or (is_number and not isinstance(target, torch._ops.OpOverload)):
            self.env[node] = _static(value)
            return
        if name in WITHOUT_EFFECT:
            self.env[node] = None
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise UnsupportedError(op=getattr(target, "__name__", name), reason="not an ATen operator")
        if self.in_reals and _is_complex(node):
            self.operators += 1
            self._complex(node, target, name)
            return
        if node in self._inplace:
            self.operators += 1
            call = self._inplace[node]
            self._operator(node, call.overload, str(call.overload))
            self.env.update(dict.fromkeys(call.names, self.env[node]))
            return
        if name in REFUSED:
            raise UnsupportedError(op=name, reason=REFUSED[name])
        if name in FOREIGN and self._device == "cpu":
            self.operators += 1
            self._foreign(node, target, name, FOREIGN[name])
            return
        if target._schema.is_mutable and name not in TABLE:
            raise UnsupportedError(op=name, reason="writes into its arguments")
        self.operators += 1
        self._operator(node, target, name)

    def _foreign(self, node: fx.Node, target: torch._ops.OpOverload, name: str, foreign: Foreign) -> None:
        """A call of another library's operator, by ATen's."""
        type, source, location = self._result_type(node.meta["val"], name), f"{node.name} ({name})", _location(node)
        call = Call(self.b, name, self._arguments(node, target), (type,), frozenset({0}), source, location)
        with self.b.origin(Origin(rule="", source=source, location=location)):
            try:
                given = foreign.arguments(call)
            except NotTakenError as declined:
                raise UnsupportedError(op=name, reason=declined.reason) from None
            (found,) = self._opaque(given, {}, foreign.target, name, (type,), frozenset({0}), foreign.reason)
            self.env[node] = Ref(foreign.result(call, found))

    def _operator(self, node: fx.Node, target: torch._ops.OpOverload, name: str) -> None:
        value = node.meta["val"]
        many = isinstance(value, list | tuple)
        values: Sequence[object] = value if many else (value,)
        types = tuple(self._result_type(v, name) for v in values)
        used = _used(node, len(types)) if many else frozenset({0})
        arguments = self._arguments(node, target)
        memory = name in _READS_MEMORY
        if memory:
            arguments["dense_input"] = _is_plain(node.args[0])
        location = _location(node)
        source = f"{node.name} ({name})"

        def left(some: frozenset[int], given: Mapping[str, object], reason: str) -> tuple[NodeId, ...]:
            kept = tuple(t if i in some else None for i, t in enumerate(types))
            return self._left(target, name, (), given, kept, some, reason)

        call = Call(self.b, name, arguments, types, used, source, location, left)
        with self.b.origin(Origin(rule="", source=source, location=location)):
            try:
                found = self._native(call)
            except NotTakenError as refused:
                if memory and not arguments["dense_input"]:
                    raise UnsupportedError(op=name, reason="reads memory that a value does not describe") from None
                if _is_random(target, arguments):
                    raise UnsupportedError(op=name, reason="draws random numbers") from None
                given, named = self._as_called(node)
                found = self._opaque(given, named, target, name, types, used, refused.reason)
        results = [Ref(n) if n != ABSENT else None for n in found]
        self.env[node] = results if many else results[0]

    def _complex(self, node: fx.Node, target: torch._ops.OpOverload, name: str) -> None:
        """A call with a complex operand or result: in reals, or by the framework with complex numbers inside."""
        value = node.meta["val"]
        many = isinstance(value, list | tuple)
        values: Sequence[object] = value if many else (value,)
        types: list[TensorType] = []
        for v in values:
            found = part_type(v) if _has_parts(v) else self._result_type(v, name)
            if found is None:
                raise UnsupportedError(op=name, reason="leaves out a result")
            types.append(found)
        pairs = [_has_parts(v) for v in values]
        source, location = f"{node.name} ({name})", _location(node)
        arguments = self._arguments(node, target)
        call = Call(self.b, name, arguments, types, frozenset(range(len(types))), source, location)
        with self.b.origin(Origin(rule="", source=source, location=location)):
            try:
                results = self._in_parts(call, pairs)
            except NotTakenError as refused:
                if _is_random(target, arguments):
                    raise UnsupportedError(op=name, reason="draws random numbers") from None
                every = tuple(t for t, two in zip(types, pairs, strict=True) for _ in range(1 + two))
                given, named = self._as_called(node)
                used = frozenset(range(len(every)))
                left = iter(self._opaque(given, named, target, name, every, used, refused.reason))
                results = [Pair(next(left), next(left)) if two else Ref(next(left)) for two in pairs]
        self.env[node] = results if many else results[0]

    def _in_parts(self, call: Call, pairs: Sequence[bool]) -> list[Ref | Pair]:
        """Results by the handler, in the types that torch gives them."""
        if call.op not in COMPLEX:
            raise NotTakenError("complex numbers")
        try:
            made = COMPLEX[call.op](call)
        except (InvalidGraphError, ShapeError) as error:
            raise NotTakenError(f"internal: {error}") from error
        found = made if isinstance(made, tuple) else (made,)
        if [isinstance(x, Pair) for x in found] != list(pairs):
            raise NotTakenError("complex numbers")
        results: list[Ref | Pair] = []
        for x, type in zip(found, call.results, strict=True):
            assert type is not None
            parts = (x.re, x.im) if isinstance(x, Pair) else (x.node,)
            fixed = [self.b.broadcast(self.b.cast(part, type.dtype), type.shape) for part in parts]
            results.append(Pair(*fixed) if isinstance(x, Pair) else Ref(fixed[0]))
        return results

    def _result_type(self, value: object, name: str) -> TensorType | None:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(op=name, reason=f"a result is {type(value).__name__}, not a tensor")
        self._check_device(value, name)
        return type_of(value, name)

    def _arguments(self, node: fx.Node, target: torch._ops.OpOverload) -> dict[str, object]:
        found: dict[str, object] = {}
        for i, spec in enumerate(target._schema.arguments):
            if i < len(node.args) and not spec.kwarg_only:
                found[spec.name] = self.resolve(node.args[i])
            elif spec.name in node.kwargs:
                found[spec.name] = self.resolve(node.kwargs[spec.name])
            else:
                found[spec.name] = spec.default_value
        return found

    def _native(self, call: Call) -> tuple[NodeId, ...]:
        """Nodes of the results by the handler, in the types that torch gives them."""
        if call.op not in TABLE:
            raise NotTakenError({**OPAQUE, **KEPT}.get(call.op, "no rule"))
        try:
            found = TABLE[call.op](call)
        except (InvalidGraphError, ShapeError) as error:
            # a handler or rule that did not foresee these operands: their own operator still runs them
            raise NotTakenError(f"internal: {error}") from error
        nodes = found if isinstance(found, tuple) else (found,)
        fixed = []
        for i, type in enumerate(call.results):
            node = nodes[i] if i < len(nodes) else ABSENT
            if i not in call.used or type is None:
                fixed.append(ABSENT)
                continue
            if node == ABSENT:
                raise NotTakenError(f"internal: result {i} is missing")
            if self.b.type_of(node).shape != type.shape:
                raise NotTakenError(f"internal: result {i} is {self.b.type_of(node)} instead of {type}")
            fixed.append(self.b.cast(node, type.dtype))
        return tuple(fixed)

    def _as_called(self, node: fx.Node) -> tuple[list[object], dict[str, object]]:
        """The arguments of a call as they stand in it."""
        return [self.resolve(x) for x in node.args], {k: self.resolve(v) for k, v in node.kwargs.items()}

    def _opaque(
        self,
        given: Sequence[object],
        named: Mapping[str, object],
        target: torch._ops.OpOverload,
        name: str,
        types: tuple[TensorType | None, ...],
        used: frozenset[int],
        reason: str,
    ) -> tuple[NodeId, ...]:
        if target.namespace not in _ADMITTED and name not in _OWN:
            raise UnsupportedError(op=name, reason=f"an operator of {target.namespace!r}, which ATen does not know")
        if torch.Tag.dynamic_output_shape in target.tags or torch.Tag.data_dependent_output in target.tags:
            raise DataDependentError(op=name, reason=DEPENDS)
        if target._schema.is_mutable:
            raise UnsupportedError(op=name, reason="writes into its arguments")
        if name in CHECKS_ITSELF and self._device != "cpu":  # no graph of launches waits for the host
            raise UnsupportedError(op=name, reason=CHECKS_ITSELF[name])
        return self._left(target, name, given, named, types, used, reason)

    def _left(
        self,
        target: torch._ops.OpOverload,
        name: str,
        positional: Sequence[object],
        named: Mapping[str, object],
        types: tuple[TensorType | None, ...],
        used: frozenset[int],
        reason: str,
    ) -> tuple[NodeId, ...]:
        """Nodes of a call that the framework runs; its results are those that have a type."""
        inputs: list[NodeId] = []
        args = [self._encode(x, inputs, name) for x in positional]
        kwargs = {k: self._encode(v, inputs, name) for k, v in named.items()}
        payload = json.dumps(
            {
                "op": target._schema.name,
                "overload": target._schema.overload_name,
                "inputs": [self.b.type_of(i).dtype.value for i in inputs],
                "args": args,
                "kwargs": kwargs,
            },
            sort_keys=True,
        )
        present = tuple(t for t in types if t is not None)
        found, position = [], 0
        for i, type in enumerate(types):
            if type is None:
                found.append(ABSENT)
                continue
            if i in used:
                attrs = a.OpaqueAttrs("aten", name, payload, position, present, reason)
                found.append(self.b.add(Prim.OPAQUE, *inputs, attrs=attrs))
            else:
                found.append(ABSENT)
            position += 1
        self.fallen[name, reason] = self.fallen.get((name, reason), 0) + 1
        return tuple(found)

    def _encode(self, value: object, inputs: list[NodeId], op: str) -> Any:
        """A JSON value that `weft.generate.library.opaque_aten` turns back."""
        if isinstance(value, Ref):
            inputs.append(value.node)
            return {"tensor": len(inputs) - 1}
        if isinstance(value, Pair):
            inputs.extend((value.re, value.im))
            return {"complex": len(inputs) - 2}
        if isinstance(value, list | tuple):
            return [self._encode(v, inputs, op) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": repr(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.device):
            return {"device": value.type}
        for kind, cls in (
            ("dtype", torch.dtype),
            ("layout", torch.layout),
            ("memory_format", torch.memory_format),
        ):
            if isinstance(value, cls):
                return {kind: str(value).removeprefix("torch.")}
        raise UnsupportedError(op=op, reason=f"an argument is a {type(value).__name__}")

    # the whole graph

    def walk(self, graph: fx.Graph, skip: frozenset[fx.Node]) -> None:
        """All nodes but inputs and output, in order; nobody's results are left out."""
        live = _live(graph, skip)
        for node in graph.nodes:
            if node.op in ("placeholder", "output") or node in skip or node not in live:
                continue
            try:
                self._walked(node)
            except UnsupportedError as error:
                if self.left is None:
                    raise
                self.left[node] = error
                self.env[node] = self._given(node.meta.get("val"), node.name)

    def _walked(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.attribute(node)
        elif node.op == "call_function":
            self.call(node)
        else:
            raise UnsupportedError(op=f"{node.op} {node.target}", reason="not a functional ATen graph")

    def _given(self, value: object, name: str) -> object:
        """What stands for the result of a call that the framework runs."""
        if isinstance(value, list | tuple):
            return [self._given(v, name) for v in value]
        if isinstance(value, torch.Tensor):
            try:
                self._check_device(value, name)
                return Ref(self.b.input(type_of(value, name), name))
            except UnsupportedError:
                return _Left()
        return None if value is None else _Left()

    def finish(self, outputs: Sequence[NodeId], names: Sequence[str], notes: tuple[str, ...]) -> Imported:
        """The import as a value."""
        opaque = Counter(self.fallen).most_common()
        return Imported(
            graph=self.b.build(outputs, names),
            operators=self.operators,
            opaque=tuple(OpaqueUse(op, reason, count) for (op, reason), count in opaque),
            notes=notes,
        )


def _has_parts(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a complex tensor that two real ones stand for."""
    return isinstance(value, torch.Tensor) and value.dtype in PARTS


def _is_complex(node: fx.Node) -> bool:
    """Whether a call has a complex operand or result."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return any(_has_parts(x) for v in values for x in (v if isinstance(v, list | tuple) else (v,)))


def _is_random(target: torch._ops.OpOverload, arguments: Mapping[str, object]) -> bool:
    """Whether a call draws random numbers: not where its dropout is off."""
    dropout = arguments.get("dropout_p", arguments.get("dropout"))
    off = dropout == 0.0 or (dropout is not None and arguments.get("train") is False)
    return not off and (torch.Tag.nondeterministic_seeded in target.tags or dropout is not None)


def _static(value: object) -> object:
    """Symbolic numbers take the value of the example."""
    if isinstance(value, torch.SymInt):
        return static_int(value)
    if isinstance(value, torch.SymBool | torch.SymFloat):
        hint = value.node.hint
        if hint is None:
            raise UnsupportedError(op="torch.SymFloat", reason=f"{value} depends on data")
        return bool(hint) if isinstance(value, torch.SymBool) else float(hint)
    return value


def _used(node: fx.Node, count: int) -> frozenset[int]:
    """Positions of the results that are read; all of them where the list is passed on whole."""
    if any(u.target is not operator.getitem for u in node.users):
        return frozenset(range(count))
    return frozenset(int(u.args[1]) % count for u in node.users if u.users)  # type: ignore[arg-type]


def _live(graph: fx.Graph, skip: frozenset[fx.Node]) -> set[fx.Node]:
    """Nodes that an output or a mutation needs; a check without users is not one."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in skip or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    for node in graph.nodes:
        impure = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if node.op == "call_function" and impure and node not in skip:
            live.add(node)
            live.update(_ancestors(node, live))
    return live


def _ancestors(node: fx.Node, known: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        one = stack.pop()
        if one not in found and one not in known:
            found.add(one)
            stack.extend(one.all_input_nodes)
    return found


def _is_plain(node: object) -> bool:
    """Whether the framework's tensor is contiguous from the start of its memory."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_contiguous() and static_int(value.storage_offset()) == 0


def _location(node: fx.Node) -> str:
    """File name and line of the innermost frame; no folders, which say more about the user than about the model."""
    found = _FILE_LINE.findall(node.meta.get("stack_trace") or "")
    return f"{found[-1][0].replace(chr(92), '/').rpartition('/')[2]}:{found[-1][1]}" if found else ""


def _place(node: fx.Node) -> str:
    """Of a call, for errors: its name, its module, and the line of the model that led to it."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    frames = _FILE_LINE.findall(node.meta.get("stack_trace") or "")
    own = [f"{Path(file).name}:{line}" for file, line in frames if is_users(file)]
    path = paths[-1].replace("L['self'].", "").removeprefix("L['self']") if paths else ""
    told = ", ".join(filter(None, (path and f"module {path}", own[-1] if own else _location(node))))
    return f"{node.name} ({told})" if told else node.name


def _strides(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(static_int(s) for s in value.stride()) if isinstance(value, torch.Tensor) else ()


def _results(
    importer: _Importer, nodes: Sequence[object], arguments: Mapping[fx.Node, int]
) -> tuple[list[NodeId], list[Result]]:
    """What the graph must give out, and how the program's results are made from that."""
    outputs: list[NodeId] = []
    results: list[Result] = []
    for node in nodes:
        if isinstance(node, fx.Node) and node in arguments:
            results.append(Result(argument=arguments[node], strides=_strides(node)))
            continue
        value = importer.resolve(node)
        if isinstance(value, Ref):
            outputs.append(value.node)
            strides = _strides(node) if isinstance(node, fx.Node) else ()
            results.append(Result(value=len(outputs) - 1, strides=strides))
        elif value is None or isinstance(value, bool | int | float | str):
            results.append(Result(static=value))
        else:
            told = "a complex tensor" if isinstance(value, Pair) else type(value).__name__
            raise UnsupportedError(op="output", reason=f"a result is {told}")
    return outputs, results


def _arguments_of(
    importer: _Importer, gm: fx.GraphModule, example_inputs: Sequence[object], constants: Mapping[int, torch.Tensor]
) -> tuple[dict[fx.Node, int], list[int]]:
    """The positions of all arguments, and of those that are inputs of the imported graph, which knows them now."""
    arguments: dict[fx.Node, int] = {}
    positions: list[int] = []
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for position, node in enumerate(placeholders):
        arguments[node] = position
        value = node.meta.get("val", example_inputs[position] if position < len(example_inputs) else None)
        if position in constants:
            importer.env[node] = importer.constant(constants[position], str(node.target))
        elif isinstance(value, torch.Tensor):
            node.meta.setdefault("val", value)
            importer.input(node, str(node.target))
            positions.append(position)
        elif value is None or isinstance(value, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
            importer.env[node] = _static(value)
        else:
            raise UnsupportedError(op=f"input {node.target}", reason=f"is a {type(value).__name__}")
    return arguments, positions


def calls_of_framework(
    gm: fx.GraphModule, example_inputs: Sequence[object], *, device: str = "cpu"
) -> Mapping[fx.Node, UnsupportedError]:
    """The calls of a graph that no graph of primitives holds, each with the reason; the others can be imported.

    The graph is functional ATen with types, as `aot_autograd` makes them; `copy_` into arguments is no such call. No
    weight is read: all arguments count as inputs.

    Raises:
        UnsupportedError: an argument that is no dense tensor of static shape, or a number [W201].
    """
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    given = [n.meta.get("val") for n in output.all_input_nodes]
    # a part neither takes nor gives complex numbers: they are in reals where the whole graph is one part
    if not any(map(_has_parts, given)):
        left = _left_of(gm, example_inputs, device, in_reals=True)
        if not left or not any(n.op == "call_function" and _is_complex(n) for n in gm.graph.nodes):
            return left
    return _left_of(gm, example_inputs, device, in_reals=False)


def _left_of(
    gm: fx.GraphModule, example_inputs: Sequence[object], device: str, *, in_reals: bool
) -> Mapping[fx.Node, UnsupportedError]:
    importer = _Importer(device, lambda name: _attribute_of(gm, name))
    left: dict[fx.Node, UnsupportedError] = {}
    importer.left, importer.in_reals = left, in_reals
    arguments, _ = _arguments_of(importer, gm, example_inputs, _NONE)
    importer.walk(gm.graph, frozenset(_epilogue(gm.graph, arguments)))
    return left


def import_fx_program(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    device: str = "cpu",
    constants: Mapping[int, torch.Tensor] = _NONE,
) -> Program:
    """A functional graph of core ATen, as `aot_autograd` makes them, with its calling convention.

    `copy_` into arguments may stand at the end (input mutation kept in the graph): it is listed, not imported.
    A graph of another kind (modules, methods, Python operators) is traced to ATen first.
    Arguments at the positions of `constants`, which the graph must not write, are compiled in with those values.

    Raises:
        UnsupportedError: a value that is no dense tensor of static shape, an effect, a random number [W201].
    """
    if not _is_traced(gm):
        gm = _traced(gm, example_inputs)
    importer = _Importer(device, lambda name: _attribute_of(gm, name))
    arguments, positions = _arguments_of(importer, gm, example_inputs, constants)
    copies = _epilogue(gm.graph, arguments)
    importer.walk(gm.graph, frozenset(copies))
    for copy in copies:
        importer.env[copy] = importer.env[copy.args[0]]  # type: ignore[index]
        arguments[copy] = arguments[copy.args[0]]  # type: ignore[index]
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    outputs, results = _results(importer, _flat(output.args[0]), arguments)
    mutations = []
    for copy in copies:
        source = importer.resolve(copy.args[1])
        if not isinstance(source, Ref):
            raise UnsupportedError(op="aten.copy_.default", reason="copies something that is not a tensor")
        outputs.append(source.node)
        mutations.append((arguments[copy], len(outputs) - 1))
    imported = importer.finish(outputs, (), ())
    return Program(imported, tuple(positions), tuple(results), tuple(mutations))


def import_fx(gm: fx.GraphModule, example_inputs: Sequence[object], *, device: str = "cpu") -> Imported:
    """Primitives of an FX graph; see `import_fx_program`.

    Raises:
        UnsupportedError: the graph is refused, or it writes into its arguments [W201].
    """
    program = import_fx_program(gm, example_inputs, device=device)
    if program.mutations:
        raise UnsupportedError(op="aten.copy_.default", reason="the graph writes into its arguments")
    return program.imported


@dataclass(frozen=True)
class Functional:
    """An exported program in which no call writes, or only such as are read as functional ones."""

    program: torch.export.ExportedProgram
    inplace: Mapping[fx.Node, InPlace]
    """How those are read; empty: there are none."""


def functional_program(program: torch.export.ExportedProgram) -> Functional:
    """The program as it is imported: torch takes its operators apart where it must.

    Raises:
        NotTracedError: it cannot [W207].
    """
    inplace = functional_forms(program.graph)
    if inplace is not None and not _needs_decomposition(program, inplace):
        return Functional(program, inplace)
    return Functional(_decomposed(program), {})


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        # torch warns about itself while it copies the program
        warnings.simplefilter("ignore")
        try:
            found: torch.export.ExportedProgram = program.run_decompositions(decompositions())
            return found
        except Exception as error:  # whatever torch raises while it traces the program again
            raise untraced(error) from error


def import_exported_program(program: torch.export.ExportedProgram, *, device: str = "cpu") -> Program:
    """An exported program with its calling convention: flat user inputs in, flat user outputs out.

    Raises:
        UnsupportedError: a value that is no dense tensor of static shape, an effect, a random number [W201].
        NotTracedError: torch cannot take its operators apart [W207].
    """
    return import_functional_program(functional_program(program), device=device)


def import_functional_program(found: Functional, *, device: str = "cpu") -> Program:
    """`import_exported_program` of what `functional_program` gives.

    Raises:
        UnsupportedError: a value that is no dense tensor of static shape, an effect, a random number [W201].
    """
    program, inplace = found.program, found.inplace
    gm = program.graph_module
    importer = _Importer(device, lambda name: _attribute_of(gm, name), inplace)
    nodes = {n.name: n for n in gm.graph.nodes}
    arguments: dict[fx.Node, int] = {}
    positions: list[int] = []
    kinds = torch.export.graph_signature.InputKind
    held = _held(program, nodes)
    importer.read({t: x for t, x in held.items() if isinstance(x, torch.Tensor)})
    for spec in program.graph_signature.input_specs:
        node = nodes.get(spec.arg.name)
        if spec.kind is kinds.USER_INPUT:
            position = len(arguments)
            if node is None:
                raise UnsupportedError(op=f"input {spec.arg.name!r}", reason="is not in the graph")
            arguments[node] = position
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                importer.input(node, spec.arg.name)
                positions.append(position)
            else:
                importer.env[node] = _static(value if value is not None else getattr(spec.arg, "value", None))
        elif spec.kind in _HELD:
            target = spec.target or ""
            if node is None or not node.users:
                continue
            tensor = held[target]
            if not isinstance(tensor, torch.Tensor):
                raise UnsupportedError(op=f"parameter {target!r}", reason="is not in the program")
            importer.env[node] = importer.constant(tensor, target)
        else:
            raise _odd_input(spec.kind.name, node, spec.arg.name)
    wanted: list[object] = []
    out = torch.export.graph_signature.OutputKind
    for output in program.graph_signature.output_specs:
        if output.kind is not out.USER_OUTPUT:
            reason = _WRITES.get(output.kind.name, f"the program does {output.kind.name}")
            raise UnsupportedError(op=f"output {output.target!r}", reason=reason)
        name = getattr(output.arg, "name", None)
        wanted.append(nodes[name] if name in nodes else getattr(output.arg, "value", None))
    importer.walk(gm.graph, frozenset())
    # an argument that is returned is an output of the graph: there is no wrapper around an exported program
    outputs, results = _results(importer, wanted, {})
    notes = tuple(f"dimension {symbol} was set to {value}" for symbol, value in sorted(_symbols(gm.graph).items()))
    return Program(importer.finish(outputs, (), notes), tuple(positions), tuple(results))


_HELD = frozenset(torch.export.graph_signature.InputKind[x] for x in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"))
_WRITES = {
    "BUFFER_MUTATION": "the program writes its buffer (BUFFER_MUTATION)",
    "PARAMETER_MUTATION": "the program writes its parameter (PARAMETER_MUTATION)",
    "USER_INPUT_MUTATION": "the program writes its input (USER_INPUT_MUTATION)",
}


def _odd_input(kind: str, node: fx.Node | None, name: str) -> UnsupportedError:
    """Of an input that is neither a tensor nor a number: a token that orders calls with effects, an object of C++."""
    user = next(iter(node.users), None) if node is not None else None
    if kind == "TOKEN" and user is not None:
        return UnsupportedError(where=_place(user), op=str(user.args[1]), reason="it has an effect beside its result")
    return UnsupportedError(op=f"input {name!r}", reason=f"an input of kind {kind}")


def as_function(found: Functional) -> tuple[fx.GraphModule, Sequence[torch.Tensor]] | None:
    """The program as a functional graph, and the tensors of its own that it takes before its inputs.

    Checks that hold for these types are left out. None: it writes, or takes or gives more than tensors.
    """
    program = _decomposed(found.program) if found.inplace else found.program
    kinds, out = torch.export.graph_signature.InputKind, torch.export.graph_signature.OutputKind
    nodes = {n.name: n for n in program.graph.nodes}
    own: list[torch.Tensor] = []
    for position, spec in enumerate(program.graph_signature.input_specs):
        node, target = nodes.get(spec.arg.name), spec.target or ""
        if spec.kind is kinds.USER_INPUT and node is not None and isinstance(node.meta.get("val"), torch.Tensor):
            continue
        tensor = _value_of(program, target)
        if spec.kind not in _HELD or not isinstance(tensor, torch.Tensor) or position > len(own):
            return None
        own.append(tensor)
    for output in program.graph_signature.output_specs:
        node = nodes.get(getattr(output.arg, "name", ""))
        if output.kind is not out.USER_OUTPUT or node is None or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(program.graph, copied))
    for node in reversed(list(graph.nodes)):
        if not node.users and str(node.target) in WITHOUT_EFFECT | STATIC:
            graph.erase_node(node)
    return fx.GraphModule(program.graph_module, graph), own


def _held(program: torch.export.ExportedProgram, nodes: Mapping[str, fx.Node]) -> dict[str, object]:
    """What the program holds under the targets of those inputs that somebody reads."""
    used = (s for s in program.graph_signature.input_specs if s.arg.name in nodes and nodes[s.arg.name].users)
    targets = [s.target or "" for s in used]
    return {t: _value_of(program, t) for t in targets}


def _value_of(program: torch.export.ExportedProgram, target: str) -> object:
    return program.state_dict.get(target, program.constants.get(target))


def import_exported(program: torch.export.ExportedProgram, *, device: str = "cpu") -> Imported:
    """Primitives of an exported program; parameters and buffers become constants.

    Raises:
        UnsupportedError: a value that is no dense tensor of static shape, an effect, a random number [W201].
    """
    return import_exported_program(program, device=device).imported


def _needs_decomposition(program: torch.export.ExportedProgram, inplace: Mapping[fx.Node, InPlace]) -> bool:
    """Whether a call is in no table, or writes statistics although its schema does not say so."""
    known = TABLE.keys() | OPAQUE.keys() | KEPT.keys() | STATIC | WITHOUT_EFFECT | COMPLEX.keys()
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        target = inplace[node].overload if node in inplace else node.target
        if not isinstance(target, torch._ops.OpOverload):
            if isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
                return True
            continue
        if str(target) not in known or (str(target) == "aten.batch_norm.default" and node.args[5] is not False):
            return True
    return False


def _symbols(graph: fx.Graph) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            sizes: list[object] = list(value.shape)
            found.update((str(s), static_int(s)) for s in sizes if isinstance(s, torch.SymInt))
    return found


def _epilogue(graph: fx.Graph, arguments: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The copies into arguments at the end of a graph of which input mutations were kept."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) == "aten.copy_.default" and node.args[0] in arguments:
            if any(u.op != "output" for u in node.users):
                raise UnsupportedError(op="aten.copy_.default", reason="the graph reads an argument after writing it")
            found.append(node)
    return found


def _flat(value: object) -> list[object]:
    return [x for item in value for x in _flat(item)] if isinstance(value, list | tuple) else [value]


def _attribute_of(gm: fx.GraphModule, name: str) -> object:
    found: object = gm
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _is_traced(gm: fx.GraphModule) -> bool:
    return all(
        n.op in ("placeholder", "output", "get_attr") or (n.op == "call_function" and "val" in n.meta)
        for n in gm.graph.nodes
    )


def _traced(gm: fx.GraphModule, example_inputs: Sequence[object]) -> fx.GraphModule:
    """The same computation as a functional ATen graph with types."""
    functional = torch.func.functionalize(gm, remove="mutations_and_views")
    try:
        trace = make_fx(
            functional, decomposition_table=decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True
        )
        return trace(*example_inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise UnsupportedError(op="FX graph", reason=str(error)) from error
