"""No test depends on which ran before it: no generator, and nothing else that one changes, is shared."""

from __future__ import annotations

import ast
import inspect
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import alone
from tests.conftest import COMPILER_S, DREW

from weft.device.cuda.nvrtc import Nvrtc
from weft.device.toolchain import HostCompiler

TESTS = Path(__file__).parent
MAKES = {"default_rng", "Generator", "RandomState", "Random", "SystemRandom", "PCG64", "MT19937", "Philox", "SFC64"}
"""Calls of this name make a generator; `manual_seed` and `spawn` of one hand one on."""
PYTHON = set(dir(random.Random)) - set(dir(object)) - {"VERSION"}
NUMPY = {n for n in dir(np.random.RandomState) if not n.startswith("_")} | {"ranf", "sample", "seed"}
TORCH = {
    "bernoulli", "manual_seed", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm", "seed",
}  # fmt: skip
"""What draws from a generator of the process."""
SHARED = ("cache", "lru_cache", "cached_property")


def parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def named(node: ast.AST) -> str:
    """The dotted name, or nothing."""
    if isinstance(node, ast.Attribute):
        return f"{named(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def makes_generator(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    last = named(node.func).rpartition(".")[2]
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("manual_seed", "spawn"):
        return makes_generator(node.func.value)
    return last in MAKES


def used_up(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether something is drawn from it where it is made: nobody else will."""
    parent = above.get(node)
    return isinstance(parent, ast.Attribute) or (isinstance(parent, ast.keyword) and parent.arg == "generator")


def outlives(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether it is evaluated when its file is imported, or once for several tests."""
    child = node
    while (parent := above.get(child)) is not None:
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = child in parent.body if isinstance(parent.body, list) else child is parent.body
            if inside:
                return isinstance(parent, ast.FunctionDef) and shared(parent) and handed_on(node, parent, above)
        child = parent
    return True


def shared(function: ast.FunctionDef) -> bool:
    """A function whose result several tests see: a fixture for more than one, or a cached function."""
    for decorator in function.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        last = named(call).rpartition(".")[2]
        wide = [k for k in decorator.keywords if k.arg == "scope"] if isinstance(decorator, ast.Call) else []
        if last in SHARED or (last == "fixture" and wide):
            return True
    return False


def handed_on(node: ast.AST, function: ast.FunctionDef, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether a shared function returns the generator, rather than what it drew from it."""
    parent = above[node]
    if isinstance(parent, ast.Return | ast.Yield):
        return True
    names = {t.id for t in parent.targets if isinstance(t, ast.Name)} if isinstance(parent, ast.Assign) else set()
    given = (x.value for x in ast.walk(function) if isinstance(x, ast.Return | ast.Yield) and x.value)
    return any(isinstance(x, ast.Name) and x.id in names for x in given)


def draws_from_the_process(node: ast.AST, modules: dict[str, str]) -> bool:
    """Python's and NumPy's generators of the process; torch's is seeded for each test, and modules draw from it."""
    if not isinstance(node, ast.Call):
        return False
    before, _, last = named(node.func).rpartition(".")
    if before in ("np.random", "numpy.random"):
        return last in NUMPY
    return modules.get(before) == "random" and last in PYTHON


def draws_in_shared(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """A file that draws from torch's generator as it is imported, or a cached function: from its first caller's."""
    if not (isinstance(node, ast.Call) and named(node.func).startswith("torch.")):
        return False
    if named(node.func).rpartition(".")[2] not in TORCH or any(k.arg == "generator" for k in node.keywords):
        return False
    child: ast.AST | None = node
    while child is not None and (child := above.get(child)) is not None:
        if isinstance(child, ast.FunctionDef) and any(
            named(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2] in SHARED for d in child.decorator_list
        ):
            return True
    return outlives(node, above)


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Line and reason."""
    tree = ast.parse(text)
    above = parents(tree)
    modules = {
        (name.asname or name.name): name.name
        for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }  # fmt: skip
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if makes_generator(node) and not used_up(node, above) and outlives(node, above):
            yield line, "a generator that several tests draw from"
        if draws_from_the_process(node, modules):
            yield line, "drawn from a generator of the process: make one, `np.random.default_rng(...)`"
        if draws_in_shared(node, above):
            yield line, "drawn from torch's generator once for several tests: give a `generator=`"


def test_no_generator_is_shared() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}: {why}"
        for path in sorted(TESTS.rglob("*.py")) if path.name not in ("alone.py", "test_alone.py")
        for line, why in faults(path.read_text())
    ]  # fmt: skip
    assert found == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("RNG = np.random.default_rng(0)", [1]),
        ("G = torch.Generator().manual_seed(0)", [1]),
        ("class A:\n    chance: random.Random = random.Random(3)", [2]),
        ("ALL = {'a': [Random(0)]}", [1]),
        ("def f(x, rng=default_rng(1)): ...", [1]),
        ("f = lambda x, rng=default_rng(1): x", [1]),
        ("f = lambda x: default_rng(1)", []),
        ("X = np.random.default_rng(0).normal(size=3)", []),
        ("X = torch.randn(3, generator=torch.Generator().manual_seed(0))", []),
        ("def f():\n    rng = default_rng(0)\n    return rng.normal()", []),
        ("@pytest.fixture(scope='module')\ndef rng():\n    return default_rng(0)", [3]),
        ("@pytest.fixture(scope='module')\ndef x():\n    rng = default_rng(0)\n    return rng.normal()", []),
        ("@cache\ndef x():\n    rng = default_rng(0)\n    return rng", [3]),
        ("@pytest.fixture\ndef rng():\n    return default_rng(0)", []),
        ("def f():\n    return np.random.rand(3)", [2]),
        ("import random\ndef f():\n    random.shuffle([])", [3]),
        ("import random as r\ndef f():\n    r.random()", [3]),
        ("from tests.harness import random\nx = random(3)", []),
        ("@cache\ndef f():\n    torch.manual_seed(0)", [3]),
        ("def f():\n    torch.manual_seed(0)", []),
        ("X = {'a': torch.randn(3)}", [1]),
        ("def f(x=torch.rand(3)): ...", [1]),
        ("X = {'a': lambda: torch.randn(3)}", []),
    ],
)
def test_what_is_shared_is_found(text: str, lines: list[int]) -> None:
    assert [line for line, _ in faults(text)] == lines


def test_no_file_draws_while_it_is_imported(request: pytest.FixtureRequest) -> None:
    """Modules in a table, say: their weights would depend on the files imported before."""
    assert request.config.stash[DREW] == []


def test_numbers_come_from_the_name() -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    alone.seed("a")
    first = numbers()
    with alone.aside("b"):
        other = numbers()
    second = numbers()
    alone.seed("a")
    assert (numbers(), numbers()) == (first, second)
    assert other not in (first, second)
    alone.seed("b")
    assert numbers() == other


def test_compilers_have_time_on_a_busy_machine() -> None:
    for compiler in (Nvrtc.compile, Nvrtc.compile_many, HostCompiler.compile):
        assert inspect.signature(compiler).parameters["timeout_s"].default == COMPILER_S >= 600


def test_what_is_left_behind_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = alone.surroundings()
    assert alone.changed(before, alone.surroundings()) == []
    with monkeypatch.context() as patch:
        patch.setenv("WEFT_THREADS", "3")
        patch.delenv("PATH")
        patch.chdir(tmp_path)
        patch.syspath_prepend(tmp_path)
        left = alone.changed(before, alone.surroundings())
    assert [x.partition(":")[0] for x in left] == ["$PATH", "$WEFT_THREADS", "sys.path", "working directory"]
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGALRM)
    torch.set_num_threads(threads + 1)
    signal.signal(signal.SIGALRM, lambda *_: None)
    left = alone.changed(before, alone.surroundings())
    torch.set_num_threads(threads)
    signal.signal(signal.SIGALRM, handler)
    assert [x.partition(":")[0] for x in left] == ["handler of SIGALRM", "torch's threads"]


class Placed:
    def __init__(self, name: str, number: int) -> None:
        self.path, self.number = Path(name), number


def test_orders_differ_and_are_repeated() -> None:
    items = [Placed(name, k) for name in "abc" for k in range(20)]
    one, same, other = alone.shuffled(items, 1), alone.shuffled(items[::-1][::-1], 1), alone.shuffled(items, 2)
    assert one == same and one != other
    for order in (one, other):
        assert order != items and sorted(map(id, order)) == sorted(map(id, items))
        changes = sum(x.path != y.path for x, y in pairwise(order))
        assert changes < 6


SUITE = """
    import os, random
    import pytest, torch

    SEEN = []

    @pytest.fixture(scope="module")
    def weights():
        return torch.rand(2)

    def test_first(weights):
        print("first", random.random(), float(torch.rand(())), weights.tolist())

    def test_second(weights):
        print("second", random.random(), float(torch.rand(())), weights.tolist())

    def test_leaves():
        os.environ["WEFT_THREADS"] = "3"

    def test_home():
        assert os.environ["WEFT_CACHE_DIR"].startswith({folder!r}) and os.environ["WEFT_CONFIG"] == ""
"""


@pytest.mark.slow
def test_in_any_order_tests_see_the_same(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\nfrom tests.conftest import _alone, _caches\n")
    (tmp_path / "test_it.py").write_text(textwrap.dedent(SUITE).replace("{folder!r}", repr(str(tmp_path / "base"))))
    root = TESTS.parent
    environ = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    del environ["WEFT_CACHE_DIR"]
    seen, orders = set(), set()
    for number in range(3):
        told = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-c", root / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:xdist",
                "-p", "no:cacheprovider", "--basetemp", tmp_path / "base", "-svv", "--shuffle", str(number), tmp_path,
            ],
            capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path, env=environ,
        )  # fmt: skip
        out = told.stdout
        assert f"order: --shuffle {number}" in out, out + told.stderr
        assert "4 passed, 1 error" in out and "$WEFT_THREADS: None -> '3'" in out, out + told.stderr
        lines = re.findall(r"(?:first|second) 0\.\d+ .*\]", out)
        assert len(lines) == 2
        seen.add(frozenset(lines))
        orders.add(lines[0][:5])
    assert len(seen) == 1 and len(orders) == 2


def test_threads_of_torch_sleep_while_they_wait() -> None:
    """OpenMP reads what is asked of it once, when torch is loaded: `conftest.py` says it before its first import."""
    assert os.environ.get("OMP_WAIT_POLICY")
    statements = ast.parse((TESTS / "conftest.py").read_text()).body
    said = next(i for i, s in enumerate(statements) if "OMP_WAIT_POLICY" in ast.unparse(s))
    assert said < next(i for i, s in enumerate(statements) if "pytest" in ast.unparse(s) and isinstance(s, ast.Import))
    assert all(named_module(s) in sys.stdlib_module_names for s in statements[:said] if not isinstance(s, ast.Expr))


def named_module(statement: ast.stmt) -> str:
    """The package that a statement imports from."""
    if isinstance(statement, ast.ImportFrom):
        return (statement.module or "").partition(".")[0]
    assert isinstance(statement, ast.Import)
    return statement.names[0].name.partition(".")[0]
