"""The contracts of the imports hold, and they hold for the folders of a device that does not exist yet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weft.device.kinds import KINDS

ROOT = Path(__file__).parent.parent
VENDOR = ROOT / "tests" / "platform" / "vendor"
HOMES = {
    "facts": "device", "estimate": "orchestrate", "generator": "generate", "site": "tune", "executable": "runtime",
    "platform": "platform",
}  # fmt: skip
"""The package of each file of `tests/platform/vendor`."""
OWN = "from weft.generate.contraction import match\nfrom weft.generate.loopnest import plan\n"


def linted(root: Path) -> subprocess.CompletedProcess[str]:
    command = "from importlinter.cli import lint_imports_command as c; c()"
    paths = os.pathsep.join([str(root / "src"), str(root)])
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo"],
        capture_output=True, text=True, cwd=root, timeout=600, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


@pytest.fixture
def vendor(tmp_path: Path) -> Path:
    """A copy of the source with the folders of another vendor's device, and no line of the contracts changed."""
    for part in ("src/weft", "tools"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert {p.stem for p in VENDOR.glob("*.py")} - {"__init__"} == HOMES.keys()
    for name, package in HOMES.items():
        text = (VENDOR / f"{name}.py").read_text(encoding="utf-8")
        text = re.sub(r"tests\.platform\.vendor\.(\w+)", lambda m: f"weft.{HOMES[m[1]]}.xpu.{m[1]}", text)
        folder = tmp_path / "src" / "weft" / package / "xpu"
        folder.mkdir()
        (folder / "__init__.py").touch()
        # in the tests it borrows what the CPU's generator writes
        text = text.replace("from weft.generate.cpp import CppGenerator\n", OWN)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path


def test_imports_point_down() -> None:
    done = linted(ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_folders_of_another_vendor_need_no_line_of_the_contracts(vendor: Path) -> None:
    done = linted(vendor)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("file", "line", "told"),
    [
        ("xpu/generator.py", "import weft.generate.cuda", r"generate\.xpu is not allowed to import weft\.gen\w+\.cuda"),
        ("cpp/kernel.py", "import weft.generate.xpu", r"generate\.cpp is not allowed to import weft\.generate\.xpu"),
        ("loopnest/plan.py", "import weft.generate.xpu", r"generate\.loopnest is not allowed to import"),
        ("xpu/generator.py", "import weft.generate.registry", r"generate\.xpu is not allowed to import"),
    ],
)  # fmt: skip
def test_a_new_generator_obeys_as_the_others_do(vendor: Path, file: str, line: str, told: str) -> None:
    path = vendor / "src" / "weft" / "generate" / file
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = linted(vendor)
    broken = re.findall(r"^(.*) BROKEN", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and re.search(told, done.stdout), done.stdout[-3000:] + done.stderr[-2000:]
    assert any("do not know each other" in x for x in broken), broken


def test_what_no_layer_of_generators_names_is_the_generator_of_a_kind() -> None:
    """So nothing else becomes a generator because nobody placed it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = [c["layers"] for c in contracts if c["type"] == "open_layers"]
    named = {name for layer in layers for name in re.split(r" [|:] ", layer)}
    there = {p.stem for p in (ROOT / "src" / "weft" / "generate").iterdir() if p.suffix == ".py" or p.is_dir()}
    kinds = {kind.generator.partition(":")[0].split(".")[2] for kind in KINDS.values()}
    assert there - named - {"__init__", "__pycache__"} == kinds | {"library"}
