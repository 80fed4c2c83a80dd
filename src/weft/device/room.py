"""How much memory a process here may still take: of the machine, or of the control group that it is in."""

from __future__ import annotations

from pathlib import Path

_GROUPS = (("memory.max", "memory.current", "memory.stat"),
           ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"))  # fmt: skip
"""Limit, use and its parts, of version 2 and 1."""
_CACHED = ("inactive_file", "total_inactive_file")
"""Of the use, what is given back when it is asked for."""


def free_bytes(root: Path = Path("/"), *, unknown: int = 1 << 30) -> int:
    """Bytes that can be taken without swapping; `unknown` where the system does not say. `root`: of proc and sys."""
    found = [_available(root), *(_left(root / "sys/fs/cgroup", *names) for names in _GROUPS)]
    return min((x for x in found if x is not None), default=unknown)


def _available(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "MemAvailable:" and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def _left(group: Path, limit: str, use: str, parts: str) -> int | None:
    most, used = _text(group / limit).strip(), _text(group / use).strip()
    if not (most.isdigit() and used.isdigit()) or int(most) >= 1 << 60:  # version 1 writes a huge number for none
        return None
    stat = dict(line.split()[:2] for line in _text(group / parts).splitlines() if len(line.split()) == 2)
    cached = next((int(stat[name]) for name in _CACHED if stat.get(name, "").isdigit()), 0)
    return max(int(most) - int(used) + cached, 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
