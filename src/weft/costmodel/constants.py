"""The constants of every cost model, a section each: a unit and a cause for each of them, numbers in `profiles`.

A name is that of the term which it stands for in its model; times are cycles of a multiprocessor where nothing else is
said, rates bytes per cycle of a multiprocessor, shares between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Unit = Literal["group", "mma", "simt"]
"""What multiplies: warpgroups (wgmma), warps (mma.sync), lanes."""
Operands = Literal["half", "tf32", "f32"]
"""What an attention multiplies: numbers of 16 bits or TF32 on tensor cores, f32 on CUDA cores."""
Overlap = Literal["flow", "flow_wide", "pingpong", "group", "warp"]
"""How the layers of a chain overlap: products begin with the first columns of their operand, where layers are narrow or
wide; warpgroups take turns, or know nothing of each other; warps multiply."""
LeftLoad = Literal["rows", "taps", "columns", "elements"]
"""How tiles of the left operand are found: by chunks of 16 bytes along the sum or across it, or by single elements."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Of `costmodel.roofline`: ports, and what is hidden behind what."""

    overlap: float
    """Share of the second largest of several concurrent costs that is not hidden behind the largest."""
    l2_port_bytes: int
    """Bytes per clock that a multiprocessor receives from the L2 cache."""
    dram_port_bytes: int
    """Bytes per clock that a multiprocessor receives from memory."""
    multicast: float
    """Blocks of a cluster that load an operand together take so much less from the L2 cache; a large product of a
    library reaches 790 TFLOP/s where single loads would allow 550."""
    sfu_per_clock: int
    """Special-function operations per clock of a multiprocessor."""
    narrow_rows: float
    """Share of the rate of large tiles that tiles of fewer than 64 rows reach (a published derating)."""
    narrow_columns: float
    """The same of tiles of hardly any columns; it grows to 1 at 128 of them."""
    unmeasured: float
    """Share of the peak that products of a type reach for which the calibration measured none."""
    barrier: float
    """Share of a grid barrier that CTAs which share a sum wait for each other."""
    bandwidth: float
    """GB/s of the memory by its data sheet, for a GPU that does not say."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of `costmodel.tiles`: products by mma.sync, wgmma and CUDA cores, tile by tile."""

    start: float
    """Addresses, and the first copies on their way."""
    end: float
    """The last barrier, the sums into shared memory, and the way of the last results to memory."""
    latency: float
    """Of a copy from memory: weights were last used a whole inference ago."""
    exposed: float
    """Share of the smaller costs of a step that is not hidden behind the largest."""
    rate: Mapping[Unit, float]
    """FLOP per cycle on Hopper: warpgroup products, those of warps (62 % of the peak at most), multiply-adds."""
    reached: float
    """Share of the peak that any of them reaches."""
    few_warps: float
    """Share of that where a multiprocessor has fewer than 8 warps, which do not hide each other's latencies."""
    chain: Mapping[Unit, float]
    """Cycles of a step of one block that nothing shortens."""
    mma: float
    """Cycles of one 16x8x16 product of a warp that does not overlap with the next."""
    remainder: float
    """Cycles of a step whose stage is a remainder by what is no power of two: 64 kernels with 5 stages took 3 % longer
    than those with 4 and nothing else different."""
    simt_read: float
    simt_exposed: float
    """Cycles in which a warp reads 16 bytes per thread, however many threads read the same; and the share of the reads
    or the multiply-adds, whichever takes less, that the other does not hide. Fitted, with the rate and the chain, to
    443 kernels of two networks in f32; 70 of products by themselves were left out (77 % of their pairs are in
    order)."""
    clustered: Mapping[int, float]
    """Share of the multiprocessors that clusters of so many blocks fill. In f16 the fitted constants have that in
    them."""
    issue: Mapping[LeftLoad, float]
    """Cycles in which a multiprocessor issues the copy of 16 bytes of the left operand, by how they are found."""
    issue_weights: float
    elements: float
    """Latency of a step whose elements pass through registers."""
    element: float
    element_of_tables: float
    """Further latency per element of a thread: they are read one after another; through tables of places yet slower."""
    item: float
    item_operand: float
    """Latency of one vector of results of a thread, and of each operand that is read for it."""
    result: float
    plain: float
    special: float
    """Issue slots of lanes: per result, and per elementwise and per transcendental operation on it."""
    port_bytes: float
    """Bytes per cycle that a multiprocessor gets from the L2 cache while all ask for the same few lines: more than
    their share of what the cache gives to a copy."""
    store_bytes: int
    """Bytes per cycle that a multiprocessor stores."""
    cluster_rank: float
    """Per block of a cluster: they start together, and wait for each other twice."""
    cluster_bytes: float
    """Bytes per cycle that a block reads from the shared memory of its cluster."""
    meeting: float
    """Cross-CTA reductions through global memory: fences, a counter, and the last one reads what all have written."""
    meeting_bytes: float
    """Bytes per cycle of that."""
    waited: float
    """Share of the slowest block of several products in one launch that is waited for where not all find room at once;
    58 kernels on an NVIDIA H200 took 0.94 of the model by that (a median; half of them were within a factor of
    1.12)."""


@dataclass(frozen=True, slots=True)
class Tma:
    """Of products through TMA (`gemm.tma.cost`), by which those of transposed and grouped ones go too."""

    port: float
    """Bytes per cycle and multiprocessor from the L2 cache while all load."""
    shared: float
    """Bytes per cycle that shared memory takes and gives: 128, at the clock of an H200 where copies bound products."""
    busy: float
    """Share of the tensor cores' peak that a stream of products reaches."""
    start: float
    """Descriptors, barriers, and the first copies on their way."""
    latency: float
    """Cycles of a copy, over the stages that are under way."""
    again: float
    """Cycles in which a stage is used again: its products have ended, and the copies know."""
    field: float
    """Cycles until the first pixels of a field are there, besides their bytes."""
    late: float
    """From the last product of a tile to the first of the next one of the same warpgroup."""
    vector: float
    steps: float
    specials: float
    """Latency of one vector of results: beside it, of each operand that is read for it, elementwise step and
    function."""
    clipped: float
    divided: float
    exact: float
    """Latency of a vector whose results are divided exactly: by constants, where a numerator of 0 takes the long way
    and all lanes wait, or by others; and of another function of all bits of f32."""
    result: float
    plain: float
    special: float
    divided_slots: float
    exact_slots: float
    """Issue slots of lanes: per result, elementwise operation, function, and the exact ones of them."""
    store: float
    """Bytes per cycle that a multiprocessor stores, or reads of residuals."""
    half: float
    """Factor where a thread's results are more bytes than one store: each fills every other half of a sector."""
    single: float
    """Bytes that a store of single results costs: what it takes of sectors that others fill."""
    cluster: float
    rank: float
    exchange: float
    """A cluster: cycles, cycles per block, and bytes per cycle of its exchange."""
    clustered: Mapping[int, float]
    """Share of the multiprocessors that clusters of so many blocks can fill: those of one cluster are neighbours.

    An H200 says that it runs 66 clusters of 2 at once, 39 of 3, 30 of 4, 17 of 6 and 15 of 8.
    """
    cluster_registers: int
    """Registers of a thread, roughly, by which several blocks of clusters may share a multiprocessor."""
    handed: float
    """Bytes per cycle in which a block leaves sums in memory, or reads what others have left."""
    handed_latency: float
    coop_fixup: float
    """Cycles for each of the CTAs of a cooperative fix-up, besides the bytes of their partial sums."""
    apart_port: float
    """Bytes per cycle and multiprocessor from the L2 cache where neighbours are at different parts of a sum."""
    multicast: Mapping[int, float]
    """Cycles in which the CTAs of a multicast cluster start and leave together, less what else they save: of four too
    little is looked up to be in the way of anything."""
    drift: float
    """Blocks that are at different steps of their sums find less of each other's operands on its way from the L2
    cache."""
    less: float
    """Share of a step that copies cost though products take longer."""
    within: float
    """Factor for the copy of 128 bytes that begin within a sector: five are asked for, of two lines."""
    copying: float
    """Cycles of a launch that copies operands, besides their bytes and the gap to the next one."""
    exchanged: float
    """Latency that a vector saves whose results no lane exchanges."""
    moved: float
    """Cycles before a sum of 64 rows that is to move is complete, besides an addition for each register."""
    near: float
    """Share of the L2 cache that operands and results may take and still be there."""
    strangers: float
    """CTAs of one multiprocessor are not ordered as ping-pong consumers are: their epilogues coincide."""
    exposed: float
    """Share of the memory's time, or of the multiprocessors', whichever is less, that the other does not hide."""
    stored: float
    stored_words: int
    stored_bytes: int
    """Share of the time that a kernel takes which stores its results in boxes; words of the sum up to which, and bytes
    of the result from which on, boxes were seen to gain."""


@dataclass(frozen=True, slots=True)
class SwapAB:
    """Of transposed products (`gemm.swap_ab.choose`), beside those of `Tma`."""

    streamed: float
    """Share of the bandwidth of reading that a kernel reaches."""
    first: float
    """Cycles of the first weights from memory and of the last results on their way."""
    flight: float
    """Cycles from asking for a stage to asking for the next one in its place, while memory is busy."""
    rank: float
    """Cycles for every block of a cluster beyond the first, less what a pair of them saves."""
    pair: float
    apart: float
    by_turns: float
    """Bytes per cycle and multiprocessor from the L2 cache where rows begin within sectors, and where CTAs of a cluster
    load alternately for all."""
    turned: float
    """Results of a cycle whose sums change their order in shared memory."""
    mates: Mapping[int, float]
    """Cycles in which blocks of a cluster start and leave together."""


@dataclass(frozen=True, slots=True)
class Halo:
    """Of convolutions from tiles with their borders in shared memory (`conv.halo.choose`)."""

    launch: float
    block: float
    """Cycles to a block's first copy and back, and in which a multiprocessor starts one more. These and the constants
    below were fitted to 506 kernels of nine networks, at batch 1 and 16, in f16 and TF32, measured on an NVIDIA
    H200."""
    chunk: float
    element: float
    weight: float
    """Issue slots of a copy of 16 bytes of the image, of an element by itself, and of a copy of weights."""
    port: float
    shared_weights: float
    """Bytes that a multiprocessor gets from the L2 cache per cycle, while all ask; share of weights, which all ask
    for."""
    tensor: float
    lone: float
    several: float
    """Cycles of products over those of the peak; what up to 4 warps, and fewer than 8, reach of it."""
    fragments: float
    """Bytes of fragments per cycle."""
    round: float
    """Cycles in which a warp rounds a number of each lane to TF32: conversions have half the lanes."""
    step: float
    product: float
    """Cycles of a step of one warp, or of each of its products that do not overlap."""
    first: float
    turn: float
    latency: float
    """Share of a load that nothing hides, cycles of a stage that is used again over its largest cost, and of a copy."""
    end: float
    result: float
    plain: float
    special: float
    clipped: float
    exact: float
    operand: float
    """Cycles of a thread for a result, and on its way for a step, a function, an exact division by a constant, another
    exact function (a division counts for three), and an operand."""
    result_slots: float
    plain_slots: float
    special_slots: float
    clipped_slots: float
    """Issue slots of the same."""
    stored: float
    single: float
    """Bytes of vectors that a multiprocessor stores in a cycle; cycles of a result by itself."""
    cluster: float
    rank: float
    exchange: float
    meeting: float
    """A cluster: cycles, cycles per block, bytes per cycle; a cross-CTA reduction through global memory."""
    clustered: Mapping[int, float]
    """Share of the multiprocessors that clusters of so many blocks fill."""
    alone: float
    """Cycles lost by blocks beside which none of the next kernel can start: its weights are not on their way early."""


@dataclass(frozen=True, slots=True)
class Depthwise:
    """Of depthwise convolutions (`conv.depthwise.kernel`)."""

    block: float
    """Cycles in which a multiprocessor starts one block. These and the constants below were fitted to 308 kernels of
    three networks, at batch 1 and 16, measured on an NVIDIA H200."""
    result: float
    step: float
    special: float
    exact: float
    clipped: float
    """Cycles of a thread for a result, and for each elementwise step, function, exact function and exact division by a
    constant (a numerator of 0 takes the long way) on it."""
    operand: float
    """Of an operand that is read for a vector of results."""
    vector: float
    field: float
    weight: float
    """Of a vector that is read; of an element of the field, and of a weight, which comes from memory."""
    result_slots: float
    step_slots: float
    special_slots: float
    clipped_slots: float
    tap_slots: float
    """Issue slots of the same, and of each multiply-add."""
    vector_slots: float
    weight_slots: float
    thread_slots: float
    """Of a vector of the field, of one of weights, and of a thread."""
    port_bytes: float
    """Bytes that a multiprocessor gets in a cycle; what tiles share is read by each."""
    across: float
    """Cycles of a multiprocessor for a result whose neighbours in memory are other blocks': pixels in, channels out."""
    shown: float
    in_step: float
    """Share of the smaller costs that is not hidden, and what is added to it where each multiprocessor has one
    block."""


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Of elementwise kernels and windows (`loops.pointwise`)."""

    block: float
    """Cycles in which a multiprocessor starts one block: addresses, and the first instructions of its warps."""
    result: float
    value: float
    special: float
    tap: float
    apart: float
    """Cycles of a thread for a result, and for each value, transcendental step, element of a window and read at a
    distance on the way to it: its results come one after another."""
    thread_slots: float
    """Issue slots of a thread besides its results."""
    result_slots: float
    value_slots: float
    special_slots: float
    tap_slots: float
    shared_slots: float
    """Of a result, and of the same steps; of a read that the neighbours of a vector share."""
    tile: float
    """Filling a tile in shared memory, and the barrier behind it."""
    gather: float
    """A read at an address that was read."""
    port_bytes: float
    """Bytes side by side that a multiprocessor loads and stores in a cycle."""
    scattered: float
    scattered_tile: float
    """Cycles of a multiprocessor for an element by itself, and where a tile turns it."""
    sectors: float
    """Time of sectors of which little is used, over that of as many bytes from the L2 cache."""
    memory: float
    """Time of the bytes over that of a copy of as many: what was just written is still in the L2 cache."""
    shown: float
    in_step: float
    """Share of the smaller costs that is not hidden, and what is added to it where each multiprocessor has one
    block."""
    registers: int
    result_registers: float
    value_registers: float
    """Registers of a thread: for addresses, for each result, and for each of its values."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of a whole problem (`orchestrate.estimate_cuda`); slots are instructions of a lane."""

    lanes: int
    """Results of plain instructions per clock of a multiprocessor."""
    slots: float
    """Instructions of one elementwise operation."""
    result_slots: float
    """Of a result: indices, loads, stores and conversions."""
    norm_issued: float
    norm_shown: float
    """Of the instructions of a norm in front of a product: those issued, as tiles are wider than is counted here and
    words hold two values; and the share of them that products do not hide."""
    cast_slots: float
    """Of a conversion by itself: two values at once, and often none where a load or store converts."""
    reduce_slots: float
    """Of taking one value into a partial result."""
    special_slots: float
    """Of a transcendental one, beside those on special functions."""
    clipped_slots: float
    divided_slots: float
    exact_slots: float
    """Of one that rounds correctly behind a product: a division by a constant, whose numerator of 0 takes the long way
    and lets its neighbours wait, another division, and another function."""
    multiply_slots: float
    """Per FLOP of a product that is none for the matrix units: a multiply-add, and its share of loads and
    conversions."""
    window_slots: float
    """Per element that a window looks at."""
    gather_slots: float
    """Per element of a gather: an address of its own."""
    sfu_operations: float
    """Special-function operations of one transcendental."""
    special_step_us: float
    gather_us: float
    """A read at an address that was read."""
    weights_us: float
    tap_us: float
    """Weights come from memory before the first product of a thread that keeps them; each tap of them is unpacked."""
    strided: float
    """Factor on traffic when a kernel reads one memory order and writes the other."""
    strided_us: float
    """And the way through shared memory."""
    turned: float
    """Factor on traffic when the last axis becomes another one."""
    scattered_us: float
    """What a store of one element costs where its neighbours are stored by others: bytes, and that they meet."""
    across_cycles: float
    """Of a multiprocessor, for a result of a convolution on its lanes that reads pixels and writes channels."""
    elementwise_step_us: float
    window_step_us: float
    reduce_step_us: float
    """One more step that waits for the one before, for the few results of a thread."""
    persistent_us: float
    """Start and end of kernels whose blocks stay, or of a library's, which reach the rate of the largest tiles."""
    one_by_one: float
    """Factor on convolutions that copy their part of the image element by element."""
    gradient_share: float
    """Of the peak that a library's gradient of a convolution's weight reaches."""
    depthwise_gradient: float
    """Of a depthwise convolution's weight: factor on the time of its traffic (MobileNetV2's: 870 and 368 us)."""
    depthwise_sums: float
    """The same of kernels of one's own, for images with channels last (`conv.depthwise_wgrad.kernel`)."""
    data_gradient: float
    """What a library's gradient of a convolution's input takes of the convolution (of ResNet-50's 67 and 38 us)."""
    one_tap: float
    """What a library's convolution of one tap takes of its traffic and product (of ResNet-50's 89 and 31, 50 and 30
    us), where its weight is no constant."""
    layer_share: float
    """Of the peak that layers of 64 columns in one kernel reach; wider ones reach more."""


@dataclass(frozen=True, slots=True)
class Gemv:
    """Of products with few rows (`gemm.gemv.kernel`)."""

    streamed: float
    """Share of the bandwidth of reading that one pass over weights gets."""
    latency: float
    """Cycles of the first weights from memory and of the last results on their way."""
    flight: float
    """Cycles from asking for bytes to having them, while memory is busy."""
    row_slots: float
    """Issue slots of an element of the weights for each row, beside the one that unpacks it."""
    round: float
    """Cycles of one turn of the loop of a thread."""
    meeting: float
    """Cycles in which warps that share a sum add it up."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Of several products in one launch (`gemm.grouped`), beside those of `Tiles` and `Tma`."""

    worth: float
    """Share of its members one after another that a launch may be modelled to take, to be measured."""


@dataclass(frozen=True, slots=True)
class Separable:
    """Of a depthwise convolution and the 1x1 convolution behind it (`conv.separable.kernel`)."""

    launch: float
    """Cycles of the kernel besides its blocks."""
    tap_slots: float
    vector_slots: float
    step_slots: float
    """Issue slots of eight results of the depthwise convolution: of each tap, fixed, and of each step behind them."""
    latency: float
    """Cycles of the reads that a thread has under way at once."""
    tensor: float
    fragment: float
    """Cycles of products over those of the peak, and of reading one fragment of 512 bytes."""
    step: float
    product: float
    """Cycles of a step of one warp, or of each of its products that do not overlap."""
    shared_weights: float
    port: float
    """Share of the weights, which all blocks ask for, and bytes that a multiprocessor gets per cycle, while all ask."""
    end: float
    meeting: float
    """Cycles from the last product to the last result, and of the CTAs of a cluster that add up their sums."""
    alone: float
    """Cycles lost by blocks beside which none of the next kernel can start."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """Of a convolution and the 1x1 convolution behind it (`conv.stacked.kernel`), beside those of `Halo`."""

    measured: float
    """What kernels took over the cycles of the model."""
    tensor: float
    fragments: float
    start: float
    stored: float
    """Cycles of a part of the second product beside its work, and bytes that a multiprocessor stores or reads there."""
    result_bytes: float
    """Bytes that a result of it costs beside those of itself and of its operands."""
    few_warps: float
    """Share of the tensor cores' rate that blocks of up to 4 warps reach."""
    port: float
    """Bytes of the second weights that a multiprocessor gets from the L2 cache per cycle."""
    filled: float
    """Share of the multiprocessors that must have a tile, for the kernel to be offered."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """Of the windows behind a convolution (`conv.pooled.choose`), beside those of `Halo`."""

    place: float
    windows: float
    """Issue slots of a place of a window for a result, and cycles until windows begin: guesses, not fitted."""
    worth: float
    """Share of the one kernel's modelled time that two must take at least, for the one to be measured; also of two
    convolutions (`conv.stacked`)."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Of attention whose warps multiply fragments (`attention.shapes`)."""

    launch: float
    end: float
    """Cycles of the kernel besides its blocks, and from a block's last step to its last result."""
    rate: Mapping[Operands, float]
    """FLOP per cycle of both products."""
    reads: Mapping[Operands, float]
    """Cycles of reading fragments over those of their bytes, 128 in a cycle: products hide a part of them."""
    exponential: float
    """Special-function operations of one exponential."""
    issued: float
    """Share of the slots of softmax that other warps' products do not hide."""
    softmax_slots: float
    step_slots: float
    operand_slots: float
    """Issue slots of a score: of its softmax, and of an elementwise step and of an operand where scores are given."""
    warp: float
    rescaled: float
    """Cycles of a warp's step besides its scores; of a result that is scaled to a new maximum, for two columns."""
    chain: float
    chain_product: float
    chain_score: float
    chain_slots: float
    """Cycles of a step that more blocks do not share: fixed, of each product, and of the scores of a thread; with as
    many slots of their own scores cost twice that."""
    apart: float
    """Cycles of a step of which the next tile is not known: its text is a loop, or there are two."""
    overlapped: float
    overlapped_chain: float
    """Share of a step, and of its chain, where its products are under way while the weights of the tile before are
    computed: an expectation."""
    latency: float
    """Cycles of a copy, over the stages that are under way."""
    port_bytes: float
    """Bytes per cycle that a multiprocessor gets from the L2 cache while all ask."""
    batch: float
    """Cycles of eight reads of a thread where operands are computed on their way to shared memory."""
    meeting: float
    meeting_bytes: float
    """Cycles in which the CTAs of a cluster join their results, and bytes per cycle of that: an expectation."""
    gradient_pair: float
    gradient_end: float
    """Of gradients (`attention.gradient`): cycles of 16 rows and 16 keys for 64 elements of a head, and fixed ones."""


@dataclass(frozen=True, slots=True)
class AttentionTma:
    """Of attention by Hopper's warpgroups (`attention.tma_shapes`), beside those of `Attention`."""

    rate: float
    """FLOP per cycle of both products."""
    issued: float
    """Share of the slots of softmax that products of other warpgroups do not hide."""
    chain: float
    """Cycles of a step of one warpgroup besides its first product and its softmax."""
    beside: float
    beside_column: float
    beside_most: float
    """Cycles of a step besides products and softmax, and for every key beyond 128; of so many warpgroups at most."""
    exposed: float
    """Share of products or softmax, whichever takes less, that the other does not hide."""
    begun: float
    joined: float
    ended: float
    """Cycles in which a CTA begins a tile of rows, joins the results of warpgroups that share its keys, and ends."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """Of layers one after another in registers (`mlp.shapes`), or in shared memory (`mlp.wide`)."""

    warp_rate: float
    """Share of the tensor cores' peak that products of single warps (mma.sync) reach."""
    layer: float
    layer_columns: float
    """Cycles from the last product of a layer to the first of the next one: fixed, and for 16 columns of it."""
    apart: Mapping[Overlap, float]
    """Share of products, or of what is between them, whichever takes less, that the other does not hide."""
    memory: float
    """Share of the bandwidth that clock and bus allow which rows reach."""
    weights: float
    weights_bytes: float
    """Cycles until the first weights are there, and bytes of them per cycle and multiprocessor."""
    port_bytes: float
    """Bytes per cycle that a multiprocessor gets from the L2 cache while all ask."""
    result_slots: float
    special_slots: float
    """Issue slots of a result beside its elementwise steps, and of a transcendental one beyond a step, where values
    pass through shared memory."""
    moved: float
    kept: float
    """What x and results must take of the L2 cache, as a share of it, and results at most, for results to stay there
    while x goes: 6 % faster at two layers of 64 columns, 10 % slower where results do not fit."""


@dataclass(frozen=True, slots=True)
class Normed:
    """Of normalising a left operand (`gemm.mma.normed`, `gemm.tma.normed_choose`), beside those of the product."""

    element_slots: float
    """Issue slots of an element on its way: half of unpacking and packing, and what the norm does."""
    own_slots: float
    """Of an element that its mean and variance are computed from: read, added, its distance squared and added."""
    piece_slots: float
    """Of a mean and a spread of 32 neighbours that are read instead."""
    own: float
    given: float
    """Cycles of a tile of `mma` until means and variances are there: computed, or read in pieces."""
    start: float
    """The same of a tile of `tma`."""
    exposed: float
    """Share of normalising that products of `tma` do not hide."""


@dataclass(frozen=True, slots=True)
class Reductions:
    """Of rules for sums along rows (`loops.choose`, `loops.cross_cta`): which forms are measured first."""

    held: float
    """Share of the L2 cache that clusters which run at once may go through twice."""
    exchange: float
    """Cycles of a cluster's block beside those for its bytes."""
    large_bytes: int
    """Bytes, as f32, from which the L2 cache no longer holds what is read twice."""
    streamed: int
    """So many times the L2 cache holds nothing of what is read twice."""
    block_bytes: int
    """What a block of a part of a row reads where there is enough."""
    fewest_blocks: float
    most_blocks: float
    """Blocks of such parts for each multiprocessor."""
    shared_bytes: int
    """Bytes for each multiprocessor from which some CTAs that meet through memory read while others wait."""
    cta_bytes: int
    """Bytes of such a CTA for each sector that lies side by side."""
    small_bytes: int
    """Bytes of a CTA for which 128 threads are enough."""
    most_ctas: int
    """CTAs of a row that meet: all must run at once."""


@dataclass(frozen=True, slots=True)
class Library:
    """Of calls of a vendor's library (`generate.library`), beside their arithmetic; bytes are per microsecond."""

    launch_us: float
    """Of a kernel that the framework launches."""
    moved: float
    """Bytes that a call reads and writes."""
    turned: float
    """Bytes of a tensor that the framework's copy puts into another order."""
    turned_by_cudnn: float
    """The same of what cuDNN does itself in front of and behind a convolution."""
    row_upsample: float
    """Bytes by which bilinear upsampling of row-major images takes longer than of channels-last ones."""
    last_pool_us: float
    """By so much each element of a window takes longer in the pool of channels-last images."""
    arithmetic_us: float
    traffic_us: float
    """Microseconds of one or the other from which on algorithms of the library are measured."""
    unmeasured_us: float
    """Added to the guess for a call that nobody measured: a small operator is often several kernels, none of them
    launched early."""
    near: float
    """Further algorithms of the library are measured where its best call took at most so many times the best kernel."""


@dataclass(frozen=True, slots=True)
class Training:
    """Of training fused networks (`weft.nn`): one kernel for all layers, or one for each product."""

    chained: float
    """Share of the tensor cores' peak that one kernel for all layers reaches."""
    layered: float
    """Share of the bandwidth that clock and bus allow which kernels of single layers reach."""
    product_us: float
    """Of launching the kernel of a product."""
    surely: float
    """So many times the time of layers one kernel must be modelled to take, not to be compiled."""
    summed: float
    """Bytes per microsecond at which columns are summed."""
