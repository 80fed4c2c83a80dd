"""What of a source a kernel needs: found by a parse tree, cut out by blanking everything else.

The file scope is a list of items (functions, variables, types, ...). The kernel's own item is kept, and whatever the
kept ones mention by name, macros looked through; host code is never. Lines and columns of what stays do not move.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from weft.errors import DeviceError
from weft.generate.cuda.foreign.patience import over, tick
from weft.generate.cuda.foreign.unit import Unit
from weft.ir.declined import Declined

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

BUILT_IN = frozenset({"threadIdx", "blockIdx", "blockDim", "gridDim"})
BARRIERS = frozenset({"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"})
MOST_ITEMS = 100_000
_PIECE = 4096
_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'')
_MASKED = re.compile(
    r"^[ \t]*#[ \t]*pragma[^\n]*|\b(?:__align__|alignas|__attribute__|__declspec|__cluster_dims__|__maxnreg__"
    r"|__block_size__)\s*(?=\()",
    re.MULTILINE,
)
_CONTAINERS = frozenset(
    {
        "preproc_if", "preproc_ifdef", "preproc_else", "preproc_elif", "preproc_elifdef", "linkage_specification",
        "declaration_list", "translation_unit",
    }
)  # fmt: skip
_DIRECTIVES = frozenset({"preproc_def", "preproc_function_def", "preproc_call", "preproc_include", "preproc_arg"})
_TYPES = frozenset(
    {
        "type_definition", "struct_specifier", "class_specifier", "union_specifier", "enum_specifier",
        "alias_declaration", "namespace_definition", "namespace_alias_definition", "concept_definition",
    }
)  # fmt: skip
_SPECIFIERS = frozenset({"struct_specifier", "class_specifier", "union_specifier", "enum_specifier"})


@dataclass(slots=True)
class Item:
    """Something at file scope."""

    node: Node
    """Without what stands around it (template, linkage)."""
    start: int
    end: int
    """Bytes."""
    line: int
    kind: str
    """`function`, `prototype`, `variable`, `type` or `other`."""
    names: frozenset[str]
    uses: frozenset[str]
    qualifiers: frozenset[str]
    """Words in front of the name, macros looked through."""
    template: bool
    linkage: tuple[int, int] | None = None
    """Where its own `extern "C"` stands."""

    @property
    def of_device(self) -> bool:
        """Whether the compiler would make device code of it."""
        return not {"__device__", "__global__"}.isdisjoint(self.qualifiers)


@dataclass(slots=True)
class Cut:
    """The items that a kernel needs."""

    unit: Unit
    data: bytes
    """The unit's text."""
    entry: list[Item]
    """Definitions of the kernel (several where conditions choose among them)."""
    bound: list[Item]
    """Functions that speak of threads, blocks, barriers or shared memory; the kernel is one."""
    plain: list[Item]
    """What else is kept: types, data, functions."""
    shared: list[Item]
    """Shared variables at file scope."""
    items: list[Item] = field(default_factory=list)

    @property
    def kept(self) -> list[Item]:
        """All that stays."""
        return [*self.plain, *self.shared, *self.bound]

    def text(self, item: Item) -> str:
        """An item's own text."""
        return self.data[item.start : item.end].decode("utf-8", "replace")

    def where(self, item: Item | Node) -> str:
        """File and line."""
        line = item.line if isinstance(item, Item) else item.start_point[0] + 1
        return self.unit.where(line)


@cache
def _parser() -> Parser:
    try:
        import tree_sitter
        import tree_sitter_cuda
    except ImportError:
        raise DeviceError(
            problem="cutting .cu files needs tree-sitter and its grammar of CUDA: pip install weft[fuse]"
        ) from None
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_cuda.language()))


def alone(unit: Unit, entry: str) -> str | Declined:
    """The kernel as it lies, with what it mentions and nothing else, whether it can be a role or not.

    Raises:
        DeviceError: tree-sitter is not installed [W301].
    """
    data = unit.text.encode()
    found = _kept(unit, data, entry)
    if isinstance(found, Declined):
        return found
    lines, at = [], 0
    for line in data.split(b"\n"):
        if line.lstrip().startswith(b"#"):
            lines.append((at, at + len(line)))
        at += len(line) + 1
    return blanked(data, [*lines, *((x.start, x.end) for x in found[2])]).decode()


def _kept(unit: Unit, data: bytes, entry: str) -> tuple[list[Item], list[Item], list[Item]] | Declined:
    """All items, the kernel's definitions, and what stays."""
    root = _parsed(unit)
    items = list(_items(unit, data, root))
    spaces, _, base = entry.partition("<")[0].rpartition("::")
    named = [x for x in items if base in x.names]
    if spaces:  # all of the namespace
        kernels = [x for x in named if x.node.type == "namespace_definition"]
    else:
        kernels = [x for x in named if x.kind == "function" and "__global__" in x.qualifiers]
    if not kernels:
        return Declined(_no_entry(unit, items, named, base, root))
    return items, kernels, _closure(unit, items, kernels)


def cut(unit: Unit, entry: str) -> Cut | Declined:
    """Keep what the kernel `entry` needs.

    Raises:
        DeviceError: tree-sitter is not installed [W301].
    """
    data = unit.text.encode()
    found = _kept(unit, data, entry)
    if isinstance(found, Declined):
        return found
    items, kernels, kept = found
    if inside := next((x for x in kernels if x.node.type == "namespace_definition"), None):
        return Declined(_in_a_namespace(unit, inside, entry.partition("<")[0]))
    for item in kept:
        if (bad := _first_error(item.node)) is not None and not _by_macros(unit, item):
            return Declined(f"{unit.where(bad.start_point[0] + 1)}: not understood; write it in plainer CUDA C++")
    return _bound(unit, data, items, kernels, kept)


def _by_macros(unit: Unit, item: Item) -> bool:
    """Whether it is macros of the source that bodies of functions are not understood for: `FOR_EACH(i, n) { ... }`.

    Then the compiler alone judges them, and their barriers are taken for divergent.
    """
    if item.kind not in ("function", "type") or item.uses.isdisjoint(unit.macros):
        return False
    return all(_in_body(x, item.node) for x in _walk(item.node) if x.is_error or x.is_missing)


def _in_body(node: Node, outer: Node) -> bool:
    """Whether a node lies in a body within another."""
    at = node.parent
    while at is not None and at != outer:
        method = at.type == "field_declaration" and any(c.type == "function_declarator" for c in at.children)
        if at.type == "compound_statement" or method:
            return True
        at = at.parent
    return False


def items_of(unit: Unit) -> list[Item]:
    """What stands at file scope, in the order of the text.

    Raises:
        DeviceError: tree-sitter is not installed [W301].
    """
    return list(_items(unit, unit.text.encode(), _parsed(unit)))


def _parsed(unit: Unit) -> Node:
    """The root of the parse tree.

    Raises:
        ImpatientError: it takes too long. The parser is handed the text in pieces, and none after that.
    """
    data = _for_the_parser(unit.text).encode()

    def piece(at: int, _: object) -> bytes:
        return b"" if over() else data[at : at + _PIECE]

    root = _parser().parse(piece).root_node
    tick()
    return root


def _for_the_parser(text: str) -> str:
    """The text with what its grammar does not know blanked, of the same length."""
    parts: list[str] = []
    at = 0
    for found in _MASKED.finditer(text):
        end = found.end() if "#" in found[0] else _closing(text, found.end())
        if found.start() < at or end is None:
            continue
        parts += [text[at : found.start()], re.sub(r"[^\n]", " ", text[found.start() : end])]
        at = end
    return "".join([*parts, text[at:]])


def _closing(text: str, at: int) -> int | None:
    """Behind the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, min(len(text), at + 2000)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return None


def _items(unit: Unit, data: bytes, root: Node) -> Iterator[Item]:
    """Items in the order of the text, each with the text that goes when it goes."""
    waiting: list[tuple[Node, tuple[int, int] | None]] = [(root, None)]
    count = 0
    while waiting:
        node, linkage = waiting.pop()
        if node.type in _CONTAINERS or _is_anonymous(node):
            inner = linkage
            if node.type == "linkage_specification":
                body = node.child_by_field_name("body")
                own = (node.start_byte, node.children[1].end_byte)
                if body is not None and body.type != "declaration_list":
                    waiting.append((body, own))
                    continue
                inner = None
            waiting += [(c, inner) for c in reversed(node.children)]
            continue
        count += 1
        if count > MOST_ITEMS:
            return
        if node.type in _DIRECTIVES or not node.is_named:
            continue
        if node.parent is not None and node.parent.type.startswith("preproc_") and node.type in (
            "identifier", "binary_expression", "unary_expression", "preproc_defined", "call_expression",
            "number_literal", "parenthesized_expression",
        ):  # fmt: skip
            continue
        yield _item(unit, data, node, linkage)


def _is_anonymous(node: Node) -> bool:
    """Whether a node is a namespace without a name, which a namespace of the role's own stands for."""
    return node.type == "namespace_definition" and node.child_by_field_name("name") is None


def _item(unit: Unit, data: bytes, node: Node, linkage: tuple[int, int] | None) -> Item:
    outer, template = node, False
    while node.type == "template_declaration":
        template = True
        node = node.children[-1] if node.children[-1].type != ";" else node.children[-2]
    kind, names = _what(node)
    start, end = (linkage or (outer.start_byte, 0))[0], outer.end_byte
    # `struct S {...};` ends in a token of its own
    follower = outer.next_sibling
    if kind == "type" and follower is not None and follower.type == ";" and node.type in _SPECIFIERS:
        end = follower.end_byte
    text = _STRING.sub('""', data[outer.start_byte : outer.end_byte].decode("utf-8", "replace"))
    qualifiers = unit.through_macros(_head(data, node))
    return Item(
        node, start, end, outer.start_point[0] + 1, kind, frozenset(names), frozenset(_WORD.findall(text)),
        frozenset(qualifiers), template, linkage,
    )  # fmt: skip


def _head(data: bytes, node: Node) -> set[str]:
    """Words in front of a declarator."""
    declarator = node.child_by_field_name("declarator")
    end = declarator.start_byte if declarator is not None else min(node.end_byte, node.start_byte + 400)
    words = set(_WORD.findall(data[node.start_byte : end].decode("utf-8", "replace")))
    if declarator is not None:  # `__launch_bounds__` and others may be taken for a part of it
        inner = name_in(declarator)
        if inner is not None:
            words |= set(_WORD.findall(data[declarator.start_byte : inner.start_byte].decode("utf-8", "replace")))
    return words


def _what(node: Node) -> tuple[str, set[str]]:
    """Kind and names of a node at file scope."""
    if node.type == "function_definition":
        inner = name_in(node.child_by_field_name("declarator"))
        return "function", _named(inner)
    if node.type in ("declaration", "field_declaration"):
        names: set[str] = set()
        functions = False
        for declarator in node.children_by_field_name("declarator"):
            names |= _named(name_in(declarator))
            functions |= _is_function(declarator)
        kind = node.child_by_field_name("type")
        if kind is not None and kind.type in _SPECIFIERS:
            names |= _type_names(kind)
        return ("prototype" if functions else "variable") if names else "other", names
    if node.type in _TYPES:
        return "type", _type_names(node)
    if node.type == "using_declaration":
        return "type", {c.text.decode() for c in _walk(node) if c.type == "identifier" and c.text}
    return "other", set()


def _named(inner: Node | None) -> set[str]:
    if inner is None or inner.text is None:
        return set()
    text = inner.text.decode("utf-8", "replace")
    if inner.type == "operator_name":
        return {text}
    return set(_WORD.findall(text.partition("<")[0])) if "::" in text else {text.partition("<")[0]}


def name_in(node: Node | None) -> Node | None:
    """The name in a declarator."""
    for _ in range(64):
        if node is None:
            return None
        if node.type in (
            "identifier", "field_identifier", "type_identifier", "qualified_identifier", "operator_name",
            "template_function", "destructor_name", "operator_cast", "primitive_type",
        ):  # fmt: skip
            return node
        inner = node.child_by_field_name("declarator")
        if inner is None:  # reference_declarator and parenthesized_declarator have no field
            named = [c for c in node.children if c.is_named and ("declarator" in c.type or "identifier" in c.type)]
            inner = named[0] if named else None
        node = inner
    return None


def _is_function(node: Node) -> bool:
    for _ in range(64):
        if node.type == "function_declarator":
            inner = node.child_by_field_name("declarator")
            return inner is not None and inner.type != "parenthesized_declarator"
        inner = node.child_by_field_name("declarator")
        if inner is None:
            return False
        node = inner
    return False


def _type_names(node: Node) -> set[str]:
    """What a type, or a namespace, declares: also enumerators, and what stands in a namespace."""
    names: set[str] = set()
    if (name := node.child_by_field_name("name")) is not None and name.text:
        names |= set(_WORD.findall(name.text.decode("utf-8", "replace")))
    for declarator in node.children_by_field_name("declarator"):
        names |= _named(name_in(declarator))
    for inner in _walk(node):
        if inner.type == "enumerator" and (own := inner.child_by_field_name("name")) is not None and own.text:
            names.add(own.text.decode("utf-8", "replace"))
        elif node.type == "namespace_definition" and inner.type == "function_definition":
            names |= _named(name_in(inner.child_by_field_name("declarator")))
        elif inner.type in _SPECIFIERS and (own := inner.child_by_field_name("name")) is not None and own.text:
            names |= set(_WORD.findall(own.text.decode("utf-8", "replace")))
    return names


def _walk(node: Node) -> Iterator[Node]:
    """A node and all below it, without recursion."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        tick()
        yield one
        waiting += reversed(one.children)


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it, in the order of the text."""
    return _walk(node)


def _first_error(node: Node) -> Node | None:
    if not node.has_error:
        return None
    return next((x for x in _walk(node) if x.is_error or x.is_missing), node)


def _no_entry(unit: Unit, items: list[Item], named: list[Item], base: str, root: Node) -> str:
    kernels = sorted({n for x in items if x.kind == "function" and "__global__" in x.qualifiers for n in x.names})
    if inside := next((x for x in named if x.node.type == "namespace_definition"), None):
        return _in_a_namespace(unit, inside, base)
    if named and named[0].kind == "function":
        return f"{unit.where(named[0].line)}: {base} is no kernel (__global__ void)"
    bad = _first_error(root)
    hint = f" (the text is not understood from {unit.where(bad.start_point[0] + 1)} on)" if bad is not None else ""
    listed = ", ".join(kernels[:12]) or "none"
    return f"{unit.source}: no kernel {base}{hint}; its kernels are {listed}"


def _in_a_namespace(unit: Unit, item: Item, name: str) -> str:
    return f"{unit.where(item.line)}: {name} stands in a namespace; a kernel is taken from the file's own scope"


def _closure(unit: Unit, items: list[Item], kernels: list[Item]) -> list[Item]:
    """The kernels and whatever they mention, in the order of the text."""
    by_name: dict[str, list[Item]] = {}
    always = []
    for item in items:
        for name in item.names:
            by_name.setdefault(name, []).append(item)
        if any(n.startswith("operator") for n in item.names) and item.of_device:
            always.append(item)
    kept: dict[int, Item] = {}
    seen: set[str] = set()
    waiting: list[Item] = list(kernels)
    words: list[str] = []
    while waiting:
        while waiting:
            item = waiting.pop()
            if id(item) not in kept:
                kept[id(item)] = item
                words += item.uses
        while words:
            tick()
            word = words.pop()
            if word not in seen:
                seen.add(word)
                words += unit.macros.get(word, ())
                waiting += [x for x in by_name.get(word, ()) if id(x) not in kept and _may_stay(x)]
        if not waiting:  # operators are called without their names
            waiting += [x for x in always if id(x) not in kept and not seen.isdisjoint(_class_names(by_name, x))]
    return [x for x in items if id(x) in kept]


def _class_names(by_name: dict[str, list[Item]], operator: Item) -> set[str]:
    """Types that an operator is for: of vectors of the language if of none of the file."""
    own = {w for w in operator.uses if any(x.kind == "type" for x in by_name.get(w, ()))}
    return own or set(operator.uses)


def _may_stay(item: Item) -> bool:
    """Whether an item can be part of device code."""
    if item.kind in ("function", "prototype"):
        if "__global__" in item.qualifiers:
            return False
        return item.of_device or "constexpr" in item.qualifiers
    if item.kind == "variable":
        memory = {"__device__", "__constant__", "__shared__", "__managed__", "const", "constexpr", "texture", "surface"}
        kind = item.node.child_by_field_name("type")
        return not memory.isdisjoint(item.qualifiers) or (kind is not None and kind.type in _SPECIFIERS)
    return item.kind == "type"


def _bound(unit: Unit, data: bytes, items: list[Item], kernels: list[Item], kept: list[Item]) -> Cut | Declined:
    """Part what is kept into what is bound to a role and what is not."""
    shared = [x for x in kept if x.kind == "variable" and "__shared__" in x.qualifiers]
    speaks = set(BUILT_IN | BARRIERS | {"__shared__"}) | {n for x in shared for n in x.names}
    functions = [x for x in kept if x.kind == "function" and x not in kernels]
    bound: dict[int, Item] = {id(x): x for x in kernels}
    grew = True
    while grew:
        grew = False
        for item in functions:
            if id(item) not in bound and not speaks.isdisjoint(unit.through_macros(item.uses)):
                bound[id(item)] = item
                speaks |= item.names
                grew = True
    names = {n for x in bound.values() for n in x.names}
    for item in functions:  # all overloads of a name lie in one scope
        if id(item) not in bound and not names.isdisjoint(item.names):
            bound[id(item)] = item
    for item in bound.values():
        declarator = item.node.child_by_field_name("declarator")
        inner = name_in(declarator)
        if inner is not None and inner.type in ("qualified_identifier", "operator_name", "operator_cast"):
            return Declined(
                f"{unit.where(item.line)}: a method or operator that asks for its thread, block or barrier; "
                "make it a function of the file"
            )
    plain = [x for x in kept if id(x) not in bound and x not in shared]
    plain = [x for x in plain if not (x.kind == "prototype" and not names.isdisjoint(x.names))]
    for item in plain:
        if item.kind == "type" and not speaks.isdisjoint(item.uses):
            return Declined(
                f"{unit.where(item.line)}: a type whose methods ask for thread, block or barrier; "
                "make them functions of the file"
            )
    ordered = [x for x in items if id(x) in bound]
    return Cut(unit, data, list(kernels), ordered, plain, shared, items)


def blanked(data: bytes, keep: Sequence[tuple[int, int]]) -> bytearray:
    """The text with all but these bytes blanked; lines stay."""
    out = bytearray(b if b == 10 else 32 for b in data)
    for start, end in keep:
        out[start:end] = data[start:end]
    return out
