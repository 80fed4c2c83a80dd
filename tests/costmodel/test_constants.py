"""What was measured on a GPU stands in its profile: models have no such number, and it has none without a model."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tests.typed import narrow

import weft
from weft.costmodel import constants
from weft.costmodel.profile import CostProfile, profiles

SOURCE = Path(weft.__file__).parent
SECTIONS = {n: narrow(type, kind) for n, kind in get_type_hints(CostProfile).items() if is_dataclass(kind)}
"""The sections of a profile by name, and their classes."""
PROFILE = "profile"
"""In place of a section: all of them."""


class Reads(ast.NodeVisitor):
    """Which constants a module reads, and of which sections: by what `costs_of` gives and what is annotated as such.

    A name keeps its section within the function that gave it one, an attribute of `self` within its class.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[tuple[str, str]] = set()
        self._classes: dict[str, str] = {"CostProfile": PROFILE}
        """Names of classes, as this module calls them."""
        self._names: list[dict[str, str]] = [{}]
        self._own: dict[str, str] = {}
        by_class = {kind.__name__: name for name, kind in SECTIONS.items()}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == constants.__name__:
                self._classes |= {x.asname or x.name: by_class[x.name] for x in node.names if x.name in by_class}
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._own = self._own, {}
        self.generic_visit(node)  # constructors stand before what reads
        self._own = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        own = {a.arg: self._classes.get(ast.unparse(a.annotation)) for a in given if a.annotation is not None}
        self._names.append({**self._names[-1], **{name: kind for name, kind in own.items() if kind is not None}})
        self.generic_visit(node)
        self._names.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for place, value in pairs:
                section = self._section(value)
                if isinstance(place, ast.Name):
                    self._names[-1].pop(place.id, None)
                if section is not None and isinstance(place, ast.Name):
                    self._names[-1][place.id] = section
                if section is not None and isinstance(place, ast.Attribute):
                    self._own[place.attr] = section
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        section = self._section(node.value)
        if section is not None and section != PROFILE:
            self.found.add((section, node.attr))
        self.generic_visit(node)

    def _section(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._names[-1].get(node.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "costs_of":
            return PROFILE
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self._own.get(node.attr)
        whole = self._section(node.value) == PROFILE
        return node.attr if whole and node.attr in SECTIONS else None


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Name and tree of every module that models a GPU or decides by its facts.

    Measuring and waiting are those of others. A CPU is modelled beside what its probes found, and has no profile.
    """
    for path in sorted(SOURCE.rglob("*.py")):
        text, place = path.read_text(encoding="utf-8"), path.relative_to(SOURCE)
        if place.parts[0] in PACKAGES and any(word in text for word in ("GpuFacts", "costs_of", "costmodel.constants")):
            yield place.as_posix(), ast.parse(text)


PACKAGES = ("costmodel", "generate", "gemm", "nn", "orchestrate", "platform")


def test_every_constant_of_the_profile_is_read_by_a_model() -> None:
    """What a file may hold is held to these by its reader (`test_profile`)."""
    known = {(name, f.name) for name, kind in SECTIONS.items() for f in fields(kind)}
    read = set[tuple[str, str]]().union(*(Reads(tree).found for _, tree in modules()))
    assert read == known


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(facts):\n    c = costs_of(facts).tma\n    return c.port", {("tma", "port")}),
        ("def f(facts):\n    c = costs_of(facts).tma\n    c = 1\n    return c.port", set()),
        ("def f(facts):\n    p = costs_of(facts)\n    return p.halo.port + facts.port", {("halo", "port")}),
        ("def f(facts):\n    a, b = costs_of(facts).tma, facts.tma\n    return a.port + b.late", {("tma", "port")}),
        ("from weft.costmodel.constants import Tma as T\ndef f(c: T, d: int):\n    c.late, d.port", {("tma", "late")}),
        (
            "class A:\n  def __init__(self):\n    self.c = costs_of(x).tiles\n  def f(self):\n    self.c.end",
            {("tiles", "end")},
        ),
        ("def f(facts):\n    c = costs_of(facts).tma\ndef g():\n    return c.port", set()),
    ],
)  # fmt: skip
def test_who_reads_a_constant_is_told_by_where_it_comes_from(text: str, found: set[tuple[str, str]]) -> None:
    assert Reads(ast.parse(text)).found == found


# --- numbers in source

UNLIKE = "by how much one must be better for each that is like it: how different those are that are measured"
OFFERED = "which configurations are looked at, whatever a model then says of them"
SEARCH = "what is measured late or not at all: a rule of the search, which trusts a model so far"
WAITS = "seconds that a process waits"
POLICY = "of searches on any such device (`SearchPolicy`)"
KIND = "an exact test of a number"
STAY: Mapping[tuple[str, str], str] = {
    ("generate/cuda/attention/shapes.py", "shapes"): UNLIKE,
    ("generate/cuda/attention/tma_shapes.py", "shapes"): UNLIKE,
    ("generate/cuda/conv/depthwise/kernel.py", "shapes"): UNLIKE,
    ("generate/cuda/conv/groups/choose.py", "_ranked"): UNLIKE,
    ("generate/cuda/conv/halo/choose.py", "_ranked"): UNLIKE,
    ("generate/cuda/conv/pooled/choose.py", "shapes"): UNLIKE,
    ("generate/cuda/conv/separable/kernel.py", "shapes"): UNLIKE,
    ("generate/cuda/conv/stacked/kernel.py", "shapes"): UNLIKE,
    ("generate/cuda/gemm/grouped/kernel.py", "_different"): UNLIKE,
    ("generate/cuda/gemm/mma/choose.py", "_ranked"): UNLIKE,
    ("generate/cuda/loops/choose.py", "ALIKE"): UNLIKE,
    ("generate/cuda/space.py", "_ALIKE"): UNLIKE,
    ("generate/cuda/conv/groups/choose.py", "_tiles"): OFFERED,
    ("generate/cuda/conv/groups/choose.py", "_blocks"): OFFERED,
    ("generate/cuda/conv/halo/choose.py", "WASTE"): OFFERED,
    ("generate/cuda/conv/halo/choose.py", "_tiles"): OFFERED,
    ("generate/cuda/conv/halo/choose.py", "_widths"): OFFERED,
    ("generate/cuda/conv/pooled/choose.py", "REPEATED"): OFFERED,
    ("generate/cuda/conv/pooled/choose.py", "_tiles"): OFFERED,
    ("generate/cuda/conv/pooled/choose.py", "_widths"): OFFERED,
    ("generate/cuda/conv/pooled/choose.py", "_blocks"): OFFERED,
    ("generate/cuda/conv/stacked/kernel.py", "_tiles"): OFFERED,
    ("generate/cuda/conv/stacked/kernel.py", "_candidates"): OFFERED,
    ("generate/cuda/gemm/tma/choose.py", "_SHARED_COPY"): OFFERED,
    ("generate/cuda/gemm/tma/choose.py", "_panels"): OFFERED,
    ("generate/cuda/attention/template.py", "_NEAR"): SEARCH,
    ("generate/cuda/gemm/pattern.py", "NEAR"): SEARCH,
    ("generate/cuda/mlp/shapes.py", "_NEAR"): SEARCH,
    ("generate/cuda/space.py", "_NEAR"): SEARCH,
    ("platform/cuda/platform.py", "Cuda.policy"): POLICY,
    ("nn/judge.py", "IDLE_S"): WAITS,
    ("orchestrate/estimate_cuda.py", "_exact_slots"): KIND,
}
"""Where fractions may stand, by module and name, and why."""
REGISTERS = "an estimate of registers, and how far the compiler is off it"
COUNTED: Mapping[tuple[str, str], str] = {
    ("generate/cuda/attention/shapes.py", "cycles"): REGISTERS,
    ("costmodel/tiles.py", "least_grouped_cycles"): OFFERED,
}
"""The same of whole numbers in functions whose result is a cost."""
ARCHITECTURE = frozenset({90, 255})
"""The compute capability of what Hopper added, and the registers of a thread."""
COSTS = frozenset({"float", "float | None", "tuple[float, float]"})


def numbers(tree: ast.AST, place: str = "", cost: bool = False) -> Iterator[tuple[str, int | float, bool]]:
    """Every number below a node: the function, class or name at whose value it stands, and whether that is a cost."""
    for node in ast.iter_child_nodes(tree):
        name, costs = place, cost
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{place}.{node.name}".lstrip(".")
            costs = (
                isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) in COSTS
            )
        elif isinstance(tree, ast.Module | ast.ClassDef) and isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = f"{place}.{ast.unparse(target)}".lstrip(".")
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield place, node.value, cost  # type: ignore[misc]
        yield from numbers(node, name, costs)


def is_arithmetic(x: float) -> bool:
    """Counts of bytes, lanes and operations, which are powers of two, and changes of units, which are of 1000."""
    return x == 0 or (x >= 1 and (math.log2(x).is_integer() or x in (1e3, 1e6, 1e9, 1e12)))


def test_no_model_has_a_constant_of_a_gpu_in_its_source() -> None:
    """Fractions and large decimals: all that is not arithmetic stands in a profile, or here with its reason."""
    found = {
        (module, place)
        for module, tree in modules()
        for place, value, _ in numbers(tree)
        if isinstance(value, float) and not is_arithmetic(value)
    }
    assert found == STAY.keys()


def test_no_cost_is_made_of_whole_numbers_that_were_measured() -> None:
    """In functions whose result is a cost; elsewhere whole numbers are counts that nobody could tell apart."""
    found = {
        (module, place)
        for module, tree in modules()
        for place, value, cost in numbers(tree)
        if cost and type(value) is int and not is_arithmetic(value) and value not in ARCHITECTURE | {3}
    }
    assert found == COUNTED.keys()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A = 0.93", {("A", 0.93)}), ("A, B = 5.0, 15.0", {("(A, B)", 5.0), ("(A, B)", 15.0)}), ("A = 64.0", set()),
        ("def f(x) -> float:\n    return x / 3600.0 + 2 * x", {("f", 3600.0)}),
        ("class C:\n    rate: float = 0.5\n    def f(self):\n        {1: 700.0}", {("C.rate", 0.5), ("C.f", 700.0)}),
        ("def f():\n    return 1e6 * -0.25", {("f", 0.25)}),
    ],
)  # fmt: skip
def test_numbers_are_found_wherever_they_stand(text: str, found: set[tuple[str, float]]) -> None:
    assert {(p, x) for p, x, _ in numbers(ast.parse(text)) if isinstance(x, float) and not is_arithmetic(x)} == found


def test_whole_numbers_are_found_in_costs_alone() -> None:
    text = "def f(n) -> float:\n    return n / 27 + 1500\ndef g(n) -> int:\n    return n * 27"
    assert {(p, x) for p, x, cost in numbers(ast.parse(text)) if cost} == {("f", 27), ("f", 1500)}


def whole(value: Any) -> Iterator[Any]:
    """All numbers of a section."""
    for f in fields(value):
        inside = getattr(value, f.name)
        yield from inside.values() if isinstance(inside, Mapping) else (inside,)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_constant_says_what_it_is(section: str) -> None:
    """In the docstring behind it, or behind those that stand with it."""
    tree = ast.parse(Path(constants.__file__).read_text(encoding="utf-8"))
    (own,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == SECTIONS[section].__name__)
    assert ast.get_docstring(own)
    assert isinstance(own.body[-1], ast.Expr), f"{section}: the last constants have no docstring"
    assert list(whole(getattr(profiles()["nvidia-h200"], section)))
