"""Optionals, as far as it is known while importing whether they hold something; none leaves the importer."""

from __future__ import annotations

import numpy as np

from weft.frontends.onnx.call import ABSENT, Call, Handler, Result
from weft.ir.declined import Declined


def _has_element(c: Call) -> Result:
    return c.b.constant(np.array(bool(c.operands) and c.operands[0] != ABSENT))


def _get_element(c: Call) -> Result:
    return (c.operands[0],)


def _optional(c: Call) -> Result:
    if not c.operands or c.operands[0] == ABSENT:
        return Declined("an optional without an element")
    return (c.operands[0],)


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "Optional"): _optional,
    ("", "OptionalGetElement"): _get_element,
    ("", "OptionalHasElement"): _has_element,
}
