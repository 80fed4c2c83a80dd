"""Huge pages are asked for, never needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from weft.device.pages import HUGE, ask_for_huge_pages


def huge_kib() -> int:
    """What this process has in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")), 0)


def test_less_than_a_page_is_not_asked_for() -> None:
    memory = torch.empty(2 * HUGE, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE
    assert not ask_for_huge_pages(memory.data_ptr() + start, HUGE - 1)
    assert not ask_for_huge_pages(memory.data_ptr() + start + 1, HUGE)


def test_memory_that_is_nobodys_is_refused() -> None:
    assert not ask_for_huge_pages(HUGE, HUGE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_the_system_gives_them_where_it_has_them() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    memory = torch.empty(17 * HUGE, dtype=torch.uint8)
    before = huge_kib()
    given = ask_for_huge_pages(memory.data_ptr(), memory.numel())
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * memory.numel()
    if mode.exists() and "[never]" not in mode.read_text():
        assert given and huge_kib() >= before
    else:
        assert huge_kib() <= before
