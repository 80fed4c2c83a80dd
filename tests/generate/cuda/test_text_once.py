"""Text that we wrote is written once: who wants another asks its emitter, and changes no text afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import weft.generate.cuda

PACKAGE = Path(weft.generate.cuda.__file__).parent
OTHERS = PACKAGE / "foreign"
"""What reads text that others wrote, which has to be taken apart."""
ALLOWED = {
    # compares the texts of two schedules but for their entries' names
    "generator.py: source.text.replace(source.entry, '')",
    # a parameter's type, of kernels in which one stage reads what another has written
    "role/fused.py: p.type.replace('__restrict__', '')",
}


def changes(text: str) -> Iterator[str]:
    """Calls of a file that cut or replace parts of a string."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of, name = node.func.value, node.func.attr
        replaces = name == "replace" and len(node.args) >= 2
        substitutes = name in ("sub", "subn") and isinstance(of, ast.Name) and of.id == "re"
        cuts = name == "split" and len(node.args) == 1
        if replaces or substitutes or cuts:
            yield ast.unparse(node)


def test_no_text_of_a_kernel_is_changed_afterwards() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {x}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.is_relative_to(OTHERS)
        for x in changes(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED


def test_what_changes_a_text_is_seen() -> None:
    told = ("x.replace('a', 'b')", "re.sub('a', 'b', x)", "f(x).split(';')", "replace(s, a=1)", "x.split()", "x.sub(y)")
    assert [x for x in told if list(changes(x))] == list(told[:3])


def test_one_place_writes_warpgroup_products() -> None:
    found = [path.name for path in PACKAGE.rglob("*.py") if ".mma_async.sync" in path.read_text(encoding="utf-8")]
    assert found == ["wgmma.py"]
    assert (PACKAGE / "intrinsics" / "wgmma.py").exists()
