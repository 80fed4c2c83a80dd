"""What the package remembers is bounded: a process that meets new models and shapes for weeks keeps its memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "weft"

FEW = {
    "toolchain.py:_sweep": "folders for temporary files",
    "toolchain.py:_version": "compilers",
    "winograd.py:matrices": "sizes of a tile",
    "table.py:table_for": "models of GPUs",
    "choose.py:_blocks": "two truth values",
    "choose.py:_variants": "the shapes of blocks that are offered",
    "covered.py:covered": "kinds of devices",
    "types.py:f8_values": "types",
    "dataclass_json.py:_reader": "types of fields",
    "kernels.py:_facts": "devices",
    "frame.py:asset": "files of the package",
    "frame.py:template": "files of the package",
    "activation.py:_patterns": "entries of the table of activations, and types",
    "written.py:_reach": "files of templates",
    "written.py:_imported": "files of the package",
    "written.py:files_of": "generators",
    "keys.py:source_hash": "folders of the package",
    "kinds.py:part": "fields of kinds of devices",
}
"""Functions that remember a result for each of what they were called with, by file, and why those are few."""


def unbounded(path: Path) -> Iterator[str]:
    """Functions of a module, or of its classes, that take something and remember every result."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    for scope in (*scopes, *(n for n in tree.body if isinstance(n, ast.ClassDef))):
        for n in scope.body:
            if isinstance(n, ast.FunctionDef) and (n.args.args or n.args.kwonlyargs or n.args.posonlyargs):
                yield from (n.name for d in n.decorator_list if is_unbounded(d))


def is_unbounded(decorator: ast.expr) -> bool:
    """`cache`, or `lru_cache` whose `maxsize` is None."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name == "cache":
        return True
    if name != "lru_cache" or not isinstance(decorator, ast.Call):
        return False
    sizes = [*decorator.args[:1], *(k.value for k in decorator.keywords if k.arg == "maxsize")]
    return any(isinstance(s, ast.Constant) and s.value is None for s in sizes)


def test_what_depends_on_models_is_not_remembered_without_a_bound() -> None:
    found = {f"{path.name}:{name}" for path in PACKAGE.rglob("*.py") for name in unbounded(path)}
    assert found == set(FEW)
