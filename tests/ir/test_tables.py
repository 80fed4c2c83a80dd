from __future__ import annotations

from collections.abc import Set as AbstractSet

import pytest

from weft.ir.attrs import ATTRS
from weft.ir.prims import ARITY, CATEGORY, Prim
from weft.ir.reference import MEANING
from weft.ir.shapes import SHAPE_RULES
from weft.ir.work import FLOPS, READ_BYTES, TRANSCENDENTALS, WRITTEN_BYTES

TABLES = {
    "attrs": ATTRS.keys(),
    "arity": ARITY.keys(),
    "category": CATEGORY.keys(),
    "shapes": SHAPE_RULES.keys(),
    "meaning": MEANING.keys(),
    "flops": FLOPS.keys(),
    "transcendentals": TRANSCENDENTALS.keys(),
    "read": READ_BYTES.keys(),
    "written": WRITTEN_BYTES.keys(),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_primitive_has_a_row(table: str) -> None:
    rows: AbstractSet[Prim] = TABLES[table]
    assert rows == set(Prim)
