"""Where a kernel waits for the kernel before it: just before the first access that needs it.

What comes earlier (coordinates, indices, reads of weights) then overlaps with the end of that kernel. Every thread has
to pass, so the coord is one that no condition and no loop surrounds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

WAIT = ("role.pdl_wait();", "role.pdl_trigger();")
_NAME = re.compile(r"\b(?<!role\.)(?!w_|role\b)[a-zA-Z_]\w*\b")
_DEFINITION = re.compile(r"(?:const )?w_\w+ (\w+)(?:\[\d+\])?(?: = .*)?;")
_WIDE_READ = re.compile(r"w_ldv<\d+>\(.*, (\w+)\);")
_ASSIGNMENT = re.compile(r"(\w+)(?:\[\w+\])? = .*;")


def with_wait(lines: Sequence[str], shared: Collection[str]) -> list[str]:
    """The lines of a function with the wait in its place. `shared`: names of what earlier kernels may write or read."""
    if not shared:
        return [*lines, *WAIT]
    touch = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(shared)))})\b")
    at = _place(lines, touch)
    early, late = _sorted_out(lines[at:], touch)
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())] if at < len(lines) else ""
    return [*lines[:at], *early, *(indent + w for w in WAIT), *late]


def _place(lines: Sequence[str], touch: re.Pattern[str]) -> int:
    """Number of the line before which to wait: that of the access, or of the outermost condition or loop around it."""
    opened: list[int] = []
    """Per open block the line that opens it; -1 for blocks that every thread enters."""
    pragma = -1
    for number, line in enumerate(lines):
        text = line.strip()
        if text.startswith("#pragma"):
            pragma = number if pragma < 0 else pragma
            continue
        start = pragma if pragma >= 0 else number
        pragma = -1
        if touch.search(text):
            return next((k for k in opened if k >= 0), start)
        if text == "}":
            opened.pop()
        elif text.endswith("{"):
            opened.append(-1 if text == "{" else start)
    return len(lines)


def _sorted_out(lines: Sequence[str], touch: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Definitions of the block that need nothing from behind the wait, such as reads of weights; and all the rest."""
    early: list[str] = []
    late: list[str] = []
    behind: set[str] = set()
    """Names that lines behind the wait define or may change."""
    depth = 0
    for number, line in enumerate(lines):
        text = line.strip()
        simple = not depth and not text.endswith("{") and not text.startswith("#")
        found = _DEFINITION.fullmatch(text) or _WIDE_READ.fullmatch(text)
        names = set(_NAME.findall(text))
        depth += text.count("{") - text.count("}")
        if depth < 0:
            return early, [*late, *lines[number:]]
        if simple and found is not None and not touch.search(text) and not names & behind:
            early.append(line)
            continue
        late.append(line)
        changed = found or _ASSIGNMENT.fullmatch(text)
        behind |= {changed.group(1)} if changed is not None else names
    return early, late
