"""Plans that were chosen before: found by everything that decided about them, linked without a single trial.

The key is the whole canonical description (graph text with digests of the constants, options that matter, machine,
versions); its SHA-256 is only the file's name, and the text is compared on every hit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from weft.device.files import doing_without, find_private, publish
from weft.errors import ArtifactError
from weft.ir.graph import Graph
from weft.ir.text import print_graph
from weft.kernels.codec import Json
from weft.kernels.plan import Plan
from weft.options import Options
from weft.runtime.artifact import plan_from_json, plan_to_json

SCHEMA = 2


def plan_key(graph: Graph, options: Options, facts: Mapping[str, str]) -> str:
    """Everything that decides which plan is best, as text."""
    chosen = {
        name: getattr(options, name)
        for name in (
            "device", "threads", "strict", "max_members", "max_inputs", "max_reductions", "max_candidates",
            "keep_per_problem", "allow_library", "allow_generated", "memory_limit_bytes",
        )
    }  # fmt: skip
    head = json.dumps({"schema": SCHEMA, "options": chosen, "facts": dict(facts)}, sort_keys=True)
    return head + "\n" + print_graph(graph)


def _file(cache: Path, key: str) -> Path:
    return cache / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def recall(cache: Path | None, key: str, budget_s: float) -> tuple[Plan, Json] | None:
    """The plan stored under this key with its record; None if there is none or it is damaged.

    A plan whose search was cut short is passed over when the caller now gives more time than it had.
    """
    data = find_private(_file(cache, key)) if cache is not None else None
    if data is None:
        return None
    try:
        body = json.loads(data)
        payload = cast("str", body["payload"])
        if hashlib.sha256(payload.encode()).hexdigest() != body["sha256"]:
            return None
        stored = json.loads(payload)
        if stored["key"] != key or (not stored["complete"] and budget_s > stored["budget_s"]):
            return None
        return plan_from_json(stored["plan"]), stored["record"]
    except (ValueError, KeyError, TypeError, ArtifactError):
        return None


def remember(cache: Path | None, key: str, plan: Plan, record: Json, *, complete: bool, budget_s: float) -> None:
    """Store a plan; a cache that cannot be written is passed over. `complete`: the search ended by itself.

    `budget_s`: what the search had; 0 for a plan that hangs on guesses, so that whoever has a budget tunes.
    """
    if cache is None:
        return
    content = {"key": key, "complete": complete, "budget_s": budget_s, "plan": plan_to_json(plan), "record": record}
    payload = json.dumps(content)
    body = {"sha256": hashlib.sha256(payload.encode()).hexdigest(), "payload": payload}
    with doing_without(cache):
        publish(_file(cache, key), json.dumps(body).encode())
