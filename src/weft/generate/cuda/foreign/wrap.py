"""A cut source as the text of a role: its functions unchanged within a struct that knows the role.

What speaks of threads, blocks, barriers or shared memory becomes a member function of `w_kernel<Role>`; types, data and
other functions stand in front of it in a namespace of the role's own, so that data exists once per role. The text
stands there twice, each time with the other half blanked, so that macros and conditions mean in both what they meant
where they stood. threadIdx and its like are macros that ask the role; behind the text no macro is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from weft.generate.cuda.foreign.cut import Cut, Item, blanked, walk
from weft.generate.cuda.foreign.diverge import form_of, meets
from weft.generate.cuda.foreign.implied import OVERLOADED
from weft.generate.cuda.foreign.manifest import KernelParameter, Manifest
from weft.generate.cuda.foreign.types import KNOWN
from weft.ir.declined import Declined

if TYPE_CHECKING:
    from tree_sitter import Node

PLACED_BYTES = 16
"""Shared variables begin at multiples of this, or of what they ask for."""
_SYNC = ("(w_role.sync())", "((void)w_any(w_role, true))", "((void)(w_count(w_role, false), w_count(w_role, true)))")
"""A barrier, by the form of barriers."""
UNIT = "w_unit"
"""What the compiler calls the source in messages."""
_DIRECTIVE_LINE = re.compile(rb"[ \t]*#")
_BOUNDS = re.compile(r"\b(?:__launch_bounds__|__maxnreg__)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)")
_HEAD = re.compile(r"\b(?:static|extern)\b")
_ALIGNED = re.compile(r"\b(?:__align__|alignas)\s*\(\s*(\d+)?[^()]*\)")
_SHARED_WORDS = re.compile(r"\b(?:__shared__|extern|static)\b")


@cache
def foreign_header() -> str:
    """Text of weft_cuda_foreign.h."""
    return Path(__file__).with_name("weft_cuda_foreign.h").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class SharedVariable:
    """A `__shared__` variable of the source."""

    number: int
    name: str
    typedef: str
    """Its type, as a definition of the name `type`."""
    type: str
    dynamic: bool
    """`extern`: what is left of the shared memory."""
    alignment: int


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A source in the form of a role, but for where its shared variables lie."""

    first: str
    """Types, data and plain functions."""
    second: str
    """Functions bound to the role, with `@N@` for the place of shared variable N."""
    shared: tuple[SharedVariable, ...]
    form: int
    """Of the barriers: see weft_cuda_foreign.h."""
    meets: bool
    """Whether threads of a block meet at barriers at all."""
    macros: tuple[str, ...]
    overloaded: tuple[str, ...]
    """Functions of the language to which the source adds forms of its own."""
    single: Mapping[int, int]
    """Shared variables of function templates -> their lines: such a template may have one instance."""
    original: str
    """The kernel as it lies, with what it needs."""


def wrap(cut: Cut, manifest: Manifest) -> Wrapped | Declined:
    """The parts of a role's text."""
    made = _Edits(cut)
    for item in cut.shared:
        if isinstance(found := made.declared(item.node, local=False), Declined):
            return found
    for item in cut.bound:
        if isinstance(found := made.function(item), Declined):
            return found
    directives = _directives(cut.data)
    first = blanked(cut.data, [*directives, *((x.start, x.end) for x in cut.plain)])
    for item in cut.plain:
        if item.linkage is not None:
            start, end = item.linkage
            first[start:end] = b" " * (end - start)
    second = made.applied()
    original = blanked(cut.data, [*directives, *((x.start, x.end) for x in cut.kept)])
    return Wrapped(
        first.decode(),
        second,
        tuple(made.shared),
        form_of(cut, manifest.threads % 32 != 0),
        meets(cut),
        tuple(sorted(cut.unit.macros)),
        tuple(sorted(OVERLOADED & {n for x in cut.plain if x.kind == "function" for n in x.names})),
        made.single,
        original.decode(),
    )


def _directives(data: bytes) -> list[tuple[int, int]]:
    """Where preprocessor lines lie."""
    found, at = [], 0
    for line in data.split(b"\n"):
        if _DIRECTIVE_LINE.match(line):
            found.append((at, at + len(line)))
        at += len(line) + 1
    return found


class _Edits:
    """Changes of the functions that are bound to a role."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.edits: list[tuple[int, int, str]] = []
        self.shared: list[SharedVariable] = []
        self.of_file: dict[str, SharedVariable] = {}
        self.single: dict[int, int] = {}

    def applied(self) -> str:
        """The text of these functions and all directives, each at its line."""
        data = self.cut.data
        spans = _directives(data)
        for start, end in spans:
            line = data[start:end].decode("utf-8", "replace")
            new = _BOUNDS.sub("", line.replace("__global__", "__device__ __forceinline__"))
            if new != line:
                self.edits.append((start, end, new))
        keep = sorted([*spans, *((x.start, x.end) for x in self.cut.bound)])
        text = bytes(blanked(data, keep))
        parts, at = [], 0
        for start, end, new in sorted(self.edits):
            if start < at:
                continue
            parts += [text[at:start].decode("utf-8", "replace"), new]
            at = end
        return "".join([*parts, text[at:].decode("utf-8", "replace")])

    def function(self, item: Item) -> Declined | None:
        """One function."""
        node, data = item.node, self.cut.data
        body = node.child_by_field_name("body")
        declarator = node.child_by_field_name("declarator")
        if body is None or declarator is None or body.type != "compound_statement":
            return Declined(f"{self.cut.where(item)}: a function without a plain body")
        if item.linkage is not None:
            self.edits.append((*item.linkage, ""))
        parameters = next((n for n in walk(declarator) if n.type == "parameter_list"), None)
        end = parameters.start_byte if parameters is not None else declarator.start_byte
        head = data[node.start_byte : end].decode("utf-8", "replace")
        new = _HEAD.sub("", _BOUNDS.sub("", head)).replace("__global__", "__device__ __forceinline__")
        if new != head:
            self.edits.append((node.start_byte, end, new + "\n" * (head.count("\n") - new.count("\n"))))
        injected = [self._reference(v) for name, v in self.of_file.items() if self._speaks_of(item, name, parameters)]
        if injected:
            self.edits.append((body.start_byte, body.start_byte + 1, "{ " + " ".join(injected)))
        for inner in walk(body):
            if inner.type == "declaration" and b"__shared__" in self._front(inner):
                several = item.template and item not in self.cut.entry
                if isinstance(found := self.declared(inner, local=True, several=several), Declined):
                    return found
        return None

    def _speaks_of(self, item: Item, name: str, parameters: Node | None) -> bool:
        words = set(item.uses)
        for word in item.uses:
            words |= self.cut.unit.macros.get(word, frozenset())
        if name not in words:
            return False
        text = parameters.text.decode() if parameters is not None and parameters.text else ""
        return re.search(rf"\b{re.escape(name)}\b", text) is None

    def _front(self, declaration: Node) -> bytes:
        """What stands in front of the first declarator."""
        declarators = declaration.children_by_field_name("declarator")
        end = declarators[0].start_byte if declarators else declaration.end_byte
        return self.cut.data[declaration.start_byte : end]

    def declared(self, node: Node, *, local: bool, several: bool = False) -> Declined | None:
        """The variables of one declaration with `__shared__`. `several`: of a function that may have instances."""
        data = self.cut.data
        declarators = node.children_by_field_name("declarator")
        front = self._front(node).decode("utf-8", "replace")
        dynamic = re.search(r"\bextern\b", front) is not None
        made: list[SharedVariable] = []
        for declarator in declarators:
            if declarator.type == "init_declarator":
                return Declined(f"{self.cut.where(declarator)}: shared memory with an initial value")
            own = _name_of(declarator)
            if own is None or own.text is None:
                return Declined(f"{self.cut.where(declarator)}: a declaration of shared memory that is not understood")
            name, number = own.text.decode(), len(self.shared) + len(made)
            kind = f"w_type{number}"
            text = (
                data[declarator.start_byte : own.start_byte].decode() + kind
                + data[own.end_byte : declarator.end_byte].decode()
            )  # fmt: skip
            head = _SHARED_WORDS.sub("", _ALIGNED.sub("", front))
            typedef = " ".join(f"typedef {head} {_ALIGNED.sub('', text)};".split())
            aligned = [int(x) for x in _ALIGNED.findall(front + text) if x]
            made.append(SharedVariable(number, name, typedef, kind, dynamic, max([PLACED_BYTES, *aligned])))
        self.shared += made
        if not local:
            self.of_file |= {v.name: v for v in made}
            return None
        text = " ".join(self._reference(v) for v in made)
        if several and made:
            self.single[made[0].number] = node.start_point[0] + 1
            text = f"@M{made[0].number}@ {text}"
        old = data[node.start_byte : node.end_byte].decode("utf-8", "replace")
        self.edits.append((node.start_byte, node.end_byte, text + "\n" * old.count("\n")))
        return None

    @staticmethod
    def _reference(v: SharedVariable) -> str:
        return f"{v.typedef} {v.type}& {v.name} = @{'D' if v.dynamic else v.number}:{v.type}@;"


def _name_of(node: Node) -> Node | None:
    for _ in range(32):
        if node.type == "identifier":
            return node
        inner = node.child_by_field_name("declarator")
        if inner is None:
            named = [c for c in node.children if c.is_named and ("declarator" in c.type or c.type == "identifier")]
            inner = named[0] if named else None
        if inner is None:
            return None
        node = inner
    return None


_PLACE = re.compile(r"@(D|\d+):(w_type\d+)@")
_MARK = re.compile(r"@M(\d+)@")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where shared variables lie in the role's part of shared memory."""

    offsets: Mapping[int, int]
    static_bytes: int
    alignment: int


def place(shared: tuple[SharedVariable, ...], sizes: Mapping[int, int]) -> Placed:
    """Places in the order of the source. `sizes`: bytes by number; those that no code names are left out."""
    at, offsets, most = 0, {}, PLACED_BYTES
    for v in shared:
        most = max(most, v.alignment)
        if v.dynamic or v.number not in sizes:
            continue
        at = -(-at // v.alignment) * v.alignment
        offsets[v.number] = at
        at += sizes[v.number]
    dynamic = max([PLACED_BYTES, *(v.alignment for v in shared if v.dynamic)])
    return Placed(offsets, -(-at // dynamic) * dynamic, most)


def role_text(wrapped: Wrapped, manifest: Manifest, name: str, placed: Placed | None, *, lines: bool = False) -> str:
    """The namespace `name` with the struct `w_kernel<Role>`, and no macro left behind.

    `placed`: None: the compiler is asked for sizes (comments `w_size NUMBER BYTES ALIGNMENT` in the PTX). `lines`:
    lines are called by the source's own numbers in messages.
    """

    def at(found: re.Match[str]) -> str:
        which, kind = found[1], found[2]
        if placed is None and which != "D":
            return f"(w_foreign_size<{which}, sizeof({kind}), alignof({kind})>(), *({kind}*)(w_shared))"
        if placed is not None:
            offset = placed.static_bytes if which == "D" else placed.offsets.get(int(which), 0)
            return f"*({kind}*)(w_shared + {offset})"
        return f"*({kind}*)(w_shared)"

    def mark(found: re.Match[str]) -> str:
        """A variable that every instance of the function has one of."""
        name = f"w_foreign_mark{found[1]}"
        return f'static __device__ char {name}; asm volatile("// %0" ::"l"(&{name}));' if placed is None else ""

    x, y, z = manifest.block
    own = {
        "threadIdx": f"(w_foreign_thread<{x}u, {y}u, {z}u>(w_role.thread()))",
        "blockIdx": "(w_foreign_block(w_role))",
        "blockDim": f"(w_foreign_dim<{x}u, {y}u, {z}u>())",
        "gridDim": "(w_foreign_grid(w_role))",
    }
    if wrapped.meets:
        own |= {
            "__syncthreads()": _SYNC[wrapped.form],
            "__syncthreads_count(x)": f"(w_foreign_count<{wrapped.form}>(w_role, (x) != 0))",
            "__syncthreads_and(x)": f"(w_foreign_and<{wrapped.form}>(w_role, (x) != 0))",
            "__syncthreads_or(x)": f"(w_foreign_or<{wrapped.form}>(w_role, (x) != 0))",
        }
    names = [left.partition("(")[0] for left in own]
    # NVRTC knows no macros of these names, and does not look at the pragmas
    ours = [f'#pragma push_macro("{n}")\n#undef {n}\n' for n in names]
    ours += [f"#define {left} {right}\n" for left, right in own.items()]
    gone = "".join(f"#undef {n}\n" for n in wrapped.macros if not n.startswith("__has_"))  # these cannot be
    line = f'#line 1 "{UNIT}"\n' if lines else ""
    behind = '#line 1 "w_role"\n' if lines else ""
    others = "".join(f"using ::{n};\n" for n in wrapped.overloaded)
    return "".join(
        [
            f"namespace {name} {{\n", others, line, _squeezed(wrapped.first, lines), behind, gone, *ours,
            "template <class w_Role> struct w_kernel {\n",
            "const w_Role w_role;\nunsigned char* const w_shared;\n",
            line, _squeezed(_PLACE.sub(at, _MARK.sub(mark, wrapped.second)), lines), behind,
            _named_by_macros(manifest), gone, run_text(wrapped, manifest), "};\n",
            *(f'#undef {n}\n#pragma pop_macro("{n}")\n' for n in names), "}\n",
        ]
    )  # fmt: skip


def _squeezed(text: str, lines: bool) -> str:
    """Without empty lines, where nobody counts them."""
    if lines:
        return text
    return "".join(f"{x.rstrip()}\n" for x in text.split("\n") if x.strip())


def argument_names(parameter: KernelParameter, number: int) -> list[str]:
    """Names of the words that an argument is passed as."""
    return [f"w_p{number}"] if parameter.kind != "scalar" else [f"w_p{number}_{i}" for i in range(len(parameter.bits))]


def _types(manifest: Manifest) -> dict[str, str]:
    """Types of the manifest that the source defines -> their names in `w_run`."""
    every = [*(p.type for p in manifest.parameters), *(c.type for c in manifest.constants)]
    return {t: f"w_foreign_type{i}" for i, t in enumerate(dict.fromkeys(t for t in every if t not in KNOWN))}


def _named_by_macros(manifest: Manifest) -> str:
    """What the manifest says in the source's own words, where the source's macros still mean something."""
    text = "".join(f"typedef {type_} {name};\n" for type_, name in _types(manifest).items())
    if "<" not in manifest.entry:
        return text
    return (
        f"{text}template <class... w_Foreign>\n"
        f"__device__ __forceinline__ void w_foreign_call(w_Foreign... w_foreign_given) {{\n"
        f"this->template {manifest.entry}(w_foreign_given...);\n}}\n"
    )


def run_text(wrapped: Wrapped, manifest: Manifest) -> str:
    """The member `w_run`: one virtual block."""
    declared, given, types = [], [], _types(manifest)
    for i, p in enumerate(manifest.parameters):
        names = argument_names(p, i)
        if p.kind == "scalar":
            declared += [f"unsigned long long {n}" for n in names]
            given.append(f"w_foreign_scalar<{types.get(p.type, p.type)}>({', '.join(names)})")
        else:
            declared.append(f"{'const ' if p.kind == 'input' else ''}void* {names[0]}")
            given.append(f"({types.get(p.type, p.type)}*){names[0]}")
    call = f"this->{'w_foreign_call' if '<' in manifest.entry else manifest.entry}({', '.join(given)});"
    if manifest.threads % 32:
        call = f"if (w_role.thread() < {manifest.threads}u) {call}"
    leave = f"\nw_foreign_leave<{wrapped.form}>(w_role);" if wrapped.form else ""
    sizes = "".join(
        f"static_assert(sizeof({types.get(d.type, d.type)}) == {d.per * d.element.nbytes}, "
        f'"the type of {d.name} in kernel.toml");\n'
        for d in [*(p.data for p in manifest.parameters if p.data), *manifest.constants]
    )
    sizes += "".join(
        f"static_assert(sizeof({types[p.type]}) == {len(p.raw)} && __is_trivially_copyable({types[p.type]}), "
        f'"the type of {p.name} in kernel.toml");\n'
        for p in manifest.parameters
        if p.element is not None
    )
    return f"__device__ __forceinline__ void w_run({', '.join(declared)}) {{\n{sizes}{call}{leave}\n}}\n"
