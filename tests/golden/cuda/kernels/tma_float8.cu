// cuda(bm=128,bn=128,box=(1, 1, 128),consumers=2,halo_stages=0,min_ctas=1,panel=64,persistent_ctas=0,pingpong=False,split=1,stages=3,taps_per_stage=1,template=tma,two_level=1)
#ifndef W_EMULATED
W_FN void w_product_e4m3e4m3_00(float (&d)[64], u64 a, u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
    " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
    "  %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
    "  %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
    "  %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
    " %64, %65, p, 1, 1; }"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) : "l"(a), "l"(b), "r"(add));
#endif
}
#endif
struct ENTRY_frame : w_solo {
  using w_solo::w_solo;
  static W_FN void dealloc_registers() { w_fewer_registers<40>(); }
  static W_FN void alloc_registers() { w_more_registers<232>(); }
};
extern "C" __global__ void __launch_bounds__(384, 1) ENTRY(const __grid_constant__ w_map ma, const __grid_constant__ w_map mw, const void* __restrict__ in0, const void* __restrict__ in1, const void* __restrict__ in4, const void* __restrict__ in3, const void* __restrict__ in2, void* __restrict__ out0) {
static constexpr ENTRY_frame role{};
W_DYNAMIC(sm);
enum { STAGE = 32768, RING = 0, FULL = RING + 98304, EMPTY = FULL + 24, TURN = EMPTY + 24 };
const u32 sb = w_shared(sm);
const int t = role.thread(), lane = t & 31, warp = t >> 5;
// full barriers count TMA's bytes, empty ones the consumer warps that have read a stage
if (t == 0) { for (int i = 0; i < 3; ++i) { w_bar_init(sb + FULL + 8 * i, 1); w_bar_init(sb + EMPTY + 8 * i, 8); } w_bar_init(sb + TURN, 4); w_bar_init(sb + TURN + 8, 4); w_bar_ready(); }
role.sync();
const int first = 0, last = 4;
if (warp >= 8) {
// producer warp: one thread keeps the ring of stages full by TMA
// register split: what the producer gives back, consumers take
role.dealloc_registers();
if (t == 256) { w_map_prefetch(&ma); w_map_prefetch(&mw);
}
// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
__syncwarp(); role.pdl_wait(); role.pdl_trigger();
if (t == 256) { u32 it = 0;
#pragma unroll 1
for (int tile = role.block_x(); tile < 16; tile += role.blocks_x()) { const int z = tile / 16, r = tile % 16; 
// raster order: columns of 8 tiles, so that operands stay in the L2 cache
const int band = r / 32, in = r % 32, high = (4 - band * 8 < 8 ? 4 % 8 : 8), tm = band * 8 + in % high, tn = in / high; const int g = z, b = 0, n0 = tn * 128; const int i0 = tm % 4 * 128, i1 = 0, i2 = tm / 4; (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
// the parity of a slot's phase flips whenever the ring comes round
u32 slot = it % 3, lap = it / 3 & 1;
#pragma unroll 1
for (int st = first; st < last; ++st, ++it, slot = slot == 2 ? 0 : slot + 1, lap ^= slot == 0) { const int kb = st; (void)kb;
const u32 bar = sb + FULL + 8 * slot;
{
w_bar_wait(sb + EMPTY + 8 * slot, lap ^ 1); w_bar_expect(bar, 32768u);
const u32 to = sb + RING + slot * STAGE + 16384; { const int c = kb * 128; w_tma(&mw, to, bar, c, n0); } }
const u32 to = sb + slot * STAGE; { const int q = kb; (void)q;  const int c = q % 4 * 128; w_tma(&ma, to, bar, c, i0); } }
} }
} else {
// consumer warpgroups: wgmma from shared memory, sums in registers
role.alloc_registers();
// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
role.pdl_wait(); role.pdl_trigger();
const int row0 = (warp >> 2) * 64; (void)row0;
float acc[1][64];
u32 it = 0;
#pragma unroll 1
for (int tile = role.block_x(); tile < 16; tile += role.blocks_x()) { const int z = tile / 16, r = tile % 16; 
// raster order: columns of 8 tiles, so that operands stay in the L2 cache
const int band = r / 32, in = r % 32, high = (4 - band * 8 < 8 ? 4 % 8 : 8), tm = band * 8 + in % high, tn = in / high; const int g = z, b = 0, n0 = tn * 128; const int i0 = tm % 4 * 128, i1 = 0, i2 = tm / 4; (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;
// vectors along the columns are read before the main loop
uint4 column0[4];
#pragma unroll
for (int j = 0; j < 4; ++j) { const int n8 = n0 + j * 32 + (lane & 3) * 8, n = n8 < 512 ? n8 : 0; column0[j] = *(const uint4*)((const u16*)in4 + n); }
// two-level accumulation: tensor cores sum one k-tile of 8-bit floats, f32 additions the k-tiles
#pragma unroll
for (int i = 0; i < 64; ++i) acc[i / 64][i % 64] = 0.0f;
#pragma unroll 1
for (int st = first; st < last; ++st, ++it) {
const u32 slot = it % 3, at = sb + RING + slot * STAGE;
w_bar_wait(sb + FULL + 8 * slot, it / 3 & 1);
float part[64];
#pragma unroll
for (int i = 0; i < 1; ++i) {
w_group_begin();
#pragma unroll
for (int q = 0; q < 4; ++q)
w_product_e4m3e4m3_00(part, w_operand_at(at + (u32)((row0 + i * 64) * 128) + (u32)(q * 32), 16, 1024, 1), w_operand_at(at + 16384 + (u32)(q * 32), 16, 1024, 1), q);
w_group_commit(); w_group_wait<0>();
if (i == 0) { if (lane == 0) w_bar_arrive(sb + EMPTY + 8 * slot); }
#pragma unroll
for (int j = 0; j < 64; ++j) acc[i][j] += part[j];
}
}
// epilogue: a thread has 8 columns of a row at a time
#pragma unroll
for (int o = 0; o < 8; ++o) {
const int h = o % 2, i = 0, j = o / 2, n8 = n0 + j * 32 + (lane & 3) * 8;
const int r = row0 + i * 64 + (warp & 3) * 16 + h * 8 + (lane >> 2); const int m = i0 + r;
float v[8];
#pragma unroll
for (int c = 0; c < 4; ++c) { v[2 * c] = acc[i][(4 * j + c) * 4 + 2 * h]; v[2 * c + 1] = acc[i][(4 * j + c) * 4 + 2 * h + 1]; }
w_quad(v, lane);
{ const int n = n8; { const u16* const x0p = (const u16*)&column0[j];
w_f32 x0[8];
const uint4 x0w = *(const uint4*)(x0p);
{ const float2 h = w_unpack_bf16(x0w.x); x0[0] = h.x; x0[1] = h.y; }
{ const float2 h = w_unpack_bf16(x0w.y); x0[2] = h.x; x0[3] = h.y; }
{ const float2 h = w_unpack_bf16(x0w.z); x0[4] = h.x; x0[5] = h.y; }
{ const float2 h = w_unpack_bf16(x0w.w); x0[6] = h.x; x0[7] = h.y; }
const float* const x2p = (const float*)in3 + n;
w_f32 x2[8];
{ const float4 h = *(const float4*)(x2p);
x2[0] = h.x;
x2[1] = h.y;
x2[2] = h.z;
x2[3] = h.w;
}
{ const float4 h = *(const float4*)(x2p + 4);
x2[4] = h.x;
x2[5] = h.y;
x2[6] = h.z;
x2[7] = h.w;
}
const float* const x3p = (const float*)in2 + m;
const w_f32 x3 = *(x3p);
const w_f32 e1_0 = x0[0];
const w_f32 e1_1 = x0[1];
const w_f32 e1_2 = x0[2];
const w_f32 e1_3 = x0[3];
const w_f32 e1_4 = x0[4];
const w_f32 e1_5 = x0[5];
const w_f32 e1_6 = x0[6];
const w_f32 e1_7 = x0[7];
const w_f32 e4_0 = (v[0] * x3);
const w_f32 e4_1 = (v[1] * x3);
const w_f32 e4_2 = (v[2] * x3);
const w_f32 e4_3 = (v[3] * x3);
const w_f32 e4_4 = (v[4] * x3);
const w_f32 e4_5 = (v[5] * x3);
const w_f32 e4_6 = (v[6] * x3);
const w_f32 e4_7 = (v[7] * x3);
const w_f32 e5_0 = (e4_0 * x2[0]);
const w_f32 e5_1 = (e4_1 * x2[1]);
const w_f32 e5_2 = (e4_2 * x2[2]);
const w_f32 e5_3 = (e4_3 * x2[3]);
const w_f32 e5_4 = (e4_4 * x2[4]);
const w_f32 e5_5 = (e4_5 * x2[5]);
const w_f32 e5_6 = (e4_6 * x2[6]);
const w_f32 e5_7 = (e4_7 * x2[7]);
const w_f32 e6_0 = (e5_0 + e1_0);
const w_f32 e6_1 = (e5_1 + e1_1);
const w_f32 e6_2 = (e5_2 + e1_2);
const w_f32 e6_3 = (e5_3 + e1_3);
const w_f32 e6_4 = (e5_4 + e1_4);
const w_f32 e6_5 = (e5_5 + e1_5);
const w_f32 e6_6 = (e5_6 + e1_6);
const w_f32 e6_7 = (e5_7 + e1_7);
const w_f32 e7_0 = w_round_bf16(e6_0);
const w_f32 e7_1 = w_round_bf16(e6_1);
const w_f32 e7_2 = w_round_bf16(e6_2);
const w_f32 e7_3 = w_round_bf16(e6_3);
const w_f32 e7_4 = w_round_bf16(e6_4);
const w_f32 e7_5 = w_round_bf16(e6_5);
const w_f32 e7_6 = w_round_bf16(e6_6);
const w_f32 e7_7 = w_round_bf16(e6_7);
u16* const y0 = (u16*)out0 + (m * 512 + n);
*(uint4*)(y0) = make_uint4(w_narrow2_bf16(e7_0, e7_1), w_narrow2_bf16(e7_2, e7_3), w_narrow2_bf16(e7_4, e7_5), w_narrow2_bf16(e7_6, e7_7)); } }
}
}
}
}
