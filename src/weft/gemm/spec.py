"""What `weft gemm` is asked for: tokens such as `MN=1024 K=2048 t=64`, lists of them, and the problem that they pose.

    token   letters of M, N, K, t, O, then `=` and a number; all letters get the number; later tokens win
    M, N, K sizes of the product, 1024 unless given
    t       how many candidates may be measured at most
    O       0: Weft's templates, as the model ranks them; 1: the library; 2: every feasible configuration

65536 may be added to O: it once told foreground from background. Source: the tokens of TVMGemmAsync.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, get_args

from weft.errors import OptionError
from weft.gemm.epilogue import Epilogue, epilogue
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.orchestrate.extract import canonical_text

Layout = Literal["nn", "nt", "tn", "tt"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
"""A letter for each operand: `n` as written (m x k, k x n), `t` with its transpose in memory."""
TYPES: Mapping[str, tuple[DType, DType]] = {
    "f16": (DType.F16, DType.F16),
    "bf16": (DType.BF16, DType.BF16),
    "f32": (DType.F32, DType.F32),
    "e4m3": (DType.F8E4M3, DType.F8E4M3),
    "e5m2": (DType.F8E5M2, DType.F8E5M2),
    "e4m3_e5m2": (DType.F8E4M3, DType.F8E5M2),
    "e5m2_e4m3": (DType.F8E5M2, DType.F8E4M3),
    "i8": (DType.I8, DType.I8),
}
"""What the templates multiply: names of the types of A and B."""
LARGEST = 1 << 20
"""Of M, N and K."""
MOST_ELEMENTS = 1 << 31
"""Of a matrix."""
MOST_LINES = 10_000
FOREGROUND = 65536
_TOKEN = re.compile(r"([MNKtO|]+)=([0-9]{1,12})")
_TOKENS = re.compile(rf"{_TOKEN.pattern}(?: *{_TOKEN.pattern})*")
"""Several in one word, with or without blanks between them."""
_SIZES = {"M": "m", "N": "n", "K": "k"}
_WORD = re.compile(r"(layout|dtype|epilogue)=(.*)", re.DOTALL)
THIRTEEN = (
    "M=512 N=256 K=640", "M=512 N=384 K=256", "MNK=512", "MNK=896", "MNK=1024", "MNK=1152", "MNK=1536", "MNK=2048",
    "MNK=3072", "MNK=4096", "MNK=8192", "M=512 N=3072 K=768", "M=512 N=768 K=3072",
)  # fmt: skip
"""The list of the original."""


class Search(Enum):
    """Where candidates come from; the value is `O`."""

    TEMPLATES = 0
    LIBRARY = 1
    EXHAUSTIVE = 2


@dataclass(frozen=True, slots=True)
class Gemm:
    """epilogue(A · B) with A of m x k and B of k x n elements, row-major."""

    m: int = 1024
    n: int = 1024
    k: int = 1024
    most: int = 5000
    """Candidates to measure at most."""
    search: Search = Search.TEMPLATES
    layout: str = "nn"
    dtype: DType = DType.F16
    """Of A; products of 8-bit numbers are multiplied by a scale for each operand, and everything else is then bf16."""
    epilogue: Epilogue = field(default_factory=lambda: epilogue("none"))
    constant: bool = False
    """B is the same in every call, so that it may be repacked once."""
    right: DType | None = None
    """Of B, where it is another."""
    fast: bool = False
    """Sums of products of 8-bit floats may stay in the tensor cores."""

    @property
    def name(self) -> str:
        """Fit for a folder: sizes, layout, type and epilogue."""
        parts = [f"M={self.m}", f"N={self.n}", f"K={self.k}", self.layout, self.types]
        parts += ["fast"] if self.fast and self.dtype.is_float8 else []
        parts += [self.epilogue.name] if self.epilogue.name != "none" else []
        return "_".join([*parts, "constant"] if self.constant else parts)

    @property
    def types(self) -> str:
        """Of A and B, as in `TYPES`."""
        return next(name for name, types in TYPES.items() if types == (self.dtype, self.right or self.dtype))

    @property
    def bytes(self) -> bool:
        """Whether A and B are numbers of 8 bits."""
        return self.dtype.itemsize == 1

    @property
    def out(self) -> DType:
        """Of the result and of the epilogue's operands."""
        return DType.BF16 if self.bytes else self.dtype

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Of everything in `shapes`."""
        scales = (DType.F32, DType.F32) if self.bytes else ()
        return (self.dtype, self.right or self.dtype, *(self.out for _ in self.epilogue.operands), *scales)

    @property
    def flops(self) -> float:
        """Multiplications and additions of the product."""
        return 2.0 * self.m * self.n * self.k

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of A and B as they lie in memory, then of the epilogue's operands, then of the scales of A and B."""
        a = (self.k, self.m) if self.layout[0] == "t" else (self.m, self.k)
        b = (self.n, self.k) if self.layout[1] == "t" else (self.k, self.n)
        extents: dict[str, tuple[int, ...]] = {
            "column": (self.n,), "row": (self.m, 1), "full": (self.m, self.n),
        }  # fmt: skip
        scales: tuple[tuple[int, ...], ...] = ((), ()) if self.bytes else ()
        return (a, b, *(extents[extent] for _, extent in self.epilogue.operands), *scales)

    def problem(self) -> Problem:
        """As a problem of the generators; one value per column is constant at run time, as a bias is."""
        b = GraphBuilder()
        types = [TensorType(dtype, shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        left, right = b.input(types[0]), b.input(types[1], is_weight=self.constant)
        wide = DType.F32 if self.bytes else self.dtype
        summed = DType.I32 if self.dtype.is_integer else wide
        given: dict[str, NodeId] = {}
        for (name, extent), type_ in zip(self.epilogue.operands, types[2:], strict=False):
            given[name] = b.cast(b.input(type_, is_weight=extent == "column"), wide)
        left = b.transpose(left, (1, 0)) if self.layout[0] == "t" else left
        right = b.transpose(right, (1, 0)) if self.layout[1] == "t" else right
        product = b.cast(b.add(Prim.MATMUL, b.cast(left, summed), b.cast(right, summed)), wide)
        if self.bytes:
            product = b.apply(Prim.MUL, product, b.apply(Prim.MUL, b.input(types[-2]), b.input(types[-1])))
        graph = b.build([b.cast(self.epilogue.build(b, product, given), self.out)])
        posed = Problem(graph, "", (Format.ROW,) * len(graph.inputs), (Format.ROW,))
        return replace(posed, key=canonical_text(posed))


def read_tokens(tokens: Sequence[str], base: Gemm) -> Gemm:
    """What tokens make of a product; a word may hold several, as in `MN=1024 K=2048` and `MN=1024K=2048`.

    Raises:
        OptionError: a token that does not parse, or a size out of range [W001].
    """
    found = base
    for word in tokens:
        pairs = [(m[1].replace("|", ""), int(m[2])) for m in _TOKEN.finditer(word)] if _TOKENS.fullmatch(word) else []
        if not pairs or not all(letters for letters, _ in pairs):
            raise _bad(f"{_short(word)} is not letters of M, N, K, t, O, then = and a number, as in MN=1024")
        for letters, number in pairs:
            for letter in letters:
                found = _with(found, letter, number)
    return checked(found)


def _with(found: Gemm, letter: str, number: int) -> Gemm:
    if letter in _SIZES:
        if not 1 <= number <= LARGEST:
            raise _bad(f"{letter}={number} is outside of 1 to {LARGEST}")
        return replace(found, **{_SIZES[letter]: number})  # type: ignore[arg-type]
    if letter == "t":
        if number < 1:
            raise _bad("t=0 measures nothing: t is how many candidates may be measured")
        return replace(found, most=number)
    try:
        return replace(found, search=Search(number - FOREGROUND if number >= FOREGROUND else number))
    except ValueError:
        raise _bad(f"O={number} is none of 0 (templates), 1 (library), 2 (exhaustive), each also + 65536") from None


def checked(g: Gemm) -> Gemm:
    """The product, if its matrices are not too large.

    Raises:
        OptionError: one has 2^31 elements or more [W001].
    """
    for rows, columns in ((g.m, g.k), (g.k, g.n), (g.m, g.n)):
        if rows * columns >= MOST_ELEMENTS:
            raise _bad(f"a matrix of {rows} x {columns}: the templates take fewer than 2^31 elements")
    return g


def layout_of(text: str) -> str:
    """A layout by name.

    Raises:
        OptionError: there is no such layout [W001].
    """
    if text not in LAYOUTS:
        raise OptionError(option="--layout", problem=f"{_short(text)} is none of {', '.join(LAYOUTS)}")
    return text


def typed(g: Gemm, text: str) -> Gemm:
    """The product with operands of these types, by their name.

    Raises:
        OptionError: the templates do not multiply such types [W001].
    """
    if text not in TYPES:
        raise OptionError(option="--dtype", problem=f"{_short(text)} is none of {', '.join(TYPES)}")
    left, right = TYPES[text]
    return replace(g, dtype=left, right=None if right is left else right)


def read_list(text: str, base: Gemm, where: str) -> list[Gemm]:
    """Problems, one per line: tokens, and `layout=`, `dtype=` and `epilogue=`; `#` begins a comment.

    Raises:
        OptionError: a line that does not parse, or none at all; it names the line [W001].
    """
    found: list[Gemm] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            raise _in_line(where, number, "a quotation mark without its partner") from None
        if not words:
            continue
        try:
            found.append(_read_line(words, base))
        except OptionError as error:
            raise _in_line(where, number, str(error.details["problem"])) from None
        if len(found) > MOST_LINES:
            raise OptionError(option=where, problem=f"more than {MOST_LINES} problems")
    if not found:
        raise OptionError(option=where, problem="no problem in it: write one per line, as MN=1024 K=2048")
    return list(dict.fromkeys(found))


def _read_line(words: Sequence[str], base: Gemm) -> Gemm:
    tokens = []
    for word in words:
        if (match := _WORD.fullmatch(word)) is None:
            tokens.append(word)
        elif match[1] == "layout":
            base = replace(base, layout=layout_of(match[2]))
        elif match[1] == "dtype":
            base = typed(base, match[2])
        else:
            base = replace(base, epilogue=epilogue(match[2]))
    return read_tokens(tokens, base)


def thirteen(base: Gemm) -> Iterator[Gemm]:
    """The problems of `THIRTEEN`."""
    return (read_tokens(line.split(), base) for line in THIRTEEN)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "…")


def _bad(problem: str) -> OptionError:
    return OptionError(option="TOKEN", problem=problem)


def _in_line(where: str, number: int, problem: str) -> OptionError:
    return OptionError(option=where, problem=f"line {number}: {problem}")
