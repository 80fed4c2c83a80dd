"""In-place calls that are as good as functional ones, so that a program need not be traced again.

Exported programs keep `relu_` and friends. Making them functional is torch's job (`run_decompositions`, seconds for a
large network); but where the written tensor is fresh and nothing aliases it, the call may be read as the functional
overload whose result stands for the tensor from then on. Anything less clear is left to torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

_FRESH_COMPOSITES = frozenset(
    {
        "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.conv_transpose1d.default",
        "aten.conv_transpose2d.input", "aten.conv_transpose3d.input", "aten.batch_norm.default",
        "aten.linear.default", "aten.layer_norm.default", "aten.group_norm.default", "aten.instance_norm.default",
        "aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default",
        "aten.adaptive_avg_pool2d.default", "aten.upsample_nearest2d.vec", "aten.upsample_bilinear2d.vec",
    }
)  # fmt: skip
"""Composite overloads that always make a new tensor; others (reshape, dropout) may hand back their operand."""


def is_fresh(target: object) -> bool:
    """Whether every result of an operator is a new tensor."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if str(target) in _FRESH_COMPOSITES:
        return True
    schema = target._schema
    key = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(key, "CompositeImplicitAutograd")
    marked = any(x.alias_info is not None for x in (*schema.arguments, *schema.returns))
    # _unsafe_view hands its operand's memory on without saying so
    return not composite and not marked and "_unsafe" not in schema.name


def functional_overload(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """`aten.relu.default` of `aten.relu_.default`; None where the first argument is not the only one written."""
    schema = target._schema
    written = [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    name = schema.name.partition("::")[2]
    if written != ["self"] or schema.arguments[0].name != "self" or not name.endswith("_") or name.endswith("__"):
        return None
    return _lookup(name[:-1], target._overloadname)


def _lookup(name: str, overload: str) -> torch._ops.OpOverload | None:
    try:
        found = getattr(getattr(torch.ops.aten, name), overload)
    except AttributeError:
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


@dataclass(frozen=True, slots=True)
class InPlace:
    """An in-place call read as a functional one."""

    overload: torch._ops.OpOverload
    names: tuple[fx.Node, ...]
    """Nodes that are the written tensor: they stand for the new value from here on."""


def functional_forms(graph: fx.Graph) -> Mapping[fx.Node, InPlace] | None:
    """How to read each in-place call; None where one of them cannot be read so."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    root: dict[fx.Node, fx.Node] = {}
    names: dict[fx.Node, list[fx.Node]] = {}
    """For each written tensor all nodes that are that tensor."""
    found: dict[fx.Node, InPlace] = {}
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if not target._schema.is_mutable:
            continue
        functional = functional_overload(target)
        written = node.args[0] if node.args else None
        if functional is None or not isinstance(written, fx.Node):
            return None
        first = root.get(written, written)
        if first.op != "call_function" or not is_fresh(first.target) or isinstance(first.meta.get("val"), list | tuple):
            return None
        same = names.setdefault(first, [first])
        readers = (user for name in same for user in name.users if user not in found)
        if any(place[user] < place[node] and not is_fresh(user.target) for user in readers):
            return None
        found[node] = InPlace(functional, tuple(same))
        same.append(node)
        root[node] = first
    return found
