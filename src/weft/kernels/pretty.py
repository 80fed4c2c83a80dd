"""The text of a kernel as a person reads it: indented, one statement a line, lines of up to 120 columns.

What is compiled, and what measurements are kept under (`codec.kernel_sha256`), is the text as a generator wrote it;
this is for where one is shown or handed over: the folder of `weft gemm`, reports, bundles of `weft repro`. Only white
space changes, so that the same machine code comes of both.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

WIDTH = 120
_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<line>//[^\n]*)"
    r"|(?P<text>/\*.*?\*/)"
    r'|(?P<pragma>_Pragma\s*\(\s*"[^"\n]*"\s*\))'
    r'|(?P<string>(?:u8|[uUL])?"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\')'
    r"|(?P<word>\.?\d(?:[\w.']|[eEpP][+-])*|\w+)"
    r"|(?P<mark>\.\.\.|<<=|>>=|->\*?|\+\+|--|&&|\|\||::|##|[-+*/%&|^<>=!]=|<<|[^\w\s])",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"[ \t]*#(?:[^\n\\]|\\\n|\\[^\n])*")
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")
_LOOSE = {
    mark: rank
    for rank, marks in enumerate(("* / %", "+ -", "<< >>", "< > <= >=", "== !=", "&", "^", "|", "&&", "||", "? :"))
    for mark in marks.split()
}
"""How loosely operators bind: a line rather ends in front of one that binds its sides the least."""
_UNUSED = re.compile(r" *\(void\)\w+;(?: \(void\)\w+;)*")
_END = re.compile(r"^[^\s#/][^\n]*[;}][ \t]*(?://[^\n]*)?\n", re.MULTILINE)
"""A line at the margin that may end a function or type."""
_SHORT = 2000
"""Characters of a function up to which its layout is kept: those of headers stand in every kernel."""
_HEADS = frozenset(("if", "for", "while", "switch"))


class Token(NamedTuple):
    """A piece of the text that is never taken apart."""

    kind: str
    """word, string, mark; line (a comment to the end of its line), text (any other comment), pragma, directive."""
    text: str
    lines: int
    """Ends of lines in front of it; -1: not even a blank."""

    @property
    def alone(self) -> bool:
        """Whether it has lines of its own."""
        return self.kind in ("directive", "pragma")


def tokens(text: str) -> list[Token]:
    """The tokens of a C++ text; directives of the preprocessor are one each."""
    found: list[Token] = []
    at, lines = 0, 0
    while at < len(text):
        fresh = not found or lines > 0
        directive = _DIRECTIVE.match(text, at) if fresh else None
        if directive is not None:
            found.append(Token("directive", directive[0].strip(), max(lines, 1)))
            at, lines = directive.end(), -1
            continue
        match = _TOKEN.match(text, at)
        assert match is not None  # a mark is any character
        assert match.lastgroup is not None
        if match.lastgroup == "space":
            lines = match[0].count("\n")
        else:
            found.append(Token(match.lastgroup, match[0].rstrip(), lines))
            lines = -1
        at = match.end()
    return found


def pretty(text: str) -> str:
    """The text laid out; a text that is laid out stays as it is, and so does one that is no C++."""
    return "".join(_kept(x) if len(x) < _SHORT else _laid_out(x) for x in _pieces(text))


def _pieces(text: str) -> Iterator[str]:
    """Parts of a text between which no function, type or statement is under way."""
    begin = 0
    for match in _END.finditer(text) if "/*" not in text else ():
        piece = text[begin : match.end()]
        if piece.count("{") == piece.count("}") and piece.count("(") == piece.count(")"):
            yield piece
            begin = match.end()
    yield text[begin:]


@lru_cache(maxsize=1024)
def _kept(text: str) -> str:
    return _laid_out(text)


def _laid_out(text: str) -> str:
    layout = _Layout(tokens(text))
    try:
        while layout.token is not None:
            layout.statements("")
            if layout.token is not None:  # a brace that nothing opened
                layout.put("", [layout.take()])
    except (RecursionError, IndexError):  # marks without their partners, or without end
        return text
    blank = "\n" if re.match(r"[ \t]*\n", text) else ""
    shown = blank + "\n".join(layout.lines) + "\n" if layout.lines else ""
    return shown if [x.text for x in tokens(shown)] == [x.text for x in layout.tokens] else text


@dataclass(slots=True)
class _Layout:
    """A walk over tokens that leaves lines."""

    tokens: list[Token]
    at: int = 0
    lines: list[str] = field(default_factory=list)
    code: set[int] = field(default_factory=set)
    """Places of braces that hold statements; a list of values has no semicolon."""

    def __post_init__(self) -> None:
        opened: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.text in _OPEN:
                opened.append(i)
            elif token.text in _CLOSE and opened:
                inner = opened.pop()
                if opened and inner in self.code:
                    self.code.add(opened[-1])
            elif token.text == ";" and opened:
                self.code.add(opened[-1])

    @property
    def token(self) -> Token | None:
        """The next one."""
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def is_next(self, *texts: str) -> bool:
        """Whether the next token is one of these."""
        return self.at < len(self.tokens) and self.tokens[self.at].text in texts

    def take(self) -> Token:
        """The next one, and on."""
        self.at += 1
        return self.tokens[self.at - 1]

    def put(self, indent: str, line: list[Token]) -> None:
        """A line, or several where it is too long; names that are told to be unused share one."""
        found = _filled(indent, line)
        last = self.lines[-1] if self.lines else ""
        unused = len(found) == 1 and all(_UNUSED.fullmatch(x) for x in (found[0], last))
        if unused and last.startswith(indent + "(") and len(last) + len(found[0]) - len(indent) < WIDTH:
            self.lines[-1] += f" {found[0].strip()}"
        else:
            self.lines += found

    def statements(self, indent: str) -> None:
        """Statements up to the brace that closes them, or the end."""
        while self.token is not None and not self.is_next("}"):
            if self.token.lines > 1 and self.lines and not self.lines[-1].endswith("{"):
                self.lines.append("")
            self.statement(indent)

    def statement(self, indent: str) -> None:
        """One statement, directive or comment."""
        token = self.token
        if token is None:
            return
        if token.alone:
            self.directive(indent)
        elif token.kind == "line":
            self.comment(indent)
        elif token.text == "else":
            self.otherwise(indent)
        elif token.text in _HEADS:
            self.control(indent, [])
        elif token.text == "do":
            self.control_body(indent, [self.take()])
            self.until(indent)
        elif token.text in ("case", "default"):
            label = [self.take()]
            while self.token is not None and label[-1].text != ":":
                label.append(self.take())
            self.put(indent, label)
        else:
            self.simple(indent, [])

    def directive(self, indent: str) -> None:
        """A line of the preprocessor: a pragma stands as what follows it, all others at the margin."""
        token = self.take()
        inside = token.kind == "pragma" or token.text.startswith("#pragma")
        self.lines.append((indent if inside else "") + token.text)

    def comment(self, indent: str) -> None:
        """A comment to the end of a line; one behind a statement stays there."""
        token = self.take()
        if token.lines <= 0 and self.lines and len(self.lines[-1]) + 2 + len(token.text) <= WIDTH:
            self.lines[-1] += f"  {token.text}"
        else:
            self.lines.append(indent + token.text)

    def until(self, indent: str) -> None:
        """The condition of a `do`, behind the brace in front of it."""
        line = []
        if self.lines[-1] == indent + "}":
            self.lines.pop()
            line.append(Token("mark", "}", -1))
        if self.is_next("while"):
            line += [self.take()._replace(lines=0), *self.group(), self.take()]
        self.put(indent, line)

    def otherwise(self, indent: str) -> None:
        """`else`, behind the brace in front of it."""
        line = [self.take()._replace(lines=0)]
        if self.lines and self.lines[-1] == indent + "}":
            self.lines.pop()
            line.insert(0, Token("mark", "}", -1))
        if self.is_next("if"):
            self.control(indent, line)
        else:
            self.control_body(indent, line)

    def control(self, indent: str, line: list[Token]) -> None:
        """What begins with a condition in parentheses, and its body."""
        line.append(self.take()._replace(lines=0))
        while self.token is not None and not self.is_next("("):
            line.append(self.take())
        line += self.group()
        self.control_body(indent, line)

    def group(self, most: int = sys.maxsize) -> list[Token]:
        """Tokens from an opening mark to the one that closes it, or the first `most`."""
        found: list[Token] = []
        depth = 0
        while self.token is not None and len(found) < most:
            found.append(self.take())
            depth += (found[-1].text in _OPEN) - (found[-1].text in _CLOSE)
            if depth <= 0:
                break
        return found

    def control_body(self, indent: str, line: list[Token]) -> None:
        """The statement that belongs to a head: beside it where it is short and simple."""
        if self.is_next("{"):
            self.simple(indent, line, ends=True)
            return
        token = self.token
        if token is None or token.alone or token.kind == "line" or token.text in (*_HEADS, "do", "else"):
            self.put(indent, line)
            while self.token is not None and (self.token.alone or self.token.kind == "line"):
                self.statement(indent + "  ")
            self.statement(indent + "  ")
        else:
            above = len(self.lines)
            self.simple(indent + "  ", [])
            body, rest = self.lines[above].strip(), self.lines[above + 1 :]
            head = _filled(indent, line)
            gap = "" if body == ";" and token.lines < 0 else " "
            if not rest and len(head) == 1 and len(head[0]) + len(gap) + len(body) <= WIDTH:
                self.lines[above:] = [f"{head[0]}{gap}{body}"]
            else:
                self.lines[above:above] = head
        if self.is_next("else"):
            self.otherwise(indent)

    def simple(self, indent: str, line: list[Token], *, ends: bool = False) -> None:
        """Anything else: up to its semicolon, or to the brace that closes the body of a function.

        `ends`: whether it is the block of a condition or loop, which nothing follows.
        """
        depth = 0
        while (token := self.token) is not None:
            if token.alone:
                if line:
                    self.put(indent, line)
                    line = []
                self.directive(indent)
                continue
            if token.text == "}" and depth == 0:
                break
            if token.text == "{" and self.at in self.code:
                if self.short_block(indent, line):
                    last = line
                else:
                    self.put(indent, [*line, self.take()])
                    self.statements(indent + "  ")
                    last, line = line, [self.take()._replace(lines=1)] if self.token is not None else []
                if self.goes_on(last, depth, ends=ends):
                    continue
                break
            if token.text == "{" and depth == 0 and line and line[-1].text in (")", "const"):
                line += self.group()  # a function that does nothing
                if self.goes_on(line, depth, ends=ends):
                    continue
                break
            if line and line[0].text == "template" and line[-1].text == ">" and token.lines > 0:
                self.put(indent, line)
                line = []
            line.append(self.take())
            depth += (token.text in _OPEN) - (token.text in _CLOSE)
            if depth == 0 and (token.text == ";" or self.is_macro(line)):
                break
        if line:
            self.put(indent, line)
        if ends and self.is_next("else"):
            self.otherwise(indent)

    def is_macro(self, line: list[Token]) -> bool:
        """Whether calls of a macro that stands for definitions end here: their line says so, or is full."""
        called = line[0].text.isupper() and len(line) > 1 and line[1].text == "(" and line[-1].text == ")"
        if not called or self.token is None or self.is_next("{", ";"):
            return False
        return self.token.lines > 0 or (self.token.text.isupper() and len(_joined(line)) > WIDTH - 20)

    def short_block(self, indent: str, line: list[Token]) -> bool:
        """Adds a block of one plain statement that fits beside its head, and no `else` behind it."""
        first = self.at
        inside = self.group(most=WIDTH)
        plain = [x.text for x in inside]
        simple = plain.count(";") == 1 and plain[-2:-1] == [";"] and bool(line) and line[0].text not in ("do", "}")
        if simple and not {*_HEADS, "do", "else", "case"} & set(plain) and not self.is_next("else"):
            behind = [self.token] if self.token is not None and self.is_next(";", ",", ")") else []
            if not any(x.alone or x.kind == "line" for x in inside):
                whole = [*line, inside[0], inside[1]._replace(lines=0), *inside[2:-1], inside[-1]._replace(lines=0)]
                if len(_joined([*whole, *behind])) + len(indent) <= WIDTH:
                    line[:] = whole
                    return True
        self.at = first
        return False

    def goes_on(self, head: list[Token], depth: int, *, ends: bool) -> bool:
        """Whether a statement goes on behind a block: a type's, a lambda's, or one inside of parentheses."""
        if ends:
            return False
        texts = {x.text for x in head}
        given = "=" in texts and head[0].text != "template"  # whose parameters may have values
        return (
            depth > 0 or self.is_next(";", ",", ")", "(") or given or not texts.isdisjoint(("struct", "union", "enum"))
        )


def _gap(before: Token, token: Token) -> str:
    """What stands between two tokens of a line."""
    if token.lines < 0 or (token.lines > 0 and (before.text in ("(", "[") or token.text in (")", "]", ",", ";"))):
        return ""
    return " "


def _joined(line: list[Token]) -> str:
    text = [line[0].text]
    for before, token in pairwise(line):
        text += [_gap(before, token), token.text]
    return "".join(text)


def _filled(indent: str, line: list[Token]) -> list[str]:
    """A statement's head or the whole of it, in as many lines as it takes; assembly keeps the lines of its text."""
    commented = any(x.kind == "line" for x in line[:-1])
    if not commented and len(indent) + len(_joined(line)) <= WIDTH:
        return [indent + _joined(line)]
    pieces: list[list[Token]] = [[]]
    for token in line:
        held = token.lines > 0 and line[0].text == "asm" and (token.kind == "string" or token.text in (":", "::"))
        if pieces[-1] and (held or pieces[-1][-1].kind == "line"):
            pieces.append([])
        pieces[-1].append(token)
    found: list[str] = []
    depth = 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            cut = _cut(piece, at, WIDTH - len(indent) - (4 if found else 0), depth)
            found.append(indent + ("    " if found else "") + _joined(piece[at:cut]))
            depth += sum((x.text in _OPEN) - (x.text in _CLOSE) for x in piece[at:cut])
            at = cut
    return found


def _cut(line: list[Token], first: int, room: int, depth: int) -> int:
    """Where a line that begins at `first` ends: behind all, or at the last of the best places of its second half."""
    best: dict[bool, tuple[tuple[int, int, int], int]] = {}
    length = len(line[first].text)
    depth += line[first].text in _OPEN
    for i in range(first + 1, len(line)):
        before, token = line[i - 1], line[i]
        if length > room and best:
            break
        gap = _gap(before, token)
        ease = _ease(before, token) if gap else -1
        rank = (-depth, ease, i)
        late = length > room // 2
        if ease >= 0 and (late not in best or rank > best[late][0]):
            best[late] = (rank, i)
        depth += (token.text in _OPEN) - (token.text in _CLOSE)
        length += len(gap) + len(token.text)
    return best[max(best)][1] if best and length > room else len(line)


def _ease(before: Token, token: Token) -> int:
    """How well a line may end between two tokens that a blank parts; -1: not at all."""
    if before.text in (",", ";"):
        return 99
    if token.text in _LOOSE:
        return 1 + _LOOSE[token.text]
    strings = before.kind == "string" and token.kind == "string"
    return 0 if strings or before.text in ("=", "}") else -1
