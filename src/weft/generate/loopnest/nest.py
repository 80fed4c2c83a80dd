"""Text with nested blocks that can be added to at every open level."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Block:
    """Lines and inner blocks between one pair of braces."""

    head: str
    items: list[str | Block] = field(default_factory=list)

    def lines(self, indent: str = "") -> Iterator[str]:
        """The text, indented by two spaces per level."""
        if self.head.startswith("#"):
            pragma, _, head = self.head.partition("\n")
            yield pragma
        else:
            head = self.head
        yield f"{indent}{head} {{" if head else f"{indent}{{"
        for item in self.items:
            if isinstance(item, str):
                yield f"{indent}  {item}" if not item.startswith("#") else item
            else:
                yield from item.lines(indent + "  ")
        yield f"{indent}}}"


class Nest:
    """A stack of open blocks. A line put at an outer level lands before the inner block that is still open there."""

    def __init__(self) -> None:
        self.stack: list[Block] = [Block("")]

    @property
    def level(self) -> int:
        """Number of the innermost open block; 0 is the function's body."""
        return len(self.stack) - 1

    def put(self, line: str, level: int | None = None) -> None:
        """Add a line to the block at `level` (default: the innermost)."""
        self.stack[-1 if level is None else level].items.append(line)

    @contextmanager
    def block(self, head: str) -> Iterator[int]:
        """Open a block, yield its level, close it."""
        self.stack.append(Block(head))
        yield self.level
        done = self.stack.pop()
        if done.items:
            self.stack[-1].items.append(done)

    @contextmanager
    def at(self, level: int) -> Iterator[None]:
        """Work at an outer level for a while, before the blocks that are open below it."""
        inner = self.stack[level + 1 :]
        del self.stack[level + 1 :]
        yield
        self.stack += inner
