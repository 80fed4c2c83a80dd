"""Operands for calls of attention and of its gradients, and what these come to in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.ir import attrs as a
from weft.ir.graph import Graph, Node, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import round_to
from weft.kernels.candidate import Problem

Array = npt.NDArray[Any]
OPERANDS = {"weft::attention": 3, "weft::attention_backward": 6}


def drawn(problem: Problem, seed: int = 0) -> list[Array]:
    """Operands; of gradients as a forward pass leaves them: the result and the logarithms are those of Q, K and V."""
    graph = problem.graph
    rng = np.random.default_rng(seed)
    given = {i: rng.standard_normal(graph.type_of(i).shape).astype(np.float32) for i in graph.inputs}
    call, causal, scale = _call(graph)
    if len(call.inputs) == OPERANDS["weft::attention_backward"]:
        at = {n: np.asarray(round_to(x, graph.type_of(n).dtype), np.float64) for n, x in given.items()}
        q, k, v = (_value(graph, n, at) for n in call.inputs[1:4])
        result, sums = _attention(q, k, v, causal, scale)
        for node, x in zip(call.inputs[4:], (result, sums), strict=True):
            source = _input(graph, node)
            given[source] = x.astype(np.float32).reshape(graph.type_of(source).shape)
    return [np.asarray(round_to(given[i], graph.type_of(i).dtype), np.float32) for i in graph.inputs]


def exact(problem: Problem, inputs: list[Array]) -> list[Array]:
    """The problem's outputs in float64."""
    graph = problem.graph
    at = {n: np.asarray(x, np.float64) for n, x in zip(graph.inputs, inputs, strict=True)}
    call, causal, scale = _call(graph)
    x = [_value(graph, n, at) for n in call.inputs]
    is_forward = len(x) == OPERANDS["weft::attention"]
    found = _attention(x[0], x[1], x[2], causal, scale) if is_forward else _gradients(x, causal, scale)
    for i, n in enumerate(graph.nodes):
        if isinstance(n.attrs, a.OpaqueAttrs):
            at[i] = found[n.attrs.result]
    return [_value(graph, o, at) for o in graph.outputs]


def _attention(q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, ...]:
    scores = _scores(q, k, causal, scale)
    most = scores.max(-1, keepdims=True)
    sums = np.log(np.exp(scores - most).sum(-1)) + most[..., 0]
    return np.einsum("bhqk,bkhd->bqhd", np.exp(scores - sums[..., None]), v), sums


def _gradients(operands: list[Array], causal: bool, scale: float) -> tuple[Array, ...]:
    g, q, k, v, result, sums = operands
    weights = np.exp(_scores(q, k, causal, scale) - sums[..., None])
    delta = (g * result).sum(-1).transpose(0, 2, 1)[..., None]
    inner = weights * (np.einsum("bqhd,bkhd->bhqk", g, v) - delta) * scale
    return (
        np.einsum("bhqk,bkhd->bqhd", inner, k),
        np.einsum("bhqk,bqhd->bkhd", inner, q),
        np.einsum("bhqk,bqhd->bkhd", weights, g),
    )


def _scores(q: Array, k: Array, causal: bool, scale: float) -> Array:
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf) if causal else scores


def _value(graph: Graph, node: NodeId, known: Mapping[NodeId, Array]) -> Array:
    """A value of which some are known, and others made of those by moving elements."""
    n = graph.nodes[node]
    if node in known:
        return known[node]
    parts = [_value(graph, i, known) for i in n.inputs]
    if isinstance(n.attrs, a.SliceAttrs):
        return parts[0][tuple(slice(s, s + size) for s, size in zip(n.attrs.starts, n.attrs.sizes, strict=True))]
    return np.concatenate(parts, n.attrs.axis) if isinstance(n.attrs, a.ConcatAttrs) else parts[0].reshape(n.type.shape)


def _input(graph: Graph, node: NodeId) -> NodeId:
    """What a value is another shape of."""
    while graph.nodes[node].prim is Prim.RESHAPE:
        node = graph.nodes[node].inputs[0]
    return node


def _call(graph: Graph) -> tuple[Node, bool, float]:
    """The call, whether it is causal, and its scale."""
    node = next(n for n in graph.nodes if n.prim is Prim.OPAQUE)
    assert isinstance(node.attrs, a.OpaqueAttrs)
    causal, scale = json.loads(node.attrs.payload)["args"][-2:]
    return node, bool(causal), float(scale)
