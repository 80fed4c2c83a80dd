"""The table covers what torch calls the core of ATen."""

from __future__ import annotations

from typing import Any

import torch

from weft.frontends.torch.decompose import decompositions
from weft.frontends.torch.table import KEPT, OPAQUE, REFUSED, STATIC, TABLE, WITHOUT_EFFECT


def core_overloads() -> Any:
    """Names of all overloads tagged core, but for those that are refused by their tag: sizes that depend on data."""
    depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if overload is not None and torch.Tag.core in overload.tags and depends.isdisjoint(overload.tags):
            found.add(str(overload))
    return found


def test_every_core_overload_is_handled_or_named() -> None:
    core = core_overloads()
    assert len(core) > 185
    assert core - TABLE.keys() - OPAQUE.keys() - REFUSED.keys() - STATIC == set()


def test_no_overload_is_in_two_lists() -> None:
    lists = [set(TABLE), set(OPAQUE), set(REFUSED), set(STATIC), set(WITHOUT_EFFECT), set(KEPT)]
    assert sum(map(len, lists)) == len(set().union(*lists))


def test_every_reason_is_said() -> None:
    assert all({**OPAQUE, **REFUSED, **KEPT}.values())


def test_every_name_is_an_overload() -> None:
    for name in (*TABLE, *OPAQUE, *REFUSED, *STATIC, *WITHOUT_EFFECT, *KEPT):
        namespace, op, overload = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), op)
        assert str(getattr(packet, overload)) == name


def test_torch_does_not_take_apart_what_a_handler_takes_whole() -> None:
    left = {str(op) for op in decompositions()}
    assert left.isdisjoint(TABLE)
    assert left.isdisjoint(KEPT)
    assert "aten.silu_backward.default" in left
