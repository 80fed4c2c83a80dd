"""Are plans, kernel texts and cubins the same as on another commit? `python tools/replay.py --base main`.

The corpus is `tools/replay_corpus.py` of this tree, for both trees: a handful of graphs for the CPU; for GPUs every
case of the tests of CUDA kernels and the ten networks' plans, for an H200 and an A100. It needs no GPU: kernels are
priced by the models of fixed machines, so that plans depend on the code alone. Both trees run with this interpreter.

Of each kernel the text is compared, with the launches and whatever else decides what runs. Equal texts with equal
options have one cubin. Where texts differ both are compiled by NVRTC, each with its tree's options (once; a cache keeps
cubins by text and options): `text only` is what has the same bytes nevertheless. `--cubins all` compiles every text.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORPUS = Path(__file__).resolve().parent / "replay_corpus.py"
NETWORKS = (
    "candy", "efficientvit_b1", "yolox_nano", "yolov4", "segformer_b0", "vgg16", "resnet50", "inception_v3",
    "bert_base", "vit_b16",
)  # fmt: skip
PARTS = 12
"""Units of the cases."""
KINDS = ("identical", "text only", "changed", "gone", "new")
MOST = 20
"""Differences that are shown."""
LINES = 60
"""Of one of them."""
OPTIONS = ("arch", "flags", "registers")
"""What a kernel for a GPU is compiled with."""
Item = Mapping[str, Any]


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
        command = [sys.executable, CORPUS, *arguments, "--texts", self.texts, "--cases", self.folder / "cases.json"]
        done = subprocess.run(
            [*command, "--cache", self.cache], env=env, capture_output=True, text=True, check=False, cwd=tree
        )
        if done.returncode:
            raise TreeError(f"{' '.join(map(str, arguments[:2]))}: {done.stderr[-3000:]}")
        return json.loads(zlib.decompress(base64.b64decode(done.stdout.split()[-1])))

    def text(self, digest: str) -> str:
        """One of them."""
        return zlib.decompress((self.texts / digest).read_bytes()).decode()


def units(only: str, limit: int) -> list[str]:
    """What each tree is asked for, the longest first."""
    few = NETWORKS[: limit or None]
    networks = [f"network {n}" for n in sorted(few, key=lambda n: n not in ("yolov4", "inception_v3", "segformer_b0"))]
    cuda = [*networks, *(f"cases {k}/{PARTS}" for k in range(PARTS))]
    return {"cpu": ["cpu"], "cuda": cuda, "": [*cuda, "cpu"]}[only]


def made(work: Work, trees: Sequence[Path], wanted: Sequence[str]) -> list[dict[str, Item]]:
    """Everything that each tree makes, by name."""

    def one(pair: tuple[Path, str]) -> dict[str, Item]:
        tree, unit = pair
        try:
            items: dict[str, Item] = work.ask(tree, "--emit", unit)
        except TreeError as error:
            return {f"{unit} | made": {"rest": {"error": str(error)}}}
        return items

    pairs = [(tree, unit) for unit in wanted for tree in trees]
    found: list[dict[str, Item]] = [{} for _ in trees]
    with ThreadPoolExecutor(work.jobs) as pool:
        for number, items in enumerate(pool.map(one, pairs)):
            found[number % len(trees)] |= items
    return found


def same_but_text(old: Item, new: Item) -> bool:
    """What both trees know beside the text; a field that only one of them has says nothing."""
    both = old["rest"].keys() & new["rest"].keys()
    known = all(old["rest"][k] == new["rest"][k] for k in both) if both else old["rest"] == new["rest"]
    return known and all(old.get(k) == new.get(k) for k in OPTIONS)


def cubins(work: Work, trees: Sequence[Path], items: Sequence[Iterable[Item]]) -> list[dict[str, str]]:
    """Per tree: the cubin's digest by `job` of an item."""
    found: list[dict[str, str]] = []
    for tree, its in zip(trees, items, strict=True):
        jobs = list({job(i): i for i in its}.values())
        path = work.folder / "jobs.json"
        path.write_text(json.dumps(jobs))
        digests = work.ask(tree, "--cubins", path, "--threads", str(work.jobs)) if jobs else []
        found.append({job(i): digest for i, digest in zip(jobs, digests, strict=True)})
    return found


def job(item: Item) -> str:
    """What decides about a cubin, in one tree."""
    return json.dumps([item[k] for k in ("text", *OPTIONS)])


def compare(old: Mapping[str, Item], new: Mapping[str, Item], cubin: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """One of `KINDS` for each name."""
    found: dict[str, str] = {}
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if a is None or b is None:
            found[name] = "new" if a is None else "gone"
        elif not same_but_text(a, b):
            found[name] = "changed"
        elif a.get("text") == b.get("text"):
            found[name] = "identical"
        else:
            digests = [of.get(job(x)) if "arch" in x else None for of, x in zip(cubin, (a, b), strict=True)]
            equal = digests[0] is not None and digests[0] == digests[1] and not digests[0].startswith("refused")
            found[name] = "text only" if equal else "changed"
    return found


def to_compile(old: Mapping[str, Item], new: Mapping[str, Item], *, every: bool) -> tuple[list[Item], list[Item]]:
    """Of each tree the kernels for a GPU whose cubins are asked for."""
    differ = [n for n in sorted(old.keys() & new.keys()) if old[n].get("text") != new[n].get("text")]
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


def table(kinds: Mapping[str, str]) -> Iterator[str]:
    """Counts per group (a file of cases, a network on a GPU, the plans), and in all."""
    groups: dict[str, Counter[str]] = {}
    for name, kind in kinds.items():
        place, _, rest = name.partition(" | ")
        group = "plans" if rest == "plan" else place.split()[0] if place.startswith("test_") else place
        groups.setdefault(group, Counter())[kind] += 1
    wide = max(map(len, groups), default=0)
    yield " " * wide + "".join(f"{k:>11}" for k in KINDS)
    for group, count in [*groups.items(), ("in all", sum(groups.values(), Counter()))]:
        yield f"{group:{wide}}" + "".join(f"{count[k]:11}" for k in KINDS)


def main() -> None:
    """Compare; exit 1 on any difference but of text only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="a commit, or a folder with another checkout")
    parser.add_argument("--only", choices=("cpu", "cuda"), default="", help="kernels for this alone")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="N networks, N cases of each file")
    parser.add_argument("--cubins", choices=("changed", "all"), default="changed", help="which texts are compiled")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at once")
    parser.add_argument("--cache", type=Path, help="folder of cubins (default: in the user's cache)")
    given = parser.parse_args()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "replay"
    with tempfile.TemporaryDirectory(prefix="weft-replay-") as folder:
        work = Work(Path(folder), (given.cache or home).resolve(), given.jobs)
        if Path(given.base).is_dir():
            sys.exit(replay(work, Path(given.base).resolve(), given))
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), given.base], cwd=ROOT, check=True)
        try:
            code = replay(work, tree, given)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    sys.exit(code)


def replay(work: Work, base: Path, given: argparse.Namespace) -> int:
    """Print what differs, and a table; 1 if anything does."""
    trees = base, ROOT
    if given.only != "cpu":
        work.ask(ROOT, "--collect", work.folder / "cases.json", "--limit", str(given.limit))
    old, new = made(work, trees, units(given.only, given.limit))
    wanted = to_compile(old, new, every=given.cubins == "all")
    digests = cubins(work, trees, wanted)
    kinds = compare(old, new, digests)
    for name in [n for n, kind in kinds.items() if kind != "identical"][:MOST]:
        print(f"{kinds[name]}: " + "\n".join(shown(work, name, old.get(name), new.get(name))))
    print("\n".join(table(kinds)))
    refused = sum(d.startswith("refused") for d in digests[1].values())
    failed = sum("error" in item["rest"] for item in new.values())
    print(f"{sum(map(len, digests))} texts compiled; of this tree {refused} are refused, {failed} cases cannot be made")
    return int(any(kind not in ("identical", "text only") for kind in kinds.values()) or refused + failed > 0)


if __name__ == "__main__":
    main()
