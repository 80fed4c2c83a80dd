"""A `.cu` file with what it includes, as one text that names no other file: what the rest of this package looks at.

Comments are blanked, lines that continue are joined, and every directive is one that is known, so that what is handed
to the compiler opens no file whatever the source says. Lines stay where they were: a table says of each whose it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from weft.generate.cuda.foreign.condition import Conditions
from weft.generate.cuda.foreign.implied import SYSTEM, VERSIONS, implied
from weft.generate.cuda.foreign.manifest import Manifest
from weft.generate.cuda.foreign.patience import tick
from weft.ir.declined import Declined

MOST_FILE_BYTES = 4 << 20
MOST_BYTES = 8 << 20
"""Of a source with all that it includes."""
MOST_DEPTH = 32
MOST_FILES = 4096
"""That are included, each as often as it is."""
MOST_LINE = 1 << 20
_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?(?:\*/|\Z)"""
    r"""|(?P<raw>\b(?:u8|[uUL])?R"(?=[^()\\\s]{0,16}\())"""
    r"""|[A-Za-z_]\w*"""
    r"""|\.?\d(?:[eEpP][+-]|'?[\w.])*"""
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"[ \t\f\v]*(?:#|%:|\?\?=)[ \t]*([A-Za-z_]\w*)?")
_INCLUDE = re.compile(r"[ \t]*#[ \t]*include[ \t]*(?:\"([^\"\n]*)\"|<([^>\n]*)>)[ \t]*")
_CONDITIONAL = frozenset({"if", "ifdef", "ifndef", "elif", "else", "endif"})
_KEPT = frozenset({"define", "undef", "error", None})
"""Directives that stay as they are; None: a lone `#`."""
_PRAGMAS = re.compile(r"[ \t]*#[ \t]*pragma[ \t]+(?:unroll|nounroll)\b")
_HOST_PRAGMAS = re.compile(r"[ \t]*#[ \t]*pragma[ \t]+(?:omp|message|warning|comment|region|endregion|GCC|clang"
                           r"|ident|nv_diag\w*|diag_\w+|hd_warning_disable|nv_exec_check_disable|ivdep|acc"
                           r"|intrinsic)\b")  # fmt: skip
_ONCE = re.compile(r"[ \t]*#[ \t]*pragma[ \t]+once\b")
_HIDING = re.compile(r"\b(__has_include\w*|__has_embed|_Pragma|__pragma)\b")
_ASKED = re.compile(
    r"\bdefined\s*(?:\(\s*__has_include\s*\)|__has_include\b)|\b__has_include\s*\(\s*(?:<[^<>\n]*>|\"[^\"\n]*\")\s*\)"
)
_NAMED = re.compile(r"[ \t]*#[ \t]*(?:define|undef)[ \t]+([A-Za-z_]\w*)")
OWN_MACROS = re.compile(
    r"(?:w_(?:role|shared|kernel|Role|run|any|count|[fF]oreign\w*|type\d+|p\d+\w*|probe\w*|blocks_[yz])"
    r"|w_(?:hold|read_until|relu2_\w+)|W_(?:ALL|BESIDE_IN|DYNAMIC\w*|EACH|EMULATED|FN|MATH1|PATIENCE|SHARED|STV16|TABLE|TMA\w*|TO|WIDE"
    r"|WORDS)|__(?:global|device|shared|constant|host|managed|launch_bounds|forceinline|noinline|restrict|grid_constant)__"
    r"|__(?:syncthreads|CUDACC|CUDA_(?:ARCH|FTZ|PREC|USE|INTERNAL)|CUDABE|CUDADEVRT|NVCC|cplusplus|builtin|nv)\w*"
    r"|__(?:FILE|LINE|DATE|TIME|COUNTER)__|threadIdx|blockIdx|blockDim|gridDim|warpSize|defined|asm|template"
    r"|struct|namespace|typename|operator|return|const|void)"
)
"""Names whose meaning stays: a macro of this name would change ours, or hide what is looked for."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A source with its includes."""

    text: str
    places: tuple[tuple[str, int], ...]
    """Of each line: the file's name, from the manifest's folder, and the line in it."""
    macros: dict[str, frozenset[str]]
    """Name -> identifiers that its definitions mention."""
    empty: tuple[str, ...]
    """Headers that were taken as empty."""
    source: str = ""
    """The file's own name."""

    def through_macros(self, words: Iterable[str]) -> set[str]:
        """Words, and those that macros among them stand for."""
        seen: set[str] = set()
        waiting = list(words)
        while waiting:
            word = waiting.pop()
            if word not in seen:
                tick()
                seen.add(word)
                waiting += self.macros.get(word, ())
        return seen

    def where(self, line: int) -> str:
        """`file.cu:12` of a line of the text, from 1."""
        if not 1 <= line <= len(self.places):
            return "the source"
        name, own = self.places[line - 1]
        return f"{name}:{own}"


@dataclass(slots=True)
class _Reading:
    manifest: Manifest
    lines: list[str] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    once: set[Path] = field(default_factory=set)
    system: set[str] = field(default_factory=set)
    macros: dict[str, set[str]] = field(default_factory=dict)
    empty: dict[str, None] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)
    bytes: int = 0
    files: int = 0

    def name(self, path: Path) -> str:
        """Of a file in messages."""
        root = self.manifest.root.resolve()
        return "".join(c if c.isprintable() else "?" for c in str(path.relative_to(root)))


class _RefusedError(Exception):
    """Ends reading; holds the reason."""


def unit(manifest: Manifest) -> Unit | Declined:
    """The source of a manifest, with what it includes."""
    reading = _Reading(manifest)
    reading.conditions.known |= VERSIONS
    try:
        for name, body in manifest.define:
            _named(reading, True, name, body)
            _line(reading, f"#define {name} {body}".rstrip(), manifest.path.name, 0)
        _read(reading, manifest.source, 0)
    except _RefusedError as reason:
        return Declined(str(reason))
    front = implied(reading.lines)
    for text in front:
        if named := _NAMED.match(text):
            _named(reading, True, named[1], text[named.end() :])
    macros = {name: frozenset(body) for name, body in reading.macros.items()}
    places = (*(("<headers>", 1) for _ in front), *reading.places)
    text = "\n".join([*front, *reading.lines]) + "\n"
    return Unit(text, places, macros, tuple(reading.empty), reading.name(manifest.source))


def _read(reading: _Reading, path: Path, depth: int) -> None:
    name = reading.name(path)
    if depth > MOST_DEPTH:
        raise _RefusedError(f"{name}: {depth} files include each other; give them include guards")
    if path in reading.once:
        return
    reading.files += 1
    if reading.files > MOST_FILES:
        raise _RefusedError(f"{name}: over {MOST_FILES} files are included; give them include guards")
    try:
        with path.open("rb") as file:
            data = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise _RefusedError(f"{name}: it cannot be read: {error.strerror}") from None
    reading.bytes += len(data)
    if len(data) > MOST_FILE_BYTES or reading.bytes > MOST_BYTES:
        raise _RefusedError(f"{name}: over {MOST_FILE_BYTES} bytes; kernels are taken from smaller files")
    if b"\0" in data:
        raise _RefusedError(f"{name}: holds zero bytes, so it is no source text")
    text = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    if (bad := re.search(r"\?\?[=/'()!<>-]", text)) is not None:
        raise _RefusedError(f"{name}:{text.count(chr(10), 0, bad.start()) + 1}: a trigraph; write the character itself")
    joined = _joined(text)
    for number, line in enumerate(_plain(joined, name), 1):
        _directive(reading, line, path, name, number, depth)


def _joined(text: str) -> str:
    """Lines that continue are one; the lines that they leave are empty."""
    if "\\" not in text:
        return text
    lines: list[str] = []
    waiting = 0
    start: str | None = None
    for line in text.split("\n"):
        stripped = line.rstrip(" \t")
        more = stripped.endswith("\\")
        body = stripped[:-1] if more else line
        start = body if start is None else start + body
        if more:
            waiting += 1
            continue
        lines.append(start)
        lines += [""] * waiting
        start, waiting = None, 0
    if start is not None:
        lines.append(start)
        lines += [""] * (waiting - 1)
    return "\n".join(lines)


def _plain(text: str, name: str) -> list[str]:
    """Lines without comments; what hides code from whoever reads line by line is refused."""

    def one(found: re.Match[str]) -> str:
        token = found[0]
        at = text.count("\n", 0, found.start()) + 1 if token[:1] == '"' or found["raw"] else 0
        if found["raw"]:
            raise _RefusedError(f"{name}:{at}: a raw string; write it with escapes")
        if token.startswith("/"):
            if token.startswith("/*") and not token.endswith("*/"):
                raise _RefusedError(f"{name}: a comment that does not end")
            return " " + "\n" * token.count("\n")
        if token[0] in "\"'" and ("/*" in token or "*/" in token):
            return token.replace("/*", "/ ").replace("*/", " /")  # of host code: a kernel has no use for such text
        return token

    return _TOKEN.sub(one, text).split("\n")


def _directive(reading: _Reading, line: str, path: Path, name: str, number: int, depth: int) -> None:
    """One line of a file: as it is, blanked, or the file that it includes in its place."""
    tick()
    place = f"{name}:{number}"
    if len(line) > MOST_LINE:
        raise _RefusedError(f"{place}: a line of {len(line)} characters; up to {MOST_LINE} are taken")
    found = _DIRECTIVE.match(line)
    if found is not None and found[1] in _CONDITIONAL and "#" in found[0]:
        if found[1] in ("if", "elif"):  # no header is there but those beside the source, and nobody looks for others
            line = _ASKED.sub("0", line)
        if (hiding := _HIDING.search(line)) is not None and not reading.conditions.dead:
            raise _RefusedError(f"{place}: {hiding[0]} is not taken; write the directive itself")
        new = reading.conditions.directive(found[1], line[found.end() :])
        _line(reading, line if new is None else new, name, number)
        return
    if reading.conditions.dead:
        _line(reading, "", name, number)
        return
    if (hiding := _HIDING.search(line)) is not None:
        raise _RefusedError(f"{place}: {hiding[0]} is not taken; write the directive itself")
    if found is None:
        _line(reading, line, name, number)
        return
    if "#" not in found[0]:
        raise _RefusedError(f"{place}: a directive in other characters; write #")
    word = found[1]
    if word == "include":
        _line(reading, "", name, number)
        _include(reading, line, path, place, depth)
    elif word == "pragma":
        if _ONCE.match(line):
            reading.once.add(path)
        if _PRAGMAS.match(line):
            _line(reading, line, name, number)
        elif _ONCE.match(line) or _HOST_PRAGMAS.match(line):
            _line(reading, "", name, number)
        else:
            raise _RefusedError(f"{place}: {line.strip()[:60]}: only #pragma unroll, nounroll and once are taken")
    elif word in ("line", "warning", "ident"):
        _line(reading, "", name, number)
    elif word in _KEPT:
        named = _NAMED.match(line)
        if named and OWN_MACROS.fullmatch(named[1]):
            raise _RefusedError(f"{place}: {named[1]} is a name of the language or of Weft; choose another")
        if named:
            _named(reading, word == "define", named[1], line[named.end() :])
        _line(reading, line, name, number)
    else:
        raise _RefusedError(f"{place}: #{word} is not taken")


def _named(reading: _Reading, defined: bool, name: str, body: str) -> None:
    """Notes a definition of a macro, or its end."""
    if defined:
        reading.macros.setdefault(name, set()).update(re.findall(r"[A-Za-z_]\w*", body))
    # `#define f(x)` is no number
    reading.conditions.define(name, body if defined else None)


def _line(reading: _Reading, line: str, name: str, number: int) -> None:
    reading.lines.append(line.replace("\f", " ").replace("\v", " "))
    reading.places.append((name, number))


def _include(reading: _Reading, line: str, path: Path, place: str, depth: int) -> None:
    found = _INCLUDE.fullmatch(line)
    if found is None:
        raise _RefusedError(f"{place}: an #include without a plain name of a file is not taken")
    wanted, system = found[1], found[2]
    if system is not None:
        if system in SYSTEM:
            if system not in reading.system:
                reading.system.add(system)
                for text in SYSTEM[system].splitlines():
                    if named := _NAMED.match(text):
                        _named(reading, True, named[1], text[named.end() :])
                    _line(reading, text, f"<{system}>", 1)
        else:
            reading.empty[system] = None
        return
    root = reading.manifest.root.resolve()
    if Path(wanted).is_absolute() or "\0" in wanted or "\\" in wanted:
        raise _RefusedError(
            f'{place}: #include "{_shown(wanted)}" leaves the folder of kernel.toml; put the file beside it'
        )
    left = False
    for folder in (path.parent, *reading.manifest.include, reading.manifest.source.parent):
        try:
            target = (folder / wanted).resolve()
            there = target.is_file()
        except (OSError, RuntimeError):
            continue
        if not target.is_relative_to(root):
            left = True
        elif there:
            _read(reading, target, depth + 1)
            return
    if left:
        raise _RefusedError(
            f'{place}: #include "{_shown(wanted)}" leaves the folder of kernel.toml; put the file beside it'
        )
    if wanted in SYSTEM:
        _include(reading, f"#include <{wanted}>", path, place, depth)
    else:
        reading.empty[wanted] = None


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:80]
