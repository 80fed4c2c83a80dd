"""Texts of kernels laid out for a reader: only white space changes, whatever the text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests import goldens

import weft
from weft.kernels.pretty import WIDTH, pretty, tokens

WRITTEN = sorted((goldens.FOLDER / "cuda" / "templates").glob("*.cu"))
HEADERS = sorted(Path(weft.__file__).parent.rglob("*.h"))
MARKS = [
    *"{}()[];,=+-*/<>:#\n\n  \"'\\",
    "if (x)",
    "for (;;)",
    "else",
    "do",
    "while (x)",
    "{",
    "}",
    "//",
    "/*",
    "struct",
    "a",
]
MARKS += ['"a b"', "#define A \\\n", "template <class T>", "W_A(b)", "(void)x;", "case 1:", "asm"]


def told(text: str) -> list[str]:
    return [x.text for x in tokens(text)]


@pytest.mark.parametrize("path", [*WRITTEN, *HEADERS], ids=lambda p: p.name)
def test_only_white_space_changes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    shown = pretty(text)
    assert told(shown) == told(text)
    assert "".join(shown.split()) == "".join(text.split())
    assert pretty(shown) == shown
    for line in shown.split("\n"):
        longest = max((len(x.text) for x in tokens(line)), default=0)
        directive = line.startswith("#") or line.endswith("\\")
        assert len(line) <= WIDTH or longest > WIDTH // 2 or directive or line.lstrip().startswith("//"), line


@pytest.mark.parametrize("seed", range(300))
def test_any_text_keeps_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    text = " ".join(rng.choice(MARKS) for _ in range(rng.randrange(200)))
    assert told(pretty(text)) == told(text)


@pytest.mark.parametrize("text", ["{" * 100_000, "if (x) " * 100_000, "f(" * 100_000, "{ a;" * 100_000 + "}" * 100_000])
def test_what_nobody_wrote_to_be_read_ends(text: str) -> None:
    assert "".join(pretty(text).split()) == "".join(text.split())


def test_how_it_looks() -> None:
    text = """
W_FN void k(int n) {
const int t = 1; (void)t; (void)n;
#pragma unroll
for (int i = 0; i < 2; ++i)
#pragma unroll
for (int j = 0; j < 2; ++j) a[i][j] = 0; // zeros
#ifdef X
if (t) { f(); g(); } else if (n) h(); else { do { s(); } while (u); }
#endif
auto ask = [&](int x) { const u32 y = x; return y; };
ARGUMENTS; switch (n) { case 1: f(); break; default: g(); }
static const int table[2] = {1,
2}; struct s { int x; }; }

template <int N = 1> W_FN void g() { f<N>(); } W_FN void h() {}
asm volatile("a;"
"b;" :: "r"(x));
""".lstrip()
    text = text.replace("ARGUMENTS", f"call({', '.join(f'argument_{i} * 2 + 1' for i in range(7))})")
    assert (
        pretty(text)
        == """\
W_FN void k(int n) {
  const int t = 1;
  (void)t; (void)n;
  #pragma unroll
  for (int i = 0; i < 2; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j) a[i][j] = 0;  // zeros
#ifdef X
  if (t) {
    f();
    g();
  } else if (n) h();
  else {
    do {
      s();
    } while (u);
  }
#endif
  auto ask = [&](int x) {
    const u32 y = x;
    return y;
  };
  call(argument_0 * 2 + 1, argument_1 * 2 + 1, argument_2 * 2 + 1, argument_3 * 2 + 1, argument_4 * 2 + 1,
      argument_5 * 2 + 1, argument_6 * 2 + 1);
  switch (n) {
    case 1:
    f();
    break;
    default:
    g();
  }
  static const int table[2] = {1, 2};
  struct s { int x; };
}

template <int N = 1> W_FN void g() { f<N>(); }
W_FN void h() {}
asm volatile("a;" "b;" :: "r"(x));
"""
    )
