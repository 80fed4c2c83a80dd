"""Arguments and results of a module as tensors, and as what they were: plans know tensors alone.

`taken` takes the tensors out of tuples, lists, dictionaries, dataclasses (the outputs of `transformers` too) and
whatever `torch.utils._pytree` knows; the `Layout` that it gives as well puts others in their places. A result may be
any object that can be copied; an argument may not, as plans are told apart by what stands beside the tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from weft.errors import NotTracedError
from weft.frontends.torch.dtypes import PARTS
from weft.kernels import call_tree
from weft.kernels.call_tree import COMPLEX, DICT, FIELDS, LIST, TENSOR, TUPLE, VALUE
from weft.kernels.codec import Json

_FIXED = (
    type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type, range, slice,
)  # fmt: skip
"""Values that stand in a plan as they are."""
_TENSORS = "weft: tensors"
"""Where what a copy is made for lies among the notes of `copy.deepcopy`."""


_DEEPCOPY: object = torch.Tensor.__deepcopy__


class OddValueError(Exception):
    """An argument that can be no part of a call; says which. Never leaves the front end."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor's place."""

    index: int

    def made(self, tensors: Sequence[torch.Tensor]) -> object:
        return tensors[self.index]

    def __deepcopy__(self, notes: dict[Any, Any]) -> object:
        return notes[_TENSORS][self.index]


@dataclass(frozen=True, slots=True)
class _Complex:
    """The place of a complex tensor, which is given as a real one with its parts in the last dimension."""

    index: int

    def made(self, tensors: Sequence[torch.Tensor]) -> object:
        return torch.view_as_complex(tensors[self.index].contiguous())


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A value that is no tensor and has none inside."""

    value: object

    def made(self, tensors: Sequence[torch.Tensor]) -> object:
        del tensors
        return self.value


@dataclass(frozen=True, slots=True)
class _Container:
    """What the framework takes apart and puts together."""

    children: tuple[_Part, ...]
    together: Callable[[list[Any]], object]
    kind: type
    context: object
    """As the framework keeps it: the keys of a dictionary."""

    def made(self, tensors: Sequence[torch.Tensor]) -> object:
        return self.together([child.made(tensors) for child in self.children])


@dataclass(frozen=True, slots=True)
class _Fields:
    """A dataclass: its fields, and whatever else the object has."""

    template: object
    children: Mapping[str, _Part]

    def made(self, tensors: Sequence[torch.Tensor]) -> object:
        found = copy.copy(self.template)
        for name, child in self.children.items():
            object.__setattr__(found, name, child.made(tensors))
        return found


@dataclass(frozen=True, slots=True)
class _Object:
    """Any other object with tensors somewhere inside."""

    template: object
    """With a `_Slot` in place of each."""

    def made(self, tensors: Sequence[torch.Tensor]) -> object:
        return copy.deepcopy(self.template, {_TENSORS: tensors})  # type: ignore[dict-item]


_Part = _Slot | _Complex | _Fixed | _Container | _Fields | _Object


@final
class Layout:
    """Where tensors stand in a value."""

    def __init__(self, root: _Part, key: Hashable, names: Sequence[str]) -> None:
        self._root = root
        self.key = key
        """Equal for equal structures with equal values beside the tensors."""
        self.names = tuple(names)
        """Of the tensors, in order: the path to each."""
        self.is_tensor = isinstance(root, _Slot)

    def made(self, tensors: Sequence[torch.Tensor]) -> object:
        """The value with these tensors in their places."""
        return self._root.made(tensors)

    def to_json(self) -> Json:
        """As a file keeps it (`weft.runtime.call_form`); None: it has a value that no file keeps."""
        try:
            return _json(self._root)
        except _NotKeptError:
            return None


class _NotKeptError(Exception):
    """A value that no file keeps."""


def _json(part: _Part) -> Json:
    if isinstance(part, _Slot):
        return [TENSOR, part.index]
    if isinstance(part, _Complex):
        return [COMPLEX, part.index]
    if isinstance(part, _Fixed):
        if call_tree.is_plain(part.value):
            return [VALUE, cast("Json", part.value)]
    elif isinstance(part, _Fields):
        return [FIELDS, [[name, _json(child)] for name, child in part.children.items()]]
    elif isinstance(part, _Container):
        children = [_json(child) for child in part.children]
        if part.kind in (list, tuple):
            return [LIST if part.kind is list else TUPLE, children]
        names = getattr(part.kind, "_fields", part.context)  # those of a named tuple
        if issubclass(part.kind, tuple | dict) and isinstance(names, list | tuple) and len(names) == len(children):
            plain = part.kind in (dict, OrderedDict)
            if all(type(k) in ((str, int) if plain else (str,)) for k in names):
                pairs: list[Json] = [[k, child] for k, child in zip(names, children, strict=True)]
                return [DICT if plain else FIELDS, pairs]
    raise _NotKeptError


def taken(value: object) -> tuple[list[torch.Tensor], Layout]:
    """The tensors of a result, and where they stand.

    Raises:
        NotTracedError: a number that depends on the values of tensors, an object that cannot be copied [W207].
    """
    walk = _Walk(arguments=False)
    root, key = walk.part(value, ())
    return walk.tensors, Layout(root, key, walk.names)


def tensors_in(value: object) -> tuple[list[torch.Tensor], bool]:
    """The tensors of a result, without a copy of anything; and whether all it holds was looked through.

    Objects that are neither containers nor dataclasses are not.
    """
    found: list[torch.Tensor] = []
    waiting, whole = [value], True
    while waiting:
        x: Any = waiting.pop()
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, _FIXED):
            continue
        elif (node := _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(x))) is not None:
            waiting += node.flatten_fn(x)[0]
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            waiting += [getattr(x, f.name) for f in dataclasses.fields(x) if hasattr(x, f.name)]
        else:
            whole = False
    return found, whole


class _Met(dict[int, Any]):
    """Notes of `copy.deepcopy` that notice some of the objects it comes to, by their identities."""

    def __init__(self, watched: Collection[int]) -> None:
        super().__init__()
        self._watched, self.met = watched, False

    def get(self, key: int, default: Any = None) -> Any:
        """What `copy.deepcopy` asks first of every object."""
        self.met = self.met or key in self._watched
        return super().get(key, default)


def holds(value: object, watched: Collection[int]) -> bool:
    """Whether an object with one of these identities is somewhere in a value, which can be copied."""
    notes = _Met(watched)
    with _Cut([]):
        copy.deepcopy(value, notes)
    return notes.met


def taken_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[list[torch.Tensor], Layout]:
    """The tensors of a call, and where they stand in `(args, kwargs)`.

    Raises:
        OddValueError: an argument that a plan can have no part in.
    """
    walk = _Walk(arguments=True)
    root, key = walk.part((tuple(args), dict(kwargs)), ())
    return walk.tensors, Layout(root, key, walk.names)


def is_plain(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call has tensors by their places alone."""
    return not kwargs and all(isinstance(x, torch.Tensor) and x.dtype not in PARTS for x in args)


@final
class _Walk:
    def __init__(self, *, arguments: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._arguments = arguments

    def part(self, value: Any, path: tuple[str, ...]) -> tuple[_Part, Hashable]:
        if isinstance(value, torch.Tensor):
            is_complex = value.dtype in PARTS and value.layout is torch.strided and not value.is_meta
            self.tensors.append(torch.view_as_real(value.resolve_conj()) if is_complex else value)
            self.names.append("_".join(path[1:]) or "x")
            last = len(self.tensors) - 1
            return (_Complex(last), "complex") if is_complex else (_Slot(last), "tensor")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            problem = "it returns a Python number that depends on the values of tensors"
            raise NotTracedError(problem=problem, remedy="return it as a tensor: leave out `.item()`")
        if isinstance(value, _FIXED):
            return _Fixed(value), (type(value).__name__, _frozen(value))
        node = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
        if node is not None:
            children, context = node.flatten_fn(value)
            names = list(context) if isinstance(context, list | tuple) and len(context) == len(children) else range(99)
            parts = [self.part(child, (*path, str(name))) for child, name in zip(children, names, strict=False)]
            parts += [self.part(x, (*path, "x")) for x in children[len(parts) :]]
            together = partial(_together, node.unflatten_fn, context)
            container = _Container(tuple(p for p, _ in parts), together, type(value), context)
            return container, (type(value), _frozen(context), tuple(key for _, key in parts))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names_ = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
            fields = {name: self.part(getattr(value, name), (*path, name)) for name in names_}
            template = copy.copy(value)
            for name in names_:
                object.__setattr__(template, name, None)
            found = _Fields(template, {name: p for name, (p, _) in fields.items()})
            return found, (type(value), tuple((name, key) for name, (_, key) in fields.items()))
        if self._arguments:
            if isinstance(value, Hashable) and (callable(value) or type(value).__module__ == "enum"):
                return _Fixed(value), (type(value), value)
            raise OddValueError(f"{'.'.join(path[1:]) or 'it'} is a {type(value).__name__}")
        return self._object(value), (type(value), id(value))

    def _object(self, value: object) -> _Part:
        before = len(self.tensors)
        try:
            with _Cut(self.tensors):
                template = copy.deepcopy(value)
        except Exception as error:  # whatever its owner's own `__deepcopy__` raises
            problem = f"it returns a {type(value).__name__}, which cannot be copied"
            remedy = "return tensors, in tuples, lists, dictionaries or dataclasses"
            raise NotTracedError(problem=problem, remedy=remedy) from error
        self.names += ["x"] * (len(self.tensors) - before)
        return _Object(template) if len(self.tensors) > before else _Fixed(value)


def _together(unflatten: Callable[[Any, Any], object], context: object, found: list[Any]) -> object:
    return unflatten(found, context)


@final
class _Cut(TorchFunctionMode):
    """Copies of objects made meanwhile have a `_Slot` in place of each tensor."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is not _DEEPCOPY:
            return func(*args, **(kwargs or {}))
        self._tensors.append(args[0])
        return _Slot(len(self._tensors) - 1)


def _frozen(value: object) -> Hashable:
    """Something that can be a key, equal for equal values."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(x) for x in value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


@final
class Results:
    """How a module's results were laid out when it ran last: the same for all calls of one form."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.changed: tuple[str, ...] = ()
        """Attributes that the module changed while it was traced."""

    def __deepcopy__(self, notes: object) -> Results:
        """Shared by the copies of a module."""
        return self


class OfTensors(torch.nn.Module):
    """A module as a function of tensors alone; `results` knows what it really gives."""

    def __init__(self, module: torch.nn.Module, layout: Layout | None = None) -> None:
        super().__init__()
        self.module = module
        self._layout = layout
        """None: tensors are its arguments, by place."""
        self.results = Results()
        self.training = module.training  # `train` and `eval` would set the module's, too

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors among the module's results."""
        if self._layout is None:
            found = self.module(*tensors)
        else:
            made: Any = self._layout.made(tensors)
            found = self.module(*made[0], **made[1])
        if isinstance(found, torch.Tensor) and (last := self.results.layout) is not None and last.is_tensor:
            return (found,)
        outputs, self.results.layout = taken(found)
        return tuple(outputs)


def with_names(called: OfTensors, names: Sequence[str]) -> OfTensors:
    """The same module to be traced: its parameters have names, and what it changes of itself is noticed.

    What a trace takes of a module is what it was: the framework notices tensors that are written, but not, below the
    outermost module, buffers that are replaced, and no Python values. Python may read numbers of the module's own that
    are held as tensors (`_numbers`).
    """
    numbers = _numbers(called.module)
    free = dict.fromkeys(names)
    if len(free) < len(names):
        free = dict.fromkeys(f"x_{k}" for k in range(len(names)))
    parameter = inspect.Parameter
    kinds = [parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *free)]

    def forward(self: OfTensors, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = _attributes(self.module)
        _tell(self.module, numbers)
        found = OfTensors.forward(self, *tensors)
        self.results.changed = _changes(before, _attributes(self.module))
        return found

    try:
        forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    except ValueError:  # `self` is a name, too, or a keyword
        return called
    found: OfTensors = type("OfTensors", (OfTensors,), {"forward": forward})(called.module, called._layout)
    found.results = called.results
    return found


def _numbers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's tensors of one element: strides, counts and factors that its Python may ask for, as `int(...)` does.

    A trace that knows their values takes what is computed of them for Python as it would numbers. They stay weights for
    what is computed of them in tensors, and `Compiled.refit` traces anew, so that other sizes are noticed there.
    """
    state = (*module.named_buffers(remove_duplicate=False), *module.named_parameters(remove_duplicate=False))
    return {name: t.detach() for name, t in state if type(t) in _OWN and t.numel() == 1 and t.device.type == "cpu"}


_OWN = (torch.Tensor, torch.nn.Parameter)


def _tell(module: torch.nn.Module, numbers: Mapping[str, torch.Tensor]) -> None:
    """Inside of a trace: let it know these values, until something is written into them."""
    if not numbers:
        return
    traced = (*module.named_buffers(remove_duplicate=False), *module.named_parameters(remove_duplicate=False))
    for name, fake in traced:
        if name in numbers and isinstance(fake, FakeTensor):
            fake.constant = numbers[name]


def _attributes(module: torch.nn.Module) -> dict[tuple[str, bool], object]:
    """By (name, whether it is a buffer): what tells whether an attribute is another."""
    found: dict[tuple[str, bool], object] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in part.__dict__.items():
            if isinstance(value, torch.Tensor):
                found[prefix + name, False] = id(value)
            elif isinstance(value, bool | int | float | str | None):
                found[prefix + name, False] = value
            elif type(value) in (list, dict) and not name.startswith("_"):
                found[prefix + name, False] = len(value)
        found.update({(prefix + name, True): id(t) for name, t in part._buffers.items()})
    return found


def state_of(module: torch.nn.Module) -> dict[object, object]:
    """What tells whether a call changed the module: attributes, and in what state its parameters and buffers are."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    found: dict[object, object] = dict(_attributes(module))
    found.update({name: (id(t), t._version) for name, t in tensors})
    return found


def _changes(before: Mapping[tuple[str, bool], object], after: Mapping[tuple[str, bool], object]) -> tuple[str, ...]:
    """Names of attributes that are others.

    Raises:
        NotTracedError: a buffer is [W207].
    """
    changed = [key for key in after if before.get(key, after) != after[key]]
    for name, is_buffer in changed:
        if is_buffer:
            problem = f"it puts another tensor in the place of its buffer {name!r}"
            remedy = 'give the new value back as a result, or leave the model to `torch.compile(model, backend="weft")`'
            raise NotTracedError(problem=problem, remedy=remedy)
    return tuple(name for name, _ in changed)


def bound(
    signature: inspect.Signature | None, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """A call in its one form: by place what can be, without what is the default anyway.

    Raises:
        TypeError: they do not fit the signature.
    """
    if signature is None:
        return tuple(args), dict(kwargs)
    found = signature.bind(*args, **kwargs)
    for name, parameter in signature.parameters.items():
        keyword = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if keyword and name in found.arguments and found.arguments[name] is parameter.default:
            del found.arguments[name]
    return found.args, found.kwargs


def signature_of(module: torch.nn.Module) -> inspect.Signature | None:
    """Of `forward`, where it has one."""
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def argument_names(signature: inspect.Signature | None, count: int) -> list[str]:
    """What so many arguments by place are called: those behind `*xs` by their numbers."""
    names: list[str] = []
    for name, parameter in (signature.parameters if signature is not None else {}).items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{name}_{k}" for k in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    return names[:count] if len(names) >= count else [f"x_{k}" for k in range(count)]


def program_results(program: torch.export.ExportedProgram) -> Layout:
    """Where the outputs of an exported program stand in what it gives."""
    signature = torch.export.graph_signature
    user = [x.arg for x in program.graph_signature.output_specs if x.kind is signature.OutputKind.USER_OUTPUT]
    leaves = [
        torch.empty(0) if isinstance(x, signature.TensorArgument) else getattr(x, "value", None) for x in user
    ]  # fmt: skip
    return taken(_pytree.tree_unflatten(leaves, program.call_spec.out_spec))[1]
