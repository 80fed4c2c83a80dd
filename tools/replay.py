"""Are plans, kernel texts and machine code the same as on another commit? `python tools/replay.py --base main`.

The corpus is `tools/replay_corpus.py` of this tree, for both trees: a handful of graphs for the CPU; for GPUs every
case of the tests of CUDA kernels and the ten networks' plans, for an H200 and an A100. It needs no GPU: kernels are
priced by the models of fixed machines, so that plans depend on the code alone. Both trees run with this interpreter.

Of each kernel the text is compared, with the launches and whatever else decides what runs. Where texts differ both are
compiled by NVRTC, each with its tree's options:

    text only          the same machine code nevertheless, whatever entries and functions are called
    nondeterministic   NVRTC makes several codes of one text (13.0 joins neighbouring loads of 4 bytes now in one way,
                       now in another), and compiled again both texts have one of them in common
    code               other machine code
    launch             launched or planned otherwise
    cannot be made     the generator fails, or NVRTC refuses the text, in one tree or in both: nothing is said of it
    not compiled       left out by `--sample`, or not reached in `--seconds`

`--cubins all` compiles every text.

Parts: `--cases test_tma` takes the cases and networks whose names match a regular expression, which is quick;
`--match template=tma,` the kernels whose name or schedule does, of all cases (with `--cases`, of those and networks;
with `--aliases` of networks, too). `--sample N` compiles N of the kernels of a template and a GPU whose texts differ in
the same lines but for numbers. `--aliases` may be given with each part, in any order, and again after each change: what
is there is added to.

What a commit makes is kept in the cache, and each text's machine code as soon as it is known: the next run goes on
where one was ended, or ended after `--seconds`. Texts with lines that changed in no earlier one are compiled first.
From the second run on the base costs next to nothing, and so does this tree, where it is committed. `--record` also
notes which pairs of texts were found to be the same machine code: these are not compiled again, on no machine.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORPUS = Path(__file__).resolve().parent / "replay_corpus.py"
ALIASES = "src/weft/tune/aliases.json"
"""Where this tree's table of earlier texts is, see `weft.tune.aliases`."""
RECORD = "benchmarks/results/cpu/replay.jsonl"
SAME = "benchmarks/results/cpu/replay-same.txt"
"""Digests of pairs of texts that are the same machine code, see `pair`."""
NETWORKS = (
    "candy", "efficientvit_b1", "yolox_nano", "yolov4", "segformer_b0", "vgg16", "resnet50", "inception_v3",
    "bert_base", "vit_b16",
)  # fmt: skip
LONGEST = ("yolov4", "inception_v3", "segformer_b0")
AT_ONCE = 24
"""Cases of a unit."""
TOGETHER = 5
"""Units of cases that one process makes, at most."""
COMPILED = 32
"""Texts of a tree that one process compiles: what it costs to start is little beside them."""
KINDS = (
    "identical", "text only", "nondeterministic", "code", "launch", "cannot be made", "not compiled", "gone", "new",
)  # fmt: skip
HARMLESS = KINDS[:3]
AGAIN = 12
"""Times that texts with other machine code are compiled again."""
SETTLED = 3
"""Of them, where each text has one code."""
MOST_AGAIN = 200
"""Kernels that are; where there are more, the change is meant."""
MOST = 20
"""Differences that are shown."""
LINES = 60
"""Of one of them."""
_NUMBER = re.compile(r"\b[a-z]?[0-9a-f]{16}|[0-9]+")
"""Names that hold a hash, too."""
_TEMPLATE = re.compile(r"\btemplate=\w+")
RENAMED = {" blocks": " max_ctas"}
"""Fields of a value inside of a field that had other names in an earlier commit."""
OPTIONS = ("arch", "flags", "registers")
"""What a kernel for a GPU is compiled with."""
LIBRARIES = ("torch", "numpy", "scipy", "cuda-bindings", "nvidia-cuda-nvrtc")
"""Beside the trees, what decides about plans."""
Item = Mapping[str, Any]
Items = dict[str, Item]
Cases = Mapping[str, Sequence[Mapping[str, Any]]]
"""By unit."""
Code = Mapping[str, str] | str
"""The digest of each entry's machine code by its name, or why there is none."""


class TreeError(Exception):
    """A tree does not do what it is asked for: the end of what it printed."""


@dataclass(frozen=True)
class Work:
    """Where things are while two trees are compared."""

    folder: Path
    cache: Path
    jobs: int

    @property
    def texts(self) -> Path:
        """Texts by digest, of both trees."""
        return self.folder / "texts"

    def ask(self, tree: Path, *arguments: str | Path) -> Any:
        """What `replay_corpus.py` says of a tree, in a process of its own."""
        env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
        env.pop("WEFT_CACHE_DIR", None)
        command = [sys.executable, CORPUS, *arguments, "--texts", self.texts, "--cache", self.cache]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=tree)
        if done.returncode:
            raise TreeError(f"{' '.join(map(str, arguments[:2]))}: {done.stderr[-3000:]}")
        return json.loads(zlib.decompress(base64.b64decode(done.stdout.split()[-1])))

    def text(self, digest: str) -> str:
        """One of them."""
        return zlib.decompress((self.texts / digest).read_bytes()).decode()


@dataclass(frozen=True)
class Kept:
    """What one commit made of units, kept with its texts in files of the cache."""

    folder: Path
    texts: Path

    def get(self, unit: str, cases: Cases) -> Items | None:
        """What it made of a unit; none where it was never asked, or the file is damaged."""
        try:
            held = json.loads(zlib.decompress(self._path(unit, cases).read_bytes()))
            items: Items = held["items"]
            for digest, text in held["texts"].items():
                _publish(self.texts / digest, zlib.compress(text.encode(), 1))
        except (OSError, ValueError, KeyError, zlib.error):
            return None
        return items

    def put(self, unit: str, cases: Cases, items: Items) -> None:
        """Keep it."""
        digests = {i["text"] for i in items.values() if "text" in i}
        texts = {d: zlib.decompress((self.texts / d).read_bytes()).decode() for d in sorted(digests)}
        path = self._path(unit, cases)
        path.parent.mkdir(parents=True, exist_ok=True)
        _publish(path, zlib.compress(json.dumps({"items": items, "texts": texts}).encode(), 6))

    def _path(self, unit: str, cases: Cases) -> Path:
        """By all that decides beside the commit."""
        versions = [sys.version, *(f"{name} {_version(name)}" for name in LIBRARIES)]
        told = json.dumps([CORPUS.read_text(), unit, cases.get(unit), versions])
        return self.folder / f"{hashlib.sha256(told.encode()).hexdigest()}.z"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _publish(path: Path, data: bytes) -> None:
    """Write a file that others may read or write meanwhile."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)


def in_units(cases: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The cases of each file of tests, a few at a time."""
    files: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        files.setdefault(case["name"].split()[0], []).append(case)
    return {f"cases {f} {k}": c[k : k + AT_ONCE] for f, c in files.items() for k in range(0, len(c), AT_ONCE)}


def units(given: argparse.Namespace, cases: Cases) -> list[str]:
    """What a tree is asked for, the longest first; schedules alone are looked for in cases, as plans take long."""
    named: str = given.cases
    few = [
        n
        for n in NETWORKS[: given.limit or None]
        if re.search(named, n) and (named or given.aliases or not given.match)
    ]
    networks = [f"network {n}" for n in sorted(few, key=lambda n: n not in LONGEST)]
    cuda = [*networks, *(u for u, inside in cases.items() if any(re.search(named, c["name"]) for c in inside))]
    return {"cpu": ["cpu"], "cuda": cuda, "": cuda if named or given.match else [*cuda, "cpu"]}[given.only]


def made(work: Work, tree: Path, wanted: Sequence[str], cases: Cases, kept: Kept | None = None) -> Items:
    """Everything that a tree makes of units, by name."""
    file = work.folder / f"cases-{hashlib.sha256(str(tree).encode()).hexdigest()[:16]}.json"
    file.write_text(json.dumps(cases))
    known = {u: items for u in wanted if kept and (items := kept.get(u, cases)) is not None}
    left = [u for u in wanted if u not in known]
    few = [u for u in left if u in cases]
    size = max(1, min(TOGETHER, len(few) // max(1, work.jobs)))
    groups = [[u] for u in left if u not in cases] + [few[k : k + size] for k in range(0, len(few), size)]

    def one(group: list[str]) -> dict[str, Items]:
        try:
            found: dict[str, Items] = work.ask(tree, "--emit", *group, "--cases", file)
        except TreeError as error:
            return {u: {f"{u} | made": {"rest": {"error": str(error)}}} for u in group}
        for unit, items in found.items():
            if kept and not any("error" in i["rest"] for i in items.values()):
                kept.put(unit, cases, items)
        return found

    with ThreadPoolExecutor(work.jobs) as pool:
        for found in pool.map(one, groups):
            known |= found
    return {name: item for unit in wanted for name, item in known[unit].items()}


def looked_at(items: Mapping[str, Item], named: str, match: str) -> Items:
    """Those of the cases and networks of these names whose own name matches."""
    return {n: i for n, i in items.items() if re.search(named, n.split(" | ")[0]) and re.search(match, n)}


def same_launches(old: Item, new: Item) -> bool:
    """What both trees know beside the text and what entries are called; a field that only one has says nothing."""
    if {k for k in old["rest"] if is_entry(k)} != {k for k in new["rest"] if is_entry(k)}:
        return False
    both = old["rest"].keys() & new["rest"].keys()
    known = (
        all(today(old["rest"][k]) == today(new["rest"][k]) for k in both if not is_entry(k))
        if both
        else old["rest"] == new["rest"]
    )
    return known and all(old.get(k) == new.get(k) for k in OPTIONS)


def today(value: str) -> str:
    """What a field holds, with the fields inside by the names that they have now."""
    for before, now in RENAMED.items():
        value = value.replace(f"{before}=", f"{now}=")
    return value


def is_entry(field: str) -> bool:
    """Whether a field is the name of what a launch runs."""
    return field.endswith("].entry")


def launched(item: Item) -> dict[str, str]:
    """The names of what its launches run."""
    return {field: value.strip("'") for field, value in item["rest"].items() if is_entry(field)}


def machine_code(item: Item, codes: Mapping[str, Code]) -> Mapping[str, str] | None:
    """The digest of what each launch of a kernel runs; nothing where it has none, was refused or not compiled."""
    code = codes.get(job(item)) if "arch" in item else None
    if code is None or isinstance(code, str):
        return None
    return {field: code[entry] for field, entry in launched(item).items()}


def cubins(
    work: Work, trees: Sequence[Path], items: Sequence[Iterable[Item]], until: float = float("inf")
) -> list[dict[str, Code]]:
    """Per tree: the machine code by `job` of an item. What is not begun `until` then (`time.monotonic`) has none."""
    found: list[dict[str, Code]] = [{} for _ in trees]
    wanted = [list({job(i): i for i in its}.values()) for its in items]

    def ask(side: int, jobs: Sequence[Item], *how: str) -> None:
        if jobs and (how or time.monotonic() < until):
            handle, path = tempfile.mkstemp(dir=work.folder)
            with os.fdopen(handle, "w") as file:
                json.dump(jobs, file)
            codes = work.ask(trees[side], "--cubins", path, "--threads", "1", *how)
            found[side] |= {job(i): code for i, code in zip(jobs, codes, strict=True) if code is not None}

    def both(begin: int) -> None:
        for side, jobs in enumerate(left):
            ask(side, jobs[begin : begin + COMPILED])
        print(f"{sum(map(len, found))} of {sum(map(len, wanted))} texts", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(work.jobs) as pool:
        list(pool.map(lambda side: ask(side, wanted[side], "--known"), range(len(trees))))
        left = [[i for i in jobs if job(i) not in codes] for jobs, codes in zip(wanted, found, strict=True)]
        list(pool.map(both, range(0, max(map(len, left), default=0), COMPILED)))
    return found


def job(item: Item) -> str:
    """What decides about a cubin, in one tree."""
    return json.dumps([item[k] for k in ("text", *OPTIONS)])


def pair(old: Item, new: Item, nvrtc: str) -> str:
    """A digest of all that decides whether two kernels run the same machine code."""
    told = [nvrtc, *(x for item in (old, new) for x in (job(item), launched(item)))]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:20]


def same_before(path: Path) -> set[str]:
    """The pairs that earlier runs found to be the same; none where there is no such file."""
    return set(path.read_text().split()) if path.exists() else set()


def is_made(item: Item, codes: Mapping[str, Code]) -> bool:
    """Whether there is such a kernel: the generator wrote it, and NVRTC compiled it if it was asked to."""
    return "error" not in item["rest"] and not ("arch" in item and isinstance(codes.get(job(item)), str))


def compare(old: Mapping[str, Item], new: Mapping[str, Item], codes: Sequence[Mapping[str, Code]]) -> dict[str, str]:
    """One of `KINDS` for each name."""
    found: dict[str, str] = {}
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if not all(is_made(x, of) for x, of in zip((a, b), codes, strict=True) if x is not None):
            found[name] = "cannot be made"
        elif a is None or b is None:
            found[name] = "new" if a is None else "gone"
        elif not same_launches(a, b):
            found[name] = "launch"
        elif not differs(a, b):
            found[name] = "identical"
        elif any("arch" in x and job(x) not in of for x, of in zip((a, b), codes, strict=True)):
            found[name] = "not compiled"
        else:
            both = [machine_code(x, of) for x, of in zip((a, b), codes, strict=True)]
            found[name] = "text only" if both[0] is not None and both[0] == both[1] else "code"
    return found


def differs(old: Item, new: Item) -> bool:
    """Whether the text does, or which of its kernels are launched."""
    return old.get("text") != new.get("text") or launched(old) != launched(new)


def compiled_again(
    work: Work,
    trees: Sequence[Path],
    sides: Sequence[Items],
    codes: Sequence[Mapping[str, Code]],
    kinds: dict[str, str],
) -> dict[str, str]:
    """The kinds, with those that are `code` because NVRTC makes several codes of one text told apart."""
    left = [n for n, kind in kinds.items() if kind == "code" and all("arch" in items[n] for items in sides)]
    if len(left) > MOST_AGAIN:
        return kinds
    seen = {n: [{machine_code_key(items[n], of)} for items, of in zip(sides, codes, strict=True)] for n in left}
    met: set[str] = set()
    for turn in range(AGAIN):
        if not left:
            break
        with tempfile.TemporaryDirectory(dir=work.folder) as fresh:
            alone = replace(work, cache=Path(fresh))
            told = cubins(alone, trees, [[items[n] for n in left] for items in sides])
        for name in left:
            for known, items, of in zip(seen[name], sides, told, strict=True):
                known.add(machine_code_key(items[name], of))
        met |= {n for n in left if seen[n][0] & seen[n][1]}
        left = [n for n in left if n not in met and (turn + 1 < SETTLED or max(map(len, seen[n])) > 1)]
    return {n: "nondeterministic" if n in met else kind for n, kind in kinds.items()}


def machine_code_key(item: Item, codes: Mapping[str, Code]) -> tuple[tuple[str, str], ...]:
    """The same as `machine_code`, to be held in a set."""
    return tuple(sorted((machine_code(item, codes) or {}).items()))


class Changes:
    """What the texts of a kernel have that the other tree's have not, without numbers."""

    def __init__(self, work: Work, old: Items, new: Items) -> None:
        self._work, self._sides = work, (old, new)
        self._known: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {}

    def of(self, name: str) -> tuple[tuple[str, ...], ...]:
        """Lines that went and lines that came, each as often as it stands there."""
        texts = tuple(str(items[name].get("text", "")) for items in self._sides)
        if texts not in self._known:
            self._known[texts] = changed(*(self._work.text(t) if t else "" for t in texts))
        return self._known[texts]

    def length(self, name: str) -> int:
        """Bytes of this tree's text, compressed; 0 where it has none."""
        digest = self._sides[1][name].get("text")
        return (self._work.texts / digest).stat().st_size if digest else 0

    def place(self, name: str) -> tuple[str, str]:
        """Its template and architecture."""
        template = _TEMPLATE.search(name)
        return template[0] if template else "", str(self._sides[1][name].get("arch"))

    def form(self, name: str) -> tuple[object, ...]:
        """What kernels of one template and architecture have in common that changed alike."""
        return (*self.place(name), self.of(name))

    def lines(self, name: str) -> set[tuple[object, ...]]:
        """Each line that changed, in its template and architecture."""
        return {(self.place(name), side, line) for side, lines in enumerate(self.of(name)) for line in lines}


def sampled(changes: Changes, names: Iterable[str], most: int) -> list[str]:
    """So many of the names of one template and architecture whose texts differ in the same lines but for numbers."""
    taken: Counter[tuple[object, ...]] = Counter()
    found = []
    for name in names:
        form = changes.form(name)
        taken[form] += 1
        if taken[form] <= most:
            found.append(name)
    return found


def telling(changes: Changes, names: Sequence[str]) -> list[str]:
    """The names in the order in which they tell most.

    Those with a changed line that no kernel before has, of their template and architecture; then the first of each
    other form; then the others. Short texts stand before long ones, which take longer.
    """
    met: set[tuple[object, ...]] = set()
    forms: set[tuple[object, ...]] = set()
    ranks: dict[str, int] = {}
    for name in (ordered := sorted(names, key=changes.length)):
        lines, form = changes.lines(name), changes.form(name)
        ranks[name] = 0 if lines - met else 1 if form not in forms else 2
        met |= lines
        forms.add(form)
    return sorted(ordered, key=ranks.__getitem__)


def changed(old: str, new: str) -> tuple[tuple[str, ...], ...]:
    """Which lines one text has and the other has not, without numbers and order."""
    was, now = (Counter(text.split("\n")) for text in (old, new))
    return tuple(tuple(sorted(_NUMBER.sub("#", x) for x in lines.elements())) for lines in (was - now, now - was))


def to_compile(
    old: Mapping[str, Item], new: Mapping[str, Item], names: Iterable[str], *, every: bool
) -> tuple[list[Item], list[Item]]:
    """Of each tree the kernels for a GPU whose cubins are asked for: of these names, here of all if so asked."""
    differ = list(names)
    ours = list(new) if every else differ
    return [old[n] for n in differ if "arch" in old[n]], [new[n] for n in ours if "arch" in new[n]]


def shown(work: Work, name: str, old: Item | None, new: Item | None) -> Iterator[str]:
    """The first lines of a difference."""

    def lines(item: Item | None) -> list[str]:
        if item is None:
            return []
        beside = [f"{k} = {v}" for k, v in item["rest"].items()] + [f"{k} = {item[k]}" for k in OPTIONS if k in item]
        return "\n".join([*beside, work.text(item["text"]) if "text" in item else ""]).split("\n")

    one_line = name.replace("\n", " / ")[:200]
    found = list(difflib.unified_diff(lines(old), lines(new), f"base {one_line}", "here", lineterm="", n=1))
    yield from found[:LINES]
    if len(found) > LINES:
        yield f"... {len(found) - LINES} more lines"


def counts(kinds: Mapping[str, str]) -> dict[str, Counter[str]]:
    """How many are of each kind, by `group_of`."""
    groups: dict[str, Counter[str]] = {}
    for name, kind in kinds.items():
        groups.setdefault(group_of(name), Counter())[kind] += 1
    return groups


def table(kinds: Mapping[str, str]) -> Iterator[str]:
    """Counts per group (a file of cases, a network on a GPU, the plans), and in all."""
    groups = counts(kinds)
    wide = max(map(len, groups), default=0)
    yield " " * wide + "".join(f"  {k:>9}" for k in KINDS)
    for group, count in [*groups.items(), ("in all", sum(groups.values(), Counter()))]:
        yield f"{group:{wide}}" + "".join(f"  {count[k]:{max(9, len(k))}}" for k in KINDS)


def group_of(name: str) -> str:
    """A file of cases, a network on a GPU, or the plans."""
    place, _, rest = name.partition(" | ")
    return "plans" if rest == "plan" else place.split()[0] if place.startswith("test_") else place


def record(base: str, kinds: Mapping[str, str], whole: Callable[[str], bool]) -> None:
    """Counts of networks and of files of cases into the record that `docs/performance.md` shows, a row for each.

    Args:
        base: the commit that was compared with.
        kinds: by name.
        whole: whether everything of a group was looked at; no other group has a row.
    """
    from benchmarks.harness.record import Record

    from weft.device.cuda.nvrtc import find_nvrtc

    commit = _git("rev-parse", "--short", "HEAD") + ("" if is_committed() else "-dirty")
    nvrtc = str(getattr(find_nvrtc(), "version", "none"))
    kept = Record("cpu", "replay", path=ROOT / RECORD, key=("base", "case"), command=" ".join(sys.argv))
    kernels = {n: k for n, k in kinds.items() if not n.endswith(" | plan")}
    for group, count in counts(kernels).items():
        if not whole(group):
            continue
        told = (*HARMLESS[:2], "not compiled")
        differ = [n for n, k in kernels.items() if group_of(n) == group and k not in told]
        kept.add(
            {
                "record": "case",
                "suite": "replay",
                "case": group,
                "base": base,
                "commit": commit,
                "nvrtc": nvrtc,
                **{k.replace(" ", "_"): count[k] for k in KINDS},
                "differ": [f"{kernels[n]}: {n}"[:200] for n in differ[:MOST]],
            }
        )


def write_aliases(old: Mapping[str, Item], new: Mapping[str, Item], kinds: Mapping[str, str]) -> str:
    """Note in the package whose measurements stay valid: of networks, as nobody keeps those of the tests' cases."""
    from weft.tune.aliases import from_json, joined, to_json

    file = ROOT / ALIASES
    known = from_json(file.read_text())
    before, present = (_identities((name, x) for name, x in items.items()) for items in (old, new))
    pairs: dict[str, dict[str, set[tuple[str, str]]]] = {"same": {}, "other": {}}
    for name, kind in kinds.items():
        if kind in (*HARMLESS[1:], "code") and all("identity" in items[name] for items in (old, new)):
            told = pairs["other" if kind == "code" else "same"].setdefault(new[name]["arch"], set())
            if kind == "code" or not name.startswith("test_"):
                told.add((old[name]["identity"], new[name]["identity"]))
    found = joined(known, pairs["same"], pairs["other"], before, present)
    file.write_text(to_json(found))
    counts = [sum(len(olds) for rows in x.values() for olds in rows.values()) for x in (found, known)]
    return f"{file.relative_to(ROOT)}: {counts[0]} earlier texts, {counts[1]} before"


def differing(
    work: Work, sides: Sequence[Items], kinds: Mapping[str, str], cases: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Kernels of cases with other machine code, each with its case, its texts and the names of what it launches."""
    for name, kind in kinds.items():
        case = cases.get(name.split(" | ")[0])
        if kind == "code" and case is not None and all("arch" in items[name] for items in sides):
            texts = [work.text(items[name]["text"]) for items in sides]
            entries = [launched(items[name]) for items in sides]
            yield {"name": name, "case": case, "arch": sides[1][name]["arch"], "texts": texts, "entries": entries}


def _identities(items: Iterable[tuple[str, Item]]) -> dict[str, set[str]]:
    """By architecture, of networks' kernels."""
    found: dict[str, set[str]] = {}
    for name, item in items:
        if "identity" in item and not name.startswith("test_"):
            found.setdefault(item["arch"], set()).add(item["identity"])
    return found


def main() -> None:
    """Compare; exit 1 on any difference but of text only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="a commit, or a folder with another checkout (nothing is kept)")
    parser.add_argument("--only", choices=("cpu", "cuda"), default="", help="kernels for this alone")
    parser.add_argument("--cases", default="", metavar="REGEX", help="cases and networks with such names")
    parser.add_argument("--match", default="", metavar="REGEX", help="kernels with such names or schedules")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="N networks, N cases of each file")
    parser.add_argument("--cubins", choices=("changed", "all"), default="changed", help="which texts are compiled")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N kernels of those that changed alike")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no text later; what is done is kept")
    parser.add_argument(
        "--aliases", action="store_true", help="write which measurements stay valid, see weft.tune.aliases"
    )
    parser.add_argument(
        "--record", action="store_true", help=f"write the counts of whole groups into {RECORD}, and {SAME}"
    )
    parser.add_argument(
        "--differing",
        type=Path,
        metavar="FILE",
        help="write kernels of cases with other code, for tools/replay_times.py",
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at once")
    parser.add_argument("--cache", type=Path, help="folder of what is kept (default: in the user's cache)")
    given = parser.parse_args()
    if given.record and (given.match or given.limit or Path(given.base).is_dir()):
        parser.error(
            "--record: a row is of a whole network or file of cases, against a commit (no --match, no --limit)"
        )
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "replay"
    with tempfile.TemporaryDirectory(prefix="weft-replay-") as folder:
        work = Work(Path(folder), (given.cache or home).resolve(), given.jobs)
        if Path(given.base).is_dir():
            sys.exit(replay(work, Path(given.base).resolve(), None, given))
        commit = _git("rev-parse", "--verify", f"{given.base}^{{commit}}")
        kept = Kept(work.cache / "commits" / commit, work.texts)
        tree = Path(folder) / "base"
        _git("worktree", "add", "--detach", "-q", str(tree), commit)
        try:
            code = replay(work, tree, kept, given)
        finally:
            _git("worktree", "remove", "--force", str(tree))
    sys.exit(code)


def kept_here(work: Work) -> Kept | None:
    """What this tree's commit made, where nothing that decides was changed since: the base of a later replay."""
    if not is_committed():
        return None
    return Kept(work.cache / "commits" / _git("rev-parse", "HEAD"), work.texts)


def is_committed() -> bool:
    """Whether what decides about this tree's kernels is that of its commit."""
    return not _git(
        "status", "--porcelain", "--", "src", "tests", "benchmarks", *(f":!{x}" for x in (ALIASES, RECORD, SAME))
    )


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def replay(work: Work, base: Path, kept: Kept | None, given: argparse.Namespace) -> int:
    """Print what differs, and a table; 1 if anything does."""
    start = time.monotonic()
    work.texts.mkdir()
    file = work.folder / "cases.json"
    if given.only != "cpu":
        work.ask(ROOT, "--collect", file, "--limit", str(given.limit))
    cases = json.loads(file.read_text()) if given.only != "cpu" else []
    every = in_units(cases)
    old = made(work, base, units(given, every), every, kept)
    old = looked_at(old, given.cases, given.match)
    places = {name.split(" | ")[0] for name in old}
    few = in_units(c for c in cases if c["name"] in places)
    new = made(work, ROOT, units(given, few), few, kept_here(work))
    new = looked_at(new, given.cases, given.match)
    if not old and not new:
        sys.exit(f"nothing matches {given.match!r}")
    names = [n for n in sorted(old.keys() & new.keys()) if differs(old[n], new[n])]
    nvrtc = _version("nvidia-cuda-nvrtc")
    pairs = {n: pair(old[n], new[n], nvrtc) for n in names if all("arch" in x[n] for x in (old, new))}
    known = same_before(ROOT / SAME) if given.cubins == "changed" else set()
    proven = {n for n, digest in pairs.items() if digest in known and same_launches(old[n], new[n])}
    names = [n for n in names if n not in proven]
    changes = Changes(work, old, new)
    names = telling(changes, sampled(changes, names, given.sample) if given.sample else names)
    until = start + given.seconds if given.seconds else float("inf")
    codes = cubins(work, (base, ROOT), to_compile(old, new, names, every=given.cubins == "all"), until)
    kinds = compare(old, new, codes) | dict.fromkeys(proven, "text only")
    kinds = compiled_again(work, (base, ROOT), (old, new), codes, kinds)
    told = sorted((n for n, kind in kinds.items() if kind != "identical"), key=lambda n: kinds[n] in HARMLESS)
    for name in told[:MOST]:
        print(f"{kinds[name]}: " + "\n".join(shown(work, name, old.get(name), new.get(name))))
    print("\n".join(table(kinds)))
    refused = [sum(isinstance(code, str) for code in side.values()) for side in codes]
    failed = [sum("error" in item["rest"] for item in items.values()) for items in (old, new)]
    print(f"{sum(map(len, codes))} texts compiled in {time.monotonic() - start:.0f} s")
    for tree, cases_failed, texts_refused in zip(("base", "this tree"), failed, refused, strict=True):
        print(f"{tree}: {cases_failed} cases fail, {texts_refused} texts are refused by NVRTC")
    if given.aliases:
        print(write_aliases(old, new, kinds))
    if given.differing:
        named = {c["name"]: c for c in cases}
        given.differing.write_text(json.dumps([*differing(work, (old, new), kinds, named)]))
    if given.record:
        found = known | {digest for n, digest in pairs.items() if kinds[n] == "text only"}
        (ROOT / SAME).write_text("".join(f"{x}\n" for x in sorted(found)))
        left_out = {c["name"].split()[0] for c in cases if not re.search(given.cases, c["name"])}
        record(_git("rev-parse", "--short", given.base), kinds, lambda group: group not in left_out)
    bad = any(refused) or any(failed) or any(kind not in HARMLESS for kind in kinds.values())
    print("not the same" if bad else "the same machine code, launches and plans")
    return int(bad)


if __name__ == "__main__":
    main()
