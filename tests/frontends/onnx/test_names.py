"""Names of a model in messages: one line, nothing that a terminal would act on."""

from __future__ import annotations

import unicodedata

from weft.frontends.onnx.names import SHOWN_CHARS, shown


def test_what_is_no_plain_character_is_escaped() -> None:
    for code in (*range(0x300), 0x2028, 0x202E, 0x200B, 0xFEFF, 0xE000, 0x4E2D, 0x1F600, 0xD800):
        c = chr(code)
        plain = c == " " or unicodedata.category(c)[0] not in "CZ"
        for name in (c, f"a{c}b", f"{c} ü"):
            got = shown(name)
            assert (got == name) == plain
            assert all(x == " " or unicodedata.category(x)[0] not in "CZ" for x in got), hex(code)


def test_long_names_are_cut() -> None:
    for letter in "aü":
        got = shown(letter * 5000)
        assert len(got) == SHOWN_CHARS and got == letter * (SHOWN_CHARS - 3) + "..."
    assert shown(7) == "7"
