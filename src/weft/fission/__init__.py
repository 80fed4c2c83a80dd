"""Operators of networks → primitives. One rule per operator; no framework is known here.

`RULES` names every rule; `apply` runs one and records which operator its nodes came from. A rule that does not apply
returns `Declined` with its reason, and the front end keeps the operator opaque. How to add one: docs/writing-a-rule.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from weft.errors import InvalidGraphError
from weft.fission.registry import RULES
from weft.fission.rule import ABSENT, Result, Rule
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId, Origin, OriginParam
from weft.ir.shapes import ShapeError

__all__ = ["ABSENT", "RULES", "Result", "Rule", "apply"]
_SIGNATURES = {name: inspect.signature(rule) for name, rule in RULES.items()}
"""Made once: a model has thousands of operators."""


def apply(
    b: GraphBuilder,
    name: str,
    operands: Sequence[NodeId],
    params: Mapping[str, OriginParam],
    *,
    source: str = "",
    location: str = "",
) -> tuple[NodeId, ...] | Declined:
    """Take one operator apart: the nodes of its results, or why it stays whole.

    An absent optional operand is `ABSENT`; trailing ones may be left out. Operands or parameters that do not fit the
    rule (wrong shapes, unknown keywords) decline too: it is then the framework that judges the operator.
    """
    rule = RULES.get(name)
    if rule is None:
        return Declined(f"no rule {name!r}")
    given = dict(params)
    try:
        _SIGNATURES[name].bind(b, *operands, **given)
    except TypeError as error:
        return Declined(f"rule {name} does not take these operands: {error}")
    origin = Origin(name, tuple(sorted(given.items())), tuple(operands), (), source, location)
    try:
        with b.origin(origin) as index:
            result = rule(b, *operands, **given)
    except (InvalidGraphError, ShapeError) as error:
        problem = str(error.details.get("problem", error)) if isinstance(error, InvalidGraphError) else str(error)
        return Declined(f"{name}: {problem}")
    if isinstance(result, Declined):
        return result
    results = result if isinstance(result, tuple) else (result,)
    b.set_origin_results(index, results)
    return results
