"""Table of what compute-sanitizer says of fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.record_tables import markdown, note, records

GPU = "nvidia-h200"
TOOLS = ("memcheck", "racecheck")
Line = Mapping[str, Any]


def _counts(rows: Sequence[Line]) -> list[str]:
    """Kernels that ran, those without a report, those whose reports are explained, those with others, failed ones."""
    ran = [x for x in rows if "declined" not in x and "failed" not in x]
    named = [x for x in ran if x["errors"]]
    open_ = [x for x in named if not x["explained"]]
    shown = [len(ran), len(ran) - len(named), len(named) - len(open_), len(open_), sum("failed" in x for x in rows)]
    return [str(n) for n in shown]


def sanitize_rows(lines: Sequence[Line]) -> list[list[str]]:
    """A row for each template, and one for all."""
    cases = [x for x in lines if x.get("record") == "case"]
    templates = list(dict.fromkeys(str(x["case"]).split("/")[0] for x in cases))
    rows = []
    for name in [*sorted(templates), ""] if templates else []:
        own = [x for x in cases if not name or str(x["case"]).split("/")[0] == name]
        parts = [str(x["case"]).split("/") for x in own if "declined" not in x]
        wide = [f"{len({p[1] for p in parts})}", f"{len({p[2] for p in parts})}"]
        counts = [n for tool in TOOLS for n in _counts([x for x in own if x["tool"] == tool])]
        rows.append([name or "**all**", *wide, *counts])
    return rows


def sanitized() -> str:
    """Fused kernels by template; below them what is explained, and what is not."""
    lines = records(GPU, "colocate-sanitize")
    rows = sanitize_rows(lines)
    if not rows:
        return "_not measured yet: `python -m tools.sanitize_pairs --out -`_"
    head = ["template of LC", "bindings", "BE kernels"]
    head += [f"{tool}: {x}" for tool in TOOLS for x in ("kernels", "clean", "explained", "other", "failed")]
    said = []
    for x in lines:
        if "failed" in x:
            said.append(f"`{x['case']}`, {x['tool']}: failed: {x['failed']}")
        elif x.get("errors") and not x["explained"]:
            said.append(f"`{x['case']}`, {x['tool']}: {x['errors']} reports: {x['said'][:200]}")
    whys = {f"{x['tool']}: {x['explained']}" for x in lines if x.get("explained")}
    below = "".join(f"\n\n{text}" for text in [*sorted(whys), *said])
    return markdown(head, rows) + below + note(lines)


TABLES: dict[str, Callable[[], str]] = {"colocate-sanitize": sanitized}
