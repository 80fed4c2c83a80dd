"""`make gpu-test` finds every test that needs a GPU, on a machine that is there for its GPU and has no tools."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import FOR_GPU, for_gpu_alone

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
MARK = r"^(@|pytestmark = \[?)pytest\.mark\.(multi)?gpu\b"
ABSENT = ("ruff", "mypy", "importlinter", "expecttest", "playwright", "xdist", "onnxruntime", "onnxscript")
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else self._finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import pytest
sys.exit(pytest.main({arguments!r}))
"""


@pytest.mark.slow
def test_every_test_for_a_gpu_is_found_without_tools(request: pytest.FixtureRequest) -> None:
    arguments = [
        "-m",
        "gpu",
        "--collect-only",
        "-qq",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--import-mode=importlib",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(absent=ABSENT, arguments=arguments)],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(line.rsplit(": ", 1) for line in done.stdout.splitlines() if ".py: " in line)
    assert sum(map(int, counts.values())) > 1600
    here: dict[str, int] = {}
    for test in request.config.stash[FOR_GPU]:
        path = test.partition("::")[0]
        here[path] = here.get(path, 0) + 1
    assert {p: int(counts.get(p, 0)) for p in here} == here


def test_tests_for_a_gpu_have_one_home() -> None:
    """`tests/gpu`, in folders named as the area: there all tests need one, elsewhere none does."""
    marked = {p.relative_to(TESTS) for p in TESTS.rglob("test_*.py") if re.search(MARK, p.read_text(), re.MULTILINE)}
    assert marked == {p.relative_to(TESTS) for p in (TESTS / "gpu").rglob("test_*.py")}
    assert {p.parts[1] for p in marked if len(p.parts) > 2} <= {p.name for p in TESTS.iterdir() if p.is_dir()}


def test_golden_texts_have_one_home() -> None:
    found = {p.relative_to(TESTS).parent for p in TESTS.rglob("*") if "golden" in p.parent.parts and p.is_file()}
    assert {p.parts[0] for p in found} == {"golden"} and len(found) > 5


def test_the_makefile_names_no_folders() -> None:
    rule = (ROOT / "Makefile").read_text().partition("\ngpu-test:\n")[2].partition("\n\n")[0]
    assert '-m "gpu"' in rule and rule.endswith(" $(WHERE)")
    assert "\nWHERE ?= tests\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("expression", "alone"),
    [
        ("gpu", True), ("multigpu", True), ("gpu or multigpu", True), ("gpu and not slow", True),
        ("", False), ("slow", False), ("not gpu", False), ("gpu or slow", False), ("not gpu and not whole", False),
    ],
)  # fmt: skip
def test_other_files_are_passed_over_only_where_nothing_else_is_wanted(expression: str, alone: bool) -> None:
    assert for_gpu_alone(expression) is alone
