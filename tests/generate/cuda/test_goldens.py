"""A golden text of every template: a change of any is seen in review, and a template without one is told.

`tests/golden/cuda/templates/NAME.cu` says in its first two lines whose text it is: a case of the tables of these tests,
as `FILE PLACE`, and a schedule. What follows is the text as `pretty` lays it out, without the headers in files, which
`WEFT_UPDATE_GOLDEN=1` writes; a new golden begins as these two lines.
"""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests import goldens

import weft.generate.cuda
from tools import replay_corpus
from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.training import Network, gradient, layered
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.codec import schedule_from_json, schedule_to_json
from weft.kernels.pretty import pretty
from weft.kernels.source import CudaSource

FOLDER = goldens.FOLDER / "cuda" / "templates"
PACKAGE = Path(weft.generate.cuda.__file__).parent
TOLD = {"mma", "wgmma", "simt"}
"""Templates of one text, whose schedules are told which they are."""
OTHERS = {"loops", "training", "training_layered"}
"""What has no template's name: loops over elements and rows, and gradients of networks."""
NAMES = sorted(p.stem for p in FOLDER.glob("*.cu"))


@cache
def table(file: str) -> dict[str, Any]:
    """Problems and networks of a file's tables, by place."""
    (path,) = Path(__file__).parent.rglob(f"{file}.py")
    module = importlib.import_module(".".join(path.relative_to(goldens.FOLDER.parent.parent).with_suffix("").parts))
    return {place: posed for place, posed, _ in replay_corpus._tables(vars(module))}


@cache
def headers() -> dict[str, str]:
    """Texts of the headers in files, the longest first."""
    texts = {path.name: path.read_text(encoding="utf-8").strip() for path in PACKAGE.rglob("*.h")}
    return dict(sorted(texts.items(), key=lambda x: -len(x[1])))


def made(place: str, schedule: Any) -> Any:
    file, _, name = place.partition(" ")
    posed = table(file)[name]
    source: Any
    if isinstance(posed, Problem):
        source = CudaGenerator().emit(posed, schedule_from_json(schedule))
    else:
        assert isinstance(posed, Network)
        facts = profile("h200")
        source = gradient(posed, facts) if schedule == "gradient" else layered.layered(posed, facts.sms, DType.F32)
    assert not isinstance(source, Declined), source.reason
    return source


def golden(place: str, schedule: Any) -> str:
    source = made(place, schedule)
    told = schedule if isinstance(schedule, str) else schedule_to_json(source.schedule)
    text = replay_corpus.plain(source.text)
    for name, header in headers().items():
        text = text.replace(header, f"// {name}")
    launches = "".join(
        f"// {replay_corpus.plain(x.entry)}: {x.grid} x {x.block}, {x.shared_bytes} bytes\n"
        for x in ((*source.pack, *source.launches) if isinstance(source, CudaSource) else ())
    )
    return f"// {place}\n// {json.dumps(told)}\n{launches}{pretty(text)}"


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_the_golden_one(name: str) -> None:
    path = FOLDER / f"{name}.cu"
    first, second = path.read_text(encoding="utf-8").split("\n")[:2]
    text = golden(first.removeprefix("// "), json.loads(second.removeprefix("// ")))
    goldens.check(f"cuda/templates/{name}.cu", text)


def test_what_is_shown_is_compiled_to_the_same_machine_code() -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip("no NVRTC")
    first, second = (FOLDER / "tma.cu").read_text(encoding="utf-8").split("\n")[:2]
    text = made(first.removeprefix("// "), json.loads(second.removeprefix("// "))).text
    assert pretty(text) != text
    plain, shown = (nvrtc.compile(x, arch="sm_90a").sha256 for x in (text, pretty(text)))
    assert plain == shown


def test_every_template_has_a_golden() -> None:
    """Those of which a schedule is made anywhere in the package."""
    found = {name for path in PACKAGE.rglob("*.py") for name in templates(path)}
    assert {"tma", "attention_tf32", "grouped_simt", "grouped_tma", "pools", "scan", "linear_attention"} <= found
    assert {n.partition(".")[0] for n in NAMES} == found | TOLD | OTHERS


def templates(path: Path) -> Iterator[str]:
    """The names of templates that a file's schedules carry: `template=...`, `"template": ...`, `("template", ...)`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "named":
            yield from (n for k in node.keywords if k.arg == "template" for n in _strings(k.value, path))
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "template":
                    yield from _strings(value, path)
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            key = node.elts[0]
            if isinstance(key, ast.Constant) and key.value == "template":
                yield from _strings(node.elts[1], path)


def _strings(value: ast.expr, path: Path) -> Iterator[str]:
    """The strings that an expression may be: constants, and names of the module that hold them."""
    module = importlib.import_module(".".join(("weft", *path.relative_to(PACKAGE.parent.parent).with_suffix("").parts)))
    for node in ast.walk(value):
        held = node.value if isinstance(node, ast.Constant) else vars(module).get(getattr(node, "id", ""), None)
        for x in held if isinstance(held, tuple) else (held,):
            if isinstance(x, str):
                yield x
