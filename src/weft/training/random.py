"""Random numbers in a graph that follow from one number and a position, in whatever order they are computed.

A call of dropout gets the bits of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) at (seed, number of the call,
position of the element). Forward and backward read one mask, which may be kept or computed again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from weft.errors import UnsupportedError
from weft.frontends.torch import decompositions


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP, _FIRST, _SECOND = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
BITS = 24
"""Of a number between 0 and 1: what an f32 holds exactly."""


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x >> by without its sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64, of int64 that wraps."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def kept_mask(shape: torch.Size, p: float, seed: torch.Tensor, call: int) -> torch.Tensor:
    """True with probability 1 - p, independently for each element and call. `seed` is an int64 scalar."""
    count = shape.numel()
    positions = torch.arange(count, dtype=torch.int64, device=seed.device)
    start = mixed(seed + _signed(call * 0xD1B54A32D192ED03 % (1 << 64)))
    drawn = _shifted(mixed(start + positions * _STEP), 64 - BITS)
    return (drawn >= round(p * (1 << BITS))).reshape(shape)


def _dropout(p: float, call: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def run(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = kept_mask(x.shape, p, seed, call)
        factor = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return x * mask.to(x.dtype) * factor, mask

    return run


def with_seed(gm: fx.GraphModule) -> fx.Node | None:
    """Replace what draws by functions of a further, last argument: its node; None: nothing draws.

    Raises:
        UnsupportedError: a call that draws in another way than dropout [W201].
    """
    graph = gm.graph
    calls = [n for n in graph.nodes if n.op == "call_function" and _draws(n)]
    if not calls:
        return None
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        seed = graph.placeholder("seed")
    like = placeholders[0].meta["val"]
    seed.meta["val"] = torch.zeros((), dtype=torch.int64, device=like.device)
    for number, node in enumerate(calls):
        _replace(graph, node, seed, number)
    graph.eliminate_dead_code()
    return seed


def _draws(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if str(target) == "aten.native_dropout.default":
        return True
    dropout = {a.name: k for k, a in enumerate(target._schema.arguments)}.get("dropout_p")
    if dropout is not None and dropout < len(node.args) and node.args[dropout] == 0.0:
        return False
    reason = "draws random numbers: a compiled step can draw the masks of dropout alone"
    raise UnsupportedError(op=str(target), reason=reason)


def _replace(graph: fx.Graph, node: fx.Node, seed: fx.Node, number: int) -> None:
    x, p, train = node.args
    if train is False:
        p = 0.0
    assert isinstance(x, fx.Node)
    value = x.meta["val"]
    with value.fake_mode:
        fake = value.fake_mode.from_tensor(seed.meta["val"])
        traced = make_fx(_dropout(float(p), number), decomposition_table=decompositions())(value, fake)  # type: ignore[arg-type]
    inner = [n for n in traced.graph.nodes if n.op == "placeholder"]
    with graph.inserting_before(node):
        found = graph.graph_copy(traced.graph, {inner[0]: x, inner[1]: seed})
    for user in list(node.users):
        user.replace_all_uses_with(found[user.args[1]])  # type: ignore[index,arg-type]
        graph.erase_node(user)
    graph.erase_node(node)
