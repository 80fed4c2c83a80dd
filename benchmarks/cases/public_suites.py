"""Public suites of CUDA kernels, each at a pinned commit, and which of their files are looked at.

Which files those are was written down before any of them was tried: all of a suite, or, of the large one, every fifth
folder in alphabetical order.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("cu", "cuh", "h", "hh", "hpp", "hxx", "inl", "inc", "c", "cc", "cpp", "cxx")
"""How the names of files that are fetched end; data stay where they are."""
_MARK = ".commit"


@dataclass(frozen=True, slots=True)
class Suite:
    """A repository."""

    url: str
    commit: str
    within: str
    """Folders of the sources: a glob from the repository's own."""
    every: int = 1
    """Of these folders in alphabetical order: the first, and each that is so many behind the one before."""
    include: tuple[str, ...] = ()
    """Folders that its makefiles name for `#include`, besides a file's own and the one above."""

    def folders(self, home: Path) -> list[Path]:
        """The folders that are looked at, of a suite that lies at `home`."""
        return sorted(p for p in home.glob(self.within) if p.is_dir() and not p.is_symlink())[:: self.every]


SUITES = {
    "parboil": Suite(
        "https://github.com/abduld/Parboil", "a4c63da28f45699e9a274cbc49af3e067162aa2b", "benchmarks",
        include=("common/include", "common"),
    ),
    "rodinia": Suite(
        "https://github.com/yuhc/gpu-rodinia", "9c10d3ea16ddba2ba057cc3951a9efc4c2cc18a4", "cuda",
        include=("common/include", "common"),
    ),
    "polybench": Suite(
        "https://github.com/sgrauerg/polybenchGpu", "5584aaa7d0be810ff5eb0b61c49fb64ecc81ba4c", "CUDA",
        include=("common",),
    ),
    "hecbench": Suite(
        "https://github.com/zjin-lcf/HeCBench", "f27000a5188f8ac79bd43fc95a1b3f890c18823d", "src/*-cuda", every=5,
        include=("src/include",),
    ),
}  # fmt: skip


def fetch(name: str, folder: Path, mirror: Path | None = None) -> Path:
    """The sources of a suite at its commit, beneath the folder; fetched if they are not there.

    `mirror`: a git directory that has the commit, in place of the network; it is only read.

    Raises:
        subprocess.CalledProcessError: git cannot reach the repository, or it has no such commit.
    """
    suite, home = SUITES[name], (folder / name).resolve()
    mark = home / _MARK
    if mark.is_file() and mark.read_text().strip() == suite.commit:
        return home
    home.mkdir(parents=True, exist_ok=True)
    if mirror is None:
        _git(home, home / ".git", "init", "-q")
        _git(home, home / ".git", "fetch", "-q", "--depth", "1", suite.url, suite.commit)
    wanted = [f":(glob)**/*.{ending}" for ending in SOURCES]
    _git(home, mirror or home / ".git", "checkout", "-q", "-f", suite.commit, "--", *wanted, empty=suite.commit)
    mark.write_text(suite.commit + "\n")
    return home


def _git(home: Path, repository: Path, *command: str, empty: str = "") -> None:
    """`empty`: patterns that no file of this commit matches are left out, as git takes them for mistakes."""
    environment = {**os.environ, "GIT_INDEX_FILE": str(home / ".index"), "GIT_TERMINAL_PROMPT": "0"}
    git = ["git", f"--git-dir={repository.resolve()}", f"--work-tree={home}"]
    arguments = list(command)
    if empty:
        shown = subprocess.run([*git, "ls-tree", "-r", "--name-only", empty], cwd=home, env=environment, check=True,
                               capture_output=True, text=True, errors="replace")  # fmt: skip
        endings = {line.rpartition(".")[2].strip('"') for line in shown.stdout.splitlines()}
        arguments = [x for x in arguments if not x.startswith(":(glob)") or x.rpartition(".")[2] in endings]
    subprocess.run([*git, *arguments], cwd=home, env=environment, check=True)


def files(name: str, home: Path) -> Iterator[Path]:
    """Every `.cu` file that is looked at, in alphabetical order."""
    for folder in SUITES[name].folders(home):
        yield from sorted(p for p in folder.rglob("*.cu") if p.is_file() and not p.is_symlink())
