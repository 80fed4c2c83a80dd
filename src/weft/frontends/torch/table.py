"""Which ATen overload is split by what, which goes opaque and which cannot be in a graph, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.frontends.torch import gradients, indexing, network, pointwise, reductions, shaping
from weft.frontends.torch.call import Handler


def _merged(*tables: Mapping[str, Handler]) -> Mapping[str, Handler]:
    found: dict[str, Handler] = {}
    for table in tables:
        twice = found.keys() & table.keys()
        if twice:
            raise KeyError(f"two handlers for {sorted(twice)}")
        found.update(table)
    return MappingProxyType(found)


TABLE = _merged(pointwise.TABLE, shaping.TABLE, reductions.TABLE, network.TABLE, indexing.TABLE, gradients.TABLE)
"""Handler of each overload that is split into primitives."""

_SCATTER = "writes at data-dependent positions"
_BACKWARD = "gradient kernel without a rule"
OPAQUE: Mapping[str, str] = {
    "aten._cdist_forward.default": "distances between all pairs of rows",
    "aten._embedding_bag.default": "bags of varying length",
    "aten._pdist_forward.default": "distances between all pairs of rows",
    "aten.col2im.default": _SCATTER,
    "aten._fft_c2r.default": "complex numbers",
    "aten._fft_r2c.default": "complex numbers",
    "aten.native_group_norm_backward.default": _BACKWARD,
    "aten.native_layer_norm_backward.default": _BACKWARD,
    "aten.scatter_reduce.two": _SCATTER,
    "aten.sort.default": "sorts",
}
"""Core overloads that ATen runs itself, and why no rule takes them."""

_RECURRENT = "a loop over time: unrolled, it grows with the length of the sequence"
CHECKS_ITSELF: Mapping[str, str] = {
    f"aten.{name}.default": "raises where a matrix has no result: it looks at its own on the host"
    for name in ("linalg_inv", "inverse", "linalg_solve", "linalg_lu_factor")
}
"""Overloads that raise by the values of their operands; taken apart, that is an effect, which no graph has.

Those that raise on nearly all drawn matrices (Cholesky) cannot be measured, and stay with the framework.
"""
KEPT: Mapping[str, str] = {
    **CHECKS_ITSELF,
    **{
        f"aten.{name}.{overload}": _RECURRENT
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for overload in ("input", "data")
    },
}
"""Composite overloads that stay whole and opaque, although torch could take them apart."""

_RANDOM = "draws random numbers: results of a compiled graph would not follow the generator's sequence"
_MEMORY = "about memory, not values"
REFUSED: Mapping[str, str] = {
    "aten._local_scalar_dense.default": "its result is a Python number",
    "aten._native_batch_norm_legit.default": "writes its running statistics in place",
    "aten.atan2.out": "writes into an argument",
    "aten.native_dropout.default": _RANDOM,
    "aten.rand.default": _RANDOM,
    "aten.randn.default": _RANDOM,
    "aten.randperm.default": _RANDOM,
    "aten.resize_.default": _MEMORY,
    "aten.sym_storage_offset.default": _MEMORY,
}
"""Core overloads that no graph of primitives holds: the framework runs them."""

STATIC = frozenset(
    {
        "aten.sym_size.int", "aten.sym_numel.default", "aten.sym_stride.int", "aten.sym_is_contiguous.default",
        "aten.size.int", "aten.numel.default",
    }
)  # fmt: skip
"""Overloads whose result is a number that the specialisation knows."""

WITHOUT_EFFECT = frozenset(
    {
        "aten._assert_tensor_metadata.default", "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default", "aten._assert_scalar.default",
    }
)  # fmt: skip
"""Checks that hold for every input of the types that the graph was specialised to."""
