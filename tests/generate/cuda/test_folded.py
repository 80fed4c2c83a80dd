"""Emitted text shows what a kernel does and nothing else: no `* 1`, no `+ 0`, no loop that never runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import goldens

GOLDENS = sorted(
    path for name in ("templates", "kernels") for path in (goldens.FOLDER / "cuda" / name).glob("*.cu")
)  # fmt: skip
IDLE = {
    "* 1": r"\* 1u?(?![\w.])",
    "1 *": r"(?<![\w.\])])1u? \* ",
    "/ 1": r"/ 1u?(?![\w.])",
    "% 1": r"% 1u?(?![\w.])",
    "+ 0": r"[+-] 0u?(?![\w.])",
    "0 +": r"(?<![\w.\])])0u? \+ ",
    "* 0": r"\* 0u?(?![\w.])",
    "0 *": r"(?<![\w.\])])0u? \* ",
    "0 /": r"(?<![\w.\])])0u? [/%] ",
    ">> 0": r"(?:<<|>>) 0u?(?![\w.])",
    "if (true)": r"if \((?:true|false|0|1)\)|true &&|&& true|\|\| false|false \|\|",
    "an empty loop": r"for \(\w+ (\w+) = (\d+); \1 < \2;",
}
"""Text that says nothing, by what it is."""


def idle(text: str) -> Iterator[str]:
    """Where a kernel's text says nothing: each place with what stands around it; comments are no part of it."""
    for line in text.split("\n"):
        code = line.partition("//")[0]
        for what, pattern in IDLE.items():
            for found in re.finditer(pattern, code):
                yield f"{what}: {code[max(0, found.start() - 40) : found.end() + 40].strip()}"


def test_all_goldens_are_looked_at() -> None:
    assert {"tma.cu", "attention.cu", "mlp.cu", "swap_ab.cu", "training.cu"} <= {path.name for path in GOLDENS}


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_golden_text_says_nothing(path: Path) -> None:
    assert list(idle(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("i0 = tm % 16 * 128, i1 = tm / 16 * 1;", "* 1"),
        ("v = 1 * x;", "1 *"),
        ("tn = r / 1;", "/ 1"),
        ("tile % 1u", "% 1"),
        ("w_tma(&ma, to + 0, bar)", "+ 0"),
        ("A + (0 + n)", "0 +"),
        ("offset = g * 0;", "* 0"),
        ("from + (0 * 4)", "0 *"),
        ("tq = 0 / 4", "0 /"),
        ("x << 0 | y", ">> 0"),
        ("if (true) {", "if (true)"),
        ("for (int i = 0; i < 0; ++i)", "an empty loop"),
    ],
)
def test_what_says_nothing_is_seen(code: str, what: str) -> None:
    assert [x.partition(":")[0] for x in idle(code)] == [what]


def test_other_numbers_are_no_matter() -> None:
    code = "x * 1.5f + 0.5f * y - 10 / 12 % 16, a[0], f(x, 0), p + 0x40, 1 - (warp >> 2), 10 * x, v1 * 2, t[1] * 2"
    assert not list(idle(code))
    assert not list(idle("x = y;  // not x * 1 + 0"))
