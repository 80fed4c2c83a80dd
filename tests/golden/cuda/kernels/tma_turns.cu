// cuda(bm=128,bn=128,box=(1, 1, 128),consumers=2,halo_stages=0,min_ctas=1,panel=64,persistent_ctas=132,pingpong=True,split=1,stages=6,taps_per_stage=1,template=tma)
#ifndef W_EMULATED
W_FN void w_product_f16_00(float (&d)[64], u64 a, u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
    " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
    "  %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
    "  %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
    "  %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
    " %64, %65, p, 1, 1, 0, 0; }"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) : "l"(a), "l"(b), "r"(add));
#endif
}
#endif
struct ENTRY_frame : w_solo {
  using w_solo::w_solo;
  static W_FN void dealloc_registers() { w_fewer_registers<40>(); }
  static W_FN void alloc_registers() { w_more_registers<232>(); }
};
extern "C" __global__ void __launch_bounds__(384, 1) ENTRY(const __grid_constant__ w_map ma, const void* __restrict__ in0, const void* __restrict__ in2, const void* __restrict__ pk, void* __restrict__ out0) {
static constexpr ENTRY_frame role{};
W_DYNAMIC(sm);
enum { STAGE = 32768, RING = 0, FULL = RING + 196608, EMPTY = FULL + 48, TURN = EMPTY + 48 };
const u32 sb = w_shared(sm);
const int t = role.thread(), lane = t & 31, warp = t >> 5;
// full barriers count TMA's bytes, empty ones the consumer warps that have read a stage
if (t == 0) { for (int i = 0; i < 6; ++i) { w_bar_init(sb + FULL + 8 * i, 1); w_bar_init(sb + EMPTY + 8 * i, 4); } w_bar_init(sb + TURN, 4); w_bar_init(sb + TURN + 8, 4); w_bar_ready(); }
role.sync();
const int first = 0, last = 12;
if (warp >= 8) {
// producer warp: one thread keeps the ring of stages full by TMA
// register split: what the producer gives back, consumers take
role.dealloc_registers();
if (t == 256) { w_map_prefetch(&ma);
// weights are constants: a first round of stages, before what earlier kernels wrote is waited for
const int tile = role.block_x(); const int z = tile / 384, r = tile % 384; 
// raster order: columns of 8 tiles, so that operands stay in the L2 cache
const int band = r / 192, in = r % 192, high = 8, tm = band * 8 + in % high, tn = in / high; const int g = z, b = 0, n0 = tn * 128; const int i0 = tm % 16 * 128, i1 = 0, i2 = tm / 16; (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2; const u16* const pk_tile = (const u16*)pk + ((long long)g * 24 + tn) * 98304;
for (u32 i = 0; i < (last - first < 6 ? (u32)(last - first) : 6u); ++i) { const u32 bar = sb + FULL + 8 * i; const u32 to = sb + RING + i * STAGE + 16384; const int kb = first + (int)i; w_bar_expect(bar, 32768u); w_bulk(to, pk_tile + (long long)kb * 8192, 16384u, bar); }
}
// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
__syncwarp(); role.pdl_wait(); role.pdl_trigger();
if (t == 256) { u32 it = 0;
#pragma unroll 1
for (int tile = role.block_x(); tile < 384; tile += role.blocks_x()) { const int z = tile / 384, r = tile % 384; 
// raster order: columns of 8 tiles, so that operands stay in the L2 cache
const int band = r / 192, in = r % 192, high = 8, tm = band * 8 + in % high, tn = in / high; const int g = z, b = 0, n0 = tn * 128; const int i0 = tm % 16 * 128, i1 = 0, i2 = tm / 16; (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
const u16* const pk_tile = (const u16*)pk + ((long long)g * 24 + tn) * 98304;
// the parity of a slot's phase flips whenever the ring comes round
u32 slot = it % 6, lap = it / 6 & 1;
#pragma unroll 1
for (int st = first; st < last; ++st, ++it, slot = slot == 5 ? 0 : slot + 1, lap ^= slot == 0) { const int kb = st; (void)kb;
const u32 bar = sb + FULL + 8 * slot;
if (it >= (last - first < 6 ? (u32)(last - first) : 6u)) {
w_bar_wait(sb + EMPTY + 8 * slot, lap ^ 1); w_bar_expect(bar, 32768u);
const u32 to = sb + RING + slot * STAGE + 16384; w_bulk(to, pk_tile + (long long)kb * 8192, 16384u, bar); }
const u32 to = sb + slot * STAGE; { const int q = kb; (void)q;  const int c = q % 12 * 64; w_tma(&ma, to, bar, c, i0); } }
} }
} else {
// consumer warpgroups: wgmma from shared memory, sums in registers
role.alloc_registers();
// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
role.pdl_wait(); role.pdl_trigger();
const int row0 = 0; (void)row0;
float acc[2][64];
u32 it = (warp >> 2) * (u32)(last - first), turn = 0;
#pragma unroll 1
for (int tile = role.block_x() + (warp >> 2) * role.blocks_x(); tile < 384; tile += 2 * role.blocks_x()) { const int z = tile / 384, r = tile % 384; 
// raster order: columns of 8 tiles, so that operands stay in the L2 cache
const int band = r / 192, in = r % 192, high = 8, tm = band * 8 + in % high, tn = in / high; const int g = z, b = 0, n0 = tn * 128; const int i0 = tm % 16 * 128, i1 = 0, i2 = tm / 16; (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
// vectors along the columns are read before the main loop
uint4 column0[4];
#pragma unroll
for (int j = 0; j < 4; ++j) { const int n8 = n0 + j * 32 + (lane & 3) * 8, n = n8 < 3072 ? n8 : 0; column0[j] = *(const uint4*)((const u16*)in2 + n); }
// ping-pong: the warpgroups' main loops take turns, the epilogue of one overlaps that of the other
{ const u32 before = warp < 4 ? turn : turn + 1; ++turn; if (before) w_bar_wait(sb + TURN + 8 * (warp >> 2), (before - 1) & 1); }
// the parity of a slot's phase flips whenever the ring comes round
u32 slot = it % 6, lap = it / 6 & 1;
#pragma unroll 1
for (int st = first; st < last; ++st, ++it, slot = slot == 5 ? 0 : slot + 1, lap ^= slot == 0) {
const u32 at = sb + RING + slot * STAGE;
w_bar_wait(sb + FULL + 8 * slot, lap);
// both operands by descriptors: panels whose rows are 128 bytes, swizzled as TMA has written them
w_group_begin();
#pragma unroll
for (int i = 0; i < 2; ++i)
#pragma unroll
for (int q = 0; q < 4; ++q)
w_product_f16_00(acc[i], w_operand_at(at + (u32)((row0 + i * 64) * 128) + (u32)(q * 32), 16, 1024, 1),
  w_operand_at(at + 16384 + (u32)(q * 32), 16, 1024, 1), (st - first) | q);
w_group_commit();
// the product before this one is complete: its stage is free
w_group_wait<1>();
if (st > first && lane == 0) w_bar_arrive(sb + EMPTY + 8 * (slot == 0 ? 5 : slot - 1));
}
if (lane == 0) w_bar_arrive(sb + TURN + 8 * (1 - (warp >> 2)));
w_group_wait<0>(); if (lane == 0) w_bar_arrive(sb + EMPTY + 8 * (slot == 0 ? 5 : slot - 1));
it += last - first;
// epilogue: a thread has 8 columns of a row at a time
#pragma unroll
for (int o = 0; o < 16; ++o) {
const int h = o % 2, i = o / 2 % 2, j = o / 4, n8 = n0 + j * 32 + (lane & 3) * 8;
const int r = row0 + i * 64 + (warp & 3) * 16 + h * 8 + (lane >> 2); const int m = i0 + r;
float v[8];
#pragma unroll
for (int c = 0; c < 4; ++c) { v[2 * c] = acc[i][(4 * j + c) * 4 + 2 * h]; v[2 * c + 1] = acc[i][(4 * j + c) * 4 + 2 * h + 1]; }
{ const int n = n8; { const u16* const x0p = (const u16*)&column0[j];
w_f32 x0[8];
const uint4 x0w = *(const uint4*)(x0p);
{ const float2 h = w_unpack_f16(x0w.x); x0[0] = h.x; x0[1] = h.y; }
{ const float2 h = w_unpack_f16(x0w.y); x0[2] = h.x; x0[3] = h.y; }
{ const float2 h = w_unpack_f16(x0w.z); x0[4] = h.x; x0[5] = h.y; }
{ const float2 h = w_unpack_f16(x0w.w); x0[6] = h.x; x0[7] = h.y; }
const w_f32 e1_0 = (v[0] + x0[0]);
const w_f32 e1_1 = (v[1] + x0[1]);
const w_f32 e1_2 = (v[2] + x0[2]);
const w_f32 e1_3 = (v[3] + x0[3]);
const w_f32 e1_4 = (v[4] + x0[4]);
const w_f32 e1_5 = (v[5] + x0[5]);
const w_f32 e1_6 = (v[6] + x0[6]);
const w_f32 e1_7 = (v[7] + x0[7]);
u16* const y0 = (u16*)out0 + (m * 3072 + n);
*(uint4*)(y0) = make_uint4(w_narrow2_f16(e1_0, e1_1), w_narrow2_f16(e1_2, e1_3), w_narrow2_f16(e1_4, e1_5), w_narrow2_f16(e1_6, e1_7)); } }
}
}
}
}
extern "C" __global__ void ENTRY_pack(const void* __restrict__ w, void* __restrict__ pk) {
static constexpr w_solo role{};
  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= 2359296u) return;
  // rows are columns of the weights: permuted so that a thread's fragments are neighbours, swizzled as TMA would
  const int e = i % 8, place = i / 8 % 8, row = i / 64 % 128;
  const int q = i / 8192 % 12, tile = i / 98304;
  const int nt = tile % 24, g = tile / 24;
  const int c = q % 12 * 64 + (place ^ (row & 7)) * 8 + e, tap = q / 12;
  const int n = nt * 128 + row / 32 * 32 + row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2;
  u16 v = 0;
  if (q < 12 && c < 768 && n < 3072)
    v = ((const u16*)w)[n + c * 3072];
  ((u16*)pk)[i] = v;
}
