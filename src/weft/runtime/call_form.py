"""How a saved plan is called and what it gives, where a module has more than tensors by place: as JSON in its file.

A form is of one plan: where its tensors stand in arguments and results, and what stands beside them (numbers, texts,
None). Objects that hold fields (dataclasses, named tuples, the outputs of `transformers`) are given back as `Outputs`:
a file names no class that would have to be imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from weft.errors import InputError
from weft.kernels.call_tree import COMPLEX, DICT, FIELDS, LIST, TENSOR, TUPLE, VALUE, is_plain
from weft.kernels.codec import Json

MOST_NODES = 100_000
"""Of a form in a file."""
MOST_DEPTH = 60


@final
class Outputs(tuple[Any, ...]):  # noqa: SLOT001 - a tuple has no place for slots
    """Results by name and by place: what a module gave as a dataclass or a named tuple, from a saved plan."""

    def __new__(cls, fields: Mapping[str, object]) -> Outputs:
        """`fields`: in order. Those that are None are no places, as in the outputs of `transformers`."""
        made = super().__new__(cls, (x for x in fields.values() if x is not None))
        made.__dict__["_fields"] = dict(fields)
        return made

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_fields"][name]
        except KeyError:
            raise AttributeError(f"there is no result {name!r}; there are {', '.join(self.keys())}") from None

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, str):
            return self.__dict__["_fields"][at]
        return super().__getitem__(at)

    def keys(self) -> list[str]:
        """Names of the results that there are."""
        return [name for name, x in self.__dict__["_fields"].items() if x is not None]

    def items(self) -> list[tuple[str, Any]]:
        """The same with the results."""
        return [(name, x) for name, x in self.__dict__["_fields"].items() if x is not None]

    def __repr__(self) -> str:
        return f"Outputs({', '.join(self.keys())})"


@dataclass(frozen=True, slots=True)
class CallForm:
    """Of one plan."""

    names: tuple[str, ...]
    """Of the arguments that can be given by place."""
    defaults: Mapping[str, Json]
    """What an argument is where it is left out, as far as that is a number, a text or None."""
    arguments: Json
    """[args, kwargs]; None: the plan's inputs by place."""
    results: Json
    """None: one is a tensor, several are a tuple."""

    def to_json(self) -> dict[str, Json]:
        """As it stands in a file."""
        return {
            "names": list(self.names), "defaults": dict(self.defaults), "arguments": self.arguments,
            "results": self.results,
        }  # fmt: skip

    def tensors(self, args: Sequence[object], kwargs: Mapping[str, object], count: int) -> list[torch.Tensor]:
        """The plan's inputs in a call.

        Raises:
            InputError: a call of another form than the one that was saved [W011].
        """
        if self.arguments is None:
            return self._by_place(args, kwargs, count)
        wanted: Any = self.arguments
        places, named = wanted[0][1], dict(wanted[1][1])
        found: dict[int, torch.Tensor] = {}
        try:
            given, left = self._bound(args, kwargs, len(places), named)
            for k, (node, x) in enumerate(zip(places, given, strict=True)):
                _take(node, x, self.names[k] if k < len(self.names) else str(k), found)
            for name, node in named.items():
                _take(node, left[name], name, found)
        except _OtherFormError as other:
            flat = [x for x in args if isinstance(x, torch.Tensor)]
            if not kwargs and len(flat) == len(args) == count:
                return flat  # in the order of the plan's inputs
            raise InputError(position=other.where, problem=other.problem) from None
        return [found[k] for k in range(count)]

    def made(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What the module gives."""
        if self.results is None:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        return _made(self.results, outputs)

    def _by_place(self, args: Sequence[object], kwargs: Mapping[str, object], count: int) -> list[torch.Tensor]:
        found = list(args)
        rest = dict(kwargs)
        found += [rest.pop(name) for name in self.names[len(found) : count] if name in rest]
        try:
            self._none_left(rest)
        except _OtherFormError as other:
            raise InputError(position=other.where, problem=other.problem) from None
        for k, x in enumerate(found):
            if not isinstance(x, torch.Tensor):
                raise InputError(position=k, problem=f"a {type(x).__name__} is no tensor")
        return [x for x in found if isinstance(x, torch.Tensor)]

    def _bound(
        self, args: Sequence[object], kwargs: Mapping[str, object], count: int, named: Mapping[str, Json]
    ) -> tuple[list[object], dict[str, object]]:
        """Arguments by place and by name, as the saved call has them."""
        given, rest = list(args), dict(kwargs)
        for name in self.names[len(given) : count]:
            if name in rest:
                given.append(rest.pop(name))
            elif name in self.defaults:
                given.append(self.defaults[name])
        for k in range(len(given) - 1, count - 1, -1):  # what is the default anyway was left out
            name = self.names[k] if k < len(self.names) else ""
            if name in named:
                rest[name] = given.pop()
            elif name in self.defaults and _same(given[k], self.defaults[name]):
                given.pop()
            else:
                break
        if len(given) != count:
            problem = f"{len(args)} arguments by place, and those by name, where the saved plan takes {count}"
            raise _OtherFormError(str(min(len(given), count)), problem)
        for name in named:
            if name not in rest:
                if name not in self.defaults:
                    raise _OtherFormError(name, "the saved plan takes it, and it is not given")
                rest[name] = self.defaults[name]
        self._none_left({k: v for k, v in rest.items() if k not in named})
        return given, rest

    def _none_left(self, rest: Mapping[str, object]) -> None:
        for name, x in rest.items():
            if name not in self.defaults or not _same(x, self.defaults[name]):
                raise _OtherFormError(name, "the saved plan was made without it: compile the model with it")


class _OtherFormError(Exception):
    """Something else stands in a place."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(problem)
        self.where, self.problem = where, problem


def form_of(data: Json, inputs: int, outputs: int) -> CallForm:
    """Of a file, for a plan with so many inputs and outputs.

    Raises:
        ValueError: it is no form of such a plan.
    """
    if not isinstance(data, dict):
        raise TypeError("no form of a call")
    names, defaults = data.get("names"), data.get("defaults")
    if not isinstance(names, list) or not all(isinstance(x, str) for x in names) or not isinstance(defaults, dict):
        raise ValueError("names of arguments")
    if not all(is_plain(x) for x in defaults.values()):
        raise ValueError("defaults of arguments")
    arguments, results = data.get("arguments"), data.get("results")
    if arguments is not None:
        if not isinstance(arguments, list) or len(arguments) != 2:
            raise ValueError("arguments")
        if [x[0] if isinstance(x, list) and x else "" for x in arguments] != [TUPLE, DICT]:
            raise ValueError("arguments")
        _check([TUPLE, arguments], inputs)
        if not all(isinstance(pair[0], str) for pair in arguments[1][1]):
            raise ValueError("names of arguments")
    if results is not None:
        _check(results, outputs)
    return CallForm(tuple(map(str, names)), dict(defaults), arguments, results)


def _check(tree: Json, count: int) -> None:
    """Each tensor has one place, and there is nothing but what a form has."""
    seen: list[int] = []
    nodes = 0
    todo: list[tuple[Json, int]] = [(tree, 0)]
    while todo:
        node, depth = todo.pop()
        nodes += 1
        if nodes > MOST_NODES or depth > MOST_DEPTH or not isinstance(node, list) or len(node) != 2:
            raise ValueError("a node of a form")
        kind, body = node
        if kind in (TENSOR, COMPLEX) and type(body) is int:
            seen.append(body)
        elif kind == VALUE and is_plain(body):
            pass
        elif kind in (LIST, TUPLE) and isinstance(body, list):
            todo += [(x, depth + 1) for x in body]
        elif kind in (DICT, FIELDS) and isinstance(body, list):
            todo += [(x, depth + 1) for x in _children(kind, body)]
        else:
            raise ValueError("a node of a form")
    if sorted(seen) != list(range(count)):
        raise ValueError("a tensor without a place, or with two")


def _children(kind: str, body: Sequence[Json]) -> Iterator[Json]:
    keys = []
    for pair in body:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not isinstance(pair[0], str if kind == FIELDS else str | int)
        ):
            raise ValueError("a key of a form")
        keys.append(pair[0])
        yield pair[1]
    if len(set(map(repr, keys))) != len(keys):
        raise ValueError("a key twice")


def _same(given: object, wanted: Json) -> bool:
    return type(given) is type(wanted) and given == wanted


def _take(node: Any, x: Any, path: str, found: dict[int, torch.Tensor]) -> None:
    """The tensors of an argument, into their numbers."""
    kind, body = node
    if kind == TENSOR:
        if not isinstance(x, torch.Tensor):
            raise _OtherFormError(path, f"a {type(x).__name__}, where the saved plan takes a tensor")
        found[body] = x
    elif kind == COMPLEX:
        if not isinstance(x, torch.Tensor) or not x.is_complex():
            said = "a real tensor" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise _OtherFormError(path, f"{said}, where the saved plan takes a complex tensor")
        found[body] = torch.view_as_real(x.resolve_conj())
    elif kind == VALUE:
        if isinstance(x, torch.Tensor) or not _same(x, body):
            said = "a tensor" if isinstance(x, torch.Tensor) else repr(x)[:40]
            raise _OtherFormError(
                path, f"{said}, where the saved plan was made with {body!r}: compile the model with it"
            )
    elif kind in (LIST, TUPLE):
        if not isinstance(x, list | tuple) or len(x) != len(body):
            raise _OtherFormError(path, f"{_said(x)}, where the saved plan takes {len(body)} values in a row")
        for k, (child, value) in enumerate(zip(body, x, strict=True)):
            _take(child, value, f"{path}.{k}", found)
    elif kind == DICT:
        if not isinstance(x, Mapping) or set(x) != {k for k, _ in body}:
            wanted = ", ".join(str(k) for k, _ in body)
            raise _OtherFormError(path, f"{_said(x)}, where the saved plan takes a dictionary of {wanted}")
        for key, child in body:
            _take(child, x[key], f"{path}.{key}", found)
    else:
        for name, child in body:
            if not hasattr(x, name):
                raise _OtherFormError(path, f"{_said(x)} without {name!r}, which the saved plan takes")
            _take(child, getattr(x, name), f"{path}.{name}", found)


def _said(x: object) -> str:
    size = f" of {len(x)}" if isinstance(x, list | tuple | Mapping) else ""
    return f"a {type(x).__name__}{size}"


def _made(node: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind, body = node
    if kind == TENSOR:
        return tensors[body]
    if kind == COMPLEX:
        return torch.view_as_complex(tensors[body].contiguous())
    if kind == VALUE:
        return body
    if kind == LIST:
        return [_made(x, tensors) for x in body]
    if kind == TUPLE:
        return tuple(_made(x, tensors) for x in body)
    made = {key: _made(x, tensors) for key, x in body}
    return made if kind == DICT else Outputs(made)
