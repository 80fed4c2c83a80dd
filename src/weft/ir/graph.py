"""Flat, immutable, interned graphs of primitives.

Nodes stand in topological order and are named by their position; a set of nodes is an integer bit mask.
A `Graph` is only made by a `GraphBuilder`, which infers types and returns the old node for an equal new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from weft.errors import InvalidGraphError
from weft.ir import attrs as a
from weft.ir.large import hash_all, row_major
from weft.ir.prims import Prim
from weft.ir.shapes import ShapeError, broadcast_shapes, infer
from weft.ir.types import Array, DType, TensorType, round_emulated

NodeId = int
"""Position of a node in its graph."""
Mask = int
"""Bit i is set when node i belongs to the set."""

OriginParam = int | float | bool | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The source operator that a fission rule took apart.

    `rule`, `params` and the operand nodes are enough to name the library call that does the same work;
    they are a hint that candidates built from them must still prove by measurement and verification.
    """

    rule: str
    """Name of the fission rule, e.g. `layer_norm`; empty for a node made by a clean-up."""
    params: tuple[tuple[str, OriginParam], ...] = ()
    """The rule's keyword arguments, sorted by name."""
    operands: tuple[NodeId, ...] = ()
    """Nodes that were the operator's operands; -1 for one that is absent, -2 for one that is no longer there."""
    results: tuple[NodeId, ...] = ()
    """Nodes that are the operator's results; -1 for one that is no longer there."""
    source: str = ""
    """The operator in the user's model, for people only: e.g. `node 'conv_3' (Conv)`, sanitised where shown."""
    location: str = ""
    """File and line, or the file and the node's index, for people only."""


@dataclass(frozen=True, slots=True)
class Node:
    """One primitive applied to earlier nodes."""

    prim: Prim
    inputs: tuple[NodeId, ...]
    attrs: a.Attrs
    type: TensorType
    origin: int = field(default=-1, compare=False)
    """Index into `Graph.origins`; -1 if none."""

    def __hash__(self) -> int:
        """Of what nodes mostly differ in: enumerations are slow to hash, and every clean-up hashes every node."""
        return hash((self.inputs, self.attrs, self.type.shape))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Graph:
    """A closed program: inputs and constants in, outputs out."""

    nodes: tuple[Node, ...]
    inputs: tuple[NodeId, ...]
    """INPUT nodes in the order of the signature."""
    outputs: tuple[NodeId, ...]
    """May repeat, and may name inputs or constants."""
    constants: Mapping[str, Array] = field(repr=False)
    """Data by digest; read-only arrays. A bf16 constant is held as exact float32."""
    origins: tuple[Origin, ...] = field(default=(), repr=False)
    input_names: tuple[str, ...] = ()
    """Names from the model: data, never code, paths or markup."""
    output_names: tuple[str, ...] = ()

    def type_of(self, node: NodeId) -> TensorType:
        """Type of a node's value."""
        return self.nodes[node].type

    def constant(self, node: NodeId) -> Array:
        """Data of a CONSTANT node; KeyError for another."""
        return self.constants[cast("a.ConstantAttrs", self.nodes[node].attrs).digest]

    def users(self) -> tuple[tuple[NodeId, ...], ...]:
        """For each node the nodes that read it, ascending and without repetition."""
        found: list[list[NodeId]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for j in dict.fromkeys(node.inputs):
                found[j].append(i)
        return tuple(map(tuple, found))

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        from weft.ir.text import print_graph

        return print_graph(self)


_NEAR_BITS = 60
_NEAR = (1 << _NEAR_BITS) - 1


def bits(mask: Mask) -> Iterator[NodeId]:
    """Members of a mask, ascending."""
    at = 0
    while mask:
        empty = (mask & -mask).bit_length() - 1
        at, mask = at + empty, mask >> empty
        near = mask & _NEAR  # small integers are quicker than masks of thousands of nodes
        while near:
            low = near & -near
            yield at + low.bit_length() - 1
            near ^= low
        at, mask = at + _NEAR_BITS, mask >> _NEAR_BITS


def mask_of(nodes: Iterable[NodeId]) -> Mask:
    """Mask of some nodes."""
    mask = 0
    for node in nodes:
        mask |= 1 << node
    return mask


def digest_of(dtype: DType, data: Array) -> str:
    """Identity of a constant: SHA-256 over element type, shape and row-major bytes (`large.hash_bytes`)."""
    return digests_of([(dtype, data)])[0]


def digests_of(constants: Sequence[tuple[DType, Array]]) -> list[str]:
    """The identities of many constants, side by side."""
    return hash_all([(f"{t.value}:{','.join(map(str, x.shape))}:".encode(), x) for t, x in constants])


class GraphBuilder:
    """Appends nodes, infers their types and interns equal ones (so common subexpressions exist once)."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._interned: dict[Node, NodeId] = {}
        self._adopted: dict[tuple[int, tuple[NodeId, ...]], NodeId] = {}
        self._inputs: list[NodeId] = []
        self._input_names: list[str] = []
        self._constants: dict[str, Array] = {}
        self._origins: list[Origin] = []
        self._origin = -1

    def __len__(self) -> int:
        return len(self._nodes)

    def type_of(self, node: NodeId) -> TensorType:
        """Type of a node that was already added."""
        return self._nodes[node].type

    def node(self, node: NodeId) -> Node:
        """A node that was already added."""
        return self._nodes[node]

    def constant_value(self, node: NodeId) -> Array | None:
        """Data of a CONSTANT node, None for any other."""
        n = self._nodes[node]
        return self._constants[n.attrs.digest] if isinstance(n.attrs, a.ConstantAttrs) else None

    def input(self, type: TensorType, name: str = "", *, is_weight: bool = False) -> NodeId:
        """A new input of the graph."""
        node = Node(Prim.INPUT, (), a.InputAttrs(len(self._inputs), is_weight), type)
        self._nodes.append(node)
        self._inputs.append(len(self._nodes) - 1)
        self._input_names.append(name)
        return len(self._nodes) - 1

    def constant(self, data: Array, dtype: DType | None = None, *, digest: str = "") -> NodeId:
        """A constant; `dtype` is needed only where NumPy has none: data are exact float32. The array is not copied.

        `digest` is what `digest_of` gives for it, where the caller has that already.
        """
        dtype = dtype or DType.from_numpy(data.dtype)
        if data.dtype != dtype.numpy:
            raise InvalidGraphError(problem=f"constant of {data.dtype} given as {dtype.value}")
        data = row_major(data)
        digest = digest or digest_of(dtype, data)
        if digest not in self._constants:
            view = data.view()
            view.flags.writeable = False
            self._constants[digest] = view
        return self._intern(Node(Prim.CONSTANT, (), a.ConstantAttrs(digest), TensorType(dtype, data.shape)))

    def scalar(self, value: float | bool, dtype: DType) -> NodeId:
        """A rank-0 constant, rounded once to `dtype`."""
        with np.errstate(over="ignore"):
            data: Array = np.asarray(value).astype(dtype.numpy)
        return self.constant(round_emulated(data, dtype), dtype)

    def add(self, prim: Prim, *inputs: NodeId, attrs: a.Attrs = a.NO_ATTRS) -> NodeId:
        """Add one primitive, or find the equal one.

        Raises:
            InvalidGraphError: the operands or attributes do not fit the primitive.
        """
        try:
            type = infer(prim, tuple(self._nodes[i].type for i in inputs), attrs)
        except ShapeError as error:
            raise InvalidGraphError(problem=f"{prim.value}: {error}") from error
        return self._intern(Node(prim, inputs, attrs, type, self._origin))

    def adopt_constant(self, digest: str, data: Array, type: TensorType) -> NodeId:
        """A constant of another graph, without hashing it again; `digest` must be that of the data."""
        self._constants.setdefault(digest, data)
        return self._intern(Node(Prim.CONSTANT, (), a.ConstantAttrs(digest), type))

    def adopt(self, node: Node, inputs: tuple[NodeId, ...]) -> NodeId:
        """A node of another graph on operands of the same types as there, without inferring its type again.

        It keeps its number of origin: see `adopt_origins`.
        """
        same = inputs == node.inputs
        return self._intern(node if same else Node(node.prim, inputs, node.attrs, node.type, node.origin))

    def adopt_copy(self, node: Node, inputs: tuple[NodeId, ...], identity: int) -> NodeId:
        """As `adopt`, without an origin, for a builder whose nodes but for inputs and constants all come through here.

        `identity` is equal for equal primitives, attributes and types, which are then not compared.
        """
        found = self._adopted.get((identity, inputs))
        if found is None:
            found = self._adopted[identity, inputs] = len(self._nodes)
            self._nodes.append(Node(node.prim, inputs, node.attrs, node.type))
        return found

    def adopt_origins(self, origins: Sequence[Origin]) -> None:
        """Take over another graph's origins under their old numbers; only before any other origin is opened."""
        if self._origins:
            raise InvalidGraphError(problem="origins adopted by a builder that has some")
        self._origins.extend(origins)

    @contextmanager
    def within(self, origin: int) -> Iterator[None]:
        """Nodes added inside are marked as parts of an origin that exists; -1 for none."""
        outer = self.enter(origin)
        try:
            yield
        finally:
            self.enter(outer)

    def enter(self, origin: int) -> int:
        """Mark nodes added from now on as parts of an origin that exists, -1 for none; gives back the one before."""
        outer, self._origin = self._origin, origin
        return outer

    def _intern(self, node: Node) -> NodeId:
        end = len(self._nodes)
        found = self._interned.setdefault(node, end)
        if found == end:
            self._nodes.append(node)
        return found

    @contextmanager
    def origin(self, origin: Origin) -> Iterator[int]:
        """Nodes added inside are marked as parts of `origin`; yields its index. Inner origins win."""
        self._origins.append(origin)
        index, outer, self._origin = len(self._origins) - 1, self._origin, len(self._origins) - 1
        try:
            yield index
        finally:
            self._origin = outer

    def set_origin_results(self, index: int, results: Sequence[NodeId]) -> None:
        """Name the results of an origin once its nodes exist."""
        self._origins[index] = replace(self._origins[index], results=tuple(results))

    def build(self, outputs: Sequence[NodeId], output_names: Sequence[str] = ()) -> Graph:
        """The finished graph. The builder may go on afterwards; the graph does not see it."""
        return Graph(
            nodes=tuple(self._nodes),
            inputs=tuple(self._inputs),
            outputs=tuple(outputs),
            constants=dict(self._constants),
            origins=tuple(self._origins),
            input_names=tuple(self._input_names),
            output_names=tuple(output_names),
        )

    # Shorthands: each is one primitive, or none where it would be the identity.

    def cast(self, x: NodeId, dtype: DType) -> NodeId:
        """Convert to another element type."""
        return x if self.type_of(x).dtype is dtype else self.add(Prim.CAST, x, attrs=a.CastAttrs(dtype))

    def broadcast(self, x: NodeId, shape: Sequence[int]) -> NodeId:
        """Repeat to `shape` (aligned right)."""
        shape = tuple(shape)
        return x if self.type_of(x).shape == shape else self.add(Prim.BROADCAST, x, attrs=a.BroadcastAttrs(shape))

    def reshape(self, x: NodeId, shape: Sequence[int]) -> NodeId:
        """Row-major reshape; no -1."""
        shape = tuple(shape)
        return x if self.type_of(x).shape == shape else self.add(Prim.RESHAPE, x, attrs=a.ReshapeAttrs(shape))

    def transpose(self, x: NodeId, perm: Sequence[int]) -> NodeId:
        """Permute dimensions."""
        perm = tuple(perm)
        identity = perm == tuple(range(len(perm)))
        return x if identity else self.add(Prim.TRANSPOSE, x, attrs=a.TransposeAttrs(perm))

    def slice(self, x: NodeId, starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> NodeId:
        """out[i] = x[starts + i * steps], i < sizes."""
        shape = self.type_of(x).shape
        if tuple(sizes) == shape and not any(starts) and all(s == 1 for s in steps):
            return x
        return self.add(Prim.SLICE, x, attrs=a.SliceAttrs(tuple(starts), tuple(sizes), tuple(steps)))

    def reduce(self, prim: Prim, x: NodeId, axes: Sequence[int]) -> NodeId:
        """One of the four reductions; axes stay with size 1."""
        return self.add(prim, x, attrs=a.ReduceAttrs(tuple(sorted(axes)))) if axes else x

    def iota(self, shape: Sequence[int], axis: int, dtype: DType) -> NodeId:
        """0, 1, 2, ... along `axis`."""
        return self.add(Prim.IOTA, attrs=a.IotaAttrs(tuple(shape), axis, dtype))

    def apply(self, prim: Prim, *operands: NodeId | float) -> NodeId:
        """An elementwise primitive over operands of any broadcastable shapes.

        An `int` is a node; a `float` is a scalar constant in the element type of the last node given
        (for SELECT that is a branch, not the condition).
        """
        nodes = [x for x in operands if not isinstance(x, float)]
        dtype = self.type_of(nodes[-1]).dtype
        shape: tuple[int, ...] = ()
        for x in nodes:
            shape = broadcast_shapes(shape, self.type_of(x).shape)
        ids = [self.scalar(x, dtype) if isinstance(x, float) else x for x in operands]
        return self.add(prim, *(self.broadcast(x, shape) for x in ids))
