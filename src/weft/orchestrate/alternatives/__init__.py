"""Further ways to compute a value, in the same graph: one file per family of rewrites."""

from __future__ import annotations

from weft.ir.graph import Graph
from weft.orchestrate.alternatives import norms
from weft.orchestrate.alternatives.attention import column_of_ones, divide_after_product, sum_as_product
from weft.orchestrate.alternatives.channels import mix_channels_elsewhere
from weft.orchestrate.alternatives.few_channels import multiply_patches, multiply_windows
from weft.orchestrate.alternatives.gates import part_gated_products
from weft.orchestrate.alternatives.indexed import sum_rows
from weft.orchestrate.alternatives.integers import multiply_bytes
from weft.orchestrate.alternatives.odd_columns import pad_columns
from weft.orchestrate.alternatives.padded import pad_channels
from weft.orchestrate.alternatives.pixels import multiply_pixels
from weft.orchestrate.alternatives.products import fold_scale, merge_contractions
from weft.orchestrate.alternatives.transposed import convolve_gradients, convolve_instead, weights_channels_last
from weft.orchestrate.alternatives.union import Alternatives, Maker

__all__ = ["Alternatives", "find_alternatives"]


def find_alternatives(graph: Graph, *, strict: bool = False, on_gpu: bool = False) -> Alternatives:
    """Every alternative that applies. With `strict` none: all of them re-associate sums or round constants anew.

    `on_gpu`: also convolutions of one tap as products, gradients of others by forward ones, those of few
    channels in other forms, products of bytes, sums by index, tensors with channels padded to whole vectors, and norms
    of pieces of rows: a GPU's kernels gain by them.
    The graph returned holds the original nodes under their ids, then the extra ones; originals never read extras.
    """
    if strict:
        return Alternatives(graph, {})
    maker = Maker(graph)
    for rule in _RULES:
        rule(maker)
    if on_gpu:
        multiply_pixels(maker)
        convolve_gradients(maker)
        weights_channels_last(maker)
        multiply_patches(maker)
        multiply_windows(maker)
        multiply_bytes(maker)
        sum_rows(maker)
        pad_channels(maker)
        pad_columns(maker)
        if norms.OFFERED:
            norms.norms_of_pieces(maker)
    return maker.finish()


_RULES = (
    merge_contractions,
    convolve_instead,
    part_gated_products,
    divide_after_product,
    sum_as_product,
    fold_scale,
    mix_channels_elsewhere,
    column_of_ones,
)
"""Those with the published gains first: the graph may double, no more."""
