"""How much memory is free: of the machine, or of the group that limits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.device.room import free_bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    return tmp_path


def test_the_machine(root: Path) -> None:
    assert free_bytes(root) == 4000 * 1024


def test_nothing_is_said(tmp_path: Path) -> None:
    assert free_bytes(tmp_path, unknown=7) == 7
    assert free_bytes() > 0


@pytest.mark.parametrize(
    ("limit", "use", "stat", "file"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ],
)
def test_a_group_that_limits(root: Path, limit: str, use: str, stat: str, file: str) -> None:
    group = root / "sys" / "fs" / "cgroup"
    (group / "memory").mkdir(parents=True)
    (group / limit).write_text("1000000\n")
    (group / use).write_text("900000\n")
    assert free_bytes(root) == 100000
    (group / stat).write_text(f"anon 5\n{file} 50000\n")
    assert free_bytes(root) == 150000
    (group / use).write_text("2000000\n")
    assert free_bytes(root) == 0


@pytest.mark.parametrize("none", ["max\n", "9223372036854771712\n", ""])
def test_a_group_without_a_limit(root: Path, none: str) -> None:
    group = root / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(none)
    (group / "memory.current").write_text("900000\n")
    assert free_bytes(root) == 4000 * 1024
