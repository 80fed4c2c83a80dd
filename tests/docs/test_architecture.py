"""What `docs/architecture.md` says of folders, files and who knows whom is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "weft"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TEMPLATES = ("attention", "conv", "gemm", "loops", "mlp", "training")
FUSES = (
    r"weft\.(colocate|tune\.(cuda_)?pairs?|generate\.cuda\.(role\.(fused|persistent)|foreign)|generate\.bind_fused)\b"
)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def named(cell: str) -> list[str]:
    return re.findall(r"`([\w/.]+)`", cell)


def test_every_package_is_in_the_table_of_layers() -> None:
    there = {name for row in rows(section("Packages")) for name in named(row[0])}
    packages = {p.parent.name for p in SOURCE.glob("*/__init__.py")}
    assert packages <= there, packages - there


def test_files_of_co_location_are_where_the_table_says() -> None:
    layer, found = "", []
    for cells in rows(section("Two jobs on one GPU"))[1:]:
        layer = cells[0] or layer
        for path in named(cells[1]):
            assert (SOURCE / path).exists(), path
            package = named(layer)
            assert path.split("/")[0] == (package[0] if package else path), f"{path} is no file of {layer}"
            found.append(path)
    own = {p.relative_to(SOURCE).as_posix() for p in (SOURCE / "colocate").iterdir() if p.suffix in (".py", ".h")}
    assert own - {"colocate/__init__.py"} <= set(found)


def test_whatever_is_named_for_pairs_or_fusing_has_a_row() -> None:
    text = section("Two jobs on one GPU")
    files = [p.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*.py")]
    meant = [
        p
        for p in files
        if re.search(r"(^|[/_])(pairs|cuda_pair|fuse|bind_fused|colocation|persistent|sm_budget)\.py", p)
    ]
    missing = [p for p in meant if f"`{p}`" not in text]
    assert len(meant) >= 9 and not missing


@pytest.mark.parametrize("folder", TEMPLATES)
def test_templates_know_nothing_of_co_location(folder: str) -> None:
    for path in (SOURCE / "generate" / "cuda" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [f"{node.module}.{x.name}" for x in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [x.name for x in node.names] if isinstance(node, ast.Import) else []
            assert not [n for n in names if re.match(FUSES, n)], path
