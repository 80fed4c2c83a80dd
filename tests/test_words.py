"""The field's words: what has a name in CUTLASS, PTX or the papers is called by it, and not as it once was here.

`OLD` holds pairs of an earlier identifier and the sense in which it is banned, with the word to use and the places of
that sense. It asks names of public modules, classes, functions, fields and parameters, and texts of messages. Ordinary
English is free, and so is an identifier elsewhere: a pair of kernels, an even number.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from weft.kernels.stored_names import FIELDS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "weft"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
TILES = r"generate/cuda/(gemm|attention|mlp|conv)/|generate/cuda/\w+\.py|gemm/|cli/|report/"
"""Where tiles of products are spoken of."""
CUDA = r"generate/cuda/|device/cuda/|kernels/|gemm/|cli/|report/"
ALL = r""
MESSAGES = {"Declined", "print", "add_argument", "warn", "progress", "say"}
"""What is called with text for people, beside errors."""


@dataclass(frozen=True)
class Old:
    """An earlier identifier in one sense."""

    name: str
    """A regular expression for the whole of a name; empty: no name had it."""
    sense: str
    instead: str
    """Stands in the glossary."""
    message: str = ""
    """A regular expression for texts; empty: English."""
    where: str = TILES
    """A regular expression for files below `src/weft`."""
    but: frozenset[str] = frozenset()
    """Names that are meant otherwise, as `file:name`."""


OLD = (
    Old("turns|in_turn", "warpgroups that issue products one after the other", "ping-pong", r"\btak(e|es|ing) turns\b"),
    Old("even|even_of", "k-tiles divided evenly among CTAs", "stream-K", r"\bshared evenly\b|steps are divided"),
    Old("mutual", "each CTA of a tile finishes a part of it", "fix-up", r"finish (a tile )?together"),
    Old("pair|pairs_of|PAIRS|pair_header", "CTAs of a cluster that load for each other", "multicast",
        r"copy for each other|copies for each other", r"generate/cuda/(gemm|intrinsics)/"),
    Old("below|beside", "CTAs of a cluster along M and N", "multicast", where=r"generate/cuda/gemm/(tma|swap_ab)/"),
    Old("band", "rows of tiles that are gone through together", "raster group", where=r"generate/cuda/gemm/"),
    Old("apart|sums_apart", "accumulators of their own for 8-bit floats", "two-level accumulation",
        r"sums of their own", r"generate/cuda/gemm/"),
    Old("woven|WOVEN", "columns in the order of registers", "interleaved columns", r"\bwoven\b"),
    Old("spare", "columns loaded beside a tile", "over-fetch", r"columns to spare"),
    Old("groups", "warpgroups that multiply", "consumers", where=r"generate/cuda/(gemm/(tma|swap_ab)|attention/tma)"),
    Old("resident", "CTAs per multiprocessor of the launch bounds", "min CTAs",
        where=r"generate/cuda/(gemm/tma|attention/tma|training)"),
    Old("blocks", "CTAs of a persistent grid", "persistent CTAs",
        where=r"generate/cuda/(gemm/tma|mlp/(shapes|wide|pair))"),
    Old("fields|field|field_size", "pixels that a tile reads, once for all taps", "halo tile",
        r"read(s)? (no )?fields|with a field", r"generate/cuda/gemm/tma/"),
    Old("keyed", "warpgroups that share keys", "split over keys", where=r"generate/cuda/attention/tma_shapes"),
    Old("Shape", "the configuration of a template", "Config", where=r"generate/|device/"),
    Old("at_once|make_sure", "CTAs that must run at a time", "co-resident", r"wait for each other",
        r"kernels/|device/|generate/bind"),
    Old("is_held|round_held|HELD", "element types that NumPy lacks", "emulated type",
        where=r"ir/|frontends/|runtime/|tune/"),
    Old("turned|turned_a|turned_b", "operands whose memory runs along M or N", "MN-major",
        where=r"generate/cuda/(gemm|attention)/"),
    Old("meet|meets|meeting|meetings", "CTAs that wait for each other through memory", "cross-CTA reduction",
        r"blocks (that )?meet", r"generate/cuda/loops/|generate/bind"),
    Old("once", "mean and variance by one pass", "single-pass", where=r"generate/cuda/loops/"),
    Old("outward|Outward", "results stored to all places that show them", "scatter", where=r"generate/cuda/"),
    Old("room", "values in shared memory that wait", "stash", where=r"generate/cuda/loops/forms"),
    Old("rough|is_rough|may_be_rough|rough_header", "functions of the machine", "approximation",
        where=r"generate/cuda/"),
    Old("[Ww]alks?|[aw]_walk", "strides of an operand", "strided layout",
        where=r"generate/(contraction|cpp|cuda/(gemm|conv))/"),
    Old("walk_of", "the stage of the ring that a main loop is at", "pipeline state"),
    Old(r"(\w+_)?places?|Place", "problems that a table of measurements tells apart", "bucket",
        where=r"generate/cuda/shipped/"),
    Old(r"(\w+_)?places?|Placed?", "indices of an element", "coordinate", where=r"generate/(loopnest|cpp|cuda/loops)/"),
    Old(r"places?|Place", "a parameter in the buffer of all", "parameter slice", where=r"generate/cuda/training/|nn/"),
    Old("found|Found", "what a search came to", "search result", where=r"gemm/(search|folder|plot|again)"),
    Old("parts|Parts", "statistics that a product leaves of its rows", "partial statistics",
        where=r"generate/cuda/gemm/common/(normed|product)\.py"),
    Old("sums?", "the type of an accumulator", "accumulator type",
        where=r"generate/cuda/gemm/common/(product|pack)\.py"),
    Old("sums", "gradients of all parameters", "gradient buffer", where=r"nn/|generate/cuda/training/step"),
    Old("SUMS|sums|back_of_sums", "what an activation is computed of", "pre-activation",
        where=r"generate/cuda/(activations|training/(activation|chain|skips))"),
    Old("parts|in_parts|possible_parts", "reductions of which CTAs share a row", "split reduction",
        where=r"generate/cuda/loops/", but=frozenset({"generate/cuda/loops/point.py:parts"})),
    Old("pieces|Piece|pieces_of", "the loops of an elementwise kernel", "loop profile", where=r"generate/cuda/loops/"),
    Old("words|in_words", "units of 16 bits in an element", "halves",
        where=r"generate/cuda/(gemm/common/product|conv/halo/kernel)\.py"),
    Old("chunks?", "elements of a load of 16 bytes", "per load",
        where=r"generate/cuda/(gemm/common/product|conv/halo/kernel)\.py"),
    Old("sums|(sums|stretched)_header|stretch(ed)?|STRETCHED", "weights packed times a factor", "pre-scaled weights",
        r"\bstretched\b", r"generate/cuda/mlp/"),
    Old("given|Given|MOST_GIVEN", "what layers read beside their weights", "input matrix",
        where=r"generate/cuda/(mlp|training)/|orchestrate/mlp|nn/layers"),
    Old("given|NOTHING_GIVEN", "constants that an operator makes itself", "tables", where=r"tune/|pipeline/"),
    Old("[Pp]laces?", "where a problem stands in a graph", "occurrence", where=r"pipeline/"),
    Old("parts", "CTAs that share the keys of the same rows", "split over keys", where=r"generate/cuda/attention/"),
    Old("sums", "partial sums of the gradients of weights", "wgrad", where=r"generate/cuda/training/"),
    Old(r"together(_\w+)?", "columns that a thread loads at once", "vector width", where=r"generate/cuda/mlp/"),
    Old("resident|stays", "whether q stays in registers", "Q in registers", where=r"generate/cuda/attention/"),
    Old("resident", "CTAs that a multiprocessor holds", "resident CTAs", where=r"generate/cuda/(mlp|conv|loops)/"),
    Old("blocks", "CTAs of a product", "CTA", where=r"costmodel/roofline"),
    Old("Block|blocks?|Cuts?|CUTS|fit|steps|room", "tiles of a product and the CTAs that make them", "tile shape",
        where=r"costmodel/tiles"),
    Old("blocks(_of)?", "thread blocks of a launch", "CTA", where=r"generate/cuda/training/"),
    Old("turns|in_turn", "iterations of a loop, and a lock", "trip count", where=r"generate/cuda/loops/|nn/"),
    Old("Turns", "calls from several streams, one behind the other", "stream order", where=r"runtime/|platform/"),
    Old("[Rr]oom|room_bytes|finds_room", "what is shared memory, or a budget", "budget of an SM",
        where=r"generate/cuda/(mlp|gemm)/"),
    Old("", "K of a product", "K", r"along the sum|steps of the sum", r"generate/cuda/gemm/"),
    Old("", "thread blocks", "CTA", r"\b(of|fits|fit) a block\b|\btwo blocks\b",
        r"generate/cuda/(gemm|conv|attention|mlp|loops)/"),
    Old("", "the tensor memory accelerator", "TMA", r"copy engine", ALL),
    Old("w_wait|w_release|w_meet_some", "waits of dependent launches, barriers of some warps", "PDL", where=CUDA),
)  # fmt: skip


def named(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    """Public names: classes, functions and their parameters, fields, constants."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node.lineno
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield from ((a.arg, node.lineno) for a in arguments)
        if isinstance(node, ast.Module | ast.ClassDef):
            for inner in node.body:
                targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
                yield from ((t.id, inner.lineno) for t in targets if isinstance(t, ast.Name))


def told(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    """Texts for people: of refusals, errors, what is printed, and help of the command."""
    for node in nodes:
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in MESSAGES or name.endswith("Error"):
                parts = [*node.args, *(k.value for k in node.keywords)]
                for text in (x for part in parts for x in ast.walk(part)):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        yield text.value, node.lineno


Places = tuple[tuple[str, int], ...]


def places(text: str) -> tuple[Places, Places]:
    """Names and texts of a module, with their lines."""
    nodes = list(ast.walk(ast.parse(text)))
    return tuple(named(nodes)), tuple(told(nodes))


@cache
def files() -> dict[str, tuple[Places, Places]]:
    """`places` by path below `src/weft`."""
    found = sorted(SOURCE.rglob("*.py"))
    return {p.relative_to(SOURCE).as_posix(): places(p.read_text(encoding="utf-8")) for p in found}


def violations(old: Old, path: str, names: Places, texts: Places) -> Iterator[str]:
    if not re.search(old.where, path):
        return
    use = f"`{old.instead}` (docs/glossary.md) for {old.sense}"
    public = ((n, line) for n, line in [(Path(path).stem, 1), *names] if not n.startswith("_"))
    for name, line in public if old.name else ():
        if re.fullmatch(old.name, name) and f"{path}:{name}" not in old.but:
            yield f"{path}:{line}: the name `{name}`; use {use}"
    for text, line in texts if old.message else ():
        if re.search(old.message, text):
            yield f"{path}:{line}: the message {text!r}; use {use}"


@pytest.mark.parametrize("old", OLD, ids=lambda old: old.name or old.message)
def test_no_earlier_word_in_its_earlier_sense(old: Old) -> None:
    found = [x for path, held in files().items() for x in violations(old, path, *held)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("old", OLD, ids=lambda old: old.name or old.message)
def test_the_word_to_use_is_in_the_glossary(old: Old) -> None:
    words = {w.strip() for row in GLOSSARY.splitlines() if row.startswith("| ") for w in row.split("|")[1].split(",")}
    assert old.instead in words


def test_fields_that_were_renamed_are_in_the_glossary() -> None:
    was = {
        word
        for row in GLOSSARY.splitlines()
        if row.startswith("| ")
        for word in re.findall(r"`(\w+)`", row.split("|")[4])
    }
    missing = {old for names in FIELDS.values() for old in names.values()} - was
    assert not missing, "stored names without a row in docs/glossary.md"


PLANTED = """
class Shape:
    turns: bool
    "Whether the warpgroups take turns: prose is free."
def band(rows, woven=False): ...
def refuse():
    even = 3  # a local name is free
    return Declined(f"{even} blocks that copy for each other")
"""


def test_a_planted_word_is_found() -> None:
    held = places(PLANTED)
    found = [x for old in OLD for x in violations(old, "generate/cuda/gemm/tma/planted.py", *held)]
    assert [re.findall(r"the (?:name|message) \S+", x)[0] for x in found] == [
        "the name `turns`;", "the message '", "the name `band`;", "the name `woven`;", "the name `Shape`;",
    ]  # fmt: skip
    assert not [x for old in OLD for x in violations(old, "pipeline/planted.py", *held)]
