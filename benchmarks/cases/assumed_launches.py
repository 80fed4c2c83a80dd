"""A kernel.toml for a kernel of which only the source is known: what it takes is read, what it is given is assumed.

128 threads, 4 blocks, 1,024 elements of zeros behind every pointer, zeros by value; templates get what their own
host code gives them, else `float` (`int` where that does not compile), 16 and true. Nothing of this is run: it says
whether a kernel can be fused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.generate.cuda.foreign.cut import Cut, Item, items_of, walk
from weft.generate.cuda.foreign.declared import DeclaredKernel
from weft.generate.cuda.foreign.manifest import Manifest
from weft.generate.cuda.foreign.types import KNOWN
from weft.generate.cuda.foreign.unit import Unit
from weft.ir.declined import Declined

GRID, BLOCK, ELEMENTS = (4, 1, 1), (128, 1, 1), 1024
_MOST_ARGUMENTS = 4
"""Arguments of a template that are tried."""
_PLAIN = re.compile(r"[A-Za-z0-9_:, .+-]{1,200}")
_SIGNED = {1: "signed char", 2: "short", 4: "int", 8: "long long"}
_SORTS = """
template <class w_T> struct w_sort_of { static const int value = __is_class(w_T) || __is_union(w_T) ? 3 : 0; };
template <> struct w_sort_of<float> { static const int value = 2; };
template <> struct w_sort_of<double> { static const int value = 2; };
"""
_SIZED = re.compile(rb"// size (\d+) (\d+) (\d)")


@dataclass(frozen=True, slots=True)
class Taken:
    """A kernel that NVRTC takes."""

    entry: str
    types: dict[str, str]
    """Of a template: parameter -> argument."""
    sizes: dict[str, tuple[int, int]]
    """Types of parameters that C does not know: bytes, and 0 for an integer, 2 for a float, 3 for a structure."""

    def spelled(self, type_: str) -> str:
        """A type of a parameter without names of template parameters."""
        return re.sub(r"[A-Za-z_]\w*", lambda m: self.types.get(m[0], m[0]), type_)


def entries(text: Unit, kernel: DeclaredKernel) -> Iterator[tuple[str, dict[str, str]]]:
    """The kernel's name; of a template, with what host code gives it where that is plain, and with what is assumed."""
    if not kernel.template or not kernel.arguments:
        yield kernel.name, {}
        return
    launches = re.finditer(rf"\b{re.escape(kernel.name)}\s*<([^<>;(){{}}]+)>\s*<<<", text.text)
    given = [[x.strip() for x in m[1].split(",")] for m in launches if _PLAIN.fullmatch(m[1].strip())]
    given += [[_assumed(kind, type_) for kind, _ in kernel.arguments] for type_ in ("float", "int")]
    for one in list({",".join(x): x for x in given}.values())[:_MOST_ARGUMENTS]:
        names = [name for _, name in kernel.arguments]
        yield f"{kernel.name}<{', '.join(one)}>", dict(zip(names, one, strict=False))


def _assumed(kind: str, type_: str) -> str:
    if kind.split()[-1:] in (["typename"], ["class"]):
        return type_
    return "true" if kind == "bool" else "16"


def taken(text: Unit, kernel: DeclaredKernel, plain: dict[str, str]) -> Taken | Declined:
    """Whether NVRTC takes the kernel as it lies. `plain`: entry -> the kernel with what it mentions."""
    reason = "no arguments of the template are known"
    for entry, types in entries(text, kernel):
        if entry not in plain:
            continue
        one = Taken(entry, types, {})
        spelled = {one.spelled(p.type) for p in kernel.parameters}
        unknown = sorted(t for t in spelled if t not in KNOWN and t != "void" and "*" not in t)
        asked = "".join(
            f'asm volatile("// size {i} %0 %1" :: "n"((int)sizeof({t})), "n"(w_sort_of<{t}>::value));\n'
            for i, t in enumerate(unknown)
        )
        with_sizes = f'{plain[entry]}\n{_SORTS}extern "C" __global__ void w_sizes() {{ {asked} }}\n'
        (found,) = compile_confined([ConfinedJob(with_sizes, "compute_90a", (entry,))])
        if isinstance(found, ConfinedResult):
            told = {unknown[int(i)]: (int(n), int(s)) for i, n, s in _SIZED.findall(found.code)}
            return Taken(entry, types, told)
        (found,) = compile_confined([ConfinedJob(plain[entry], "compute_90a", (entry,))])
        if isinstance(found, ConfinedResult):
            return one
        first = re.search(r"error(?: #\d+-?\w*)?: ([^\n]*)", found.reason)
        reason = first[1] if first else found.reason[:200]
    return Declined(reason)


def described(part: Cut, kernel: DeclaredKernel, home: Path, manifest: Manifest, known: Taken) -> str | Declined:
    """The text of a kernel.toml that lies at `home`, or what of the kernel it cannot say."""
    where = part.where(part.entry[0])
    rows = []
    for p in kernel.parameters:
        type_ = known.spelled(p.type)
        size, sort = known.sizes.get(type_, (KNOWN[type_].nbytes if type_ in KNOWN else 0, 0))
        if p.pointers > 1 or "*" in type_:
            return Declined(f"{where}: {p.name}: a pointer to pointers, and no kernel.toml says what is in it")
        kind = "char" if type_ == "void" else type_
        if type_ not in KNOWN and type_ != "void" and not size:
            return Declined(f"{where}: {p.name}: a type whose size is not known outside of its source")
        if p.pointers:
            made = [] if kind in KNOWN else ['as = "unsigned char"', f"per = {size}"]
            rows.append([f'name = "{p.name}"', f'type = "{kind}"', 'kind = "inout"', f"shape = [{ELEMENTS}]",
                         'init = "zeros"', *made])  # fmt: skip
        elif type_ in KNOWN:
            zeros = ["false" if type_ == "bool" else "0"] * KNOWN[type_].components
            rows.append([f'name = "{p.name}"', f'type = "{kind}"', 'kind = "scalar"', f"value = [{', '.join(zeros)}]"])
        elif sort == 3 and _points(items_of(part.unit), type_):
            return Declined(f"{where}: {p.name}: a structure with pointers that is passed by value")
        else:
            floats = "double" if size == 8 else "float"
            element = "unsigned char" if sort == 3 else floats if sort == 2 else _SIGNED[size]
            per = size // KNOWN[element].nbytes
            rows.append([f'name = "{p.name}"', f'type = "{kind}"', 'kind = "scalar"', f'as = "{element}"',
                         f"per = {per}", f"value = [{', '.join(['0'] * per)}]"])  # fmt: skip
    state = [
        n
        for x in part.plain
        if x.kind == "variable" and "__device__" in x.qualifiers
        and {"const", "constexpr", "__constant__"}.isdisjoint(x.qualifiers)
        for n in sorted(x.names)
    ]  # fmt: skip
    head = [
        f"source = {_quoted(manifest.source.relative_to(home))}",
        f'entry = "{known.entry}"',
        f"grid = {list(GRID)}",
        f"block = {list(BLOCK)}",
        f"include = [{', '.join(_quoted(p.relative_to(home)) for p in manifest.include)}]",
        f"state = [{', '.join(_quoted(n) for n in state)}]",
    ]
    head += [] if rows else ["parameters = []"]
    return "\n".join([*head, *(line for row in rows for line in ("[[parameters]]", *row))]) + "\n"


def _quoted(text: object) -> str:
    return f"'{text}'"


def _points(items: list[Item], type_: str) -> bool:
    """Whether a structure, or one that it holds, has a member that is a pointer or reference."""
    by_name: dict[str, list[Item]] = {}
    for item in items:
        if item.kind in ("type", "variable"):
            for name in item.names:
                by_name.setdefault(name, []).append(item)
    seen: set[str] = set()
    waiting = re.findall(r"[A-Za-z_]\w*", type_)
    while waiting:
        word = waiting.pop()
        if word in seen:
            continue
        seen.add(word)
        for item in by_name.get(word, ()):
            for node in walk(item.node):
                if node.type == "field_declaration":
                    parts = [x.type for x in walk(node)]
                    if "function_declarator" not in parts and {"pointer_declarator", "reference_declarator"} & {*parts}:
                        return True
                    kind = node.child_by_field_name("type")
                    waiting += (
                        re.findall(r"[A-Za-z_]\w*", (kind.text or b"").decode("utf-8", "replace")) if kind else []
                    )
                elif node.type == "type_definition" and (kind := node.child_by_field_name("type")) is not None:
                    waiting += re.findall(r"[A-Za-z_]\w*", (kind.text or b"").decode("utf-8", "replace")[:200])
    return False
