"""The table of all rules, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.fission import (
    adaptive_pool,
    arithmetic,
    batch_norm,
    clip,
    conv,
    conv_gradient,
    depth_to_space,
    einsum,
    elu,
    gelu,
    generated,
    grid_sample,
    group_norm,
    hard,
    index,
    layer_norm,
    layout,
    linear,
    loss,
    lp_normalize,
    pad,
    pool,
    pool_gradient,
    quantize,
    reduce,
    relu,
    resize,
    rms_norm,
    scan,
    scatter,
    sdpa,
    sigmoid,
    softmax,
    softplus,
)
from weft.fission.rule import Rule


def _named(*rules: Rule) -> dict[str, Rule]:
    """Rules by function name; a trailing underscore only avoids a Python name."""
    return {rule.__name__.rstrip("_"): rule for rule in rules}


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        # normalisation
        **_named(batch_norm.batch_norm, layer_norm.layer_norm, layer_norm.layer_norm_stats, layer_norm.instance_norm),
        **_named(group_norm.group_norm, group_norm.group_norm_stats, rms_norm.rms_norm),
        **_named(lp_normalize.l2_normalize, lp_normalize.lp_normalize, lp_normalize.mean_variance_normalization),
        **_named(lp_normalize.local_response_norm),
        **_named(softmax.softmax, softmax.log_softmax, softmax.logsumexp),
        # gradients
        **_named(conv_gradient.conv_data_gradient, conv_gradient.conv_weight_gradient),
        **_named(conv_gradient.conv_bias_gradient, pool_gradient.max_pool_gradient),
        **_named(pool_gradient.max_pool_taps_gradient, pool_gradient.avg_pool_gradient),
        **_named(pool_gradient.adaptive_avg_pool_gradient, scatter.scatter_one),
        **_named(scatter.scatter_sum, resize.resize_nearest_gradient, resize.resize_linear_gradient),
        **_named(resize.resize_cubic_gradient),
        # activations
        **_named(relu.relu, relu.leaky_relu, relu.prelu, relu.thresholded_relu, relu.threshold),
        **_named(clip.clip, clip.relu6, clip.hard_tanh),
        **_named(sigmoid.sigmoid, sigmoid.silu, sigmoid.log_sigmoid, sigmoid.glu, gelu.gelu),
        **_named(softplus.softplus, softplus.mish, elu.elu, elu.selu, elu.celu),
        **_named(hard.hard_sigmoid, hard.hard_swish, hard.softsign, hard.shrink, hard.soft_shrink),
        **_named(hard.hard_shrink, hard.tanh_shrink),
        # contractions
        **_named(linear.matmul, linear.linear, linear.gemm, linear.addmm, linear.bmm, linear.baddbmm, linear.outer),
        **_named(conv.conv, conv.conv_transpose, einsum.einsum, sdpa.sdpa),
        # pooling
        **_named(pool.max_pool, pool.max_pool_taps, pool.max_pool_positions, pool.avg_pool, pool.lp_pool),
        **_named(adaptive_pool.global_avg_pool, adaptive_pool.global_max_pool, adaptive_pool.global_lp_pool),
        **_named(adaptive_pool.adaptive_avg_pool, adaptive_pool.adaptive_max_pool),
        # layout
        **_named(layout.identity, layout.reshape, layout.squeeze, layout.unsqueeze, layout.flatten),
        **_named(layout.flatten_range, layout.transpose, layout.swap_axes, layout.slice_, layout.select, layout.split),
        **_named(layout.chunk, layout.unbind, layout.concat, layout.stack, layout.expand, layout.tile),
        **_named(layout.repeat_interleave, layout.flip, layout.roll, layout.broadcast_tensors, layout.diagonal),
        **_named(pad.pad, depth_to_space.depth_to_space, depth_to_space.space_to_depth, depth_to_space.pixel_shuffle),
        **_named(depth_to_space.pixel_unshuffle, depth_to_space.channel_shuffle, depth_to_space.unfold),
        **_named(depth_to_space.unfold_axis, depth_to_space.fold),
        **_named(resize.resize_nearest, resize.resize_linear, resize.resize_cubic, grid_sample.grid_sample),
        **_named(generated.filled, generated.arange, generated.eye, generated.tril, generated.triu, generated.trilu),
        **_named(generated.hardmax, generated.reverse_sequence),
        # reductions
        **_named(reduce.reduce_sum, reduce.reduce_prod, reduce.reduce_max, reduce.reduce_min, reduce.reduce_mean),
        **_named(reduce.reduce_l1, reduce.reduce_l2, reduce.reduce_sum_square, reduce.reduce_log_sum, reduce.norm),
        **_named(reduce.var, reduce.std, reduce.var_mean, reduce.any_, reduce.all_, reduce.argmax, reduce.argmin),
        **_named(reduce.max_dim, reduce.min_dim),
        **_named(scan.cumulative_sum, scan.cumulative_prod, scan.linear_recurrence),
        "reduce_log_sum_exp": softmax.logsumexp,
        "isinf": arithmetic.is_inf,
        # arithmetic
        **_named(arithmetic.unary, arithmetic.binary, arithmetic.logical, arithmetic.logical_not, arithmetic.cast),
        **_named(arithmetic.tanh, arithmetic.erf, arithmetic.isnan, arithmetic.sign_or_zero),
        **_named(arithmetic.pow_, arithmetic.true_divide, arithmetic.floor_divide, arithmetic.remainder),
        **_named(arithmetic.is_inf, arithmetic.exp2, arithmetic.log_base, arithmetic.sum_n, arithmetic.max_n),
        # quantisation and losses
        **_named(quantize.quantize_linear, quantize.dequantize_linear, quantize.dynamic_quantize_linear),
        **_named(quantize.matmul_integer, quantize.conv_integer, quantize.qlinear_matmul, quantize.qlinear_conv),
        **_named(loss.nll_loss, loss.nll_loss_forward, loss.softmax_cross_entropy),
        # indexing
        **_named(index.gather, index.gather_elements, index.gather_nd, index.embedding, index.one_hot),
        **_named(scatter.put, scatter.masked_put),
        # arithmetic, continued
        **_named(arithmetic.min_n, arithmetic.mean_n, arithmetic.where, arithmetic.masked_fill),
    }
)
"""Every rule by the name that front ends use."""
