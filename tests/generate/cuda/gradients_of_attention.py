"""Operands for gradients of attention, and what these come to in float64."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.ir import attrs as a
from weft.ir.graph import Graph, Node, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import round_to
from weft.kernels.candidate import Problem

Array = npt.NDArray[Any]


def drawn(problem: Problem, seed: int = 0) -> list[Array]:
    """Operands as a forward pass leaves them: the result and the logarithms are those of Q, K and V."""
    graph = problem.graph
    call = json.loads(_attrs(problem).payload)
    rng = np.random.default_rng(seed)
    given = {i: rng.standard_normal(graph.type_of(i).shape).astype(np.float32) for i in graph.inputs}
    nodes = _call(graph).inputs
    order = [_seen(graph, n) for n in nodes]
    shapes = [graph.type_of(n).shape for n in nodes]
    values = [
        np.asarray(round_to(given[n], graph.type_of(n).dtype), np.float64).reshape(shape)
        for n, shape in zip(order, shapes, strict=True)
    ]
    causal, scale = call["args"][6:]
    scores = _scores(values[1], values[2], causal, scale)
    most = scores.max(-1, keepdims=True)
    sums = np.log(np.exp(scores - most).sum(-1)) + most[..., 0]
    result = np.einsum("bhqk,bkhd->bqhd", np.exp(scores - sums[..., None]), values[3])
    given[order[4]] = result.astype(np.float32).reshape(graph.type_of(order[4]).shape)
    given[order[5]] = sums.astype(np.float32)
    return [np.asarray(round_to(given[i], graph.type_of(i).dtype), np.float32) for i in graph.inputs]


def exact(problem: Problem, inputs: list[Array]) -> list[Array]:
    """The problem's outputs in float64."""
    graph = problem.graph
    at = {n: np.asarray(x, np.float64) for n, x in zip(graph.inputs, inputs, strict=True)}
    g, q, k, v, result, sums = (at[_seen(graph, n)].reshape(graph.type_of(n).shape) for n in _call(graph).inputs)
    causal, scale = json.loads(_attrs(problem).payload)["args"][6:]
    weights = np.exp(_scores(q, k, causal, scale) - sums[..., None])
    delta = (g * result).sum(-1).transpose(0, 2, 1)[..., None]
    inner = weights * (np.einsum("bqhd,bkhd->bhqk", g, v) - delta) * scale
    found = (
        np.einsum("bhqk,bkhd->bqhd", inner, k),
        np.einsum("bhqk,bqhd->bkhd", inner, q),
        np.einsum("bhqk,bqhd->bkhd", weights, g),
    )
    ends = [(o, graph.nodes[_seen(graph, o)].attrs) for o in graph.outputs]
    return [found[x.result].reshape(graph.type_of(o).shape) for o, x in ends if isinstance(x, a.OpaqueAttrs)]


def _scores(q: Array, k: Array, causal: bool, scale: float) -> Array:
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf) if causal else scores


def _attrs(problem: Problem) -> a.OpaqueAttrs:
    found = _call(problem.graph).attrs
    assert isinstance(found, a.OpaqueAttrs)
    return found


def _call(graph: Graph) -> Node:
    return graph.nodes[_seen(graph, graph.outputs[0])]


def _seen(graph: Graph, node: NodeId) -> NodeId:
    while graph.nodes[node].prim is Prim.RESHAPE:
        node = graph.nodes[node].inputs[0]
    return node
