"""Writes the table of README.md from the manifests, what the compiler says of each kernel, and the record of an H200.

    python -m benchmarks.best_effort.table [--check]

`--check` writes nothing, and fails where README.md holds another table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.best_effort.jobs import Stage, load, names
from benchmarks.harness.record import RESULTS, lines_of
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.cuda.resources import Resources
from weft.ir.declined import Declined

README = Path(__file__).with_name("README.md")
RECORD = RESULTS / "nvidia-h200" / "best-effort.jsonl"
ARCH = "sm_90a"
BEGIN, END = "<!-- table: best-effort -->", "<!-- end -->"
HEAD = (
    "kernel", "operation", "limited by", "grid", "block", "threads", "shared bytes", f"registers, {ARCH}",
    "estimate µs", "of", "measured µs",
)  # fmt: skip


def case(job: str, stage: Stage, stages: int) -> str:
    """What the record calls a stage of a job."""
    return job if stages == 1 else f"{job}/{stage.name}"


def table(nvrtc: Nvrtc, record: Path = RECORD, cache_dir: Path | None = None) -> str:
    """All kernels, a line each, in Markdown.

    Raises:
        ToolchainError: a kernel is refused.
    """
    measured = {str(x["case"]): x for x in lines_of(record) if x.get("record") == "case"}
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for job in names():
        stages = load(job).stages
        for stage in stages:
            used = nvrtc.compile(stage.text, arch=ARCH, cache_dir=cache_dir).of(stage.manifest.entry)
            name = case(job, stage, len(stages))
            seen = measured.get(name, {})
            told = "failed" if "failed" in seen else f"{seen['us']}" if seen else "not yet"
            lines.append("| " + " | ".join([name, *_cells(stage, used), told]) + " |")
    return "\n".join(lines)


def _cells(stage: Stage, used: Resources) -> Iterator[str]:
    about = stage.about
    yield f"{about['operation']}" + (f" ({about['source']})" if "source" in about else "")
    yield str(about["limited_by"])
    yield " x ".join(map(str, stage.manifest.grid))
    yield " x ".join(map(str, stage.manifest.block))
    yield str(stage.manifest.threads)
    yield str(used.shared_bytes + stage.manifest.dynamic_shared_bytes)
    yield str(used.registers)
    yield f"{about['estimate_us']}"
    yield str(about["work"])


def replaced(text: str, made: str) -> str:
    """A document with that table between its marks.

    Raises:
        ValueError: it has not both marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README}: the table belongs between {BEGIN} and {END}, which are not both there")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    """Write or check; the exit status is 1 where the table is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the table is not this one")
    given = parser.parse_args()
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"benchmarks.best_effort.table: {nvrtc.reason}")
    old = README.read_text()
    new = replaced(old, table(nvrtc))
    if given.check and new != old:
        sys.exit(f"{README} is not what the manifests and the record say: run python -m benchmarks.best_effort.table")
    if not given.check:
        README.write_text(new)


if __name__ == "__main__":
    main()
