"""Prints the ten longest functions and files and the lines per package: watched, not policed."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "weft"


def main() -> None:
    """Print the three tables."""
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    packages: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        name = str(path.relative_to(SOURCE))
        lines = text.count("\n")
        files.append((lines, name))
        packages[name.split("/", maxsplit=1)[0] if "/" in name else "(top)"] += lines
        found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        functions += [((n.end_lineno or n.lineno) - n.lineno + 1, f"{name}:{n.name}") for n in found]
    for title, rows in (("longest functions", functions), ("longest files", files)):
        print(title)
        for length, name in sorted(rows, reverse=True)[:10]:
            print(f"  {length:5d}  {name}")
    print("lines per package")
    for package, count in packages.most_common():
        print(f"  {count:5d}  {package}")


if __name__ == "__main__":
    main()
