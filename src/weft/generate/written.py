"""In which files of Weft the text of a kernel is written: where to look for a line of it, by its schedule alone.

For readers of plans (`weft explain`, the report), who have schedules as text, of any age. The first file of a row makes
the roles, or the C function; what stands beside it in its folder writes parts of them. Headers, with whose text kernels
begin, stand in `generate/cuda/intrinsics` and in a template's folder; kernels that repack weights are written in
`gemm/common/pack.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType

_CPP: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "": ("cpp/kernel.py",),
        "contraction": ("cpp/templates/direct.py",),
        "depthwise": ("cpp/templates/depthwise.py",),
        "winograd": ("cpp/templates/winograd.py",),
        "scan": ("cpp/scan.py",),
    }
)


@cache
def files_of(generator: str) -> Mapping[str, tuple[str, ...]]:
    """By template, none for fused loops: files below `weft/generate`. Another generator than ours has none."""
    if generator == "cpp":
        return _CPP
    if generator != "cuda":
        return MappingProxyType({})
    from weft.generate.cuda.table import NAMED  # all templates come with it, and a plan for CPUs has none of them

    own = {"": ("cuda/loops/kernel.py",), "pools": ("cuda/loops/pools.py",), "scan": ("cuda/loops/scan.py",)}
    return MappingProxyType({**{name: t.files(name) for name, t in NAMED.items()}, **own})


_SCHEDULE = re.compile(r"(\w+)\((.*)\)")
_TEMPLATE = re.compile(r"(?:^|,)template=(\w+)(?:,|$)")


def written_in(schedule: str) -> tuple[str, ...]:
    """Files that wrote the kernel of a schedule (as text, `str(Schedule)`); none of a library's call or a plug-in's."""
    told = _SCHEDULE.fullmatch(schedule)
    if told is None:
        return ()
    template = _TEMPLATE.search(told[2])
    return tuple(f"weft/generate/{f}" for f in files_of(told[1]).get(template[1] if template else "", ()))


@dataclass(frozen=True, slots=True)
class Origin:
    """A line of a file that writes, or is, a line of a kernel."""

    file: str
    """Below the folder of the package."""
    line: int
    share: float
    """Of the kernel's line that is written there; 1: all of it, as in a header. The rest is filled in."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


_PACKAGE = Path(__file__).parents[1]
_LEAST = 6
"""Characters of text that tell a place from others."""
_FOUND = 0.6
"""Of what a string has for a line, or"""
_OF_LINE = 0.4
"""of the line, as texts are laid out in other lines than they are written in."""
MOST_ORIGINS = 3


def origins(line: str, schedule: str, text: str) -> list[Origin]:
    """Where a line of the kernel of a schedule is written, best first, `text` being all of it; empty: nothing like it.

    It is in a header that the text begins with, or strings of the generator write it: those of the files that the
    schedule names, and of what these import. White space does not count; numbers and names that are filled in may
    differ.
    """
    wanted = _squeezed(line)
    if len(wanted) < _LEAST:
        return []
    files = written_in(schedule)
    reach = _reach(files)
    scored = [
        (share, Origin(file, number, round(share, 2)))
        for file, number, pieces in _written_lines()
        if file in reach and (share := _share(wanted, pieces)) > 0
    ]
    scored.sort(key=lambda x: (-x[0], x[1].file not in files, not _beside(x[1].file, files), x[1].file, x[1].line))
    made = [origin for _, origin in scored]
    body, heads = _parted(text)
    if wanted not in body:
        made = [Origin(f, n, 1.0) for f, n, own in _header_lines() if f in heads and own == wanted] + made
    return made[:MOST_ORIGINS]


def without_headers(text: str) -> str:
    """A kernel's text with a line in place of each header that it begins with: the header's file."""
    for file, content in _headers():
        if content.strip() and content in text:
            text = text.replace(content, f"// {file}\n", 1)
    return text


def _squeezed(text: str) -> str:
    return "".join(text.split())


@lru_cache(maxsize=1)
def _parted(text: str) -> tuple[str, frozenset[str]]:
    """A kernel's text without the headers that it begins with, squeezed, and these headers' files."""
    body, heads = _squeezed(text), set[str]()
    for file, content in _headers():
        if (head := _squeezed(content)) and head in body:
            body = body.replace(head, "", 1)
            heads.add(file)
    return body, frozenset(heads)


def _beside(file: str, files: tuple[str, ...]) -> bool:
    return any(file.rpartition("/")[0] == f.rpartition("/")[0] for f in files)


def _share(line: str, pieces: tuple[str, ...]) -> float:
    """Of a line that pieces of text write, one behind the other; 0: they do not."""
    if any(line in piece for piece in pieces):
        return 1.0
    at = found = 0
    for piece in pieces:
        start = line.find(piece, at)
        if start >= 0:
            found, at = found + len(piece), start + len(piece)
    enough = min(_FOUND * sum(map(len, pieces)), _OF_LINE * len(line))
    return found / len(line) if found >= max(_LEAST, enough) else 0.0


@cache
def _headers() -> tuple[tuple[str, str], ...]:
    """(file, text), longest first: one may begin with another."""
    found = [(_name(p), p.read_text(encoding="utf-8")) for p in (_PACKAGE / "generate").rglob("*.h")]
    return tuple(sorted(found, key=lambda x: -len(x[1])))


@cache
def _header_lines() -> tuple[tuple[str, int, str], ...]:
    return tuple((f, n, _squeezed(x)) for f, text in _headers() for n, x in enumerate(text.splitlines(), start=1))


@cache
def _written_lines() -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """(file, line, literal pieces) of every line of text that a string of the generators writes."""
    found: list[tuple[str, int, tuple[str, ...]]] = []
    for path in sorted((_PACKAGE / "generate").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for number, text in _strings(tree):
            lines = text.split("\n")
            # texts are shown a statement a line
            lines += [x for line in lines for x in re.split(r"(?<=[;{}])\s+", line) if x != line]
            for line in lines:
                pieces = tuple(x for x in map(_squeezed, line.split("\0")) if x)
                if sum(map(len, pieces)) >= _LEAST:
                    found.append((_name(path), number, pieces))
    return tuple(found)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of strings that are no documentation; a zero character stands where a value is filled in."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (x.value if isinstance(x, ast.Constant) else "\0" for x in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner | prose:
            yield node.lineno, node.value


@cache
def _reach(files: tuple[str, ...]) -> frozenset[str]:
    """These files, and those of the generators that they import, and so on."""
    found, waiting = set[str](), list(files)
    while waiting:
        file = waiting.pop()
        if file not in found and (_PACKAGE.parent / file).is_file():
            found.add(file)
            waiting += _imported(file)
    return frozenset(found)


@cache
def _imported(file: str) -> tuple[str, ...]:
    """Files that may be what a file imports of the generators; a header imports none."""
    if not file.endswith(".py"):
        return ()
    tree, found = ast.parse((_PACKAGE.parent / file).read_text(encoding="utf-8")), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.generate"):
            module = str(node.module).replace(".", "/")
            found += [f"{module}.py", f"{module}/__init__.py", *(f"{module}/{x.name}.py" for x in node.names)]
    return tuple(found)


def _name(path: Path) -> str:
    return f"weft/{path.relative_to(_PACKAGE).as_posix()}"
