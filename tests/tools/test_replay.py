"""What is called identical, text only and changed, of records by hand and of trees with other words and other code."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.generate.cuda.products import product
from tests.generate.cuda.training.test_training_skips import CASES as SKIPS
from tools.replay import Work

from tools import replay, replay_corpus
from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.mma.kernel import MmaConfig
from weft.generate.cuda.training import Activation, Network
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import Schedule
from weft.tune.aliases import from_json, to_json
from weft.tune.wire import problem_to_json


def item(text: str = "", **rest: str) -> dict[str, Any]:
    kernel = {"text": text, "arch": "sm_80", "flags": [], "registers": 0} if text else {}
    entry = {"launches[0].entry": "'k'"} if text else {}
    return {**kernel, "rest": entry | rest}


def test_kinds() -> None:
    called = {"launches[0].entry": "'other'"}
    twice = {"launches[1].entry": "'k'"}
    old = {
        "same": item("a", grid="1"), "words": item("b"), "code": item("c"), "launch": item("a", grid="1"),
        "refused": item("d"), "plan": item(steps="x"), "declined": item(declined="no"), "gone": item("a"),
        "field": item("a", grid="1"), "cpu": {"text": "a", "rest": {}}, "called": item("b"), "twice": item("b"),
        "half": item("e", **twice),
    }  # fmt: skip
    new = {
        "same": item("a", grid="1"), "words": item("B"), "code": item("C"), "launch": item("a", grid="2"),
        "refused": item("D"), "plan": item(steps="y"), "declined": item("a"), "new": item("a"),
        "field": item("a", grid="1", cluster="1"), "cpu": {"text": "b", "rest": {}}, "called": item("B'", **called),
        "twice": item("B", **twice), "half": item("E", **{**called, **twice}),
    }  # fmt: skip
    ours, theirs = replay.to_compile(old, new, every=False)
    assert [i["text"] for i in ours] == ["b", "c", "e", "d", "b", "b"]
    assert [i["text"] for i in theirs] == ["B'", "C", "a", "E", "D", "B", "B"]
    codes: dict[str, replay.Code] = {
        "b": {"k": "1"}, "B": {"k": "1"}, "B'": {"other": "1"}, "c": {"k": "2"}, "C": {"k": "3"}, "a": {"k": "4"},
        "d": "refused: x", "D": "refused: x", "e": {"k": "5"}, "E": {"other": "6", "k": "5"},
    }  # fmt: skip
    by_job = [{replay.job(i): codes[i["text"]] for i in its} for its in (ours, theirs)]
    assert replay.compare(old, new, by_job) == {
        "same": "identical", "words": "text only", "code": "code", "launch": "launch", "refused": "code",
        "plan": "launch", "declined": "launch", "gone": "gone", "new": "new", "field": "identical", "cpu": "code",
        "called": "text only", "twice": "launch", "half": "code",
    }  # fmt: skip
    everything = replay.to_compile(old, new, every=True)[1]
    assert len(everything) == sum("arch" in i for i in new.values())


def test_the_table_counts_by_group() -> None:
    kinds = {"test_a CASES x | h200 | 1": "new", "test_a CASES y | plan": "gone", "candy h200 | f": "identical"}
    lines = list(replay.table(kinds))
    assert [line.split() for line in lines[1:]] == [
        ["test_a", "0", "0", "0", "0", "0", "1"], ["plans", "0", "0", "0", "0", "1", "0"],
        ["candy", "h200", "1", "0", "0", "0", "0", "0"], ["in", "all", "1", "0", "0", "0", "1", "1"],
    ]  # fmt: skip


def test_parts_are_chosen_by_name_and_schedule() -> None:
    cases = [{"name": f"test_{f} CASES {k}"} for f in ("tma", "mma") for k in range(replay.AT_ONCE + 1)]
    units = replay.in_units(cases)
    assert [len(c) for c in units.values()] == [replay.AT_ONCE, 1] * 2
    given = argparse.Namespace(cases="", match="", only="", limit=2)
    every = replay.units(given, units)
    assert every == ["network candy", "network efficientvit_b1", *units, "cpu"]
    given.match = "template=tma,"
    assert replay.units(given, units) == list(units)
    given.cases = "tma|candy"
    assert replay.units(given, units) == ["network candy", "cases test_tma 0", f"cases test_tma {replay.AT_ONCE}"]
    given.only = "cpu"
    assert replay.units(given, units) == ["cpu"]
    items = {"test_tma CASES 1 | cuda(template=tma,x=1)": item("a"), "test_mma CASES 1 | cuda(template=mma)": item("b")}
    assert list(replay.looked_at(items, "", "")) == list(items)
    assert list(replay.looked_at(items, "tma", "")) == list(replay.looked_at(items, "", "template=tma,"))
    assert not replay.looked_at(items, "mma", "template=tma,")


def test_what_a_commit_made_is_kept_with_its_texts(tmp_path: Path) -> None:
    text = "void k();"
    digest = replay_corpus.Texts(tmp_path / "one").keep(text)
    items, cases = {"a": item(digest), "plan": item(steps="x")}, {"cases a": [{"name": "a"}]}
    kept = replay.Kept(tmp_path / "commit", tmp_path / "one")
    assert kept.get("cases a", cases) is None
    kept.put("cases a", cases, items)
    again = replay.Kept(tmp_path / "commit", tmp_path / "two")
    assert again.get("cases a", cases) == items
    assert replay_corpus.Texts(tmp_path / "two").read(digest) == text
    assert again.get("cases a", {"cases a": [{"name": "b"}]}) is None
    (file,) = (tmp_path / "commit").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert again.get("cases a", cases) is None


def test_aliases_are_of_networks_whose_code_stayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "src/weft/tune/aliases.json"
    file.parent.mkdir(parents=True)
    file.write_text(to_json({"1" * 64: "2" * 64, "3" * 64: "4" * 64, "5" * 64: "6" * 64}))
    monkeypatch.setattr(replay, "ROOT", tmp_path)
    names = {
        "candy h200 | a": ("2", "7"),
        "candy h200 | b": ("4", "8"),
        "test_a x | c": ("9", "a"),
        "vgg | d": ("b", "b"),
    }
    old, new = ({n: {"identity": pair[k] * 64, "rest": {}} for n, pair in names.items()} for k in range(2))
    kinds = {
        "candy h200 | a": "text only",
        "candy h200 | b": "code",
        "test_a x | c": "text only",
        "vgg | d": "identical",
    }
    assert replay.write_aliases(old, new, kinds) == "src/weft/tune/aliases.json: 3 earlier texts, 3 before"
    assert from_json(file.read_text()) == {"1" * 64: "7" * 64, "2" * 64: "7" * 64, "5" * 64: "6" * 64}


def test_names_with_hashes_are_the_same_name() -> None:
    assert replay_corpus.plain("void k0123456789abcdef_pack(int k0123)") == "void k_pack(int k0123)"


@pytest.mark.parametrize("name", list(SKIPS))
def test_networks_cross_as_data(name: str) -> None:
    network = SKIPS[name][0]
    data = json.loads(json.dumps(replay_corpus.packed(network)))
    again = replay_corpus.unpacked(data)
    assert again == network and isinstance(again, Network)
    assert type(again.dtype) is DType and all(type(x) is Activation for x in again.acts)


def test_gradients_are_kernels_of_the_corpus(tmp_path: Path) -> None:
    network = next(iter(SKIPS.values()))[0]
    case = {"name": "test_it", "training": replay_corpus.packed(network), "schedules": []}
    found = replay_corpus.emit("cases", {"cases": [case]}, texts := replay_corpus.Texts(tmp_path))
    assert list(found) == [f"test_it | {gpu} | {way}" for gpu in ("h200", "a100") for way in ("gradient", "layered")]
    assert all('extern "C" __global__' in texts.read(item["text"]) for item in found.values())


def test_schedules_stand_beside_problems() -> None:
    posed = product((64, 64), (64, 64))
    shape = MmaConfig(64, 64, 32, 32, 32, 1, 2, 1, False, 1)
    tables = {
        "A": {"one": (posed, shape), "two": (posed, (Schedule("cuda"), 3)), "three": [(1, posed), posed]},
        "other": 3,
    }
    found = [(name, len(schedules)) for name, _, schedules in replay_corpus._tables(tables)]
    assert found == [("A one", 1), ("A two", 1), ("A three", 0), ("A three 0", 0)]


@pytest.mark.slow
def test_every_table_of_the_tests_is_replayed() -> None:
    files = {
        path.stem + ending
        for folder, ending in replay_corpus.TESTS.items()
        for path in (replay.ROOT / folder).rglob("test_*.py")
        if "\nCASES: dict[str, tuple[" in path.read_text()
    }
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
        header = trees[name] / "src/weft/generate/cuda/intrinsics/weft_cuda_machine.h"
        text = header.read_text()
        assert old_words in text
        header.write_text(text.replace(old_words, new_words, 1))
    work = Work(tmp_path / "work", tmp_path / "cache", jobs=2)
    work.texts.mkdir(parents=True)
    cases = {"cases test_it 0": [case]}
    verdicts = {}
    new = replay.made(work, replay.ROOT, list(cases), cases)
    assert sum("arch" in i for i in new.values()) >= 4 and not any("error" in i["rest"] for i in new.values())
    for name, tree in trees.items():
        kept = replay.Kept(tmp_path / name / "kept", work.texts)
        old = replay.made(work, tree, list(cases), cases, kept)
        assert kept.get("cases test_it 0", cases) == old
        codes = replay.cubins(work, (tree, replay.ROOT), replay.to_compile(old, new, every=False))
        verdicts[name] = {k for n, k in replay.compare(old, new, codes).items() if "arch" in new[n]}
    assert verdicts["words"] == {"text only"} and "code" in verdicts["code"]  # not all call it
    told = replay.made(work, tmp_path, list(cases), cases)
    assert list(told) == ["cases test_it 0 | made"]
    assert f"there is no Weft in {tmp_path / 'src'}" in told["cases test_it 0 | made"]["rest"]["error"]
