"""All idioms, a line for each, in the order in which they are looked for."""

from __future__ import annotations

from collections.abc import Sequence

from weft.ir.graph import Graph, NodeId
from weft.orchestrate.attention import ATTENTION
from weft.orchestrate.called_attention import CALLED_ATTENTION
from weft.orchestrate.embedding_update import EMBEDDING_UPDATE
from weft.orchestrate.grouped import GROUPED
from weft.orchestrate.idiom import Idiom, Multiplied
from weft.orchestrate.mlp import MLP
from weft.orchestrate.narrow import NARROW
from weft.orchestrate.norms import NORMS
from weft.orchestrate.pooled import POOLED
from weft.orchestrate.separable import SEPARABLE
from weft.orchestrate.squeeze_excite import SQUEEZE_EXCITE

IDIOMS: tuple[Idiom, ...] = (
    ATTENTION,
    CALLED_ATTENTION,
    SQUEEZE_EXCITE,
    SEPARABLE,
    POOLED,
    MLP,
    NORMS,
    NARROW,
    GROUPED,
    EMBEDDING_UPDATE,
)


def multiplied_together(graph: Graph, products: Sequence[NodeId]) -> Multiplied | None:
    """The estimate of the idiom that a problem with these products is; None: one product after another."""
    estimates = (i.multiplied for i in IDIOMS if i.multiplied is not None)
    return next((x for x in estimates if x.recognises(graph, products)), None)
