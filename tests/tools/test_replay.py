"""What is called identical, text only and changed, of records by hand and of trees with other words and other code."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.generate.cuda.products import product
from tests.generate.cuda.training.test_training_skips import CASES as SKIPS
from tools.replay import Work

from tools import record_tables, replay, replay_corpus
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


def item(text: str = "", **rest: str) -> Mapping[str, Any]:
    kernel = {"text": text, "arch": "sm_80", "flags": [], "registers": 0} if text else {}
    entry = {"launches[0].entry": "'k'"} if text else {}
    return {**kernel, "rest": entry | rest}


def test_fields_inside_of_a_value_have_the_names_of_today() -> None:
    joins = "{(0,): Entry(name='k_join0', threads=256, %s=864, shared_bytes=0)}"
    old = {"rest": {"joins": joins % "blocks", "pack.blocks": "12"}}
    new = {"rest": {"joins": joins % "max_ctas", "pack.max_ctas": "12"}}
    other = {"rest": {"joins": (joins % "max_ctas").replace("864", "432"), "pack.max_ctas": "12"}}
    assert replay.same_launches(old, new) and not replay.same_launches(old, other)


def test_kinds() -> None:
    called = {"launches[0].entry": "'other'"}
    twice = {"launches[1].entry": "'k'"}
    old = {
        "same": item("a", grid="1"), "words": item("b"), "code": item("c"), "launch": item("a", grid="1"),
        "refused": item("d"), "plan": item(steps="x"), "declined": item(declined="no"), "gone": item("a"),
        "field": item("a", grid="1"), "cpu": {"text": "a", "rest": {}}, "called": item("b"), "twice": item("b"),
        "half": item("e", **twice), "broken": item(error="no"), "mended": item(error="no"), "left out": item("f"),
    }  # fmt: skip
    new = {
        "same": item("a", grid="1"), "words": item("B"), "code": item("C"), "launch": item("a", grid="2"),
        "refused": item("D"), "plan": item(steps="y"), "declined": item("a"), "new": item("a"),
        "field": item("a", grid="1", cluster="1"), "cpu": {"text": "b", "rest": {}}, "called": item("B'", **called),
        "twice": item("B", **twice), "half": item("E", **{**called, **twice}),
        "broken": item(error="no"), "mended": item("a"), "failed": item(error="no"), "left out": item("F"),
    }  # fmt: skip
    names = [n for n in sorted(old.keys() & new.keys()) if replay.differs(old[n], new[n])]
    ours, theirs = replay.to_compile(old, new, names, every=False)
    assert [i["text"] for i in ours] == ["b", "c", "e", "f", "d", "b", "b"]
    assert [i["text"] for i in theirs] == ["B'", "C", "a", "E", "F", "a", "D", "B", "B"]
    codes: dict[str, replay.Code] = {
        "b": {"k": "1"}, "B": {"k": "1"}, "B'": {"other": "1"}, "c": {"k": "2"}, "C": {"k": "3"}, "a": {"k": "4"},
        "d": "refused: x", "D": "refused: x", "e": {"k": "5"}, "E": {"other": "6", "k": "5"},
        "f": {"k": "7"},
    }  # fmt: skip
    by_job = [{replay.job(i): codes[i["text"]] for i in its if i["text"] in codes} for its in (ours, theirs)]
    assert replay.compare(old, new, by_job) == {
        "same": "identical", "words": "text only", "code": "code", "launch": "launch", "refused": "cannot be made",
        "plan": "launch", "declined": "launch", "gone": "gone", "new": "new", "field": "identical", "cpu": "code",
        "called": "text only", "twice": "launch", "half": "code", "broken": "cannot be made",
        "mended": "cannot be made", "failed": "cannot be made", "left out": "not compiled",
    }  # fmt: skip
    everything = replay.to_compile(old, new, names, every=True)[1]
    assert len(everything) == sum("arch" in i for i in new.values())
    by_job[1][replay.job(new["same"])] = "refused: x"
    assert replay.compare(old, new, by_job)["same"] == "cannot be made"  # the same text, asked for by `--cubins all`


def test_the_table_counts_by_group() -> None:
    kinds = {"test_a CASES x | h200 | 1": "new", "test_a CASES y | plan": "gone", "candy h200 | f": "identical"}
    lines = list(replay.table(kinds))
    assert [line.split() for line in lines[1:]] == [
        ["test_a", *"000000001"], ["plans", *"000000010"], ["candy", "h200", *"100000000"], ["in", "all", *"100000011"],
    ]  # fmt: skip


def test_parts_are_chosen_by_name_and_schedule() -> None:
    cases = [{"name": f"test_{f} CASES {k}"} for f in ("tma", "mma") for k in range(replay.AT_ONCE + 1)]
    units = replay.in_units(cases)
    assert [len(c) for c in units.values()] == [replay.AT_ONCE, 1] * 2
    given = argparse.Namespace(cases="", match="", only="", limit=2, aliases=False)
    every = replay.units(given, units)
    assert every == ["network candy", "network efficientvit_b1", *units, "cpu"]
    given.match = "template=tma,"
    assert replay.units(given, units) == list(units)
    given.aliases = True
    assert replay.units(given, units) == ["network candy", "network efficientvit_b1", *units]
    given.aliases, given.cases = False, "tma|candy"
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


def test_what_the_compiler_makes_in_several_ways_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        "a": "1234", "A": "5674", "b": "1111", "B": "2222", "c": "1234567890123456", "C": "ABCDEFGHIJKLMNOP",
    }  # fmt: skip
    turns: list[list[list[str]]] = []

    def compiled(work: Work, trees: list[Path], items: list[list[dict[str, Any]]]) -> list[dict[str, replay.Code]]:
        assert work.cache.parent == tmp_path  # not the one that has the first code
        turns.append([[i["text"] for i in its] for its in items])
        return [{replay.job(i): {"k": made[i["text"]][len(turns)]} for i in its} for its in items]

    monkeypatch.setattr(replay, "cubins", compiled)
    old, new = ({n: item(n) for n in "abc"}, {n: item(n.upper()) for n in "abc"})
    codes: list[dict[str, replay.Code]] = [
        {replay.job(i): {"k": made[i["text"]][0]} for i in side.values()} for side in (old, new)
    ]
    kinds = replay.compare(old, new, codes)
    assert kinds == dict.fromkeys("abc", "code")
    work = Work(tmp_path, tmp_path / "cache", jobs=1)
    found = replay.compiled_again(work, [tmp_path] * 2, (old, new), codes, {**kinds, "d": "identical"})
    assert found == {"a": "nondeterministic", "b": "code", "c": "code", "d": "identical"}
    assert [t[0] for t in turns] == [[*"abc"]] * 3 + [["c"]] * (replay.AGAIN - 3)
    many = dict.fromkeys([f"k{n}" for n in range(replay.MOST_AGAIN + 1)], "code")
    sides = ({n: item("a") for n in many}, {n: item("A") for n in many})
    assert replay.compiled_again(work, [tmp_path] * 2, sides, codes, many) == many


def test_of_those_that_changed_alike_a_few_are_compiled(tmp_path: Path) -> None:
    work = Work(tmp_path, tmp_path / "cache", jobs=1)
    keep = replay_corpus.Texts(work.texts).keep
    pairs = {
        "test_a x | h200 | cuda(template=mma,bm=16)": ("int x = 16;\nf();", "const int x = 16;\nf();"),
        "test_a y | h200 | cuda(template=mma,bm=32)": ("int x = 32;\ng();", "const int x = 32;\ng();"),
        "test_a z | h200 | cuda(template=tma,bm=32)": ("int x = 32;\ng();", "const int x = 32;\ng();"),
        "test_b z | h200 | cuda(template=mma,bm=32)": ("int x = 32;", "const int x = 32;"),
        "test_a w | h200 | cuda(template=mma,bm=64)": ("int x = 32;\ng();", "const int x = 32;"),
        "test_a k | h200 | cuda(template=mma,bm=1)": ("void k0123456789abcdef();", "void  k0123456789abcdef();"),
        "test_a l | h200 | cuda(template=mma,bm=2)": ("void k0123456789abcde0();", "void  k0123456789abcde0();"),
    }
    old, new = ({n: item(keep(texts[k])) for n, texts in pairs.items()} for k in range(2))
    names = list(pairs)
    changes = replay.Changes(work, old, new)
    assert replay.sampled(changes, names, 1) == [n for k, n in enumerate(names) if k not in (1, 3, 6)]
    assert replay.sampled(changes, names, 2) == [n for k, n in enumerate(names) if k != 3]
    new[names[3]] = {**new[names[3]], "arch": "sm_90a"}
    assert replay.sampled(changes, names, 2) == names


def test_what_changed_in_no_other_text_is_compiled_first(tmp_path: Path) -> None:
    work = Work(tmp_path, tmp_path / "cache", jobs=1)
    keep = replay_corpus.Texts(work.texts).keep
    texts = {
        "test_a v | cuda(template=mma,bm=1)": "f();\ng();\nint quick, brown, jumps, over, the, lazy, units;",
        "test_a w | cuda(template=mma,bm=2)": "f();",
        "test_a x | cuda(template=mma,bm=3)": "f();\nint a;",
        "test_a y | cuda(template=mma,bm=4)": "g();\nint c, d, e;",
        "test_a z | cuda(template=tma,bm=5)": "f();\nint x, y, z, w;",
    }
    new = {n: item(keep(text)) for n, text in texts.items()}
    old = {n: item(keep(text.replace("f", "F").replace("g", "G"))) for n, text in texts.items()}
    changes, (v, w, x, y, z) = replay.Changes(work, old, new), texts
    assert changes.lines(w) == {(("template=mma", "sm_80"), 0, "F();"), (("template=mma", "sm_80"), 1, "f();")}
    assert replay.telling(changes, list(texts)) == [w, y, z, v, x]  # other lines, another form, all else


def test_machine_code_is_kept_as_soon_as_it_is_known(tmp_path: Path) -> None:
    codes = replay_corpus.Codes(tmp_path, "13.0")
    codes.put("a", {"k": "1"})
    codes.put("b", "refused: x")
    (file,) = (tmp_path / "codes").iterdir()
    with file.open("a") as cut:
        cut.write('\n{"c": {"k"')
    again = replay_corpus.Codes(tmp_path, "13.0")
    assert [again.get(key) for key in "abc"] == [{"k": "1"}, "refused: x", None]
    again.put("c", {"k": "3"})
    assert replay_corpus.Codes(tmp_path, "13.0").get("c") == {"k": "3"}
    assert replay_corpus.Codes(tmp_path, "13.1").get("a") is None


def test_a_run_goes_on_where_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, str] = {"old0": "1"}
    asked: list[tuple[str, list[str]]] = []

    def ask(work: Work, tree: Path, *arguments: str | Path) -> list[dict[str, str] | None]:
        texts = [x["text"] for x in json.loads(Path(arguments[1]).read_text())]
        if "--known" not in arguments:
            asked.append((tree.name, texts))
            known.update(dict.fromkeys(texts, "1"))
        return [{"k": known[t]} if t in known else None for t in texts]

    monkeypatch.setattr(Work, "ask", ask)
    work, count = Work(tmp_path, tmp_path / "cache", jobs=1), replay.COMPILED + 1
    trees = (tmp_path / "base", tmp_path / "here")
    sides = [[item(f"{side}{k}") for k in (*range(count), 0)] for side in ("old", "new")]
    few = replay.cubins(work, trees, sides, until=0.0)
    assert asked == [] and [len(x) for x in few] == [1, 0]
    assert [len(x) for x in replay.cubins(work, trees, sides)] == [count, count]
    assert [(tree, len(texts)) for tree, texts in asked] == [("base", count - 1), ("here", count - 1), ("here", 1)]
    asked.clear()
    replay.cubins(work, trees, sides)
    assert asked == []


def kernels(of: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By name: those of an identity, given by its digit, for the GPU that the name tells."""
    archs = {"h200": "sm_90a", "a100": "sm_80"}
    return {n: {"identity": i * 64, "arch": archs[n.split()[1]], "rest": {}} for n, i in of.items()}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / replay.ALIASES
    file.parent.mkdir(parents=True)
    file.write_text(to_json({}))
    monkeypatch.setattr(replay, "ROOT", tmp_path)
    return file


def digits(file: Path) -> dict[str, dict[str, list[str]]]:
    """The table with the first digit of each identity."""
    rows = from_json(file.read_text())
    return {arch: {new[0]: [o[0] for o in olds] for new, olds in x.items()} for arch, x in rows.items()}


def test_aliases_are_of_networks_whose_code_stayed(table: Path) -> None:
    names = {
        "candy h200 | a": ("2", "7", "text only"),
        "candy a100 | a": ("2", "7", "nondeterministic"),
        "candy h200 | b": ("4", "8", "code"),
        "test_a h200 | c": ("9", "a", "text only"),
        "vgg h200 | d": ("b", "b", "identical"),
        "vgg h200 | e": ("c", "d", "launch"),
        "vgg h200 | f": ("e", "f", "cannot be made"),
    }
    old, new = (kernels({n: row[k] for n, row in names.items()}) for k in range(2))
    kinds = {n: row[2] for n, row in names.items()}
    assert replay.write_aliases(old, new, kinds) == "src/weft/tune/aliases.json: 2 earlier texts, 0 before"
    assert digits(table) == {"sm_80": {"7": ["2"]}, "sm_90a": {"7": ["2"]}}


def test_aliases_of_parts_and_of_later_changes_add_up(table: Path) -> None:
    def replayed(kind: str, **of: str) -> str:
        names = [f"{name} h200 | k" for name in of]
        old, new = (kernels(dict(zip(names, (x[k] for x in of.values()), strict=True))) for k in (0, -1))
        return replay.write_aliases(old, new, dict.fromkeys(names, kind))

    replayed("text only", candy="12", vgg="34")
    replayed("text only", bert="56")
    assert digits(table) == {"sm_90a": {"2": ["1"], "4": ["3"], "6": ["5"]}}
    replayed("text only", candy="2a")  # a later change of some of them
    replayed("identical", bert="6")
    assert digits(table) == {"sm_90a": {"4": ["3"], "6": ["5"], "a": ["2", "1"]}}
    replayed("text only", vgg="4b", candy="2a")  # the other part of it; what was told before is told again
    assert digits(table) == {"sm_90a": {"6": ["5"], "a": ["2", "1"], "b": ["4", "3"]}}
    replayed("code", vgg="bc")  # other machine code: nothing of what it had is valid
    assert digits(table) == {"sm_90a": {"6": ["5"], "a": ["2", "1"]}}
    replayed("code", test_x="2a")  # a case of the tests contradicts
    assert digits(table) == {"sm_90a": {"6": ["5"]}}


def test_counts_of_whole_groups_are_recorded(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"rev-parse": "abc1234", "status": ""}
    monkeypatch.setattr(replay, "_git", lambda *arguments: told[arguments[0]])
    kinds = {
        "candy h200 | plan": "identical", "candy h200 | a": "text only", "candy h200 | b": "code",
        "test_a x | h200 | c": "text only", "test_b x | h200 | c": "not compiled",
    }  # fmt: skip
    replay.record("1234567", kinds, lambda group: group != "test_a")
    told["status"] = " M src/weft/api.py"
    replay.record("1234567", {"vgg h200 | a": "identical"}, lambda _: True)
    _, candy, test_b, vgg = map(json.loads, (table.parents[3] / replay.RECORD).read_text().splitlines())
    assert [x["case"] for x in (candy, test_b, vgg)] == ["candy h200", "test_b", "vgg h200"]
    assert (candy["base"], candy["commit"], vgg["commit"]) == ("1234567", "abc1234", "abc1234-dirty")
    assert (candy["identical"], candy["text_only"], candy["code"], test_b["not_compiled"]) == (0, 1, 1, 1)
    assert candy["differ"] == ["code: candy h200 | b"] and vgg["differ"] == [] and test_b["differ"] == []
    monkeypatch.setattr(record_tables, "RESULTS", table.parents[3] / "benchmarks/results")
    lines = [[cell.strip(" *") for cell in x.split("|")[1:-1]] for x in record_tables.replay().splitlines()]
    assert lines[0] == ["kernels of", "commits", "same text", "same machine code", "other machine code", "not compiled"]
    assert lines[2] == ["candy h200", "1234567 to abc1234", "0", "1", "1", "0"]
    assert lines[5] == ["in all", "", "1", "1", "1", "1"]


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
    shape = MmaConfig(64, 64, 32, 32, 32, 1, 2, 1, False, True)
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
        names = [n for n in old if replay.differs(old[n], new[n])]
        codes = replay.cubins(work, (tree, replay.ROOT), replay.to_compile(old, new, names, every=False))
        verdicts[name] = {k for n, k in replay.compare(old, new, codes).items() if "arch" in new[n]}
    assert verdicts["words"] == {"text only"} and "code" in verdicts["code"]  # not all call it
    told = replay.made(work, tmp_path, list(cases), cases)
    assert list(told) == ["cases test_it 0 | made"]
    assert f"there is no Weft in {tmp_path / 'src'}" in told["cases test_it 0 | made"]["rest"]["error"]


def test_pairs_that_were_found_the_same_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = {
        "base": {"test_a x | h200 | a": item("a"), "test_a x | h200 | b": item("b")},
        "here": {"test_a x | h200 | a": item("A"), "test_a x | h200 | b": item("B")},
    }
    code = {"a": "1", "A": "1", "b": "2", "B": "3"}
    compiled: list[list[str]] = []

    def ask(work: Work, tree: Path, *arguments: str | Path) -> None:
        del work, tree
        Path(arguments[1]).write_text('[{"name": "test_a x"}]')

    def cubins(work: Work, trees: object, items: Any, until: float = 0.0) -> list[dict[str, replay.Code]]:
        del work, trees, until
        compiled.append([x["text"] for x in items[0]])
        return [{replay.job(x): {"k": code[x["text"]]} for x in its} for its in items]

    monkeypatch.setattr(replay, "ROOT", tmp_path / "here")
    (tmp_path / "here" / replay.SAME).parent.mkdir(parents=True)
    monkeypatch.setattr(Work, "ask", ask)
    monkeypatch.setattr(Work, "text", lambda _work, digest: digest)
    monkeypatch.setattr(replay.Changes, "length", lambda *_: 0)
    monkeypatch.setattr(replay, "made", lambda _work, tree, *_: dict(sides[tree.name]))
    monkeypatch.setattr(replay, "kept_here", lambda _work: None)
    monkeypatch.setattr(replay, "cubins", cubins)
    monkeypatch.setattr(replay, "AGAIN", 0)
    monkeypatch.setattr(replay, "record", lambda *_: None)
    monkeypatch.setattr(replay, "_git", lambda *_: "abc")
    given = argparse.Namespace(
        base="abc", only="cuda", cases="", match="", limit=0, cubins="changed", sample=0, seconds=0.0, aliases=False,
        differing=None, record=True,
    )  # fmt: skip
    for turn in range(2):
        work = Work(tmp_path / f"work{turn}", tmp_path / "cache", jobs=1)
        work.folder.mkdir()
        assert replay.replay(work, tmp_path / "base", None, given) == 1  # b is another code
        row = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("test_a"))
        assert row.split()[1:5] == ["0", "1", "0", "1"], "identical, text only, nondeterministic, code"
    assert compiled == [["a", "b"], ["b"]]
    (digest,) = replay.same_before(tmp_path / "here" / replay.SAME)
    old, new = item("a"), item("A")
    version = replay._version("nvidia-cuda-nvrtc")
    assert digest == replay.pair(old, new, version)
    others = [(new, old), (old, item("C")), (old, {**new, "flags": ["-x"]}), (old, {**new, "arch": "sm_90a"})]
    assert digest not in {replay.pair(*x, version) for x in others} | {replay.pair(old, new, "another NVRTC")}
