"""Which branch of `#if` is taken, where that follows from the source alone.

What is known to be dead is not looked at: a name that the compiler may define (`__CUDA_ARCH__`), or a macro that is
defined under a condition that is not known, leaves both branches for the compiler to choose.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

_WORD = re.compile(r"[A-Za-z_]\w*")
_DEFINED = re.compile(r"\bdefined\s*(?:\(\s*([A-Za-z_]\w*)\s*\)|([A-Za-z_]\w*))")
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|\d+)[uUlL]*")
_MOST = 1000


_GUARD = re.compile(r"\w*_(?:H|HH|HPP|HXX|CU|CUH|INC|INCLUDED|KERNELS?|C)_*")
_SYSTEMS = re.compile(
    r"_(?:WIN32|WIN64|MSC_VER|LP64|GNU_SOURCE|OPENMP|DEBUG|Float\d+|GLIBC\w*)|NDEBUG|WIN32|linux|unix|NULL|INFINITY|NAN"
)


def _of_compiler(name: str) -> bool:
    """Whether a compiler or a system may define a macro of this name; include guards are the source's own."""
    return _SYSTEMS.fullmatch(name) is not None or (name.startswith("__") and _GUARD.fullmatch(name) is None)


@dataclass(slots=True)
class _Branch:
    live: bool | None
    """Whether the lines here are compiled; None: the compiler knows."""
    taken: bool
    """Whether a branch was taken before."""
    printed: bool
    """Whether the directives of this condition stay in the text."""


@dataclass(slots=True)
class Conditions:
    """The state of conditions while a source is read line by line."""

    known: dict[str, str | None] = field(default_factory=dict)
    """Macro -> its body; None: defined or not, or as what, is not known."""
    gone: set[str] = field(default_factory=set)
    stack: list[_Branch] = field(default_factory=list)

    @property
    def dead(self) -> bool:
        """Whether the line is in no case compiled."""
        return any(b.live is False for b in self.stack)

    @property
    def sure(self) -> bool:
        """Whether the line is compiled in any case."""
        return all(b.live for b in self.stack)

    def define(self, name: str, body: str | None) -> None:
        """A definition (None: its end) of a macro at a line that is not dead."""
        if not self.sure:
            self.known[name] = None
        elif body is None:
            self.known.pop(name, None)
        else:
            self.known[name] = body.strip()

    def directive(self, word: str, rest: str) -> str | None:
        """What stands in the place of a conditional directive: None: the line as it is; else a text."""
        if word in ("if", "ifdef", "ifndef"):
            if self.dead:
                self.stack.append(_Branch(False, True, False))
                return ""
            value = self._value(word, rest)
            self.stack.append(_Branch(value, value is True, value is None))
            return None if value is None else ""
        if not self.stack:
            return None
        branch = self.stack[-1]
        if word == "endif":
            self.stack.pop()
            return None if branch.printed else ""
        if branch.printed:
            return None
        outer = self.stack[:-1]
        if branch.taken or any(b.live is False for b in outer):
            branch.live = False
            return ""
        if word == "else":
            branch.live, branch.taken = True, True
            return ""
        value = self._value("if", rest)
        branch.live, branch.taken = value, value is True
        if value is None:  # the branches before are gone, so this is the first
            branch.printed = True
            return f"#if {rest}"
        return ""

    def _is_defined(self, name: str) -> bool | None:
        if name in self.known:
            return None if self.known[name] is None else True
        return None if _of_compiler(name) else False

    def _value(self, word: str, rest: str) -> bool | None:
        if word in ("ifdef", "ifndef"):
            found = _WORD.match(rest.strip())
            value = self._is_defined(found[0]) if found else None
            return value if word == "ifdef" or value is None else not value
        return self._expression(rest)

    def _expression(self, text: str) -> bool | None:
        if len(text) > _MOST:
            return None
        unknown = False

        def defined(found: re.Match[str]) -> str:
            nonlocal unknown
            value = self._is_defined(found[1] or found[2])
            unknown |= value is None
            return str(int(value or 0))

        def name(found: re.Match[str]) -> str:
            nonlocal unknown
            one = found[0]
            body = self.known.get(one)
            if body is not None and (number := _INTEGER.fullmatch(body)):
                return str(int(number[1], 0) if not number[1].startswith("0") or "x" in number[1].lower() else 0)
            unknown |= one in self.known or _of_compiler(one)
            return "0"

        text = _DEFINED.sub(defined, text)
        text = re.sub(r"(?<!\w)(?:0[xX][0-9a-fA-F]+|\d+)[uUlL]*", lambda m: m[0].rstrip("uUlL"), text)
        text = _WORD.sub(lambda m: m[0] if re.fullmatch(r"[xX][0-9a-fA-F]*", m[0]) else name(m), text)
        if unknown or re.fullmatch(r"[\dxXa-fA-F\s()!&|<>=+*-]*", text) is None:
            return None
        text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or ")).strip()
        try:
            value = _evaluated(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return bool(value)


def _evaluated(node: ast.expr) -> int:
    """Of whole numbers, `and`, `or`, `not`, comparisons, sums and products.

    Raises:
        ValueError: anything else.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.BoolOp):
        values = [_evaluated(x) for x in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return int(not _evaluated(node.operand))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        a, b = _evaluated(node.left), _evaluated(node.comparators[0])
        results: dict[type[ast.cmpop], bool] = {
            ast.Lt: a < b, ast.LtE: a <= b, ast.Gt: a > b, ast.GtE: a >= b, ast.Eq: a == b, ast.NotEq: a != b,
        }  # fmt: skip
        if type(node.ops[0]) in results:
            return int(results[type(node.ops[0])])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        a, b = _evaluated(node.left), _evaluated(node.right)
        if max(abs(a), abs(b)) < 1 << 62:
            return a + b if isinstance(node.op, ast.Add) else a - b if isinstance(node.op, ast.Sub) else a * b
    raise ValueError(node)
