// cuda(columns=128,group=True,persistent_ctas=1,stages=6,template=mlp_wide,warps=4)
#ifndef W_EMULATED
W_FN void w_wgmma_bf16(float (&d)[8], const u32 (&a)[4], u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
    " {%0, %1, %2, %3, %4, %5, %6, %7},"
    " {%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
#endif
#ifndef W_EMULATED
W_FN void w_wgmma_bf16(float (&d)[48], const u32 (&a)[4], u64 b, int add) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %53, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16"
    " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
    "  %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
    "  %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47},"
    " {%48, %49, %50, %51}, %52, p, 1, 1, 0; }"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
#endif
extern "C" __global__ void ENTRY_pack(const void* __restrict__ in1, const void* __restrict__ in2, const void* __restrict__ in3, const void* __restrict__ in4, const void* __restrict__ in5, const void* __restrict__ in6, void* __restrict__ pk) {
static constexpr w_solo role{};
u32 i = role.block_x() * 256u + role.thread();
// panels of 64 of the sum, rows of 128 bytes, swizzled as wgmma reads them
if (i < 18432u) { const u32 pn = i / 6144 * 96 + i % 6144 % 6144 / 64, pk_ = i % 6144 / 6144 * 64 + ((i % 6144 % 6144 / 8 % 8) ^ (i % 6144 % 6144 / 64 % 8)) * 8 + i % 8;
const u32 n = pn;
const u32 k = pk_;
u16 v = 0; if (n < 288 && k < 40) v = ((const u16*)in1)[k * 288 + n];
((u16*)((char*)pk))[i] = v; return; }
i -= 18432u;
// panels of 64 of the sum, rows of 128 bytes, swizzled as wgmma reads them
if (i < 92160u) { const u32 pn = i / 30720 * 96 + i % 30720 % 6144 / 64, pk_ = i % 30720 / 6144 * 64 + ((i % 30720 % 6144 / 8 % 8) ^ (i % 30720 % 6144 / 64 % 8)) * 8 + i % 8;
const u32 n = pn;
const u32 k = (pk_ < 288u ? pk_ : 288u);
u16 v = 0; if (n < 288 && k < 288) v = ((const u16*)in3)[k * 288 + n];
((u16*)((char*)pk + 36864))[i] = v; return; }
i -= 92160u;
// panels of 64 of the sum, rows of 128 bytes, swizzled as wgmma reads them
if (i < 5120u) { const u32 pn = i % 1024 / 64, pk_ = i / 1024 * 64 + ((i % 1024 / 8 % 8) ^ (i % 1024 / 64 % 8)) * 8 + i % 8;
const u32 n = pn;
const u32 k = (pk_ < 288u ? pk_ : 288u);
u16 v = 0; if (n < 5 && k < 288) v = ((const u16*)in5)[k * 5 + n];
((u16*)((char*)pk + 221184))[i] = v; return; }
i -= 5120u;
if (i < 288u) { float v = 0.0f; if (i < 288) v = (float)w_unpack_bf16(*((const u16*)in2 + i)).x; ((float*)((char*)pk + 231424))[i] = v; return; }
i -= 288u;
if (i < 288u) { float v = 0.0f; if (i < 288) v = (float)w_unpack_bf16(*((const u16*)in4 + i)).x; ((float*)((char*)pk + 232576))[i] = v; return; }
i -= 288u;
if (i < 16u) { float v = 0.0f; if (i < 5) v = (float)w_unpack_bf16(*((const u16*)in6 + i)).x; ((float*)((char*)pk + 233728))[i] = v; return; }
i -= 16u;
}
extern "C" __global__ void __launch_bounds__(128, 1) ENTRY(const void* __restrict__ in0, const void* __restrict__ pk, void* __restrict__ out0) {
static constexpr w_solo role{};
W_DYNAMIC(sm);
const int t = role.thread(), lane = t & 31, warp = t >> 5, q = lane & 3, g = lane >> 2;
const int owner = warp >> 2;
const u16* const x = (const u16*)in0;
u16* const out = (u16*)out0;
(void)q; (void)g; (void)lane;
// panels of weights come through a ring, in the order in which they are read
const u32 full = w_shared(sm) + 112960u, empty = full + 48u;
for (int i = t; i < 148; i += 128)
w_copy16(w_shared(sm) + 110592 + 16 * i, (const char*)pk + 231424 + 16 * i);
const u32 total = ((5u - 1 - role.block_x()) / role.blocks_x() + 1) * 23u;
u32 asked = 0, place = 0, at_asked = 0, slot_asked = 0, turn_asked = 0, slot = 0, parity = 0;
(void)turn_asked; (void)parity;
w_commit(); w_arrived<0>();
if (t == 0) { for (int i = 0; i < 6; ++i) { w_bar_init(full + 8 * i, 1); w_bar_init(empty + 8 * i, 4); } w_bar_ready(); }
role.sync();
auto ask = [&]() {
if (asked < total) {
const u32 size = at_asked <= 17u ? 12288u : (2048u);
if (turn_asked) w_bar_wait(empty + 8 * slot_asked, (turn_asked - 1) & 1);
w_bar_expect(full + 8 * slot_asked, size);
w_bulk(w_shared(sm) + 36864 + (slot_asked * 12288u), (const char*)pk + place, size, full + 8 * slot_asked);
++asked; place += size; if (++at_asked == 23) { at_asked = 0; place = 0; }
if (++slot_asked == 6) { slot_asked = 0; ++turn_asked; }
}
};
if (t == 0) for (int i = 0; i < 3; ++i) ask();
// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start
role.pdl_wait(); role.pdl_trigger();
auto load = [&](int row, u32 (&to)[1][3][4]) {
#pragma unroll
for (int m = 0; m < 1; ++m)
#pragma unroll
for (int half = 0; half < 2; ++half) {
const int r = row + m * 64 + half * 8 + g;
const u16* const from = x + (u64)(r < 300 ? r : 299) * 40;
#pragma unroll
for (int c = 0; c < 6; ++c) {
u32 w = 0; if (c * 8 + 2 * q < 40) w = *(const u32*)(from + c * 8 + q * 2);
to[m][c / 2][c % 2 * 2 + half] = w;
}
}
};
#pragma unroll 1
for (int turn = role.block_x(); turn < 5; turn += role.blocks_x()) {
const int row0 = (turn + owner) * 64 + (warp & 3) * 16;
{  // layer 1, 96 columns at a time
u32 a[1][3][4];
load(row0, a);
#pragma unroll 1
for (int c = 0; c < 3; ++c) {
float d[48];
{
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 3; ++k) w_wgmma_bf16(d, a[0][k], w_descriptor(w + k * 32), k);
}
w_group_commit();
u32 before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
w_group_wait<0>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
#pragma unroll
for (int e = 0; e < (int)(sizeof d / 4); ++e) w_hold(d[e]);
}
#pragma unroll
for (int pair = 0; pair < 6; ++pair) { const int j0 = c * 12 + 2 * pair;
u32 o8[4];
#pragma unroll
for (int b = 0; b < 2; ++b) { const int i = 2 * pair + b, j = j0 + b;
const float2 b4 = *(const float2*)(sm + 110592 + (j * 8 + 2 * q) * 4); (void)b4;
#pragma unroll
for (int half = 0; half < 2; ++half) {
const w_f32 e5_0 = (d[4 * i + (2 * half)] + b4.x);
const w_f32 e5_1 = (d[4 * i + (2 * half + 1)] + b4.y);
o8[b * 2 + half] = w_relu2_bf16(e5_0, e5_1);
}
}
*(uint4*)(sm + ((j0 / 2) * 128 + t) * 16) = make_uint4(o8[0], o8[1], o8[2], o8[3]);
}
}
}
{  // layer 2, 96 columns at a time
u32 a[1][18][4];
#pragma unroll
for (int k = 0; k < 18; ++k) { const uint4 w = *(uint4*)(sm + (k * 128 + t) * 16); a[0][k][0] = w.x; a[0][k][1] = w.y; a[0][k][2] = w.z; a[0][k][3] = w.w; }
#pragma unroll 1
for (int c = 0; c < 3; ++c) {
float d[48];
{
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 4; ++k) w_wgmma_bf16(d, a[0][k], w_descriptor(w + k * 32), k);
}
w_group_commit();
u32 before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 4; ++k) w_wgmma_bf16(d, a[0][4 + k], w_descriptor(w + k * 32), 4 + k);
}
w_group_commit();
w_group_wait<1>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 4; ++k) w_wgmma_bf16(d, a[0][8 + k], w_descriptor(w + k * 32), 8 + k);
}
w_group_commit();
w_group_wait<1>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 4; ++k) w_wgmma_bf16(d, a[0][12 + k], w_descriptor(w + k * 32), 12 + k);
}
w_group_commit();
w_group_wait<1>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 2; ++k) w_wgmma_bf16(d, a[0][16 + k], w_descriptor(w + k * 32), 16 + k);
}
w_group_commit();
w_group_wait<1>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
w_group_wait<0>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
#pragma unroll
for (int e = 0; e < (int)(sizeof d / 4); ++e) w_hold(d[e]);
}
#pragma unroll
for (int pair = 0; pair < 6; ++pair) { const int j0 = c * 12 + 2 * pair;
const uint4 f8 = *(uint4*)(sm + ((j0 / 2) * 128 + t) * 16);
u32 o22[4];
#pragma unroll
for (int b = 0; b < 2; ++b) { const int i = 2 * pair + b, j = j0 + b;
const float2 b12 = *(const float2*)(sm + 111744 + (j * 8 + 2 * q) * 4); (void)b12;
#pragma unroll
for (int half = 0; half < 2; ++half) {
const float2 k8 = w_unpack_bf16(i % 2 ? (half ? f8.w : f8.z) : (half ? f8.y : f8.x));
const w_f32 e13_0 = (d[4 * i + (2 * half)] + b12.x);
const w_f32 e13_1 = (d[4 * i + (2 * half + 1)] + b12.y);
const w_f32 e14_0 = e13_0;
const w_f32 e14_1 = e13_1;
const w_f32 e15_0 = (-e14_0);
const w_f32 e15_1 = (-e14_1);
const w_f32 e20_0 = w_mlp_share_short(e14_0, e15_0);
const w_f32 e20_1 = w_mlp_share_short(e14_1, e15_1);
const w_f32 e21_0 = w_round_bf16(e20_0);
const w_f32 e21_1 = w_round_bf16(e20_1);
const w_f32 e22_0 = (e21_0 + k8.x);
const w_f32 e22_1 = (e21_1 + k8.y);
o22[b * 2 + half] = w_narrow2_bf16(e22_0, e22_1);
}
}
*(uint4*)(sm + ((j0 / 2) * 128 + t) * 16) = make_uint4(o22[0], o22[1], o22[2], o22[3]);
}
}
}
{  // layer 3, 16 columns at a time
u32 a[1][18][4];
#pragma unroll
for (int k = 0; k < 18; ++k) { const uint4 w = *(uint4*)(sm + (k * 128 + t) * 16); a[0][k][0] = w.x; a[0][k][1] = w.y; a[0][k][2] = w.z; a[0][k][3] = w.w; }
{ const int c = 0;
float d[8];
#pragma unroll
for (int i = 0; i < 2; ++i) { const int j = c * 2 + i; (void)j;
const float2 b = *(const float2*)(sm + 112896 + ((j * 8 + 2 * q) * 4));
d[4 * i] = b.x;
d[4 * i + 1] = b.y;
d[4 * i + 2] = b.x;
d[4 * i + 3] = b.y;
}
{
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 4; ++k) w_wgmma_bf16(d, a[0][k], w_descriptor(w + k * 32), 1);
}
w_group_commit();
u32 before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 4; ++k) w_wgmma_bf16(d, a[0][4 + k], w_descriptor(w + k * 32), 1);
}
w_group_commit();
w_group_wait<1>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 4; ++k) w_wgmma_bf16(d, a[0][8 + k], w_descriptor(w + k * 32), 1);
}
w_group_commit();
w_group_wait<1>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 4; ++k) w_wgmma_bf16(d, a[0][12 + k], w_descriptor(w + k * 32), 1);
}
w_group_commit();
w_group_wait<1>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
if (t == 0) ask();
__syncwarp();
w_bar_wait(full + 8 * slot, parity); w_group_begin();
{ const u32 w = w_shared(sm) + 36864 + (slot * 12288u);
#pragma unroll
for (int k = 0; k < 2; ++k) w_wgmma_bf16(d, a[0][16 + k], w_descriptor(w + k * 32), 1);
}
w_group_commit();
w_group_wait<1>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
before = slot;
if (++slot == 6) { slot = 0; parity ^= 1; }
w_group_wait<0>(); __syncwarp(); if (lane == 0) w_bar_arrive(empty + 8 * before);
#pragma unroll
for (int e = 0; e < (int)(sizeof d / 4); ++e) w_hold(d[e]);
}
#pragma unroll
for (int cc = 0; cc < 2; ++cc) { float y[2][2];
const int column = c * 16 + cc * 8;
#pragma unroll
for (int b = 0; b < 1; ++b) { const int i = cc + b, j = c * 2 + i;
const int j0 = j & ~1; (void)j0;
#pragma unroll
for (int half = 0; half < 2; ++half) {
y[half][2 * b] = d[4 * i + (2 * half)];
y[half][2 * b + 1] = d[4 * i + (2 * half + 1)];
}
}
#pragma unroll
for (int half = 0; half < 2; ++half) { const int r = row0 + half * 8 + g;
if (r < 300 && column < 5) { u16* const to = out + (u64)r * 5 + column;
if (column + (2 * q) < 5) {
*(to + (2 * q)) = (u16)w_narrow2_bf16(y[half][0], 0.0f);
}
if (column + (2 * q) + 1 < 5) {
*(to + (2 * q) + 1) = (u16)w_narrow2_bf16(y[half][1], 0.0f);
}
}
}
}
}
}
}
}
