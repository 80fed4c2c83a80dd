"""What is called identical, text only and changed, of records by hand and of trees with other words and other code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.generate.cuda.products import product
from tests.generate.cuda.test_training_skips import CASES as SKIPS
from tools.replay import Work

from tools import replay, replay_corpus
from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda import templates
from weft.generate.cuda.templates.mma import Shape
from weft.generate.cuda.training import Activation, Network
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import Schedule
from weft.tune.wire import problem_to_json


def item(text: str = "", **rest: str) -> dict[str, Any]:
    kernel = {"text": text, "arch": "sm_80", "flags": [], "registers": 0} if text else {}
    return {**kernel, "rest": rest}


def test_kinds() -> None:
    old = {
        "same": item("a", grid="1"), "words": item("b"), "code": item("c"), "launch": item("a", grid="1"),
        "refused": item("d"), "plan": item(steps="x"), "declined": item(declined="no"), "gone": item("a"),
        "field": item("a", grid="1"), "cpu": {"text": "a", "rest": {}},
    }  # fmt: skip
    new = {
        "same": item("a", grid="1"), "words": item("B"), "code": item("C"), "launch": item("a", grid="2"),
        "refused": item("D"), "plan": item(steps="y"), "declined": item("a"), "new": item("a"),
        "field": item("a", grid="1", cluster="1"), "cpu": {"text": "b", "rest": {}},
    }  # fmt: skip
    ours, theirs = replay.to_compile(old, new, every=False)
    assert sorted(i["text"] for i in ours) == list("bcd") and sorted(i["text"] for i in theirs) == list("BCDa")
    digests = [
        {replay.job(i): {"b": "1", "c": "2", "d": "refused: x"}[i["text"]] for i in ours},
        {replay.job(i): {"B": "1", "C": "3", "D": "refused: x"}.get(i["text"], "") for i in theirs},
    ]
    assert replay.compare(old, new, digests) == {
        "same": "identical", "words": "text only", "code": "changed", "launch": "changed", "refused": "changed",
        "plan": "changed", "declined": "changed", "gone": "gone", "new": "new", "field": "identical", "cpu": "changed",
    }  # fmt: skip
    everything = replay.to_compile(old, new, every=True)[1]
    assert len(everything) == sum("arch" in i for i in new.values())


def test_the_table_counts_by_group() -> None:
    kinds = {"test_a CASES x | h200 | 1": "new", "test_a CASES y | plan": "gone", "candy h200 | f": "identical"}
    lines = list(replay.table(kinds))
    assert [line.split() for line in lines[1:]] == [
        ["test_a", "0", "0", "0", "0", "1"], ["plans", "0", "0", "0", "1", "0"],
        ["candy", "h200", "1", "0", "0", "0", "0"], ["in", "all", "1", "0", "0", "1", "1"],
    ]  # fmt: skip


def test_names_with_hashes_are_the_same_name() -> None:
    assert replay_corpus.plain("void k0123456789abcdef_pack(int k0123)") == "void k_pack(int k0123)"


@pytest.mark.parametrize("name", list(SKIPS))
def test_networks_cross_as_data(name: str) -> None:
    network = SKIPS[name][0]
    data = json.loads(json.dumps(replay_corpus.packed(network)))
    again = replay_corpus.unpacked(data)
    assert again == network and isinstance(again, Network)
    assert type(again.dtype) is DType and all(type(x) is Activation for x in again.acts)


def test_schedules_stand_beside_problems() -> None:
    posed = product((64, 64), (64, 64))
    shape = Shape(64, 64, 32, 32, 32, 1, 2, 1, False, 1)
    tables = {
        "A": {"one": (posed, shape), "two": (posed, (Schedule("cuda"), 3)), "three": [(1, posed), posed]},
        "other": 3,
    }
    found = [(name, len(schedules)) for name, _, schedules in replay_corpus._tables(tables)]
    assert found == [("A one", 1), ("A two", 1), ("A three", 0), ("A three 0", 0)]


@pytest.mark.slow
def test_every_table_of_the_tests_is_replayed() -> None:
    folder = replay.ROOT / replay_corpus.TESTS
    files = {p.stem for p in folder.glob("test_*.py") if "\nCASES: dict[str, tuple[" in p.read_text()}
    cases = replay_corpus.collect(replay.ROOT, 0)
    found = {c["name"].split()[0] for c in cases}
    assert len(files) > 10 and files <= found
    assert len(cases) == len({c["name"] for c in cases}) > 1000
    assert sum("training" in c for c in cases) > 50 and sum(bool(c["schedules"]) for c in cases) > 400


@pytest.mark.slow
def test_two_trees(tmp_path: Path) -> None:
    if isinstance(find_nvrtc(), Declined):
        pytest.skip("no NVRTC")
    posed = product((70, 264), (40, 264), turn_right=True)
    offered = templates.schedules(posed, profile("a100"))
    assert not isinstance(offered, Declined)
    case = {"name": "test_it CASES linear", "problem": problem_to_json(posed), "schedules": []}
    trees = {}
    wait = "griddepcontrol.wait;"
    for name, (old_words, new_words) in {
        "words": ("", "// other words\n"),
        "code": (wait, f"{wait} membar.gl;"),
    }.items():
        trees[name] = tmp_path / name
        shutil.copytree(replay.ROOT / "src", trees[name] / "src", ignore=shutil.ignore_patterns("__pycache__"))
        header = trees[name] / "src/weft/generate/cuda/weft_cuda_machine.h"
        text = header.read_text()
        assert old_words in text
        header.write_text(text.replace(old_words, new_words, 1))
    work = Work(tmp_path / "work", tmp_path / "cache", jobs=2)
    work.folder.mkdir()
    (work.folder / "cases.json").write_text(json.dumps([case]))
    verdicts = {}
    new = replay.made(work, [replay.ROOT], ["cases 0/1"])[0]
    assert sum("arch" in i for i in new.values()) >= 4 and not any("error" in i["rest"] for i in new.values())
    for name, tree in trees.items():
        old = replay.made(work, [tree], ["cases 0/1"])[0]
        digests = replay.cubins(work, (tree, replay.ROOT), replay.to_compile(old, new, every=False))
        verdicts[name] = {k for n, k in replay.compare(old, new, digests).items() if "arch" in new[n]}
    assert verdicts["words"] == {"text only"} and "changed" in verdicts["code"]  # not all call it
    told = replay.made(work, [tmp_path], ["cases 0/1"])[0]
    assert list(told) == ["cases 0/1 | made"]
    assert f"there is no Weft in {tmp_path / 'src'}" in told["cases 0/1 | made"]["rest"]["error"]
