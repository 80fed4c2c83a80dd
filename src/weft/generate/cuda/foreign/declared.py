"""The kernels that a source declares, with their parameters: what a kernel.toml can be begun from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.generate.cuda.foreign.cut import Item, items_of, name_in, walk
from weft.generate.cuda.foreign.unit import Unit

if TYPE_CHECKING:
    from tree_sitter import Node

_PLAIN = {
    "unsigned short int": "unsigned short",
    "short int": "short",
    "long int": "long",
    "unsigned long int": "unsigned long",
    "long unsigned int": "unsigned long",
    "long long int": "long long",
    "unsigned long long int": "unsigned long long",
}


@dataclass(frozen=True, slots=True)
class DeclaredParameter:
    """As the source has it."""

    name: str
    type: str
    """Without const, volatile, struct and pointers."""
    pointers: int
    """Depth: 0 for a value."""


@dataclass(frozen=True, slots=True)
class DeclaredKernel:
    """A definition of a `__global__` function."""

    name: str
    line: int
    """In the unit's text, from 1."""
    parameters: tuple[DeclaredParameter, ...]
    template: bool
    arguments: tuple[tuple[str, str], ...] = ()
    """Of a template, what it is to be given: type (`typename`, `int`, ...) and name."""


def kernels(unit: Unit) -> tuple[DeclaredKernel, ...]:
    """Kernels in the order of the text.

    Raises:
        DeviceError: tree-sitter is not installed [W301].
    """
    found = []
    for item in items_of(unit):
        if item.node.type == "namespace_definition" and "__global__" in item.uses:
            found += list(_inside(item))
        if item.kind == "function" and "__global__" in item.qualifiers and item.names:
            found.append(_declared(item.node, min(item.names), item.template))
    return tuple(found)


def _declared(node: Node, name: str, template: bool) -> DeclaredKernel:
    declarator = node.child_by_field_name("declarator")
    lists = [n for n in walk(declarator) if n.type == "parameter_list"] if declarator is not None else []
    given = tuple(_parameters(lists[0])) if lists else ()
    outer = node.parent if template and node.parent is not None else node
    return DeclaredKernel(name, outer.start_point[0] + 1, given, template, tuple(_arguments(node)))


def _inside(item: Item) -> Iterator[DeclaredKernel]:
    """Kernels in a namespace, by their whole names."""
    for node in walk(item.node):
        name = name_in(node.child_by_field_name("declarator")) if node.type == "function_definition" else None
        if name is None or b"__global__" not in (node.text or b"").partition(b"{")[0]:
            continue
        names, at = [(name.text or b"").decode("utf-8", "replace")], node.parent
        while at is not None:
            if at.type == "namespace_definition" and (own := at.child_by_field_name("name")) is not None:
                names.append((own.text or b"").decode("utf-8", "replace"))
            at = at.parent
        template = node.parent is not None and node.parent.type == "template_declaration"
        yield _declared(node, "::".join(reversed(names)), template)


def _arguments(node: Node) -> list[tuple[str, str]]:
    """Parameters of the template that a function is the body of; none of a plain function."""
    outer = node.parent
    if outer is None or outer.type != "template_declaration":
        return []
    listed = outer.child_by_field_name("parameters")
    found = []
    for child in listed.children if listed is not None else []:
        if child.is_named and child.type != "comment":
            words = re.findall(r"[A-Za-z_]\w*|\.\.\.", (child.text or b"").decode("utf-8", "replace").partition("=")[0])
            if words:
                found.append((" ".join(words[:-1]), words[-1]))
    return found


def _parameters(node: Node) -> list[DeclaredParameter]:
    found: list[DeclaredParameter] = []
    for child in node.children:
        if child.type not in ("parameter_declaration", "optional_parameter_declaration"):
            continue
        kind, declarator = child.child_by_field_name("type"), child.child_by_field_name("declarator")
        type_ = (kind.text or b"").decode("utf-8", "replace") if kind is not None else ""
        type_ = " ".join(re.sub(r"\b(?:const|volatile|struct)\b", "", type_).split())
        text = (declarator.text or b"").decode("utf-8", "replace") if declarator is not None else ""
        own = name_in(declarator)
        name = (own.text or b"").decode("utf-8", "replace") if own is not None else f"p{len(found)}"
        found.append(DeclaredParameter(name, _PLAIN.get(type_, type_), text.count("*") + text.count("[")))
    return found
