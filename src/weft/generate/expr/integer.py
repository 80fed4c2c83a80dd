"""C text of integer expressions as a person writes it: without `* 1`, `+ 0`, `/ 1` and `% 1`, brackets where needed.

`Int("tm") / tiles * box` is `tm / 4 * 64`, `tm * 64` where there is one tile, and `tm / 4` for a box of one row. What
the numbers decide is decided when the text is written, so that it shows what a kernel does and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_OPERATORS = frozenset(" +-*/%&|^<>?:!~,")
_ZERO, _ONE = ("0", "0u"), ("1", "1u")
_LOOSE, _SUM, _PRODUCT, _TIGHT = range(4)
"""How tightly a text binds."""


@dataclass(frozen=True, slots=True)
class Int:
    """An integer expression of C as text; its operators give the text of the result.

    A text with an operator outside of brackets is taken to bind loosely: it gets brackets as an operand.
    Divisors are positive, and no operand has side effects: `x * 0` and `x % 1` are `0`.
    """

    text: str
    _rank: int = field(default=-1, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self._rank < 0:
            object.__setattr__(self, "_rank", _TIGHT if _is_tight(self.text) else _LOOSE)

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Int | str | int) -> Int:
        return self._plus(integer(other))

    def __radd__(self, other: str | int) -> Int:
        return integer(other)._plus(self)

    def __sub__(self, other: Int | str | int) -> Int:
        other = integer(other)
        if other.text in _ZERO:
            return self
        if other.text.startswith("-") and other.text[1:].isdigit():
            return self + int(other.text[1:])
        if self.text == "0":
            return Int(f"-{other.tight}", _SUM)
        return Int(f"{self._at_least(_SUM)} - {other._at_least(_PRODUCT)}", _SUM)

    def __mul__(self, other: Int | str | int) -> Int:
        other = integer(other)
        if self.text in _ZERO or other.text in _ZERO:
            return Int("0")
        if other.text in _ONE:
            return self
        if self.text in _ONE:
            return other
        return Int(f"{self._at_least(_PRODUCT)} * {other._at_least(_TIGHT)}", _PRODUCT)

    def __rmul__(self, other: str | int) -> Int:
        return integer(other) * self

    def __truediv__(self, other: Int | str | int) -> Int:
        """C's quotient, rounded towards zero."""
        other = integer(other)
        if other.text in _ONE or self.text in _ZERO:
            return self
        return Int(f"{self._at_least(_PRODUCT)} / {other._at_least(_TIGHT)}", _PRODUCT)

    def __mod__(self, other: Int | str | int) -> Int:
        other = integer(other)
        if other.text in _ONE or self.text in _ZERO:
            return Int("0")
        return Int(f"{self._at_least(_PRODUCT)} % {other._at_least(_TIGHT)}", _PRODUCT)

    @property
    def tight(self) -> str:
        """The text, in brackets unless it is a name, a number, a call or the like."""
        return self._at_least(_TIGHT)

    def _plus(self, other: Int) -> Int:
        if other.text in _ZERO:
            return self
        if self.text in _ZERO:
            return other
        if other.text.startswith("-") and other.text[1:].isdigit():
            return Int(f"{self._at_least(_SUM)} - {other.text[1:]}", _SUM)
        return Int(f"{self._at_least(_SUM)} + {other._at_least(_SUM)}", _SUM)

    def _at_least(self, rank: int) -> str:
        """The text as an operand that has to bind so tightly."""
        return self.text if self._rank >= rank else f"({self.text})"


def _is_tight(text: str) -> bool:
    """Whether no operator stands outside of brackets."""
    depth = 0
    for x in text:
        if depth == 0 and x in _OPERATORS:
            return False
        depth += (x in "([{") - (x in ")]}")
    return True


def integer(x: Int | str | int) -> Int:
    """The expression itself, or of its text or value."""
    return x if isinstance(x, Int) else Int(str(x), _TIGHT if isinstance(x, int) and x >= 0 else -1)


def summed(*terms: Int | str | int) -> Int:
    """The sum of terms in this order."""
    total = Int("0")
    for x in terms:
        total = total + x
    return total


def behind(pointer: str, offset: Int) -> str:
    """A pointer and an offset in elements, which is one sum before it is added."""
    return pointer if offset.text in _ZERO else f"{pointer} + {offset.tight}"
