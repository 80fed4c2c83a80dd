// cuda(bm=128,bn=64,box=(1, 1, 128),consumers=2,halo_stages=0,min_ctas=1,panel=64,persistent_ctas=0,pingpong=False,split=4,stages=3,taps_per_stage=1,template=tma)
#ifndef W_EMULATED
W_FN void w_product_f16_00(float (&d)[32], u64 a, u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
    " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
    "  %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
    " %32, %33, p, 1, 1, 0, 0; }"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) : "l"(a), "l"(b), "r"(add));
#endif
}
#endif
extern "C" __global__ void __launch_bounds__(288, 1) ENTRY(const __grid_constant__ w_map ma, const void* __restrict__ in0, const void* __restrict__ pk, void* __restrict__ out0) {
static constexpr w_solo role{};
W_DYNAMIC(sm);
enum { STAGE = 24576, RING = 0, FULL = RING + 73728, EMPTY = FULL + 24, TURN = EMPTY + 24 };
const u32 sb = w_shared(sm);
const int t = role.thread(), lane = t & 31, warp = t >> 5;
// full barriers count TMA's bytes, empty ones the consumer warps that have read a stage
if (t == 0) { for (int i = 0; i < 3; ++i) { w_bar_init(sb + FULL + 8 * i, 1); w_bar_init(sb + EMPTY + 8 * i, 8); } w_bar_init(sb + TURN, 4); w_bar_init(sb + TURN + 8, 4); w_bar_ready(); }
role.sync();
const int rank = role.block_x() % 4;
const int first = rank * 64 / 4, last = (rank + 1) * 64 / 4;
if (warp >= 8) {
// producer warp: one thread keeps the ring of stages full by TMA
if (t == 256) { w_map_prefetch(&ma);
// weights are constants: a first round of stages, before what earlier kernels wrote is waited for
const int tile = role.block_x() / 4; const int z = tile / 16, r = tile % 16; 
// raster order: columns of 8 tiles, so that operands stay in the L2 cache
const int band = r / 32, in = r % 32, high = (4 - band * 8 < 8 ? 4 % 8 : 8), tm = band * 8 + in % high, tn = in / high; const int g = z, b = 0, n0 = tn * 64; const int i0 = tm % 4 * 128, i1 = 0, i2 = tm / 4; (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2; const u16* const pk_tile = (const u16*)pk + ((long long)g * 4 + tn) * 262144;
for (u32 i = 0; i < (last - first < 3 ? (u32)(last - first) : 3u); ++i) { const u32 bar = sb + FULL + 8 * i; const u32 to = sb + RING + i * STAGE + 16384; const int kb = first + (int)i; w_bar_expect(bar, 24576u); w_bulk(to, pk_tile + (long long)kb * 4096, 8192u, bar); }
}
// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
__syncwarp(); role.pdl_wait(); role.pdl_trigger();
if (t == 256) { u32 it = 0;
{ const int tile = role.block_x() / 4; const int z = tile / 16, r = tile % 16; 
// raster order: columns of 8 tiles, so that operands stay in the L2 cache
const int band = r / 32, in = r % 32, high = (4 - band * 8 < 8 ? 4 % 8 : 8), tm = band * 8 + in % high, tn = in / high; const int g = z, b = 0, n0 = tn * 64; const int i0 = tm % 4 * 128, i1 = 0, i2 = tm / 4; (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
const u16* const pk_tile = (const u16*)pk + ((long long)g * 4 + tn) * 262144;
// the parity of a slot's phase flips whenever the ring comes round
u32 slot = it % 3, lap = it / 3 & 1;
#pragma unroll 1
for (int st = first; st < last; ++st, ++it, slot = slot == 2 ? 0 : slot + 1, lap ^= slot == 0) { const int kb = st; (void)kb;
const u32 bar = sb + FULL + 8 * slot;
if (it >= (last - first < 3 ? (u32)(last - first) : 3u)) {
w_bar_wait(sb + EMPTY + 8 * slot, lap ^ 1); w_bar_expect(bar, 24576u);
const u32 to = sb + RING + slot * STAGE + 16384; w_bulk(to, pk_tile + (long long)kb * 4096, 8192u, bar); }
const u32 to = sb + slot * STAGE; { const int q = kb; (void)q;  const int c = q % 64 * 64; w_tma(&ma, to, bar, c, i0); } }
} }
// as often as consumers: see the sums of split-K
__syncwarp(); w_cluster_sync(); w_cluster_sync();
} else {
// consumer warpgroups: wgmma from shared memory, sums in registers
// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
role.pdl_wait(); role.pdl_trigger();
const int row0 = (warp >> 2) * 64; (void)row0;
float acc[1][32];
u32 it = 0;
{ const int tile = role.block_x() / 4; const int z = tile / 16, r = tile % 16; 
// raster order: columns of 8 tiles, so that operands stay in the L2 cache
const int band = r / 32, in = r % 32, high = (4 - band * 8 < 8 ? 4 % 8 : 8), tm = band * 8 + in % high, tn = in / high; const int g = z, b = 0, n0 = tn * 64; const int i0 = tm % 4 * 128, i1 = 0, i2 = tm / 4; (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
// the parity of a slot's phase flips whenever the ring comes round
u32 slot = it % 3, lap = it / 3 & 1;
#pragma unroll 1
for (int st = first; st < last; ++st, ++it, slot = slot == 2 ? 0 : slot + 1, lap ^= slot == 0) {
const u32 at = sb + RING + slot * STAGE;
w_bar_wait(sb + FULL + 8 * slot, lap);
// both operands by descriptors: panels whose rows are 128 bytes, swizzled as TMA has written them
w_group_begin();
#pragma unroll
for (int i = 0; i < 1; ++i)
#pragma unroll
for (int q = 0; q < 4; ++q)
w_product_f16_00(acc[i], w_operand_at(at + (u32)((row0 + i * 64) * 128) + (u32)(q * 32), 16, 1024, 1),
  w_operand_at(at + 16384 + (u32)(q * 32), 16, 1024, 1), (st - first) | q);
w_group_commit();
// the product before this one is complete: its stage is free
w_group_wait<1>();
if (st > first && lane == 0) w_bar_arrive(sb + EMPTY + 8 * (slot == 0 ? 2 : slot - 1));
}
w_group_wait<0>(); if (lane == 0) w_bar_arrive(sb + EMPTY + 8 * (slot == 0 ? 2 : slot - 1));
// split-K: sums of the CTAs of the cluster through distributed shared memory, in order
role.named_barrier(0, 256);
#pragma unroll
for (int j = 0; j < 2; ++j)
#pragma unroll
for (int i = 0; i < 1; ++i)
#pragma unroll
for (int h = 0; h < 2; ++h) {
float v[8];
#pragma unroll
for (int c = 0; c < 4; ++c) { v[2 * c] = acc[i][(4 * j + c) * 4 + 2 * h]; v[2 * c + 1] = acc[i][(4 * j + c) * 4 + 2 * h + 1]; }
const int o = (j + i) * 2 + h;
float4* const to = (float4*)(sm + o * 8192 + t * 16);
to[0] = make_float4(v[0], v[1], v[2], v[3]); to[256] = make_float4(v[4], v[5], v[6], v[7]); }
w_cluster_sync();
#pragma unroll 1
for (int o = rank; o < 4; o += 4) {
const int h = o % 2, i = 0, j = o / 2; const int n8 = n0 + j * 32 + (lane & 3) * 8;
float v[8];
#pragma unroll
for (int e = 0; e < 8; ++e) v[e] = 0.0f;
#pragma unroll
for (int y = 0; y < 4; ++y) {
const float4 lo = w_read_cluster(sb + (u32)(o * 8192 + t * 16), y), hi = w_read_cluster(sb + (u32)(o * 8192 + t * 16) + 4096, y);
v[0] += lo.x; v[1] += lo.y; v[2] += lo.z; v[3] += lo.w; v[4] += hi.x; v[5] += hi.y; v[6] += hi.z; v[7] += hi.w; }
const int r = row0 + i * 64 + (warp & 3) * 16 + h * 8 + (lane >> 2); const int m = i0 + r;
{ const int n = n8; { u16* const y0 = (u16*)out0 + (m * 256 + n);
*(uint4*)(y0) = make_uint4(w_narrow2_f16(v[0], v[1]), w_narrow2_f16(v[2], v[3]), w_narrow2_f16(v[4], v[5]), w_narrow2_f16(v[6], v[7])); } }
}
w_cluster_sync();
}
}
}
extern "C" __global__ void ENTRY_pack(const void* __restrict__ w, void* __restrict__ pk) {
static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 1048576u) return;
  // rows are columns of the weights: permuted so that a thread's fragments are neighbours, swizzled as TMA would
  const int e = i % 8, place = i / 8 % 8, row = i / 64 % 64;
  const int q = i / 4096 % 64, tile = i / 262144;
  const int nt = tile % 4, g = tile / 4;
  const int c = q % 64 * 64 + (place ^ (row & 7)) * 8 + e, tap = q / 64;
  const int n = nt * 64 + row / 32 * 32 + row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2;
  u16 v = 0;
  if (q < 64 && c < 4096 && n < 256)
    v = ((const u16*)w)[n * 4096 + c];
  ((u16*)pk)[i] = v;
}
