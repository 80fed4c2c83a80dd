// cuda(bn=128,consumers=2,min_ctas=1,persistent_ctas=0,pingpong=True,split_keys=False,stages=2,template=attention_tma)
// What attention by warpgroups needs of Hopper besides weft_cuda_tma.h. Includes nothing; tests bring their own.
#ifndef W_EMULATED
// what follows reads these registers behind what stands before: products in flight write them
template <int N> W_FN void w_hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
W_FN int w_unknown(int x) {  // to the compiler
  asm volatile("" : "+r"(x));
  return x;
}
W_FN bool w_any_lane(bool x) { return __any_sync(0xffffffffu, x); }
W_FN u32 w_read_acquired(const u32* p) {  // and what was written before it
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
W_FN void w_write_released(u32* p, u32 x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
#endif
#ifdef W_EMULATED
#define w_exp2 exp2f
#else
W_FN float w_exp2(float x) {  // within 2 ulp
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
#endif
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
#ifndef W_EMULATED
W_FN void w_weighted_f16(float (&d)[64], const u32 (&a)[4], u64 b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
    " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
    "  %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
    "  %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
    "  %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
    " {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
#endif
struct ENTRY_frame : w_solo {
  using w_solo::w_solo;
  static W_FN void dealloc_registers() { w_fewer_registers<40>(); }
  static W_FN void alloc_registers() { w_more_registers<232>(); }
};
extern "C" __global__ void __launch_bounds__(384, 1) ENTRY(const __grid_constant__ w_map mq, const __grid_constant__ w_map mk, const __grid_constant__ w_map mv, void* __restrict__ out0, const void* __restrict__ vs, void* st) {
static constexpr ENTRY_frame role{};
W_DYNAMIC(sm);
enum { KEYS = 32768, VALUES = KEYS + 65536, BARS = VALUES + 65536, FULLK = BARS, EMPTYK = FULLK + 16, FULLV = EMPTYK + 16, EMPTYV = FULLV + 16, FULLQ = EMPTYV + 16, EMPTYQ = FULLQ + 8, TURN = EMPTYQ + 8, KNOWN = TURN + 24, READ = KNOWN + 8, MET = READ + 8, BAD = MET + 8, OTHERS = BAD + 96 };
const u32 sb = w_shared(sm);
const int t = role.thread(), lane = t & 31, warp = t >> 5;
// rings of keys and values: full barriers count TMA's bytes, empty ones the warps that have read a tile
if (t == 0) { for (int i = 0; i < 2; ++i) { w_bar_init(sb + FULLK + 8 * i, 1); w_bar_init(sb + EMPTYK + 8 * i, 8); w_bar_init(sb + FULLV + 8 * i, 1); w_bar_init(sb + EMPTYV + 8 * i, 8); } w_bar_init(sb + FULLQ, 1); w_bar_init(sb + EMPTYQ, 8); for (int i = 0; i < 2; ++i) w_bar_init(sb + TURN + 8 * i, 4); w_bar_init(sb + KNOWN, 3); w_bar_init(sb + READ, 8); w_bar_init(sb + MET, 4); w_bar_ready(); }
role.sync();
if (warp >= 8) {
// producer warpgroup: one thread asks TMA for queries, keys and values
role.dealloc_registers();
if (warp == 8) {
if (lane == 0) { w_map_prefetch(&mq); w_map_prefetch(&mk); w_map_prefetch(&mv); }
// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
__syncwarp(); role.pdl_wait(); role.pdl_trigger();
if (lane == 0) { u32 it = 0, job = 0;
for (int tile = role.block_x(), once = 1; once; once = 0) { const int band = tile / 256, in = tile % 256, tq = 15 - in / 16, rest = in % 16, z = band * 16 + rest, copy = 0, m0 = copy * 2048 + tq * 128; (void)z; (void)copy; (void)m0; const int count = (tq == 15 || (tq * 128 + 127) / 128 >= 16 ? 16 : tq * 128 + 127 < 0 ? 1 : (tq * 128 + 127) / 128 + 1); (void)count;
w_bar_wait(sb + EMPTYQ, job & 1 ^ 1); ++job; w_bar_expect(sb + FULLQ, 32768u);
{ const int m = m0; (void)m; w_tma(&mq, sb, sb + FULLQ, 0, m, z); }
{ const int m = m0; (void)m; w_tma(&mq, sb + 8192, sb + FULLQ, 64, m, z); }
{ const int m = m0 + 64; (void)m; w_tma(&mq, sb + 16384, sb + FULLQ, 0, m, z); }
{ const int m = m0 + 64; (void)m; w_tma(&mq, sb + 24576, sb + FULLQ, 64, m, z); }
#pragma unroll 1
for (int i = count - 1; i >= 0; --i, ++it) {
const int n = i * 128; const u32 slot = it % 2, phase = it / 2 & 1; (void)n;
{ const u32 bar = sb + FULLK + 8 * slot, to = sb + KEYS + slot * 32768; w_bar_wait(sb + EMPTYK + 8 * slot, phase ^ 1); w_bar_expect(bar, 32768u); w_tma(&mk, to, bar, 0, n, z); w_tma(&mk, to + 16384, bar, 64, n, z); }
{ const u32 bar = sb + FULLV + 8 * slot, to = sb + VALUES + slot * 32768; w_bar_wait(sb + EMPTYV + 8 * slot, phase ^ 1); w_bar_expect(bar, 32768u); w_tma(&mv, to, bar, 0, n, z); w_tma(&mv, to + 16384, bar, 64, n, z); }
}
}
}
} else {
// the values of keys that a mask hides: what is not finite there makes its column NaN
role.pdl_wait(); role.pdl_trigger(); const int part = warp - 9; u32 job = 0;
for (int tile = role.block_x(), once = 1; once; once = 0) { const int band = tile / 256, in = tile % 256, tq = 15 - in / 16, rest = in % 16, z = band * 16 + rest, copy = 0, m0 = copy * 2048 + tq * 128; (void)z; (void)copy; (void)m0; const int count = (tq == 15 || (tq * 128 + 127) / 128 >= 16 ? 16 : tq * 128 + 127 < 0 ? 1 : (tq * 128 + 127) / 128 + 1); (void)count;
u32* const said = (u32*)st + z * 241;
u32 bad[4];
#pragma unroll
for (int w = 0; w < 4; ++w) bad[w] = 0;
if (tq > 0 && copy == 0) {
const int c = lane % 16, stop = (tq == 15 || (tq * 128 + 127) / 128 >= 16 ? 16 : tq * 128 + 127 < 0 ? 1 : (tq * 128 + 127) / 128 + 1) * 128 < 2048 ? (tq == 15 || (tq * 128 + 127) / 128 >= 16 ? 16 : tq * 128 + 127 < 0 ? 1 : (tq * 128 + 127) / 128 + 1) * 128 : 2048; u32 f[4] = {0, 0, 0, 0};
if (lane < 32) {
#pragma unroll 4
for (int n = ((tq - 1) == 15 || ((tq - 1) * 128 + 127) / 128 >= 16 ? 16 : (tq - 1) * 128 + 127 < 0 ? 1 : ((tq - 1) * 128 + 127) / 128 + 1) * 128 + part * 2 + lane / 16; n < stop; n += 6) {
const uint4 x = *(const uint4*)((const u16*)vs + ((c * 8) + z * 262144 + n * 128)); f[0] |= (x.x & 0x7c007c00u) + 0x4000400u; f[1] |= (x.y & 0x7c007c00u) + 0x4000400u; f[2] |= (x.z & 0x7c007c00u) + 0x4000400u; f[3] |= (x.w & 0x7c007c00u) + 0x4000400u; }
}
u32 bits = 0;
#pragma unroll
for (int k = 0; k < 4; ++k) bits |= (f[k] >> 15 & 1) << 2 * k | f[k] >> 31 << (2 * k + 1);
#pragma unroll
for (int w = 0; w < 4; ++w) bad[w] = c >> 2 == w ? bits << (c & 3) * 8 : 0;
#pragma unroll
for (int w = 0; w < 4; ++w)
#pragma unroll
for (int b = 0; b < 5; ++b) bad[w] |= w_shfl_word(bad[w], 1 << b);
u32* const mine = said + 1 + (tq * 3 + part) * 5;
if (lane == 0) {
#pragma unroll
for (int w = 0; w < 4; ++w) mine[1 + w] = bad[w];
w_write_released(mine, 1); }
#pragma unroll
for (int w = 0; w < 4; ++w) bad[w] = 0;
}
for (int other = tq + 1 + lane; other < 16; other += 32) {
const u32* const its = said + 1 + (other * 3 + part) * 5;
while (!w_read_acquired(its)) {}
#pragma unroll
for (int w = 0; w < 4; ++w) bad[w] |= w_fresh(its + 1 + w);
}
#pragma unroll
for (int w = 0; w < 4; ++w)
#pragma unroll
for (int b = 0; b < 5; ++b) bad[w] |= w_shfl_word(bad[w], 1 << b);
w_bar_wait(sb + READ, job & 1 ^ 1); ++job;
if (lane == 0) {
#pragma unroll
for (int w = 0; w < 4; ++w)
((u32*)(sm + BAD))[part * 4 + w] = bad[w];
w_bar_arrive(sb + KNOWN); }
u32 last = 0; if (lane == 0) last = w_last_arrival(said, 48u);
#pragma unroll
for (int b = 0; b < 5; ++b) last |= w_shfl_word(last, 1 << b);
if (last) for (int x = lane; x < 240; x += 32) said[1 + x] = 0;
}
}
} else {
// consumer warpgroups: scores and results by wgmma, softmax in registers between them
role.alloc_registers();
role.pdl_wait(); role.pdl_trigger();
const int group = warp >> 2, row = group * 64 + (warp & 3) * 16 + (lane >> 2);
const u64 dq = w_operand_at(sb + (u32)(group * 64 * 256), 16, 1024, 1);
u32 it = 0, job = 0, turn = 0;
for (int tile = role.block_x(), once = 1; once; once = 0) { const int band = tile / 256, in = tile % 256, tq = 15 - in / 16, rest = in % 16, z = band * 16 + rest, copy = 0, m0 = copy * 2048 + tq * 128; (void)z; (void)copy; (void)m0; const int count = (tq == 15 || (tq * 128 + 127) / 128 >= 16 ? 16 : tq * 128 + 127 < 0 ? 1 : (tq * 128 + 127) / 128 + 1); (void)count;
float o[64], s[64], top[2], total[2]; u32 w[8][4];
#pragma unroll
for (int j = 0; j < 64; ++j) o[j] = 0.0f;
top[0] = top[1] = -__builtin_inff(); total[0] = total[1] = 0.0f;
int limit[2];
#pragma unroll
for (int h = 0; h < 2; ++h) { const int x = tq * 128 + row + 8 * h; limit[h] = x < 2047 ? x : 2047; }
const int seen = tq * 128 + group * 64 + 1, full = seen < 128 ? 0 : (seen < 2048 ? seen : 2048) / 128;
w_bar_wait(sb + FULLQ, job & 1); ++job;
{ const int i = count - 1; (void)i;
const u32 slot = it % 2, phase = it / 2 & 1;
w_bar_wait(sb + FULLK + 8 * slot, phase);
{ const u64 dk = w_operand_at(sb + KEYS + slot * 32768, 16, 1024, 1);
w_group_begin();
#pragma unroll
for (int kk = 0; kk < 8; ++kk) w_product_f16_00(s, dq + (kk / 4 * 512 + kk % 4 * 2), dk + (kk / 4 * 1024 + kk % 4 * 2), kk);
w_group_commit(); }
w_group_wait<0>(); w_hold(s);
if (lane == 0) w_bar_arrive(sb + EMPTYK + 8 * slot);
// keys that a row does not see, or that do not exist
if (i >= full) {
#pragma unroll
for (int j = 0; j < 16; ++j)
#pragma unroll
for (int h = 0; h < 2; ++h)
#pragma unroll
for (int e = 0; e < 2; ++e) { const int at = i * 128 + j * 8 + (lane & 3) * 2 + e;
if (at > limit[h]) s[4 * j + 2 * h + e] = -__builtin_inff(); }
}
// online softmax: exponentials on the scale of a row's maximum so far; four lanes share a row
float most[2][2], sums[2][2];
#pragma unroll
for (int h = 0; h < 2; ++h)
#pragma unroll
for (int e = 0; e < 2; ++e) { most[h][e] = s[2 * h + e]; sums[h][e] = 0.0f; }
#pragma unroll
for (int j = 0; j < 16; ++j)
#pragma unroll
for (int h = 0; h < 2; ++h)
#pragma unroll
for (int e = 0; e < 2; ++e) most[h][e] = w_max_f32(most[h][e], s[4 * j + 2 * h + e]);
float low[2], base[2];
#pragma unroll
for (int h = 0; h < 2; ++h) {
float x = w_max_f32(most[h][0], most[h][1]);
x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 1)));
x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 2)));
low[h] = x == -__builtin_inff() ? 0.0f : x;
base[h] = low[h] * 0.127517431974411f;
top[h] = x;
}
#pragma unroll
for (int j = 0; j < 16; ++j)
#pragma unroll
for (int h = 0; h < 2; ++h)
#pragma unroll
for (int e = 0; e < 2; ++e) { s[4 * j + 2 * h + e] = w_exp2(fmaf(s[4 * j + 2 * h + e], 0.127517431974411f, -base[h])); sums[h][e] += s[4 * j + 2 * h + e]; }
#pragma unroll
for (int h = 0; h < 2; ++h) total[h] = (sums[h][0] + sums[h][1]);
// sums of products are, rounded, the left operand of the next product as they stand
#pragma unroll
for (int q = 0; q < 8; ++q)
#pragma unroll
for (int e = 0; e < 4; ++e)
w[q][e] = w_narrow2_f16(s[8 * q + 2 * e], s[8 * q + 2 * e + 1]);
if (i >= 1) w_bar_wait(sb + FULLK + 8 * ((it + 1) % 2), (it + 1) / 2 & 1);
}
// the scores of a tile run beside the results of the one before, its softmax beside those
#pragma unroll 1
for (int i = count - 2; i >= 0; i -= 1, it += 1) {
const u32 slot = it % 2, phase = it / 2 & 1, next = (it + 1) % 2;
// ping-pong: warpgroups issue products in turn
w_bar_wait(sb + TURN + 8 * group, (group == 0 ? turn + 1 : turn) & 1); ++turn;
{ const u64 dk = w_operand_at(sb + KEYS + next * 32768, 16, 1024, 1);
w_group_begin();
#pragma unroll
for (int kk = 0; kk < 8; ++kk) w_product_f16_00(s, dq + (kk / 4 * 512 + kk % 4 * 2), dk + (kk / 4 * 1024 + kk % 4 * 2), kk);
w_group_commit(); }
{ w_bar_wait(sb + FULLV + 8 * slot, phase);
const u64 dv = w_operand_at(sb + VALUES + slot * 32768, 16384, 1024, 1);
w_group_begin();
#pragma unroll
for (int q = 0; q < 8; ++q) w_weighted_f16(o, w[q], dv + q * 128);
w_group_commit(); }
if (lane == 0) w_bar_arrive(sb + TURN + 8 * (group + 1 == 2 ? 0 : group + 1));
w_group_wait<1>(); w_hold(s);
if (lane == 0) w_bar_arrive(sb + EMPTYK + 8 * next);
// keys that a row does not see, or that do not exist
if (i >= full) {
#pragma unroll
for (int j = 0; j < 16; ++j)
#pragma unroll
for (int h = 0; h < 2; ++h)
#pragma unroll
for (int e = 0; e < 2; ++e) { const int at = i * 128 + j * 8 + (lane & 3) * 2 + e;
if (at > limit[h]) s[4 * j + 2 * h + e] = -__builtin_inff(); }
}
// online softmax: exponentials on the scale of a row's maximum so far; four lanes share a row
float most[2][2], sums[2][2];
#pragma unroll
for (int h = 0; h < 2; ++h)
#pragma unroll
for (int e = 0; e < 2; ++e) { most[h][e] = s[2 * h + e]; sums[h][e] = 0.0f; }
#pragma unroll
for (int j = 0; j < 16; ++j)
#pragma unroll
for (int h = 0; h < 2; ++h)
#pragma unroll
for (int e = 0; e < 2; ++e) most[h][e] = w_max_f32(most[h][e], s[4 * j + 2 * h + e]);
float old[2];
float low[2], base[2];
#pragma unroll
for (int h = 0; h < 2; ++h) {
float x = w_max_f32(most[h][0], most[h][1]);
x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 1)));
x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), 2)));
x = w_max_f32(x, top[h]);
low[h] = x == -__builtin_inff() ? 0.0f : x;
old[h] = w_exp2((top[h] - low[h]) * 0.127517431974411f);
base[h] = low[h] * 0.127517431974411f;
top[h] = x;
}
#pragma unroll
for (int j = 0; j < 16; ++j)
#pragma unroll
for (int h = 0; h < 2; ++h)
#pragma unroll
for (int e = 0; e < 2; ++e) { s[4 * j + 2 * h + e] = w_exp2(fmaf(s[4 * j + 2 * h + e], 0.127517431974411f, -base[h])); sums[h][e] += s[4 * j + 2 * h + e]; }
#pragma unroll
for (int h = 0; h < 2; ++h) total[h] = total[h] * old[h] + (sums[h][0] + sums[h][1]);
w_hold(s);
if (i >= 1) w_bar_wait(sb + FULLK + 8 * ((it + 2) % 2), (it + 2) / 2 & 1);
w_group_wait<0>(); w_hold(o);
if (lane == 0) w_bar_arrive(sb + EMPTYV + 8 * slot);
#pragma unroll
for (int j = 0; j < 64; ++j) o[j] *= old[j >> 1 & 1];
// sums of products are, rounded, the left operand of the next product as they stand
#pragma unroll
for (int q = 0; q < 8; ++q)
#pragma unroll
for (int e = 0; e < 4; ++e)
w[q][e] = w_narrow2_f16(s[8 * q + 2 * e], s[8 * q + 2 * e + 1]);
}
if (lane == 0) w_bar_arrive(sb + EMPTYQ);
{ const u32 slot = it % 2, phase = it / 2 & 1; ++it;
w_group_begin();
{ w_bar_wait(sb + FULLV + 8 * slot, phase);
const u64 dv = w_operand_at(sb + VALUES + slot * 32768, 16384, 1024, 1);
w_group_begin();
#pragma unroll
for (int q = 0; q < 8; ++q) w_weighted_f16(o, w[q], dv + q * 128);
w_group_commit(); }
w_group_wait<0>(); w_hold(o);
if (lane == 0) w_bar_arrive(sb + EMPTYV + 8 * slot);
}
w_bar_wait(sb + KNOWN, job - 1 & 1);
// epilogue: four neighbouring lanes exchange, so that each stores 8 neighbours
#pragma unroll
for (int h = 0; h < 2; ++h) {
float x = total[h];
x += __uint_as_float(w_shfl_word(__float_as_uint(x), 1));
x += __uint_as_float(w_shfl_word(__float_as_uint(x), 2));
const float all = 1.0f / x;
const int m = m0 + row + 8 * h;
#pragma unroll
for (int j = 0; j < 4; ++j) { float v[8];
v[0] = o[4 * j * 4 + 2 * h] * all; v[1] = o[4 * j * 4 + 2 * h + 1] * all; v[2] = o[(4 * j + 1) * 4 + 2 * h] * all; v[3] = o[(4 * j + 1) * 4 + 2 * h + 1] * all; v[4] = o[(4 * j + 2) * 4 + 2 * h] * all; v[5] = o[(4 * j + 2) * 4 + 2 * h + 1] * all; v[6] = o[(4 * j + 3) * 4 + 2 * h] * all; v[7] = o[(4 * j + 3) * 4 + 2 * h + 1] * all;
w_quad(v, lane);
const int c = j * 32 + (lane & 3) * 8;
if (m < 2048) {
const u32* const bad = (const u32*)(sm + BAD); const u32 flags = (bad[(c >> 5)] | bad[4 + (c >> 5)] | bad[8 + (c >> 5)]) >> (c & 31) & 255u;
if (flags) {
#pragma unroll
for (int e = 0; e < 8; ++e) if (flags >> e & 1) v[e] = __builtin_nanf(""); }
u16* const y = (u16*)out0 + (z * 262144 + m * 128 + c);
{ *(uint4*)(y) = make_uint4(w_narrow2_f16(v[0], v[1]), w_narrow2_f16(v[2], v[3]), w_narrow2_f16(v[4], v[5]), w_narrow2_f16(v[6], v[7])); }
}
}
}
w_together(); if (lane == 0) w_bar_arrive(sb + READ);
}
}
}
